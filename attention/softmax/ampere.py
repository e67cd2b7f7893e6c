"""FlashAttention forward for sm_80 and later: cp.async, ldmatrix and mma.sync.

Every warp owns `band` query rows and goes through all key blocks, from the last to the first, so that the ones a mask cuts
come first. While a block's scores are computed its values are on their way, and the next keys under the softmax
(FlashAttention-2, Dao 2023): two meetings of the block a round, and no barriers in memory.

It also takes what TMA cannot: bases and strides of 8, 4 or 2 bytes, by as many smaller copies.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import causal, divmod, mma_AB, mma_ABt, store, subtile, zeros
from tiles import bf16, dtype, fp16, fp32, pipeline, rt, shared, st
from tiles.arguments import FLOAT, INT, array
from tiles.layout import LANES
from tiles.pipeline import PIECES

from .online import Softmax
from .tiling import Causal, Full


@dataclass(frozen=True)
class Config:
    """A kernel's shape: head_dim as padded, key rows of a block, warps of `band` query rows each, stages of the pipelines,
    blocks that a multiprocessor is to hold. piece: the bytes that bases and strides are multiples of."""

    head_dim: int
    dtype: dtype
    causal: bool
    kv: int
    warps: int
    band: int
    stages: int
    resident: int
    piece: int = 16

    @property
    def rows(self):
        """Query rows of a thread block."""
        return self.band * self.warps

    @property
    def threads(self):
        """Threads of a block."""
        return LANES * self.warps

    @property
    def query(self):
        """A block's tile of Q."""
        return st(self.rows, self.head_dim, self.dtype)

    @property
    def key(self):
        """A tile of K or V."""
        return st(self.kv, self.head_dim, self.dtype)

    @property
    def sees(self):
        """Which keys a tile's queries see."""
        return (Causal if self.causal else Full)(self.rows, self.kv, causal)

    @property
    def persistent(self):
        """Never: blocks are short, and a multiprocessor holds several."""
        return False

    def __str__(self):
        small = f", by {self.piece} bytes" * (self.piece != 16)
        return f"D {self.head_dim} {self.dtype}{' causal' * self.causal}, {self.rows} x {self.kv}{small}"


SHAPES = {  # padded head_dim: (kv, warps, band, stages, resident)
    64: (128, 4, 32, 1, 2),
    96: (64, 4, 32, 2, 2),
    128: (64, 4, 32, 1, 2),
    192: (64, 4, 16, 1, 2),
    256: (64, 4, 16, 1, 2),
}
ROOMS = {  # bytes of shared memory that a block may have: other shapes, of which two blocks share a multiprocessor there
    99 * 1024: {96: (64, 4, 32, 1, 2), 128: (32, 4, 32, 1, 2), 192: (32, 4, 16, 1, 2)},  # sm_86, sm_89, sm_120
    163 * 1024: {},  # sm_80
    227 * 1024: {128: (64, 4, 32, 2, 2), 192: (96, 4, 16, 1, 2)},  # sm_90, sm_100, whose code for D 128 in one stage spills
}
SHARED_BYTES, LARGE = min(ROOMS), max(ROOMS)


@functools.cache
def config_for(head_dim: int, dtype: dtype, causal: bool, room: int = LARGE, piece: int = 16) -> Config:
    """The configuration that serves a problem on a GPU whose blocks may have `room` bytes of shared memory: the next larger
    head_dim."""
    padded = min(d for d in SHAPES if d >= head_dim)
    least = SHARED_BYTES if piece == 2 else max(r for r in ROOMS if r <= room)  # loads take registers that cp.async does not
    return Config(padded, dtype, causal, *ROOMS[least].get(padded, SHAPES[padded]), piece)


ROOM = {"sm_80": 163 * 1024, "sm_90a": LARGE, "sm_100a": LARGE}  # shared memory that a block may have; elsewhere the least


