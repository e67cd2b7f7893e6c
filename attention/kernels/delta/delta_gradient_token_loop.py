"""Gradients of the delta rule token by token, with decays of any kind, on any GPU since Ampere. With S' = exp(decay) S, before
a token's key, and dS' likewise before its query,

    e = v - S'^T k        S = S' + k (beta e)^T        o = scale S^T q
    dS = dS' + scale q dout^T        du = dS^T k        dv = beta du        dS' of the token before = exp(decay) (dS - k dv^T)
    dq = scale S dout        dk = dS (beta e) - S' dv        dbeta = du . e

these are four walks, of which each reads what those before it stored:

    "errors"   forward, S     e
    "values"   reverse, dS    du, dv, and the gradient of the initial state
    "queries"  forward, S^T   dq, dbeta, the part of dk that comes from reading S', and the last state
    "keys"     reverse, dS^T  the part of dk that comes from writing to S

A warp holds all rows of some columns of a state in its registers, as in linear_token_loop.py, so that its products are sums
over rows; hence the last two walks have the states transposed. All sums are float32, and so are e, du, dq and the parts of dk,
from which gate_gradient_token_loop.py computes the decay's gradient."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import float32, int32

from ops import col_sum, divmod, exp, fma, load, load_number, store, tile_sum, zeros
from tiles import bf16, fp32, inlined, rt, shared, sv
from tiles.launching.arguments import ENDS, FLOAT, INT, array
from tiles.layout import LANES
from tiles.targets import Target

from ...parts.recurrent.state_decays import StateRows
from ...parts.recurrent.tokens import SequenceLayout
from ..recurrent.linear_token_loop import CTAS_PER_SM, LARGEST_KEY_DIMS, MAX_WARP_KEY_DIM, WARP_COLUMNS, WARPS

WALKS = "errors", "values", "queries", "keys"
DECAYS = "", "token", "channel"
VECTOR_ROWS = 32  # rows of a state that take as many registers as the vectors of a token


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. walk: one of WALKS. rows: of a state. decay: does each "token" of a head have one decay, or
    each of its "channel"s; "" if nothing decays. varlen: are sequences packed (cu_seqlens)?"""

    walk: str
    rows: int
    decay: str = ""
    varlen: bool = False

    @property
    def splits_rows(self):
        """Do the warps of a block have some of the rows of a state each?"""
        return self.rows > MAX_WARP_KEY_DIM

    @property
    def warp_rows(self):
        """The rows of a state that a warp has."""
        return 16 * -(-self.rows // (16 * WARPS)) if self.splits_rows else self.rows

    @property
    def ctas_per_sm(self):
        """How many thread blocks the registers of an SM allow."""
        return next(blocks for limit, blocks in CTAS_PER_SM.items() if self.warp_rows + VECTOR_ROWS <= limit)

    @property
    def threads(self):
        """The number of threads of a block."""
        return LANES * WARPS

    def __str__(self):
        decay = f", decay by {self.decay}" if self.decay else ""
        return f"delta rule's {self.walk}, {self.rows} rows{decay}{', varlen' * self.varlen}"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations that take the most registers: with decays of channels; with `everything` all others, too."""
    for walk, rows, decay in itertools.product(WALKS, LARGEST_KEY_DIMS, DECAYS if everything else DECAYS[-1:]):
        yield from (Config(walk, rows, decay, varlen) for varlen in ((False, True) if everything else (True,)))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    DECAY, SPLITS_ROWS, seq_layout = config.decay, config.splits_rows, SequenceLayout(config.varlen)
    ERRORS, VALUES, QUERIES = (config.walk == walk for walk in WALKS[:3])
    TRANSPOSED, REVERSED = config.walk in ("queries", "keys"), config.walk in ("values", "keys")
    STATE, state_rows = rt(config.warp_rows, WARP_COLUMNS, fp32), StateRows(SPLITS_ROWS)
    ROWS, COLS = STATE.col_vec, STATE.row_vec
    KEYS = COLS if TRANSPOSED else ROWS  # a number for each channel of the keys
    smem = shared(sums=sv(WARP_COLUMNS * WARPS, fp32), products=sv(4 * WARPS, fp32))

    @inlined
    def load_decay(gDecay, batch, token, head, channel):
        """The factor by which a state decays, exp(decay)."""
        if DECAY == "channel":
            return exp(load(gDecay, KEYS, (batch, token, head, channel), aligned=True))
        elif DECAY == "token":
            return exp(load_number(gDecay, (batch, token, head)))
        else:
            return 1.0

    @cuda.jit(launch_bounds=(config.threads, config.ctas_per_sm), fastmath=True)
    def walk_tokens(
        gQ: array(4, bf16), gK: array(4, bf16), gV: array(4, bf16), gDOut: array(4, bf16), gBeta: array(3),
        gDecay: array(4 if config.decay == "channel" else 3), gErrors: array(4), gDU: array(4), gDV: array(4, bf16),
        gDQ: array(4), gDK: array(4), gDBeta: array(3), gInitialState: array(4), gFinalState: array(4), gCuSeqlens: ENDS,
        parts: INT, group: INT, length: INT, scale: FLOAT,
    ):  # fmt: skip
        """Each block serves a head of a sequence. The columns of a state are divided among `parts` blocks, or warps. `group`
        heads share a key head. gDK: dk_write and dk_read of each value head, one after the other."""
        warp, head, sequence = cuda.threadIdx.x // LANES, cuda.blockIdx.y, cuda.blockIdx.z
        if SPLITS_ROWS:
            sums, products = smem.open()
            part, row = cuda.blockIdx.x, STATE.rows * warp
        else:
            sums = products = row = 0
            part = cuda.blockIdx.x * WARPS + warp
        if part < parts:
            key_head, _ = divmod(head, group)
            column = STATE.cols * part
            channel, value = (column, row) if TRANSPOSED else (row, column)
            written, read = int32(2 * head), int32(2 * head + 1)
            first, end, batch = seq_layout.sequence_tokens(gCuSeqlens, sequence, length)
            s = load(gInitialState, STATE, (sequence, head, row, column), aligned=False)
            for i in range(first, end):
                t = int32(first + end - 1 - i if REVERSED else i)
                k = load(gK, KEYS, (batch, t, key_head, channel), aligned=True)
                decay, beta = load_decay(gDecay, batch, t, head, channel), load_number(gBeta, (batch, t, head))
                if ERRORS:
                    s = s * decay
                    v = load(gV, COLS, (batch, t, head, value), aligned=True)
                    e = v - state_rows.sum(col_sum(s * k), sums)
                    s = fma(k, beta * e, s)
                    if row == 0:
                        store(gErrors, e, (batch, t, head, value), aligned=False)
                elif VALUES:
                    q = load(gQ, KEYS, (batch, t, key_head, channel), aligned=True)
                    dout = load(gDOut, COLS, (batch, t, head, value), aligned=True)
                    s = fma(q * scale, dout, s)
                    du = state_rows.sum(col_sum(s * k), sums)
                    s = fma(k, -beta * du, s) * decay
                    if row == 0:
                        store(gDU, du, (batch, t, head, value), aligned=False)
                        store(gDV, beta * du, (batch, t, head, value), aligned=False)
                elif QUERIES:
                    s = s * decay
                    e = load(gErrors, ROWS, (batch, t, head, value), aligned=True)
                    du = load(gDU, ROWS, (batch, t, head, value), aligned=True)
                    dk = state_rows.sum(col_sum(s * du), sums) * -beta
                    s = fma(e * beta, k, s)
                    dout = load(gDOut, ROWS, (batch, t, head, value), aligned=True)
                    dq = state_rows.sum(col_sum(s * dout), sums) * scale
                    dbeta = state_rows.sum(tile_sum(du * e), products)
                    if row == 0:
                        store(gDK, dk, (batch, t, read, channel), aligned=False)
                        store(gDQ, dq, (batch, t, head, channel), aligned=False)
                        if part == 0:
                            gDBeta[batch, t, head] = dbeta
                else:
                    q = load(gQ, KEYS, (batch, t, key_head, channel), aligned=True)
                    s = fma(load(gDOut, ROWS, (batch, t, head, value), aligned=True), q * scale, s)
                    e = load(gErrors, ROWS, (batch, t, head, value), aligned=True)
                    dk = state_rows.sum(col_sum(s * e), sums) * beta
                    du = load(gDU, ROWS, (batch, t, head, value), aligned=True)
                    s = fma(du * -beta, k, s) * decay
                    if row == 0:
                        store(gDK, dk, (batch, t, written, channel), aligned=False)
            padding = seq_layout.padding_tokens(gCuSeqlens, sequence, length)
            for t in range(padding.start, padding.end):
                if row == 0:
                    if VALUES:
                        store(gDV, zeros(COLS), (padding.batch, t, head, value), aligned=False)
                    elif QUERIES:
                        store(gDK, zeros(COLS), (padding.batch, t, read, channel), aligned=False)
                        store(gDQ, zeros(COLS), (padding.batch, t, head, channel), aligned=False)
                        if part == 0:
                            gDBeta[padding.batch, t, head] = float32(0)
                    elif not ERRORS:
                        store(gDK, zeros(COLS), (padding.batch, t, written, channel), aligned=False)
            store(gFinalState, s, (sequence, head, row, column), aligned=False)

    return walk_tokens, smem if SPLITS_ROWS else None
