"""Gradients of attention.parallel's recurrences on ranks that are threads, compared with those of one."""

import pytest

pytest.importorskip("torch")

import torch
from threads import together

import attention
from attention import gates, parallel
from attention.parallel.recurrent import SegmentedLinear, SegmentedMamba2
from attention.plans.recurrent import chunk_states

LENGTH = 100  # 48, 32 and 20 tokens on three ranks


def share(x, peers):
    return parallel.shard(x, peers, 1, "contiguous")


def drawn(sequences=1):
    """Arrays of all members, by name."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, LENGTH, heads, 16).bfloat16() for heads in (1, 1, 2))
    k = torch.nn.functional.normalize(k.float(), dim=-1).bfloat16()
    states = torch.randn(sequences, 2, 16, 16)
    return {"q": q, "k": k, "v": v, "beta": torch.rand(1, LENGTH, 2), "decay": -0.1 * torch.rand(1, LENGTH, 2)}, states


def results(function, arrays, options, of_results):
    """(out, state, gradients of all arrays by name)."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in arrays.items()}
    with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
        outputs = function(**leaves, **options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = sum((x.float() * y).sum() for x, y in zip(outputs, of_results))
    return [x.detach() for x in outputs], dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)))


def compared(name, arrays, world=3, **options):
    """Compare results and gradients on so many ranks with those of one; and with those of a second time, bit by bit."""
    ends = options.get("cu_seqlens")
    length = next(iter(arrays.values())).shape[1]
    of_results = torch.randn(1, length, 2, 16), torch.randn(1 if ends is None else len(ends) - 1, 2, 16, 16)
    expected, of_one = results(getattr(attention, name), arrays, options, of_results)

    sharded = [key for key, x in arrays.items() if x.ndim > 1 and not key.startswith("initial")]

    def rank(peers):
        mine = {key: share(x, peers) if key in sharded else x for key, x in arrays.items()}
        call = lambda **call_inputs: getattr(parallel, name)(group=peers, length=length, **call_inputs)
        return results(call, mine, options, (share(of_results[0], peers), of_results[1] / world))

    actual = together(world, rank)
    for x, y in zip([torch.cat([outputs[0] for outputs, _ in actual], 1), *actual[-1][0][1:]], expected):
        near(x, y, name)
    for key, y in of_one.items():
        parts = [x for _, of_rank in actual if (x := of_rank[key]) is not None]
        near(torch.cat(parts, 1) if key in sharded else sum(parts), y, f"{name}: d{key}")
    again = together(world, rank)
    for (_, one), (_, other) in zip(actual, again):
        assert all(x is None or torch.equal(x, other[key]) for key, x in one.items()), f"{name}: other bits the second time"


def near(x, y, what):
    error = (x.float() - y.float()).abs().max()
    assert error <= 2.0**-6 * y.float().abs().max(), f"{what}: {error:.3g} of {y.float().abs().max():.3g}"


def test_linear():
    arrays, start = drawn()
    arrays = {name: arrays[name] for name in ("q", "k", "v", "decay")} | {"initial_state": start}
    compared("linear", arrays, return_state=True)
    few = {name: x if name == "initial_state" else x[:, :2] for name, x in arrays.items()}
    compared("linear", few | {"decay": -0.1 * torch.rand(2)}, return_state=True, scale=0.5)  # one rank has no tokens


@pytest.mark.parametrize("name", ["linear", "mamba2"])
def test_ranks_wait_for_states_alone(name, monkeypatch):
    """What ranks send comes from a pass over states: each runs the function of the gradients once."""
    kind = {"linear": SegmentedLinear, "mamba2": SegmentedMamba2}[name]
    calls, real = [], kind.backward
    monkeypatch.setattr(
        kind, "backward", staticmethod(lambda *call_inputs, **options: calls.append(1) or real(*call_inputs, **options))
    )
    arrays, _ = drawn()
    linear = arrays["q"], arrays["k"], arrays["v"]
    inputs = {"linear": linear, "mamba2": (arrays["v"], arrays["beta"], -torch.rand(2), arrays["k"], arrays["q"])}[name]

    def rank(peers):
        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            mine = [(share(x, peers) if x.ndim > 1 else x.clone()).requires_grad_() for x in inputs]
            getattr(parallel, name)(*mine, group=peers, length=LENGTH).float().sum().backward()

    together(3, rank)
    assert len(calls) == 3


