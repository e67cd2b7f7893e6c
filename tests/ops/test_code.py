"""The machine code of ops on Hopper: the expected instructions and no others. No GPU is needed, but nvdisasm is."""

import functools
from collections import Counter
from dataclasses import replace

import pytest
from numba import cuda

import tiles
from ops import (
    causal,
    col_max,
    divmod,
    exp,
    exp2,
    finish_sum,
    full,
    grid,
    lane_sum,
    less,
    load,
    log2,
    maximum,
    right_fill,
    row_max,
    row_sum,
    silu,
    store,
    transpose,
    warpgroup,
    where,
    zeros,
)
from tiles import bf16, fp8e4m3, fp16, fp32, ring, rt, st, tensor
from tiles.compiling import sass
from tiles.compiling.compiler import compile_kernel
from tiles.launching.arguments import parameter
from tiles.testing import blank, pairs

try:
    sass.nvdisasm()
except FileNotFoundError as missing:
    pytest.skip(str(missing), allow_module_level=True)

T, B, H, WIDE = rt(16, 128, fp32), rt(16, 128, bf16), rt(16, 128, fp16), rt(64, 128, fp32)
ELEMENTS = T.elements  # of a lane
plan = tiles.shared(x=st(16, 128, fp32), y=st(16, 128, bf16), h=st(16, 128, fp16))


def code(kernel, *args):
    """The cubin for sm_90a of a kernel with these arguments, which must have no local memory and no warning."""
    actual = compile_kernel(kernel, [parameter(f"argument {k}", a).type for k, a in enumerate(args)], "sm_90a")
    assert (actual.local_bytes, actual.spill_bytes, actual.warnings) == (0, 0, [])
    assert not {"LDL", "STL"} & set(sass.instructions(actual.cubin))
    return actual.cubin


def opcodes(cubin):
    """How many instructions of each opcode, modifiers included."""
    return Counter(i.opcode for i in sass.listing(cubin))


@functools.cache
def around():
    """The instructions that load a tile, store it and read two arguments."""

    @cuda.jit
    def body(scale, n):
        x, _, _ = plan.open()
        store(x, load(x, T))

    return opcodes(code(body, 1.0, 1))


def made_of(function):
    """The opcodes between loading a tile from shared memory and storing function(tile, scale, n) there."""

    @cuda.jit
    def body(scale, n):
        x, _, _ = plan.open()
        store(x, function(load(x, T), scale, n))

    actual = opcodes(code(body, 1.0, 1))
    actual.subtract(around())
    return {opcode: n for opcode, n in actual.items() if n > 0 and opcode.split(".")[0] not in OVERHEAD}


# addresses, thread numbers and arguments; which of their forms ptxas picks changes with what stands around
OVERHEAD = {"S2R", "S2UR", "SHF", "LEA", "ULEA", "LDC", "ULDC", "LOP3", "ULOP3", "IADD3", "UIADD3", "VIADD", "IMAD"}
OVERHEAD |= {"MOV", "UMOV", "NOP", "BRA"}


@tiles.inlined
def softmax(t, scale, n):
    m = row_max(t)
    return exp2(t * scale - m * scale)


@tiles.inlined
def divided(t, scale, n):
    return t / row_sum(t)


@tiles.inlined
def by_lanes(t, scale, n):
    return t + lane_sum_twice(t)


@tiles.inlined
def lane_sum_twice(t):
    partial = lane_sum(t)
    return finish_sum(partial + partial)


@tiles.inlined
def ragged(t, scale, n):
    return right_fill(t, n, -1e30)


@tiles.inlined
def below(t, scale, n):
    return causal(t, n, -1e30)


@tiles.inlined
def rounded(t, scale, n):
    return fp32(bf16(t))


@tiles.inlined
def halved(t, scale, n):
    return fp32(fp16(t))


@tiles.inlined
def eighths(t, scale, n):
    return fp32(fp8e4m3(t))


@tiles.inlined
def logarithm(t, scale, n):
    return log2(t)


@tiles.inlined
def exponential(t, scale, n):
    return exp(t)


@tiles.inlined
def clipped(t, scale, n):
    return maximum(t, scale)


@tiles.inlined
def chosen(t, scale, n):
    return where(less(t, scale), t, 0.0)


@tiles.inlined
def turned(t, scale, n):
    return transpose(transpose(bf16(t)))


@tiles.inlined
def swish(t, scale, n):
    return silu(t)


@tiles.inlined
def by_columns(t, scale, n):
    return t - col_max(t)


@tiles.inlined
def squares_of_pairs(t, scale, n):
    return fp32(bf16(t) * bf16(t))


@tiles.inlined
def whole_eighths(t, scale, n):
    return t // 8


