"""attention.parallel.linear, delta_rule and mamba2 on 3 processes, compared with one."""

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from ranks import integers, start

import attention
from attention import parallel

pytestmark = pytest.mark.timeout(900)  # of processes that share a laptop's cores

LENGTH = 100


def test_on_three_ranks():
    start(3, members)


def part(x, length=LENGTH):
    return parallel.shard(x, order="contiguous")


def compared(name, arrays, whole=(), **options):
    """Compare a call on all ranks with the call on one: outputs and the final state. whole: the arrays without tokens."""
    of_tokens = {n: part(x) if n in ("decay", "z") and x.ndim > 1 else x for n, x in options.items()}
    expected = getattr(attention, name)(*arrays, **options)
    mine = [x if n in whole else part(x) for n, x in enumerate(arrays)]
    actual = getattr(parallel, name)(*mine, length=arrays[0].shape[1], **of_tokens)
    if not isinstance(expected, tuple):
        expected, actual = (expected,), (actual,)
    assert actual[0].shape == part(expected[0]).shape
    for x, y, most in zip(actual, (part(expected[0]), *expected[1:]), (expected[0], *expected[1:])):
        off = (x.float() - y.float()).abs().max().item() if x.numel() else 0.0
        assert off <= 2.0**-6 * most.float().abs().max(), f"{name} {[*options]} on rank {dist.get_rank()}: {off}"


def trained(name, arrays, **options):
    """Compare the gradients of a call on all ranks with those of the call on one."""
    actual = []
    for function, share in (getattr(attention, name), lambda x: x), (getattr(parallel, name), part):
        leaves = [share(x).clone().requires_grad_() for x in arrays]
        more = {} if share is not part else {"length": LENGTH}
        out = function(*leaves, decay=share(options["decay"]), **more)
        actual.append(torch.autograd.grad(out, leaves, share(options["dout"])))
    for x, y in zip(*actual):
        assert (part(x).float() - y.float()).abs().max() <= 2.0**-6 * x.float().abs().max(), f"{name} on {dist.get_rank()}"


def members(world):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, LENGTH, heads, 16).bfloat16() for heads in (1, 1, 2))
    k = torch.nn.functional.normalize(k.float(), dim=-1).bfloat16()
    beta, ends, state = torch.rand(1, LENGTH, 2), integers(0, 30, 30, 71, LENGTH), torch.randn(1, 2, 16, 16)
    select_heads, of_tokens, of_channels = (-torch.rand(shape) * 0.1 for shape in ((2,), (1, LENGTH, 2), (1, LENGTH, 2, 16)))
    compared("linear", (q, k, v))
    compared("linear", (q, k, v), decay=select_heads, initial_state=state, return_state=True)
    compared("linear", (q, k, v), decay=select_heads, cu_seqlens=ends, return_state=True)
    compared("linear", (q, k, v), decay=of_tokens, return_state=True, initial_state=state)
    compared("linear", (q, k, v), decay=of_channels, cu_seqlens=ends, return_state=True)
    compared("delta_rule", (q, k, v, beta), return_state=True)
    compared("delta_rule", (q, k, v, beta), decay=of_tokens, cu_seqlens=ends, return_state=True)
    compared("delta_rule", [x[:, :2] for x in (q, k, v, beta)], initial_state=state, return_state=True)  # one rank has nothing
    trained("linear", (q, k, v), decay=of_tokens, dout=torch.randn_like(v))
    trained("delta_rule", (q, k, v, beta), decay=of_tokens, dout=torch.randn_like(v))
    steps, rate = torch.rand(1, LENGTH, 2), -torch.rand(2)
    options = dict(D=torch.rand(2), z=v, dt_bias=torch.rand(2), dt_softplus=True, return_final_states=True)
    compared("mamba2", (v, steps, rate, k, q), whole=(2,), **options)
    with torch.autocast("cpu", torch.bfloat16):
        compared("linear", [x.float() for x in (q, k, v)], decay=of_tokens)
        compared("delta_rule", [x.float() for x in (q, k, v, beta)])
        compared("mamba2", [x.float() for x in (v, steps, rate, k, q)], whole=(2,), z=v.float())
    with pytest.raises(ValueError, match=r"make different calls:\nrank 0: scale=1.0\nranks 1, 2: scale=2.0"):
        parallel.linear(*map(part, (q, k, v)), length=LENGTH, scale=2.0 if dist.get_rank() else 1.0)
    with pytest.raises(NotImplementedError, match="normalize"):
        parallel.linear(*map(part, (q, k, v)), length=LENGTH, normalize=True)
