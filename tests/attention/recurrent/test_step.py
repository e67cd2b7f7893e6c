"""attention/public/token_steps.py: one token of all members, against the recurrence in float64."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from attention import reference
from attention.kernels.recurrent.linear_token_loop import LARGEST_KEY_DIMS, Config, make
from attention.plans.recurrent import token_loop
from attention.public.token_steps import linear_step
from tiles.compiling.compiler import compile_kernel
from tiles.launching.arguments import signature

bf16, f16, f32 = ml_dtypes.bfloat16, np.float16, np.float32
DECAYS = {"none": None, "head": (4,), "token": (3, 4), "channel": (3, 4, None)}


def inputs(key_dim, value_dim, decay="none", delta=False, dtype=bf16, key_heads=4, gates=f32, seed=0):
    """The arguments of a step for 3 sequences and 4 heads."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, 3, key_heads, key_dim))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    args = dict(q=q.astype(dtype), k=k.astype(dtype), v=rng.standard_normal((3, 4, value_dim)).astype(dtype))
    args["state"] = rng.standard_normal((3, 4, key_dim, value_dim)).astype(f32)
    if DECAYS[decay]:
        args["decay"] = -rng.exponential(1, [n or key_dim for n in DECAYS[decay]]).astype(gates)
    if delta:
        args["beta"] = rng.uniform(0, 1, (3, 4)).astype(gates)
    return args


def check(place, args, **options):
    """Make a step in this place: out has one rounding error, the state a few of float32."""
    on = {name: place.put(x.copy()) for name, x in args.items()}
    out = place.get(linear_step(**on, **options))
    ref, state = reference.linear_step(**args, **options)
    reference.assert_close(out, ref, ref.astype(out.dtype))
    np.testing.assert_allclose(place.get(on["state"]), state, rtol=1e-5, atol=1e-5)
    return out


@pytest.mark.parametrize("delta", [False, True], ids=["plain", "delta"])
@pytest.mark.parametrize("decay", DECAYS)
def test_members(place, decay, delta):
    check(place, inputs(64, 48, decay, delta))


@pytest.mark.parametrize("key_dim, value_dim", [(16, 16), (80, 32), (128, 128), (144, 48), (256, 16), (64, 256)])
def test_sizes(place, key_dim, value_dim):
    check(place, inputs(key_dim, value_dim, "channel", True))


@pytest.mark.parametrize("key_heads", [1, 2])
def test_shared_keys(place, key_heads):
    check(place, inputs(32, 16, "token", True, key_heads=key_heads))


@pytest.mark.parametrize("dtype, gates", [(f16, f32), (bf16, bf16), (f16, f16)])
@pytest.mark.parametrize("decay", ["head", "token", "channel"])
def test_dtypes(place, decay, dtype, gates):
    check(place, inputs(32, 32, decay, True, dtype, gates=gates))


def test_scale(place):
    check(place, inputs(32, 32), scale=-2)


def test_strong_decays(place):
    """exp(-50 ...) makes no NaN, whatever the state is."""
    args = inputs(32, 32, "channel", True)
    args["decay"][:] = np.linspace(-50, -1e4, 32)
    args["decay"][0] = -np.inf
    check(place, args)


def test_many_steps_are_a_sequence(place):
    rng = np.random.default_rng(1)
    q, k, v = rng.standard_normal((3, 2, 7, 2, 32)).astype(bf16)
    decay, beta = -rng.exponential(1, (2, 7, 2)).astype(f32), rng.uniform(0, 0.05, (2, 7, 2)).astype(f32)
    state = place.put(np.zeros((2, 2, 32, 32), f32))
    outs = []
    for t in range(7):
        token = [place.put(x[:, t].copy()) for x in (q, k, v, decay, beta)]
        outs.append(place.get(linear_step(state, *token[:3], decay=token[3], beta=token[4])))
    ref, last = reference.linear(q, k, v, decay=decay, beta=beta)
    reference.assert_close(np.stack(outs, 1), ref, ref.astype(bf16))
    np.testing.assert_allclose(place.get(state), last, rtol=1e-5, atol=1e-5)


