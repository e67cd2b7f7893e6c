"""Gradients of Based (based_hopper.py) for Hopper, for values of up to 64 columns, by two walks. With the weights
P = 1 + s + s^2 / 2 of s = scale q_i . k_j for j <= i, w_i = 1 / sum_j P_ij, or 1 without the division, and O the outputs,

    dP_ij = w_i (dO_i . v_j - dO_i . O_i)        ds = dP (1 + s)        dv_j = sum_i w_i P_ij dO_i

    dq_i = scale (sum of ds_ij k_j in the chunk + J(q_i)^T w_i (S dO_i - (dO_i . O_i) z))
    dk_j = scale sum of ds_ij q_i in the chunk + J(k_j)^T (dS v_j + dz)

where S = sum f(k)^T v of earlier chunks and dS = sum f(q)^T w dO of later ones, z and dz are the sums of f(k) and of
-w_i (dO_i . O_i) f(q_i), and J are the derivatives of features. dO . O is a part of the division's derivative: without the
division it is left out.

The first walk goes from the first chunk to the last. It holds S as forward does, computes O and the sums of weights again, and
stores w and -w dO . O for the second walk, which goes from the last chunk to the first and holds dS. Gradients of features stay
in registers."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import float32, int32

from ops import (
    finish_sum,
    fma,
    lane_sum,
    less,
    load,
    mma_AB,
    mma_ABt,
    mma_AtB,
    ones,
    row_sum,
    subtile,
    taylor,
    tile_sum,
    warpgroup,
    where,
    zeros,
)
from ops.for_attention.taylor_features import BASE, HALF
from tiles import bf16, fp16, fp32, ring, rt, shared
from tiles.launching.arguments import ENDS, FLOAT, INT, array, tiled
from tiles.targets import Target

from ...parts.recurrent.based_segments import SCORES, VECTORS, QuerySide
from ...parts.recurrent.based_walk import CONSUMER_REGISTERS, CTAS_PER_SM, LOADER, STATE, THREADS, BasedTiles, BasedWalk
from ...parts.recurrent.taylor_sums import SQUARE, load_key_sums, load_query_sums, store_sums, taylor_weights
from ...parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout

STAGES = 2  # chunks in flight


@dataclass(frozen=True)
class Config(BasedTiles):
    """The configuration of a walk. unrounded: are dq and dk float32, to be added over heads that share a key head? varlen: are
    sequences packed (cu_seqlens)?"""

    unrounded: bool = False
    varlen: bool = False
    loads_vectors = False

    def __str__(self):
        flags = "normalized" * self.normalize, "float32" * self.unrounded, "varlen" * self.varlen
        return ", ".join(filter(None, (f"Based's gradients of {self.label}, {self.dtype}", *flags)))

    @staticmethod
    def make(config):
        """(kernel, shared memory) of a configuration."""
        raise NotImplementedError

    @property
    def walk(self):
        """The object with the steps that both walks share."""
        return BasedWalk(self.dtype, SequenceLayout(self.varlen), self.loads_vectors)

    def shared_memory(self, **extra_tiles):
        """The shared memory of a walk: that of both walks, and `extra_tiles`."""
        key, value = ring(self.key, STAGES), ring(self.value, STAGES)
        return shared(q=key, k=key, v=value, do=value, state=self.features, features=self.features, **extra_tiles)

    @property
    def weighted_tiles(self):
        """The shared memory for the division, in the walk that goes back."""
        return {"weighted": self.key, "vectors": ring(VECTORS, STAGES)} if self.normalize else {}


@dataclass(frozen=True)
class BasedQueryGradients(Config):
    """The configuration of the walk that computes dq, from the first chunk to the last."""

    label = "queries"

    @staticmethod
    @functools.cache
    def make(config: "BasedQueryGradients"):
        """(kernel, shared memory) of a configuration."""
        INPUT, NORMALIZE, walk, seq_layout = config.dtype, config.normalize, config.walk, SequenceLayout(config.varlen)
        X, ONES, DOUT = rt(16, BASE, INPUT), rt(16, CHUNK, INPUT), rt(16, COLUMNS, INPUT)
        KEYS, VALUES = tiled(config.key, unit=1), tiled(config.value, unit=1)
        GRADIENTS = array(4, fp32 if config.unrounded else INPUT)
        smem = config.shared_memory()

        @cuda.jit(launch_bounds=(THREADS, CTAS_PER_SM), fastmath=True)
        def differentiate_queries(
            gQ: KEYS, gK: KEYS, gV: VALUES, gDOut: VALUES, gDQ: GRADIENTS, gVectors: array(3), gInitialState: array(4),
            gInitialZ: array(3), gCuSeqlens: ENDS, length: INT, segments: INT, heads: INT, group: INT, scale: FLOAT,
        ):  # fmt: skip
            """dq of one of the `segments` of a sequence, for one of the `heads`, of which `group` share a key head. Writes
            w and -w dO . O of each chunk, gVectors. gInitialState, gInitialZ: before each segment."""
            tiles = smem.open()
            q, k, v, do, state, features = tiles
            sequence, slot, head, seq = seq_layout.locate_segment(cuda.blockIdx.x, gCuSeqlens, length, segments, heads)
            n = seq.num_chunks()
            if warpgroup.id() == LOADER:
                walk.load_chunks(tiles, (gQ, gK, gV, gDOut), seq, n, head, group)
            else:
                warpgroup.claim_registers(CONSUMER_REGISTERS)
                s_t = warpgroup.load(gInitialState, STATE, (slot, head, 0, 0), rows=3, cols=2)
                if NORMALIZE:
                    n_earlier, z, zz = load_key_sums(gInitialZ, slot, head)
                warpgroup.store(state, s_t)
                warpgroup.sync()
                for j in range(n):
                    keys, values, douts, token = k.wait(j), v.wait(j), do.wait(j), seq.chunk_start(j)
                    seq_layout.zero_other_rows(keys, seq.remaining(j))
                    seq_layout.zero_other_rows(values, seq.remaining(j))
                    queries = warpgroup.load(q.wait(j), X) * scale
                    if NORMALIZE:
                        s = warpgroup.wait(warpgroup.mm_ABt(queries, keys))
                        p = warpgroup.tril(taylor_weights(s), 0, 0.0)
                        sums = finish_sum(lane_sum(p))
                        o = warpgroup.mma_ABt(warpgroup.mm_AB(INPUT(p), values), taylor(queries, 1.0), state)
                        earlier_sums = row_sum(fp32(queries) * mma_ABt(z, queries, INPUT(zz * 0.5))) + n_earlier + CHUNK * j
                        w = 1.0 / (sums + earlier_sums)
                        dots = row_sum(warpgroup.wait(o) * fp32(warpgroup.load(douts, DOUT))) * w  # dO . O
                        chunk = seq_layout.chunk_index(token, sequence, length)
                        inside = less(warpgroup.row_index(SCORES.col_vec), float32(seq.remaining(j)))
                        warpgroup.store(gVectors, where(inside, w, 0.0), (chunk, head, 0), cols=2)
                        warpgroup.store(gVectors, where(inside, 0.0 - dots * w, 0.0), (chunk, head, CHUNK), cols=2)
                    queries = warpgroup.load(q.wait(j), X) * scale  # again, or what features share would stay in registers
                    q.release(j)
                    dq = walk.differentiate_features(douts, state, queries, 1.0)
                    s = warpgroup.mm_ABt(queries, keys)  # computed again: kept beside o, registers would spill
                    dp = warpgroup.mm_ABt(douts, values)
                    s, dp = warpgroup.wait(s, newer=1), warpgroup.wait(dp)
                    if NORMALIZE:
                        dp = dp - dots
                    # 0, as LLVM cannot know: it would keep the comparisons of P's diagonal in registers
                    diagonal = int32(min(seq.remaining(j), 0))
                    ds = INPUT(warpgroup.tril(fma(dp, s, dp), diagonal, 0.0))
                    dq = mma_AB(dq, ds, keys)
                    if NORMALIZE:
                        dq = (dq - mma_ABt(z, queries, INPUT(zz)) * dots) * w
                    dq = dq * scale
                    walk.store_rows(gDQ, dq, seq, token, head)
                    warpgroup.store(features, taylor(warpgroup.load(keys, X), 0.5))
                    warpgroup.sync()
                    s_t = warpgroup.mma_AtB(s_t, values, features)
                    if NORMALIZE:
                        z, zz = mma_AB(z, ones(ONES), keys), mma_AtB(zz, keys, keys)
                    s_t = warpgroup.wait(s_t)
                    warpgroup.store(state, s_t)
                    warpgroup.sync()
                    k.release(j)
                    v.release(j)
                    do.release(j)
                if slot + 1 == segments * (sequence + 1):
                    walk.zero_padding(gDQ, gCuSeqlens, sequence, length, head)

        return differentiate_queries, smem


@dataclass(frozen=True)
class BasedKeyGradients(Config):
    """The configuration of the walk that computes dk and dv, from the last chunk to the first."""

    label = "keys and values"

    @property
    def loads_vectors(self):
        """Does it read the numbers of tokens that the walk of queries writes?"""
        return self.normalize

    @staticmethod
    @functools.cache
    def make(config: "BasedKeyGradients"):
        """(kernel, shared memory) of a configuration."""
        INPUT, NORMALIZE, walk = config.dtype, config.normalize, config.walk
        seq_layout = SequenceLayout(config.varlen, reversed=True)
        side, X, ONES = QuerySide(INPUT, NORMALIZE), rt(16, BASE, INPUT), rt(16, CHUNK, INPUT)
        KEYS, VALUES = tiled(config.key, unit=1), tiled(config.value, unit=1)
        GRADIENTS = array(4, fp32 if config.unrounded else INPUT)
        smem = config.shared_memory(**config.weighted_tiles)

        @cuda.jit(launch_bounds=(THREADS, CTAS_PER_SM), fastmath=True)
        def differentiate_keys(
            gQ: KEYS, gK: KEYS, gV: VALUES, gDOut: VALUES, gDK: GRADIENTS, gDV: array(4, INPUT),
            gVectors: tiled(VECTORS, 3, None, 2), gDState: array(4), gDZ: array(3), gDInitialState: array(4),
            gDInitialZ: array(3), gCuSeqlens: ENDS, length: INT, segments: INT, heads: INT, group: INT, scale: FLOAT,
        ):  # fmt: skip
            """dk and dv of one of the `segments` of a sequence, for one of the `heads`, of which `group` share a key head, from
            gDState and gDZ, the gradients of the state after each segment, the last one first; and the gradients of the state
            before the sequence."""
            tiles = smem.open()
            q, k, v, do, state, features = tiles[:6]
            sequence, slot, head, seq = seq_layout.locate_segment(cuda.blockIdx.x, gCuSeqlens, length, segments, heads)
            n = seq.num_chunks()
            if warpgroup.id() == LOADER:
                first_chunk = seq_layout.chunk_index(seq.start, sequence, length)
                walk.load_chunks(tiles, (gQ, gK, gV, gDOut), seq, n, head, group, gVectors, first_chunk)
            else:
                warpgroup.claim_registers(CONSUMER_REGISTERS)
                ds_t = warpgroup.load(gDState, STATE, (slot, head, 0, 0), rows=3, cols=2)
                if NORMALIZE:
                    n_later, z, zz = load_query_sums(gDZ, slot, head)
                for j in range(n):
                    token = seq.chunk_start(j)
                    queries, keys, values, douts = q.wait(j), k.wait(j), v.wait(j), do.wait(j)
                    seq_layout.zero_other_rows(queries, seq.remaining(j))
                    seq_layout.zero_other_rows(douts, seq.remaining(j))
                    warpgroup.store(state, ds_t)
                    x = warpgroup.load(queries, X) * scale
                    warpgroup.store(queries, x)
                    if NORMALIZE:
                        weights = side.weigh(tiles, j, x, douts)
                    warpgroup.store(features, taylor(x, 1.0))
                    warpgroup.sync()
                    s = warpgroup.mm_ABt(keys, queries)
                    dp = warpgroup.mm_ABt(values, douts)
                    s, dp = warpgroup.wait(s, newer=1), warpgroup.wait(dp)
                    if NORMALIZE:
                        dnormalizers = load(subtile(weights, CHUNK, 1), SCORES.row_vec)
                        dp, n_later = dp + dnormalizers, n_later + tile_sum(dnormalizers)
                    ds = INPUT(warpgroup.triu(fma(dp, s, dp), 0, 0.0))
                    dk = mma_AB(zeros(SQUARE), ds, queries)
                    p = INPUT(warpgroup.triu(taylor_weights(s), int32(min(seq.remaining(j), 0)), 0.0))  # 0, as for queries
                    row = warpgroup.load(keys, X)
                    dv = warpgroup.mma_ABt(warpgroup.mm_AB(p, douts), taylor(row, 0.5), state)
                    walk.store_rows(gDV, warpgroup.wait(dv), seq, token, head)
                    dk = dk + walk.differentiate_features(values, state, row, 0.5)
                    if NORMALIZE:
                        dk = dk + mma_ABt(z, row, INPUT(zz))
                    walk.store_rows(gDK, dk, seq, token, head)
                    ds_t = warpgroup.mma_AtB(ds_t, douts, features)
                    if NORMALIZE:
                        z, zz = mma_AB(z, ones(ONES), tiles.weighted), mma_AtB(zz, tiles.weighted, queries)
                    ds_t = warpgroup.wait(ds_t)
                    warpgroup.sync()
                    if NORMALIZE:
                        tiles.vectors.release(j)
                    q.release(j)
                    k.release(j)
                    v.release(j)
                    do.release(j)
                if slot + 1 == segments * (sequence + 1):
                    warpgroup.store(gDInitialState, ds_t, (sequence, head, 0, 0), rows=3, cols=2)
                    if NORMALIZE:
                        unused = load(gDZ, SQUARE.col_vec, (slot, head, BASE * HALF), cols=2)
                        store_sums(gDInitialZ, sequence, head, n_later, z, zz, 1.0, unused)
                    walk.zero_padding(gDK, gCuSeqlens, sequence, length, head)
                    seq_layout.zero_padding(gDV, gCuSeqlens, sequence, length, head, 0)

        return differentiate_keys, smem


WALKS = BasedQueryGradients, BasedKeyGradients


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations; those of fp16 with `everything` only."""
    if target.has_wgmma:
        dtypes = (bf16, fp16) if everything else (bf16,)
        for walk in WALKS:
            yield from itertools.starmap(walk, itertools.product(dtypes, *[(False, True)] * 3))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    return config.make(config)
