"""tiles/compiling/line_table.py: chains of lines, as PTX and nvdisasm tell them."""

from tiles.compiling.line_table import APART, SourcePlace, of_ptx, of_sass
from tiles.emulator.text import read

PTX = """
.visible .entry kernel()
{
.loc 1 20 0
mov.u32 %r0, 0;
.loc 1 22 1
.loc 1 7 1, function_name $L__info_string0, inlined_at 1 22 1
.loc 2 1050000 1, function_name $L__info_string1, inlined_at 1 7 1
mov.u32 %r1, 1;
.loc 1 0 1
mov.u32 %r2, 2;
.loc 1 23 1
mov.u32 %r3, 3;
}
.file 1 "/home/k.py"
.file 2 "<row_max>"
"""
SASS = """
	//## File "/home/k.py", line 20
        /*0000*/                   MOV R0, 0 ;
	//## File "<row_max>", line 1050000 inlined at "/home/k.py", line 7
	//## File "/home/k.py", line 7 inlined at "/home/k.py", line 22
	//## File "/home/k.py", line 22
        /*0010*/                   MOV R1, 1 ;
        /*0020*/                   MOV R2, 2 ;
	//## File "/home/k.py", line 23
        /*0030*/                   MOV R3, 3 ;
"""
FIRST, HELPER, LAST = (("/home/k.py", 20),), (("/home/k.py", 7), ("/home/k.py", 22)), (("/home/k.py", 23),)
PLACES = [SourcePlace(FIRST), SourcePlace(HELPER, "row_max"), SourcePlace(HELPER, "row_max"), SourcePlace(LAST)]


def test_both_tell_the_same():
    for text, of in ((PTX, of_ptx), (SASS, of_sass)):
        assert [place for line, place in zip(text.splitlines(), of(text)) if "mov" in line.lower()] == PLACES


def test_before_the_first_line_is_nowhere():
    assert of_ptx(PTX)[0] == of_sass(SASS)[0] == SourcePlace() and str(SourcePlace()) == "?" and SourcePlace().source == ""


def test_an_op_of_an_op_is_the_one_that_the_kernel_calls():
    op = APART + 1
    assert SourcePlace.from_chain([("<cut>", op), ("<round>", op), ("k.py", 3)]) == SourcePlace((("k.py", 3),), "round")
    assert SourcePlace.from_chain([("<cut>", op)]) == SourcePlace()


def test_the_emulator_names_the_helper_and_not_the_op():
    text = PTX.replace("{", "{\n.reg .b32 %r<4>;", 1)
    assert [one.place for one in read(text).code] == [("/home/k.py", n) for n in (20, 7, 7, 23)]
