"""attention.parallel.forward on 2, 3 and 4 processes, compared with one: all schemes, orders and variants."""

import os
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
import torch.distributed as dist
from ranks import compared, drawn, integers, numbers, start

import attention
from attention import parallel
from attention.parallel import agreement

pytestmark = pytest.mark.timeout(900)  # of processes that share a laptop's cores


OF_SEQUENCES = dict(  # functions of where queries and keys are in their own sequences, and of which these are
    mask=lambda b, h, i, j: (i + 2 * j + b) % 3 != 0, score=lambda s, b, h, i, j: s + 0.1 * (i - 2 * j) * (b + h)
)  # fmt: skip


def test_on_two_ranks():
    """Each variant by gather, and by the other schemes that support it. With D 128, 128 rows are a whole tile of Hopper's
    kernels."""
    start(2, two)


def two(world):
    wide = dict(dim=128, heads=1)
    docs, all_results = torch.arange(300) // 70, (0, 1, 2, 3, 4)
    compared(300, "gather", shapes=wide, causal=True, window=(90, 0), deterministic=True, bitwise=all_results)
    compared(300, "gather", shapes=dict(dim=64), causal=True, deterministic=True, bitwise=all_results)
    compared(70, "gather", keys=90, mask=lambda b, h, i, j: (i + j) % 5 > 0, deterministic=True, bitwise=all_results)
    compared(560, "gather", shapes=wide, window=(150, 0))  # only halos travel, and blocks of keys are the whole's
    compared(300, "gather", shapes=wide, causal=True, mask=lambda b, h, i, j, docs: docs[i] == docs[j], aux=(docs,))
    for scheme in "gather", "ulysses", "ring":
        bitwise = () if scheme == "ring" else (0, 1)
        compared(61, scheme, causal=True, bitwise=bitwise)
        compared(61, scheme, order="contiguous", window=(20, 5), bitwise=bitwise)
        compared(40, scheme, keys=70, causal=True, bitwise=bitwise)
        compared(40, scheme, causal=True, cu_seqlens=integers(0, 9, 9, 33, 40), bitwise=bitwise)
        compared(40, scheme, cu_seqlens=integers(0, 9, 9, 33, 40), **OF_SEQUENCES, bitwise=bitwise)
        compared(40, scheme, softcap=3.0, bias=numbers(1, 2, 40, 40), learned=("bias",), bitwise=bitwise)
        compared(40, scheme, sink=numbers(2), learned=("sink",), bitwise=bitwise)
        compared(40, scheme, mask=lambda b, h, i, j: (i + 2 * j + h) % 3 != 0, bitwise=bitwise)
        compared(40, scheme, score=lambda s, b, h, i, j, t: s + t[i] * (h + 1), aux=(numbers(40),), learned=(), bitwise=bitwise)
        compared(40, scheme, q_norm=numbers(16), k_norm=numbers(16), learned=("q_norm", "k_norm"), bitwise=bitwise)
        compared(33, scheme, shapes=dict(batch=2), causal=True, bitwise=bitwise)
    for scheme in "gather", "ulysses":
        compared(40, scheme, causal=True, alibi=numbers(2).abs(), learned=("alibi",))
        compared(40, scheme, causal=True, lengths_k=integers(31))
    for scheme in "gather", "ulysses":
        compared(128, scheme, blocks=every_other_block(128, 32), shapes=dict(dim=16))
        for rows in 3, 1:  # of which one rank has one, as a bias for all queries has
            compared(3, scheme, bias=numbers(1, 2, rows, 3), learned=("bias",))
    compared(40, "ulysses", window=(3, 3), cu_seqlens=integers(0, 11, 40))
    dropped()
    cast()
    faults()
    refused_by_one()
    forgotten()


def every_other_block(length, size):
    """Block lists with the fields of a BlockMask: each row of blocks has full blocks of its own parity, so the mask is never
    evaluated."""
    count = length // size
    seen = [[j for j in range(count) if (i + j) % 2 == 0] for i in range(count)]
    full = torch.tensor([[row + [0] * (count - len(row)) for row in seen]], dtype=torch.int32)[None]
    counts = torch.tensor([[[len(row) for row in seen]]], dtype=torch.int32)
    none = torch.zeros_like(counts), torch.zeros_like(full)
    return SimpleNamespace(
        BLOCK_SIZE=(size, size), kv_num_blocks=none[0], kv_indices=none[1], full_kv_num_blocks=counts, full_kv_indices=full
    )


