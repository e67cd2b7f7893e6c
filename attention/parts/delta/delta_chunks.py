"""The delta rule and its gradients chunk by chunk, with decays that are one number a token and head (or none): the equations,
and what the kernels share. On GPUs since Ampere there are four (delta_inverse_ampere.py, delta_walk_ampere.py,
delta_state_gradients_ampere.py, delta_gradients_ampere.py), of which the first two also compute outputs. On Hopper two kernels
compute gradients (delta_chunk_states_hopper.py, delta_gradients_hopper.py), or three where heads are few
(delta_inverse_hopper.py, delta_chains_hopper.py, delta_segment_gradients_hopper.py).

With S the state before a chunk, b the cumulative sum of its gates, M = tril(exp(b_i - b_j)), where no exponent is positive, and
N = stril(M * K K^T),

    Y = V - exp(b) K S        E = (I + N beta)^-1 Y        U = beta E
    O = scale (exp(b) Q S + (M * Q K^T) U)                 S after = exp(b_last) S + (exp(b_last - b) K)^T U

E is v - S'^T k of each token, as in attention.delta_rule. beta multiplies N from the right, so that E is defined where beta is
0, too. With dS the gradient of the state after the chunk, and P = scale M * Q K^T,

    dU = P^T dO + exp(b_last - b) K dS        Z = (I + beta N)^-T dU        dV = beta Z        dbeta = rowsum(Z * E)
    dS before = exp(b_last) dS + (scale exp(b) Q)^T dO - (exp(b) K)^T dV

Z is the gradient of U, with all that later tokens of the chunk make of U. Only E and Z need an inverse; the rest is products:

    dP = scale M * dO U^T        G = -beta stril(M * Z U^T) = -stril(M * dV U^T)
    dQ = scale exp(b) dO S^T + dP K
    dK = [exp(b_last - b) U dS^T + dP^T Q + G^T K]  +  [G K - exp(b) dV S^T]

The first bracket is dk_write, the gradient through what the key writes to the state, the second dk_read, that through what it
reads. With
r = q . dq + k . dk_read - k . dk_write the gradient of a gate is

    dg_t = sum_(i >= t) r_i + sum_i (k_i . dk_i, as far as it comes from dS) + exp(b_last) <S, dS>

over the chunk's tokens i, which gate_gradient.py sums, as for linear attention (gradients.py), or on Hopper the walk itself
(delta_gate_sums.py). A pair of tokens that are both at or after t adds to r of the one what it subtracts from r of the other,
from the same rounded dP and G: so it cancels to the last bits of float32.

The kernels since Ampere store S before and dS after each chunk in the input's dtype, interleaved (state_panels.py). The
inverses, and the matrices that they multiply, are sums of two parts, high + low, with 16 bits of mantissa. E and Z have one
part: more digits of them would add none to G, which is rounded, too.

The kernels for Hopper compute one inverse for E and Z. L = N (I + beta N)^-1 is strictly lower triangular, and

    (I + N beta)^-1 = I - L beta        (I + beta N)^-1 = I - beta L
    E = Y - L (beta Y)                  Z = dU - L^T (beta dU)

so that the identity, which is exact, is not multiplied. L follows from (I + N beta)^-1, whose columns are divided by beta. L
and the matrices that it multiplies are sums of two parts; Z and U have one part in Z U^T, as above."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from numpy import float32, int32

from ops import exp2, last_element, load, subtile, tile_min, warpgroup, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, st, static, sv
from tiles.cp_async import VECTOR_SIZES
from tiles.layout import LANES

from ..recurrent.gate_formulas import FORMULAS, PLAIN_BETA, BetaFormula, GateFormula
from ..recurrent.gates import COL_VEC, MIN_LOG2_DECAY, ROW_VEC, TILE
from ..recurrent.state_panels import PANEL
from ..recurrent.tokens import CHUNK

KEY_DIMS = 64, 128  # padded key dims
WARPS = 4  # of a thread block that has 64 columns of values, or the tokens of a chunk
WARP_COLUMNS = CHUNK // WARPS  # columns or tokens of a warp


@dataclass(frozen=True)
class DeltaChunkConfig:
    """A kernel's configuration. key_dim: the channels of keys, padded. gated: are there decays? varlen: are sequences packed
    (cu_seqlens)? vector_bytes: how many bytes a cp.async copies; all addresses and strides are multiples of it."""

    key_dim: int
    dtype: dtype
    gated: bool
    varlen: bool = False
    vector_bytes: int = 16
    label = ""
    threads = LANES * WARPS

    def __str__(self):
        flags = ", gated" * self.gated + ", varlen" * self.varlen
        return f"{self.label}, Dk {self.key_dim} {self.dtype}{flags}" + f", by {self.vector_bytes} bytes" * (
            self.vector_bytes != 16
        )


@dataclass(frozen=True)
class InverseConfig(DeltaChunkConfig):
    """The configuration of a kernel that needs no state. for_gradients: is the inverse for Z computed, too? formula, beta: the
    formulas of gates and beta; formula None: gates are in memory."""

    for_gradients: bool = True
    formula: GateFormula | None = field(default=None, kw_only=True)
    beta: BetaFormula = field(default=PLAIN_BETA, kw_only=True)

    def __str__(self):
        flags = "" if self.for_gradients else "for outputs", str(self.formula or ""), str(self.beta)
        return ", ".join(filter(None, (super().__str__(), *flags)))


def inverse_configs(config: Callable[..., Any], everything: bool) -> Iterator[Any]:
    """The configurations of a kernel that needs no state, `config`: those of bf16 and copies of 16 bytes; with `everything`
    other dtypes and sizes of copies, too. Those with a formula come in one size."""
    yield from (config(*fields, for_gradients) for fields in chunk_fields(everything) for for_gradients in (True, False))
    for formula in FORMULAS if everything else FORMULAS[:1]:
        yield config(max(KEY_DIMS), bf16, True, for_gradients=False, formula=formula, beta=BetaFormula(1.0))


def chunk_fields(everything: bool) -> Iterator[tuple]:
    """The fields of the configurations of a kernel of this family."""
    for key_dim, gated in itertools.product(KEY_DIMS, (False, True)):
        yield key_dim, bf16, gated, gated, VECTOR_SIZES[0]
        if everything:
            yield key_dim, fp16, gated, False, VECTOR_SIZES[0]
            yield key_dim, bf16, gated, not gated, VECTOR_SIZES[0]
            yield from ((key_dim, bf16, gated, False, vector_bytes) for vector_bytes in VECTOR_SIZES[1:])


@static
class ChunkDecay:
    """The decays of a walk, one number a token, and how it copies keys: b, the cumulative sum of a chunk's gates in powers of
    2, is read from memory, where delta_inverse_ampere.py stored it. A step multiplies the same keys, which have no decay, first
    and last, so that the pipeline's two tiles hold the keys of two chunks. gated: are there gates? If not, b is 0, and not
    read."""

    gated: bool
    queries_include_decay = False  # are queries in memory decayed and scaled, so that dO needs no factors?

    @inlined
    def end_row(self, end):
        """The end of the rows of queries and keys that a sequence may read, if it ends before the token `end`."""
        return end

    @inlined
    def coord(self, batch, token, key_head, chunk, head):
        """The coordinates of a chunk's first query or key in their array."""
        return batch, token, key_head, 0

    @inlined
    def tiles(self, chunks):
        """The number of tiles of keys that the pipeline gets for this many chunks."""
        return chunks

    @inlined
    def first_tile(self, j):
        """The index of the tile of keys that the j-th chunk multiplies first."""
        return j

    @inlined
    def second_tile(self, j):
        """(the index of the tile whose copy starts at the end of step j - 1, the chunk that its keys belong to)"""
        return int32(j + 1), int32(j + 1)

    @inlined
    def fill_first(self, k, j, gKeys, at, end, vector_bytes):
        """Start to copy the keys that the j-th chunk multiplies first, if they are not those that it multiplies last."""

    @inlined
    def wait_second(self, k, j, first, newer):
        """Wait for the keys that the j-th chunk multiplies last, and return them. first: those that it multiplied first."""
        return first

    @inlined
    def load_state_decay(self, gB, b_last, index, head):
        """The decay of the transposed state over a chunk."""
        return self.exp(b_last)

    @inlined
    def load_cols(self, gB, index, head):
        """Load b of all tokens of a chunk, for tiles that have tokens as columns."""
        if self.gated:
            return load(gB, ROW_VEC, (index, head, 0))
        else:
            return 0.0

    @inlined
    def load_rows(self, gB, index, head, token):
        """Load b of the 16 tokens from `token` on, for tiles that have tokens as rows."""
        if self.gated:
            return load(gB, COL_VEC, (index, head, token))
        else:
            return 0.0

    @inlined
    def load_last(self, gB, index, head):
        """Load b of a chunk's last token."""
        if self.gated:
            return float32(gB[index, head, CHUNK - 1])
        else:
            return 0.0

    @inlined
    def last(self, b):
        """b of the last token, the least: sums never ascend, and are constant after the end of a sequence."""
        if self.gated:
            return tile_min(b)
        else:
            return 0.0

    @inlined
    def exp(self, b):
        """exp2(b), the decay; 1 without gates."""
        if self.gated:
            return exp2(b)
        else:
            return 1.0


