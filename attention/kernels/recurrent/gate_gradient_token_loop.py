"""The gradient of the gates of linear attention token by token, from gradients of queries and keys that are float32.

    r_t = q_t dq_t - k_t dk_t        dg_t = r_t + r_(t+1) + .. to the end of the sequence, + <S, dS>

for each channel of the keys: <S, dS> is the sum over the rest of the last state and its gradient. The gradient of a gate of all
channels, or of all tokens of a head, is the sum over these. A gate below FLOOR, as -inf, has a gradient of 0. Under the delta
rule dk_read has the opposite sign (delta_gradient_token_loop.py).

A warp goes through the tokens of a sequence from the last one to the first, with some of the channels of a head."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import float32, int32

from ops import divmod, less, load, load_number, store, tile_sum, where, zeros
from tiles import fp32, inlined, rt
from tiles.launching.arguments import ENDS, INT, array
from tiles.layout import LANES
from tiles.targets import Target

from ...parts.recurrent.gates import FLOOR
from ...parts.recurrent.tokens import SequenceLayout

CHANNELS = 64  # of a warp, where each channel has a gate; under the delta rule, those that a warp reads at once
PADDED = 64, 128, 256  # channels of a warp, where all channels of a head share a gate
KINDS = "channel", "token", "head"


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. kind: does each "token", "head" or "channel" have a gate? channels: of a warp. has_state: does
    the last state have a gradient? varlen: are sequences packed (cu_seqlens)? delta: is dk two arrays, dk_write and dk_read?"""

    kind: str
    channels: int
    has_state: bool
    varlen: bool = False
    delta: bool = False
    threads = LANES

    def __str__(self):
        flags = ", state" * self.has_state + ", varlen" * self.varlen + ", delta" * self.delta
        return f"gates by {self.kind}, token loop, {self.channels} channels{flags}"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations with a state; others with `everything` only."""
    sizes = ((kind, channels) for kind in KINDS for channels in (PADDED if kind != "channel" else (CHANNELS,)))
    for size, (has_state, varlen) in itertools.product(sizes, itertools.product((True, False), repeat=2)):
        if everything or (has_state and varlen):
            yield Config(*size, has_state, varlen)
            if size[1] == CHANNELS:
                yield Config(*size, has_state, varlen, delta=True)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    PER_CHANNEL, PER_HEAD, HAS_STATE = config.kind == "channel", config.kind == "head", config.has_state
    DELTA = config.delta
    ADDS_PARTS = DELTA and not PER_CHANNEL  # of so many channels: their sums are numbers
    CHANNELS_OF_WARP, VECTOR, seq_layout = config.channels, rt(16, config.channels, fp32).row_vec, SequenceLayout(config.varlen)

    @inlined
    def delta_products(gQ, gK, gDQ, gDK, batch, t, key_head, head, channel):
        """q dq + k dk_read - k dk_write of a token."""
        at_key = batch, t, key_head, channel
        q_dq = load(gQ, VECTOR, at_key, aligned=False) * load(gDQ, VECTOR, (batch, t, head, channel), aligned=False)
        written = load(gDK, VECTOR, (batch, t, int32(2 * head), channel), aligned=False)
        read = load(gDK, VECTOR, (batch, t, int32(2 * head + 1), channel), aligned=False)
        return q_dq + load(gK, VECTOR, at_key, aligned=False) * (read - written)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def sum_gates(
        gQ: array(4), gK: array(4), gDQ: array(4), gDK: array(4), gDecay: array(4), gState: array(4), gDState: array(4),
        gGradient: array(4), gCuSeqlens: ENDS, length: INT, sequences: INT, heads: INT, group: INT, blocks: INT, columns: INT,
    ):  # fmt: skip
        """A warp has one of the `blocks` of channels of a head of one sequence, or of all `sequences` if a gate is that of a
        head. gDQ, gDK: for each value head, of which `group` share a key head. gState, gDState: (sequence, head, `columns`,
        channel)."""
        index, block = divmod(cuda.blockIdx.x, blocks)
        first, head = divmod(index, heads)
        key_head, _ = divmod(head, group)
        channel, sum_of_head = int32(CHANNELS_OF_WARP * block), float32(0)
        for sequence in range(first, sequences if PER_HEAD else first + 1):
            start, end, batch = seq_layout.sequence_tokens(gCuSeqlens, sequence, length)
            total = zeros(VECTOR)
            sum_of_parts, parts = float32(0), (gQ.shape[3] + CHANNELS_OF_WARP - 1) // CHANNELS_OF_WARP
            if HAS_STATE:
                for column in range(columns):
                    at = sequence, head, int32(column), channel
                    if ADDS_PARTS:
                        for part in range(parts):
                            at = sequence, head, int32(column), int32(CHANNELS_OF_WARP * part)
                            products = load(gState, VECTOR, at, aligned=False) * load(gDState, VECTOR, at, aligned=False)
                            sum_of_parts += tile_sum(products)
                    else:
                        total = total + load(gState, VECTOR, at, aligned=False) * load(gDState, VECTOR, at, aligned=False)
            for i in range(start, end):
                t = int32(start + end - 1 - i)
                at, at_key = (batch, t, head, channel), (batch, t, key_head, channel)
                if ADDS_PARTS:
                    for part in range(parts):
                        c = int32(CHANNELS_OF_WARP * part)
                        sum_of_parts += tile_sum(delta_products(gQ, gK, gDQ, gDK, batch, t, key_head, head, c))
                elif DELTA:
                    total = total + delta_products(gQ, gK, gDQ, gDK, batch, t, key_head, head, channel)
                else:
                    q_dq = load(gQ, VECTOR, at_key, aligned=False) * load(gDQ, VECTOR, at, aligned=False)
                    total = total + q_dq - load(gK, VECTOR, at_key, aligned=False) * load(gDK, VECTOR, at, aligned=False)
                if PER_CHANNEL:
                    gates = load(gDecay, VECTOR, at, aligned=False)
                    store(gGradient, where(less(gates, FLOOR), 0.0, total), at, aligned=False)
                else:
                    gate = load_number(gDecay, (batch, t, head, 0))
                    if ADDS_PARTS:
                        gradient = float32(0) if gate < FLOOR else sum_of_parts
                    else:
                        gradient = float32(0) if gate < FLOOR else tile_sum(total)
                    if PER_HEAD:
                        sum_of_head += gradient
                    else:
                        gGradient[batch, t, head, 0] = gradient
            padding = seq_layout.padding_tokens(gCuSeqlens, sequence, length)
            for t in range(padding.start, padding.end):
                if PER_CHANNEL:
                    store(gGradient, zeros(VECTOR), (padding.batch, int32(t), head, channel), aligned=False)
                elif not PER_HEAD:
                    gGradient[padding.batch, t, head, 0] = float32(0)
        if PER_HEAD:
            gGradient[0, 0, head, 0] = sum_of_head

    return sum_gates, None
