"""Hedgehog's gradients chunk by chunk in any order, from sums of older features and of their gradients (hedgehog_states.py):
one kernel for queries, which leaves the window's weights and their gradients in memory, and one for keys and values, which
reads them. parts/recurrent/hedgehog_chunks.py has the equations. Each warp of a block has 16 tokens.

Scores are computed four times, as the registers hold one side of the window at a time."""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import float32, int32

from ops import block as thread_block
from ops import (
    divmod,
    equal,
    exp2,
    load,
    mma_AB,
    mma_ABt,
    mma_AtB,
    neg_infty,
    row_max,
    row_sum,
    store,
    subtile,
    tile_sum,
    truncate,
    warpgroup,
    zeros,
)
from tiles import fp32, inlined, pipeline, rt, shared, st
from tiles.launching.arguments import ENDS, FLOAT, INT, array
from tiles.layout import WARPGROUP
from tiles.targets import Target

from ...parts.recurrent.gates import LOG2_E
from ...parts.recurrent.hedgehog_chunks import FEATURES, FLOOR, HALF, NARROW, ROWS, HedgehogConfig, hedgehog_forms
from ...parts.recurrent.tokens import CHUNK, SequenceLayout

SCORES = rt(ROWS, CHUNK, fp32)
FEATURE_TILE, HALF_TILE = rt(ROWS, FEATURES, fp32), rt(ROWS, HALF, fp32)