@static
class ValuePanels:
    """What the Ampere kernels of gradients read of a chunk's values, PANEL columns at a time: dO, E above Z, and S^T above
    dS^T. vector_bytes: of a copy of dO."""

    vector_bytes: int

    @inlined
    def fill(self, pipelines, arrays, panel, panels, place):
        """Start to copy a panel of the chunk at a ChunkPlace, if there are so many. arrays: of the three, dO up to the end of
        its sequence."""
        (do, errors, s), (gDOut, gErrors, gStates), col = pipelines, arrays, int32(PANEL * panel)
        do.fill(panel, gDOut, (place.seq.batch, place.token, place.head, col), 1, 3, panels, self.vector_bytes)
        errors.fill(panel, gErrors, (place.chunk, place.head, 0, col), end=panels)
        s.fill(panel, gStates, (place.chunk, place.head, int32(2 * col), 0), end=panels)


@static
class TwoParts:
    """Numbers as the sum of two of a dtype, `high` and `low`."""

    dtype: dtype

    @inlined
    def split(self, x):
        """(high, low): x rounded to dtype, and the remainder, rounded too."""
        high = self.dtype(x)
        return high, self.dtype(x - fp32(high))

    @property
    def square(self):
        """The shared tile of a 64 x 64 matrix, its high part above its low part."""
        return st(2 * CHUNK, CHUNK, self.dtype)

    @inlined
    def halves(self, tile):
        """The parts of the matrix in such a tile."""
        return subtile(tile, CHUNK, 0), subtile(tile, CHUNK, 1)

    @inlined
    def store(self, tile, parts):
        """A warpgroup stores a matrix in such a tile."""
        (high, low), (high_tile, low_tile) = parts, self.halves(tile)
        warpgroup.store(high_tile, high)
        warpgroup.store(low_tile, low)

    @inlined
    def store_in_memory(self, gX, x, chunk, head):
        """A warpgroup stores a 64 x 64 matrix in the rows of a chunk and head, its high part above its low part."""
        high, low = self.split(x)
        warpgroup.store(gX, high, (chunk, head, 0, 0), aligned=True)
        warpgroup.store(gX, low, (chunk, head, CHUNK, 0), aligned=True)

    @inlined
    def mma_AB(self, acc, x, m):
        """acc + x m, pending, of a warpgroup's x in registers and a 64 x 64 matrix m in shared memory, both of them in two
        parts. The product of both low parts is left out."""
        (high, low), (m_high, m_low) = x, m
        return warpgroup.mma_AB(warpgroup.mma_AB(warpgroup.mma_AB(acc, high, m_high), high, m_low), low, m_high)

    @inlined
    def mma_ABt(self, acc, x, m):
        """acc + x m^T; see mma_AB."""
        (high, low), (m_high, m_low) = x, m
        return warpgroup.mma_ABt(warpgroup.mma_ABt(warpgroup.mma_ABt(acc, high, m_high), high, m_low), low, m_high)


