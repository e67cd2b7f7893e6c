"""How many chunks before a token still count there, under the delta rule with decays of channels.

A token multiplies a state by (1 - beta k k^T) diag(exp(g)), whose norm is at most max(1, |1 - beta |k|^2|) times the greatest
decay of its channels. What all tokens of some chunks leave of a state together is at most the product of these norms. (The
product of each channel's decays is no such bound: keys carry what one channel holds to another.)"""

from numpy import float32, int32

from ops import abs, block, col_index, less, log2, maximum, row_max, row_sum, tile_sum, truncate, warpgroup, where
from tiles import dtype, fp32, inlined, rt, static, sv
from tiles.launching.arguments import array, record

from .channel_gates import ChannelGates
from .gate_formulas import BetaFormula
from .gates import FLOOR, LOG2_E, clamp_gates

LEAST_LOG2 = -56.0  # of a state less is left than 2^-32 of fp32's last bit
MAX_CHUNKS = 4  # to count one takes as long as to scan it
BLOCK_WARPGROUPS = MAX_CHUNKS  # of a BlockHistory


@static
class ChannelHistory:
    """The norms of chunks, whose rows a kernel's warpgroups read from memory. key_dim: as padded. gates, dtype: of gates and
    keys in memory. normalized: do kernels divide keys by their L2 norms?"""

    key_dim: int
    gates: dtype
    dtype: dtype
    channel_gates: ChannelGates
    beta: BetaFormula
    normalized: bool

    @property
    def sums(self):
        """The vector in shared memory by which the warps of a warpgroup add up."""
        return sv(16, fp32)

    def params(self):
        """The further parameters of a kernel, as a record: gates and keys by rows."""
        return record(gGateRows=array(4, self.gates), gKeyRows=array(4, self.dtype))

    @inlined
    def count(self, rows, params, gBeta, seq, head, key_head, sums):
        """How many of the last chunks of a TokenRange count at its end, which is the end of a chunk: until one has been added
        after which less than 2^LEAST_LOG2 is left of a state, or all; -1 if that takes more than MAX_CHUNKS. rows: the kernel's
        argument of the type that `params` returns. params: that of the gates' formula. A warpgroup calls this, with a vector
        `sums` of its own."""
        n = seq.num_chunks()
        count, left = int32(0), float32(0)
        goes_on = n > 0
        while goes_on:
            count = int32(count + 1)
            left = float32(left + self._log2_norm(rows, params, gBeta, seq, n - count, head, key_head, sums))
            goes_on = left > LEAST_LOG2 and count < min(n, MAX_CHUNKS)
        return int32(-1) if left > LEAST_LOG2 and count < n else count

    @inlined
    def is_first_warp(self):
        """Is this the first of the warps that count together?"""
        return warpgroup.rank() == 0

    @inlined
    def _log2_norm(self, rows, params, gBeta, seq, j, head, key_head, sums):
        """The sum over the tokens of the j-th chunk of log2 of their norms."""
        return warpgroup.reduce_sum(self._log2_norm_of_rows(rows, params, gBeta, seq, j, head, key_head), sums)

    @inlined
    def _log2_norm_of_rows(self, rows, params, gBeta, seq, j, head, key_head):
        """The sum over a warp's tokens of the j-th chunk of log2 of their norms."""
        tile, token = rt(16, self.key_dim, fp32), seq.chunk_start(j)
        at = seq.batch, token, head, 0
        gate_rows = truncate(rows.gGateRows, 1, seq.end)
        x = fp32(warpgroup.load(gate_rows, rt(16, self.key_dim, self.gates), at, 1, 3, aligned=True))
        gates = clamp_gates(self.channel_gates.compute_rows(x, params, head))
        norms = row_max(where(less(col_index(tile), float32(rows.gGateRows.shape[3])), gates, FLOOR)) * LOG2_E
        if not self.normalized:
            at = seq.batch, token, key_head, 0
            key_rows = truncate(rows.gKeyRows, 1, seq.end)
            keys = fp32(warpgroup.load(key_rows, rt(16, self.key_dim, self.dtype), at, 1, 3, aligned=True))
            betas = warpgroup.load(truncate(gBeta, 1, seq.end), tile.col_vec, (seq.batch, token, head), cols=1)
            norms = norms + log2(maximum(abs(self.beta.compute(betas) * row_sum(keys * keys) - 1.0), 1.0))
        elif self.beta.scale == 0:  # it may be above 2, where keys of length 1 make a state larger
            betas = warpgroup.load(truncate(gBeta, 1, seq.end), tile.col_vec, (seq.batch, token, head), cols=1)
            norms = norms + log2(maximum(abs(betas - 1.0), 1.0))
        is_token = less(warpgroup.row_index(tile.col_vec), float32(seq.remaining(j)))
        return tile_sum(where(is_token, norms, 0.0))


class BlockHistory(ChannelHistory):
    """ChannelHistory, counted by a block of BLOCK_WARPGROUPS, each of which has a chunk."""

    @property
    def sums(self):
        return sv(16 * BLOCK_WARPGROUPS, fp32)

    @inlined
    def count(self, rows, params, gBeta, seq, head, key_head, sums):
        n, index = seq.num_chunks(), warpgroup.id()
        norm, count, left = float32(0), int32(0), float32(0)
        if index < n:
            norm = self._log2_norm_of_rows(rows, params, gBeta, seq, int32(n - 1 - index), head, key_head)
        goes_on = n > 0
        while goes_on:
            left = block.reduce_sum(norm if index <= count else float32(0), sums)
            count = int32(count + 1)
            goes_on = left > LEAST_LOG2 and count < min(n, MAX_CHUNKS)
        return int32(-1) if left > LEAST_LOG2 and count < n else count

    @inlined
    def is_first_warp(self):
        return warpgroup.id() == 0 and warpgroup.rank() == 0
