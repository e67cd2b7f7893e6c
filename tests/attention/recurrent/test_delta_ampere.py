"""attention.delta_rule by chunks on any GPU since Ampere (family="sm_80"), with decays of any kind, against its recurrence in
float64. Packed sequences among poison: test_members.py; raw gates: test_raw_gates.py; arrays that are not aligned:
test_delta_rule.py."""

import numpy as np
import pytest
from delta_cases import BF16, FP16, agree
from gradient_cases import relative_rms
from places import OnInterpreter
from poison import as_on_a_device
from test_delta_rule import inputs as inputs_of_tokens
from test_kda_hopper import inputs as inputs_of_channels

from attention import reference
from attention.plans.delta.delta_chunks import serves_delta_chunks
from attention.plans.recurrent import token_loop
from attention.public.delta_rules import delta_rule


@pytest.fixture(autouse=True)
def in_chunks(monkeypatch, nothing_known):
    """No call is served by the token loop."""
    monkeypatch.setattr(token_loop, "launch", lambda *_, **__: pytest.fail("the token loop was launched"))


def inputs(decay, length, heads=1, key_dim=64, value_dim=64, dtype=BF16, key_heads=None, batch=1):
    """q, k, v, beta and decays of this kind."""
    draw = inputs_of_channels if decay == "channel" else inputs_of_tokens
    *actual, gates = draw(batch, length, heads, key_dim, value_dim, dtype, key_heads)
    return *actual, {"none": None, "head": np.linspace(-0.5, -0.01, heads, dtype=np.float32)}.get(decay, gates)


def check(place, decay, *shape, **more):
    """Compare outputs and the last state of such inputs with the reference, from an initial state."""
    q, k, v, beta, gates = inputs(decay, *shape, **more)
    states = v.shape[0], v.shape[2], q.shape[3], v.shape[3]
    start = 0.3 * np.random.default_rng(1).standard_normal(states, np.float32)
    return agree(place, q, k, v, beta, gates, initial_state=start, family="sm_80")


LENGTHS = [(1, "token"), (2, "channel"), (63, "none"), (64, "head"), (65, "token"), (65, "channel"), (129, "none")]


@pytest.mark.smoke
@pytest.mark.parametrize(("length", "decay"), LENGTHS)
def test_lengths_around_every_chunk(place, length, decay):
    check(place, decay, length)


SIZES = [
    (128, 128, "token", BF16), (128, 80, "channel", FP16), (80, 208, "head", FP16), (16, 16, "none", BF16),
    (112, 48, "channel", BF16),
]  # fmt: skip


@pytest.mark.parametrize(("key_dim", "value_dim", "decay", "dtype"), SIZES)
def test_sizes(place, key_dim, value_dim, decay, dtype):
    """Blocks of columns that are full, and others; two chunks."""
    check(place, decay, 66, key_dim=key_dim, value_dim=value_dim, dtype=dtype)


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_batches_of_value_heads_that_share_keys(place, decay):
    check(place, decay, 20, 4, key_heads=2, batch=2)


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_without_states(place, decay):
    """Neither an initial state nor the last one; with another scale, and heads before tokens."""
    q, k, v, beta, gates = inputs(decay, 70, 2, key_dim=16, value_dim=16)
    want, _ = agree(place, q, k, v, beta, gates, scale=0.7, family="sm_80")
    turned = [place.put(x.swapaxes(1, 2).copy()) for x in (q, k, v, beta, gates)]
    outputs = delta_rule(*turned[:4], decay=turned[4], scale=0.7, layout="bhsd", family="sm_80")
    assert (place.get(outputs).swapaxes(1, 2) == want).all()


@pytest.mark.parametrize("decay", ["none", "channel"])
def test_packed_sequences_of_whole_chunks_and_none(place, monkeypatch, decay):
    """The last state of one without tokens is its initial one; the outputs of padding are 0."""
    as_on_a_device(monkeypatch)
    start = 0.3 * np.random.default_rng(1).standard_normal((4, 1, 16, 16), np.float32)
    more = {"cu_seqlens": np.array([0, 64, 64, 129, 129], np.int32), "initial_state": start, "family": "sm_80"}
    tokens = inputs(decay, 140, key_dim=16, value_dim=16)
    out, state = agree(place, *(x if x is None else x[:, :129] for x in tokens), **more)
    assert (state[[1, 3]] == start[[1, 3]]).all()
    put = lambda x: place.put(x) if isinstance(x, np.ndarray) else x
    *arrays, gates = map(put, tokens)
    padded = place.get(delta_rule(*arrays, decay=gates, **{name: put(x) for name, x in more.items()}))
    assert (padded[:, :129] == out).all() and not padded[:, 129:].any()


