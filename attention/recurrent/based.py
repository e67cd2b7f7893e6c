"""Based: linear attention whose weights are the Taylor series of exp to the second order (Arora et al. 2024), for Hopper.

    P[i, j] = 1 + s + s ** 2 / 2,  s = scale q_i . k_j,  j <= i          o_i = sum_j P[i, j] v_j / sum_j P[i, j]

The weights are products of features, P = f(q) f(k)^T (`ops.taylor`: the 136 products of two of 16 numbers, the 16 themselves
and 1), so the sum over all earlier chunks is f(q) S, S = sum f(k)^T v. A block walks one head's chunks of 64 tokens for 64
columns of the values and keeps its part of S in registers, transposed, 64 x 160; of a chunk,

    O   = f(Q) S + tril(P) V        f(Q) is made in registers; S comes from shared memory, rounded
    S^T = S^T + V^T f(K)            f(K) is made in registers, and read from shared memory

The divisor's sum over earlier chunks is n + q . z + q^T Z q / 2 with n tokens, z = sum k and Z = sum k^T k, all of it in
registers.
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import cuda
from numpy import float32, int32

from ops import (
    col_index,
    col_max,
    divmod,
    equal,
    finish_sum,
    fma,
    lane_sum,
    less,
    load,
    mma_AB,
    mma_ABt,
    mma_AtB,
    ones,
    row_index,
    row_sum,
    store,
    taylor,
    tile_sum,
    transpose,
    truncate,
    warpgroup,
    where,
    zeros,
)
from ops.for_attention.taylor_features import BASE, FEATURES, HALF
from tiles import dtype, fp32, inlined, launch, ring, rt, shared, st, tensor
from tiles.arrays import at, c_ordered
from tiles.dtypes import DTYPES
from tiles.plans import Plan, planned

from ..signature import ENDS, FLOAT, INT, array, tiled
from ..softmax.problem import options
from .kernels.tokens import span
from .problem import Problem, check, needs_hopper, nothing, paired

CHUNK = 64  # tokens
COLUMNS = 64  # of the values, a block's
STAGES = 4  # chunks in flight
LOADER, THREADS, RESIDENT = 1, 2 * warpgroup.THREADS, 2  # the loading warpgroup; threads; blocks of a multiprocessor
KEEP, CLAIM = 24, 232  # registers a thread of the loader and of the other warpgroup


@dataclass(frozen=True)
class Config:
    """A kernel's form: dtype; whether outputs are divided by the sum of their weights; whether several sequences lie one behind
    the other in one batch."""

    dtype: dtype
    normalize: bool = True
    varlen: bool = False

    def __str__(self):
        return f"{self.dtype}{', normalized' * self.normalize}{', varlen' * self.varlen}"

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
    INPUT, NORMALIZE, VARLEN = config.dtype, config.normalize, config.varlen
    X, ONES, STATE = rt(16, BASE, INPUT), rt(16, CHUNK, INPUT), rt(16, FEATURES, fp32)
    SQUARE = rt(BASE, BASE, fp32)
    DOWN, ALONG, tokens = SQUARE.col_vec, SQUARE.row_vec, span(VARLEN)
    smem = shared(
        q=ring(config.key, STAGES),
        k=ring(config.key, STAGES),
        v=ring(config.value, STAGES),
        state=st(COLUMNS, FEATURES, INPUT),
        features=st(CHUNK, FEATURES, INPUT),
        out=config.value,
    )

    @inlined
    def weigh(s):
        """tril(1 + s + s ** 2 / 2)"""
        return warpgroup.tril(fma(s, fma(s, 0.5, 1.0), 1.0), 0, 0.0)

    @inlined
    def apart(d):
        """1 where a column is d to the right of its row, going round."""
        far = col_index(SQUARE) - row_index(SQUARE) - d
        return equal(far, 0.0) + equal(far, -float(BASE))

    @inlined
    def load_sums(gZ, sequence, head):
        """(n, z, Z) from the sums of features."""
        zz, last = zeros(SQUARE), load(gZ, DOWN, (sequence, head, BASE * HALF), cols=2)
        for d in range(HALF):
            zz = zz + apart(d) * load(gZ, DOWN, (sequence, head, BASE * d), cols=2)
        zz = zz + apart(HALF) * where(less(row_index(DOWN), HALF), last, 0.0)
        z = zeros(SQUARE) + load(gZ, ALONG, (sequence, head, BASE * (HALF + 1)), cols=2)
        return tile_sum(where(equal(row_index(DOWN), HALF), last, 0.0)), z, zz + transpose(zz)

    @inlined
    def store_sums(gZ, sequence, head, count, z, zz):
        """The reverse; each warp has them all."""
        for d in range(HALF):
            share = 0.5 if d == 0 else 1.0
            store(gZ, row_sum(apart(d) * zz) * share, (sequence, head, BASE * d), cols=2)
        last = where(equal(row_index(DOWN), HALF), count, 0.0)
        store(gZ, where(less(row_index(DOWN), HALF), row_sum(apart(HALF) * zz), last), (sequence, head, BASE * HALF), cols=2)
        store(gZ, col_max(z), (sequence, head, BASE * (HALF + 1)), cols=2)

    @cuda.jit(launch_bounds=(THREADS, RESIDENT), fastmath=True)
    def scan(gQ, gK, gV, gO, gStart, gStartZ, gState, gZ, gEnds, length, heads, columns, group, scale):
        """O of one of the values' heads, of which `group` share a key head, and 64 of its columns: one of `columns` blocks."""
        q, k, v, state, features, out = smem.open()
        pair, column = divmod(cuda.blockIdx.x, columns)
        sequence, head = divmod(pair, heads)
        first, end, batch = tokens(gEnds, sequence, length)
        n = int32((end - first + CHUNK - 1) // CHUNK)
        if warpgroup.id() == LOADER:
            warpgroup.release_registers(KEEP)
            key_head, _ = divmod(head, group)
            for j in range(n):
                q.fill(j, gQ, (batch, first + CHUNK * j, key_head))
                k.fill(j, gK, (batch, first + CHUNK * j, key_head))
                v.fill(j, gV, (batch, first + CHUNK * j, head, column))
        else:
            warpgroup.claim_registers(CLAIM)
            s_t = warpgroup.load(gStart, STATE, (sequence, head, 0, COLUMNS * column), rows=3, cols=2)
            if NORMALIZE:
                earlier, z, zz = load_sums(gStartZ, sequence, head)
            warpgroup.store(state, s_t)
            warpgroup.sync()
            for j in range(n):
                keys, values, token = k.wait(j), v.wait(j), first + CHUNK * j
                if VARLEN and end - token < CHUNK:
                    warpgroup.zero_rows(keys, end - token)
                    warpgroup.zero_rows(values, end - token)
                queries = warpgroup.load(q.wait(j), X) * scale
                q.release(j)
                s = warpgroup.mm_ABt(queries, keys)
                o = warpgroup.mm_ABt(taylor(queries, 1.0), state)
                p = weigh(warpgroup.wait(s, newer=1))
                if NORMALIZE:
                    sums = finish_sum(lane_sum(p))
                o = warpgroup.mma_AB(o, INPUT(p), values)
                warpgroup.store(features, taylor(warpgroup.load(keys, X), 0.5))
                warpgroup.sync()
                s_t = warpgroup.mma_AtB(s_t, values, features)
                o = warpgroup.wait(o, newer=1)
                if NORMALIZE:
                    before = row_sum(fp32(queries) * mma_ABt(z, queries, INPUT(zz * 0.5))) + earlier + CHUNK * j
                    z, zz = mma_AB(z, ones(ONES), keys), mma_AtB(zz, keys, keys)
                    o = o / (sums + before)
                if VARLEN:
                    warpgroup.store(
                        truncate(gO, 1, end), o, (batch, token, head, COLUMNS * column), rows=1, cols=3, aligned=True
                    )
                    warpgroup.sync()
                else:
                    warpgroup.store(out, o)
                    warpgroup.tma_store(gO, (batch, j, head, column), out)
                s_t = warpgroup.wait(s_t)
                warpgroup.store(state, s_t)
                warpgroup.store_wait()
                warpgroup.sync()
                k.release(j)
                v.release(j)
            warpgroup.store(gState, s_t, (sequence, head, 0, COLUMNS * column), rows=3, cols=2)
            if NORMALIZE and column == 0:
                store_sums(gZ, sequence, head, earlier + float32(end - first), z, zz)

    return scan, smem


def signature(config: Config):
    """The Numba types of the kernel's arguments."""
    key, value, state, z = tiled(config.key, unit=1), tiled(config.value, unit=1), array(4), array(3)
    out = array(4, config.dtype) if config.varlen else tiled(config.value)
    return key, key, value, out, state, z, state, z, ENDS, *[INT] * 4, FLOAT


def based(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    normalize: bool = True,
    initial_state: Any = None,
    return_state: bool = False,
    cu_seqlens: Any = None,
    layout: str = "bshd",
    out: Any = None,
    stream: Any = None,
) -> Any:
    """Based's causal linear attention: exp taken to the second order of its Taylor series. For every head,

        P[i, j] = 1 + s + s ** 2 / 2,  s = scale * q[i] . k[j],  j <= i
        o[i]    = sum_j P[i, j] v[j], and divided by sum_j P[i, j] with normalize=True

    q, k: (B, S, Hk, 16); v, out: (B, S, H, Dv) for layout="bshd", sequence and head swapped for "bhsd"; bfloat16 or float16,
    any S, Dv a multiple of 16 up to 256. Hk divides H: value head h reads key head h // (H // Hk). scale: Dk^-1/2, that is
    1/4, by default. cu_seqlens (N + 1,), int32 or int64: B is 1, and sequence n is the tokens cu_seqlens[n] to
    cu_seqlens[n + 1]. Sums over earlier chunks of 64 tokens are float32, and rounded to q's dtype to be multiplied: with
    float16 they must stay below 65504.

    initial_state, and what return_state=True returns as `(out, state)`: float32 (B, H, 160, Dv), or (N, ...), the sum of
    f(k)^T v over the tokens so far; with normalize=True a pair of that and the sum of f(k), (B, H, 160). f(x) has 160 columns:
    x[i] * x[(i + d) % 16] in column 16 * d + i for d = 0 (halved) to 7; the same for d = 8 and i < 8; then 1, seven zeros, and
    x. (P is the product of f(k) and the same of scale * q, nothing halved: attention.linear_step takes these, with scale=1.)

    |         | here             | flash-linear-attention's fused_chunk_based | ThunderKittens' based |
    | ------- | ---------------- | ------------------------------------------ | --------------------- |
    | scale   | Dk^-1/2          | Dk^-1/2                                    | 1/4                   |
    | divisor | the sum          | the sum + 1e-6 (use_norm=True, default)    | none                  |
    | Dk, Dv  | 16, 16 to 256    | up to 16, any                              | 16, 64                |
    | order   | layout="bshd"    | (B, S, H, D)                               | (B, H, S, D)          |
    | state   | 160 features     | none                                       | 273, in bfloat16      |

    (The sum is never less than half the number of tokens.) On Hopper, with addresses and strides that are multiples of 16
    bytes. Returns `out`, the same kind of array as q. Arrays, `stream` and errors are those of attention.forward."""
    _, scale = options(False, scale)
    arrays = q, k, v, out, *paired(initial_state, normalize), None, None, cu_seqlens
    found = _solve(stream, arrays, (scale, normalize, layout, return_state))
    return (found[0], found[1:]) if return_state and normalize else found


@planned("q k v", "out initial_state initial_z state z cu_seqlens")
def _solve(q, k, v, out, start, start_z, state, z, ends, scale, normalize, layout, with_state) -> Plan:
    """How based does calls of this form at these addresses; state and z are never given."""
    tiles = {"q": q, "k": k, "v": v, "out": out}
    states = {"initial_state": start, "initial_z": start_z, "cu_seqlens": ends}
    problem = check("based", tiles | states, scale=scale, normalize=normalize, layout=layout)
    if problem.key_dim != BASE:
        raise ValueError(f"q: key_dim must be {BASE}: {problem.key_dim}, q.shape={q.shape}")
    if start and start.shape[2] != FEATURES:
        raise ValueError(f"initial_state: must have {FEATURES} features: initial_state.shape={start.shape}")
    needs_hopper(problem, *(array.pointer for array in tiles.values() if array))
    pairs, make = (problem.sequences, problem.heads), {} if out else {"out": (problem.out_shape, problem.dtype)}
    if with_state:
        make["state"] = (*pairs, FEATURES, problem.value_dim), "float32"
    if with_state and normalize:
        make["z"] = (*pairs, FEATURES), "float32"
    if problem.trivial and with_state:
        raise ValueError(f"return_state: there must be a token: q.shape={q.shape}")
    give = ("out", *(name for name in make if name != "out"))
    return Plan(nothing if problem.trivial else _plan(problem, give).prepare, make, give)


@functools.lru_cache
def _plan(problem: Problem, made: tuple[str, ...]):
    """The launch of problems of this form; arrays in the order of `_solve`."""
    config = Config(DTYPES[np.dtype(problem.dtype)], problem.normalize, "cu_seqlens" in problem.forms)
    (kernel, smem), forms = make(config), problem.forms
    columns, pairs = -(-problem.value_dim // COLUMNS), (problem.sequences, problem.heads)
    shapes = {"state": (*pairs, FEATURES, problem.value_dim), "z": (*pairs, FEATURES)}

    def real(name, like):
        """An array of states; one of no features for what is neither given nor made."""
        if name in forms:
            return at(0, forms[name])
        shape = shapes[like] if name in made else (*pairs, *[0] * (len(shapes[like]) - 2))
        return at(0, c_ordered(shape, "float32", problem.device))

    out = at(0, forms["out"])
    return launch(kernel, problem.sequences * problem.heads * columns, THREADS, shared=smem).bind(
        *(tensor(at(0, forms[x]), t, 1, 3, unit=1) for x, t in zip("qkv", (config.key, config.key, config.value))),
        out if config.varlen else tensor(out, config.value, 1, 3),
        *(real(*names) for names in (("initial_state", "state"), ("initial_z", "z"), ("state", "state"), ("z", "z"))),
        at(0, forms.get("cu_seqlens") or c_ordered((0,), "int32", problem.device)),
        problem.seqlen,
        problem.heads,
        columns,
        problem.group,
        problem.scale,
    )
