"""The gates of a chunk's channels: read from memory, or computed by a formula. ChannelGates computes their cumulative sums in
shared memory, where a warp has the channels of a panel (gla_hopper.py, kda_hopper.py and the kernels of their states);
TileGates computes gates in registers (gla_ampere.py)."""

import dataclasses

from numba import cuda
from numpy import float32, int32

from ops import cumsum_columns, last_element, less, load, load_row, row_index, store, subtile, warpgroup, where, zeros
from tiles import fp32, inlined, rt, static, sv
from tiles.launching.arguments import array, record

from .gate_formulas import GateFormula
from .gates import FLOOR
from .tokens import CHUNK

TOKEN_GROUP = 16  # tokens whose sums a warp overwrites at once
FIRST_TOKEN_SHARE = 1 / 5  # of what sums may fall within TOKEN_GROUP tokens, which the first one may fall by
RATE = rt(16, 16, fp32).row_vec  # a vector for one number of a head: over a loop it takes a register less than the number


@static
class ChannelGates:
    """Gates of channels that are in memory. channels: the channels of a warp. fall: how far sums may fall from the first to the
    last of TOKEN_GROUP tokens, if there is a limit: gates that are too low for that count as higher ones. in_loop: is the code
    of the sums a loop (cumsum_columns)?"""

    channels: int
    fall: float | None
    in_loop: bool

    @property
    def least(self):
        """The least gate that counts as it is, None if there is none below."""
        return FLOOR if self.fall is None else -self.fall * FIRST_TOKEN_SHARE

    @property
    def biases(self):
        """The shared vector of dt_bias of all channels, times the formula's slope, if gates are computed by a formula; else a
        small one, not used."""
        return sv(16, fp32)

    @property
    def rates(self):
        """The shared vector of exp(A_log) of the head, once for each warp, if gates are computed by a formula."""
        return sv(4 * RATE.length, fp32)

    def params(self):
        """The further parameters of a kernel, as a record."""
        return record()

    def compact(self):
        """These gates for a place of the kernel that is run once: their code is shorter, and slower."""
        return dataclasses.replace(self, in_loop=True)

    @inlined
    def load_constants(self, constants, params, head, warp):
        """Write to `constants`, vectors of `biases` and `rates`, what is added to the numbers of the warp's channels, and
        exp(A_log) of a head, if gates are computed by a formula."""

    @inlined
    def cumsum(self, sums, gates, constants, warp, remaining):
        """Write b, the cumulative sum of the gates, to the warp's channels of `sums`. gates: the tile that TMA has loaded,
        which may be `sums`. remaining: the number of tokens of the sequence from the chunk's first one on."""
        cumsum_columns(self.part(sums, warp), self.part(gates, warp), self.least, fall=self.fall, in_loop=self.in_loop)

    @inlined
    def compute_rows(self, x, params, head):
        """The gates of x, a register tile of tokens and all channels of a head."""
        return x

    @inlined
    def part(self, tile, warp):
        """The part of a chunk's shared tile with the channels of one warp."""
        return subtile(tile, CHUNK, 0, self.channels, warp)


