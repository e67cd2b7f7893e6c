"""Layouts are pure functions: bijections, free of bank conflicts by counting, and equal to the maps that the PTX ISA draws."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from tiles import bf16, fp8e4m3, fp32, layout, rt, st

BLOCKS = some.integers(1, 12)
LANES = np.arange(layout.LANES)
WIDTHS = pytest.mark.parametrize("width", layout.WIDTHS)
DTYPES = pytest.mark.parametrize("dtype", [bf16, fp32], ids=str)


def tiles(width, dtype):
    """Shared tiles of one to several panels of a width."""
    return [st(rows, panels * width // dtype.itemsize, dtype, width) for rows in (8, 64, 176) for panels in (1, 2, 3)]


# ---- registers -----------------------------------------------------------------------------------------------------
LAYOUTS = some.sampled_from(["row", "col"])


@given(BLOCKS, BLOCKS, LAYOUTS, some.sampled_from([fp32, fp8e4m3]))
def test_every_element_of_a_register_tile_is_held_once(high, wide, order, dtype):
    rows, cols = (16, 8 * dtype.run) if order == "row" else (8 * dtype.run, 16)
    tile = rt(rows * high, cols * wide, dtype, order)
    index = np.arange(tile.elements)
    rows, cols = tile.element(LANES[:, None], index)
    counts = np.zeros(tile.shape, int)
    np.add.at(counts, (rows, cols), 1)
    assert (counts == 1).all()


def test_a_base_tile_is_the_fragment_that_mma_takes():
    """PTX ISA, "Matrix Fragments for mma.m16n8k16", A: groupID = lane / 4, thread = lane % 4;
    row = groupID for a0, a1, a4, a5, else groupID + 8; col = 2 thread + (i & 1), + 8 for i >= 4."""
    for lane in range(32):
        for i in range(8):
            row = lane // 4 + (0 if i in (0, 1, 4, 5) else 8)
            col = lane % 4 * 2 + (i & 1) + (8 if i >= 4 else 0)
            assert layout.element(lane, i, 16) == (row, col)


def test_a_base_tile_of_bytes_is_the_fragment_that_mma_takes():
    """PTX ISA, "Matrix Fragments for mma.m16n8k32", A: row = groupID for a0..a3, a8..a11, else groupID + 8;
    col = 4 thread + (i & 3), + 16 for i >= 8."""
    for lane in range(32):
        for i in range(16):
            row = lane // 4 + (0 if i // 4 in (0, 2) else 8)
            col = lane % 4 * 4 + (i & 3) + (16 if i >= 8 else 0)
            assert layout.element(lane, i, 32, 4) == (row, col)


@pytest.mark.parametrize("n", range(8, 257, 8))
def test_an_accumulator_is_what_wgmma_writes(n):
    """PTX ISA, "Register Fragments for wgmma.m64nNk16", D: row = lane / 4 + 8 (i / 2 % 2) in the warp's 16 rows,
    col = 8 (i / 4) + 2 (lane % 4) + i % 2. (Register tiles are multiples of 16 wide; the map holds for all n.)"""
    i = np.arange(n // 2)
    rows, cols = layout.element(LANES[:, None], i, n)
    assert (rows == LANES[:, None] // 4 + i % 4 // 2 * 8).all()
    assert (cols == LANES[:, None] % 4 * 2 + i // 4 * 8 + i % 2).all()


def test_a_column_layout_base_tile_is_two_fragments_of_b():
    """PTX ISA, "Matrix Fragments for mma.m16n8k16", B: groupID = lane / 4, thread = lane % 4;
    row = 2 thread + (i & 1), + 8 for i >= 2; col = groupID. The base tile's elements 0 1 4 5 are the left fragment's, 2 3 6 7
    the right one's."""
    for lane in range(32):
        for half, elements in enumerate([(0, 1, 4, 5), (2, 3, 6, 7)]):
            for i, e in enumerate(elements):
                row = lane % 4 * 2 + (i & 1) + (8 if i >= 2 else 0)
                assert layout.column_element(lane, e, 16) == (row, lane // 4 + 8 * half)


@given(BLOCKS, BLOCKS)
def test_the_column_layout_is_the_transpose(high, wide):
    """A b of shape (k, n) in column layout lies as its transpose in row layout, register by register: AB is ABt."""
    tile, across = rt(16 * high, 16 * wide, fp32, "col"), rt(16 * wide, 16 * high, fp32)
    index = np.arange(tile.elements)
    rows, cols = tile.element(LANES[:, None], index)
    assert all((x == y).all() for x, y in zip(across.element(LANES[:, None], index), (cols, rows), strict=True))


@given(BLOCKS, BLOCKS, LAYOUTS)
def test_vectors_lie_beside_the_elements_they_broadcast_to(high, wide, order):
    tile = rt(16 * high, 16 * wide, fp32, order)
    index = np.arange(tile.elements)
    rows, cols = tile.element(LANES[:, None], index)
    assert (tile.col_vec.element(LANES[:, None], np.array(tile.lane_index(tile.col_vec))) == rows).all()
    assert (tile.row_vec.element(LANES[:, None], np.array(tile.lane_index(tile.row_vec))) == cols).all()
    assert set(tile.lane_index(tile.col_vec)) == set(range(tile.col_vec.elements))
    assert set(tile.lane_index(tile.row_vec)) == set(range(tile.row_vec.elements))


# ---- shared memory -------------------------------------------------------------------------------------------------
@given(BLOCKS, BLOCKS, some.sampled_from([bf16, fp32]), some.sampled_from([0, *layout.WIDTHS]))
def test_every_byte_of_a_shared_tile_is_used_once(high, wide, dtype, width):
    if (row := 32 * wide) % (width or 32):
        width = 32
    tile = st(8 * high, row // dtype.itemsize, dtype, width)
    assert sorted(tile.offsets().ravel()) == list(range(0, tile.nbytes, dtype.itemsize))


@WIDTHS
def test_swizzle_is_an_involution_on_each_tile(width):
    offsets = np.arange(0, 4096, 16)
    assert (layout.swizzle(layout.swizzle(offsets, width), width) == offsets).all()
    assert (layout.swizzle(offsets, width) // width == offsets // width).all(), "chunks stay in their row"


def test_swizzle_is_the_pattern_of_tma():
    """CUDA driver API, CU_TENSOR_MAP_SWIZZLE_128B: chunk index bits 4-6 are XORed with address bits 7-9 (64B: 4-5 with 7-8;
    32B: 4 with 7)."""
    for width, bits in ((128, 3), (64, 2), (32, 1)):
        offsets = np.arange(0, 8192, 16)
        assert (layout.swizzle(offsets, width) == offsets ^ ((offsets >> 7) & (2**bits - 1)) << 4).all()


def conflicts(chunks):
    """The most 16-byte chunks of one matrix's eight rows that start in the same banks."""
    return np.unique(layout.bank(chunks), return_counts=True)[1].max()


@WIDTHS
def test_ldmatrix_and_stmatrix_are_free_of_conflicts(width):
    """Each of the instruction's matrices is eight rows of 16 bytes: they must lie in all 32 banks."""
    for tile in tiles(width, bf16):
        offsets = tile.offsets()
        for row in range(0, tile.rows, 8):
            for col in range(0, tile.cols, 8):
                assert conflicts(offsets[row : row + 8, col]) == 1


@pytest.mark.parametrize("width, ways", [(128, 2), (64, 2), (32, 1)])
def test_conflicts_of_fp32_pairs(width, ways):
    """`st.shared.v2.f32` serves half a warp at a time: 16 lanes with four rows of 32 bytes. The swizzle of wide panels moves
    chunks of 16 bytes, so that two neighbouring rows use the same two chunks, swapped: every bank is asked twice."""
    tile = tiles(width, fp32)[4]
    rows, cols = layout.element(LANES[:16, None], np.arange(0, 8, 2), 16)
    words = layout.bank(tile.offset(rows, cols))
    assert {np.unique([pair, pair + 1], return_counts=True)[1].max() for pair in words.T} == {ways}


# ---- wgmma's view --------------------------------------------------------------------------------------------------
def addresses(tile, k, rows_are_k):
    """The byte that wgmma reads for each element of an operand's 16-wide slice at index k of the contracted axis, from the
    descriptor alone (PTX ISA, "Strides" and "Canonical Layouts")."""
    bits = layout.descriptor(tile.rows, tile.width, rows_are_k)
    mode, stride, leading = bits >> 62, (bits >> 32 & 0x3FFF) << 4, (bits >> 16 & 0x3FFF) << 4
    width = {1: 128, 2: 64, 3: 32}[mode]
    start = layout.k_step(k, tile.rows, tile.dtype.itemsize, tile.width, rows_are_k)
    if rows_are_k:  # MN-major: 8 rows of k a group, `stride` apart; panels of columns `leading` apart
        row, col = np.indices((16, tile.cols))
        panel, byte = np.divmod(col * tile.dtype.itemsize, width)
        raw = start + panel * leading + row // 8 * stride + row % 8 * width + byte
    else:  # K-major: 8 rows of m or n a group, `stride` apart; 16 columns stay inside a panel
        row, col = np.indices((tile.rows, 16))
        raw = start + row // 8 * stride + row % 8 * width + col * tile.dtype.itemsize
    return layout.swizzle(raw, width)


@WIDTHS
@pytest.mark.parametrize("rows", [16, 64, 80, 128, 176, 256])
@pytest.mark.parametrize("panels", [1, 2, 4])
def test_descriptors_find_every_element(width, rows, panels):
    tile = st(rows, panels * width // 2, bf16, width)
    offsets = tile.offsets()
    for k in range(0, tile.cols, 16):
        assert (addresses(tile, k, False) == offsets[:, k : k + 16]).all()
    for k in range(0, rows, 16):
        assert (addresses(tile, k, True) == offsets[k : k + 16]).all()


@pytest.mark.parametrize("row, width", [(32, 32), (64, 64), (96, 32), (128, 128), (192, 64), (384, 128), (512, 128)])
def test_the_widest_panel_that_divides_a_row(row, width):
    assert layout.swizzle_width(row) == width


def test_rows_that_no_panel_divides():
    with pytest.raises(ValueError, match="a shared tile's row must be a multiple of 32 bytes, got 48"):
        layout.swizzle_width(48)


def test_layout_needs_neither_numba_nor_cuda():
    source = layout.__loader__.get_source(layout.__name__)
    assert "import" not in source.replace("is imported here", "")