def test_strides_and_out():
    """Views of a longer sequence, of states with more heads, and of a larger out."""
    args = inputs(32, 16, "channel")
    wide = {name: np.full((x.shape[0], 2, *x.shape[1:]), np.nan, x.dtype) for name, x in args.items()}
    for name, x in args.items():
        wide[name][:, 1] = x
    outs = np.full((3, 5, 4, 16), np.nan, bf16)
    out = linear_step(**{name: x[:, 1] for name, x in wide.items()}, out=outs[:, 2])
    ref, state = reference.linear_step(**args)
    assert out.base is outs and np.isnan(np.delete(outs, 2, 1).astype(f32)).all()
    reference.assert_close(outs[:, 2], ref, ref.astype(bf16))
    np.testing.assert_allclose(wide["state"][:, 1], state, rtol=1e-5, atol=1e-5)
    assert np.isnan(wide["state"][:, 0]).all()


@pytest.mark.parametrize("elements", [1, 2, 4])
def test_unaligned_tokens(elements):
    """Addresses so many elements past a multiple of 16 bytes, a negative stride of sequences, gaps between heads."""
    args = inputs(32, 16, "channel", True)
    unaligned_args = dict(args, state=args["state"].copy())
    for name in "qkv":
        room = np.full((3, 4, args[name].shape[-1] + elements), np.nan, bf16)[::-1, :, elements:]
        room[...] = args[name]
        unaligned_args[name] = room
    out = linear_step(**unaligned_args)
    ref, state = reference.linear_step(**args)
    reference.assert_close(out, ref, ref.astype(bf16))
    np.testing.assert_allclose(unaligned_args["state"], state, rtol=1e-5, atol=1e-5)


def test_no_sequence():
    """Nor do the strides of what has no elements matter: NumPy's new arrays have some of 0."""
    args = {name: x[:0] for name, x in inputs(32, 16, "token", True).items()}
    for state in args["state"], args["state"].copy():
        assert linear_step(**args | {"state": state}).shape == (0, 4, 16)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x: x.swapaxes(2, 3), "state: last axis must be contiguous, address and other strides multiples of 16 bytes: "),
        (
            lambda x: np.ndarray(x.shape, f32, np.zeros(x.nbytes + 16, np.uint8), offset=4),
            "state: last axis must be contiguous",
        ),
        (lambda x: x.repeat(2, -1)[..., ::2], "state: last axis must be contiguous"),
        (lambda x: x.astype(bf16), "state: dtype must be one of ('float32',)"),
    ],
)
def test_states_without_accesses_of_16_bytes(change, message):
    args = inputs(32, 32)
    args["state"] = change(args["state"])
    with pytest.raises((ValueError, TypeError)) as raised:
        linear_step(**args)
    assert str(raised.value).startswith(message)


def test_more_sequences_than_a_grid_has_room_for(monkeypatch):
    monkeypatch.setattr(token_loop, "MAX_GRID_YZ", 2)
    with pytest.raises(ValueError, match="^q: must have at most 2 heads and sequences: heads=4, sequences=3"):
        linear_step(**inputs(48, 80))


LARGEST = [*itertools.product(LARGEST_KEY_DIMS, ("", "token", "channel"))][::2]
LARGEST = [pytest.param(*case, marks=[pytest.mark.release] * (n % 2)) for n, case in enumerate(LARGEST)]


@pytest.mark.parametrize(("key_dim", "decay"), LARGEST)
def test_the_state_stays_in_registers(key_dim, decay):
    """No spills for the largest key dim of each number of blocks of an SM, with the delta rule, which takes most registers."""
    config = Config(key_dim, decay, delta=True, single=True)
    compiled = compile_kernel(make(config)[0], signature(make(config)[0]), "sm_90a")
    assert (compiled.spill_bytes, compiled.local_bytes, compiled.warnings) == (0, 0, [])
