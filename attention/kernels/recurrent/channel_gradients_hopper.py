"""Gradients of linear attention for Hopper in one walk from the last chunk to the first, where each channel of the keys has a
decay (parts/recurrent/channel_chunks.py has the equations).

A chunk is two blocks of 32 tokens, each with a reference r, the middle of its sums b, in powers of 2 an integer. With c = b - r

    q' = scale exp(c) q        k* = exp(-c) k        P = tril(dO V^T)        A = tril(q'_i . (exp(r_i - r_j) k*_j))
    dq_i = scale exp(c_i) (exp(r_i) S dO_i + sum_j P_ij exp(r_i - r_j) k*_j)
    dk_j = exp(-c_j) (exp(b_last - r_j) dS v_j + sum_i P_ij exp(r_i - r_j) q'_i)
    dv_j = dS^T (exp(b_last - r_j) k*_j) + sum_i A_ij dO_i
    dS before = exp(b_last) dS + sum_i (exp(r_i) q'_i) dO_i^T

so that a token and channel take one exponential as a query and one as a key, and a factor between blocks is one number a
channel: E = exp(r_0), D = exp(r_1 - r_0) and F = exp(b_last - r_1). Sums over blocks are taken by Horner's rule: the sum over
the blocks so far is multiplied by D before the next block is added. A chunk is strong if its q' or k* are out of the dtype's
range: its references are 0 for queries and b_last for keys, so its contributions to and from states are right, its P and A are
0, and channel_pairs_ampere.py adds its pairs of tokens afterwards.

Two consumers have 64 channels each, and all tiles as channels by tokens, so that a channel's references and decays are numbers
of a lane, and nothing is a sum over warps: b by a scan in registers, q' and k*, dS, dQ, dK and q dq - k dk, each token's
gradient of b. A third warpgroup, the scorer, loads all tiles, and computes P, A and dV from q', k* and dS in shared memory, so
that consumers never wait for each other. It also sums the gradients of b to those of gates.

Shared memory is used several times: q' and k* overwrite q and k, and dQ and dK overwrite these; once the state is read, b
overwrites it, so that the next gates may be loaded; and q dq - k dk overwrites dS."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import float32, int32

from ops import (
    columns,
    divmod,
    exp2,
    hstack,
    load,
    persistent_tile,
    reverse_cumsum_columns,
    row_sum,
    store,
    subtile,
    tile_min,
    viewed,
    warpgroup,
)
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st, sv
from tiles.launching.arguments import ENDS, FLOAT, INT, array, tiled
from tiles.targets import Target

from ...parts.recurrent.channel_gradient_outputs import ChannelGradientOutputs
from ...parts.recurrent.token_channels import BLOCK, TokenChannels
from ...parts.recurrent.tokens import CHUNK, SequenceLayout, walk_of_block
from .linear_gradients_hopper import RESULTS

KEYS, VALUES = 128, 128  # channels of a key, columns of a value, as padded
HALF = KEYS // 2  # channels of a consumer, and its columns of dV
CONSUMERS, SCORER = 2, 2
WARPS = CONSUMERS * warpgroup.WARPGROUP  # of the consumers
ALL_WARPS = WARPS + warpgroup.WARPGROUP
REGISTERS = 104, 200  # of a thread of the scorer, of a consumer
PANEL = 32  # channels whose gates' gradients a warp of the scorer sums up
FACTORS_READY, TILES_READ = (warpgroup.named_barrier(ALL_WARPS, first=first) for first in (1, 2))
DOTS_READY, GATES_STORED = (warpgroup.named_barrier(ALL_WARPS, first=first) for first in (3, 4))


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. dtype: of everything but gates and states. unrounded: are dQ and dK float32, to be added over a
    group? unrounded_values: is dV float32? varlen: are sequences packed (cu_seqlens)?"""

    dtype: dtype
    unrounded: bool = False
    unrounded_values: bool = False
    varlen: bool = False
    label = "walk of channels' gradients"
    threads = warpgroup.THREADS * (CONSUMERS + 1)

    @property
    def fields(self):
        """The values of the configuration's fields, which the kernel of pairs has, too."""
        return self.dtype, self.unrounded, self.unrounded_values, self.varlen

    def __str__(self):
        flags = "float32" * self.unrounded, "float32 dv" * self.unrounded_values, "varlen" * self.varlen
        return ", ".join(filter(None, (f"{self.label}, {self.dtype}", *flags)))