BETA, SUM, DECAY, DECAY_TO_END = range(4)  # beta, b, exp(b), exp(b_last - b): the vectors of a chunk on Hopper
VECTORS = 4  # how many these are
LEAST_BETA = {bf16: 2.0**-40, fp16: 2.0**-14}  # stands for smaller betas in divisions: below the last digit of dV
MIN_DECAY = 2.0**MIN_LOG2_DECAY


@static
class ChunkVectors:
    """The vectors of a chunk's tokens, BETA, SUM, DECAY and DECAY_TO_END, concatenated in one shared vector (`tile`); b in
    powers of 2. gated: are there decays? If not, there is BETA alone."""

    gated: bool

    @property
    def spec(self):
        """The type of the shared vector that holds them."""
        return sv(CHUNK * (VECTORS if self.gated else 1), fp32)

    @inlined
    def cols(self, tile, index):
        """One of the vectors, for tiles that have tokens as columns."""
        return load(subtile(tile, CHUNK, index), ROW_VEC)

    @inlined
    def rows(self, tile, index):
        """One of the vectors, for this warp's rows of a warpgroup's tokens."""
        return warpgroup.load(subtile(tile, CHUNK, index), COL_VEC)

    @inlined
    def decay_cols(self, x, tile, index):
        """x times one of the decays of its columns."""
        if self.gated:
            return x * self.cols(tile, index)
        else:
            return x

    @inlined
    def decay_rows(self, x, tile, index):
        """x times one of the decays of its rows."""
        if self.gated:
            return x * self.rows(tile, index)
        else:
            return x

    @inlined
    def decay_state(self, x, tile):
        """x exp(b_last): a state, or its gradient, decayed over all tokens of a chunk."""
        if self.gated:
            return x * last_element(subtile(tile, CHUNK, DECAY))
        else:
            return x

    @inlined
    def decay_scores(self, s, tile, factors, row_factors=1.0):
        """M * s * factors * row_factors, of a warpgroup's scores and factors of their columns and rows; elements above the
        diagonal do not matter."""
        if self.gated:
            decay = last_element(subtile(tile, CHUNK, DECAY))
            if decay < MIN_DECAY:
                return s * exp2(zeros(TILE) + self.rows(tile, SUM) - self.cols(tile, SUM)) * factors * row_factors
            else:
                return s * (self.rows(tile, DECAY) / decay * row_factors) * (self.cols(tile, DECAY_TO_END) * factors)
        else:
            return s * factors * row_factors


@static
class TransformVectors(ChunkVectors):
    """ChunkVectors as delta_transform_hopper.py stores them. k S has the factor exp(b). normed: are keys divided by their L2
    norms (l2norm.py)? Then this factor times the key's inverse norm stands in place of beta, whose place is empty otherwise."""

    normed: bool

    @inlined
    def scale_reads(self, x, tile):
        """x = K S of a chunk, transposed, times these factors."""
        if self.normed:
            return x * self.cols(tile, BETA)
        else:
            return self.decay_cols(x, tile, DECAY)
