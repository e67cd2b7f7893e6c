"""Which matrix products there are: one table, by which the rules of both scopes check operands, and which their errors list.

An op's name says which operands come transposed: mma_AtB is acc + a.T @ b. A register operand whose contracted axis runs down
its rows is in column layout (see tiles/layout.py), so that in registers all four products are the same instruction.
"""

import itertools
from typing import NamedTuple

from tiles.dtypes import bf16, dtype, fp8e4m3, fp8e5m2, fp16, fp32, int8, int32, tf32
from tiles.pipeline import pipeline
from tiles.ring import ring
from tiles.types import pending, rt, st

MULTIPLE = 16  # of a product's rows and columns
SLICE = 32  # bytes along the contracted axis that one instruction takes
WIDEST = 256  # columns of a warpgroup's product


class Transposed(NamedTuple):
    """The operands of a product that are passed transposed."""

    left: bool
    right: bool

    @property
    def layouts(self):
        """The layouts, "row" or "col", of a and b in registers."""
        return "col" if self.left else "row", "row" if self.right else "col"


class Spaces(NamedTuple):
    """Where a product's operands may lie: in registers (rt), in shared memory (st)."""

    a: tuple[type, ...]
    b: tuple[type, ...]


TRANSPOSED = {
    "AB": Transposed(False, False),
    "ABt": Transposed(False, True),
    "AtB": Transposed(True, False),
    "AtBt": Transposed(True, True),
}
BF16, FP16, TF32 = ((d, d) for d in (bf16, fp16, tf32))
INT8 = int8, int8
FP8 = tuple(itertools.product((fp8e4m3, fp8e5m2), (fp8e4m3, fp8e5m2)))
ANYWHERE, B_SHARED = Spaces((rt, st), (rt, st)), Spaces((rt, st), (st,))
REGISTERS, SHARED = Spaces((rt,), (rt,)), Spaces((st,), (st,))
BYTES = {  # where operands of one byte may lie, by the form
    "AB": Spaces((rt, st), (rt,)),
    "ABt": ANYWHERE,
    "AtB": REGISTERS,
    "AtBt": Spaces((rt,), (rt, st)),
}
ROWS = {"": {rt: "m", st: "m"}, "warpgroup.": {rt: 16, st: 64}}  # of a and acc, by scope

SUPPORTED: dict[str, dict[str, dict[tuple[dtype, dtype], Spaces]]] = {
    "sm_80": {f"mma_{form}": {BF16: ANYWHERE, FP16: ANYWHERE, TF32: REGISTERS, INT8: spaces} for form, spaces in BYTES.items()},
    "sm_89": {f"mma_{form}": dict.fromkeys(FP8, spaces) for form, spaces in BYTES.items()},
    "sm_90": {
        "warpgroup.mma_AB": dict.fromkeys((BF16, FP16), B_SHARED),
        "warpgroup.mma_ABt": dict.fromkeys((BF16, FP16, TF32, INT8, *FP8), B_SHARED),
        "warpgroup.mma_AtB": dict.fromkeys((BF16, FP16), SHARED),
        "warpgroup.mma_AtBt": dict.fromkeys((BF16, FP16), SHARED),
    },
}
"""{family: {op: {dtypes of a and b: where they may lie}}}; a GPU has the families up to its own, sm_90's on Hopper alone.

What instructions read from shared memory they transpose by two bytes: where the contracted axis runs down the rows, fp8, int8
and tf32 operands must be in registers (warp), or there is no such product (warpgroup). At warp scope tf32 always is."""


def transposed_in(name):
    """Which operands of a product come transposed, by its op's name."""
    return TRANSPOSED[name.rpartition("_")[2]]


def cells(name):
    """{dtypes of a and b: where they may lie} of the op, through all families."""
    return {dtypes: spaces for rows in SUPPORTED.values() for dtypes, spaces in rows.get(name, {}).items()}


def _dtypes(pairs):
    """Pairs of dtypes, of a and of b, in words."""
    same_dtypes = [f"both {a}" for a, _ in pairs if a.itemsize > 1] + ["both int8 (acc of int32)"] * (INT8 in pairs)
    return " or ".join(same_dtypes + ["each fp8e4m3 or fp8e5m2"] * (FP8[0] in pairs))


def _names(pairs):
    """The dtypes of a, in words."""
    return ", ".join(dict.fromkeys(str(a) for a, _ in pairs))


def _words(name, spaces, pairs):
    """The pairs of dtypes that the op takes, as text."""
    transposed, rows = transposed_in(name), ROWS[name[: name.index("mm")]]

    def describe_operand(kinds, layout, shape):
        note = {rt: ", col" * (layout == "col"), st: ""}
        return " or ".join(f"{kind.__name__}({shape(kind)}{note[kind]})" for kind in kinds)

    a = describe_operand(
        spaces.a, transposed.layouts[0], lambda kind: f"k, {rows[kind]}" if transposed.left else f"{rows[kind]}, k"
    )
    b = describe_operand(spaces.b, transposed.layouts[1], lambda _: "n, k" if transposed.right else "k, n")
    return f"acc rt({rows[rt]}, n, fp32), a {a}, b {b}, {_dtypes(pairs)}"


