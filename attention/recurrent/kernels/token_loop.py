"""Linear attention token by token: every member that has no feature map, on any GPU since Ampere.

    S = exp(decay) S;  v = beta (v - S^T k);  S = S + k v^T;  o = scale S^T q

A warp holds all rows of some columns of a head's state in its registers, so sums over the rows stay inside it and no warp
waits for another. States of more rows than registers hold are shared out to the warps of a block, which add up their sums.
Of a single token (attention.linear_step) all that takes time is moving the state: 16 bytes a lane, everything on its way
before anything is used. Sequences are walked where no kernel of chunks serves them.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from numba import cuda

from ops import block, col_sum, divmod, exp, fma, load, store, tile_max, tile_sum
from tiles import bf16, dtype, fp32, inlined, launch, rt, shared, sv
from tiles.arrays import Form, at, c_ordered, form
from tiles.launch import Bound, Interpreted

from ...signature import ENDS, FLOAT, INT, array
from ..problem import Problem
from .tokens import span

WARPS = 4  # of a block
COLUMNS = 16  # of the state, a warp
BLOCKS = {64: 5, 80: 4, 144: 3, 256: 2}  # rows of a warp, up to -> blocks of an SM, as registers allow
WIDE = 128  # key dim, up to which a warp holds all rows
GREATEST = 64, 80, WIDE, 256  # key dims that fill a warp's registers as far as its blocks allow: if these do not spill, none do
MOST = 65535  # blocks along the second and third axis of a grid
TINY = 1e-10  # added to a normalizer, as flash-linear-attention does
ARRAYS = "q k v decay beta out initial_state state initial_z final_z cu_seqlens".split()  # of the kernel, in order
FLAGS = "delta", "normalize", "varlen", "single"


@dataclass(frozen=True)
class Config:
    """A kernel's shape: rows of a state, and whether a decay is the token's or the channel's, or there is none (""); it is the
    delta rule; the output is normalized; the sequences lie one behind the other in one batch; there is a single token, and
    states that can be moved 16 bytes at a time."""

    key_dim: int
    decay: str = ""
    delta: bool = False
    normalize: bool = False
    varlen: bool = False
    single: bool = False

    @property
    def together(self):
        """Do the warps of a block share a state's rows?"""
        return self.key_dim > WIDE

    @property
    def breadth(self):
        """How many times the usual warps and columns: of a single token, where moving the state is all that takes time, a block
        that has few columns moves twice as many, 128 bytes of a row."""
        return 2 if self.together and self.single else 1

    @property
    def warps(self):
        """Of a block."""
        return WARPS * self.breadth

    @property
    def columns(self):
        """Of a state, a warp."""
        return COLUMNS * self.breadth

    @property
    def rows(self):
        """Of a state, a warp."""
        return 16 * -(-self.key_dim // (16 * self.warps)) if self.together else self.key_dim

    @property
    def blocks(self):
        """Of an SM. z takes as much room as the state; adding up sums, or all vectors that there can be, as 16 rows of it."""
        sums = 16 * (self.together or (self.delta and self.decay == "channel"))
        rows = self.rows * (self.breadth + self.normalize) + sums
        return next(blocks for limit, blocks in BLOCKS.items() if rows <= limit) // self.breadth

    @property
    def threads(self):
        """Of a block."""
        return 32 * self.warps

    def __str__(self):
        kinds = [f"decay by {self.decay}"] * bool(self.decay)
        return ", ".join([f"Dk {self.key_dim}", *kinds, *(x for x in FLAGS if getattr(self, x))])


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    DECAY, DELTA, NORMALIZE = config.decay, config.delta, config.normalize
    SINGLE, TOGETHER, tokens = config.single, config.together, span(config.varlen)
    STATE = rt(config.rows, config.columns, fp32)
    KEYS, VALUES = STATE.col_vec, STATE.row_vec
    smem = shared(sums=sv(config.columns * config.warps, fp32), products=sv(4 * config.warps, fp32))

    @inlined
    def total(x, scratch):
        """The sum of what the warps that hold a state bring."""
        if TOGETHER:
            return block.reduce_sum(x, scratch)
        else:
            return x

    @inlined
    def decayed_by(gDecay, which, token, head, row, column):
        """The factor of a state. A decay that is the token's is the same for all rows and columns."""
        if DECAY == "channel":
            return exp(load(gDecay, KEYS, (which, token, head, row), aligned=True))
        elif DECAY == "token":
            return exp(load(gDecay, VALUES, (which, token, head, column)))
        else:
            return 1.0

    @cuda.jit(launch_bounds=(config.threads, config.blocks), fastmath=True)
    def walk(gQ, gK, gV, gDecay, gBeta, gOut, gStart, gState, gStartZ, gStateZ, gEnds, parts, group, length, scale):
        """A block a head of a sequence, and of the `parts` of its state one, or one a warp; `group` heads share a key."""
        warp, head, sequence = cuda.threadIdx.x // 32, cuda.blockIdx.y, cuda.blockIdx.z
        if TOGETHER:
            sums, products = smem.open()
            part, row = cuda.blockIdx.x, STATE.rows * warp
        else:
            sums = products = row = 0
            part = cuda.blockIdx.x * WARPS + warp
        if part < parts:
            shared_by, _ = divmod(head, group)
            column = STATE.cols * part
            first, end, batch = tokens(gEnds, sequence, 1 if SINGLE else length)
            s = load(gStart, STATE, (sequence, head, row, column), aligned=SINGLE)
            if NORMALIZE:
                z = load(gStartZ, KEYS, (sequence, head, row))
            for t in range(first, end):
                k = load(gK, KEYS, (batch, t, shared_by, row), aligned=True)
                v = load(gV, VALUES, (batch, t, head, column), aligned=True)
                kept = decayed_by(gDecay, batch, t, head, row, column)
                beta = load(gBeta, VALUES, (batch, t, head, column)) if DELTA else 0.0
                q = load(gQ, KEYS, (batch, t, shared_by, row), aligned=True)
                s = s * kept
                if DELTA:
                    v = beta * v - beta * total(col_sum(s * k), sums)
                s = fma(k, v, s)
                o = scale * total(col_sum(s * q), sums)
                if NORMALIZE:
                    z = z * (tile_max(kept) if DECAY == "token" else kept) + k
                    o = o / (scale * total(tile_sum(z * q), products) + TINY)
                if row == 0:
                    store(gOut, o, (batch, t, head, column))
            store(gStart if SINGLE else gState, s, (sequence, head, row, column), aligned=SINGLE)
            if NORMALIZE and part == 0:
                store(gStateZ, z, (sequence, head, row))

    return walk, smem if TOGETHER else None


@functools.lru_cache
def walk(problem: Problem, keep: bool) -> Bound | Interpreted:
    """The launch that walks a problem's sequences; its addresses are those of ARRAYS. keep: store the last states."""
    kept = {"state": problem.state_shape} | ({"final_z": problem.z_shape} if problem.normalize else {}) if keep else {}
    forms = {name: c_ordered(shape, "float32", problem.device) for name, shape in kept.items()}
    return bind(problem, dict(problem.forms) | forms, False)


def bind(problem: Problem, given: Mapping[str, Form], single: bool) -> Bound | Interpreted:
    """The launch for arrays of these forms, tokens (B, S, H, D). What was not given is empty: loads from it are 0, and stores
    to it left out. single: see Config."""
    decay = given.get("decay")
    config = Config(
        problem.key_dim,
        "" if decay is None else "channel" if len(decay.shape) == 4 else "token",
        "beta" in given,
        problem.normalize,
        "cu_seqlens" in given,
        single,
    )
    pairs, parts = (problem.sequences, problem.heads), -(-problem.value_dim // config.columns)
    empty = {name: (*pairs, 0, 0) for name in ("initial_state", "state")} | {
        name: (*pairs, 0) for name in ("initial_z", "final_z")
    }
    forms = {name: c_ordered(shape, "float32", problem.device) for name, shape in empty.items()}
    forms |= {"cu_seqlens": c_ordered((0,), "int32", problem.device)} | dict(given)
    forms |= {name: _spread(given.get(name), problem) for name in ("decay", "beta")}
    if max(problem.heads, problem.sequences) > MOST:
        raise ValueError(f"q: must have at most {MOST} heads and sequences: {problem.heads}, {problem.sequences}")
    blocks = parts if config.together else -(-parts // WARPS)
    grid = blocks, problem.heads, problem.sequences  # in the order in which states lie: others took 6 % longer
    (kernel, smem), sizes = make(config), (parts, problem.group, problem.seqlen, problem.scale)
    return launch(kernel, grid, config.threads, shared=smem).bind(*(at(0, forms[name]) for name in ARRAYS), *sizes)


def signature(config: Config, dtype: dtype = bf16):
    """The Numba types of the kernel's arguments, for tokens of a dtype."""
    token, real, z = array(4, dtype), array(4), array(3)
    return token, token, token, real, real, token, real, real, z, z, ENDS, *[INT] * 3, FLOAT


def _spread(given: Form | None, problem: Problem) -> Form:
    """A decay or beta of each token as (B, S, H, columns of a state or more): axes that it has not are steps of 0 bytes. One of
    each channel as it is."""
    if given is None:
        return c_ordered((problem.batch, 0, problem.heads, 0), "float32", problem.device)
    if len(given.shape) == 4:
        return given
    strides = (0, 0, *given.strides, 0) if len(given.shape) == 1 else (*given.strides, 0)
    shape = problem.batch, problem.seqlen, problem.heads, max(problem.key_dim, problem.value_dim)
    return form(shape, strides, given.dtype, given.device, given.itemsize)
