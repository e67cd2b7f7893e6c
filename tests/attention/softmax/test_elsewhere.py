"""softmax/elsewhere.py: keys that lie in several arrays, or are still coming, give the bits of keys that lie in one."""

import pytest

torch = pytest.importorskip("torch")

import attention
from attention.softmax import elsewhere, hopper
from attention.softmax.held import Apart, Arriving
from tiles.interpreter import Hazard

ROWS, PARTS = 256, 2


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
    own = [x[:, first:end], x[:, second:second_end]]
    others = [x[:, :first], x[:, end:second], x[:, second_end:]]
    return [torch.cat([*part, torch.full_like(x, torch.nan)], 1)[:, : sum([y.shape[1] for y in part])] for part in (own, others)]


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
def test_own_keys_stay_where_they_are(keys, dim, value_dim, spans):
    q, k, v, lengths, wanted = problem(keys, dim, value_dim)
    (own_k, k), (own_v, v) = split(k, spans), split(v, spans)
    found = elsewhere.apart(q, k, v, lengths, own_k, own_v, spans, keys, True)
    assert all(torch.equal(x, y) for x, y in zip(found, wanted))


def test_a_scale_and_no_mask():
    q, k, v, lengths, _ = problem(512, 64)
    wanted = attention.forward(q, k, v, lengths_k=lengths, scale=0.3, family="sm_90")
    (own_k, k), (own_v, v) = split(k, (0, 128, 384, 512)), split(v, (0, 128, 384, 512))
    assert torch.equal(elsewhere.apart(q, k, v, lengths, own_k, own_v, (0, 128, 384, 512), 512, scale=0.3)[0], wanted)


@pytest.mark.parametrize(("keys", "dim"), [(512, 128), (512, 192), (640, 256)])
def test_a_block_is_read_when_all_of_it_has_come(keys, dim):
    """Blocks of 112 and 80 keys lie in two of those that come. One that has not come is waited for, for ever here."""
    q, k, v, lengths, wanted = problem(keys, dim)
    blocks = [2, 2, 0, 1, 0][: keys // 128]
    awaits = torch.tensor([*blocks, 2], dtype=torch.int32)
    found = elsewhere.arriving(q, k, v, lengths, torch.tensor([2], dtype=torch.int32), awaits, True)
    assert all(torch.equal(x, y) for x, y in zip(found, wanted))
    for there in (0, 1):
        with pytest.raises(Hazard, match="which is to be 1" if there == 0 else "which is to be 2"):
            elsewhere.arriving(q, k, v, lengths, torch.tensor([there], dtype=torch.int32), awaits, True)


def test_what_is_not_awaited_is_not_waited_for():
    q, k, v, lengths, wanted = problem(512, 64)
    awaits, arrived = torch.tensor([1, 0, 0, 0, 2], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    assert torch.equal(elsewhere.arriving(q, k, v, lengths, arrived, awaits, True)[0], wanted[0])


def test_they_are_shipped():
    """So that they are compiled for Hopper without spills."""
    kinds = [type(config.held) for config in hopper.space("sm_90a", False)]
    assert Apart in kinds and Arriving in kinds


@pytest.mark.gpu
def test_on_a_gpu():
    spans = (0, 1024, 3072, 4096)
    q, k, v, lengths, wanted = problem(4096, 128, where="cuda")
    awaits = torch.tensor([1] * 32 + [1], dtype=torch.int32, device="cuda")
    arrived = torch.ones(1, dtype=torch.int32, device="cuda")
    assert torch.equal(elsewhere.arriving(q, k, v, lengths, arrived, awaits, True)[0], wanted[0])
    (own_k, k), (own_v, v) = split(k, spans), split(v, spans)
    assert torch.equal(elsewhere.apart(q, k, v, lengths, own_k, own_v, spans, 4096, True)[0], wanted[0])