# ---- beta, keys and gates -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("beta", "decay"), [(0.0, "channel"), (1.0, "none"), (2.0, "token"), (2.0, "channel")])
def test_equal_betas(place, beta, decay):
    """0 writes nothing; 1 replaces what a key has; 2 reflects."""
    q, k, v, betas, gates = inputs(decay, 70, value_dim=16)
    betas[:] = beta
    out, state = agree(place, q, k, v, betas, gates, family="sm_80")
    assert beta or not (out.any() or state.any())


@pytest.mark.parametrize(("beta", "decay"), [(1.0, "channel"), (1.9, "token"), (1.99, "channel"), (2.0, "none")])
def test_equal_keys(place, beta, decay):
    """Each token writes to what the one before it has written, and rounded terms cancel."""
    q, k, v, betas, gates = inputs(decay, 130, value_dim=16)
    k[:], betas[:] = k[:, :1], beta
    if gates is not None:
        gates[:] = 0
    put = [None if x is None else place.put(x) for x in (q, k, v, betas, gates)]
    out = place.get(delta_rule(*put[:4], decay=put[4], family="sm_80"))
    assert relative_rms(out, reference.linear(q, k, v, beta=betas, decay=gates)[0]) < 0.04


GATES = [(0.0, "token"), (-5.0, "channel"), (-1e4, "token"), (-np.inf, "channel")]


@pytest.mark.parametrize(("gate", "decay"), GATES)
def test_equal_gates(place, gate, decay):
    q, k, v, beta, gates = inputs(decay, 70, key_dim=16, value_dim=16)
    gates[:] = gate
    agree(place, q, k, v, beta, gates, family="sm_80")


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_gates_that_differ(place, decay):
    """All sizes in one chunk; of channels, some keep everything and one forgets at once."""
    q, k, v, beta, gates = inputs(decay, 70, key_dim=16, value_dim=16)
    draw = np.random.default_rng(2).random(gates.shape)
    gates[:] = np.where(
        draw < 0.1, -np.inf, np.where(draw < 0.2, -1e4, np.where(draw < 0.5, 0, np.where(draw < 0.8, -5, -0.1)))
    )
    if decay == "channel":
        gates[..., ::3], gates[..., 1] = 0, -1e4
    agree(place, q, k, v, beta, gates, family="sm_80")


@pytest.mark.parametrize(("decay", "great"), [("token", "values"), ("channel", "keys"), ("channel", "queries")])
def test_the_range_of_float16(place, decay, great):
    """Intermediate results overflow no sooner than arrays and outputs."""
    q, k, v, beta, gates = inputs(decay, 70, dtype=FP16)
    of_q, of_k, of_v = {"values": (1, 1, 8e3), "keys": (1 / 30, 30, 1e3), "queries": (100, 0.01, 1)}[great]
    beta = beta / (1e3 if great == "keys" else 1)
    q, k, v = ((x.astype(np.float32) * factor).astype(FP16) for x, factor in ((q, of_q), (k, of_k), (v, of_v)))
    agree(place, q, k, v, beta, gates, family="sm_80")


# ---- plans ---------------------------------------------------------------------------------------------------------------
def test_what_chunks_serve():
    """Keys of up to 128 channels, if there are tokens."""
    problem = lambda **extents: lambda *names: tuple(extents[name] for name in names)
    assert serves_delta_chunks(problem(batch=2, seqlen=1, key_dim=128))
    assert not serves_delta_chunks(problem(batch=2, seqlen=1, key_dim=129))
    assert not serves_delta_chunks(problem(batch=2, seqlen=0, key_dim=128))


@pytest.mark.parametrize("decay", ["token", "channel"])
def test_wide_keys_token_by_token(place, monkeypatch, decay):
    monkeypatch.undo()
    check(place, decay, 20, 2, key_dim=144, value_dim=16, key_heads=1)


def test_as_compiled(as_compiled):
    """The PTX for packed sequences; KDA's, for a walk over two chunks: test_members.py."""
    as_compiled("sm_80")
    ends = np.array([0, 3, 20], np.int32)
    agree(OnInterpreter(), *inputs("token", 20, key_dim=16, value_dim=16), family="sm_80", cu_seqlens=ends)
