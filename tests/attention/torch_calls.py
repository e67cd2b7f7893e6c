"""Every public function under torch: the calls that its tests make, on tiny shapes, and what they compare."""

import pytest

import attention
from attention import gates

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from attention.plans.softmax import norm_gradients as norm_programs  # noqa: E402
from attention.public import projected_qkv  # noqa: E402

TOKENS, HEAD = 16, 64


class Inputs:
    """Random arrays of one device and dtype: tile, rate (negative, float32), zeros."""

    def __init__(self, device="cpu", dtype=torch.bfloat16, batch=1, heads=1, tokens=TOKENS):
        self.device, self.dtype, self.batch, self.heads, self.tokens = device, dtype, batch, heads, tokens

    def tile(self, *shape):
        return torch.randn(shape, device=self.device).to(self.dtype)

    def qkv(self, head=HEAD):
        """Keys are normalised, so that the delta rule is stable."""
        shape = self.batch, self.tokens, self.heads
        keys = torch.nn.functional.normalize(torch.randn((*shape, head), device=self.device), dim=-1).to(self.dtype)
        return self.tile(*shape, head), keys, self.tile(*shape, HEAD)

    def rate(self, *shape):
        return -0.1 - torch.rand(shape, device=self.device)

    def gates(self, *more):
        return self.rate(self.batch, self.tokens, self.heads, *more)

    def state(self, *shape):
        return torch.randn((self.batch, self.heads, *shape), device=self.device)

    def documents(self):
        """The document number of each token, (batch, sequence)."""
        return (torch.arange(self.tokens, device=self.device) // 5).repeat(self.batch, 1)

    def ends(self):
        return torch.tensor([0, 3, self.tokens], dtype=torch.int32, device=self.device)

    def lengths(self):
        """How many keys each cache holds."""
        return 3 + torch.arange(self.batch, dtype=torch.int32, device=self.device)

    def pages(self):
        """A page table with two pages for each sequence."""
        return 6 - torch.arange(2 * self.batch, dtype=torch.int32, device=self.device).reshape(-1, 2)

    def eights(self, *shape):
        """Keys and values of a cache."""
        return [self.tile(*shape, self.heads, HEAD).to(torch.float8_e4m3fn) for _ in "kv"]

    def descales(self, *shape):
        """Descales for each token and head of the cache."""
        return {name: -self.rate(*shape, self.heads) for name in ("k_descale", "v_descale")}

    def of_projection(self):
        """q, k, v, cos and sin, both norms and sinks."""
        tables = [torch.randn(self.tokens, HEAD // 2, device=self.device) for _ in range(2)]
        return *self.qkv(), *tables, -self.rate(HEAD), -self.rate(HEAD), self.rate(self.heads)

    def angles(self):
        """cos and sin of 40 positions."""
        angles = torch.randn((40, HEAD // 2), device=self.device)
        return angles.cos(), angles.sin()


def swapped(*arrays):
    """The same call with layout="bhsd"."""
    return [x.transpose(1, 2).contiguous() for x in arrays]


def near(b, h, i, j, docs):
    """A mask that reads all of its arguments."""
    return (docs[b, i] == docs[b, j]) & (j <= i + h)


def warmer(s, b, h, i, j, docs):
    return s * 0.5 + docs[b, j]


def normalised(q, *norm):
    """Rows of q, normalised by forward."""
    return norm_programs.normalise_rows("q", q, norm if norm[1:] else norm[0], 1e-6, None, "bshd")


def projecting(*call_inputs):
    """(out, lse, rows) of a projection."""
    return projected_qkv.projected(None, (*call_inputs, None, None, None), (1e-6, True, 5, None, None, None, None))


def of_projection(*call_inputs):
    """(dx, dq_norm, dk_norm, dsink) of a projection."""
    options = 1e-6, True, 5, None, None, None, True, True, True, None
    return projected_qkv.projected_backward(None, (*call_inputs, *(None,) * 4), options)


def norm_gradients(k, dy, *norm):
    """(dx, dweights[, dbias]) of a norm of keys."""
    dx, (of_norm,) = norm_programs.norm_gradients("k", k, dy, norm if norm[1:] else norm[0], 1e-6, None, None, "bhsd")
    return dx, *(of_norm if norm[1:] else (of_norm,))


# name: (function, what it is called with, made of Inputs: (arrays by position, all else))
CALLS = {
    "forward": (attention.forward, lambda x: (x.qkv(), {})),
    "forward, lse": (attention.forward, lambda x: (x.qkv(), dict(causal=True, return_lse=True, scale=0.5))),
    "forward, bhsd": (attention.forward, lambda x: (swapped(*x.qkv()), dict(layout="bhsd", return_lse=True))),
    "forward, built in": (
        attention.forward,
        lambda x: (
            x.qkv(),
            dict(window=(9, 3), softcap=2.0, alibi=-x.rate(x.heads), sink=x.rate(x.heads), bias=x.tile(1, 1, 1, x.tokens)),
        ),
    ),
    "forward, in Python": (
        attention.forward,
        lambda x: (x.qkv(), dict(mask=near, score=warmer, aux=(x.documents(),), return_lse=True)),
    ),
    "forward, sequences": (attention.forward, lambda x: (x.qkv(), dict(cu_seqlens=x.ends(), causal=True))),
    "backward": (
        attention.backward,
        lambda x: ((x.qkv()[2], *x.qkv(), x.qkv()[2], 9 + x.state(x.tokens)), dict(causal=True, deterministic=True)),
    ),
    "backward, window": (
        attention.backward,
        lambda x: (
            (x.qkv()[2], *x.qkv(), x.qkv()[2], 9 + x.state(x.tokens)),
            dict(causal=True, window=(5, None), dlse=x.state(x.tokens)),
        ),
    ),
    "projected": (
        projecting,
        lambda x: (x.of_projection(), dict()),
    ),
    "projected, backward": (
        of_projection,
        lambda x: (
            (x.qkv()[2], *x.of_projection(), x.qkv()[2], 9 + x.state(x.tokens), x.tile(x.batch, x.tokens, 2 * x.heads, HEAD)),
            {},
        ),
    ),
    "norm of queries": (normalised, lambda x: ((x.qkv()[0], x.rate(x.heads, HEAD)), {})),
    "norm's gradient": (norm_gradients, lambda x: ((*swapped(*x.qkv()[:2]), x.tile(HEAD), x.rate(x.heads, HEAD)), {})),
    "decode": (
        attention.decode,
        lambda x: (x.qkv(), dict(lengths=x.ends()[1 : 1 + x.batch], splits=2, return_lse=True, sink=x.rate(x.heads))),
    ),
    "decode, pages": (attention.decode, lambda x: (x.qkv(), dict(lengths=x.lengths(), pages=x.lengths()[:, None] - 3))),
    "latents": (
        attention.mla_decode,
        lambda x: ((x.tile(x.batch, 2, x.heads, 576), x.tile(x.batch, TOKENS, 576)), dict(lengths=x.lengths(), scale=0.1)),
    ),
    "latents, fp8": (
        attention.mla_decode,
        lambda x: (
            (x.tile(x.batch, 2, x.heads, 576), x.tile(x.batch, TOKENS, 512).to(torch.float8_e4m3fn)),
            dict(lengths=x.lengths(), scale=0.1, rotary=x.tile(x.batch, TOKENS, 64), descale=-x.rate(x.batch, TOKENS)),
        ),
    ),
    "decode, in Python": (
        attention.decode,
        lambda x: (
            x.qkv(),
            dict(
                lengths=x.ends()[1 : 1 + x.batch],
                mask=near,
                score=warmer,
                aux=(x.documents(),),
                return_lse=True,
                bias=x.gates().transpose(1, 2)[:, :, None],
                q_norm=x.tile(HEAD),
                k_norm=(x.tile(x.heads, HEAD), x.tile(HEAD)),
            ),
        ),
    ),
    "linear": (attention.linear, lambda x: (x.qkv(), {})),
    "linear, state": (
        attention.linear,
        lambda x: (x.qkv(), dict(decay=x.gates(), initial_state=x.state(HEAD, HEAD), return_state=True)),
    ),
    "linear, sums": (
        attention.linear,
        lambda x: (
            x.qkv(),
            dict(normalize=True, initial_state=(x.state(HEAD, HEAD), x.state(HEAD).abs() + 9), return_state=True),
        ),
    ),
    "linear, sequences": (attention.linear, lambda x: (x.qkv(), dict(cu_seqlens=x.ends(), return_state=True))),
    "linear_backward": (
        attention.linear_backward,
        lambda x: ((x.qkv()[2], *x.qkv()), dict(decay=x.gates(), dstate=x.state(HEAD, HEAD), dinitial_state=True)),
    ),
    "linear_backward, sums": (
        attention.linear_backward,
        lambda x: ((x.qkv()[2], *(abs(a) for a in x.qkv())), dict(normalize=True, dinitial_state=True)),
    ),
    "linear_backward, accumulated": (
        attention.linear_backward,
        lambda x: (
            (x.qkv()[2], *x.qkv()),
            dict(zip(("dq", "dk", "dv"), (a.float() for a in x.qkv()))) | dict(accumulate=True),
        ),
    ),
    "retention": (attention.retention, lambda x: (swapped(*x.qkv()), dict(layout="bhsd"))),
    "lightning": (attention.lightning, lambda x: ((*x.qkv(), 1, 3), dict(return_state=True))),
    "gla": (attention.gla, lambda x: ((*x.qkv(), x.gates(HEAD)), {})),
    "delta_rule": (attention.delta_rule, lambda x: ((*x.qkv(), -x.gates()), dict(decay=x.gates(), return_state=True))),
    "delta_rule_backward": (
        attention.delta_rule_backward,
        lambda x: ((x.qkv()[2], *x.qkv(), -x.gates()), dict(decay=x.gates(), dstate=x.state(HEAD, HEAD), dinitial_state=True)),
    ),
    "linear, raw": (
        attention.linear,
        lambda x: (x.qkv(), dict(decay=gates.softplus(x.gates(), x.rate(x.heads), x.rate(x.heads)), qk_l2norm=True)),
    ),
    "gla, raw": (attention.gla, lambda x: ((*x.qkv(), gates.logsigmoid(x.gates(HEAD))), {})),
    "delta_rule, raw": (
        attention.delta_rule,
        lambda x: ((*x.qkv(), gates.beta(x.gates(), doubled=True)), dict(decay=gates.sigmoid(x.gates()), qk_l2norm=True)),
    ),
    "mamba2": (
        attention.mamba2,
        lambda x: (
            (x.qkv()[0], -x.gates(), x.rate(x.heads), *x.qkv()[1:]),
            dict(D=x.rate(x.heads), z=x.qkv()[0], return_final_states=True),
        ),
    ),
    "mamba2_backward": (
        attention.mamba2_backward,
        lambda x: (
            (x.qkv()[2], x.qkv()[0], -x.gates(), x.rate(x.heads), *x.qkv()[1:]),
            dict(D=x.rate(x.heads, HEAD), z=x.qkv()[0], dt_bias=x.rate(x.heads), dinitial_states=True),
        ),
    ),
    "short_conv": (
        attention.short_conv,
        lambda x: (
            (x.tile(x.batch, x.tokens, 32), x.tile(32, 4), x.rate(32)),
            dict(activation="silu", initial_state=x.tile(x.batch, 32, 3), return_state=True),
        ),
    ),
    "short_conv_backward": (
        attention.short_conv_backward,
        lambda x: (
            (x.tile(x.batch, x.tokens, 32), x.tile(x.batch, x.tokens, 32), x.tile(32, 3), x.rate(32)),
            dict(activation="silu", dstate=x.rate(x.batch, 32, 2), dinitial_state=True),
        ),
    ),
    "gated_rms_norm": (
        attention.gated_rms_norm,
        lambda x: ((x.tile(x.batch, x.tokens, 2, 64), x.rate(64), x.tile(x.batch, x.tokens, 2, 64)), {}),
    ),
    "gated_rms_norm_backward": (
        attention.gated_rms_norm_backward,
        lambda x: (
            (x.tile(x.batch, x.tokens, 2, 64), x.tile(x.batch, x.tokens, 2, 64), x.rate(64), x.tile(x.batch, x.tokens, 2, 64)),
            {},
        ),
    ),
    "based": (attention.based, lambda x: (x.qkv(16), dict(return_state=True))),
    "based, plain": (attention.based, lambda x: (x.qkv(16), dict(normalize=False))),
    "based_backward": (attention.based_backward, lambda x: ((x.qkv()[2], *x.qkv(16)), dict(dinitial_state=True))),
    "hedgehog": (
        attention.hedgehog,
        lambda x: (
            (*x.qkv(), x.tile(x.heads, HEAD, 64), x.tile(x.heads, HEAD, 64), -x.rate(x.heads), -x.rate(x.heads)),
            {},
        ),
    ),
    "hedgehog_backward": (
        attention.hedgehog_backward,
        lambda x: (
            (x.qkv()[2], *x.qkv(), x.tile(x.heads, HEAD, 64), x.tile(x.heads, HEAD, 64), -x.rate(x.heads), -x.rate(x.heads)),
            {},
        ),
    ),
    "append": (
        attention.append,
        lambda x: (
            (x.tile(x.batch, 24, x.heads, HEAD), x.tile(x.batch, 24, x.heads, HEAD), *x.qkv()[1:]),
            dict(lengths=x.lengths(), rotary=x.angles()),
        ),
    ),
    "append, queries": (
        attention.append,
        lambda x: (
            (x.tile(7, 4, x.heads, HEAD), x.tile(7, 4, x.heads, HEAD), *(y[:, :3] for y in x.qkv()[1:])),
            dict(lengths=x.lengths(), pages=x.pages(), rotary=x.angles(), q=x.qkv()[0][:, :3]),
        ),
    ),
    "quantize, blocks, fp8": (attention.quantize, lambda x: ((x.qkv()[0],), dict(block=128, centred=True))),
    "append, fp8": (
        attention.append,
        lambda x: (
            (*x.eights(7, 4), *(y[:, :3] for y in x.qkv()[1:])),
            dict(lengths=x.lengths(), pages=x.pages(), rotary=x.angles(), q=x.qkv()[0][:, :3], **x.descales(7, 4)),
        ),
    ),
    "decode, append, fp8": (
        attention.decode,
        lambda x: (
            (x.qkv()[0][:, :3], *x.eights(x.batch, TOKENS)),
            dict(lengths=x.lengths(), k_new=x.qkv()[1][:, :3], v_new=x.qkv()[2][:, :3], **x.descales(x.batch, TOKENS)),
        ),
    ),
    "decode, append": (
        attention.decode,
        lambda x: (
            (x.qkv()[0][:, :3], x.tile(7, 4, x.heads, HEAD), x.tile(7, 4, x.heads, HEAD)),
            dict(
                lengths=x.lengths(),
                pages=x.pages(),
                rotary=x.angles(),
                k_new=x.qkv()[1][:, :3],
                v_new=x.qkv()[2][:, :3],
                bias=x.tile(1, x.heads, 3, 8),
                q_norm=x.tile(x.heads, HEAD),
                k_new_norm=x.tile(HEAD),
            ),
        ),
    ),
    "linear_step": (
        attention.linear_step,
        lambda x: ((x.state(HEAD, HEAD), *(a[:, 0] for a in x.qkv())), dict(beta=-x.gates()[:, 0])),
    ),
    "linear_step, raw": (
        attention.linear_step,
        lambda x: (
            (x.state(HEAD, HEAD), *(a[:, 0] for a in x.qkv())),
            dict(beta=gates.beta(x.gates()[:, 0]), decay=gates.softplus(x.gates()[:, 0], x.rate(x.heads)), qk_l2norm=True),
        ),
    ),
}
every_call = pytest.mark.parametrize("name", CALLS)


def prepared(name, **inputs):
    """(function, arrays by position, the rest)"""
    function, make = CALLS[name]
    args, options = make(Inputs(**{"heads": 2, **inputs}))
    return function, tuple(args), options


def cloned(tree):
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, tree)


def leaves(tree):
    """Leaves that are no tensors are left out."""
    return [x for x in torch.utils._pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def assert_same(actual, expected):
    """The results have equal numbers, shapes, dtypes and strides. (Decays of heads that torch computes differ by a
    rounding.)"""
    actual, expected = leaves(actual), leaves(expected)
    assert len(actual) == len(expected) > 0
    for x, y in zip(actual, expected):
        assert (x.shape, x.dtype, x.stride(), x.device) == (y.shape, y.dtype, y.stride(), y.device)
        torch.testing.assert_close(x, y)


class OpRecorder(TorchDispatchMode):
    """The ops of ours that are called inside, with their arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "tiles":
            self.calls.append((op, cloned(args)))
        return op(*args, **(kwargs or {}))
