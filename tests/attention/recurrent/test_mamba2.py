"""attention/public/mamba.py against the recurrence in float64."""

import ml_dtypes
import numpy as np
import pytest

from attention import reference
from attention.public.mamba import mamba2

bf16, f32 = ml_dtypes.bfloat16, np.float32


def inputs(length=70, P=64, N=64, groups=1, batch=1, heads=4, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, length, heads, P)).astype(bf16)
    B, C = (rng.standard_normal((2, batch, length, groups, N)) / N**0.25).astype(bf16)
    return dict(
        x=x, dt=rng.uniform(0, 0.5, (batch, length, heads)).astype(f32), A=-rng.uniform(0.2, 2, heads).astype(f32), B=B, C=C
    )


def check(place, args, **options):
    on = {name: place.put(x) for name, x in args.items()}
    out, state = mamba2(**on, **options, return_final_states=True)
    options.pop("family", None)
    ref, last = reference.mamba2(**args, **options)
    low, _ = reference.mamba2(**args, **options, low=True)
    reference.assert_close(place.get(out), ref, low)
    np.testing.assert_allclose(place.get(state), last, rtol=0, atol=2**-7 * np.abs(last).max())


@pytest.mark.parametrize("length, P, N, groups", [(1, 64, 64, 1), (150, 64, 128, 1), (64, 128, 64, 2), (70, 32, 16, 4)])
def test_sizes(place, length, P, N, groups):
    check(place, inputs(length, P, N, groups))


@pytest.mark.parametrize("columns", [False, True], ids=["D of heads", "D of columns"])
def test_all_options(place, columns):
    args, rng = inputs(batch=2), np.random.default_rng(1)
    args |= {"z": rng.standard_normal(args["x"].shape).astype(bf16), "dt_bias": rng.standard_normal(4).astype(f32)}
    args |= {"D": rng.standard_normal((4, 64) if columns else 4).astype(f32)}
    args |= {"initial_states": rng.standard_normal((2, 4, 64, 64)).astype(f32)}
    check(place, args, dt_softplus=True)


@pytest.mark.parametrize("everything", [False, True])
def test_decays_of_any_size(place, everything):
    """Of heads and of chunks: no exponent that could overflow is positive, however large the sums of gates are."""
    args, rng = inputs(200), np.random.default_rng(4)
    args["A"][:] = -0.01, -1, -20, -1000
    args["dt"][0, :64] = 0
    args["dt"][0, 100:110] = 30
    if everything:
        args |= {"z": rng.standard_normal(args["x"].shape).astype(bf16), "D": rng.standard_normal((4, 64)).astype(f32)}
    check(place, args)


