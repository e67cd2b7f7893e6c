"""Hedgehog's gradients for Hopper, chunk by chunk in any order, from the sums of older features and of their gradients
(hedgehog_chunks.py has the equations). A block has a warpgroup for the window and one for features. With e the exponentials
of a chunk's scores with the keys of the window, G = dO S^T and z the sum of older features,

    n = alpha f . z + beta sum(e) + 1e-6        dO . o = (alpha f . G + beta sum(e dO V^T)) / n
    ds = scale beta (e (dO V^T - dO . o) / n - [e = 1] sum(..) / ties)        dq = ds K + dy M^T
    g = (G - (dO . o) z) / n        df = alpha g        dalpha = sum f . g

so o itself is not computed. What keys need of a query goes through memory: the largest score, scale beta / n, dO . o, and what
the largest score's keys share. From these the second kernel computes the scores of its keys with the queries of their own chunk
and of the next one, transposed,

    dv = alpha f(k) dS + sum of P^T dO / n        dk = sum of ds^T Q + dy M^T        df = alpha (V dS^T + dz)

and in both dy = p (df - sum p df), minus the same of the other half of the features."""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from numba import cuda
from numpy import float32, int32

from ops import (
    columns,
    divmod,
    exp2,
    greater,
    load,
    maximum,
    right_fill,
    row_max,
    row_sum,
    store,
    store_wait,
    subtile,
    tile_sum,
    tma_store,
    warpgroup,
    where,
    zeros,
)
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st, static, sv
from tiles.launching.arguments import FLOAT, INT, array, tiled
from tiles.targets import Target

from ..parts.recurrent.gates import LOG2_E, load_tokens
from ..parts.recurrent.hedgehog_chunks import FEATURES, FLOOR, HALF
from ..parts.recurrent.tokens import CHUNK, SequenceLayout

HEAD = 128  # columns of queries, keys and values, padded
WINDOW, FEATURE_ROWS, PRODUCER = range(3)  # the indices of the warpgroups
LOAD_WARP, VALUE_WARP, INPUT_WARP, STATS_WARP = range(4)  # of the producer
REGISTERS = 40, 232  # of a thread of the producer, of the others
WARPS = warpgroup.WARPGROUP
MAXIMA, FACTORS, DOTS, TIES = range(4)  # what the second kernel needs of queries
STATS = 4 * CHUNK
Z = sv(FEATURES, fp32)
EQUAL = 1 - 2.0**-21  # an exponential from which on a score counts as the largest one: both kernels may round scores apart
EQUAL_AGAIN = EQUAL - 2.0**-23  # where it is asked again: LLVM would keep all answers to the same question in registers
ABOVE_FLOOR = FLOOR * (1 + 1 / 16)  # no rounded feature lies between
SIGNAL = st(16, 64, bf16)  # the smallest tile, for a ring whose tiles nobody reads
SCORES, SUMS, HALF_SUMS = rt(16, CHUNK, fp32), rt(16, HEAD, fp32), rt(16, HALF, fp32)


@static
class FeatureTiles:
    """A chunk's features in shared memory, in this dtype, and the way back from their gradients."""

    dtype: dtype

    @inlined
    def load_half(self, tile, half):
        """A warp's rows of one half of the features."""
        return fp32(warpgroup.load(subtile(tile, CHUNK, 0, HALF, half), rt(16, HALF, self.dtype)))

    @inlined
    def load_sums(self, vector, half):
        """The sums of one half of the features, as a row."""
        return load(subtile(vector, HALF, half), HALF_SUMS.row_vec)

    @inlined
    def through_softmax(self, p, dp):
        """The gradient of x, where p = softmax(x), rounded: so p is divided by its sum, which is 0 after the last token.
        Features at the floor have none."""
        p = where(greater(p, ABOVE_FLOOR), p, 0.0)
        return p * (dp - row_sum(p * dp) / maximum(row_sum(p), FLOOR))

    @inlined
    def sum_tokens(self, tile, half, weights):
        """The sum of a chunk's features, times a number for each token: each warp has those of 16 columns."""
        x = fp32(warpgroup.load_transposed(subtile(tile, CHUNK, 0, HALF, half), rt(16, CHUNK, self.dtype)))
        return row_sum(x * weights)


