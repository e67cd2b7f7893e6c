"""The pairs of tokens in strong chunks, whose decays are out of range for channel_gradients_hopper.py: this kernel adds their
part to the gradients that it has written, for any gates, level by level (parts/recurrent/channel_pairs.py). A block has some
chunks of a segment; in most calls none of them is strong, and the block ends."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import block as thread_block
from ops import (
    divmod,
    less,
    load,
    mma_AtB,
    reverse_cumsum_columns,
    store,
    subtile,
    truncate,
    warp_index,
    warpgroup,
    where,
    zeros,
)
from tiles import fp32, pipeline, rt, shared, st, sv
from tiles.launching.arguments import ENDS, FLOAT, INT, array
from tiles.layout import LANES, WARPGROUP
from tiles.targets import Target

from ...parts.recurrent.channel_chunks import HALVES, ROWS, UNFENCED, ChunkChannels
from ...parts.recurrent.channel_pairs import SQUARE, ChannelPairs, PairGradients, PairTiles
from ...parts.recurrent.gates import FLOOR
from ...parts.recurrent.tokens import CHUNK, SequenceLayout, block_coord
from . import channel_gradients_hopper
from .channel_gradients_hopper import KEYS, VALUES

WARPS = WARPGROUP * HALVES  # of a block
NARROW = 32  # bytes of a row in a panel of tiles that are read 16 columns at a time


@dataclass(frozen=True)
class Config(channel_gradients_hopper.Config):
    """A kernel's configuration, with the fields of channel_gradients_hopper.Config."""

    label = "pairs of strong chunks"
    threads = LANES * WARPS


def space(target: Target, everything: bool) -> Iterator[channel_gradients_hopper.Config]:
    return channel_gradients_hopper.make_space(Config, target, everything)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, channels, seq_layout = config.dtype, ChunkChannels(KEYS), SequenceLayout(config.varlen, reversed=True)
    HALF, OUT, pairs = channels.half, channels.rows, ChannelPairs(channels, config.dtype, True)
    OUTPUT = fp32 if config.unrounded else INPUT
    VALUE = fp32 if config.unrounded_values else INPUT
    KEY, VALUE_TILE = st(CHUNK, KEYS, INPUT, width=HALF * INPUT.itemsize), st(CHUNK, VALUES, INPUT, width=NARROW)
    smem = shared(
        q=pipeline(KEY, 1, WARPS),
        k=pipeline(KEY, 1, WARPS),
        v=pipeline(VALUE_TILE, 1, WARPS),
        do=pipeline(VALUE_TILE, 1, WARPS),
        b=channels.sums,
        x=KEY,
        w=st(CHUNK, CHUNK, INPUT, width=NARROW),
        a=st(HALVES * CHUNK, CHUNK, INPUT, width=NARROW),
        zero=sv(KEYS, fp32),
    )

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def add_pairs(
        gQ: array(4, INPUT), gK: array(4, INPUT), gV: array(4, INPUT), gDOut: array(4, INPUT), gGates: array(4),
        gDQ: array(4, OUTPUT), gDK: array(4, OUTPUT), gDV: array(4, VALUE), gDGates: array(4), gStrong: array(2),
        gStrongSegments: array(2), gCuSeqlens: ENDS, length: INT, segments: INT, parts: INT, heads: INT, group: INT,
        scale: FLOAT,
    ):  # fmt: skip
        """There are `parts` blocks for each of the `segments` of a head of a sequence. gStrong, gStrongSegments: see
        channel_gradients_hopper.py."""
        q, k, v, do, b, x, w, a, zero = smem.open()
        part, segment, head, sequence = block_coord(cuda.blockIdx.x, parts, segments, heads)
        if gStrongSegments[sequence * segments + segment, head] > 0.0:
            key_head, _ = divmod(head, group)
            seq = seq_layout.segment_tokens(gCuSeqlens, sequence, length, segment, segments)
            half, rank = warpgroup.id(), warpgroup.rank()
            queries, keys, values, douts = (
                truncate(gQ, 1, seq.end), truncate(gK, 1, seq.end), truncate(gV, 1, seq.end), truncate(gDOut, 1, seq.end),
            )  # fmt: skip
            first_chunk = seq_layout.chunk_index(seq.start, sequence, length)
            for j in range(part, seq.num_chunks(), parts):
                if gStrong[int32(first_chunk + seq.chunk_number(j)), head] > 0.0:
                    token = seq.chunk_start(j)
                    v.fill(0, values, (seq.batch, token, head, 0), 1, 3, 1, 16)
                    do.fill(0, douts, (seq.batch, token, head, 0), 1, 3, 1, 16)
                    q.fill(0, queries, (seq.batch, token, key_head, 0), 1, 3, 1, 16)
                    k.fill(0, keys, (seq.batch, token, key_head, 0), 1, 3, 1, 16)
                    channels.cumsum_gates(b, channels.load_gates(gGates, seq, token, head, aligned=True))
                    dout_tile, value_tile, query_tile, key_tile = do.wait(0), v.wait(0), q.wait(0), k.wait(0)
                    pairs.score_tokens(w, value_tile, dout_tile, scale)
                    thread_block.sync(UNFENCED)
                    gradients = PairGradients(zeros(OUT), zeros(OUT), zeros(OUT))
                    gradients = pairs.add_pairs(gradients, PairTiles(query_tile, key_tile, b, x, w, a), scale)
                    at = seq.batch, int32(token + ROWS * rank), head, int32(HALF * half)
                    for gOut, gradient in ((gDQ, gradients.dq), (gDK, gradients.dk)):
                        gRows = truncate(gOut, 1, seq.end)
                        rows = fp32(load(gRows, rt(ROWS, HALF, OUTPUT), at, 1, 3, aligned=True))
                        store(gRows, OUTPUT(rows + gradient), at, 1, 3, aligned=True)
                    thread_block.sync(UNFENCED)  # all have read b and written A
                    store(channels.part(b), gradients.r)
                    if rank == 0:
                        store(subtile(zero, HALF, half), zeros(OUT.row_vec))
                    thread_block.sync(UNFENCED)
                    if warp_index() < KEYS // LANES:
                        columns = subtile(b, CHUNK, 0, LANES, warp_index())
                        reverse_cumsum_columns(columns, subtile(zero, LANES, warp_index()))
                    thread_block.sync(UNFENCED)
                    gGate, sums = truncate(gDGates, 1, seq.end), load(channels.part(b), OUT, fenced=False)
                    below_floor = less(channels.load_gates(gGates, seq, token, head, aligned=True), FLOOR)
                    gradient = load(gGate, OUT, at, 1, 3, aligned=True) + sums
                    store(gGate, where(below_floor, 0.0, gradient), at, 1, 3, aligned=True)
                    gOut = truncate(gDV, 1, seq.end)
                    for i in range(VALUES // (HALVES * ROWS)):
                        block, d_values = int32(HALVES * i + half), zeros(SQUARE)
                        for part_of_a in range(HALVES):
                            scores_of_rows = subtile(subtile(a, CHUNK, part_of_a), CHUNK, 0, ROWS, rank)
                            d_values = mma_AtB(d_values, scores_of_rows, subtile(dout_tile, CHUNK, 0, ROWS, block))
                        at = seq.batch, int32(token + ROWS * rank), head, int32(ROWS * block)
                        rows = fp32(load(gOut, rt(ROWS, ROWS, VALUE), at, 1, 3, aligned=True))
                        store(gOut, VALUE(rows + d_values), at, 1, 3, aligned=True)
                    thread_block.sync(UNFENCED)

    return add_pairs, smem
