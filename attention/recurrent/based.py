"""Based: linear attention whose weights are the Taylor series of exp to the second order (Arora et al. 2024), for Hopper.

    P[i, j] = 1 + s + s ** 2 / 2,  s = scale q_i . k_j,  j <= i          o_i = sum_j P[i, j] v_j / sum_j P[i, j]

The weights are products of features, P = f(q) f(k)^T (ops/taylor.py: the 136 products of two of 16 numbers, the 16 themselves
and 1), so the sum over all earlier chunks is f(q) S, S = sum f(k)^T v. A block walks one head's chunks of 64 tokens for 64
columns of the values and keeps its part of S in registers, transposed, 64 x 160; of a chunk,

    O   = f(Q) S + tril(P) V        f(Q) is made in registers; S comes from shared memory, rounded
    S^T = S^T + V^T f(K)            f(K) is made in registers, and read from shared memory

While the tensor cores do that, the same warps make P, f(Q) and f(K) of the next chunk. The divisor's sum over earlier chunks is
n + q . z + q^T Z q / 2 with n tokens, z = sum k and Z = sum k^T k, all of it in registers.
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda
from numpy import int32

from ops import fma, lane_sum, mma_AB, mma_ABt, mma_AtB, ones, row_sum, split, subtile, taylor, total, warpgroup, zeros
from ops.taylor import BASE, FEATURES
from tiles import dtype, fp32, inlined, launch, ring, rt, shared, st, tensor
from tiles.arrays import at
from tiles.dtypes import DTYPES
from tiles.plans import Plan, planned

from ..problem import options
from .problem import Problem, check, needs_hopper, nothing

CHUNK = 64  # tokens
COLUMNS = 64  # of the values, a block's
STAGES = 3  # chunks in flight
LOADER, THREADS, RESIDENT = 1, 2 * warpgroup.THREADS, 2  # the loading warpgroup; threads; blocks of a multiprocessor
KEEP, CLAIM = 24, 232  # registers a thread of the loader and of the other warpgroup


@dataclass(frozen=True)
class Config:
    """A kernel's form: dtype, and whether outputs are divided by the sum of their weights."""

    dtype: dtype
    normalize: bool = True

    def __str__(self):
        return f"{self.dtype}{', normalized' * self.normalize}"

    @property
    def key(self):
        """A chunk's tile of Q or K."""
        return st(CHUNK, BASE, self.dtype)

    @property
    def value(self):
        """A chunk's tile of V."""
        return st(CHUNK, COLUMNS, self.dtype)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, NORMALIZE = config.dtype, config.normalize
    X, ONES, SQUARE = rt(16, BASE, INPUT), rt(16, CHUNK, INPUT), rt(BASE, BASE, fp32)
    STATE = rt(16, FEATURES, fp32)
    smem = shared(
        q=ring(config.key, STAGES),
        k=ring(config.key, STAGES),
        v=ring(config.value, STAGES),
        state=st(COLUMNS, FEATURES, INPUT),
        features=st(2 * CHUNK, FEATURES, INPUT),
        out=config.value,
    )

    @inlined
    def weigh(s, scale):
        """tril(1 + x + x ** 2 / 2), x = scale s"""
        return warpgroup.tril(fma(s, fma(s, 0.5 * scale * scale, scale), 1.0), 0, 0.0)

    @inlined
    def of_chunk(features, j):
        """Where f of chunk j's keys lies: that of two chunks is there at a time."""
        turn, _ = split(j, 2)
        return subtile(features, CHUNK, turn)

    @inlined
    def divide(queries, keys, sums, j, z, zz):
        """The divisors of chunk j's outputs, `sums` being those of its own weights; then z and Z with its keys."""
        before = row_sum(fp32(queries) * mma_ABt(z, queries, INPUT(zz * 0.5)))
        return sums + before + CHUNK * j, mma_AB(z, ones(ONES), keys), mma_AtB(zz, keys, keys)

    @cuda.jit(launch_bounds=(THREADS, RESIDENT), fastmath=True)
    def scan(gQ, gK, gV, gO, length, heads, columns, group, scale):
        """O of one of the values' heads, of which `group` share a key head, and 64 of its columns: one of `columns` blocks."""
        q, k, v, state, features, out = smem.open()
        column, pair = split(cuda.blockIdx.x, columns)
        head, batch = split(pair, heads)
        _, key_head = split(head, group)
        n = int32((length + CHUNK - 1) // CHUNK)
        if warpgroup.id() == LOADER:
            warpgroup.release_registers(KEEP)
            for j in range(n + 1):
                q.fill(j, gQ, (batch, j, key_head))
                k.fill(j, gK, (batch, j, key_head))
                if j < n:
                    v.fill(j, gV, (batch, j, head, column))
        else:
            warpgroup.claim_registers(CLAIM)
            s_t, z, zz = zeros(STATE), zeros(SQUARE), zeros(SQUARE)
            keys, queries = k.wait(0), warpgroup.load(q.wait(0), X) * scale
            weights = weigh(warpgroup.wait(warpgroup.mm_ABt(q.wait(0), keys)), scale)
            warpgroup.store(state, s_t)
            warpgroup.store(of_chunk(features, 0), taylor(warpgroup.load(keys, X), 0.5))
            sums = total(lane_sum(weights))
            if NORMALIZE:
                sums, z, zz = divide(queries, keys, sums, 0, z, zz)
            p, f = INPUT(weights), taylor(queries, 1.0)
            warpgroup.sync()
            q.release(0)
            k.release(0)
            for j in range(n):
                values, keys = v.wait(j), k.wait(j + 1)
                s = warpgroup.mm_ABt(q.wait(j + 1), keys)
                o = warpgroup.mma_AB(warpgroup.mm_ABt(f, state), p, values)
                s_t = warpgroup.mma_AtB(s_t, values, of_chunk(features, j))
                weights = weigh(warpgroup.wait(s, newer=3), scale)
                o = warpgroup.wait(o, newer=1)
                if NORMALIZE:
                    o = o / sums
                o, p = INPUT(o), INPUT(weights)  # P here, not earlier: the mma reads its registers until wait(o)
                warpgroup.store(of_chunk(features, j + 1), taylor(warpgroup.load(keys, X), 0.5))
                queries = warpgroup.load(q.wait(j + 1), X) * scale
                if NORMALIZE:
                    sums, z, zz = divide(queries, keys, total(lane_sum(weights)), j + 1, z, zz)
                f = taylor(queries, 1.0)
                s_t = warpgroup.wait(s_t)
                warpgroup.store_wait()
                warpgroup.sync()
                q.release(j + 1)
                k.release(j + 1)
                v.release(j)
                warpgroup.store(out, o)
                warpgroup.store(state, s_t)
                warpgroup.tma_store(gO, (batch, j, head, column), out)
            warpgroup.store_wait()

    return scan, smem


def signature(config: Config):
    """The Numba types of the kernel's arguments."""
    from numba.cuda import types

    from tiles import gl
    from tiles.plumbing import Value

    key, value = (Value(gl(tile, 4, 1, 3)) for tile in (config.key, config.value))
    return key, key, value, value, *[types.int32] * 4, types.float32


def based(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    normalize: bool = True,
    layout: str = "bshd",
    out: Any = None,
    stream: Any = None,
) -> Any:
    """Based's causal linear attention: exp taken to the second order of its Taylor series. For every head,

        P[i, j] = 1 + s + s ** 2 / 2,  s = scale * q[i] . k[j],  j <= i
        o[i]    = sum_j P[i, j] v[j], and divided by sum_j P[i, j] with normalize=True

    q, k: (B, S, Hk, 16); v, out: (B, S, H, Dv) for layout="bshd", sequence and head swapped for "bhsd"; bfloat16 or float16,
    any S, Dv a multiple of 16 up to 256. Hk divides H: value head h reads key head h // (H // Hk). scale: Dk^-1/2, that is
    1/4, by default. The sums that one chunk of 64 tokens leaves to the next are float32, and are rounded to q's dtype to be
    multiplied: with float16 they must stay below 65504.

    |         | here             | flash-linear-attention's fused_chunk_based | ThunderKittens' based |
    | ------- | ---------------- | ------------------------------------------ | --------------------- |
    | scale   | Dk^-1/2          | Dk^-1/2                                    | 1/4                   |
    | divisor | the sum          | the sum + 1e-6 (use_norm=True, default)    | none                  |
    | Dk, Dv  | 16, 16 to 256    | up to 16, any                              | 16, 64                |
    | order   | layout="bshd"    | (B, S, H, D)                               | (B, H, S, D)          |

    (The sum is never less than half the number of tokens.) On Hopper, with addresses and strides that are multiples of 16
    bytes. Returns `out`, the same kind of array as q. Arrays, `stream` and errors are those of attention.forward."""
    _, scale = options(False, scale)
    return _solve(stream, (q, k, v, out), (scale, normalize, layout))


@planned("q k v", "out")
def _solve(q, k, v, out, scale, normalize, layout) -> Plan:
    """How based does calls of this form at these addresses."""
    problem = check("based", {"q": q, "k": k, "v": v, "out": out}, scale=scale, normalize=normalize, layout=layout)
    if problem.key_dim != BASE:
        raise ValueError(f"q: key_dim must be {BASE}: {problem.key_dim}, q.shape={q.shape}")
    needs_hopper(problem, *(array.pointer for array in (q, k, v, out) if array))
    make_out = {} if out else {"out": (problem.out_shape, problem.dtype)}
    return Plan(nothing if problem.trivial else _plan(problem).prepare, make_out, ("out",))


@functools.lru_cache
def _plan(problem: Problem):
    """The launch of problems of this form; arrays in the order of `_solve`."""
    config = Config(DTYPES[np.dtype(problem.dtype)], problem.normalize)
    kernel, smem = make(config)
    columns = -(-problem.value_dim // COLUMNS)
    tiles = {"q": config.key, "k": config.key, "v": config.value, "out": config.value}
    return launch(kernel, problem.batch * problem.heads * columns, THREADS, shared=smem).bind(
        *(tensor(at(0, problem.forms[name]), tile, rows=1, cols=3) for name, tile in tiles.items()),
        problem.seqlen,
        problem.heads,
        columns,
        problem.group,
        problem.scale,
    )
