"""`print(tile)` in a kernel: the same picture on the GPU as in the interpreter, where Python prints the tile itself.

One vector or tile a call. The values travel to lane 0, which prints row after row. For looking at things, not for speed.
"""

import numpy as np

from tiles import layout
from tiles.compiling import ptx
from tiles.compiling.builder import Builder, f64
from tiles.compiling.numba_types import Value
from tiles.compiling.unsupported import check_print
from tiles.numba_names import print_item, registry
from tiles.types import rt

ARGUMENTS = 32  # that vprintf takes


def _holders(spec):
    """The (lane, element) that holds each value, as an array of the tile's shape."""
    out = np.empty(spec.shape, object)
    for lane in range(layout.LANES):
        for index in range(spec.elements):
            at = spec.element(lane, index)
            out[at if isinstance(spec, rt) else (at, 0) if spec.axis == "col_vec" else (0, at)] = lane, index
    return out


def _printf(b, buffer, text, *values):
    """printf by lane 0 of this warp."""
    with b.if_then(b.icmp_unsigned("==", b.lane(), b.u32(0))):
        for k, value in enumerate(values):
            b.store(b.fpext(value, f64), b.gep(buffer, [b.u32(0), b.u32(k)]))
        b.vprintf(text, buffer)


@print_item.register(Value)
def _(tile, *_):
    check_print(None, tile.spec)


@registry.lower(print, Value)
def _(context, builder, sig, args):
    b, spec = Builder(builder, context), sig.args[0].spec
    check_print(spec)
    elements = b.elements(spec, args[0])
    buffer = b.scratch(f64, ARGUMENTS)
    origin = [b.special(f"ctaid.{axis}") for axis in "xyz"] + [b.warp()]
    _printf(b, buffer, f"[block (%.0f, %.0f, %.0f), warp %.0f] {spec}\n", *map(b.real, origin))
    for row in _holders(spec):
        for start in range(0, len(row), ARGUMENTS):
            values = [ptx.shuffle(b, elements[index], b.u32(lane)) for lane, index in row[start : start + ARGUMENTS]]
            end = "\n" if start + ARGUMENTS >= len(row) else " "
            _printf(b, buffer, " ".join(["%9.4f"] * len(values)) + end, *values)
    return context.get_dummy_value()
