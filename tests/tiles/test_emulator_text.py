"""tiles/emulator/text.py and flow.py: what a text of PTX says, and where lanes that part meet again."""

import re

import pytest

from tiles.emulator.flow import pressure, reconvergence_points
from tiles.emulator.table import TYPES, literal, meaning
from tiles.emulator.text import Address, Imm, Reg, Symbol, read


def program(body, parameters=".param .u64 p"):
    """The program of an entry with this body."""
    return read(f'.version 8.0\n.file 1 "one.py"\n.file 2 "dir/two.py"\n.visible .entry kernel({parameters})\n{{\n{body}\n}}\n')


def only(body):
    """The one instruction of a body."""
    (at,) = program(body).code
    return at


# ---- statements ----------------------------------------------------------------------------------------------------
def test_parameters_lie_as_the_driver_puts_them():
    """Numbers at multiples of their size, maps of 64 bytes, whatever stands between."""
    actual = program("ret;", ".param .u32 n,\n.param .u64 p,\n.param .align 64 .b8 map[128],\n.param .f32 x").parameters
    assert actual == {"n": (0, 4), "p": (8, 8), "map": (64, 128), "x": (192, 4)}


def test_registers_by_number_and_by_name():
    actual = program(
        ".reg .b64 %rd<3>;\n.reg .pred %p<2>;\n.reg .b16 lo, hi;\nmov.b64 %rd1, %rd2;\nmov.b16 lo, hi;\nmov.b64 %rd2, %rd1;"
    )
    first, second, third = (at.operands for at in actual.code)
    assert [reg.width for reg in first + second] == [8, 8, 2, 2]
    assert first == third[::-1] and len({reg.slot for reg in first + second}) == 4


def test_scopes_have_registers_and_labels_of_their_own():
    """As inline assembly opens them: the same names twice, and the outer ones inside."""
    actual = program(
        """
        .reg .b32 x, y;
        mov.b32 x, y;
        { .reg .b32 x; again: mov.b32 x, y; bra again; }
        { .reg .b64 x; again: mov.b64 x, 1; bra again; }
        mov.b32 x, y;
        """
    )
    outer, inner, _, other, _, last = actual.code
    assert outer.operands == last.operands and outer.operands[1] == inner.operands[1]
    assert len({at.operands[0].slot for at in (outer, inner, other)}) == 3 and other.operands[0].width == 8
    assert [at.target for at in actual.code] == [None, None, 1, None, 3, None]


def test_a_jump_forward_and_one_out_of_a_scope():
    actual = program("bra end;\n{ bra end; }\n$L_1: bra $L_1;\nend: ret;")
    assert [at.target for at in actual.code] == [3, 3, 2, None]
    with pytest.raises(ValueError, match="no label nowhere"):
        program("bra nowhere;")


def test_guards():
    mov, ret = program(".reg .pred p;\n@p mov.b32 a, 1;\n@!p ret;").code
    assert (mov.opcode, mov.guard.width, mov.negated) == ("mov.b32", 1, False)
    assert (ret.opcode, ret.guard, ret.negated) == ("ret", mov.guard, True)


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [("-5", "s32", -5), ("-1", "u32", 2**32 - 1), ("0x1F", "u32", 31), ("4294967295", "s32", -1), ("7U", "u16", 7)]
    + [("0f3F800000", "f32", 1.0), ("0F7F800000", "f32", float("inf")), ("0d3FF8000000000000", "f64", 1.5), ("1", "pred", True)]
    + [("0fBF800000", "f64", -1.0), ("0xFFFF", "s16", -1)],
)
def test_immediates(text, kind, value):
    assert only(f".reg .b32 x;\nmov.{kind} x, {text};").operands[1] == Imm(text)
    assert literal(text, TYPES[kind]) == value


def test_vectors_addresses_and_names():
    declared = ".reg .b32 a, b, c, d;\n.reg .b64 p, m;\n"
    where, values = only(declared + "st.shared.v4.b32 [p+-16], {a, b, c, d};").operands
    assert (where.base.width, where.offset, where.coordinates) == (8, -16, ()) and len(values) == 4
    to, source, bar = only(declared + "cp.async [a], [m, {b, c, 3}], [d+8];").operands
    assert to == Address(to.base, 0) and bar.offset == 8
    assert source.coordinates[2] == Imm("3") and all(isinstance(x, Reg) for x in source.coordinates[:2])
    (unpacked, _), *_ = [at.operands for at in program(declared + "mov.b64 {a, _}, p;").code]
    assert isinstance(unpacked[0], Reg) and unpacked[1] == Symbol("_")
    pair, special, symbol = only(declared + "shfl.sync.bfly.b32 a|b, %tid.x, dynamic_smem;").operands
    assert len(pair) == 2 and special == Symbol("%tid.x") and symbol == Symbol("dynamic_smem")


