"""MLPs whose hidden layer is multiplied by a gate."""

from ..calls.fused import kernel
from ..language.functions import gelu, silu


@kernel
def gated_mlp(x, gate, up):
    """silu(x @ gate) * (x @ up), also called SwiGLU. x (..., K), gate, up (K, N)."""
    return silu(x @ gate) * (x @ up)


@kernel
def gated_mlp_gelu(x, gate, up):
    """gelu(x @ gate) * (x @ up), also called GeGLU. x (..., K), gate, up (K, N)."""
    return gelu(x @ gate) * (x @ up)


@kernel
def gated_mlp_down(x, gate, up, down):
    """(silu(x @ gate) * (x @ up)) @ down: the whole of a gated MLP. x (..., K), gate, up (K, N), down (N, K)."""
    return (silu(x @ gate) * (x @ up)) @ down