@dataclass(frozen=True)
class HedgehogHopperConfig:
    """The configuration of a kernel. dtype: of q, k, v and dO. unrounded: are dq and dk float32, to be added over heads that
    share a key head?"""

    dtype: dtype
    unrounded: bool = False
    label: ClassVar[str] = ""
    threads: ClassVar[int] = 3 * warpgroup.THREADS

    def __str__(self):
        return f"{self.label}, {self.dtype}{', float32' * self.unrounded}"

    @property
    def rows(self):
        """The tile of Q, K, V or dO for a chunk."""
        return st(CHUNK, HEAD, self.dtype)

    @property
    def features(self):
        """The tile of a chunk's features."""
        return st(CHUNK, FEATURES, self.dtype)

    @property
    def state(self):
        """The tile of a state, transposed."""
        return st(HEAD, FEATURES, self.dtype)

    @property
    def map(self):
        """The tile of a feature map."""
        return st(HEAD, HALF, self.dtype)

    @property
    def square(self):
        """The tile of a chunk's dy, or of weights."""
        return st(CHUNK, CHUNK, self.dtype)

    @property
    def gradients(self):
        """The type of the kernel's argument dq or dk."""
        return array(4) if self.unrounded else tiled(self.rows, unit=1)


@dataclass(frozen=True)
class HedgehogHopperQueries(HedgehogHopperConfig):
    """The configuration of the kernel for queries."""

    label = "gradients of Hedgehog's queries"

    @staticmethod
    @functools.cache
    def make(config: "HedgehogHopperQueries"):
        """(kernel, shared memory) of a configuration."""
        INPUT, UNROUNDED, GRADIENTS = config.dtype, config.unrounded, config.gradients
        rows = FeatureTiles(INPUT)
        ROWS, (producer_registers, registers), seq_layout = tiled(config.rows, unit=1), REGISTERS, SequenceLayout()
        smem = shared(
            q=ring(config.rows, 2, 2 * WARPS if UNROUNDED else 1),
            k=ring(config.rows, 3, WARPS),
            v=ring(config.rows, 2, WARPS),
            do=ring(config.rows, 2, 2 * WARPS + 1),
            f=ring(config.features, 1, WARPS),
            s=ring(config.state, 1, WARPS),
            z=ring(Z, 2, WARPS),
            maps=ring(config.map, 1, WARPS),
            dy=ring(config.square, 1, 2 * WARPS + 1, writers=WARPS),
            q_done=ring(SIGNAL, 1, WARPS, writers=WARPS),
            out=ring(SIGNAL, 1, 1, writers=WARPS),
            window_sums=ring(sv(2 * CHUNK, fp32), 1, WARPS, writers=WARPS),
            feature_sums=ring(sv(2 * CHUNK, fp32), 1, WARPS, writers=WARPS),
            stats=ring(sv(STATS, fp32), 1, 1, writers=WARPS),
            dn=sv(CHUNK, fp32),
        )

        @inlined
        def put_pair(sums, j, x, y):
            """Leave two numbers of each token for the other warpgroup."""
            tile = sums.claim(j)
            warpgroup.store(subtile(tile, CHUNK, 0), x)
            warpgroup.store(subtile(tile, CHUNK, 1), y)
            sums.publish(j)

        @inlined
        def take_pair(sums, j):
            """The two numbers of each token that the other warpgroup has left."""
            tile = sums.wait(j)
            x, y = (
                warpgroup.load(subtile(tile, CHUNK, 0), SCORES.col_vec),
                warpgroup.load(subtile(tile, CHUNK, 1), SCORES.col_vec),
            )
            sums.release(j)
            return x, y

        @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
        def differentiate(
            gQ: ROWS, gK: ROWS, gV: ROWS, gDOut: ROWS, gFeatures: tiled(config.features, unit=1),
            gStates: tiled(config.state, rows=2), gZ: tiled(Z, 3, None, 2), gMap: tiled(config.map, 3, 1, 2), gAlphas: array(1),
            gBetas: array(1), gStats: array(3), gDNumerators: ROWS, gDZ: array(4), gDX: GRADIENTS, gDMap: array(4),
            gDAlphas: array(2), gDBetas: array(2), length: INT, segments: INT, heads: INT, group: INT, scale: FLOAT,
        ):  # fmt: skip
            """A block has one of the `segments` of a sequence, for one of the `heads`, of which `group` share a key head.
            gStates: S^T before each chunk, of the keys of all chunks before it. gZ: z before each chunk. gDZ: what each chunk
            adds to dz. gDAlphas, gDBetas: the sum of each warp. scale: 1 / sqrt(D)."""
            q, k, v, do, f, s, z, maps, dy, q_done, out, window_sums, feature_sums, stats, dn = smem.open()
            sequence, slot, head, seq = seq_layout.locate_segment(cuda.blockIdx.x, 0, length, segments, heads)
            key_head, _ = divmod(head, group)
            n, wg = seq.num_chunks(), warpgroup.id()
            if wg == PRODUCER:
                warpgroup.release_registers(producer_registers)
                warp = warpgroup.rank()
                if warp == LOAD_WARP:
                    if n > 0:
                        maps.fill(0, gMap, (key_head, 0, 0))
                        before = int32(max(seq.start - CHUNK, 0))
                        k.fill(0, gK, (seq.batch, before, key_head))
                        v.fill(0, gV, (seq.batch, before, head))
                    for j in range(n):
                        token = seq.chunk_start(j)
                        states = seq_layout.chunk_index(int32(max(token - CHUNK, 0)), sequence, length)
                        q.fill(j, gQ, (seq.batch, token, key_head))
                        k.fill(j + 1, gK, (seq.batch, token, key_head))
                        do.fill(j, gDOut, (seq.batch, token, head))
                        v.fill(j + 1, gV, (seq.batch, token, head))
                        s.fill(j, gStates, (states, head))
                        z.fill(j, gZ, (seq_layout.chunk_index(token, sequence, length), key_head))
                        f.fill(j, gFeatures, (seq.batch, token, key_head))
                elif warp == VALUE_WARP:
                    for j in range(n):
                        at = seq.batch, seq.chunk_start(j), head
                        dy.wait(j)
                        tma_store(gDNumerators, at, do.wait(j))  # dO has been divided by n
                        store_wait()
                        dy.release(j)
                        do.release(j)
                elif warp == INPUT_WARP:
                    if not UNROUNDED:
                        for j in range(n):
                            out.wait(j)
                            tma_store(gDX, (seq.batch, seq.chunk_start(j), head), q.wait(j))  # dq lies there
                            store_wait()
                            out.release(j)
                            q.release(j)
                else:
                    for j in range(n):
                        chunk, tile = seq_layout.chunk_index(seq.chunk_start(j), sequence, length), stats.wait(j)
                        for number in range(4):
                            store(gStats, load_tokens(tile, number), (chunk, head, int32(CHUNK * number)), cols=2)
                        stats.release(j)
            elif wg == WINDOW:
                warpgroup.claim_registers(registers)
                alpha, beta, dbeta, first = gAlphas[head], gBetas[head], float32(0), seq.start
                dm = zeros(HALF_SUMS)
                for j in range(n):
                    queries, douts = q.wait(j), do.wait(j)
                    near = warpgroup.mm_ABt(queries, k.wait(j + 1))
                    far = warpgroup.mm_ABt(queries, k.wait(j))
                    dp_near = warpgroup.mm_ABt(douts, v.wait(j + 1))
                    dp_far = warpgroup.mm_ABt(douts, v.wait(j))
                    near = warpgroup.causal(warpgroup.wait(near, newer=3), 0, -math.inf)
                    far = right_fill(warpgroup.wait(far, newer=2), int32(min(first + CHUNK * j, CHUNK)), -math.inf)
                    maxima = row_max(near, row_max(far))
                    near, far = exp2((near - maxima) * (scale * LOG2_E)), exp2((far - maxima) * (scale * LOG2_E))
                    total = row_sum(near, row_sum(far))
                    ties = row_sum(greater(near, EQUAL), row_sum(greater(far, EQUAL)))
                    dp_near, dp_far = warpgroup.wait(dp_near, newer=1), warpgroup.wait(dp_far)
                    v.release(j)
                    dp_total = row_sum(near * dp_near, row_sum(far * dp_far))
                    do.release(j)
                    put_pair(window_sums, j, total, dp_total)
                    older_total, older_dp = take_pair(feature_sums, j)
                    inverse = 1.0 / (older_total * alpha + total * beta + FLOOR)
                    dot = (older_dp * alpha + dp_total * beta) * inverse
                    dp_total = (dp_total - dot * total) * inverse
                    dbeta += tile_sum(dp_total)
                    factor, tie = inverse * (beta * scale), dp_total / ties * (beta * scale)
                    ds_near = INPUT(near * ((dp_near - dot) * factor) - greater(near, EQUAL_AGAIN) * tie)
                    ds_far = INPUT(far * ((dp_far - dot) * factor) - greater(far, EQUAL_AGAIN) * tie)
                    dq = warpgroup.mma_AB(warpgroup.mm_AB(ds_near, k.wait(j + 1)), ds_far, k.wait(j))
                    tile = stats.claim(j)
                    warpgroup.store(subtile(tile, CHUNK, MAXIMA), maxima)
                    warpgroup.store(subtile(tile, CHUNK, FACTORS), factor)
                    warpgroup.store(subtile(tile, CHUNK, DOTS), dot)
                    warpgroup.store(subtile(tile, CHUNK, TIES), tie)
                    stats.publish(j)
                    dy_tile = dy.wait(j)
                    dq = warpgroup.mma_ABt(dq, dy_tile, maps.wait(0))
                    dm = warpgroup.mma_AtB(dm, subtile(queries, CHUNK, 0, HALF, WINDOW), dy_tile)
                    dq, dm = warpgroup.wait(dq, newer=1), warpgroup.wait(dm)
                    k.release(j)
                    dy.release(j)
                    if UNROUNDED:
                        warpgroup.store(gDX, dq, (seq.batch, seq.chunk_start(j), head, 0), 1, 3)
                        q.release(j)
                    else:
                        out.claim(j)
                        q_done.wait(j)  # the other warpgroup has read the queries
                        q_done.release(j)
                        warpgroup.sync()  # and so have these warps
                        warpgroup.store(queries, dq)
                        out.publish(j)
                warpgroup.store(gDMap, dm, (HALF * WINDOW, head, slot, 0), 0, 3)
                gDBetas[int32(WARPS * slot + warpgroup.rank()), head] = dbeta
            else:
                warpgroup.claim_registers(registers)
                alpha, beta, dalpha, dm = gAlphas[head], gBetas[head], float32(0), zeros(HALF_SUMS)
                for j in range(n):
                    token = seq.chunk_start(j)
                    chunk = seq_layout.chunk_index(token, sequence, length)
                    g = warpgroup.mm_AB(do.wait(j), s.wait(j))
                    f_tile = f.wait(j)
                    up, down = rows.load_half(f_tile, 0), rows.load_half(f_tile, 1)
                    z_up, z_down = rows.load_sums(z.wait(j), 0), rows.load_sums(z.wait(j), 1)
                    z.release(j)
                    older_total = row_sum(up * z_up, row_sum(down * z_down))
                    g = warpgroup.wait(g)
                    s.release(j)
                    g_up, g_down = columns(g, HALF, 0), columns(g, HALF, 1)
                    older_dp = row_sum(up * g_up, row_sum(down * g_down))
                    put_pair(feature_sums, j, older_total, older_dp)
                    total, dp_total = take_pair(window_sums, j)
                    inverse = 1.0 / (older_total * alpha + total * beta + FLOOR)
                    dot = (older_dp * alpha + dp_total * beta) * inverse
                    dalpha += tile_sum((older_dp - dot * older_total) * inverse)
                    factor = inverse * alpha
                    dy_tile = rows.through_softmax(up, (g_up - z_up * dot) * factor)
                    dy_tile = dy_tile - rows.through_softmax(down, (g_down - z_down * dot) * factor)
                    warpgroup.store(dy.claim(j), INPUT(dy_tile))
                    douts = do.wait(j)
                    numerators = fp32(warpgroup.load(douts, rt(16, HEAD, INPUT))) * inverse
                    warpgroup.store(douts, INPUT(numerators))
                    dy.publish(j)  # its fence is dO's, too
                    do.release(j)
                    dm = warpgroup.mma_AtB(dm, subtile(q.wait(j), CHUNK, 0, HALF, FEATURE_ROWS), dy.wait(j))
                    warpgroup.store(dn, dot * inverse * -1.0)
                    warpgroup.sync()
                    weights = load(dn, SCORES.row_vec)
                    for half in range(2):
                        sums = rows.sum_tokens(f_tile, half, weights)
                        warpgroup.store(gDZ, sums, (chunk, head, 0, int32(HALF * half)), cols=3)
                    f.release(j)
                    dm = warpgroup.wait(dm)
                    dy.release(j)
                    if UNROUNDED:
                        q.release(j)
                    else:
                        q_done.claim(j)
                        q_done.publish(j)
                    warpgroup.sync()  # all have read dn
                warpgroup.store(gDMap, dm, (HALF * FEATURE_ROWS, head, slot, 0), 0, 3)
                gDAlphas[int32(WARPS * slot + warpgroup.rank()), head] = dalpha

        return differentiate, smem


