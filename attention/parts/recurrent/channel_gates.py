"""The gates of a chunk's channels, before they are summed (gla_hopper.py, kda_hopper.py and the kernels of their states): those
in memory, or what a formula makes of them."""

from numba import cuda
from numpy import float32

from ops import less, load, row_index, store, subtile, where
from tiles import fp32, inlined, rt, static
from tiles.launching.arguments import array, record

from .gate_formulas import GateFormula
from .tokens import CHUNK

TOKEN_GROUP = 16  # tokens whose gates a warp computes at once


@static
class ChannelGates:
    """The gates are in memory. channels: of a warp."""

    channels: int

    def params(self):
        """What else a kernel gets, as a record of parameters."""
        return record()

    @inlined
    def load_rate_and_bias(self, params, head, warp):
        """(exp(A_log) of a head, dt_bias of the warp's channels), if gates are computed by a formula."""
        return 0.0, 0.0

    @inlined
    def compute(self, sums, gates, rate_and_bias, warp, remaining):
        """The tile that holds the gates of the warp's channels, from the tile that TMA has loaded: that one, or `sums`, to
        which they are written. remaining: the number of tokens of the sequence from the chunk's first one on."""
        return gates


@static
class FormulaChannelGates(ChannelGates):
    """The gates are computed by a formula."""

    formula: GateFormula

    @property
    def group_tile(self):
        """A register tile of TOKEN_GROUP tokens and the warp's channels."""
        return rt(TOKEN_GROUP, self.channels, fp32)

    def params(self):
        return record(gA=array(2), gDtBias=array(2))

    @inlined
    def load_rate_and_bias(self, params, head, warp):
        bias = load(params.gDtBias, self.group_tile.row_vec, (head, self.channels * warp))
        return self.formula.load_rate(params.gA, head), bias

    @inlined
    def compute(self, sums, gates, rate_and_bias, warp, remaining):
        rate, bias = rate_and_bias
        for i in range(CHUNK // TOKEN_GROUP):
            x = load(subtile(gates, TOKEN_GROUP, i, self.channels, warp), self.group_tile, fenced=False)
            is_token = less(row_index(self.group_tile.col_vec), float32(remaining - TOKEN_GROUP * i))
            g = where(is_token, self.formula.compute(x, rate, bias), 0.0)
            store(subtile(sums, TOKEN_GROUP, i, self.channels, warp), g)
        cuda.syncwarp()  # other lanes sum them
        return sums


def choose_channel_gates(channels: int, formula: GateFormula | None) -> ChannelGates:
    """The gates of a warp with so many channels."""
    return ChannelGates(channels) if formula is None else FormulaChannelGates(channels, formula)
