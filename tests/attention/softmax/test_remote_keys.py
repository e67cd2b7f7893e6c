"""plans/softmax/remote_keys.py: keys in two buffers, one of which is still filling, give the bits of keys in one buffer."""

import pytest

pytest.importorskip("torch")

import torch

import attention
from attention.kernels.softmax import forward_hopper
from attention.parts.key_sources import StreamingBuffers, TwoBuffers
from attention.plans.softmax import remote_keys
from attention.plans.softmax.remote_keys import KeyPlacement
from tiles.interpreter import Hazard
from tiles.targets import parse_target

ROWS, PARTS = 256, 2
OUTER = 0, 128, 384, 512


def problem(keys, dim, value_dim=None, where="cpu"):
    """(q, k, v, lengths_k, out and lse of forward) of queries in two parts, of which the first sees half of the keys."""
    torch.manual_seed(keys + dim)
    shapes = (PARTS * ROWS, 4, dim), (keys, 2, dim), (keys, 2, value_dim or dim)
    q, k, v = (torch.randn(1, *shape, device=where).bfloat16() for shape in shapes)
    lengths = torch.tensor([[keys // 2, keys]], dtype=torch.int32, device=where)
    return q, k, v, lengths, attention.forward(q, k, v, lengths_k=lengths, causal=True, return_lse=True, family="sm_90")


def split(x, spans):
    """(rows of spans, all others) of keys or values; what is behind them in memory is NaN."""
    first, end, second, second_end = spans
    local_parts = [x[:, first:end], x[:, second:second_end]]
    remote_parts = [x[:, :first], x[:, end:second], x[:, second_end:]]
    return [
        torch.cat([*part, torch.full_like(x, torch.nan)], 1)[:, : sum([y.shape[1] for y in part])]
        for part in (local_parts, remote_parts)
    ]


@pytest.mark.parametrize(
    ("keys", "dim", "value_dim", "spans"),
    [
        (512, 128, 128, (0, 128, 384, 512)),
        (512, 64, 64, (128, 384, 512, 512)),
        (500, 64, 128, (0, 128, 384, 500)),  # the last block is not a whole one
        (500, 96, 96, (128, 384, 500, 500)),
        (640, 16, 16, (128, 256, 384, 512)),
        (512, 128, 64, (0, 0, 0, 128)),
    ],
)
def test_local_keys_stay_where_they_are(keys, dim, value_dim, spans):
    q, k, v, lengths, expected = problem(keys, dim, value_dim)
    (local_k, k), (local_v, v) = split(k, spans), split(v, spans)
    actual = remote_keys.forward_two_buffers(q, k, v, lengths, local_k, local_v, KeyPlacement(keys, *spans, True))
    assert all(torch.equal(x, y) for x, y in zip(actual, expected))


def test_a_scale_and_no_mask():
    q, k, v, lengths, _ = problem(512, 64)
    expected = attention.forward(q, k, v, lengths_k=lengths, scale=0.3, family="sm_90")
    (local_k, k), (local_v, v) = split(k, OUTER), split(v, OUTER)
    assert torch.equal(
        remote_keys.forward_two_buffers(q, k, v, lengths, local_k, local_v, KeyPlacement(512, *OUTER, scale=0.3))[0], expected
    )


@pytest.mark.parametrize("dim", [64, 128])
def test_a_block_is_read_after_it_has_arrived(dim):
    """A kernel waits for a block that has not arrived, here for ever."""
    q, k, v, lengths, expected = problem(512, dim)
    (local_k, k), (local_v, v) = split(k, OUTER), split(v, OUTER)
    required = torch.tensor([0, 2, 1, 0, 2], dtype=torch.int32)

    def call(there):
        return remote_keys.forward_streaming(
            q, k, v, lengths, local_k, local_v, torch.tensor([there]).int(), required, KeyPlacement(512, *OUTER, True)
        )

    assert all(torch.equal(x, y) for x, y in zip(call(2), expected))
    for there in (0, 1):
        with pytest.raises(Hazard, match=f"which is to be {there + 1}"):
            call(there)


def test_a_kernel_waits_for_required_copies_only():
    """Other copies may still be under way."""
    q, k, v, lengths, expected = problem(512, 64)
    (local_k, k), (local_v, v) = split(k, OUTER), split(v, OUTER)
    required, arrived = torch.tensor([0, 1, 1, 0, 2]).int(), torch.ones(1).int()
    assert torch.equal(
        remote_keys.forward_streaming(q, k, v, lengths, local_k, local_v, arrived, required, KeyPlacement(512, *OUTER, True))[
            0
        ],
        expected[0],
    )


def test_kernels_are_in_the_space():
    """`inspect` compiles what the space lists, and checks it for spills."""
    for everything in (False, True):
        kinds = [type(config.kv_source) for config in forward_hopper.space(parse_target("sm_90a"), everything)]
        assert TwoBuffers in kinds and StreamingBuffers in kinds


@pytest.mark.gpu
def test_on_a_gpu():
    spans = (0, 1024, 3072, 4096)
    q, k, v, lengths, expected = problem(4096, 128, where="cuda")
    (local_k, k), (local_v, v) = split(k, spans), split(v, spans)
    required, arrived = torch.ones(33, device="cuda").int(), torch.ones(1, device="cuda").int()
    placement = KeyPlacement(4096, *spans, True)
    assert torch.equal(remote_keys.forward_two_buffers(q, k, v, lengths, local_k, local_v, placement)[0], expected[0])
    assert torch.equal(
        remote_keys.forward_streaming(q, k, v, lengths, local_k, local_v, arrived, required, placement)[0], expected[0]
    )