EXACTLY = {
    softmax: {"FMNMX.FTZ": 66, "SHFL.BFLY": 4, "FMUL": 2, "FFMA": ELEMENTS, "MUFU.EX2": ELEMENTS},
    divided: {"FADD": 66, "SHFL.BFLY": 4, "MUFU.RCP": 2, "FMUL": ELEMENTS},
    by_lanes: {"FADD": 62 + 2 + 4 + ELEMENTS, "SHFL.BFLY": 4},
    ragged: {"ISETP.GT.AND": ELEMENTS // 2, "FSEL": ELEMENTS},  # both rows of a lane end at the same column
    below: {"ISETP.GT.AND": ELEMENTS // 2 + 2, "FSEL": ELEMENTS},  # rows 8 apart share comparisons of columns 8 apart
    rounded: {"F2FP.BF16.F32.PACK_AB": ELEMENTS // 2},
    halved: {"F2FP.F16.F32.PACK_AB": ELEMENTS // 2, "HADD2.F32": ELEMENTS},
    eighths: {  # a quad exchanges registers, two shuffles and four selects for four of them, and back
        "F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C": ELEMENTS // 2,
        "F2FP.F16.E4M3.UNPACK_B": ELEMENTS // 2,
        "HADD2.F32": ELEMENTS,
        "PRMT": ELEMENTS // 2,
        "SHFL.IDX": ELEMENTS // 2,
        "SEL": ELEMENTS,
        "ISETP.NE.U32.AND": 2,
    },
    squares_of_pairs: {
        "F2FP.BF16.F32.PACK_AB": ELEMENTS // 2,
        "HMUL2.BF16_V2": ELEMENTS // 4,
        "HFMA2.MMA.BF16_V2": ELEMENTS // 4,
    },
    whole_eighths: {"FMUL": ELEMENTS, "FRND.FLOOR": ELEMENTS},
    logarithm: {"MUFU.LG2": ELEMENTS},
    exponential: {"FMUL": ELEMENTS, "MUFU.EX2": ELEMENTS},
    clipped: {"FMNMX.FTZ": ELEMENTS},
    chosen: {"FSETP.GEU.AND": ELEMENTS, "FSEL": ELEMENTS},  # the mask's 1 and 0 are nowhere to be seen
    turned: {"F2FP.BF16.F32.PACK_AB": ELEMENTS // 2, "MOVM.16.MT88": ELEMENTS},  # two a matrix
    swish: {"FMUL": 2 * ELEMENTS, "MUFU.EX2": ELEMENTS, "FADD": ELEMENTS, "MUFU.RCP": ELEMENTS},
    by_columns: {"FMNMX.FTZ": 2 * ELEMENTS, "SHFL.BFLY": 3 * ELEMENTS // 2, "FADD": ELEMENTS},  # three shuffles a column
}


# CI has every other one: to disassemble a kernel takes longer than all else
INSTRUCTIONS = [pytest.param(f, marks=[pytest.mark.release] * (n % 2)) for n, f in enumerate(EXACTLY)]


@pytest.mark.parametrize("function", INSTRUCTIONS, ids=lambda f: f.__name__)
def test_no_more_than_what_was_meant(function):
    assert made_of(function) == EXACTLY[function]


@pytest.mark.parametrize(("same", "spec"), [(True, B), (True, H), (False, B)])
def test_two_byte_tiles_move_by_matrices(same, spec):
    """Eight ldmatrix for 16 x 128, eight stmatrix; between tiles of one dtype nothing is unpacked."""
    k, target = (1, 1) if spec is B else (2, 2)
    target = target if same else 0

    @cuda.jit
    def body():
        items = plan.open()
        store(items[target], load(items[k], spec))

    actual = opcodes(code(body))
    assert actual["LDSM.16.M88.4"] == 8 and actual["F2FP.BF16.F32.PACK_AB"] == 0
    assert (actual["STSM.16.M88.4"], actual["STS.64"]) == ((8, 0) if same else (0, 32))
    assert not any(opcode.startswith("LDS.") for opcode in actual)


FORMS = ["mm_ABt", "mma_AB", "mm_AB", "mma_ABt"]


@pytest.mark.parametrize(
    ("form", "n", "k", "dtype", "registers"),
    pairs(FORMS, [16, 64, 128, 256, 176], [16, 64, 128, 96], [bf16, fp16], [True, False, False]),
)
def test_a_product_is_k_over_16_wgmmas(form, n, k, dtype, registers):
    op, adds, transposed = getattr(warpgroup, form), form.startswith("mma"), form.endswith("ABt")
    A, R, O = st(64, k, dtype), rt(16, k, dtype), rt(16, n, fp32)
    smem = tiles.shared(a=ring(A, 1), b=ring(st(*((n, k) if transposed else (k, n)), dtype), 1))

    @cuda.jit
    def body(ga, gb, c, out):
        a, b = smem.open()
        a.fill(0, ga, (0,))
        b.fill(0, gb, (0,))
        left, right = a.wait(0), b.wait(0)
        if registers:
            left = warpgroup.load(left, R)
        if adds:
            product = op(warpgroup.load(c, O, (0, 0)), left, right)
        else:
            product = op(left, right)
        warpgroup.store(out, warpgroup.wait(product), (0, 0))

    right = smem.items["b"].tile
    c = blank((64, n))
    cubin = code(body, tensor(blank((64, k), dtype), A), tensor(blank(right.shape, dtype), right), c, c)
    products = [i for i in sass.listing(cubin) if i.mnemonic == "HGMMA"]
    name = f"HGMMA.64x{n}x16.F32" + ".BF16" * (dtype is bf16)
    assert [i.opcode for i in products] == [name] * (k // 16)
    assert all(("tnspB" in i.operands) != transposed for i in products)
    assert all((i.operands.count("gdesc") == 1) for i in products)
    assert opcodes(cubin)["WARPGROUP.ARRIVE"] == opcodes(cubin)["WARPGROUP.DEPBAR.LE"] == 1


def test_tma_takes_one_instruction_a_panel():
    S = st(64, 128, bf16)
    smem = tiles.shared(a=ring(S, 1), b=S)

    @cuda.jit
    def body(x, y):
        a, b = smem.open()
        a.fill(0, x, (1, 0))
        a.wait(0)
        warpgroup.tma_store(y, (0, 0), b)
        warpgroup.store_wait()

    x = tensor(blank((128, 128), bf16), S)
    actual = sass.instructions(code(body, x, x))
    assert (actual["UTMALDG"], actual["UTMASTG"]) == (2, 2)


def test_the_loop_of_an_online_softmax():
    """Two products and a softmax per iteration: the maths' instructions, and at most 80 of addresses and barriers."""
    K, V, Q = st(128, 128, bf16), st(128, 128, bf16), st(64, 128, bf16)
    O, rounds = T, 7
    smem = tiles.shared(q=ring(Q, 1), k=ring(K, 2), v=ring(V, 2))

    @cuda.jit(launch_bounds=(256, 1), fastmath=True)
    def body(gq, gk, gv, out, n, scale):
        q, k, v = smem.open()
        if warpgroup.id() == 1:
            warpgroup.release_registers(24)
            q.fill(0, gq, (0,))
            for j in range(n):
                k.fill(j, gk, (j,))
                v.fill(j, gv, (j,))
        else:
            warpgroup.claim_registers(240)
            queries = q.wait(0)
            m, l, o = full(O.col_vec, -1e30), zeros(PARTIAL), zeros(O)
            for j in range(n):
                s = warpgroup.wait(warpgroup.mm_ABt(queries, k.wait(j)))
                k.release(j)
                m_new = maximum(m, row_max(s))
                alpha = exp2((m - m_new) * scale)
                s = exp2(s * scale - m_new * scale)
                m = m_new
                l = l * alpha + lane_sum(s)
                o = warpgroup.wait(warpgroup.mma_AB(o * alpha, bf16(s), v.wait(j)))
                v.release(j)
            warpgroup.store(out, o / finish_sum(l), (0, 0))

    args = tensor(blank((64, 128), bf16), Q), tensor(blank((128 * rounds, 128), bf16), K)
    loop = sass.main_loop(code(body, *args, args[1], blank((64, 128)), rounds, 1.0))
    actual = Counter(i.opcode for i in loop)
    needs = {
        "HGMMA.64x128x16.F32.BF16": 16,
        "FMNMX.FTZ": ELEMENTS + 4,  # 62 in the lane, 4 across the quad, 2 with the old maximum
        "MUFU.EX2": ELEMENTS + 2,
        "FFMA": ELEMENTS + 2,
        "FMUL": ELEMENTS + 4,
        "FADD": ELEMENTS,
        "F2FP.BF16.F32.PACK_AB": ELEMENTS // 2,
        "SHFL.BFLY": 4,
    }
    assert {opcode: actual[opcode] for opcode in needs} == needs
    assert len(loop) <= sum(needs.values()) + 80


PARTIAL = replace(T.col_vec, partial=True)


@pytest.mark.parametrize("after_quotient", [False, True])
def test_a_grid_waits_when_told(after_quotient):
    """grid.follow is a block's first instruction, unless it comes after a quotient."""

    @cuda.jit
    def body(y, n):
        quotient, _ = divmod(cuda.blockIdx.x, n)
        grid.wait(quotient if after_quotient else None)
        y[quotient] = 1.0

    order = [i.opcode.split(".")[0] for i in sass.listing(code(body, blank((4,)), 3))]
    assert (order.index("ACQBULK") > order.index("I2F")) == after_quotient


@pytest.mark.parametrize("back", [False, True])
def test_elements_of_a_tile_in_memory(back):
    """A state is loaded and stored so, once a kernel: one comparison for each element, and no product of each column with a
    stride."""

    @cuda.jit
    def body(x, y, row, col):
        tile, _, _ = plan.open()
        if back:
            store(y, load(tile, T), (row, col), aligned=False)
        else:
            store(tile, load(x, T, (row, col), aligned=False))

    x = blank((16, 128))
    counts = Counter(opcode.split(".")[0] for opcode in opcodes(code(body, x, x, 1, 1)).elements())
    assert counts["STG" if back else "LDG"] == ELEMENTS
    assert counts["ISETP"] <= ELEMENTS + 16 and counts["IMAD"] <= 2 * ELEMENTS, counts
