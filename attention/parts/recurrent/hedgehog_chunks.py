"""Hedgehog's gradients in chunks of 64 tokens: what its kernels share. With P the weights of attention.hedgehog before they are
divided by n_i, and f features of rows,

    n_i = sum_j P_ij + 1e-6        dN_i = dO_i / n_i        dn_i = -dO_i . o_i / n_i        dP_ij = dN_i . v_j + dn_i

The window, chunk c and the one before it, is attention with E_ij = exp((s_ij - m_i) / sqrt(D)), P = beta E and m_i the largest
score, whose gradient goes to the key that has it (to equal parts to several keys):

    ds_ij = (beta E_ij dP_ij - [s_ij = m_i] sum_j beta E_ij dP_ij) / sqrt(D)        dbeta = sum E dP
    dq_i = sum_j ds_ij k_j        dk_j = sum_i ds_ij q_i        dv_j = sum_i P_ij dN_i

What is older goes through states. S and z are sums over the chunks before c - 1, dS and dz over those after c + 1:

    S = sum_j f(k_j) v_j^T     z = sum_j f(k_j)        df(q_i) = alpha g_i,  g_i = S dN_i + dn_i z,  dalpha = sum_i f(q_i) . g_i
    dS = sum_i f(q_i) dN_i^T   dz = sum_i f(q_i) dn_i  df(k_j) = alpha (dS v_j + dz),  dv_j = alpha dS^T f(k_j), added

Features are two softmaxes p of y = x M and of -y, and have a gradient where they are not the floor:

    dy = p (dp - sum p dp), of the second one subtracted      dx = dy M^T, added      dM = x^T dy"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from tiles import bf16, dtype, fp16, fp32, rt, st
from tiles.cp_async import VECTOR_SIZES
from tiles.layout import LANES, WARPGROUP

from .tokens import CHUNK

HALF = 64  # columns of a map: half of the features
FEATURES = 2 * HALF
FLOOR = 1e-6  # the smallest feature, and what is added to the normalizer
HEAD_DIMS = (64, 128)  # columns of queries, keys and values, as padded
ROWS = CHUNK // WARPGROUP  # tokens of a warp
NARROW = 32  # bytes of a panel of tiles whose columns are taken 16 at a time


@dataclass(frozen=True)
class HedgehogConfig:
    """A kernel's configuration. head_dim: the columns of queries, keys and values, padded. varlen: are sequences packed
    (cu_seqlens)? vector_bytes: how many bytes a cp.async copies; all addresses and strides are multiples of it."""

    head_dim: int
    dtype: dtype
    varlen: bool = False
    vector_bytes: int = VECTOR_SIZES[0]
    label: ClassVar[str] = ""
    threads: ClassVar[int] = LANES * WARPGROUP

    def __str__(self):
        flags = ", varlen" * self.varlen + f", by {self.vector_bytes} bytes" * (self.vector_bytes != VECTOR_SIZES[0])
        return f"{self.label}, D {self.head_dim} {self.dtype}{flags}"

    @property
    def rows(self):
        """A warp's rows of queries, keys or values, as they are."""
        return rt(ROWS, self.head_dim, self.dtype)

    @property
    def sums(self):
        """The accumulators of the same rows, in float32."""
        return rt(ROWS, self.head_dim, fp32)

    @property
    def chunk(self):
        """A chunk of queries, keys or values, in shared memory."""
        return st(CHUNK, self.head_dim, self.dtype)


def hedgehog_forms(everything: bool) -> Iterator[tuple]:
    """The fields of the configurations of a kernel of this family."""
    for head_dim in HEAD_DIMS:
        yield head_dim, bf16, False, VECTOR_SIZES[0]
        if everything:
            yield from ((head_dim, bf16, True, VECTOR_SIZES[0]), (head_dim, fp16, True, VECTOR_SIZES[0]))
            yield from ((head_dim, bf16, False, vector_bytes) for vector_bytes in VECTOR_SIZES[1:])
