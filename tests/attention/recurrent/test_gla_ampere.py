"""attention.gla by chunks on any GPU since Ampere (family="sm_80", gla_ampere.py), against its recurrence in float64. Packed
sequences among poison, arrays that are not aligned, layouts and dtypes of decays: test_members.py; raw gates:
test_raw_gates.py."""

import numpy as np
import pytest
from members import BF16, FP16, draw_model_decays
from places import OnInterpreter

from attention import reference
from attention.plans.recurrent import gla_chunks, token_loop
from attention.public.linear_family import gla, linear

F32 = np.float32


@pytest.fixture(autouse=True)
def in_chunks(monkeypatch, nothing_known):
    """No call is served by the token loop."""
    monkeypatch.setattr(token_loop, "launch", lambda *_, **__: pytest.fail("the token loop was launched"))


def inputs(length, key_dim=64, value_dim=48, dtype=BF16, heads=1, key_heads=1, batch=1, gate=None):
    """The arguments of a call: q, k, v, and decays that are all `gate`, by default as models have them."""
    rng = np.random.default_rng(length)
    q, k = rng.standard_normal((2, batch, length, key_heads, key_dim)).astype(dtype)
    v, shape = rng.standard_normal((batch, length, heads, value_dim)).astype(dtype), (batch, length, heads, key_dim)
    decay = draw_model_decays(shape, extremes=False, seed=length) if gate is None else np.full(shape, gate, F32)
    return {"q": q, "k": k, "v": v, "decay": decay}


def check(place, args, sequences=None, **options):
    """Compare outputs, into poison, and the last state with the reference, from an initial state."""
    (batch, _, heads, value_dim), key_dim = args["v"].shape, args["q"].shape[-1]
    start = np.random.default_rng(1).standard_normal((sequences or batch, heads, key_dim, value_dim)).astype(F32)
    args = args | {"initial_state": start}
    on, out = {name: place.put(x) for name, x in args.items()}, place.put(np.full_like(args["v"], np.nan))
    actual, state = gla(**on, out=out, return_state=True, family="sm_80", **options)
    assert actual is out
    (ref, last), (low, _) = (reference.linear(**args, **options, low=low) for low in (False, True))
    reference.assert_close(place.get(out), ref, low)
    np.testing.assert_allclose(place.get(state), last, rtol=0, atol=2**-7 * np.abs(last).max(initial=1e-30))
    return place.get(out), place.get(state)


SIZES = [
    (1, 16, 16, BF16), (15, 64, 128, FP16), (17, 128, 64, BF16), (64, 80, 144, BF16), (65, 128, 128, FP16),
    (129, 112, 208, BF16),
]  # fmt: skip


@pytest.mark.smoke
@pytest.mark.parametrize(("length", "key_dim", "value_dim", "dtype"), SIZES)
def test_sizes(place, length, key_dim, value_dim, dtype):
    """Lengths at the edges of blocks of 16 tokens and of chunks; one block of 128 columns and two."""
    check(place, inputs(length, key_dim, value_dim, dtype))


def test_batches_of_value_heads_that_share_keys(place):
    check(place, inputs(20, heads=4, key_heads=2, batch=2))


def test_without_states(place):
    """Neither an initial state nor the last one; with another scale, and heads before tokens."""
    args = inputs(70, 16, 16, heads=2, key_heads=2)
    turned = {name: place.put(x.swapaxes(1, 2).copy()) for name, x in args.items()}
    out = place.get(gla(**turned, scale=-0.7, layout="bhsd", family="sm_80")).swapaxes(1, 2)
    ref, low = (reference.linear(**args, scale=-0.7, low=low)[0] for low in (False, True))
    reference.assert_close(out, ref, low)


def test_packed_sequences_of_whole_chunks_and_none(place):
    """The last state of one without tokens is its initial one."""
    args = inputs(129, 16, 16) | {"cu_seqlens": np.array([0, 64, 64, 129, 129], np.int32)}
    _, state = check(place, args, sequences=4)
    start = np.random.default_rng(1).standard_normal(state.shape).astype(F32)
    assert (state[[1, 3]] == start[[1, 3]]).all()


