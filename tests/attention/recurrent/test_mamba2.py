"""attention/recurrent/mamba2.py beside the recurrence in float64."""

import ml_dtypes
import numpy as np
import pytest

from attention import reference
from attention.recurrent.mamba2 import mamba2

bf16, f32 = ml_dtypes.bfloat16, np.float32


def inputs(length=70, P=64, N=64, groups=1, batch=1, heads=4, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, length, heads, P)).astype(bf16)
    B, C = (rng.standard_normal((2, batch, length, groups, N)) / N**0.25).astype(bf16)
    return dict(
        x=x, dt=rng.uniform(0, 0.5, (batch, length, heads)).astype(f32), A=-rng.uniform(0.2, 2, heads).astype(f32), B=B, C=C
    )


def check(place, given, **options):
    on = {name: place.put(x) for name, x in given.items()}
    out, state = mamba2(**on, **options, return_final_states=True)
    options.pop("family", None)
    ref, last = reference.mamba2(**given, **options)
    low, _ = reference.mamba2(**given, **options, low=True)
    reference.assert_close(place.get(out), ref, low)
    np.testing.assert_allclose(place.get(state), last, rtol=0, atol=2**-7 * np.abs(last).max())


@pytest.mark.parametrize("length, P, N, groups", [(1, 64, 64, 1), (150, 64, 128, 1), (64, 128, 64, 2), (70, 32, 16, 4)])
def test_sizes(place, length, P, N, groups):
    check(place, inputs(length, P, N, groups))


@pytest.mark.parametrize("columns", [False, True], ids=["D of heads", "D of columns"])
def test_everything_at_once(place, columns):
    given, rng = inputs(batch=2), np.random.default_rng(1)
    given |= {"z": rng.standard_normal(given["x"].shape).astype(bf16), "dt_bias": rng.standard_normal(4).astype(f32)}
    given |= {"D": rng.standard_normal((4, 64) if columns else 4).astype(f32)}
    given |= {"initial_states": rng.standard_normal((2, 4, 64, 64)).astype(f32)}
    check(place, given, dt_softplus=True)


@pytest.mark.parametrize("everything", [False, True])
def test_decays_of_any_size(place, everything):
    """Of heads and of chunks: exponents are never positive where they could overflow, however far the sums go."""
    given, rng = inputs(200), np.random.default_rng(4)
    given["A"][:] = -0.01, -1, -20, -1000
    given["dt"][0, :64] = 0
    given["dt"][0, 100:110] = 30
    if everything:
        given |= {"z": rng.standard_normal(given["x"].shape).astype(bf16), "D": rng.standard_normal((4, 64)).astype(f32)}
    check(place, given)


def test_sequences_of_one_batch(place):
    given = inputs(150)
    given["initial_states"] = np.random.default_rng(2).standard_normal((3, 4, 64, 64)).astype(f32)
    given["cu_seqlens"] = np.array([0, 30, 100, 150], np.int32)
    check(place, given)


@pytest.mark.parametrize("key_dim", [64, 256])
def test_sequences_of_many_chunks(place, key_dim):
    """See test_linear.py. With 256 columns of B chunk_hopper.py serves, with 64 heads_hopper.py."""
    given = inputs(210, N=key_dim, heads=2)
    given["cu_seqlens"] = np.array([0, 192, 210], np.int32)
    check(place, given)


@pytest.mark.parametrize("sequences", [False, True])
def test_keys_of_two_parts(place, sequences):
    """On Hopper two warpgroups have half of the keys each."""
    given, rng = inputs(150, N=256, heads=2), np.random.default_rng(3)
    given |= {"z": rng.standard_normal(given["x"].shape).astype(bf16), "D": rng.standard_normal((2, 64)).astype(f32)}
    if sequences:
        given["cu_seqlens"] = np.array([0, 30, 100, 150], np.int32)
    check(place, given, dt_softplus=True)


def test_steps_are_never_negative(place):
    """As mamba_ssm clamps dt by default: a token whose dt is not positive is passed by."""
    given = inputs(150, heads=2)
    given["dt"][:, ::3] *= -1
    given["dt"][:, ::7] = 0
    check(place, given)