def make_space(make_config: type[Config], target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of a kernel with these fields. everything: fp16, packed sequences and float32 results, too."""
    if target.has_wgmma:
        for input_dtype in (bf16, fp16) if everything else (bf16,):
            for varlen, results in itertools.product((False, True), RESULTS) if everything else ((False, RESULTS[0]),):
                yield make_config(input_dtype, *results, varlen)


def space(target: Target, everything: bool) -> Iterator[Config]:
    return make_space(Config, target, everything)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, (scorer_registers, consumer_registers) = config.dtype, REGISTERS
    seq_layout, token_channels = SequenceLayout(config.varlen, reversed=True), TokenChannels(INPUT, HALF)
    outputs = ChannelGradientOutputs(seq_layout, token_channels, config.unrounded, config.unrounded_values)
    KEY_OUTPUT, VALUE_OUTPUT, GATE_OUTPUT = outputs.arguments
    KEY, VALUE, STATES = st(CHUNK, KEYS, INPUT), st(CHUNK, VALUES, INPUT), st(VALUES, KEYS, INPUT)
    GATES, SCORES = st(CHUNK, KEYS, fp32), st(CHUNK, CHUNK, INPUT, width=BLOCK * INPUT.itemsize)
    ALL_KEYS, ALL_VALUES, ALL_GATES = tiled(KEY, unit=1), tiled(VALUE, unit=1), tiled(GATES, unit=1)
    STATE, ALL_CHANNELS, HALF_CHANNELS = rt(16, VALUES, fp32), rt(16, KEYS, INPUT), rt(16, HALF, INPUT)
    CHANNEL_SUMS = st(CHUNK, HALF, fp32)  # b of a consumer's channels, which overwrites S
    DOTS = st(KEYS, HALF, fp32)  # q dq - k dk of both consumers, one below the other, which overwrites dS
    smem = shared(
        q=ring(KEY, 2, ALL_WARPS),
        k=ring(KEY, 2, ALL_WARPS),
        v=ring(VALUE, 1, ALL_WARPS),
        do=ring(VALUE, 2, ALL_WARPS),
        s=ring(STATES, 1, WARPS),
        g=ring(GATES, 1, WARPS),
        p=ring(SCORES, 1, WARPS, writers=warpgroup.WARPGROUP),
        ds=st(KEYS, VALUES, INPUT),
        first_keys=st(BLOCK, KEYS, INPUT),  # k* of the first block, times D
        references=sv(2 * KEYS, fp32),  # r of both blocks, each less b before the block
        ends=sv(KEYS, fp16),  # log2 of the references of keys in a strong chunk, 0 in others
        chunk_gate_gradients=sv(KEYS, fp32),  # in each channel, the part of the gradient that all gates of a chunk share
    )

    @inlined
    def fill(rings, arrays, tails, j, walk, key_head):
        """Have TMA load the j-th chunk, if there is one, but for its values and state."""
        (q, k, do, g), (gQ, gK, gDOut, gGates), (gTailQ, gTailK, gTailDOut, gTailGates) = rings, arrays, tails
        if j < walk.n:
            place = walk.place(j)
            seq_layout.fill_chunk(g, j, gGates, gTailGates, place, walk.head)
            seq_layout.fill_chunk(do, j, gDOut, gTailDOut, place, walk.head)
            seq_layout.fill_chunk(q, j, gQ, gTailQ, place, key_head)
            seq_layout.fill_chunk(k, j, gK, gTailK, place, key_head)

    @inlined
    def fill_values(v, gV, gTailV, j, walk):
        """Have TMA load the values of the j-th chunk, if there is one."""
        if j < walk.n:
            seq_layout.fill_chunk(v, j, gV, gTailV, walk.place(j), walk.head)

    @inlined
    def fill_states(s, gStates, j, walk):
        """Have TMA load the state before the j-th chunk, if there is one."""
        if j < walk.n:
            s.fill(j, gStates, (walk.place(j).chunk, walk.head))

    @inlined
    def sum_values(key_tiles, ds_tile, a, douts, half, rank):
        """Half of the columns of dV."""
        x = token_channels.load_decayed_keys(key_tiles, HALF_CHANNELS, 0, rank)
        dv = warpgroup.wait(warpgroup.mm_AB(x, subtile(ds_tile, HALF, 0, HALF, half)))
        x = token_channels.load_decayed_keys(key_tiles, HALF_CHANNELS, 1, rank)
        dv = warpgroup.mma_AB(dv, x, subtile(ds_tile, HALF, 1, HALF, half))
        return warpgroup.wait(warpgroup.mma_AB(dv, a, subtile(douts, CHUNK, 0, HALF, half)))

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def differentiate_channels(
        gQ: ALL_KEYS, gK: ALL_KEYS, gV: ALL_VALUES, gDOut: ALL_VALUES, gStates: tiled(STATES, 4, 2, 3), gGates: ALL_GATES,
        gDQ: KEY_OUTPUT, gDK: KEY_OUTPUT, gDV: VALUE_OUTPUT, gDGates: GATE_OUTPUT, gLastState: array(4), gFirstState: array(4),
        gStrong: array(2), gStrongSegments: array(2), gTailQ: ALL_KEYS, gTailK: ALL_KEYS, gTailV: ALL_VALUES,
        gTailDOut: ALL_VALUES, gTailGates: ALL_GATES, gTailDQ: KEY_OUTPUT, gTailDK: KEY_OUTPUT, gTailDGates: GATE_OUTPUT,
        gCuSeqlens: ENDS, length: INT, segments: INT, heads: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """The gradients of one of the `segments` of a sequence, for one value head; `group` of them share a key head. gStates:
        S^T before each chunk. gLastState: dS after each segment; gFirstState: dS before each sequence. gStrong (chunk, head): 1
        if the chunk is strong; gStrongSegments (segment, head): 1 if one of its chunks is. gTailQ .. gTailDGates: see
        packed_tails.py."""
        q, k, v, do, s, g, p, ds_tile, first_keys, references, ends, chunk_gate_gradients = smem.open()
        wg, rank = warpgroup.id(), warpgroup.rank()
        if wg == SCORER:
            warpgroup.release_registers(scorer_registers)
            walk = walk_of_block(seq_layout, gCuSeqlens, length, segments, heads)
            key_head, _ = divmod(walk.head, group)
            rings, arrays, tails = (q, k, do, g), (gQ, gK, gDOut, gGates), (gTailQ, gTailK, gTailDOut, gTailGates)
            gStrongSegments[walk.slot, walk.head] = float32(0)
            fill(rings, arrays, tails, int32(0), walk, key_head)
            fill_values(v, gV, gTailV, int32(0), walk)
            fill_states(s, gStates, int32(0), walk)
            for j in range(walk.n):
                place = walk.place(j)
                douts, values = do.wait(j), v.wait(j)
                scores = warpgroup.wait(warpgroup.mm_ABt(douts, values))
                v.release(j)
                FACTORS_READY.sync(0)
                strong = tile_min(load(ends, rt(16, KEYS, fp32).row_vec)) < float32(0)
                warpgroup.store(p.claim(j), warpgroup.causal(scores, int32(-CHUNK if strong else 0), 0.0))
                p.publish(j)
                gStrong[place.chunk, walk.head] = float32(1.0 if strong else 0.0)
                if strong:
                    gStrongSegments[walk.slot, walk.head] = float32(1)
                fill(rings, arrays, tails, int32(j + 1), walk, key_head)
                queries, keys = q.wait(j), k.wait(j)
                x = token_channels.load_decayed_keys((keys, first_keys), ALL_CHANNELS, 0, rank)
                a_0 = warpgroup.mm_ABt(keys, subtile(queries, BLOCK, 0))
                a_1 = warpgroup.wait(warpgroup.mm_ABt(x, subtile(queries, BLOCK, 1)))
                scores = hstack(warpgroup.wait(a_0), a_1)
                a = INPUT(warpgroup.triu(scores, int32(CHUNK if strong else 0), 0.0))
                dv = sum_values((keys, first_keys), ds_tile, a, douts, 0, rank)
                seq_layout.store_rows(gDV, dv, walk.seq, place.token, walk.head, 0)
                fill_values(v, gV, gTailV, int32(j + 1), walk)
                dv = sum_values((keys, first_keys), ds_tile, a, douts, 1, rank)
                TILES_READ.arrive(0)
                q.release(j)
                k.release(j)
                do.release(j)
                seq_layout.store_rows(gDV, dv, walk.seq, place.token, walk.head, 1)
                DOTS_READY.sync(0)
                fill_states(s, gStates, int32(j + 1), walk)
                gate_gradients = viewed(ds_tile, DOTS)
                panel = subtile(gate_gradients, CHUNK, rank // 2, PANEL, rank % 2)
                reverse_cumsum_columns(panel, subtile(chunk_gate_gradients, PANEL, rank))
                warpgroup.sync()
                outputs.store_gates(gDGates, gTailDGates, gate_gradients, place)
                GATES_STORED.arrive(0)
        else:
            warpgroup.claim_registers(consumer_registers)
            walk = walk_of_block(seq_layout, gCuSeqlens, length, segments, heads)
            channel = int32(4 * wg + rank)  # the warp's group of 16 channels
            ds = warpgroup.load(gLastState, STATE, (walk.slot, walk.head, int32(HALF * wg), 0))
            for j in range(walk.n):
                # b and its references, decayed queries and keys; dS after the chunk, in shared memory
                place, gates = walk.place(j), g.wait(j)
                b_0, b_1 = token_channels.sum_gates(gates, wg, 0), token_channels.sum_gates(gates, wg, 1)
                r_0, r_1, between, r_1_total, end, last = token_channels.choose_references(b_0, b_1)
                if j > 0:
                    warpgroup.store_wait()
                    q.release(j - 1)
                    k.release(j - 1)
                    GATES_STORED.sync(0)  # the previous chunk's gradients of gates are stored: dS may overwrite them
                ds = ds * exp2(last - end - r_1_total)
                warpgroup.store(subtile(ds_tile, HALF, wg), ds)
                store(subtile(ends, 16, channel), end)
                store(subtile(references, 16, channel), r_0)
                store(subtile(references, 16, int32(KEYS // 16 + channel)), r_1)
                root = exp2(between * 0.5)  # the square root of D, as D may be out of the dtype's range
                queries, keys = subtile(q.wait(j), CHUNK, 0, HALF, wg), subtile(k.wait(j), CHUNK, 0, HALF, wg)
                x = token_channels.decay_twice(token_channels.decay_block(queries, keys, b_0, r_0, end, 0, scale), root)
                warpgroup.store_transposed(subtile(first_keys, BLOCK, 0, HALF, wg), x, True)
                token_channels.decay_block(queries, keys, b_1, r_1, end, 1, scale)
                warpgroup.sync()
                FACTORS_READY.arrive(0)
                g.release(j)

                # dK from dS, dQ from the state, and the part of the gates' gradients that comes from both
                values, douts = v.wait(j), do.wait(j)
                dk_0 = warpgroup.mm_ABt(subtile(ds_tile, HALF, wg), subtile(values, BLOCK, 0))
                dk_1 = warpgroup.mm_ABt(subtile(ds_tile, HALF, wg), subtile(values, BLOCK, 1))
                states = subtile(s.wait(j), VALUES, 0, HALF, wg)
                state_dots = row_sum(columns(ds, CHUNK, 0) * token_channels.load_state(states, 0))
                state_dots = state_dots + row_sum(columns(ds, CHUNK, 1) * token_channels.load_state(states, 1))
                carried = state_dots * exp2(end + r_1_total)
                dk_0, dk_1 = warpgroup.wait(dk_0, newer=1), warpgroup.wait(dk_1)
                v.release(j)
                carried_dots = row_sum(dk_0 * fp32(token_channels.load_block(keys, 0))) * root * root
                carried_dots = carried_dots + row_sum(dk_1 * fp32(token_channels.load_block(keys, 1)))
                store(subtile(chunk_gate_gradients, 16, channel), carried_dots + carried)
                dq_0 = warpgroup.mm_AtBt(states, subtile(douts, BLOCK, 0))
                dq_1 = warpgroup.mm_AtBt(states, subtile(douts, BLOCK, 1))
                dq_0, dq_1 = warpgroup.wait(dq_0, newer=1), warpgroup.wait(dq_1)
                warpgroup.sync()  # all have read the state
                sums = viewed(states, CHANNEL_SUMS)
                warpgroup.store_transposed(subtile(sums, BLOCK, 0), b_0)
                warpgroup.store_transposed(subtile(sums, BLOCK, 1), b_1)

                # dQ and dK from P, within the chunk; a sum over blocks is multiplied by D, root * root, before the next one
                scores, first_decay = p.wait(j), exp2(r_0)
                dq_0, dq_1 = dq_0 * first_decay, dq_1 * first_decay
                dq_1 = warpgroup.mma_AtBt(dq_1, subtile(keys, BLOCK, 0), subtile(scores, BLOCK, 1, BLOCK, 0))
                dk_0 = warpgroup.mma_AtB(dk_0, subtile(queries, BLOCK, 1), subtile(scores, BLOCK, 1, BLOCK, 0))
                dq_0 = warpgroup.mma_AtBt(dq_0, subtile(keys, BLOCK, 0), subtile(scores, BLOCK, 0, BLOCK, 0))
                dk_1 = warpgroup.mma_AtB(dk_1, subtile(queries, BLOCK, 1), subtile(scores, BLOCK, 1, BLOCK, 1))
                dq_1, dk_0 = warpgroup.wait(dq_1, newer=3), warpgroup.wait(dk_0, newer=2)
                dq_1 = warpgroup.mma_AtBt(dq_1 * root * root, subtile(keys, BLOCK, 1), subtile(scores, BLOCK, 1, BLOCK, 1))
                dk_0 = warpgroup.mma_AtB(dk_0 * root * root, subtile(queries, BLOCK, 0), subtile(scores, BLOCK, 0, BLOCK, 0))

                # dS before the chunk
                second_decay = first_decay * root * root
                x = token_channels.load_decayed(queries, 0, first_decay)
                ds = warpgroup.mma_AB(ds * (second_decay * exp2(end)), x, subtile(douts, BLOCK, 0))
                y = token_channels.load_decayed(queries, 1, second_decay)
                ds = warpgroup.mma_AB(ds, y, subtile(douts, BLOCK, 1))
                dq_0, dk_1 = warpgroup.wait(dq_0, newer=5), warpgroup.wait(dk_1, newer=4)
                dq_1, dk_0 = warpgroup.wait(dq_1, newer=3), warpgroup.wait(dk_0, newer=2)
                ds = warpgroup.wait(ds)
                p.release(j)
                do.release(j)

                # the results, in the places of queries, keys and dS
                TILES_READ.sync(0)  # the scorer has read dS, q' and k*
                chunk_tiles = queries, keys, sums, subtile(viewed(ds_tile, DOTS), CHUNK, wg)
                outputs.store_block((gDQ, gDK), (dq_0, dk_0), chunk_tiles, (references, ends), 0, place, scale)
                outputs.store_block((gDQ, gDK), (dq_1, dk_1), chunk_tiles, (references, ends), 1, place, scale)
                DOTS_READY.arrive(0)
                outputs.store_keys(gDQ, gTailDQ, queries, place, wg)
                s.release(j)
                outputs.store_keys(gDK, gTailDK, keys, place, wg)
                if j + 1 == walk.n:
                    warpgroup.store_wait()
                    q.release(j)
                    k.release(j)
                    GATES_STORED.sync(0)
            # computed again, to save registers
            sequence, slot, head, _ = seq_layout.locate_segment(persistent_tile(0), gCuSeqlens, length, segments, heads)
            if slot + 1 == segments * (sequence + 1):
                outputs.zero_padding((gDQ, gDK, gDV), gCuSeqlens, sequence, length, head, wg)
                at = sequence, head, int32(HALF * warpgroup.id()), 0
                warpgroup.store(gFirstState, ds, at, aligned=False)

    return differentiate_channels, smem
