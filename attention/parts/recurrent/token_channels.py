"""A chunk of queries and keys as channels by tokens, where each channel has a decay, in two blocks of 32 tokens
(channel_gradients_hopper.py, and delta_channel_block_gradients_hopper.py of the delta rule, whose strong chunks another kernel
computes).

Each block has a reference r in each channel, the middle of its sums b, in powers of 2 an integer. With c = b - r

    q' = scale exp(c) q        k* = exp(-c) k

so that a token and channel take one exponential as a query and one as a key, and a factor between blocks is one number a
channel, a power of 2. A chunk is strong if its q' or k* are out of the dtype's range: its references are then 0 for queries and
b_last for keys, so what goes through states is right, and pairs of tokens are left to another kernel.

A lane has some channels of 32 tokens, so references and decays are numbers of a lane, and b is a scan in registers."""

from typing import Any, NamedTuple

from numpy import float32

from ops import column, cumsum, exp2, less, load, minimum, ones, subtile, turned, warpgroup, where
from tiles import bf16, dtype, fp16, fp32, inlined, rt, static

from .gates import FLOOR, LOG2_E
from .tokens import CHUNK

BLOCK = CHUNK // 2  # tokens with one reference
LEAST_DECAY = {bf16: -104.0, fp16: -8.0}  # log2 of the least decay over half of a block with which q' and k* are in range
LOG2_FLOOR = FLOOR * LOG2_E
BELOW_FLOOR = 1.5 * FLOOR  # the value in sums of a gate below the floor: it makes the chunk strong
SUMS = rt(16, BLOCK, fp32)  # of a warp's channels and a block's tokens


class References(NamedTuple):
    """What the channels of a chunk have. r_0, r_1: the references of queries, each less b before its block. between: the second
    one less the first. total: the second one, from the start of the chunk. end: the reference of keys, 0 unless the chunk is
    strong. last: b of the last token."""

    r_0: Any
    r_1: Any
    between: Any
    total: Any
    end: Any
    last: Any


@static
class TokenChannels:
    """A warp's channels of the tokens of a chunk. dtype: of queries and keys. channels: those of a warpgroup. gates: the
    gates' dtype."""

    dtype: dtype
    channels: int
    gates: dtype = fp32

    @property
    def operand(self):
        """The type of a warp's channels of a block's queries or keys, transposed, in registers."""
        return rt(16, BLOCK, self.dtype)

    @property
    def floor_per_decay(self):
        """A decay over half of a block times this is below the floor if q' or k* are out of the dtype's range."""
        return LOG2_FLOOR / (2.0 * LEAST_DECAY[self.dtype])

    @inlined
    def sum_gates(self, gates, wg, block):
        """b of a block in powers of 2, without the gates before the block. gates: the shared tile of the chunk."""
        part = subtile(gates, BLOCK, block, self.channels, wg)
        x = fp32(warpgroup.load_transposed(part, rt(16, BLOCK, self.gates), fenced=False))
        return turned(cumsum(turned(where(less(x, FLOOR), BELOW_FLOOR * LOG2_E, x * LOG2_E))))

    @inlined
    def choose_references(self, b_0, b_1):
        """The References of a chunk, from the sums of each block's own gates."""
        r_0, r_1, last_0, last, strong = self.find_middles(b_0, b_1)
        r_0, r_1, end = where(strong, 0.0, r_0), where(strong, 0.0, r_1), where(strong, fp32(fp16(last)), 0.0)
        return References(r_0, r_1 - last_0, r_1 - r_0, r_1, end, last)

    @inlined
    def find_middles(self, b_0, b_1):
        """(the references of both blocks, b of the first block's last token, b of the last one, is the chunk strong?) in each
        channel."""
        first, last_0 = column(b_0, 0), column(b_0, BLOCK - 1)
        r_0, least = (first + last_0) * 0.25 // 1 * 2.0, minimum((last_0 - first) * self.floor_per_decay, first)
        first, last = column(b_1, 0), column(b_1, BLOCK - 1)
        least = minimum(least, minimum((last - first) * self.floor_per_decay, first))
        r_1, last = (last_0 * 2.0 + first + last) * 0.25 // 1 * 2.0, last_0 + last
        return r_0, r_1, last_0, last, less(least, float32(LOG2_FLOOR))

    @inlined
    def load_block(self, tile, block):
        """A block of a shared tile of queries or keys, transposed. Addresses are computed anew, to save registers."""
        return warpgroup.load_transposed(subtile(tile, BLOCK, block), self.operand, fenced=False, recompute=True)

    @inlined
    def decay_block(self, queries, keys, b, r, end, block, scale):
        """Write q' over q and k* over k, in a block. Returns k*."""
        x = self.dtype(fp32(self.load_block(queries, block)) * (exp2(b - r) * scale))
        warpgroup.store_transposed(subtile(queries, BLOCK, block), x, True)
        x = self.dtype(fp32(self.load_block(keys, block)) * exp2(end + r - b))
        warpgroup.store_transposed(subtile(keys, BLOCK, block), x, True)
        return x

    @inlined
    def decay_twice(self, x, root):
        """x times root^2 in each channel, exactly, as that is a power of 2, which may be out of the dtype's range."""
        factor = self.dtype(ones(SUMS) * root)
        return x * factor * factor

    @inlined
    def load_decayed(self, queries, block, decay):
        """A block of queries, times a power of 2 for each channel, exactly."""
        return self.load_block(queries, block) * self.dtype(ones(SUMS) * decay)

    @inlined
    def load_state(self, states, half):
        """Half of the columns of a shared state's values, of a warp's channels, transposed."""
        operand = rt(16, CHUNK, self.dtype)
        return fp32(warpgroup.load_transposed(subtile(states, CHUNK, half), operand, fenced=False, recompute=True))

    @inlined
    def load_decayed_keys(self, tiles, operand, part, rank):
        """A warp's tokens of k* decayed to the reference of the second block: all channels or, as registers would spill, one
        part. tiles: k*; that of the first block, decayed so (`decay_twice`)."""
        keys, first_keys = tiles
        if rank < 2:
            return load(subtile(first_keys, 16, rank, operand.cols, part), operand, fenced=False)
        else:
            return load(subtile(keys, 16, rank, operand.cols, part), operand, fenced=False)
