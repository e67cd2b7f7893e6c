"""The normalizer's part of the gradients of linear attention. With n_t = scale z_t . q_t + epsilon, where z_t is the sum of
the keys so far, and o = N / n,

    dN = dout / n        dn = -(dout . N) / n^2 = -(q . dq) / n        for the dq that comes from N

    z_t = exp(g_t) z_(t-1) + k_t                         forward: z, n and dN are stored
    dz_t = exp(g_(t+1)) dz_(t+1) + dn_t scale q_t        backward, from the gradient of the last z to that of the initial one
    dq_t += dn_t scale z_t        dk_t += dz_t           dg_t += exp(g_t) z_(t-1) . dz_t, or of each channel

The gradients of linear attention whose outputs are N are computed between these two walks, in float32 and for each value head.
A warp, or two, go through the tokens of a head one by one, which is slow."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import block, divmod, exp, load, load_number, store, tile_sum
from tiles import bf16, dtype, fp16, fp32, inlined, rt, shared, sv
from tiles.launching.arguments import ENDS, FLOAT, INT, array
from tiles.layout import LANES
from tiles.targets import Target

from ...parts.recurrent.results import NORMALIZER_EPSILON
from ...parts.recurrent.tokens import SequenceLayout

DIMS = 64, 128, 256  # of keys and values, as padded
WARP_CHANNELS = 128  # of the walk from the last token: of more, registers spill


def decay_loader(kind: str, vector):
    """The function that loads the factor by which z decays at a token. kind: "token", "channel" or "" if nothing decays.
    vector: the type of a token's keys."""

    @inlined
    def load_decay(gDecay, batch, token, head, channel):
        if kind == "channel":
            return exp(load(gDecay, vector, (batch, token, head, channel), aligned=False))
        elif kind == "token":
            return exp(load_number(gDecay, (batch, token, head, 0)))
        else:
            return 1.0

    return load_decay


@dataclass(frozen=True)
class NormalizerSums:
    """The configuration of the walk from the first token. key_dim, value_dim: as padded. decay: as of decay_loader. varlen: are
    sequences packed (cu_seqlens)?"""

    dtype: dtype
    key_dim: int
    value_dim: int
    decay: str
    varlen: bool
    threads = LANES

    def __str__(self):
        return f"normalizer's sums, Dk {self.key_dim}, Dv {self.value_dim} {self.dtype}" + _options(self)

    @staticmethod
    @functools.cache
    def make(config: "NormalizerSums"):
        """(kernel, shared memory) of a configuration."""
        INPUT, seq_layout = config.dtype, SequenceLayout(config.varlen)
        KEYS, VALUES = rt(config.key_dim, 16, fp32).col_vec, rt(config.value_dim, 16, fp32).col_vec
        load_decay = decay_loader(config.decay, KEYS)

        @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
        def sum_keys(
            gQ: array(4, INPUT), gK: array(4, INPUT), gDecay: array(4), gDOut: array(4, INPUT), gInitialZ: array(3),
            gZ: array(4), gNormalizer: array(3), gDNumerator: array(4, INPUT), gCuSeqlens: ENDS, length: INT, heads: INT,
            group: INT, scale: FLOAT,
        ):  # fmt: skip
            """z, n and dN of the tokens of a sequence, for one of the `heads`, of which `group` share a key head."""
            sequence, head = divmod(cuda.blockIdx.x, heads)
            key_head, _ = divmod(head, group)
            start, end, batch = seq_layout.sequence_tokens(gCuSeqlens, sequence, length)
            z = load(gInitialZ, KEYS, (sequence, head, 0), aligned=False)
            for i in range(start, end):
                t = int32(i)
                at, at_key = (batch, t, head, 0), (batch, t, key_head, 0)
                z = z * load_decay(gDecay, batch, t, head, 0) + load(gK, KEYS, at_key, aligned=False)
                n = tile_sum(z * load(gQ, KEYS, at_key, aligned=False)) * scale + NORMALIZER_EPSILON
                store(gZ, z, at, aligned=False)
                gNormalizer[batch, t, head] = n
                store(gDNumerator, INPUT(load(gDOut, VALUES, at, aligned=False) / n), at, aligned=False)

        return sum_keys, None