def dropped():
    """The same weights are dropped in every call, and other ones on every rank."""
    inputs = [parallel.shard(x) for x in drawn(48)]
    actual = [parallel.forward(*inputs, dropout=0.5, seed=seed) for seed in (3, 3, 4)]
    assert torch.equal(actual[0], actual[1]) and not torch.equal(actual[0], actual[2])
    q, k, v = (x.requires_grad_() for x in inputs)
    gradients = []
    for scheme, order in ("gather", False), ("gather", True), ("ring", False):
        out = parallel.forward(q, k, v, dropout=0.5, seed=3, causal=True, scheme=scheme, deterministic=order)
        loss = (out.float() * k.detach().float()).sum()
        gradients.append(torch.autograd.grad(loss, (q, k, v)))
        sums = torch.stack([loss.detach(), (gradients[-1][2].float() * v.detach().float()).sum()])
        dist.all_reduce(sums)
        torch.testing.assert_close(sums[0], sums[1], rtol=0.02, atol=0.1)  # the loss is linear in values
    torch.testing.assert_close(gradients[0], gradients[1], rtol=2**-6, atol=2**-6)


def faults():
    """The same error on every rank says what differs; nothing has been sent, and the next call works."""
    inputs, rank = [parallel.shard(x) for x in drawn(48)], dist.get_rank()
    with pytest.raises(ValueError, match=r"(?s)ranks make different calls.*rank 0: .*causal=False.*rank 1: .*causal=True"):
        parallel.forward(*inputs, causal=bool(rank))
    with pytest.raises(ValueError, match=r"(?s)rank 0: .*q: 1 x 2 x 16 of torch.float16.*rank 1: .*bfloat16"):
        parallel.forward(*[x.half() if rank == 0 else x for x in inputs])
    with pytest.raises(ValueError, match=r"(?s)rank 0: mask=<lambda> \w+.*rank 1: mask=<lambda> \w+"):
        parallel.forward(*inputs, mask=(lambda b, h, i, j: j <= i) if rank else (lambda b, h, i, j: j < i))
    with pytest.raises(ValueError, match=r"(?s)rank 0: return_lse=False\nrank 1: return_lse=True"):
        parallel.forward(*inputs, return_lse=bool(rank))
    with pytest.raises((ValueError, TypeError), match="window"):
        parallel.forward(*inputs, window=(3, 0) if rank else (-3, 0))
    with pytest.raises(ValueError, match="rank . of 2 has 24 tokens, and would have .. of 39"):
        parallel.forward(*inputs, length=39)
    with pytest.raises(NotImplementedError, match="alibi: with scheme=.ring"):
        parallel.forward(*inputs, scheme="ring", causal=True, alibi=numbers(2))
    with pytest.raises(ValueError, match=r"(?s)rank 0: memory=None; sweeps=1\nrank 1: memory=1; sweeps=2"):
        parallel.forward(*[parallel.shard(x) for x in drawn(48, 4, 2)], scheme="ring", memory=1 if rank else None)
    with pytest.raises(ValueError, match="rank 0: length=None of shards of 24: give length where these differ.*\n.*of 16"):
        parallel.forward(*[parallel.shard(x) for x in drawn(40)])
    for wrong in dict(layout="sbhd"), dict(memory=0):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}: must be"):
            parallel.forward(*inputs, **(wrong if rank else {}))
    with pytest.raises(ValueError, match="rank . of 2 would have .. of 39 tokens, and has 24"):
        parallel.unshard(inputs[0], length=39 if rank else None)
    with pytest.raises(ValueError, match=r"(?s)rank 0: to='contiguous'\nrank 1: to='zigzag'"):
        parallel.reorder(inputs[0], to="zigzag" if rank else "contiguous")
    with pytest.raises(TypeError, match="takes no argument windows; did you mean window"):
        parallel.forward(*inputs, windows=3)
    compared(48, "auto", causal=True)
    why = parallel.forward(*inputs, causal=True, explain=True)
    assert why.scheme == "gather" and "no other scheme is a tenth faster" in str(why)