@pytest.mark.parametrize("packed", [False, True])
def test_segments(place, monkeypatch, packed):
    """Three, of which one has a chunk that is shorter, or no tokens."""
    monkeypatch.setattr(gla_chunks, "choose_segments", lambda *_: 3)
    more = {"cu_seqlens": np.array([0, 3, 150], np.int32)} if packed else {}
    check(place, inputs(150, 80, 144, heads=2) | more, sequences=2 if packed else None)


# ---- gates ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("gate", [0.0, -0.05, -1.0, -5.0, -9.0, -1e4, -np.inf])
def test_equal_gates(place, gate, dtype):
    """None; what one reference a block holds, and what none does."""
    check(place, inputs(70, 16, 16, dtype, gate=gate))


def test_model_decays_with_extremes(place):
    """A channel that keeps everything, one that forgets at once, and tokens before which nothing counts."""
    args = inputs(130)
    check(place, args | {"decay": draw_model_decays(args["decay"].shape)})


@pytest.mark.parametrize("tokens", [[0], [15, 16], [17, 34], [33], [40, 47, 63]], ids=str)
def test_tokens_that_forget(place, tokens):
    """At edges of blocks, in neighbouring ones, and where a later half begins."""
    args = inputs(70, 16, 16, gate=-0.05)
    args["decay"][:, tokens] = -np.inf
    check(place, args)


@pytest.mark.parametrize(("dtype", "gate", "between"), [(BF16, -5.0, -20.0), (FP16, -0.9, -4.0)], ids=str)
def test_a_gate_between_blocks_beside_gentler_ones(place, dtype, gate, between):
    """Decays from one block's reference to the next are too strong for a dtype, those of each block are not."""
    args = inputs(64, 16, 16, dtype, gate=gate)
    args["decay"][:, ::16] = between
    check(place, args)


def test_gates_that_differ(place):
    """All sizes in one chunk, after one without decays."""
    args = inputs(140, 128, gate=0)
    draw = np.random.default_rng(2).random(args["decay"][:, 64:].shape)
    sizes = np.select([draw < 0.1, draw < 0.2, draw < 0.5, draw < 0.8], [-np.inf, -1e4, 0, -5], -0.1)
    args["decay"][:, 64:] = sizes
    check(place, args)


def test_infinite_scores_of_later_keys_stay_away(place):
    """A query does not meet later keys, whose decayed product overflows."""
    args = inputs(32, 16, 16, gate=-7.0)
    args["k"][:, 15], args["q"][:, 0] = 1e3, 1e3
    check(place, args)


# ---- plans -----------------------------------------------------------------------------------------------------------
def test_what_chunks_serve():
    """Keys of up to 128 channels, if there are tokens."""
    problem = lambda **extents: lambda *names: tuple(extents[name] for name in names)
    assert gla_chunks.serves_gla_chunks(problem(batch=2, seqlen=1, key_dim=128))
    assert not gla_chunks.serves_gla_chunks(problem(batch=2, seqlen=1, key_dim=144))
    assert not gla_chunks.serves_gla_chunks(problem(batch=2, seqlen=0, key_dim=128))


def test_wide_keys_token_by_token(place, monkeypatch):
    monkeypatch.undo()
    check(place, inputs(20, 144, 16))


def test_few_heads_are_cut_into_segments(monkeypatch):
    """As many as a GPU has room for; a first launch computes local states, a second one the states before segments."""
    counted = []
    monkeypatch.setattr(gla_chunks, "choose_segments", lambda *args: counted.append(args) or 1)
    linear(**inputs(5, 16, 144, heads=2), family="sm_80")
    ((items, *widths, chunks, resident, _),) = counted
    assert (items, *widths, chunks) == (4, 1, 1, 0) and resident > 1


def test_as_compiled(as_compiled):
    """The PTX: a chunk with references, one that is halved, and the edge of a sequence."""
    as_compiled("sm_80")
    args = inputs(70, 16, 16)
    args["decay"][:, 66] = -np.inf
    check(OnInterpreter(), args | {"cu_seqlens": np.array([0, 3, 70], np.int32)}, sequences=2)
