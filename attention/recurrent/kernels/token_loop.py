"""Linear attention token by token: every member that has no feature map, on any GPU since Ampere.

    S = exp(decay) S;  v = beta (v - S^T k);  S = S + k v^T;  o = scale S^T q

A warp holds all rows of some columns of a head's state in its registers, so sums over the rows stay inside it and no warp
waits for another. States of more rows than registers hold are shared out to the warps of a block, which add up their sums.
Of a single token (attention.linear_step) all that takes time is moving the state: 16 bytes a lane, everything on its way
before anything is used. Sequences are walked where no kernel of chunks serves them.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda

from ops import block, col_sum, divmod, exp, fma, load, store, tile_max, tile_sum, zeros
from tiles import bf16, fp32, inlined, rt, shared, sv
from tiles.arguments import ENDS, FLOAT, INT, array

from .tokens import Sequences

WARPS = 4  # of a block
COLUMNS = 16  # of the state, a warp
BLOCKS = {64: 5, 80: 4, 144: 3, 256: 2}  # rows of a warp, up to -> blocks of an SM, as registers allow
WIDE = 128  # key dim, up to which a warp holds all rows
GREATEST = 64, 80, WIDE, 256  # key dims that fill a warp's registers as far as its blocks allow: if these do not spill, none do
MOST = 65535  # blocks along the second and third axis of a grid
TINY = 1e-10  # added to a normalizer, as flash-linear-attention does
FLAGS = "delta", "normalize", "varlen", "single"


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. key_dim: the rows of a state. decay: "token" or "channel", what has a decay of its own, "" if
    nothing decays. delta: is it the delta rule? normalize: are outputs normalized? varlen: do the sequences follow one another
    in a single batch? single: is there one token only, with states that can be moved 16 bytes at a time?"""

    key_dim: int
    decay: str = ""
    delta: bool = False
    normalize: bool = False
    varlen: bool = False
    single: bool = False

    @property
    def together(self):
        """Do the warps of a block share the rows of a state?"""
        return self.key_dim > WIDE

    @property
    def breadth(self):
        """By how much the usual numbers of warps and columns are multiplied. For a single token all time goes into moving the
        state; a block with few columns then moves twice as many, 128 bytes of a row."""
        return 2 if self.together and self.single else 1

    @property
    def warps(self):
        """Warps of a block."""
        return WARPS * self.breadth

    @property
    def columns(self):
        """Columns of a state that a warp has."""
        return COLUMNS * self.breadth

    @property
    def rows(self):
        """Rows of a state that a warp has."""
        return 16 * -(-self.key_dim // (16 * self.warps)) if self.together else self.key_dim

    @property
    def blocks(self):
        """Blocks that share a multiprocessor, by the registers that they take. z takes as many as the state. Sums that are
        added up, or all vectors that may be needed, take as many as 16 rows of it."""
        sums = 16 * (self.together or (self.delta and self.decay == "channel"))
        rows = self.rows * (self.breadth + self.normalize) + sums
        return next(blocks for limit, blocks in BLOCKS.items() if rows <= limit) // self.breadth

    @property
    def threads(self):
        """Threads of a block."""
        return 32 * self.warps

    def __str__(self):
        kinds = [f"decay by {self.decay}"] * bool(self.decay)
        return ", ".join([f"Dk {self.key_dim}", *kinds, *(x for x in FLAGS if getattr(self, x))])


def space(arch: str, everything: bool) -> Iterator[Config]:
    """The configurations that take the most registers, those of the greatest key dims: with decays of channels or a
    normalizer, and with `everything` all others."""
    for key_dim, decay, delta in itertools.product(GREATEST, ("", "token", "channel"), (False, True)):
        if everything or decay == "channel":
            yield from (Config(key_dim, decay, delta, varlen=not single, single=single) for single in (True, False))
        if not delta and (everything or decay == "token"):
            yield Config(key_dim, decay, normalize=True)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    DECAY, DELTA, NORMALIZE = config.decay, config.delta, config.normalize
    SINGLE, TOGETHER, sequences = config.single, config.together, Sequences(config.varlen)
    STATE = rt(config.rows, config.columns, fp32)
    KEYS, VALUES = STATE.col_vec, STATE.row_vec
    smem = shared(sums=sv(config.columns * config.warps, fp32), products=sv(4 * config.warps, fp32))

    @inlined
    def total(x, scratch):
        """The sum of what the warps that share a state have."""
        if TOGETHER:
            return block.reduce_sum(x, scratch)
        else:
            return x

    @inlined
    def decayed_by(gDecay, which, token, head, row, column):
        """The factor by which a state decays. If it is one for each token, it is the same for all rows and columns, and lies
        in memory once."""
        if DECAY == "channel":
            return exp(load(gDecay, KEYS, (which, token, head, row), aligned=True))
        elif DECAY == "token":
            return exp(load(gDecay, VALUES, (which, token, head, column), aligned=False))
        else:
            return 1.0

    @cuda.jit(launch_bounds=(config.threads, config.blocks), fastmath=True)
    def token_loop(
        gQ: array(4, bf16), gK: array(4, bf16), gV: array(4, bf16), gDecay: array(4), gBeta: array(4), gOut: array(4, bf16),
        gStart: array(4), gState: array(4), gStartZ: array(3), gStateZ: array(3), gEnds: ENDS,
        parts: INT, group: INT, length: INT, scale: FLOAT,
    ):  # fmt: skip
        """Each block works on a head of a sequence. `parts` blocks, or warps, share the columns of a state. `group` heads
        share a key head."""
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
            first, end, batch = sequences.span(gEnds, sequence, 1 if SINGLE else length)
            s = load(gStart, STATE, (sequence, head, row, column), aligned=SINGLE)
            if NORMALIZE:
                z = load(gStartZ, KEYS, (sequence, head, row))
            for t in range(first, end):
                k = load(gK, KEYS, (batch, t, shared_by, row), aligned=True)
                v = load(gV, VALUES, (batch, t, head, column), aligned=True)
                kept = decayed_by(gDecay, batch, t, head, row, column)
                beta = load(gBeta, VALUES, (batch, t, head, column), aligned=False) if DELTA else 0.0
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
                    store(gOut, o, (batch, t, head, column), aligned=False)
            nobodys = sequences.nobodys(gEnds, sequence, length)
            for t in range(nobodys.first, nobodys.end):
                if row == 0:
                    store(gOut, zeros(VALUES), (nobodys.batch, t, head, column), aligned=False)
            store(gStart if SINGLE else gState, s, (sequence, head, row, column), aligned=SINGLE)
            if NORMALIZE and part == 0:
                store(gStateZ, z, (sequence, head, row))

    return token_loop, smem if TOGETHER else None