def _listed(scope, name):
    """What `name` takes, and the other products of its scope."""
    spaces_of = {form: cells(f"{scope}mma_{form}") for form in TRANSPOSED}
    memory_spaces = spaces_of.pop(name.rpartition("_")[2])
    takes = [
        _words(name, spaces, [pair for pair in memory_spaces if memory_spaces[pair] == spaces])
        for spaces in dict.fromkeys(memory_spaces.values())
    ]
    forms = [f"mma_{form} ({_names(spaces_of[form])})" for form in spaces_of]
    return f"takes {'; or '.join(takes)}. There are also {', '.join(forms)}"


def check(name, acc, a, b):
    """(m, n, k) of the product `name` ("mma_AB", "warpgroup.mm_AtB"; mm_* add to nothing, and acc is None), m as one warp has
    it; TypeError if the table has none of these operands. acc may be in flight if the scope is the warpgroup's."""
    scope, transposed = name[: name.index("mm")], transposed_in(name)
    dtypes = getattr(a, "dtype", None), getattr(b, "dtype", None)
    spaces = cells(f"{scope}mma_{name.rpartition('_')[2]}").get(dtypes)
    if spaces and all(map(_may_lie, (a, b), spaces, transposed.layouts)):
        (m, k), (along, n) = a.shape[:: -1 if transposed.left else 1], b.shape[:: -1 if transposed.right else 1]
        fits = along == k and not (m % MULTIPLE or n % MULTIPLE or k * a.dtype.itemsize % SLICE)
        if scope:
            fits, m = fits and m == ROWS[scope][type(a)] and n <= WIDEST, ROWS[scope][rt]
        if fits and acc in (None, out := rt(m, n, sums_of(a.dtype)), pending(out)):
            return m, n, k
    operands = f"{', '.join(str(x) for x in (acc, a, b) if x is not None)}{_wrong(name, acc, a, b, spaces)}"
    rest = f"m and n multiples of {MULTIPLE}, k of {SLICE} bytes" + f"; n up to {WIDEST}; only acc in flight" * bool(scope)
    raise TypeError(f"{name}: got {operands}; {_listed(scope, name)} ({rest})")


def sums_of(operand):
    """The dtype of sums of products of operands of this dtype."""
    return int32 if operand is int8 else fp32


COLUMNS = ', "col"'


def _wrong(name, acc, a, b, spaces):
    """The fault of these operands as text, if it is a single one."""
    transposed = transposed_in(name)
    for letter, x in zip("ab", (a, b)):
        if isinstance(x, (ring, pipeline)):
            return f": {letter} is a {type(x).__name__}, whose j-th tile is `{letter}.wait(j)`"
        if isinstance(x, pending):
            return f": {letter} is in flight, take it with warpgroup.wait(...) first"
        if not isinstance(x, (rt, st)):
            return f": {letter} is no tile"
    if isinstance(acc, rt) and isinstance(b, rt) and b.dtype is fp32 is not acc.dtype:
        return f": the sum comes first, {name}(acc, a, b)"
    if spaces is None and a.dtype is b.dtype is fp32:
        return ": fp32 is not multiplied; load a and b as bf16, fp16 or tf32, or convert them, as bf16(a)"
    if spaces is None:
        remedy = ""
        if "." not in name and a.dtype.itemsize == 2 and b.dtype.itemsize == 1:  # weights of one byte under rows of 16 bits
            unzips = name in ("mma_AB", "mma_ABt") and isinstance(b, st)
            remedy = f"; convert b, {a.dtype}({'load(b, ..)' if isinstance(b, st) else 'b'})"
            remedy += f", or multiply a of fp16 by b as it is, {name}_unzipped" * unzips
        return f": {a.dtype} and {b.dtype} are not multiplied with each other by this op{remedy}"
    for letter, x, kinds in zip("ab", (a, b), spaces):
        if not isinstance(x, kinds):
            location = {rt: "in registers, as rt", st: "in shared memory, as st"}[kinds[0]]
            rows, cols = x.shape
            if letter == "b":  # of four warps' rows x is a part
                k = a.shape[0 if transposed.left else 1]
                rows, cols = (rows, k) if transposed.right else (k, cols)
            return f": {letter} must lie {location}({rows}, {cols}, {x.dtype})"
    for letter, x, layout in zip("ab", (a, b), transposed.layouts):
        if isinstance(x, rt) and x.layout != layout:
            expected = f"rt({x.rows}, {x.cols}, {x.dtype}{COLUMNS * (layout == 'col')})"
            return f": {letter} must be in {layout} layout, {expected}: load it so, or swap_layout it"
    (m, k), (along, n) = a.shape[:: -1 if transposed.left else 1], b.shape[:: -1 if transposed.right else 1]
    if along != k:
        return f": k is {k} of a and {along} of b"
    if isinstance(acc, rt) and acc.dtype is not sums_of(a.dtype):
        return f": acc must be {sums_of(a.dtype)}; the sum is converted, as bf16(acc)"
    if isinstance(acc, rt) and "." not in name and acc.shape != (m, n):
        swapped = f", or a and b are swapped: {name}(acc, a, b) is acc + {_formula(name)}" if acc.shape == (n, m) else ""
        return f": acc must be rt({m}, {n}, {sums_of(a.dtype)}){swapped}"
    return ""


def _formula(name):
    """The product that an op's name says: a b^T for mma_ABt."""
    transposed = transposed_in(name)
    return f"a{'^T' * transposed.left} b{'^T' * transposed.right}"


def _may_lie(x, kinds, layout):
    """May the operand lie where it lies?"""
    return isinstance(x, kinds) and (isinstance(x, st) or x.layout == layout)