@dataclass(frozen=True)
class NormalizerGradients:
    """The configuration of the walk from the last token. key_dim: as padded. decay: as of decay_loader. with_gates: is the
    decays' gradient computed? varlen: are sequences packed (cu_seqlens)?"""

    dtype: dtype
    key_dim: int
    decay: str
    with_gates: bool
    varlen: bool

    @property
    def warps(self):
        """The warps of a block, each with as many channels as registers hold."""
        return -(-self.key_dim // WARP_CHANNELS)

    @property
    def threads(self):
        """The threads of a block."""
        return LANES * self.warps

    def __str__(self):
        return f"normalizer's gradients, Dk {self.key_dim} {self.dtype}" + _options(self) + ", gates" * self.with_gates

    @staticmethod
    @functools.cache
    def make(config: "NormalizerGradients"):
        """(kernel, shared memory) of a configuration."""
        INPUT, WITH_GATES, PER_CHANNEL, WARPS = config.dtype, config.with_gates, config.decay == "channel", config.warps
        CHANNELS, seq_layout = config.key_dim // WARPS, SequenceLayout(config.varlen)
        KEYS = rt(CHANNELS, 16, fp32).col_vec
        load_decay, smem = decay_loader(config.decay, KEYS), shared(sums=sv(16, fp32))

        @inlined
        def sum_channels(x, sums):
            """The sum of x over all channels."""
            if WARPS > 1:
                return block.reduce_sum(tile_sum(x), sums)
            else:
                return tile_sum(x)

        @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
        def add_gradients(
            gQ: array(4, INPUT), gDecay: array(4), gZ: array(4), gInitialZ: array(3), gNormalizer: array(3), gDFinalZ: array(3),
            gDQ: array(4), gDK: array(4), gDDecay: array(4), gDInitialZ: array(3), gCuSeqlens: ENDS, length: INT, heads: INT,
            group: INT, scale: FLOAT,
        ):  # fmt: skip
            """Add to gDQ, gDK and gDDecay of the tokens of a sequence, for one of the `heads`, of which `group` share a key
            head."""
            (sums,) = smem.open()
            sequence, head = divmod(cuda.blockIdx.x, heads)
            key_head, _ = divmod(head, group)
            start, end, batch = seq_layout.sequence_tokens(gCuSeqlens, sequence, length)
            channel = int32(CHANNELS * (cuda.threadIdx.x // LANES))
            dz = load(gDFinalZ, KEYS, (sequence, head, channel), aligned=False)
            for i in range(start, end):
                t = int32(start + end - 1 - i)
                at = batch, t, head, channel
                q, dq = load(gQ, KEYS, (batch, t, key_head, channel), aligned=False), load(gDQ, KEYS, at, aligned=False)
                # the sum synchronises lanes that share elements: all have read them before one of them writes
                dk = load(gDK, KEYS, at, aligned=False)
                if WITH_GATES:
                    of_gates = (
                        load(gDDecay, KEYS, at, aligned=False) if PER_CHANNEL else load_number(gDDecay, (batch, t, head, 0))
                    )
                dn = -sum_channels(q * dq, sums) / gNormalizer[batch, t, head] * scale
                store(gDQ, dq + load(gZ, KEYS, at, aligned=False) * dn, at, aligned=False)
                dz = dz + q * dn
                store(gDK, dk + dz, at, aligned=False)
                dz = dz * load_decay(gDecay, batch, t, head, channel)
                if WITH_GATES:
                    if t == start:
                        products = dz * load(gInitialZ, KEYS, (sequence, head, channel), aligned=False)
                    else:
                        products = dz * load(gZ, KEYS, (batch, int32(t - 1), head, channel), aligned=False)
                    if PER_CHANNEL:
                        store(gDDecay, of_gates + products, at, aligned=False)
                    else:
                        of_gates = of_gates + sum_channels(products, sums)
                        if channel == 0:
                            gDDecay[batch, t, head, 0] = of_gates
            store(gDInitialZ, dz, (sequence, head, channel), aligned=False)

        return add_gradients, smem


def _options(config: NormalizerSums | NormalizerGradients) -> str:
    return f", decay by {config.decay}" * bool(config.decay) + ", varlen" * config.varlen


def space(target: Target, everything: bool) -> Iterator[NormalizerSums | NormalizerGradients]:
    """The configurations that take the most registers; others, and fp16, with `everything` only."""
    for input_dtype, key_dim, decay in itertools.product((bf16, fp16), DIMS, ("", "token", "channel")):
        if everything or (input_dtype is bf16 and key_dim == DIMS[-1] and decay):
            for varlen in (False, True) if everything else (True,):
                yield NormalizerSums(input_dtype, key_dim, DIMS[-1] if input_dtype is bf16 else key_dim, decay, varlen)
                for with_gates in (False, True) if everything and decay else (bool(decay),):
                    yield NormalizerGradients(input_dtype, key_dim, decay, with_gates, varlen)


@functools.cache
def make(config: NormalizerSums | NormalizerGradients):
    """(kernel, shared memory) of a configuration."""
    return config.make(config)
