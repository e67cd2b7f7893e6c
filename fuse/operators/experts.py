"""Layers of experts. Each expert has rows of its own, or all experts see all rows."""

from ..calls.fused import kernel
from ..language.functions import silu, softmax, sum, top, transpose, weighted


@kernel
def expert_linear(x, w):
    """x[e] @ w[e] for every expert e. x (E, M, K), w (E, K, N)."""
    return x @ w


@kernel
def expert_mlp(x, gate, up, down):
    """(silu(x[e] @ gate[e]) * (x[e] @ up[e])) @ down[e] for every expert e: the gated MLPs of a mixture of experts.
    x (E, M, K), gate, up (E, K, N), down (E, N, K)."""
    return (silu(x @ gate) * (x @ up)) @ down


@kernel
def mixture_of_experts(x, router, gate, up, down):
    """The gated MLPs of the two experts that a router finds best for each row, weighted by their shares in the softmax over
    these two. Every expert sees every row. This is meant for few rows, which need all experts' weights anyway. x (M, K),
    router (K, E), gate, up (E, N, K), as nn.Linear holds them, down (E, N, K), its transpose."""
    shares = softmax(x @ router)
    best = top(shares, 2)
    hidden = silu(x @ transpose(gate)) * (x @ transpose(up))
    return weighted(best / sum(best), hidden @ down)
