"""final_states of the delta rule against its recurrence in float64."""

import itertools

import numpy as np
import pytest
from delta_cases import BF16, FP16, STATE, inputs
from places import OnInterpreter
from poison import Packing, as_on_a_device, poisoned

from attention import reference
from attention.parts.delta import delta_config
from attention.parts.recurrent.gate_formulas import BetaFormula
from attention.public.delta_rules import final_states
from tiles import bf16, fp16


def agree(place, k, v, beta, decay, more=None, ends=None, **options):
    """Compare the final state from [S | I], where I has `more` columns, with the reference: each part within the tolerance of
    delta_rule's states, or relative to 2^-6 if it has decayed below that."""
    heads, value_dim, key_dim = *v.shape[2:], k.shape[3]
    sequences, more = len(k) if ends is None else len(ends) - 1, key_dim if more is None else more
    start = np.zeros((sequences, heads, key_dim, value_dim + more), np.float32)
    start[..., :value_dim] = 0.3 * np.random.default_rng(1).standard_normal((sequences, heads, key_dim, value_dim), np.float32)
    start[..., value_dim:] = np.eye(key_dim, more)
    put = lambda x: None if x is None else place.put(x)
    options = {"decay": put(decay), "cu_seqlens": put(ends), **options}
    final = place.get(final_states(*map(put, (k, v, beta, start)), **options))
    wide = np.concatenate([v.astype(np.float32), np.zeros((*v.shape[:3], more), np.float32)], -1)
    _, last = reference.linear(k, k, wide, beta=beta, decay=decay, initial_state=start, cu_seqlens=ends)
    for columns in slice(value_dim), slice(value_dim, None):
        actual, want = final[..., columns], last[..., columns]
        assert np.abs(actual - want).max(initial=0) <= 2 * STATE * np.abs(want).max(initial=2**-6)


@pytest.mark.parametrize(("key_dim", "value_dim", "dtype"), [(128, 128, BF16), (64, 64, FP16), (16, 16, BF16), (80, 208, FP16)])
def test_sizes_of_keys_and_values(place, key_dim, value_dim, dtype):
    _, k, v, beta, decay = inputs(2, 130, 1, key_dim, value_dim, dtype)
    agree(place, k, v, beta, decay)


@pytest.mark.parametrize("length", [0, 1, 64, 65, 300])
def test_lengths(place, length):
    _, k, v, beta, _ = inputs(1, length, 1, 64, 64)
    agree(place, k, v, beta, None, more=0 if length == 64 else None)


def test_strong_decays_of_shared_keys(place):
    """A strong chunk, one with a decay of -inf, and decays of heads."""
    _, k, v, beta, decay = inputs(1, 200, 2, 64, 64, gate=2, key_heads=1)
    decay[0, 70:75] = -np.inf
    agree(place, k, v, beta, decay)
    agree(place, k, v, beta, np.array([-0.01, -50], np.float32))


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_packed_sequences(place, monkeypatch, gated):
    """An empty one between two, with poison around them: each has the final state that it has by itself."""
    packing = Packing([30, 0, 65])
    _, k, v, beta, decay = inputs(1, 95, 1, 64, 64)
    arrays = [k, v, beta, decay if gated else None]
    agree(place, *arrays, ends=packing.cu_seqlens)
    as_on_a_device(monkeypatch)
    start = 0.3 * np.random.default_rng(1).standard_normal((3, 1, 64, 64), np.float32)
    of_all = poisoned((len(packing.ends) - 1, *start.shape[1:]), start.dtype)
    of_all[packing.which] = start
    runs = (lambda x: x, start, packing.cu_seqlens), (packing.spread, of_all, packing.ends)
    final = []
    for lay, begin, ends in runs:
        k, v, beta, decay = (None if x is None else place.put(lay(x)) for x in arrays)
        final.append(place.get(final_states(k, v, beta, place.put(begin), decay=decay, cu_seqlens=place.put(ends))))
    assert (final[1][packing.which] == final[0]).all() and (final[0][1] == start[1]).all()


def test_skipped_chunks(place):
    """The initial state is skipped with them. If more chunks are skipped than there are, the final state is 0."""
    _, k, v, beta, decay = inputs(1, 400, 2, 64, 64, gate=0.5)
    decay[..., 1] *= 2e-3
    start = np.random.default_rng(1).standard_normal((1, 2, 64, 64), np.float32)
    put, skipped = place.put, np.array([[[4], [0]]], np.float32)
    unskipped = place.get(final_states(*map(put, (k, v, beta, start)), decay=put(decay)))
    final = place.get(final_states(*map(put, (k, v, beta, start)), decay=put(decay), skipped=put(skipped)))
    assert np.abs(final - unskipped).max() <= 2**-20
    none = place.get(final_states(*map(put, (k, v, beta, start)), decay=put(decay), skipped=put(skipped + 5)))
    assert (none[:, 0] == 0).all() and np.abs(none[:, 1]).max() > 0


@pytest.mark.parametrize(("key_dim", "length"), [(64, 66), (144, 7)])
def test_any_gpu_since_ampere(place, key_dim, length):
    """By chunks; wide keys token by token."""
    _, k, v, beta, decay = inputs(1, length, 2, key_dim, 32, key_heads=1)
    agree(place, k, v, beta, decay, family="sm_80")


def test_too_few_columns():
    _, k, v, beta, _ = inputs(1, 20, 1, 64, 32)
    with pytest.raises(ValueError, match="initial_state: must have at least as many columns as v"):
        final_states(k, v, beta, np.zeros((1, 1, 64, 16), np.float32))


@pytest.mark.release
def test_as_compiled_for_hopper(as_compiled):
    as_compiled("sm_90a")
    _, k, v, beta, decay = inputs(1, 70, 1, 64, 64)
    agree(OnInterpreter(), k, v, beta, decay)


NAMES = [
    (delta_config.DeltaConfig(64, bf16, False), "Dk 64 bf16"),
    (delta_config.NormedDeltaConfig(64, bf16, True, True), "Dk 64 bf16, gated, varlen"),
    (delta_config.NormedDeltaConfig(64, fp16, False, l2norm=True), "Dk 64 fp16, l2norm"),
    (delta_config.RawDeltaConfig(128, bf16, True, beta=BetaFormula(2.0)), "Dk 128 bf16, gated, beta 2.0 sigmoid"),
    (delta_config.DeltaScanConfig(128, bf16, False, consumers=2), "Dk 128 bf16, consumers 2"),
]


@pytest.mark.parametrize(("config", "name"), NAMES, ids=[name for _, name in NAMES])
def test_names_of_configurations(config, name):
    """What differs is in the name, and what is not there is not."""
    assert str(config) == name


def test_sizes_of_configurations():
    """float16 with everything only. Two consumers have twice the columns, beside two warpgroups that work ahead."""
    assert [*delta_config.delta_sizes(False)] == [(64, bf16), (128, bf16)]
    assert {*delta_config.delta_sizes(True)} == {*itertools.product((64, 128), (bf16, fp16))}
    one, two = (delta_config.DeltaScanConfig(64, bf16, False, consumers=n) for n in (1, 2))
    assert (one.columns, one.threads, two.columns, two.threads) == (64, 384, 128, 512)
    assert one.values.cols == 64 and two.values.cols == two.state.rows == 128 and two.key.cols == two.state.cols == 64