@pytest.mark.parametrize("family", ["sm_90", "sm_80"])
@pytest.mark.parametrize("N", [64, 256])
def test_steps_beyond_float16(place, N, family):
    """dt x, dt B C and the state are too large for float16; x, B, C and the outputs are not. The steps become small again."""
    given, rng = inputs(130, N=N, heads=1), np.random.default_rng(5)
    given |= {"D": np.array([0.5], f32), "z": rng.standard_normal(given["x"].shape)}
    given |= {"x": 300 * given["x"].astype(f32), "C": given["C"].astype(f32) / 20000, "A": np.array([-1e-3], f32)}
    given["dt"][:, 20:80] *= 3000
    given["initial_states"] = 3e5 * rng.standard_normal((1, 1, 64, N)).astype(f32)
    given = {name: x.astype(np.float16) if name in ("x", "B", "C", "z") else x for name, x in given.items()}
    check(place, given, family=family)
    check(
        place,
        given | {"cu_seqlens": np.array([0, 50, 130]), "initial_states": given["initial_states"].repeat(2, 0)},
        family=family,
    )


def test_a_step_and_a_value_beyond_float16():
    """Whose output is not."""
    given = inputs(1, heads=1)
    given = {name: np.ones_like(x, x.dtype if x.dtype == f32 else np.float16) for name, x in given.items()}
    given |= {"x": 300 * given["x"], "dt": 400 * given["dt"], "C": given["C"] * np.float16(0.54 / 64), "A": -given["A"]}
    out = mamba2(**given).astype(float)
    assert (abs(out - 120000 * 64 * given["C"][0, 0, 0, 0].astype(float)) <= 32).all() and (out < 65504).all()


def test_no_token():
    assert mamba2(**inputs(0)).shape == (1, 0, 4, 64)
    with pytest.raises(ValueError, match=r"^x: must have a token, for return_final_states=True: x.shape=\(1, 0, 4, 64\)"):
        mamba2(**inputs(0), return_final_states=True)


SEQ_IDX = np.repeat([[0, 0, 1, 1], [7, 3, 3, 7]], 10, axis=1).astype(np.int32)


def test_packed_sequences_as_mamba_ssm_says_them(place):
    """Of each batch its own, two and three: the numbers only need to change."""
    given = inputs(40, 16, 16, batch=2, heads=2)
    on = {name: place.put(x) for name, x in given.items()}
    out, states = mamba2(**on, seq_idx=place.put(SEQ_IDX), return_final_states=True, chunk_size=256)
    for b, cuts in enumerate(([0, 20, 40], [0, 10, 30, 40])):
        alone = {name: x if name == "A" else x[b : b + 1] for name, x in given.items()}
        ends = place.put(np.array(cuts, np.int32))
        alone = {name: place.put(x) for name, x in alone.items()}
        want, last = mamba2(**alone, cu_seqlens=ends, return_final_states=True)
        assert (place.get(out)[b] == place.get(want)[0]).all() and (place.get(states)[b] == place.get(last)[-1]).all()


def test_packed_sequences_into_ones_own_array():
    given, out = inputs(40, 16, 16, batch=2, heads=2), np.zeros((2, 40, 2, 16), bf16)
    assert mamba2(**given, seq_idx=SEQ_IDX.astype(np.int64), out=out) is out
    assert (out == mamba2(**given, seq_idx=SEQ_IDX)).all() and out.any()
    apart = np.zeros((2, 80, 2, 16), bf16)[:, :40]
    with pytest.raises(ValueError, match="^out: with seq_idx its batches must be contiguous in memory"):
        mamba2(**given, seq_idx=SEQ_IDX, out=apart)


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
def test_packed_sequences_that_cannot_be(options, message):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        mamba2(**inputs(40, 16, 16, batch=2, heads=2), **options)


@pytest.mark.parametrize("traced", ["x", "seq_idx"])
def test_packed_sequences_cannot_be_traced(traced):
    """By JAX, which has no numbers of the one or cannot take those of the other."""
    jax = pytest.importorskip("jax")
    given = inputs(40, 16, 16, batch=2, heads=2) | {"seq_idx": SEQ_IDX}
    with pytest.raises(NotImplementedError, match="^seq_idx: its numbers cannot be read while the call is traced"):
        jax.jit(lambda x: mamba2(**given | {traced: x}))(given[traced])


@pytest.mark.parametrize("name", ["dt", "B", "C", "z", "out"])
def test_packed_sequences_whose_axes_are_others(name):
    """Joined they would have as many tokens as x."""
    given = inputs(40, 16, 16, batch=2, heads=2)
    given |= {"z": given["x"], "out": np.zeros_like(given["x"])}
    turned = np.ascontiguousarray(given[name].swapaxes(0, 1))
    with pytest.raises(ValueError, match=rf"^{name}: must have the axes B, S of x: {name}.shape=\(40, 2, "):
        mamba2(**given | {name: turned}, seq_idx=SEQ_IDX)
