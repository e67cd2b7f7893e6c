"""What masks and scores read of aux must be there: refused by forms alone where these say it, else by the numbers."""

import numpy as np
import pytest

import attention
from attention.plans.softmax import forward_launches

S, H = 16, 2
f16, f32 = np.float16, np.float32
zeros = lambda *shape, dtype=f32: np.zeros(shape, dtype)
ints = lambda *numbers: np.array(numbers, np.int32)


def forward(queries=S, keys=S, **options):
    q, k = zeros(1, queries, H, 16, dtype=f16), zeros(1, keys, H, 16, dtype=f16)
    return attention.forward(q, k, k, **options)


def decode(lengths, tokens=1, pool=S, **options):
    q, k = zeros(1, tokens, H, 16, dtype=f16), zeros(1, pool, H, 16, dtype=f16)
    return attention.decode(q, k, k, lengths=ints(lengths), **options)


documents = lambda b, h, i, j, docs: docs[i] == docs[j]
of_key = lambda b, h, i, j, docs: docs[j] < 1
by_head = lambda s, b, h, i, j, slopes: s + slopes[h] * (j - i)
by_distance = lambda s, b, h, i, j, table: s + table[i - j]
bucketed = lambda s, b, h, i, j, learned, buckets: s + learned[buckets[abs(i - j)]]
TOO_SHORT = "aux0: must have {} elements or more along axis 0, which "
SHORT = [
    (dict(mask=documents, aux=(zeros(8),)), TOO_SHORT.format(16) + "mask indexes by i: aux0.shape=(8,)"),
    (dict(mask=documents, keys=24, aux=(zeros(16),)), TOO_SHORT.format(24) + "mask indexes by j: aux0.shape=(16,)"),
    (dict(score=by_head, aux=(zeros(1),)), TOO_SHORT.format(2) + "score indexes by h: aux0.shape=(1,)"),
    (dict(mask=lambda b, h, i, j, at, seen: seen[b, i, j] & (at[j] < 3), aux=(zeros(S), zeros(1, S, 9, dtype=bool))),
     "aux1: must have 16 elements or more along axis 2, which mask indexes by j: aux1.shape=(1, 16, 9)"),
]  # fmt: skip
OUTSIDE = [
    (forward, dict(score=by_distance, aux=(zeros(S),)), "aux0: index -1 is out of range for axis 0 of an array of shape (16,): "
     "score reads it at b=0, h=0, i=0, j=1"),
    (forward, dict(score=by_distance, causal=True, aux=(zeros(9),)), "aux0: index 9 is out of range for axis 0 of an"),
    (forward, dict(score=bucketed, aux=(zeros(4), ints(*range(S)))), "aux0: index 4 is out of range for axis 0 of an array"),
    (forward, dict(mask=of_key, lengths_k=ints(12), aux=(zeros(9),)), "aux0: index 9 is out of range for axis 0 of an "),
    (forward, dict(mask=documents, cu_seqlens=ints(0, 4, 16), aux=(zeros(9),)), "aux0: index 9 is out of range for axis 0 of "
     "an array of shape (9,): mask reads it at b=1, h=0, i=9, j=0"),
    (decode, dict(lengths=12, mask=of_key, aux=(zeros(9),)), "aux0: index 9 is out of range for axis 0 of an array"),
]  # fmt: skip
INSIDE = [
    (forward, dict(score=by_distance, causal=True, aux=(zeros(S),))),
    (forward, dict(score=by_distance, causal=True, window=(3, 0), aux=(zeros(4),))),
    (forward, dict(score=by_distance, mask=lambda b, h, i, j, table: j == i, aux=(zeros(1),))),
    (forward, dict(mask=of_key, lengths_k=ints(9), aux=(zeros(9),))),
    (forward, dict(mask=documents, cu_seqlens=ints(0, 7, 16), aux=(zeros(9),))),
    (decode, dict(lengths=9, mask=of_key, aux=(zeros(9),))),
    (decode, dict(lengths=12, leftpad=ints(3), score=lambda s, b, h, i, j, x: s + x[j - 3], aux=(zeros(9),))),
]


@pytest.mark.parametrize("arguments, message", SHORT)
def test_what_forms_say_is_refused_before_a_kernel_is_made(arguments, message, monkeypatch):
    monkeypatch.setattr(forward_launches, "kernel_for", lambda *what: pytest.fail("makes a kernel"))
    with pytest.raises(ValueError) as raised:
        forward(**arguments)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("call, arguments, message", OUTSIDE)
def test_what_numbers_say_is_refused_in_the_interpreter(call, arguments, message):
    with pytest.raises(ValueError) as raised:
        call(**arguments)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("call, arguments", INSIDE)
def test_what_no_query_sees_may_be_read_outside(call, arguments):
    assert not np.any(call(**arguments))


def test_backward_asks_too():
    x, lse = zeros(1, S, H, 16, dtype=f16), zeros(1, H, S)
    with pytest.raises(
        ValueError, match=r"^aux0: index -1 is out of range for axis 0 .*: score reads it at b=0, h=0, i=0, j=1"
    ):
        attention.backward(x, x, x, x, x, lse, score=by_distance, aux=(zeros(S),))