ALONE_WRONG = (  # what one rank asks for, and what all of them are told
    (dict(q=np.zeros((1, 24, 2, 16))), TypeError, "q: must be a torch tensor, .* not ndarray"),
    (dict(q=torch.zeros(24)), ValueError, r"q: must have the axes B, S, H, D: q.shape=\(24,\)"),
    (dict(k=torch.zeros(1, 24, 1, 16).to(torch.float8_e4m3fn)), NotImplementedError, "k: float8_e4m3fn is not supported"),
    (dict(bias=torch.zeros(2, 24, 48)), ValueError, r"bias: must have the axes .*: bias.shape=\(2, 24, 48\)"),
    (dict(bias=torch.zeros(1, 2, 48, 48)), ValueError, "bias: must have one row, or one for each query of this rank"),
    (dict(bias=torch.zeros(1, 2, 24, 24)), ValueError, "bias: sequence must equal k's"),
    (dict(bias=torch.zeros(1, 3, 24, 48)), ValueError, r"bias: must have the shape \(1, 2 or 1, 48 or 1, 48\)"),
    (dict(bias=[0.5]), TypeError, "bias: must be a torch tensor"),
    (dict(sink=torch.zeros(3)), ValueError, "sink: heads must equal q's"),
    (dict(lengths_k=torch.tensor([49])), ValueError, r"lengths_k: must be from 0 to 48: lengths_k\[0\]=49"),
    (dict(lengths_k=torch.tensor([[9, 9]])), NotImplementedError, "lengths_k: for parts of queries"),
    (dict(cu_seqlens=torch.tensor([[0, 48]])), ValueError, "cu_seqlens: must have the axes"),
    (dict(mask=lambda b, h, i, j, t: t[i] == j, aux=(torch.zeros(24),)), ValueError, "aux0: must have 48 elements or more"),
    (dict(mask=lambda b, h, i, j, *t: j <= i, aux=(torch.zeros(48),) * 8), TypeError, "aux: must have at most 7 arrays"),
    (dict(blocks=3), TypeError, "blocks: must have the fields of a BlockMask"),
    (dict(scheme=["ring"]), ValueError, "scheme: must be"),
    (dict(order=["zigzag"]), ValueError, "order: must be one of"),
    (dict(length="48"), TypeError, "length: must be an integer"),
    (dict(length=-1), ValueError, "length: must not be negative"),
)


def refused_by_one():
    """Every rank raises the same error with the same message, and none waits for the one that raised first."""
    q, k, v = (parallel.shard(x) for x in drawn(48))
    for wrong, kind, said in ALONE_WRONG:
        call_options = dict(q=q, k=k, v=v) | (wrong if dist.get_rank() else {})
        with pytest.raises(kind, match=said):
            parallel.forward(call_options.pop("q"), call_options.pop("k"), call_options.pop("v"), **call_options)
    with pytest.raises(ValueError, match="dim: must be an axis of x: dim=4"):
        parallel.unshard(q, dim=4 if dist.get_rank() else 1)
    with pytest.raises(TypeError, match="k: must be a torch tensor"):
        parallel.linear(k, 3.0 if dist.get_rank() else k, v)
    with pytest.raises(ValueError, match="out: must have"):
        parallel.forward(q, k, v, out=torch.zeros_like(q[..., :8]))
    with pytest.raises(NotImplementedError, match="bias: with cu_seqlens"):
        parallel.forward(q, k, v, bias=torch.zeros(1, 2, 24, 48), cu_seqlens=integers(0, 9, 48), scheme="gather")
    if dist.get_rank() == 0:  # nobody else is asked
        assert parallel.forward(q, k, v, softcap=7.0, explain=True).scheme == "gather"


def cast():
    """torch.autocast casts shards as it casts the whole."""
    whole = [x.float().requires_grad_() for x in drawn(48)]
    mine = [parallel.shard(x.detach()).requires_grad_() for x in whole]
    with torch.autocast("cpu", torch.bfloat16):
        outs = attention.forward(*whole, causal=True), parallel.forward(*mine, causal=True, scheme="gather", length=48)
    assert outs[1].dtype == torch.bfloat16 and torch.equal(outs[1], parallel.shard(outs[0]))
    for x, y in zip(*[torch.autograd.grad(out.sum(), inputs) for out, inputs in zip(outs, (whole, mine))]):
        torch.testing.assert_close(y, parallel.shard(x), rtol=0, atol=2**-6 * x.abs().max().item())


def forgotten():
    """Ranks clear a group's cached plans at the same call, whatever other groups they are in."""
    inputs, single_rank_group = [parallel.shard(x) for x in drawn(48)], dist.new_group([0])
    limit, agreement.MAX_SIGNATURES = agreement.MAX_SIGNATURES, 4
    agreement._CACHED.clear()
    for scale in 0.1, 0.2, 0.3:
        if dist.get_rank() == 0:
            parallel.forward(*inputs, group=single_rank_group, scale=scale)
    for scale in 0.1, 0.2, 0.1, 0.3, 0.4, 0.5, 0.1, 0.5:
        parallel.forward(*inputs, causal=True, scale=scale)
    agreement.MAX_SIGNATURES = limit


