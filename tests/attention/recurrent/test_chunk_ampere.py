"""attention/recurrent/kernels/chunk_ampere.py: what GPUs without TMA do, and every GPU with arrays that TMA cannot read."""

import numpy as np
import pytest
import test_mamba2 as mamba2s
from test_linear import HEADS, bf16, check, f16, f32, inputs

from attention import reference
from attention.recurrent import chunks
from attention.recurrent import linear as of_decays
from attention.recurrent import mamba2 as of_steps
from attention.recurrent.kernels import token_loop
from attention.recurrent.linear import linear

DECAYS = "none", "head", "token"


@pytest.fixture(autouse=True)
def by_copies(monkeypatch, nothing_known):
    """Nothing comes by TMA, and nothing is walked."""
    for module in of_decays, of_steps:
        monkeypatch.setattr(module, "choose_family", lambda *_: "sm_80")
    monkeypatch.setattr(token_loop, "launch", lambda *_: pytest.fail("token by token"))


def off(x, elements, poison=np.nan):
    """The same array, its base and strides multiples of so many elements, NaN between its rows."""
    room = np.full((*x.shape[:-1], x.shape[-1] + 2 * elements), poison, x.dtype)
    view = room[..., elements : elements + x.shape[-1]]
    view[...] = x
    return view


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_lengths(place, length, decay):
    check(place, inputs(1, length, decay=decay))


@pytest.mark.parametrize("key_dim, value_dim", [(16, 16), (128, 128), (80, 48), (256, 64), (64, 256)])
def test_sizes(place, key_dim, value_dim):
    check(place, inputs(1, 70, key_dim, value_dim, "token"))


@pytest.mark.parametrize("key_heads", [2, 4])
def test_shared_keys(place, key_heads):
    check(place, inputs(length=70, decay="head", key_heads=key_heads, heads=4))


@pytest.mark.parametrize("dtype, gates", [(f16, f32), (bf16, bf16), (f16, f16)])
def test_dtypes(place, dtype, gates):
    check(place, inputs(1, 70, decay="token", dtype=dtype, gates=gates))


@pytest.mark.parametrize("decay", DECAYS)
def test_layout_and_scale(place, decay):
    given = inputs(length=70, decay=decay)
    turned = {name: x.swapaxes(1, 2).copy() if x.ndim > 1 and name != "initial_state" else x for name, x in given.items()}
    check(place, turned, layout="bhsd", scale=0.3)


@pytest.mark.parametrize("decay", DECAYS)
def test_normalize(place, decay):
    given = inputs(length=70, decay=decay)
    given["q"], given["k"] = abs(given["q"]), abs(given["k"])
    given["initial_state"] = abs(given["initial_state"]), np.ones((2, HEADS, 64), f32)
    check(place, given, normalize=True)


@pytest.mark.parametrize("elements", [1, 2, 4])
@pytest.mark.parametrize("key_dim", [48, 64, 256])
def test_pieces_of_2_4_and_8_bytes(monkeypatch, elements, key_dim):
    """NaN lies between the rows, and `out` like the rest."""
    given = inputs(1, 70, key_dim, 80, "token")
    apart = {name: off(given[name], elements) for name in "qkv"}
    out = off(np.zeros_like(given["v"]), elements)
    ref, last = reference.linear(**given)
    got, state = linear(**given | apart, out=out, return_state=True)
    reference.assert_close(got, ref, reference.linear(**given, low=True)[0])
    np.testing.assert_allclose(state, last, rtol=0, atol=2**-7 * np.abs(last).max())
    edge = out.base[..., :elements], out.base[..., -elements:]
    assert got is out and all(np.isnan(x.astype(f32)).all() for x in edge), "memory around out was written"


@pytest.mark.parametrize("decay", DECAYS)
def test_sequences_of_one_batch(place, decay):
    """One is empty; a NaN in the first does not reach the others."""
    given = inputs(1, 150, decay=decay)
    given["initial_state"] = np.random.default_rng(1).standard_normal((3, HEADS, 64, 64)).astype(f32)
    given["cu_seqlens"] = np.array([0, 70, 70, 150], np.int32)
    for name in "qkv":
        given[name][0, 69] = np.nan
    out, state = linear(**{name: place.put(x) for name, x in given.items()}, return_state=True)
    del given["cu_seqlens"]
    tail = {name: x[:, 70:] if x.ndim > 1 and name != "initial_state" else x for name, x in given.items()}
    tail["initial_state"] = given["initial_state"][2:]
    ref, last = reference.linear(**tail)
    reference.assert_close(place.get(out)[:, 70:], ref, reference.linear(**tail, low=True)[0])
    np.testing.assert_allclose(place.get(state)[2:], last, rtol=0, atol=2**-7 * np.abs(last).max())
    np.testing.assert_array_equal(place.get(state)[1], given["initial_state"][1])


def test_the_end_of_a_sequence_from_within(place):
    """Rows past the first sequence's end are NaN, and it ends inside a chunk."""
    given = inputs(1, 100, decay="token") | {"cu_seqlens": np.array([0, 70, 100], np.int32)}
    given["initial_state"] = np.random.default_rng(1).standard_normal((2, HEADS, 64, 64)).astype(f32)
    for name in "q", "k", "v", "decay":
        given[name][0, 70:] = np.nan
    out, _ = linear(**{name: place.put(x) for name, x in given.items()}, return_state=True)
    del given["cu_seqlens"]
    head = {name: x[:, :70] if x.ndim > 1 and name != "initial_state" else x for name, x in given.items()}
    head["initial_state"] = given["initial_state"][:1]
    ref, _ = reference.linear(**head)
    reference.assert_close(place.get(out)[:, :70], ref, reference.linear(**head, low=True)[0])


@pytest.mark.parametrize("gate", [-50.0, -1e3])
@pytest.mark.parametrize("decay", ["head", "token"])
def test_strong_decays(place, decay, gate):
    """No overflow and no NaN, where some tokens forget all and others nothing."""
    given = inputs(1, 70, decay=decay)
    given["decay"] = np.where(np.random.default_rng(2).random(given["decay"].shape) < 0.3, gate, -0.01).astype(f32)
    check(place, given)


@pytest.mark.parametrize("decay", DECAYS)
def test_segments(place, monkeypatch, decay):
    """A sequence that is cut into three gives what it gives in one piece."""
    monkeypatch.setattr(chunks, "_count_segments", lambda *_: 3)
    check(place, inputs(1, 300, decay=decay))


@pytest.mark.parametrize("decay", DECAYS)
def test_a_state_nobody_wants_is_not_stored(place, decay):
    given = {name: place.put(x) for name, x in inputs(1, 70, decay=decay).items()}
    out, _ = linear(**given, return_state=True)
    assert (place.get(linear(**given)) == place.get(out)).all()


@pytest.mark.parametrize("length, P, N, groups", [(1, 64, 64, 1), (150, 64, 128, 1), (70, 32, 16, 4)])
def test_mamba2(place, length, P, N, groups):
    mamba2s.check(place, mamba2s.inputs(length, P, N, groups))


@pytest.mark.parametrize("columns", [False, True], ids=["D of heads", "D of columns"])
def test_mamba2_with_everything(place, columns):
    mamba2s.test_everything_at_once(place, columns)


def test_mamba2_without_negative_steps(place):
    mamba2s.test_steps_are_never_negative(place)


def test_mamba2_in_sequences(place):
    mamba2s.test_sequences_of_one_batch(place)
