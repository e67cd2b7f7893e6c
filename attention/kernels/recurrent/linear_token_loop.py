"""Linear attention token by token (a recurrent kernel), of all kinds without a feature map, on any GPU since Ampere.

    S = exp(decay) S;  v = beta (v - S^T k);  S = S + k v^T;  o = scale S^T q

A warp holds all rows of some columns of a head's state in its registers, so sums over the rows stay inside it and no warp waits
for another. If a state has more rows than registers hold, the warps of a block have some of the rows each, and reduce their
sums. The time of a single token (attention.linear_step) is that of reading and writing the state: 16 bytes a lane, all loads in
flight before the first use. Sequences are served here if no chunk kernel serves them."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from numba import cuda

from ops import col_sum, divmod, fma, load, rsqrt, store, tile_sum, zeros
from tiles import bf16, fp32, inlined, rt, shared, sv
from tiles.launching.arguments import ENDS, FLOAT, INT, array
from tiles.targets import Target

from ...parts.recurrent.gate_formulas import FORMULAS, PLAIN_BETA, BetaFormula, GateFormula
from ...parts.recurrent.l2norm import L2NORM_EPSILON
from ...parts.recurrent.results import NORMALIZER_EPSILON
from ...parts.recurrent.state_decays import STATE_DECAYS, StateRows
from ...parts.recurrent.tokens import SequenceLayout

WARPS = 4  # of a block
WARP_COLUMNS = 16  # columns of the state that a warp has
CTAS_PER_SM = {64: 5, 80: 4, 144: 3, 256: 2}  # rows of a warp, up to -> blocks of an SM, as registers allow
MAX_WARP_KEY_DIM = 128  # the most rows of a state of which one warp holds all
# These fill the registers of their number of blocks: if they do not spill, none do.
LARGEST_KEY_DIMS = 64, 80, MAX_WARP_KEY_DIM, 256
MAX_GRID_YZ = 65535  # blocks along the second and third axis of a grid
FLAGS = "delta", "normalize", "varlen", "single", "reversed", "groups_queries", "l2norm"


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. key_dim: the rows of a state. decay: does each "token" of a head have one decay, or each of its
    "channel"s; "" if nothing decays. delta: is it the delta rule? normalize: are outputs normalized? varlen: are sequences
    packed (cu_seqlens)? single: is there one token only, with states that allow accesses of 16 bytes? reversed: does it begin
    with the last token? Then a token's decay comes after its output, and the scale multiplies keys. groups_queries: do the
    heads of a group share values, instead of queries and keys? (parts/recurrent/gradients.py) formula, beta: compute gates and
    beta from the numbers in memory; None: these are the gates and beta. l2norm: are queries and keys divided by their L2
    norms?"""

    key_dim: int
    decay: str = ""
    delta: bool = False
    normalize: bool = False
    varlen: bool = False
    single: bool = False
    reversed: bool = False
    groups_queries: bool = False
    formula: GateFormula | None = field(default=None, kw_only=True)
    beta: BetaFormula = field(default=PLAIN_BETA, kw_only=True)
    l2norm: bool = field(default=False, kw_only=True)

    @property
    def splits_rows(self):
        """Do the warps of a block have some of the rows of a state each?"""
        return self.key_dim > MAX_WARP_KEY_DIM

    @property
    def width_factor(self):
        """The factor of the numbers of warps and of columns. A single token's time is that of reading and writing the state:
        blocks whose warps split its rows then have twice as many columns, 128 bytes of a row."""
        return 2 if self.splits_rows and self.single else 1

    @property
    def warps(self):
        """The number of warps of a block."""
        return WARPS * self.width_factor

    @property
    def columns(self):
        """The columns of a state that a warp has."""
        return WARP_COLUMNS * self.width_factor

    @property
    def rows(self):
        """The rows of a state that a warp has."""
        return 16 * -(-self.key_dim // (16 * self.warps)) if self.splits_rows else self.key_dim

    @property
    def ctas_per_sm(self):
        """How many thread blocks the registers of an SM allow. z takes as many registers as 16 columns of the state. Sums over
        warps, or all vectors of a token of KDA, take as many as 16 rows."""
        sums = 16 * (self.splits_rows or (self.delta and self.decay == "channel"))
        rows = self.rows * (self.width_factor + self.normalize) + sums
        return next(blocks for limit, blocks in CTAS_PER_SM.items() if rows <= limit) // self.width_factor

    @property
    def threads(self):
        """The number of threads of a block."""
        return 32 * self.warps

    def __str__(self):
        labels = [f"decay by {self.decay}"] * bool(self.decay)
        labels += [str(x) for x in (self.formula, self.beta) if x is not None and str(x)]
        return ", ".join([f"Dk {self.key_dim}", *labels, *(x for x in FLAGS if getattr(self, x))])


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations that take the most registers, those of LARGEST_KEY_DIMS: with decays of channels or a normalizer; with
    `everything` all others, too."""
    for key_dim, decay, delta in itertools.product(LARGEST_KEY_DIMS, ("", "token", "channel"), (False, True)):
        if everything or decay == "channel":
            yield from (Config(key_dim, decay, delta, varlen=not single, single=single) for single in (True, False))
        if not delta and (everything or decay == "token"):
            yield Config(key_dim, decay, normalize=True)
            yield from (
                Config(key_dim, decay, varlen=True, reversed=is_reversed, groups_queries=True) for is_reversed in (False, True)
            )
        if not delta and (everything or decay == "channel"):
            yield Config(key_dim, decay, varlen=True, reversed=True)
    for key_dim, formula in itertools.product(LARGEST_KEY_DIMS, FORMULAS if everything else FORMULAS[:1]):
        for single in (True, False):
            config = Config(key_dim, "channel", True, varlen=not single, single=single, formula=formula, beta=BetaFormula(1.0))
            yield dataclasses.replace(config, l2norm=True)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    DELTA, NORMALIZE = config.delta, config.normalize
    SINGLE, SPLITS_ROWS, seq_layout = config.single, config.splits_rows, SequenceLayout(config.varlen)
    REVERSED, GROUPS_QUERIES, BETA, L2NORM = config.reversed, config.groups_queries, config.beta, config.l2norm
    STATE, rows = rt(config.rows, config.columns, fp32), StateRows(config.splits_rows)
    state_decay = STATE_DECAYS[config.decay](STATE, config.formula)
    PARAMS = state_decay.params()
    KEYS, VALUES = STATE.col_vec, STATE.row_vec
    smem = shared(sums=sv(config.columns * config.warps, fp32), products=sv(4 * config.warps, fp32))

    @inlined
    def normalize_rows(x, scratch):
        """A query or key divided by its L2 norm, if the configuration says so."""
        if L2NORM:
            return x * rsqrt(rows.sum(tile_sum(x * x), scratch) + L2NORM_EPSILON)
        else:
            return x

    @cuda.jit(launch_bounds=(config.threads, config.ctas_per_sm), fastmath=True)
    def token_loop(
        gQ: array(4, bf16), gK: array(4, bf16), gV: array(4, bf16), gDecay: array(4), gBeta: array(4), gOut: array(4, bf16),
        gInitialState: array(4), gFinalState: array(4), gInitialZ: array(3), gFinalZ: array(3), gCuSeqlens: ENDS,
        parts: INT, group: INT, length: INT, scale: FLOAT, params: PARAMS,
    ):  # fmt: skip
        """Each block serves a head of a sequence. The columns of a state are divided among `parts` blocks, or warps. `group`
        heads share a key head."""
        warp, head, sequence = cuda.threadIdx.x // 32, cuda.blockIdx.y, cuda.blockIdx.z
        if SPLITS_ROWS:
            sums, products = smem.open()
            part, row = cuda.blockIdx.x, STATE.rows * warp
        else:
            sums = products = row = 0
            part = cuda.blockIdx.x * WARPS + warp
        if part < parts:
            key_head, _ = divmod(head, group)
            query_head, value_head = (head, key_head) if GROUPS_QUERIES else (key_head, head)
            column = STATE.cols * part
            first, end, batch = seq_layout.sequence_tokens(gCuSeqlens, sequence, 1 if SINGLE else length)
            s = load(gInitialState, STATE, (sequence, head, row, column), aligned=SINGLE)
            if NORMALIZE:
                z = load(gInitialZ, KEYS, (sequence, head, row))
            rate = state_decay.load_rate(params, head)
            for i in range(first, end):
                t = first + end - 1 - i if REVERSED else i
                k = normalize_rows(load(gK, KEYS, (batch, t, query_head, row), aligned=True), products)
                v = load(gV, VALUES, (batch, t, value_head, column), aligned=True)
                decay = state_decay.load(gDecay, params, rate, batch, t, head, row, column)
                beta = BETA.compute(load(gBeta, VALUES, (batch, t, head, column), aligned=False)) if DELTA else 0.0
                q = normalize_rows(load(gQ, KEYS, (batch, t, query_head, row), aligned=True), products)
                if REVERSED:
                    k = k * scale
                else:
                    s = s * decay
                if DELTA:
                    v = beta * v - beta * rows.sum(col_sum(s * k), sums)
                s = fma(k, v, s)
                o = rows.sum(col_sum(s * q), sums)
                if REVERSED:
                    s = s * decay
                else:
                    o = scale * o
                if NORMALIZE:
                    z = state_decay.decay_keys(z, decay) + k
                    o = o / (scale * rows.sum(tile_sum(z * q), products) + NORMALIZER_EPSILON)
                if row == 0:
                    store(gOut, o, (batch, t, head, column), aligned=False)
            padding = seq_layout.padding_tokens(gCuSeqlens, sequence, length)
            for t in range(padding.start, padding.end):
                if row == 0:
                    store(gOut, zeros(VALUES), (padding.batch, t, head, column), aligned=False)
            store(gInitialState if SINGLE else gFinalState, s, (sequence, head, row, column), aligned=SINGLE)
            if NORMALIZE and part == 0:
                store(gFinalZ, z, (sequence, head, row))

    return token_loop, smem if SPLITS_ROWS else None