def test_a_dead_peer_ends_in_torchs_timeout():
    start(2, dies)


def dies(world):
    inputs = [parallel.shard(x) for x in drawn(48)]
    parallel.forward(*inputs, causal=True)
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(0)
    with pytest.raises(RuntimeError):
        for _ in range(3):
            parallel.forward(*inputs, causal=True)
    os._exit(0)


def test_on_three_ranks():
    """Lengths that ranks do not divide, and ranks without tokens; redistribution there and back."""
    start(3, three)


def three(world):
    for length in 1, 2, 5, 37:
        compared(length, "gather", causal=True)
        compared(length, "ring", causal=True, bitwise=())
        compared(length, "ulysses", causal=True, shapes=dict(heads=3, kv_heads=1))
    compared(37, "ring", order="contiguous", bitwise=(), shapes=dict(heads=3, kv_heads=3))
    x = torch.arange(2 * 41 * 3).reshape(2, 41, 3)
    for length in 41, 2:
        mine = parallel.shard(x[:, :length])
        assert torch.equal(parallel.unshard(mine, length=length), x[:, :length])
        other = parallel.reorder(mine, length=length)
        assert torch.equal(other, parallel.shard(x[:, :length], order="contiguous"))
        assert torch.equal(parallel.reorder(other, order="contiguous", to="zigzag", length=length), mine)
    for n in 7, 2:  # second derivatives: x^2 of what all ranks have
        mine = parallel.shard(x[0, :n].double(), dim=0).requires_grad_()
        whole = parallel.unshard(parallel.reorder(mine, dim=0, length=n), dim=0, order="contiguous", length=n)
        (grad,) = torch.autograd.grad(whole.square().sum(), mine, create_graph=True)
        (again,) = torch.autograd.grad(grad.sum(), mine)
        assert torch.equal(grad, 2 * world * mine) and (again == 2 * world).all()
    with pytest.raises(NotImplementedError, match="2 heads and 1 key heads cannot be divided evenly among 3 ranks"):
        parallel.forward(*[parallel.shard(x) for x in drawn(36)], scheme="ulysses")


def test_on_four_ranks():
    """Pairs of schemes on a mesh of two dimensions, and one dimension of a mesh by itself."""
    start(4, four)


def four(world):
    from torch.distributed.device_mesh import init_device_mesh

    mesh, shapes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("far", "near")), dict(heads=4, kv_heads=2)
    for scheme in ("gather", "ulysses"), ("ring", "ulysses"), ("ring", "gather"):
        bitwise = () if scheme[0] == "ring" else (0, 1)
        compared(45, scheme, mesh, causal=True, shapes=shapes, bitwise=bitwise)
        mask, score = lambda b, h, i, j: (i * 3 + j + h) % 4 != 0, lambda s, b, h, i, j: s * 0.5 - abs(i - j) * (h + 1) * 0.1
        compared(24, scheme, mesh, mask=mask, score=score, shapes=shapes, bitwise=bitwise)
    compared(24, ("gather", "ulysses"), mesh, bias=numbers(1, 4, 24, 24), learned=("bias",), shapes=shapes)
    compared(24, ("gather", "ulysses"), mesh, sink=numbers(4), learned=("sink",), causal=True, shapes=shapes)
    mine = [parallel.shard(x, mesh) for x in drawn(24, 8, 4)]
    for scheme in ("ring", "ulysses"), ("ring", "gather"):  # in one turn, and in two or four
        one, more = [parallel.forward(*mine, group=mesh, scheme=scheme, causal=True, memory=n) for n in (None, 1)]
        assert (one.float() - more.float()).abs().max() <= 2**-7 * one.float().abs().max()
    compared(24, "ulysses", mesh["near"], causal=True, shapes=shapes)
    compared(45, "ring", causal=True, bitwise=(), shapes=shapes)
    odd = [parallel.shard(x, mesh) for x in drawn(24, 3, 3)]  # heads that two ranks do not share
    why = parallel.forward(*odd, group=mesh, causal=True, explain=True)
    assert why.scheme == ("ring", "gather") and "gather, ulysses unsupported: scheme: 3 heads and 3 key heads" in str(why)
    compared(24, "auto", mesh, causal=True, bitwise=(), shapes=dict(heads=3, kv_heads=3))
    assert str(parallel.forward(*odd, group=mesh["near"], scheme="ring", explain=True)).startswith("ring: it was requested")
    attention.forward(*drawn(8))