@dataclass(frozen=True)
class HedgehogQueryGradients(HedgehogConfig):
    """The configuration of the kernel for queries."""

    label = "gradients of Hedgehog's queries"

    @staticmethod
    @functools.cache
    def make(config: "HedgehogQueryGradients"):
        """(kernel, shared memory) of a configuration."""
        INPUT, VECTOR_BYTES, ROW, SUMS = config.dtype, config.vector_bytes, config.rows, config.sums
        HALF_ROWS, seq_layout = rt(ROWS, HALF, INPUT), SequenceLayout(config.varlen)
        smem = shared(
            k=pipeline(config.chunk, 2, WARPGROUP),
            v=pipeline(config.chunk, 2, WARPGROUP),
            s=pipeline(st(FEATURES, config.head_dim, INPUT), 1, WARPGROUP),
        )

        @inlined
        def fill_window(x, gX, seq, j, head):
            """Start to copy a head's keys or values of the previous chunk (the first one again if there is none) and of the
            queries' own."""
            x.fill(0, gX, (seq.batch, seq.chunk_start(max(j - 1, 0)), head, 0), 1, 3, vector_bytes=VECTOR_BYTES)
            x.fill(1, gX, (seq.batch, seq.chunk_start(j), head, 0), 1, 3, vector_bytes=VECTOR_BYTES)

        @inlined
        def multiply_rows(gX, at, tile):
            """The product of a warp's rows with those of a tile. Rows are loaded each time: registers do not hold them."""
            return mma_ABt(zeros(SCORES), load(gX, ROW, at, 1, 3), tile)

        @inlined
        def compute_scores(queries, at, k, side, j):
            """The scores of a warp's queries with the keys of the previous chunk (side 0; -inf if there is none) or of their
            own chunk (side 1), where later keys are masked."""
            before = CHUNK if j > 0 else -CHUNK
            return warpgroup.causal(multiply_rows(queries, at, k.wait(side)), before if side == 0 else 0, -math.inf)

        @inlined
        def exp_scores(queries, at, k, side, j, row_maxima, scale):
            """E of these scores, exp((s - m) / sqrt(D))."""
            return exp2((compute_scores(queries, at, k, side, j) - row_maxima) * (scale * LOG2_E))

        @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
        def differentiate(
            gQ: array(4, INPUT), gK: array(4, INPUT), gV: array(4, INPUT), gDOut: array(4, INPUT), gFeatures: array(4, INPUT),
            gStates: array(4, INPUT), gZ: array(3), gAlphas: array(1), gBetas: array(1), gWeights: array(4, INPUT),
            gDScores: array(4, INPUT), gDNumerators: array(4, INPUT), gDNormalizers: array(3), gWindowDX: array(4),
            gDFeatures: array(4), gDAlphas: array(2), gDBetas: array(2), gCuSeqlens: ENDS, length: INT, parts: INT, heads: INT,
            group: INT, scale: FLOAT,
        ):  # fmt: skip
            """The chunks of a sequence are divided evenly among the `parts` blocks of a head. gFeatures: f(q). gWeights,
            gDScores: P and ds of the window, with 64 columns of the chunk before and 64 of the queries'. gWindowDX: the
            window's part of dq. gDAlphas, gDBetas: the sum of each warp. scale: 1 / sqrt(D)."""
            k, v, s = smem.open()
            index, part = divmod(cuda.blockIdx.x, parts)
            sequence, head = divmod(index, heads)
            key_head, _ = divmod(head, group)
            seq = seq_layout.sequence_tokens(gCuSeqlens, sequence, length)
            keys, values, features = truncate(gK, 1, seq.end), truncate(gV, 1, seq.end), truncate(gFeatures, 1, seq.end)
            alpha, beta, dalpha, dbeta = gAlphas[head], gBetas[head], float32(0), float32(0)
            for j in seq_layout.chunks_of_block(part, seq.num_chunks(), parts):
                token = seq.chunk_start(j)
                row = int32(token + ROWS * warpgroup.rank())
                chunk = seq_layout.chunk_index(token, sequence, length)
                fill_window(k, keys, seq, j, key_head)
                fill_window(v, values, seq, j, head)
                s.fill(0, gStates, (chunk, head, 0, 0))
                queries, at_query = truncate(gQ, 1, seq.end), (seq.batch, row, key_head, 0)
                row_maxima = neg_infty(SCORES.col_vec)
                for side in range(2):
                    row_maxima = row_max(compute_scores(queries, at_query, k, side, j), row_maxima)

                state = s.wait(0)
                numerator, normalizer = zeros(SUMS), zeros(SCORES.col_vec)
                for half in range(2):
                    f = load(features, HALF_ROWS, (seq.batch, row, key_head, int32(HALF * half)), 1, 3, True)
                    normalizer = normalizer + row_sum(fp32(f) * load(gZ, HALF_TILE.row_vec, (chunk, head, int32(HALF * half))))
                    numerator = mma_AB(numerator, f, subtile(state, HALF, half))
                numerator, normalizer = numerator * alpha, normalizer * alpha + FLOOR
                for side in range(2):
                    p = exp_scores(queries, at_query, k, side, j, row_maxima, scale) * beta
                    store(truncate(gWeights, 1, seq.end), INPUT(p), (seq.batch, row, head, int32(CHUNK * side)), 1, 3, True)
                    numerator, normalizer = mma_AB(numerator, INPUT(p), v.wait(side)), normalizer + row_sum(p)
                inverse, at = 1.0 / normalizer, (seq.batch, row, head, 0)
                douts = truncate(gDOut, 1, seq.end)
                dout = load(douts, ROW, at, 1, 3)
                dot = row_sum(fp32(dout) * numerator) * inverse  # dO . o
                store(truncate(gDNumerators, 1, seq.end), INPUT(fp32(dout) * inverse), at, 1, 3, True)
                store(truncate(gDNormalizers, 1, seq.end), 0.0 - dot * inverse, (seq.batch, row, head), cols=1)

                total, ties = zeros(SCORES.col_vec), zeros(SCORES.col_vec)
                for side in range(2):
                    dp = (multiply_rows(douts, at, v.wait(side)) - dot) * inverse
                    e = exp_scores(queries, at_query, k, side, j, row_maxima, scale)
                    total = total + row_sum(e * dp)
                    ties = ties + row_sum(equal(e, 1.0))
                dbeta += tile_sum(total)
                tie_gradient = total / ties
                for side in range(2):
                    dp = (multiply_rows(douts, at, v.wait(side)) - dot) * inverse
                    e = exp_scores(queries, at_query, k, side, j, row_maxima, scale)
                    ds = INPUT(e * (dp - equal(e, 1.0) * tie_gradient) * (beta * scale))
                    store(truncate(gDScores, 1, seq.end), ds, (seq.batch, row, head, int32(CHUNK * side)), 1, 3, True)
                thread_block.sync(False)  # warps load again what they have stored, so that registers hold no dq in between
                dq = zeros(SUMS)
                for side in range(2):
                    side_at = seq.batch, row, head, int32(CHUNK * side)
                    dq = mma_AB(dq, load(truncate(gDScores, 1, seq.end), HALF_ROWS, side_at, 1, 3, True), k.wait(side))
                store(truncate(gWindowDX, 1, seq.end), dq, at, 1, 3, True)

                dout = load(douts, ROW, at, 1, 3)
                for half in range(2):
                    at = seq.batch, row, head, int32(HALF * half)
                    z = load(gZ, HALF_TILE.row_vec, (chunk, head, int32(HALF * half)))
                    df = mma_ABt(zeros(HALF_TILE), dout, subtile(state, HALF, half)) - (zeros(HALF_TILE) + z) * dot
                    df = df * inverse
                    f = load(features, HALF_TILE, (seq.batch, row, key_head, int32(HALF * half)), 1, 3, True)
                    dalpha += tile_sum(f * df)
                    store(truncate(gDFeatures, 1, seq.end), df * alpha, at, 1, 3, True)
                thread_block.sync(False)
            warp = int32((sequence * parts + part) * WARPGROUP + warpgroup.rank())
            gDAlphas[warp, head], gDBetas[warp, head] = dalpha, dbeta

        return differentiate, smem


