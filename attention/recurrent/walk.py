"""Linear attention token by token: every member that has no feature map, on any GPU since Ampere.

    S = exp(decay) S;  v = beta (v - S^T k);  S = S + k v^T;  o = scale S^T q

A warp holds all rows of some columns of a head's state in its registers, so sums over the rows stay inside it and no warp
waits for another. Of a single token (attention.linear_step) all that takes time is moving the state: 16 bytes a lane,
everything on its way before anything is used. Sequences are walked where no kernel of chunks serves them.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from numba import cuda

from ops import col_sum, exp, fma, load, split, store, tile_max, tile_sum
from tiles import bf16, dtype, fp32, inlined, launch, rt
from tiles.arrays import Form, at, c_ordered, form
from tiles.launch import Bound, Interpreted

from ..signature import ENDS, FLOAT, INT, array
from .places import span
from .problem import Problem

WARPS = 4  # of a block
COLUMNS = 16  # of the state, a warp
BLOCKS = {64: 5, 128: 3, 256: 2}  # key dim, up to -> blocks of an SM, as registers allow
WIDE = 128  # key dim, up to which there are registers to keep the addresses that a state came from until it goes back there
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
    def blocks(self):
        """Of an SM; fewer where a lane holds its part of z, too."""
        return next((blocks for limit, blocks in BLOCKS.items() if self.key_dim * (1 + self.normalize) <= limit), 1)

    @property
    def threads(self):
        """Of a block."""
        return 32 * WARPS

    def __str__(self):
        kinds = [f"decay by {self.decay}"] * bool(self.decay)
        return ", ".join([f"Dk {self.key_dim}", *kinds, *(x for x in FLAGS if getattr(self, x))])


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration; it needs none of the latter."""
    DECAY, DELTA, NORMALIZE = config.decay, config.delta, config.normalize
    SINGLE, tokens = config.single, span(config.varlen)
    IN_PLACE = SINGLE and config.key_dim <= WIDE
    CROWDED = config.key_dim > WIDE and not SINGLE  # then a vector comes when it is needed, no sooner
    STATE = rt(config.key_dim, COLUMNS, fp32)
    KEYS, VALUES = STATE.col_vec, STATE.row_vec

    @inlined
    def decayed_by(gDecay, which, token, head, column):
        """The factor of a state. A decay that is the token's is the same for all rows and columns."""
        if DECAY == "channel":
            return exp(load(gDecay, KEYS, (which, token, head, 0), aligned=True))
        elif DECAY == "token":
            return exp(load(gDecay, VALUES, (which, token, head, column)))
        else:
            return 1.0

    @cuda.jit(launch_bounds=(config.threads, config.blocks), fastmath=True)
    def walk(gQ, gK, gV, gDecay, gBeta, gOut, gStart, gState, gStartZ, gStateZ, gEnds, parts, group, length, scale):
        """A block a head of a sequence, and some of the `parts` of its state, a warp each; `group` heads share a key."""
        part, head, sequence = cuda.blockIdx.x * WARPS + cuda.threadIdx.x // 32, cuda.blockIdx.y, cuda.blockIdx.z
        if part < parts:
            _, shared = split(head, group)
            column = COLUMNS * part
            first, end, batch = tokens(gEnds, sequence, 1 if SINGLE else length)
            s = load(gStart, STATE, (sequence, head, 0, column), aligned=SINGLE)
            if NORMALIZE:
                z = load(gStartZ, KEYS, (sequence, head, 0))
            for t in range(first, end):
                if not CROWDED:
                    q = load(gQ, KEYS, (batch, t, shared, 0), aligned=True)
                    k = load(gK, KEYS, (batch, t, shared, 0), aligned=True)
                v = load(gV, VALUES, (batch, t, head, column), aligned=True)
                kept = decayed_by(gDecay, batch, t, head, column)
                beta = load(gBeta, VALUES, (batch, t, head, column)) if DELTA else 0.0
                s = s * kept
                if NORMALIZE:
                    z = z * (tile_max(kept) if DECAY == "token" else kept)
                if CROWDED:
                    k = load(gK, KEYS, (batch, t, shared, 0), aligned=True)
                if DELTA:
                    v = beta * (v - col_sum(s * k))
                s = fma(k, v, s)
                if NORMALIZE:
                    z = z + k
                if CROWDED:
                    q = load(gQ, KEYS, (batch, t, shared, 0), aligned=True)
                o = scale * col_sum(s * q)
                if NORMALIZE:
                    o = o / (scale * tile_sum(z * q) + TINY)
                store(gOut, o, (batch, t, head, column))
            store(gStart if IN_PLACE else gState, s, (sequence, head, 0, column), aligned=SINGLE)
            if NORMALIZE and part == 0:
                store(gStateZ, z, (sequence, head, 0))

    return walk, None


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
    pairs, parts = (problem.sequences, problem.heads), problem.value_dim // COLUMNS
    empty = {name: (*pairs, 0, 0) for name in ("initial_state", "state")} | {
        name: (*pairs, 0) for name in ("initial_z", "final_z")
    }
    forms = {name: c_ordered(shape, "float32", problem.device) for name, shape in empty.items()}
    forms |= {"cu_seqlens": c_ordered((0,), "int32", problem.device)} | dict(given)
    forms |= {name: _spread(given.get(name), problem) for name in ("decay", "beta")}
    if max(problem.heads, problem.sequences) > MOST:
        raise ValueError(f"q: must have at most {MOST} heads and sequences: {problem.heads}, {problem.sequences}")
    grid = -(-parts // WARPS), problem.heads, problem.sequences  # in the order in which states lie: others took 6 % longer
    kernel, sizes = make(config)[0], (parts, problem.group, problem.seqlen, problem.scale)
    return launch(kernel, grid, config.threads).bind(*(at(0, forms[name]) for name in ARRAYS), *sizes)


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
