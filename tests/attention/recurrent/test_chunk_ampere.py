"""attention/kernels/recurrent/chunk_ampere.py: the chunk kernel of GPUs without TMA, and of arrays that TMA cannot read."""

import numpy as np
import pytest
import test_mamba2 as mamba2s
from test_linear import HEADS, bf16, check, f16, f32, inputs

from attention import reference
from attention.plans.recurrent import recurrent_chunks, token_loop
from attention.public import linear_family as of_decays
from attention.public import mamba as of_steps
from attention.public.linear_family import linear

DECAYS = "none", "head", "token"


@pytest.fixture(autouse=True)
def by_cp_async(monkeypatch, nothing_known):
    """All calls are served by chunk_ampere.py."""
    for module in of_decays, of_steps:
        monkeypatch.setattr(module, "choose_family", lambda *_: "sm_80")
    monkeypatch.setattr(token_loop, "launch", lambda *_: pytest.fail("the token loop was launched"))


def unaligned_copy(x, elements, poison=np.nan):
    """A copy whose address and strides are multiples of so many elements only, with NaN between its rows."""
    buffer = np.full((*x.shape[:-1], x.shape[-1] + 2 * elements), poison, x.dtype)
    view = buffer[..., elements : elements + x.shape[-1]]
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
    args = inputs(length=70, decay=decay)
    turned = {name: x.swapaxes(1, 2).copy() if x.ndim > 1 and name != "initial_state" else x for name, x in args.items()}
    check(place, turned, layout="bhsd", scale=0.3)


@pytest.mark.parametrize("decay", DECAYS)
def test_normalize(place, decay):
    args = inputs(length=70, decay=decay)
    args["q"], args["k"] = abs(args["q"]), abs(args["k"])
    args["initial_state"] = abs(args["initial_state"]), np.ones((2, HEADS, 64), f32)
    check(place, args, normalize=True)


@pytest.mark.parametrize("elements", [1, 2, 4])
@pytest.mark.parametrize("key_dim", [48, 64, 256])
def test_vector_bytes_of_2_4_and_8(monkeypatch, elements, key_dim):
    """The rows of all arrays have NaN between them, which is not written."""
    args = inputs(1, 70, key_dim, 80, "token")
    unaligned = {name: unaligned_copy(args[name], elements) for name in "qkv"}
    out = unaligned_copy(np.zeros_like(args["v"]), elements)
    ref, last = reference.linear(**args)
    actual, state = linear(**args | unaligned, out=out, return_state=True)
    reference.assert_close(actual, ref, reference.linear(**args, low=True)[0])
    np.testing.assert_allclose(state, last, rtol=0, atol=2**-7 * np.abs(last).max())
    edge = out.base[..., :elements], out.base[..., -elements:]
    assert actual is out and all(np.isnan(x.astype(f32)).all() for x in edge), "memory around out was written"


@pytest.mark.parametrize("decay", DECAYS)
def test_packed_sequences(place, decay):
    """One of three sequences is empty. A NaN in the first one does not reach the others."""
    args = inputs(1, 150, decay=decay)
    args["initial_state"] = np.random.default_rng(1).standard_normal((3, HEADS, 64, 64)).astype(f32)
    args["cu_seqlens"] = np.array([0, 70, 70, 150], np.int32)
    for name in "qkv":
        args[name][0, 69] = np.nan
    out, state = linear(**{name: place.put(x) for name, x in args.items()}, return_state=True)
    del args["cu_seqlens"]
    tail = {name: x[:, 70:] if x.ndim > 1 and name != "initial_state" else x for name, x in args.items()}
    tail["initial_state"] = args["initial_state"][2:]
    ref, last = reference.linear(**tail)
    reference.assert_close(place.get(out)[:, 70:], ref, reference.linear(**tail, low=True)[0])
    np.testing.assert_allclose(place.get(state)[2:], last, rtol=0, atol=2**-7 * np.abs(last).max())
    np.testing.assert_array_equal(place.get(state)[1], args["initial_state"][1])


def test_a_sequence_that_ends_inside_a_chunk(place):
    """The rows of the next sequence are NaN, and do not reach it."""
    args = inputs(1, 100, decay="token") | {"cu_seqlens": np.array([0, 70, 100], np.int32)}
    args["initial_state"] = np.random.default_rng(1).standard_normal((2, HEADS, 64, 64)).astype(f32)
    for name in "q", "k", "v", "decay":
        args[name][0, 70:] = np.nan
    out, _ = linear(**{name: place.put(x) for name, x in args.items()}, return_state=True)
    del args["cu_seqlens"]
    head = {name: x[:, :70] if x.ndim > 1 and name != "initial_state" else x for name, x in args.items()}
    head["initial_state"] = args["initial_state"][:1]
    ref, _ = reference.linear(**head)
    reference.assert_close(place.get(out)[:, :70], ref, reference.linear(**head, low=True)[0])


@pytest.mark.parametrize("gate", [-50.0, -1e3])
@pytest.mark.parametrize("decay", ["head", "token"])
def test_strong_decays(place, decay, gate):
    """No overflow and no NaN if some tokens set the state to nearly 0 and others keep it."""
    args = inputs(1, 70, decay=decay)
    args["decay"] = np.where(np.random.default_rng(2).random(args["decay"].shape) < 0.3, gate, -0.01).astype(f32)
    check(place, args)


@pytest.mark.parametrize("decay", DECAYS)
def test_segments(place, monkeypatch, decay):
    monkeypatch.setattr(recurrent_chunks, "count_segments", lambda *_: 3)
    check(place, inputs(1, 300, decay=decay))


@pytest.mark.parametrize("decay", DECAYS)
def test_no_final_state_without_return_state(place, decay):
    args = {name: place.put(x) for name, x in inputs(1, 70, decay=decay).items()}
    out, _ = linear(**args, return_state=True)
    assert (place.get(linear(**args)) == place.get(out)).all()


@pytest.mark.parametrize("length, P, N, groups", [(1, 64, 64, 1), (150, 64, 128, 1), (70, 32, 16, 4)])
def test_mamba2(place, length, P, N, groups):
    mamba2s.check(place, mamba2s.inputs(length, P, N, groups))


@pytest.mark.parametrize("columns", [False, True], ids=["D of heads", "D of columns"])
def test_mamba2_with_all_options(place, columns):
    mamba2s.test_all_options(place, columns)


def test_mamba2_clamps_negative_dt(place):
    mamba2s.test_negative_dt_is_clamped(place)


def test_mamba2_with_packed_sequences(place):
    mamba2s.test_cu_seqlens(place)
