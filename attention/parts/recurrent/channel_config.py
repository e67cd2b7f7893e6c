"""The configuration of the kernels whose decays are of channels: gla_hopper.py, kda_hopper.py (the delta rule) and those of
their states."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ops import warpgroup
from tiles import bf16, dtype, fp16, fp32, st, sv
from tiles.targets import Target

from .channel_decay import max_fall
from .channel_gates import ChannelGates, choose_channel_gates
from .channel_history import ChannelHistory
from .gate_formulas import FORMULAS, PLAIN_BETA, BetaFormula, GateFormula
from .launch_conditions import HistoryCondition, NoCondition
from .tokens import CHUNK, COLUMNS

PANEL = 128  # bytes of a row of a panel, at most: the widest swizzle
DELTA_KEY_DIMS = 64, 128  # as padded, of the delta rule's kernels
DELTA_REGISTERS = {1: (240, 240), 2: (152, 176)}  # consumers -> registers a thread of preparer and consumer
DELTA_SIZES = tuple(itertools.product(DELTA_KEY_DIMS, DELTA_REGISTERS))  # padded key dim, consumers
DELTA_STAGES = 2  # chunks in flight
RAW_SIZE = 128, 2  # padded key dim and consumers of configurations with a formula
GLA_SIZES = (64, 1), (64, 2), (128, 1), (128, 2), (256, 1)  # padded key dim, consumers: of GLA's kernels


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. key_dim: the channels of keys, padded. consumers: warpgroups that have 64 value columns each.
    gates: the dtype of the gates; dtype: that of everything else. varlen: are sequences packed (cu_seqlens)? formula, beta: the
    formulas of gates and beta; formula None: gates are in memory. l2norm: are queries and keys divided by their L2 norms?
    preparers: the warpgroups that compute the decayed queries and keys which consumers read."""

    key_dim: int
    consumers: int
    gates: dtype
    dtype: dtype
    varlen: bool = False
    formula: GateFormula | None = field(default=None, kw_only=True)
    beta: BetaFormula = field(default=PLAIN_BETA, kw_only=True)
    l2norm: bool = field(default=False, kw_only=True)
    preparers: ClassVar[int] = 1

    @property
    def channel_gates(self) -> ChannelGates:
        """How a warp computes and sums up gates of its channels, which are a quarter of the key dim."""
        return choose_channel_gates(self.key_dim // warpgroup.WARPGROUP, self.formula, None)

    @property
    def limited_gates(self) -> ChannelGates:
        """The gates of a warp's channels, with sums that blocks with references hold."""
        return choose_channel_gates(self.key_dim // warpgroup.WARPGROUP, self.formula, max_fall(self.dtype))

    @property
    def history(self) -> ChannelHistory:
        """How far back chunks count, under the delta rule."""
        return ChannelHistory(self.key_dim, self.gates, self.dtype, self.channel_gates, self.beta, self.l2norm)

    @property
    def threads(self):
        """Threads of a block: those of all consumers and preparers."""
        return warpgroup.THREADS * (self.consumers + self.preparers)

    def _panels_of_warps(self, element):
        """A shared tile of the dtype `element`, whose panels of columns each belong to one of four warps."""
        return st(CHUNK, self.key_dim, element, width=min(PANEL, self.key_dim // warpgroup.WARPGROUP * element.itemsize))

    @property
    def key(self):
        """The tile of Q or K for a chunk."""
        return self._panels_of_warps(self.dtype)

    @property
    def gate(self):
        """The tile of gates for a chunk, a row a token and a column a channel, in the dtype of `gates`."""
        return self._panels_of_warps(self.gates)

    @property
    def value(self):
        """A consumer's tile of V or the output for a chunk."""
        return st(CHUNK, COLUMNS, self.dtype)

    @property
    def gate_sums(self):
        """The tile of b, the cumulative sum of a chunk's gates. If the gates are fp32, b overwrites them, and this is a small
        vector that is not used."""
        return sv(16, fp32) if self.gates is fp32 else self._panels_of_warps(fp32)

    @property
    def state_decay(self):
        """The vector exp(b_last - r), one number for each channel."""
        return sv(self.key_dim, fp32)

    def __str__(self):
        size = f"Dk {self.key_dim} {self.dtype}, {COLUMNS * self.consumers} columns, gates {self.gates}"
        return ", ".join(
            filter(None, (size, str(self.formula or ""), str(self.beta), "l2norm" * self.l2norm, "varlen" * self.varlen))
        )


@dataclass(frozen=True)
class ConditionalConfig(Config):
    """A Config of a grid that may run in some calls only. condition: of the grid."""

    condition: NoCondition = field(default=NoCondition(), kw_only=True)

    @property
    def overlaps_previous(self) -> bool:
        """Does the kernel begin while the grid before still runs?"""
        return self.condition.overlaps

    def __str__(self):
        return ", ".join(filter(None, (super().__str__(), str(self.condition))))


def channel_space(
    config: type[Config], sizes, target: Target, everything: bool, beta: BetaFormula = PLAIN_BETA
) -> Iterator[Any]:
    """The configurations of these sizes, (padded key dim, consumers), with gates in fp32 and in the dtype of everything else.
    Without `everything`, varlen configurations come in one size only, and fp16, which takes as many registers as bf16, is left
    out. Those with a formula of gates, and this one of beta, come in one size."""
    if target.has_wgmma:
        for input_dtype, (key_dim, consumers), varlen in itertools.product(
            (bf16, fp16) if everything else (bf16,), sizes, (False, True)
        ):
            if not varlen or (key_dim, consumers) == (128, 2) or (everything and input_dtype is bf16):
                yield from (config(key_dim, consumers, gates, input_dtype, varlen) for gates in (fp32, input_dtype))
        for formula in FORMULAS:  # of x in fp32, which layers seldom project, KDA spills some 100 bytes of indices
            yield config(*RAW_SIZE, bf16, bf16, formula=formula, beta=beta)
            yield config(*RAW_SIZE, bf16, bf16, formula=formula, beta=beta, l2norm=True)


class KdaScanConfig(ConditionalConfig):
    """The configuration of a kernel that goes along segments under the delta rule, a preparer ahead of its consumers."""

    @classmethod
    def space(cls, target: Target, everything: bool) -> Iterator[Any]:
        """The configurations of `channel_space` for DELTA_SIZES; with `everything` those with a condition, too."""
        for config in channel_space(cls, DELTA_SIZES, target, everything, BetaFormula(1.0)):
            yield config
            if everything:
                yield replace(config, condition=HistoryCondition(False))