@dataclass(frozen=True)
class HedgehogHopperKeys(HedgehogHopperConfig):
    """The configuration of the kernel for keys and values."""

    label = "gradients of Hedgehog's keys"

    @staticmethod
    @functools.cache
    def make(config: "HedgehogHopperKeys"):
        """(kernel, shared memory) of a configuration."""
        INPUT, UNROUNDED, GRADIENTS = config.dtype, config.unrounded, config.gradients
        rows = FeatureTiles(INPUT)
        ROWS, (producer_registers, registers), seq_layout = tiled(config.rows, unit=1), REGISTERS, SequenceLayout()
        smem = shared(
            q=ring(config.rows, 2, WARPS),
            do=ring(config.rows, 2, 2 * WARPS),
            k=ring(config.rows, 1, 2 * WARPS),
            v=ring(config.rows, 1, 2 * WARPS),
            f=ring(config.features, 1, WARPS),
            s=ring(config.state, 1, WARPS),
            z=ring(Z, 2, WARPS),
            maps=ring(config.map, 1, WARPS),
            stats=ring(sv(STATS, fp32), 2, WARPS),
            weights=ring(config.square, 2, WARPS, writers=WARPS),
            dy=ring(config.square, 1, 2 * WARPS, writers=WARPS),
            out=ring(config.rows, 1, 1, writers=WARPS),
            out_values=ring(config.rows, 1, 1, writers=WARPS),
        )

        @inlined
        def differentiate_scores(s_t, dp_t, stats, scale):
            """(P^T / n, ds^T) of scores, transposed. stats: those of the queries, in shared memory."""
            e = exp2((s_t - load(subtile(stats, CHUNK, MAXIMA), SCORES.row_vec)) * (scale * LOG2_E))
            weights = e * load(subtile(stats, CHUNK, FACTORS), SCORES.row_vec)
            ds = weights * (dp_t - load(subtile(stats, CHUNK, DOTS), SCORES.row_vec))
            ds = ds - greater(e, EQUAL) * load(subtile(stats, CHUNK, TIES), SCORES.row_vec)
            return INPUT(weights * (1.0 / scale)), INPUT(ds)

        @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
        def differentiate(
            gQ: ROWS, gK: ROWS, gV: ROWS, gDOut: ROWS, gFeatures: tiled(config.features, unit=1),
            gStates: tiled(config.state, rows=2), gZ: tiled(Z, 3, None, 2), gMap: tiled(config.map, 3, 1, 2), gAlphas: array(1),
            gStats: tiled(sv(STATS, fp32), 3, None, 2), gDX: GRADIENTS, gDV: ROWS, gDMap: array(4),
            length: INT, segments: INT, heads: INT, group: INT, scale: FLOAT,
        ):  # fmt: skip
            """The arguments are those of the kernel for queries, with f(k) in gFeatures. gStates: dS^T after each chunk, of the
            queries of all chunks after it. gZ: dz after the next chunk."""
            q, do, k, v, f, s, z, maps, stats, weights, dy, out, out_values = smem.open()
            sequence, slot, head, seq = seq_layout.locate_segment(cuda.blockIdx.x, 0, length, segments, heads)
            key_head, _ = divmod(head, group)
            n, wg = seq.num_chunks(), warpgroup.id()
            if wg == PRODUCER:
                warpgroup.release_registers(producer_registers)
                warp, last = warpgroup.rank(), int32((length - 1) // CHUNK * CHUNK)  # the sequence's last chunk
                if warp == LOAD_WARP:
                    if n > 0:
                        maps.fill(0, gMap, (key_head, 0, 0))
                        q.fill(0, gQ, (seq.batch, seq.start, key_head))
                        do.fill(0, gDOut, (seq.batch, seq.start, head))
                        stats.fill(0, gStats, (seq_layout.chunk_index(seq.start, sequence, length), head))
                    for j in range(n):
                        token, later = seq.chunk_start(j), seq.chunk_start(j + 1)
                        chunk = seq_layout.chunk_index(int32(min(later, last)), sequence, length)
                        k.fill(j, gK, (seq.batch, token, key_head))
                        v.fill(j, gV, (seq.batch, token, head))
                        f.fill(j, gFeatures, (seq.batch, token, key_head))
                        s.fill(j, gStates, (chunk, head))
                        z.fill(j, gZ, (seq_layout.chunk_index(token, sequence, length), head))
                        q.fill(j + 1, gQ, (seq.batch, later, key_head))
                        do.fill(j + 1, gDOut, (seq.batch, later, head))
                        stats.fill(j + 1, gStats, (chunk, head))
                elif warp == INPUT_WARP:
                    if not UNROUNDED:
                        for j in range(n):
                            tma_store(gDX, (seq.batch, seq.chunk_start(j), head), out.wait(j))
                            store_wait()
                            out.release(j)
                elif warp == VALUE_WARP:
                    for j in range(n):
                        tma_store(gDV, (seq.batch, seq.chunk_start(j), head), out_values.wait(j))
                        store_wait()
                        out_values.release(j)
            elif wg == WINDOW:
                warpgroup.claim_registers(registers)
                dm = zeros(HALF_SUMS)
                for j in range(n):
                    keys, values = k.wait(j), v.wait(j)
                    s_t, dp_t = warpgroup.mm_ABt(keys, q.wait(j)), warpgroup.mm_ABt(values, do.wait(j))
                    s_t = warpgroup.triu(warpgroup.wait(s_t, newer=1), 0, -math.inf)
                    w, ds = differentiate_scores(s_t, warpgroup.wait(dp_t), stats.wait(j), scale)
                    dk = warpgroup.mm_AB(ds, q.wait(j))
                    warpgroup.store(weights.claim(2 * j), w)
                    weights.publish(2 * j)
                    stats.release(j)
                    do.release(j)
                    s_t = warpgroup.mm_ABt(keys, q.wait(j + 1))
                    dp_t = warpgroup.mm_ABt(values, do.wait(j + 1))
                    dk = warpgroup.wait(dk, newer=2)
                    q.release(j)
                    # queries after the sequence's end have no scores
                    later = int32(length - seq.chunk_start(j + 1))
                    s_t = right_fill(warpgroup.wait(s_t, newer=1), int32(max(later, 0)), -math.inf)
                    w, ds = differentiate_scores(s_t, warpgroup.wait(dp_t), stats.wait(j + 1), scale)
                    v.release(j)
                    dk = warpgroup.mma_AB(dk, ds, q.wait(j + 1))
                    warpgroup.store(weights.claim(2 * j + 1), w)
                    weights.publish(2 * j + 1)
                    dy_tile = dy.wait(j)
                    dk = warpgroup.mma_ABt(dk, dy_tile, maps.wait(0))
                    dm = warpgroup.mma_AtB(dm, subtile(keys, CHUNK, 0, HALF, WINDOW), dy_tile)
                    dk, dm = warpgroup.wait(dk, newer=1), warpgroup.wait(dm)
                    k.release(j)
                    dy.release(j)
                    if UNROUNDED:
                        warpgroup.store(gDX, dk, (seq.batch, seq.chunk_start(j), head, 0), 1, 3)
                    else:
                        warpgroup.store(out.claim(j), dk)
                        out.publish(j)
                warpgroup.store(gDMap, dm, (HALF * WINDOW, head, slot, 0), 0, 3)
            else:
                warpgroup.claim_registers(registers)
                alpha, dm = gAlphas[head], zeros(HALF_SUMS)
                for j in range(n):
                    f_tile, states = f.wait(j), s.wait(j)
                    g = warpgroup.mm_AB(v.wait(j), states)
                    dv = warpgroup.mm_ABt(f_tile, states)
                    z_up, z_down = rows.load_sums(z.wait(j), 0), rows.load_sums(z.wait(j), 1)
                    z.release(j)
                    g = warpgroup.wait(g, newer=1)
                    v.release(j)
                    dy_tile = rows.through_softmax(rows.load_half(f_tile, 0), (columns(g, HALF, 0) + z_up) * alpha)
                    g_down = (columns(g, HALF, 1) + z_down) * alpha
                    dy_tile = dy_tile - rows.through_softmax(rows.load_half(f_tile, 1), g_down)
                    warpgroup.store(dy.claim(j), INPUT(dy_tile))
                    dy.publish(j)
                    dv = warpgroup.wait(dv) * alpha
                    s.release(j)
                    f.release(j)
                    dm = warpgroup.mma_AtB(dm, subtile(k.wait(j), CHUNK, 0, HALF, FEATURE_ROWS), dy.wait(j))
                    dv = warpgroup.mma_AB(dv, weights.wait(2 * j), do.wait(j))
                    dv = warpgroup.mma_AB(dv, weights.wait(2 * j + 1), do.wait(j + 1))
                    dm, dv = warpgroup.wait(dm, newer=2), warpgroup.wait(dv)
                    k.release(j)
                    dy.release(j)
                    weights.release(2 * j)
                    weights.release(2 * j + 1)
                    do.release(j)
                    warpgroup.store(out_values.claim(j), dv)
                    out_values.publish(j)
                warpgroup.store(gDMap, dm, (HALF * FEATURE_ROWS, head, slot, 0), 0, 3)

        return differentiate, smem


KERNELS = HedgehogHopperQueries, HedgehogHopperKeys


def space(target: Target, everything: bool) -> Iterator[HedgehogHopperConfig]:
    """The configurations; those of fp16 with `everything` only."""
    if target.has_wgmma:
        for kind, input_dtype in itertools.product(KERNELS, (bf16, fp16) if everything else (bf16,)):
            yield from (kind(input_dtype, unrounded) for unrounded in (False, True))


@functools.cache
def make(config):
    """(kernel, shared memory) of a configuration."""
    return config.make(config)