@static
class FormulaChannelGates(ChannelGates):
    """Gates of channels that a formula computes."""

    formula: GateFormula

    @property
    def least(self):
        return super().least if self.formula.lowest < super().least else None

    @property
    def biases(self):
        return sv(4 * self.channels, fp32)

    @property
    def group_tile(self):
        """A register tile of TOKEN_GROUP tokens and the warp's channels."""
        return rt(TOKEN_GROUP, self.channels, fp32)

    def params(self):
        return record(gA=array(2), gDtBias=array(2))

    @inlined
    def load_constants(self, constants, params, head, warp):
        biases, rates = constants
        bias = load(params.gDtBias, self.group_tile.row_vec, (head, self.channels * warp))
        rate = self.formula.load_rate(params.gA, head)
        store(subtile(biases, self.channels, warp), bias * self.formula.slope(rate))
        store(subtile(rates, RATE.length, warp), zeros(RATE) + rate)
        cuda.syncwarp()  # other lanes read them

    @inlined
    def cumsum(self, sums, gates, constants, warp, remaining):
        (biases, rates), formula = constants, self.formula
        rate, offsets = last_element(subtile(rates, RATE.length, warp)), subtile(biases, self.channels, warp)
        function, slope, factor = formula.value_at, formula.slope(rate), formula.factor(rate)
        sums_part, gates_part = self.part(sums, warp), self.part(gates, warp)
        cumsum_columns(
            sums_part, gates_part, self.least, function, slope, offsets, None, self.fall, factor, formula.divides, self.in_loop
        )
        if remaining < CHUNK:
            self.repeat_last(sums, warp, remaining)

    @inlined
    def compute_rows(self, x, params, head):
        bias = load(params.gDtBias, rt(16, 4 * self.channels, fp32).row_vec, (head, 0))
        return self.formula.compute(x, self.formula.load_rate(params.gA, head), bias)

    @inlined
    def repeat_last(self, sums, warp, remaining):
        """Overwrite b of the tokens after the sequence, for which the formula computes gates, too, by b of its last token."""
        last = load_row(self.part(sums, warp), self.group_tile.row_vec, remaining - 1, fenced=False)
        cuda.syncwarp()  # all lanes have read it
        for i in range(CHUNK // TOKEN_GROUP):
            group = subtile(sums, TOKEN_GROUP, i, self.channels, warp)
            is_token = less(row_index(self.group_tile.col_vec), float32(remaining - TOKEN_GROUP * i))
            store(group, where(is_token, load(group, self.group_tile, fenced=False), last))
        cuda.syncwarp()  # other lanes read them


def choose_channel_gates(channels: int, formula: GateFormula | None, fall: float | None) -> ChannelGates:
    """The gates of a warp with so many channels."""
    if formula is None:
        return ChannelGates(channels, fall, in_loop=False)
    if fall is not None and -formula.lowest * (TOKEN_GROUP - 1) <= fall:
        fall = None  # sums never fall further
    return FormulaChannelGates(channels, fall, False, formula)


@static
class TileGates:
    """Gates of a warp's 16 tokens and a warpgroup's channels, loaded from memory to a register tile of type `tile`.
    from_formula: are they computed by a formula?"""

    tile: rt
    from_formula = False

    @property
    def biases(self):
        """The shared vector of dt_bias of the channels, if gates are computed by a formula; else a small one, not used."""
        return sv(16, fp32)

    def params(self):
        """The further parameters of a kernel, as a record."""
        return record()

    @inlined
    def load_constants(self, biases, params, head):
        """Write dt_bias of the warpgroup's channels to `biases`, and return exp(A_log) of the head, if gates are computed by a
        formula. They may be read after a barrier of the block."""
        return 0.0

    @inlined
    def compute(self, x, rate, biases, remaining):
        """The gates of a chunk. x: the tile from memory. remaining: the number of tokens of the sequence from the chunk's first
        one on."""
        return x


@static
class FormulaTileGates(TileGates):
    """TileGates that a formula computes. groups: the warpgroups of a block."""

    formula: GateFormula
    groups: int
    from_formula = True

    @property
    def biases(self):
        return sv(self.groups * self.tile.cols, fp32)

    def params(self):
        return record(gA=array(2), gDtBias=array(2))

    @inlined
    def load_constants(self, biases, params, head):
        if warpgroup.rank() == 0:
            bias = load(params.gDtBias, self.tile.row_vec, (head, int32(self.tile.cols * warpgroup.id())))
            store(subtile(biases, self.tile.cols, warpgroup.id()), bias)
        return self.formula.load_rate(params.gA, head)

    @inlined
    def compute(self, x, rate, biases, remaining):
        gates = self.formula.compute(x, rate, load(subtile(biases, self.tile.cols, warpgroup.id()), self.tile.row_vec))
        return where(less(warpgroup.row_index(self.tile.col_vec), float32(remaining)), gates, 0.0)


def choose_tile_gates(tile: rt, formula: GateFormula | None, groups: int) -> TileGates:
    """The gates of a warp of a block of so many warpgroups."""
    return TileGates(tile) if formula is None else FormulaTileGates(tile, formula, groups)