@pytest.mark.parametrize("memory", ["states", "recompute"])
def test_ranks_store_the_states_before_chunks(memory, monkeypatch):
    """Where the Hopper kernels read them; the gradients are the same."""
    stored, real = [], SegmentedLinear.backward

    def backward(*args, **options):
        stored.append("chunk_states" in options)
        return real(*args, **options)

    monkeypatch.setattr(chunk_states, "is_hopper", lambda ordinal: True)
    monkeypatch.setattr(SegmentedLinear, "backward", staticmethod(backward))
    arrays, start = drawn()
    arrays = {name: arrays[name] for name in ("q", "k", "v", "decay")} | {"initial_state": start}
    compared("linear", arrays, return_state=True, memory=memory)
    assert stored == [memory == "states"] * 6


def test_linear_with_decays_of_channels_and_packed_sequences():
    arrays, start = drawn(4)
    arrays = {name: arrays[name] for name in ("q", "k", "v")} | {"decay": -0.1 * torch.rand(1, LENGTH, 2, 16)}
    ends = torch.tensor([0, 30, 30, 71, LENGTH], dtype=torch.int32)
    compared("linear", arrays | {"initial_state": start}, cu_seqlens=ends, return_state=True)


def test_the_delta_rule():
    """With a returned state, and with packed sequences, of which one is empty and one begins on the second rank."""
    arrays, start = drawn()
    compared("delta_rule", arrays | {"initial_state": start}, return_state=True)
    arrays, start = drawn(3)
    ends = torch.tensor([0, 55, 55, LENGTH], dtype=torch.int32)
    compared("delta_rule", arrays | {"initial_state": start}, cu_seqlens=ends)


def test_mamba2():
    arrays, start = drawn()
    arrays = {"x": arrays["v"], "dt": arrays["beta"], "A": -torch.rand(2), "B": arrays["k"], "C": arrays["q"]}
    arrays |= {"D": torch.rand(2), "z": torch.randn(1, LENGTH, 2, 16).bfloat16(), "dt_bias": torch.rand(2)}
    compared("mamba2", arrays | {"initial_states": start}, dt_softplus=True, return_final_states=True)


def test_raw_gates_have_gradients():
    """Gates are evaluated before the call, by torch; the sum over ranks of the gradients of A_log is that of one."""
    arrays, _ = drawn()
    A_log, raw = torch.rand(2), torch.randn(1, LENGTH, 2)

    def rank(peers):
        q, k, v, a = (share(x, peers) for x in (*(arrays[name] for name in "qkv"), raw))
        leaf = A_log.clone().requires_grad_()
        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            options = dict(decay=gates.softplus(a, leaf), qk_l2norm=True, group=peers, length=LENGTH)
            out = parallel.delta_rule(q, k, v, gates.beta(a), **options)
            return torch.autograd.grad(out.float().square().sum(), leaf)[0]

    with torch.enable_grad():
        leaf = A_log.clone().requires_grad_()
        q, k, v = (arrays[name] for name in "qkv")
        out = attention.delta_rule(q, k, v, gates.beta(raw), decay=gates.softplus(raw, leaf), qk_l2norm=True)
        near(sum(together(2, rank)), torch.autograd.grad(out.float().square().sum(), leaf)[0], "dA_log")


def test_errors():
    arrays, _ = drawn()

    def rank(peers):
        q, k, v = (share(arrays[name], peers) for name in "qkv")
        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            leaf = q.clone().requires_grad_()
            with pytest.raises(ValueError, match="rank 0: gradients=True\nrank 1: gradients=False"):
                parallel.linear(q if peers.rank else leaf, k, v, group=peers, length=LENGTH)
            out = parallel.linear(leaf, k, v, group=peers, length=LENGTH)
            with pytest.raises(NotImplementedError, match="^attention.parallel.linear: has no second derivatives"):
                torch.autograd.grad(out.float().sum(), leaf, create_graph=True)

    together(2, rank)
