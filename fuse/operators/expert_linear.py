"""Linear layers of experts, each on rows of its own."""

from ..fused import kernel
from ..language import silu


@kernel
def expert_linear(x, w):
    """x[e] @ w[e] for every expert e. x (E, M, K), w (E, K, N)."""
    return x @ w


@kernel
def expert_mlp(x, gate, up, down):
    """(silu(x[e] @ gate[e]) * (x[e] @ up[e])) @ down[e] for every expert e: the gated MLPs of a mixture of experts.
    x (E, M, K), gate, up (E, K, N), down (E, N, K)."""
    return (silu(x @ gate) * (x @ up)) @ down