def space(arch: str, everything: bool) -> Iterator[Config]:
    """What an architecture is served with: bf16 and whole pieces, or `everything`. fp16 takes the same registers as bf16."""
    forms = [(bf16, PIECES[0]), *((bf16, piece) for piece in PIECES[1:]), (fp16, PIECES[0])]
    for (of, piece), head_dim, masked in itertools.product(forms[: len(forms) if everything else 1], SHAPES, (False, True)):
        yield config_for(head_dim, of, masked, ROOM.get(arch, SHARED_BYTES), piece)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    KV, ROWS, BAND, PIECE, sees = config.kv, config.rows, config.band, config.piece, config.sees
    INPUT, S, O = config.dtype, rt(BAND, KV, fp32), rt(BAND, config.head_dim, fp32)
    STAGES = config.stages
    NEWER = 2 * (STAGES - 1)  # groups of keys and values in turn: so many are younger than the one waited for
    KEYS_ALONE = NEWER + 1  # groups after that of Q, when it is waited for
    smem = shared(
        q=pipeline(config.query, 1, config.warps),
        k=pipeline(config.key, STAGES, config.warps),
        v=pipeline(config.key, STAGES, config.warps),
    )
    softmax = Softmax(O)

    @cuda.jit(launch_bounds=(config.threads, config.resident), fastmath=True)
    def attend(
        gQ: array(4, INPUT), gK: array(4, INPUT), gV: array(4, INPUT), gO: array(4, INPUT), gLse: array(3),
        q_len: INT, kv_len: INT, offset: INT, blocks: INT, heads: INT, pairs: INT, band: INT, group: INT,
        scale: FLOAT, slack: FLOAT,
    ):  # fmt: skip
        """O = softmax(Q K^T / sqrt(D)) V and its log-sum-exp, for a block of query rows of one of `pairs` pairs of head and
        batch; `group` query heads share a key head; `scale` is log2(e) / sqrt(D), `slack` how far a maximum may lag. Causal:
        `band` pairs are worked on at once."""
        q, k, v = smem.open()
        block, pair = sees.place(cuda.blockIdx.x, blocks, pairs, band)
        batch, head = divmod(pair, heads)
        kv_head, _ = divmod(head, group)
        warp = int32(cuda.threadIdx.x // 32)
        diagonal = ROWS * block + offset  # the last key that the first row may see
        n, cut = sees.key_blocks(diagonal, kv_len)
        q.fill(0, gQ, (batch, ROWS * block, head, 0), 1, 3, 1, PIECE)
        for i in range(STAGES):
            k.fill(i, gK, (batch, KV * (n - 1 - i), kv_head, 0), 1, 3, n, PIECE)
            if i < STAGES - 1:
                v.fill(i, gV, (batch, KV * (n - 1 - i), kv_head, 0), 1, 3, n, PIECE)
        edge = int32(sees.edge(diagonal, BAND * warp, kv_len) - (n - 1) * KV)
        queries, seen = subtile(q.wait(0, KEYS_ALONE), BAND, warp), softmax.begin()
        for i in range(n):
            keys = k.wait(i, NEWER)
            v.fill(i + STAGES - 1, gV, (batch, KV * (n - i - STAGES), kv_head, 0), 1, 3, n, PIECE)
            s = mma_ABt(zeros(S), queries, keys)
            values = v.wait(i, NEWER)
            k.fill(i + STAGES, gK, (batch, KV * (n - 1 - i - STAGES), kv_head, 0), 1, 3, n, PIECE)
            if i < cut:
                s = sees.mask(s, edge + i * KV)
            seen = seen.moved(s, scale, slack)
            o = seen.rescaled()  # before P, so that nothing parts the exponentials from the products that they run under
            p = seen.weights(s, scale)
            seen = seen._replace(o=mma_AB(o, INPUT(p), values)).add(p)
        row, (o, lse) = ROWS * block + BAND * warp, seen.finish(scale)
        store(gO, o, (batch, row, head, 0), 1, 3, PIECE)
        store(gLse, lse, (batch, head, row))

    return attend, smem