def test_lines_of_python_and_of_the_text():
    """An instruction comes from the line named last; one of line 0 is the compiler's own, and belongs to the one before."""
    actual = program(
        ".loc 1 12 3\nret;\n.loc 2 7 0, function_name info, inlined_at 1 12 3\nret;\n// a note; ret;\n.loc 1 0 0\nret;"
    ).code
    assert [at.place for at in actual] == [("one.py", 12), ("dir/two.py", 7), ("dir/two.py", 7)]
    assert [at.number for at in actual] == [7, 9, 12]
    assert program("ret;").code[0].place == ("?", 0)


def test_a_text_that_cannot_be_read_is_named():
    with pytest.raises(ValueError, match=r"PTX line 7: .*this is no statement"):
        program("ret;\nthis is no statement")


def test_an_instruction_without_a_meaning_is_named():
    at = only(".reg .b32 x;\nbrev.b32 x, x;")
    with pytest.raises(NotImplementedError, match=re.escape("PTX line 7: no meaning for brev.b32: `brev.b32 x, x`")):
        meaning(at)


# ---- where lanes meet ----------------------------------------------------------------------------------------------
def met(body):
    """The instruction, by its text, before which the lanes that part at each guarded branch meet."""
    actual = program(".reg .pred p, q;\n" + body)
    where = reconvergence_points(actual)
    name = lambda k: actual.code[k].text if k < len(actual.code) else "the end"
    return [name(where[k]) for k, at in enumerate(actual.code) if at.guard is not None]


def test_if():
    assert met("@p bra over; in; over: after; ret;") == ["after"]


def test_if_and_else():
    assert met("@p bra other; one; bra over; other: two; over: after; ret;") == ["after"]


def test_a_loop():
    """Who leaves waits behind it, however often the others go round."""
    assert met("again: body; @p bra again; after; ret;") == ["after"]
    assert met("again: @p bra over; body; bra again; over: after; ret;") == ["after"]


def test_a_branch_in_a_loop_and_a_loop_in_a_branch():
    assert met("again: @q bra next; body; next: more; @p bra again; after; ret;") == ["more", "after"]
    assert met("@q bra over; again: body; @p bra again; inside; over: after; ret;") == ["after", "inside"]


def test_two_ways_out_of_a_loop():
    """break: the lanes meet where both ways are one, and not before."""
    body = "again: body; @p bra early; more; @q bra again; normal; bra over; early: other; over: after; ret;"
    assert met(body) == ["after", "after"]


def test_nested_branches():
    body = "@p bra other; @q bra inner; one; inner: two; bra over; other: three; over: after; ret;"
    assert met(body) == ["after", "two"]


def test_one_side_that_ends():
    """Where one way returns there is nowhere to meet but the end; a return that is guarded parts nobody."""
    assert met("@p bra over; ret; over: after; ret;") == ["the end"]
    assert met("@p ret; after; ret;") == ["the end"]


def test_a_loop_that_nobody_leaves():
    """Dead ends have no way to the end; the rest is as if they were not there."""
    assert met("@p bra dead; after; ret; dead: bra dead;") == ["after"]


# ---- how many registers hold values ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("body", "most"),
    [
        ("mov.b32 a, 1; mov.b32 b, 2; add.u32 c, a, b; st.global.b32 [d], c; ret;", 4),  # the address, a and b
        ("mov.b32 a, 1; st.global.b32 [d], a; mov.b32 b, 2; st.global.b32 [d], b; ret;", 3),  # one after the other
        ("mov.b32 a, 1; again: mov.b32 b, 2; add.u32 b, b, b; @p bra again; st.global.b32 [d], a; ret;", 4),  # a all along
        ("mov.b32 a, 1; @p mov.b32 a, 2; mov.b32 b, 3; st.global.v2.b32 [d], {a, b}; ret;", 4),  # the old a may stay
        ("mov.b32 a, 1; mov.b32 b, 2; mov.b32 c, 3; ret;", 0),  # nobody reads them
        ("bar.sync a, b; wgmma.mma_async {c}, d, d, p; ret;", 5),  # whose first operands are read, too
    ],
)
def test_pressure(body, most):
    assert pressure(program(".reg .pred p;\n.reg .b32 a, b, c;\n.reg .b64 d;\n" + body)) == most


def test_a_text_without_a_kernel():
    with pytest.raises(ValueError, match="the text has no kernel"):
        read(".version 8.0\n.target sm_90a\n")
