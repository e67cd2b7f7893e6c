"""Gradients of linear attention's queries, keys, values and gates where each channel of the keys has a decay, for Hopper: what
channel_gradients_ampere.py computes, of sequences that are not packed.

A block of two warpgroups goes over chunks. TMA loads the tiles of the next chunk while the gates' gradients of this one are
summed up. What goes through states are products of warpgroups: each has half of the channels of dQ and dK, and half of the
columns of dV."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from numba import cuda
from numpy import int32

from ops import block as thread_block
from ops import (
    col_sum,
    divmod,
    exp2,
    finish_sum,
    lane_col_sum,
    load,
    store,
    subtile,
    truncate,
    warp_index,
    warpgroup,
    zeros,
)
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st, sv
from tiles.launching.arguments import FLOAT, INT, array, tiled
from tiles.layout import LANES, WARPGROUP
from tiles.targets import Target

from ..parts.recurrent.channel_chunks import FENCED, HALVES, KEY_DIMS, ROWS, ChunkChannels
from ..parts.recurrent.channel_pairs import ChannelPairs, PairGradients, PairTiles
from ..parts.recurrent.tokens import CHUNK, TokenRange

WARPS = WARPGROUP * HALVES  # of a block
VALUE_DIMS = 64, 128  # as padded
OF_STATES, OF_GRADIENTS = 0, 1  # tiles of gStates
NARROW = 32  # bytes of a panel of tiles whose columns are taken 16 at a time


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. key_dim: the channels of keys, padded; value_dim: the columns of values. with_gates: are the
    gates' gradients wanted? unrounded: are dQ and dK float32, to be added over a group? unrounded_values: is dV float32?"""

    key_dim: int
    dtype: dtype
    value_dim: int = 128
    with_gates: bool = True
    unrounded: bool = False
    unrounded_values: bool = False
    threads = LANES * WARPS

    def __str__(self):
        flags = "gates" * self.with_gates, "float32" * self.unrounded, "float32 dv" * self.unrounded_values
        size = f"gradients in chunks, gates by channel, Dk {self.key_dim} {self.dtype}, Dv {self.value_dim}"
        return ", ".join(filter(None, (size, *flags)))


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of bf16 and the largest dims, all others if `everything`."""
    if target.has_wgmma:
        for key_dim in KEY_DIMS:
            config = Config(key_dim, bf16)
            yield config
            if everything:
                yield replace(config, dtype=fp16)
                yield replace(config, value_dim=VALUE_DIMS[0])
                yield replace(config, with_gates=False)
                yield replace(config, unrounded=True, unrounded_values=True)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, WITH_GATES, channels = config.dtype, config.with_gates, ChunkChannels(config.key_dim)
    pairs, HALF, OUT = ChannelPairs(channels, INPUT, WITH_GATES), channels.half, channels.rows
    COLUMNS = config.value_dim // HALVES  # of a warpgroup
    OUTPUT, VALUE = (fp32 if unrounded else INPUT for unrounded in (config.unrounded, config.unrounded_values))
    KEY, STATE = (st(rows, config.key_dim, INPUT, width=HALF * INPUT.itemsize) for rows in (CHUNK, config.value_dim))
    VALUES = st(CHUNK, config.value_dim, INPUT, width=COLUMNS * INPUT.itemsize)
    STATE_ROWS, STATE_PARTS = rt(ROWS, HALF, INPUT), config.value_dim // CHUNK
    smem = shared(
        q=ring(KEY, 1, WARPS),
        k=ring(KEY, 1, WARPS),
        v=ring(VALUES, 1, WARPS),
        do=ring(VALUES, 1, WARPS),
        s=ring(STATE, 1, WARPS),
        ds=ring(STATE, 1, WARPS),
        b=channels.sums,
        x=KEY,
        w=st(CHUNK, CHUNK, INPUT, width=NARROW),
        a=st(HALVES * CHUNK, CHUNK, INPUT, width=NARROW),
        carried=sv(WARPS * HALF, fp32),
    )

    @inlined
    def place(item, parts, heads, group):
        """(sequence, head, head of queries and keys, chunk) of the item with this number."""
        index, part = divmod(item, parts)
        sequence, head = divmod(index, heads)
        key_head, _ = divmod(head, group)
        return sequence, head, key_head, part

    @inlined
    def fill(rings, gQ, gK, gV, gDOut, gStates, j, where_to_find, parts):
        """Have one warp start to load the tiles of the block's j-th item. where_to_find: its `place`."""
        q, k, v, do, s, ds = rings
        sequence, head, key_head, part = where_to_find
        if warp_index() == 0:
            token, chunk = int32(CHUNK * part), int32(sequence * parts + part)
            do.fill(j, gDOut, (sequence, token, head))
            v.fill(j, gV, (sequence, token, head))
            q.fill(j, gQ, (sequence, token, key_head))
            k.fill(j, gK, (sequence, token, key_head))
            s.fill(j, gStates, (chunk, head, OF_STATES))
            ds.fill(j, gStates, (chunk, head, OF_GRADIENTS))

    @inlined
    def release(rings, j):
        """Give back the block's j-th tiles."""
        q, k, v, do, s, ds = rings
        q.release(j)
        k.release(j)
        v.release(j)
        do.release(j)
        s.release(j)
        ds.release(j)

    @inlined
    def dot_states(state, d_state, rank):
        """The sums of S dS over a quarter of the columns of values, for a warpgroup's channels, in lanes."""
        dots = lane_col_sum(zeros(OUT))
        for n in range(STATE_PARTS):
            rows = int32(WARPGROUP * n + rank)
            factors = fp32(load(subtile(state, ROWS, rows), STATE_ROWS, fenced=False))
            dots = dots + lane_col_sum(factors * fp32(load(subtile(d_state, ROWS, rows), STATE_ROWS, fenced=False)))
        return dots

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def differentiate(
        gQ: tiled(KEY, unit=1), gK: tiled(KEY, unit=1), gV: tiled(VALUES, unit=1), gDOut: tiled(VALUES, unit=1),
        gGates: array(4), gStates: tiled(STATE, 4, 2, 3), gDQ: array(4, OUTPUT), gDK: array(4, OUTPUT), gDV: array(4, VALUE),
        gDGates: array(4), length: INT, items: INT, parts: INT, heads: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """An item is a chunk of a head; each sequence has `parts`. gStates: of a chunk S^T, and below it dS^T."""
        q, k, v, do, s, ds, b, x, w, a, carried = smem.open()
        rings, half, rank = (q, k, v, do, s, ds), warpgroup.id(), warpgroup.rank()
        item, j = int32(cuda.blockIdx.x), int32(0)
        here = place(item, parts, heads, group)
        fill(rings, gQ, gK, gV, gDOut, gStates, j, here, parts)
        while item < items:
            sequence, head, _, part = here
            token, seq = int32(CHUNK * part), TokenRange(int32(0), int32(length), sequence)
            at = sequence, int32(token + ROWS * rank), head, int32(HALF * half)
            channels.cumsum_gates(b, channels.load_gates(gGates, seq, token, head))
            last, dout_tile, value_tile = channels.load_last(b), do.wait(j), v.wait(j)
            state_tile, d_state_tile = s.wait(j), ds.wait(j)
            state, d_state = subtile(state_tile, STATE.rows, 0, HALF, half), subtile(d_state_tile, STATE.rows, 0, HALF, half)

            # what comes through states, and W meanwhile
            dq, dk = warpgroup.mm_AB(dout_tile, state), warpgroup.mm_AB(value_tile, d_state)
            pairs.score_tokens(w, value_tile, dout_tile, scale)
            query_tile, key_tile = q.wait(j), k.wait(j)
            dq, dk, r = warpgroup.wait(dq, newer=1), warpgroup.wait(dk), zeros(OUT)
            dq = dq * (exp2(pairs.load_sums(b)) * scale)
            dk = dk * exp2(last - pairs.load_sums(b))
            if WITH_GATES:
                written = pairs.load_rows(key_tile) * dk
                r = pairs.load_rows(query_tile) * dq - written
                pairs.store_for_all(carried, col_sum(written) + exp2(last) * finish_sum(dot_states(state, d_state, rank)))
            thread_block.sync(FENCED)
            gradients = pairs.meet(PairGradients(dq, dk, r), PairTiles(query_tile, key_tile, b, x, w, a), scale)

            # dV, with k~ in the place of X
            thread_block.sync(FENCED)
            last = channels.load_last(b)
            store(channels.part(x), INPUT(pairs.load_rows(key_tile) * exp2(last - pairs.load_sums(b))))
            thread_block.sync()  # shows x and a to wgmma
            dv = warpgroup.mm_ABt(x, subtile(d_state_tile, COLUMNS, half))
            own_douts = subtile(dout_tile, CHUNK, 0, COLUMNS, half)
            for part_of_a in range(HALVES):
                dv = warpgroup.mma_AtB(dv, subtile(a, CHUNK, part_of_a), own_douts)
            store(truncate(gDQ, 1, seq.end), OUTPUT(gradients.dq), at, 1, 3, True)
            store(truncate(gDK, 1, seq.end), OUTPUT(gradients.dk), at, 1, 3, True)
            to = sequence, token, head, int32(COLUMNS * half)
            warpgroup.store(truncate(gDV, 1, seq.end), VALUE(warpgroup.wait(dv)), to, 1, 3, aligned=True)
            thread_block.sync()  # all have read the tiles
            release(rings, j)
            item, j = int32(item + cuda.gridDim.x), int32(j + 1)
            here = place(item, parts, heads, group)
            if item < items:
                fill(rings, gQ, gK, gV, gDOut, gStates, j, here, parts)
            if WITH_GATES:
                channels.store_gate_gradients(gDGates, gGates, b, gradients.r, carried, seq, token, head)
                thread_block.sync(FENCED)

    return differentiate, smem