@pytest.mark.parametrize("family", ["sm_90", "sm_80"])
@pytest.mark.parametrize("softplus", [False, True])
def test_limits_of_steps(place, softplus, family):
    """Half of the steps are below the lower limit or above the upper one, and none is of the tokens after the last."""
    args = inputs(70) | {"dt_bias": np.zeros(4, f32)}
    args["dt"] = np.random.default_rng(3).standard_normal(args["dt"].shape).astype(f32)
    check(place, args, dt_softplus=softplus, dt_limit=(0.4, 0.9), family=family)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (0.1, "dt_limit: must be a pair of numbers: dt_limit=0.1"),
        ((-1, 2), "dt_limit: must be two numbers, 0 <= low <= high"),
        ((2, 1), "dt_limit: must be two numbers, 0 <= low <= high"),
        ((0.0, None), "dt_limit: must be two numbers"),
    ],
)
def test_invalid_limits(limits, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        mamba2(**inputs(5, 16, 16), dt_limit=limits)


def test_cu_seqlens(place):
    args = inputs(150)
    args["initial_states"] = np.random.default_rng(2).standard_normal((3, 4, 64, 64)).astype(f32)
    args["cu_seqlens"] = np.array([0, 30, 100, 150], np.int32)
    check(place, args)


@pytest.mark.parametrize("key_dim", [64, 256])
def test_packed_sequences_of_whole_chunks(place, key_dim):
    """As in test_linear.py. With 256 columns of B chunk_hopper.py serves, with 64 mamba2_shared_heads_hopper.py."""
    args = inputs(210, N=key_dim, heads=2)
    args["cu_seqlens"] = np.array([0, 192, 210], np.int32)
    check(place, args)


@pytest.mark.parametrize("sequences", [False, True])
def test_key_dim_split_between_two_warpgroups(place, sequences):
    """On Hopper two warpgroups have half of the columns of B each."""
    args, rng = inputs(150, N=256, heads=2), np.random.default_rng(3)
    args |= {"z": rng.standard_normal(args["x"].shape).astype(bf16), "D": rng.standard_normal((2, 64)).astype(f32)}
    if sequences:
        args["cu_seqlens"] = np.array([0, 30, 100, 150], np.int32)
    check(place, args, dt_softplus=True)


def test_negative_dt_is_clamped(place):
    """To 0, as mamba_ssm does by default: such a token does not change the state."""
    args = inputs(150, heads=2)
    args["dt"][:, ::3] *= -1
    args["dt"][:, ::7] = 0
    check(place, args)


@pytest.mark.parametrize("family", ["sm_90", "sm_80"])
@pytest.mark.parametrize("N", [64, 256])
def test_dt_beyond_the_range_of_float16(place, N, family):
    """dt x, dt B C and the state are too large for float16; x, B, C and the outputs are not. dt becomes small again later."""
    args, rng = inputs(130, N=N, heads=1), np.random.default_rng(5)
    args |= {"D": np.array([0.5], f32), "z": rng.standard_normal(args["x"].shape)}
    args |= {"x": 300 * args["x"].astype(f32), "C": args["C"].astype(f32) / 20000, "A": np.array([-1e-3], f32)}
    args["dt"][:, 20:80] *= 3000
    args["initial_states"] = 3e5 * rng.standard_normal((1, 1, 64, N)).astype(f32)
    args = {name: x.astype(np.float16) if name in ("x", "B", "C", "z") else x for name, x in args.items()}
    check(place, args, family=family)
    check(
        place,
        args | {"cu_seqlens": np.array([0, 50, 130]), "initial_states": args["initial_states"].repeat(2, 0)},
        family=family,
    )


def test_dt_times_x_beyond_the_range_of_float16():
    """The output is within it."""
    args = inputs(1, heads=1)
    args = {name: np.ones_like(x, x.dtype if x.dtype == f32 else np.float16) for name, x in args.items()}
    args |= {"x": 300 * args["x"], "dt": 400 * args["dt"], "C": args["C"] * np.float16(0.54 / 64), "A": -args["A"]}
    out = mamba2(**args).astype(float)
    assert (abs(out - 120000 * 64 * args["C"][0, 0, 0, 0].astype(float)) <= 32).all() and (out < 65504).all()


def test_no_token():
    assert mamba2(**inputs(0)).shape == (1, 0, 4, 64)
    with pytest.raises(ValueError, match=r"^x: must have a token, for return_final_states=True: x.shape=\(1, 0, 4, 64\)"):
        mamba2(**inputs(0), return_final_states=True)


SEQ_IDX = np.repeat([[0, 0, 1, 1], [7, 3, 3, 7]], 10, axis=1).astype(np.int32)


def test_seq_idx(place):
    """Two sequences in one batch, three in the other; a sequence ends where the number changes, whatever the numbers are."""
    args = inputs(40, 16, 16, batch=2, heads=2)
    on = {name: place.put(x) for name, x in args.items()}
    out, states = mamba2(**on, seq_idx=place.put(SEQ_IDX), return_final_states=True, chunk_size=256)
    for b, cuts in enumerate(([0, 20, 40], [0, 10, 30, 40])):
        single_batch = {name: x if name == "A" else x[b : b + 1] for name, x in args.items()}
        ends = place.put(np.array(cuts, np.int32))
        single_batch = {name: place.put(x) for name, x in single_batch.items()}
        want, last = mamba2(**single_batch, cu_seqlens=ends, return_final_states=True)
        assert (place.get(out)[b] == place.get(want)[0]).all() and (place.get(states)[b] == place.get(last)[-1]).all()


def test_seq_idx_with_out():
    args, out = inputs(40, 16, 16, batch=2, heads=2), np.zeros((2, 40, 2, 16), bf16)
    assert mamba2(**args, seq_idx=SEQ_IDX.astype(np.int64), out=out) is out
    assert (out == mamba2(**args, seq_idx=SEQ_IDX)).all() and out.any()
    strided = np.zeros((2, 80, 2, 16), bf16)[:, :40]
    with pytest.raises(ValueError, match="^out: with seq_idx its batches must be contiguous in memory"):
        mamba2(**args, seq_idx=SEQ_IDX, out=strided)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(seq_idx=SEQ_IDX[:1]),
            r"seq_idx: must have the axes B, S of x: seq_idx.shape=\(1, 40\), x.shape=",
        ),
        (dict(seq_idx=SEQ_IDX.astype(f32)), "seq_idx: dtype must be one of .* seq_idx.dtype='float32'"),
        (dict(seq_idx=SEQ_IDX, cu_seqlens=np.array([0, 40])), "seq_idx: takes neither"),
        (dict(chunk_size=0), "chunk_size: must be a positive integer or None, and has no effect: chunk_size=0"),
    ],
)
def test_invalid_seq_idx(options, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        mamba2(**inputs(40, 16, 16, batch=2, heads=2), **options)


@pytest.mark.parametrize("traced", ["x", "seq_idx"])
def test_seq_idx_cannot_be_traced(traced):
    """By JAX: a tracer has no numbers, and a call with one cannot wait for them."""
    jax = pytest.importorskip("jax")
    args = inputs(40, 16, 16, batch=2, heads=2) | {"seq_idx": SEQ_IDX}
    with pytest.raises(NotImplementedError, match="^seq_idx: its numbers cannot be read while the call is traced"):
        jax.jit(lambda x: mamba2(**args | {traced: x}))(args[traced])


@pytest.mark.parametrize("name", ["dt", "B", "C", "z", "out"])
def test_seq_idx_with_other_axes(name):
    """Arrays that have as many tokens as x once batches are joined."""
    args = inputs(40, 16, 16, batch=2, heads=2)
    args |= {"z": args["x"], "out": np.zeros_like(args["x"])}
    turned = np.ascontiguousarray(args[name].swapaxes(0, 1))
    with pytest.raises(ValueError, match=rf"^{name}: must have the axes B, S of x: {name}.shape=\(40, 2, "):
        mamba2(**args | {name: turned}, seq_idx=SEQ_IDX)
