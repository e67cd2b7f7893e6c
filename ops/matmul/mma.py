"""Matrix products of one warp, by mma.sync (sm_80 and later), from registers or straight from shared memory. The result is
there at once; that of a warpgroup's products (wgmma.py) is pending. `ops.matmul.SUPPORTED` names all products of both.
"""

from tiles.compiling import ptx
from tiles.dtypes import tf32
from tiles.interpreter import current_warp
from tiles.op import lowers, op
from tiles.types import rt

from ..memory.shared_tiles import matrix_addresses
from .product import product
from .supported import MULTIPLE, SLICE, check, transposed_in


def _array(operand):
    """The elements of a tile, wherever it lies."""
    return operand.array if hasattr(operand, "array") else current_warp().read(operand, fence=False)


def _operand_tile(operand, layout):
    """The register tile that an operand is, or becomes by ldmatrix."""
    return rt(operand.rows, operand.cols, operand.dtype, layout)


def _fragments(b, operand, value):
    """Four registers at a time: an instruction's part of 16 rows of a left operand. Of tf32 a lane has columns 2t and
    2t + 1 of eight along k, where the instruction means t and t + 4. That is another order of k, which a and b share: the
    sum over k is the same."""
    registers = b.unpack(value)
    order = (0, 2, 1, 3) if operand.dtype is tf32 else range(4)
    return [[registers[k + i] for i in order] for k in range(0, len(registers), 4)]


def left_operand(b, operand, value, layout):
    """fragment(band, along): the four registers of 16 rows of the left operand."""
    steps = operand.shape[layout == "row"] * operand.dtype.itemsize // SLICE
    if isinstance(operand, rt):
        fragments = _fragments(b, operand, value)
        return lambda band, along: fragments[band * steps + along]
    addresses = list(matrix_addresses(b, operand, _operand_tile(operand, layout), value, b.u32(0), recompute=True))
    return lambda band, along: ptx.ldmatrix(b, addresses[band * steps + along], transposed=layout == "col")


def _right(b, operand, value, layout):
    """fragments(column, along): the right operand's two registers for eight columns of the product and those for the next
    eight. The instruction takes registers that are neighbours, as ldmatrix loads them; of others two would have to be moved
    for each product."""
    steps = operand.shape[layout == "row"] * operand.dtype.itemsize // SLICE
    if isinstance(operand, rt):
        pairs = [(four[::2], four[1::2]) for four in _fragments(b, operand, value)]  # see tiles/layout.py
        return lambda column, along: pairs[column * steps + along]
    addresses = list(
        matrix_addresses(b, operand, _operand_tile(operand, layout), value, b.u32(0), swapped=True, recompute=True)
    )

    def fragments(column, along):
        tile = ptx.ldmatrix(b, addresses[column * steps + along], transposed=layout == "col")
        return tile[:2], tile[2:]

    return fragments


def _product(op_function):
    """Register the rule of the op `op_function`, whose name says which operands come transposed."""

    @lowers(op_function)
    def _(acc, a, b):
        m, n, k = check(op_function.__name__, acc, a, b)
        layouts = transposed_in(op_function.__name__).layouts

        def emit(builder, vacc, va, vright):
            c = builder.unpack(vacc)
            left, right = left_operand(builder, a, va, layouts[0]), _right(builder, b, vright, layouts[1])
            for along in range(k * a.dtype.itemsize // SLICE):
                pairs = [pair for column in range(n // MULTIPLE) for pair in right(column, along)]
                for band in range(m // MULTIPLE):
                    fragment = left(band, along)
                    for eighth, pair in enumerate(pairs):
                        at = slice(start := band * n // 2 + eighth * 4, start + 4)
                        c[at] = ptx.mma(builder, (a.dtype, b.dtype), c[at], fragment, pair)
            return builder.pack(c)

        return acc, emit


@op(takes_operands=True, takes_sums=True)
def mma_AB(acc, a, b):
    """acc + a @ b in fp32, of int8 in int32, by one warp. acc: rt(m, n, fp32), or int32; a: rt(m, k) or st(m, k); b: rt(k, n,
    layout="col") or st(k, n), of one dtype or, of fp8, of two (ops.matmul.SUPPORTED). Shared operands are read 16 rows x 32
    bytes at a time, between the products."""
    return acc.array + product(_array(a), _array(b))


@op(takes_operands=True, takes_sums=True)
def mma_ABt(acc, a, b):
    """acc + a @ b.T in fp32, by one warp. b: rt(n, k) or st(n, k); acc and a as for mma_AB."""
    return acc.array + product(_array(a), _array(b).T)


@op(takes_operands=True, takes_sums=True)
def mma_AtB(acc, a, b):
    """acc + a.T @ b in fp32, by one warp. a: rt(k, m, layout="col") or st(k, m); acc and b as for mma_AB."""
    return acc.array + product(_array(a).T, _array(b))


@op(takes_operands=True, takes_sums=True)
def mma_AtBt(acc, a, b):
    """acc + a.T @ b.T in fp32, by one warp. a as for mma_AtB; acc and b as for mma_ABt."""
    return acc.array + product(_array(a).T, _array(b).T)


for _op_function in (mma_AB, mma_ABt, mma_AtB, mma_AtBt):
    _product(_op_function)
