"""attention.nn.from_transformers: layers with the parts and formulas of transformers' own, written here in plain torch, because
transformers may be absent."""

import copy

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from test_nn_recurrent import DIM, assert_near, by_heads, inputs, recurrence, rms_norm  # noqa: E402

from attention import nn  # noqa: E402


class TransformersNorm(torch.nn.Module):
    """Its gated norms: before_gate as Qwen's, otherwise as Mamba-2's; group_size as Zamba-2's and Nemotron-H's."""

    def __init__(self, columns, before_gate, group_size=None):
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.rand(columns) + 0.5), 1e-6
        self.before_gate = before_gate
        if group_size:
            self.group_size = group_size

    def forward(self, x, gate):
        x = x if self.before_gate else x * F.silu(gate)
        groups = x.shape[-1] // getattr(self, "group_size", x.shape[-1])
        parts = x.unflatten(-1, (groups, -1)), self.weight.unflatten(0, (groups, -1))
        x = rms_norm(*parts, self.variance_epsilon).flatten(-2)
        return x * F.silu(gate) if self.before_gate else x


def project(columns, bias=False):
    return torch.nn.Linear(DIM, columns, bias=bias)


class TransformersConv(torch.nn.Conv1d):
    """The convolution of its layers, with padding on both sides."""

    def __init__(self, channels, bias=False):
        super().__init__(channels, channels, 4, groups=channels, padding=3, bias=bias)

    def forward(self, x):
        return F.silu(super().forward(x.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)


class TransformersDeltaNet(torch.nn.Module):
    """A gated delta network with 2 heads of keys and 4 of values. kind: whose parts it has."""

    def __init__(self, kind):
        super().__init__()
        self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim, self.activation = 2, 4, 16, 32, "silu"
        self.kind, (keys, values) = kind, (32, 128)
        self.conv1d = TransformersConv(2 * keys + values)
        self.A_log, self.dt_bias = torch.nn.Parameter(torch.rand(4)), torch.nn.Parameter(torch.randn(4))
        out = TransformersNorm(self.head_v_dim, True), torch.nn.Linear(values, DIM, bias=False)
        if kind == "Qwen3-Next":
            self.in_proj_qkvz, self.in_proj_ba = project(2 * keys + 2 * values), project(8)
        elif kind == "Qwen3.5":
            self.in_proj_qkv, self.in_proj_z = project(2 * keys + values), project(values)
            self.in_proj_b, self.in_proj_a = project(4), project(4)
        else:
            self.q_proj, self.k_proj, self.v_proj, self.g_proj = map(project, (keys, keys, values, values))
            self.a_proj, self.b_proj, self.allow_neg_eigval = project(4), project(4), True
        if kind == "OLMo hybrid":
            self.o_norm, self.o_proj = out
        else:
            self.norm, self.out_proj = out

    def project(self, x):
        """q, k, v, z (B, S, columns) before the convolution, b, a (B, S, heads)."""
        if self.kind == "Qwen3.5":
            return *self.in_proj_qkv(x).split([32, 32, 128], -1), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)
        if self.kind == "OLMo hybrid":
            return (*(getattr(self, f"{name}_proj")(x) for name in "qkvgba"),)
        qkvz = self.in_proj_qkvz(x).unflatten(-1, (2, -1)).split([16, 16, 64, 64], -1)  # of each head of keys
        ba = self.in_proj_ba(x).unflatten(-1, (2, -1)).chunk(2, -1)
        return *(y.flatten(-2) for y in qkvz), *(y.flatten(-2) for y in ba)

    def forward(self, x):
        q, k, v, z, b, a = self.project(x)
        q, k, v = self.conv1d(torch.cat([q, k, v], -1)).split([32, 32, 128], -1)
        q, k = (by_heads(y, 16) * (by_heads(y, 16).square().sum(-1, keepdim=True) + 1e-6).rsqrt() for y in (q, k))
        beta = torch.sigmoid(b) * (2 if self.kind == "OLMo hybrid" else 1)
        out = recurrence(q, k, by_heads(v, 32), -self.A_log.exp() * F.softplus(a + self.dt_bias), beta)
        norm, out_proj = (self.o_norm, self.o_proj) if self.kind == "OLMo hybrid" else (self.norm, self.out_proj)
        return out_proj(norm(out, by_heads(z, 32)).flatten(-2))


class TransformersMamba2(torch.nn.Module):
    """A mixer of 4 heads of 16 columns with 2 groups of 16 states. group_size: of the norm; None: all columns."""

    def __init__(self, group_size, time_step_limit=(0.0, float("inf"))):
        super().__init__()
        self.num_heads, self.head_dim, self.n_groups, self.activation = 4, 16, 2, "silu"
        self.time_step_limit = time_step_limit
        self.in_proj, self.conv1d = project(64 + 128 + 4, bias=True), TransformersConv(128, bias=True)
        self.A_log, self.dt_bias, self.D = (torch.nn.Parameter(torch.randn(4)) for _ in range(3))
        self.norm, self.out_proj = TransformersNorm(64, False, group_size), torch.nn.Linear(64, DIM)

    def forward(self, x):
        gate, xBC, dt = self.in_proj(x).split([64, 128, 4], -1)
        values, B, C = (by_heads(y, 16) for y in self.conv1d(xBC).split([64, 32, 32], -1))
        dt = F.softplus(dt + self.dt_bias).clamp(*self.time_step_limit)
        y = recurrence(C, B, dt[..., None] * values, -self.A_log.exp() * dt, scale=1) + self.D[:, None] * values
        return self.out_proj(self.norm(y.flatten(-2), gate))


LAYERS = {kind: lambda kind=kind: TransformersDeltaNet(kind) for kind in ("Qwen3-Next", "Qwen3.5", "OLMo hybrid")}
LAYERS |= {"Bamba": lambda: TransformersMamba2(None), "Nemotron-H": lambda: TransformersMamba2(32)}
LAYERS |= {"Mamba-2, limits": lambda: TransformersMamba2(None, [0.4, 0.8])}


@pytest.mark.parametrize("name", LAYERS)
def test_from_transformers(name):
    torch.manual_seed(0)
    theirs, x = LAYERS[name]().to(torch.bfloat16), inputs(1, 9)
    ours = nn.from_transformers(theirs.eval())
    with torch.no_grad():
        assert_near(ours(x), copy.deepcopy(theirs).double()(x.double()), limit=0.015)
    assert ours.out_proj.weight.dtype == torch.bfloat16 and not ours.training and ours.norm.eps == 1e-6
    assert isinstance(ours, nn.Mamba2 if isinstance(theirs, TransformersMamba2) else nn.GatedDeltaNet)
    theirs.activation = "gelu"
    with pytest.raises(ValueError, match="^layer: its activation must be SiLU: 'gelu'"):
        nn.from_transformers(theirs)


def test_layers_that_are_refused():
    with pytest.raises(ValueError, match=r"^dt_limit: must be two numbers, from 0 and ascending: dt_limit=\(0.1, 0.001\)"):
        nn.from_transformers(TransformersMamba2(None, (0.1, 0.001)))
    with pytest.raises(TypeError, match="^layer: must have in_proj_qkvz, in_proj_ba, .*; or in_proj_qkv, .*: Linear has"):
        nn.from_transformers(torch.nn.Linear(2, 2))