@dataclass(frozen=True)
class HedgehogKeyGradients(HedgehogConfig):
    """The configuration of the kernel for keys and values."""

    label = "gradients of Hedgehog's keys"

    @staticmethod
    @functools.cache
    def make(config: "HedgehogKeyGradients"):
        """(kernel, shared memory) of a configuration."""
        INPUT, VECTOR_BYTES, ROW, SUMS = config.dtype, config.vector_bytes, config.rows, config.sums
        FEATURE_ROWS, VARLEN, seq_layout = rt(ROWS, FEATURES, INPUT), config.varlen, SequenceLayout(config.varlen)
        smem = shared(
            w=pipeline(st(CHUNK, CHUNK, INPUT, width=NARROW), 2, WARPGROUP),
            x=pipeline(config.chunk, 2, WARPGROUP),
            s=pipeline(st(FEATURES, config.head_dim, INPUT), 1, WARPGROUP),
        )

        @inlined
        def fill(w, x, gW, gX, seq, j, head, x_head, vector_bytes):
            """Start to copy the weights (or their gradients) gW of the queries of a chunk and of the next one with the keys of
            the first, and these queries' rows of gX; zeros for a chunk after the last one."""
            weights, rows = truncate(gW, 1, seq.end), truncate(gX, 1, seq.end)
            token, next_token = seq.chunk_start(j), seq.chunk_start(j + 1)
            w.fill(0, weights, (seq.batch, token, head, CHUNK), 1, 3)
            w.fill(1, weights, (seq.batch, next_token, head, 0), 1, 3)
            x.fill(0, rows, (seq.batch, token, x_head, 0), 1, 3, vector_bytes=vector_bytes)
            x.fill(1, rows, (seq.batch, next_token, x_head, 0), 1, 3, vector_bytes=vector_bytes)

        @inlined
        def multiply(acc, w, x):
            """acc + W^T X for this warp's keys, over both chunks of queries."""
            rank, near_weights, far_weights, near_rows, far_rows = warpgroup.rank(), w.wait(0), w.wait(1), x.wait(0), x.wait(1)
            acc = mma_AtB(acc, subtile(near_weights, CHUNK, 0, ROWS, rank), near_rows)
            return mma_AtB(acc, subtile(far_weights, CHUNK, 0, ROWS, rank), far_rows)

        @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
        def differentiate(
            gQ: array(4, INPUT), gV: array(4, INPUT), gFeatures: array(4, INPUT), gStates: array(4, INPUT), gZ: array(3),
            gAlphas: array(1), gWeights: array(4, INPUT), gDScores: array(4, INPUT), gDNumerators: array(4, INPUT),
            gWindowDX: array(4), gDFeatures: array(4), gDV: array(4, INPUT), gCuSeqlens: ENDS, length: INT, parts: INT,
            heads: INT, group: INT,
        ):  # fmt: skip
            """The arguments are those of the gradients of queries, with f(k) in gFeatures, and dS and dz in gStates and gZ."""
            w, x, s = smem.open()
            index, part = divmod(cuda.blockIdx.x, parts)
            sequence, head = divmod(index, heads)
            key_head, _ = divmod(head, group)
            seq, alpha = seq_layout.sequence_tokens(gCuSeqlens, sequence, length), gAlphas[head]
            for j in seq_layout.chunks_of_block(part, seq.num_chunks(), parts):
                token = seq.chunk_start(j)
                row = int32(token + ROWS * warpgroup.rank())
                at, chunk = (seq.batch, row, head, 0), seq_layout.chunk_index(token, sequence, length)
                s.fill(0, gStates, (chunk, head, 0, 0))
                fill(w, x, gWeights, gDNumerators, seq, j, head, head, 16)
                f = load(truncate(gFeatures, 1, seq.end), FEATURE_ROWS, (seq.batch, row, key_head, 0), 1, 3, True)
                state = s.wait(0, 4)
                dv = multiply(mma_AB(zeros(SUMS), f, state) * alpha, w, x)
                store(truncate(gDV, 1, seq.end), INPUT(dv), at, 1, 3)
                thread_block.sync(False)
                fill(w, x, gDScores, gQ, seq, j, head, key_head, VECTOR_BYTES)
                values = load(truncate(gV, 1, seq.end), ROW, at, 1, 3)
                df = mma_ABt(zeros(FEATURE_TILE), values, state) + load(gZ, FEATURE_TILE.row_vec, (chunk, head, 0))
                store(truncate(gDFeatures, 1, seq.end), df * alpha, at, 1, 3, True)
                store(truncate(gWindowDX, 1, seq.end), multiply(zeros(SUMS), w, x), at, 1, 3, True)
                thread_block.sync(False)
            if VARLEN:
                padding = seq_layout.padding_tokens(gCuSeqlens, sequence, length)
                for j in range(part, padding.num_chunks(), parts):
                    row = int32(padding.chunk_start(j) + ROWS * warpgroup.rank())
                    store(gDV, INPUT(zeros(SUMS)), (padding.batch, row, head, 0), 1, 3)

        return differentiate, smem


def space(target: Target, everything: bool) -> Iterator[HedgehogQueryGradients | HedgehogKeyGradients]:
    """The configurations of bf16 and 16 bytes, with other dtypes and bytes if `everything`."""
    for kind, form in itertools.product((HedgehogQueryGradients, HedgehogKeyGradients), hedgehog_forms(everything)):
        yield kind(*form)


@functools.cache
def make(config: HedgehogQueryGradients | HedgehogKeyGradients):
    """(kernel, shared memory) of a configuration."""
    return config.make(config)
