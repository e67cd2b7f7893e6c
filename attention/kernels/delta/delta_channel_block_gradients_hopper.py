"""Gradients of the delta rule's queries, keys, betas and gates where each channel of the keys has a decay, chunk by chunk in
any order, for Hopper, where numbers hold the decays of a chunk as two blocks of 32 tokens with a reference r each, the middle
of its sums b, in powers of 2 an integer (parts/delta/delta_channels.py has the equations). With U = beta E and c = b - r

    Q^ = exp(c) q        K^ = exp(c) k        K* = exp(-c) k

    X_i = exp(r_i) scale S dO_i + sum_j dP_ij exp(r_i - r_j) K*_j                        dq = exp(c) X
    Y_i = -exp(r_i) S dV_i + sum_j G_ij exp(r_i - r_j) K*_j
    W_j = exp(b_last - r_j) dS U_j + sum_i exp(r_i - r_j) (dP_ij Q^_i + G_ij K^_i)       dk = exp(c) Y + exp(-c) W

so that all pairs of tokens are products of shared tiles. With E = exp(r_0), D = exp(r_1 - r_0) and F = exp(b_last - r_1), sums
over blocks are taken by Horner's rule: the sum so far is multiplied by D before the next block is added. The gradient of a gate
is the sum of Q^ X + K^ Y - K* W over its token and all later ones: factors between blocks are exact, so a pair of two later
tokens adds nothing, to the last bits of float32.

Two consumers have 64 channels each, and all their tiles as channels by tokens, as channel_gradients_hopper.py has: a channel's
references and decays are numbers of a lane, and sums over tokens are scans in registers. A third warpgroup loads and stores. A
chunk is strong if the dtype does not hold its Q^ or K*: what is stored of it is not for use, and
delta_channel_gradients_hopper.py computes it again.

Shared memory is used several times: Q^, K* and then dQ, dK overwrite q and k, and the gates' gradients overwrite K^."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import float32, int32

from ops import exp2, load, row_sum, store, store_wait, subtile, tile_any, tile_max, viewed, warpgroup, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st, sv
from tiles.launching.arguments import ENDS, FLOAT, INT, array, tiled
from tiles.targets import Target

from ...parts.delta.delta_channel_chunks import ChunkInputs
from ...parts.delta.delta_gradient_sums import diagonal, store_beta_gradients
from ...parts.recurrent.chunk_items import ChunkGrid, ChunkItems
from ...parts.recurrent.gates import ROW_VEC
from ...parts.recurrent.token_channels import BLOCK, SUMS
from ...parts.recurrent.token_pairs import TokenPairs
from ...parts.recurrent.tokens import CHUNK, SequenceLayout

SIZES = KEYS, VALUES = 128, 128  # channels of a key, columns of a value, as padded
HALF = KEYS // 2  # channels of a consumer
CONSUMERS, PRODUCER, DP_CONSUMER = 2, 2, 0  # DP_CONSUMER computes dP, the other one G
LOADER, BETA_SENDER, SENDER = range(3)  # warps of the producer
WARPS = CONSUMERS * warpgroup.WARPGROUP  # of the consumers
REGISTERS = 24, 240  # of a thread of producer and consumers
VOTES = 16  # numbers by which a warp says whether the chunk is strong
UNFENCED = False  # no fence at a synchronisation or a release, because another one is there already


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. gates: the dtype of the gates; dtype: of everything else. with_gates: are the gates' gradients
    wanted? varlen: are sequences packed (cu_seqlens)?"""

    gates: dtype
    dtype: dtype
    with_gates: bool = True
    varlen: bool = False
    threads = warpgroup.THREADS * (CONSUMERS + 1)

    def __str__(self):
        flags = ", without gates" * (not self.with_gates) + ", varlen" * self.varlen
        return f"gradients in chunks of two blocks, {self.dtype}, gates {self.gates}{flags}"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of bf16, and of fp16 if `everything`."""
    if target.has_wgmma:
        for input_dtype in (bf16, fp16) if everything else (bf16,):
            for gates, with_gates, varlen in itertools.product((fp32, input_dtype), (True, False), (False, True)):
                yield Config(gates, input_dtype, with_gates, varlen)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, WITH_GATES, pairs = config.dtype, config.with_gates, TokenPairs(config.dtype, HALF, config.gates)
    seq_layout = SequenceLayout(config.varlen)
    KEY, VALUE, STATE = st(CHUNK, KEYS, INPUT), st(CHUNK, VALUES, INPUT), st(VALUES, KEYS, INPUT)
    GATES, SCORES = st(CHUNK, KEYS, config.gates), st(2 * CHUNK, CHUNK, INPUT, width=BLOCK * INPUT.itemsize)
    chunk_items, inputs = ChunkItems(seq_layout), ChunkInputs(seq_layout, KEY, VALUE, GATES, STATE)
    INPUTS, KEY_OUTPUT, GATE_OUTPUT = inputs.params(), tiled(KEY, unit=1), tiled(st(CHUNK, HALF, fp32), unit=1)
    VOTE = rt(16, VOTES, fp32).row_vec
    GATE_GRADIENTS = st(CHUNK, KEYS, fp32)  # of both consumers, which overwrite K^
    PRODUCER_REGISTERS, CONSUMER_REGISTERS = REGISTERS
    smem = shared(
        q=ring(KEY, 1, 1),
        k=ring(KEY, 1, 1),
        do=ring(VALUE, 1, WARPS),
        e=ring(VALUE, 1, WARPS),
        dv=ring(VALUE, 1, WARPS),
        s=ring(STATE, 1, WARPS),
        ds=ring(STATE, 1, WARPS),
        g=ring(GATES, 1, WARPS),
        w=ring(SCORES, 1, WARPS, writers=WARPS),
        read_keys=st(CHUNK, 2 * KEYS, INPUT),  # K^ of each consumer in the first half of its columns
        beta=ring(sv(CHUNK, fp32), 1, WARPS + 1),
        results=ring(sv(CHUNK + WARPS * VOTES, fp32), 1, 2, writers=WARPS),  # beta dbeta, and the warps' votes
    )

    @inlined
    def dot_states(states, d_states, half):
        """<S, dS> of each channel, over half of the columns of values."""
        return row_sum(pairs.load_state(states, half) * pairs.load_state(d_states, half))

    @inlined
    def finish_scores(scores, beta, products, scale):
        """dP from dO E^T, or G from dV E^T, whose diagonal is beta dbeta, which `products` takes."""
        cols = load(beta, ROW_VEC)
        if warpgroup.id() == DP_CONSUMER:
            scores = warpgroup.causal(scores * (cols * scale), 0, 0.0)
        else:
            warpgroup.store(products, diagonal(scores))
            scores = warpgroup.causal(scores * (0.0 - cols), -1, 0.0)
        return INPUT(scores)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def differentiate(
        arrays: INPUTS, gDQ: KEY_OUTPUT, gDK: KEY_OUTPUT, gDBeta: array(3), gDGates: GATE_OUTPUT, gStrong: array(2),
        gStrongBlocks: array(1), gTailDQ: KEY_OUTPUT, gTailDK: KEY_OUTPUT, gTailDGates: GATE_OUTPUT, gCuSeqlens: ENDS,
        length: INT, chunks: INT, items: INT, heads: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """arrays: see ChunkInputs; chunks, items: ChunkGrid; gTailDQ .. gTailDGates: packed_tails.py. gStrong (chunk, head): 1
        if the chunk is strong, else 0; gStrongBlocks: 1 if one of a thread block's chunks is."""
        memory = smem.open()
        q, k, do, e, dv, s, ds, g, w, read_keys, beta, results = memory
        grid = ChunkGrid(gCuSeqlens, length, chunks, items, heads)
        if warpgroup.id() == PRODUCER:
            warpgroup.release_registers(PRODUCER_REGISTERS)
            j = int32(0)
            if warpgroup.rank() == LOADER:
                while chunk_items.has(grid, j):
                    inputs.fill(memory, arrays, j, chunk_items.locate(grid, j), group)
                    j = int32(j + 1)
            elif warpgroup.rank() == BETA_SENDER:
                while chunk_items.has(grid, j):
                    _, head, _, token, seq = chunk_items.locate(grid, j)
                    betas, sums = beta.wait(j), results.wait(j)
                    store_beta_gradients(gDBeta, seq, head, token, sums, betas)
                    beta.release(j)
                    results.release(j)
                    j = int32(j + 1)
            elif warpgroup.rank() == SENDER:
                gradients, is_any_strong = viewed(read_keys, GATE_GRADIENTS), float32(0)
                while chunk_items.has(grid, j):
                    place, flags, queries, keys = chunk_items.locate(grid, j), results.wait(j), q.wait(j), k.wait(j)
                    seq_layout.store_chunk(gDQ, gTailDQ, place, queries)
                    seq_layout.store_chunk(gDK, gTailDK, place, keys)
                    if WITH_GATES:
                        for i in range(CONSUMERS):
                            tile = subtile(gradients, CHUNK, 0, HALF, i)
                            seq_layout.store_chunk(gDGates, gTailDGates, place, tile, i)
                    strong = float32(0)
                    for i in range(WARPS):
                        strong = max(strong, tile_max(load(subtile(flags, VOTES, int32(CHUNK // VOTES + i)), VOTE)))
                    gStrong[place.chunk, place.head] = strong
                    is_any_strong = max(is_any_strong, strong)
                    store_wait()
                    results.release(j)
                    q.release(j)
                    k.release(j)
                    j = int32(j + 1)
                gStrongBlocks[cuda.blockIdx.x] = is_any_strong
        else:
            warpgroup.claim_registers(CONSUMER_REGISTERS)
            j = int32(0)
            while chunk_items.has(grid, j):
                wg = warpgroup.id()
                # products with states, dP and G, while gates are summed up and tokens decayed
                errors, douts, dvs = e.wait(j), do.wait(j), dv.wait(j)
                left = douts
                if wg != DP_CONSUMER:
                    left = dvs
                states, d_states = subtile(s.wait(j), VALUES, 0, HALF, wg), subtile(ds.wait(j), VALUES, 0, HALF, wg)
                scores = warpgroup.mm_ABt(left, errors)
                x_0 = warpgroup.mm_AtBt(states, subtile(douts, BLOCK, 0))
                x_1 = warpgroup.mm_AtBt(states, subtile(douts, BLOCK, 1))
                y_0 = warpgroup.mm_AtBt(states, subtile(dvs, BLOCK, 0))
                y_1 = warpgroup.mm_AtBt(states, subtile(dvs, BLOCK, 1))
                if WITH_GATES:
                    dots = dot_states(states, d_states, 0) + dot_states(states, d_states, 1)
                betas, sums = beta.wait(j), results.claim(j)
                scores = finish_scores(warpgroup.wait(scores, newer=4), betas, subtile(sums, CHUNK, 0), scale)
                warpgroup.store(subtile(w.claim(j), CHUNK, wg), scores)
                w.publish(j)
                w_0 = warpgroup.mm_AtBt(d_states, subtile(errors, BLOCK, 0))
                w_1 = warpgroup.mm_AtBt(d_states, subtile(errors, BLOCK, 1))
                gates = g.wait(j)
                b_0, b_1 = pairs.sum_gates(gates, wg, 0), pairs.sum_gates(gates, wg, 1)
                r_0, total, last_0, last, strong = pairs.find_middles(b_0, b_1)
                warp = int32(CHUNK // VOTES + warpgroup.WARPGROUP * wg + warpgroup.rank())
                store(subtile(sums, VOTES, warp), zeros(VOTE) + (1.0 if tile_any(strong) else 0.0))
                if WITH_GATES:
                    carried = dots * exp2(last)
                r_1, between, to_end = total - last_0, total - r_0, last - total
                queries, keys = subtile(q.wait(j), CHUNK, 0, HALF, wg), subtile(k.wait(j), CHUNK, 0, HALF, wg)
                tiles = queries, keys, subtile(read_keys, CHUNK, 0, HALF, int32(2 * wg))
                pairs.factor(tiles, b_0, r_0, 0)
                pairs.factor(tiles, b_1, r_1, 1)
                beta_0, beta_1 = load(subtile(betas, BLOCK, 0), SUMS.row_vec), load(subtile(betas, BLOCK, 1), SUMS.row_vec)
                beta.release(j)  # its fence is that of loads of gates and states, too
                g.release(j)
                root, start, end = exp2(between * 0.5), exp2(r_0), exp2(to_end)  # D = root^2 may be out of range
                x_0, x_1 = warpgroup.wait(x_0, newer=5) * (start * scale), warpgroup.wait(x_1, newer=4) * (start * scale)
                do.release(j)
                y_0, y_1 = warpgroup.wait(y_0, newer=3) * (0.0 - start), warpgroup.wait(y_1, newer=2) * (0.0 - start)
                dv.release(j)
                s.release(j)
                w_0, w_1 = warpgroup.wait(w_0, newer=1) * beta_0 * end, warpgroup.wait(w_1) * beta_1 * end
                e.release(j)
                ds.release(j)
                warpgroup.sync()  # all have written Q^, K* and K^

                # pairs of tokens
                if WITH_GATES:
                    carried = carried + row_sum(w_0 * pairs.load(keys, 0)) * root * root
                    carried = carried + row_sum(w_1 * pairs.load(keys, 1))
                first, second = pairs.add_pairs((x_0, y_0, w_0), (x_1, y_1, w_1), tiles, w.wait(j), root)
                w.release(j)
                dq_0, dk_0, dots_0 = pairs.finish_block(first, tiles, b_0, r_0, 0)
                dq_1, dk_1, dots_1 = pairs.finish_block(second, tiles, b_1, r_1, 1)
                warpgroup.sync(UNFENCED)  # all have read Q^, K* and K^
                warpgroup.store_transposed(subtile(queries, BLOCK, 0), dq_0, True)
                warpgroup.store_transposed(subtile(queries, BLOCK, 1), dq_1, True)
                warpgroup.store_transposed(subtile(keys, BLOCK, 0), dk_0, True)
                warpgroup.store_transposed(subtile(keys, BLOCK, 1), dk_1, True)
                if WITH_GATES:
                    gate_gradients = subtile(viewed(read_keys, GATE_GRADIENTS), CHUNK, 0, HALF, wg)
                    dots_1, carried = pairs.sum_later(dots_1, carried)
                    warpgroup.store_transposed(subtile(gate_gradients, BLOCK, 1), dots_1)
                    dots_0, carried = pairs.sum_later(dots_0, carried)
                    warpgroup.store_transposed(subtile(gate_gradients, BLOCK, 0), dots_0)
                results.publish(j)
                j = int32(j + 1)

    return differentiate, smem
