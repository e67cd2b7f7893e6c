"""attention.delta_rule against its recurrence in float64, in the interpreter and on the card."""

import numpy as np
import pytest
from delta_cases import BF16, DeltaRuleTests, agree, inputs

from attention import reference
from attention.kernels.delta import delta_hopper, delta_transform_hopper, delta_walk_hopper
from attention.plans.recurrent import token_loop
from attention.public.delta_rules import delta_rule
from tiles import bf16
from tiles.compiling.compiler import compile_kernel
from tiles.launching.arguments import signature


class TestDeltaRule(DeltaRuleTests):
    """Decays are a number for each token and head."""


@pytest.mark.smoke
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 128, 300])
def test_lengths_around_every_chunk(place, length, gated):
    *arguments, decay = inputs(1, length, 1, 64, 64)
    agree(place, *arguments, decay if gated else None)


def test_key_dim_256(place):
    agree(place, *inputs(1, 20, 2, 256, 64))


def test_decays_of_heads(place):
    """Give what equal decays of all tokens give."""
    q, k, v, beta, _ = inputs(2, 100, 2, 64, 64)
    decay = np.array([-0.05, -0.5], np.float32)
    out, _ = agree(place, q, k, v, beta, decay)
    of_tokens = np.broadcast_to(decay, (2, 100, 2)).copy()
    assert (agree(place, q, k, v, beta, of_tokens)[0] == out).all()


@pytest.mark.parametrize("elements", [1, 2, 4])
@pytest.mark.parametrize("channels", [False, True])
def test_unaligned_rows(elements, channels):
    """Addresses and strides that are multiples of so many elements only, with NaN between rows: chunk kernels with
    cp.async take them."""
    *args, decay = inputs(1, 20, 2, 64, 64)
    decay = np.full((1, 20, 2, 64), -0.1, np.float32) if channels else decay
    unaligned = []
    for x in args[:3]:
        unaligned.append(np.full((*x.shape[:-1], 64 + elements), np.nan, BF16)[..., elements:])
        unaligned[-1][...] = x
    out = np.full((1, 20, 2, 64 + elements), np.nan, BF16)
    delta_rule(*unaligned, args[3], decay=decay, out=out[..., elements:])
    arrays = dict(zip(("q", "k", "v", "beta", "decay"), (*args, decay), strict=True))
    reference.assert_close(out[..., elements:], reference.linear(**arrays)[0], reference.linear(**arrays, low=True)[0])
    assert np.isnan(out[..., :elements].astype(np.float32)).all(), "columns beside out were written"


@pytest.mark.parametrize("length", [1, 70])
def test_decays_of_channels(place, length):
    """Kimi delta attention has such decays."""
    q, k, v, beta, _ = inputs(2, length, 2, 64, 64)
    decay = -0.2 * np.random.default_rng(2).standard_exponential((2, length, 2, 64), np.float32)
    agree(place, q, k, v, beta, decay)


@pytest.mark.parametrize("gate", [1, 50, 1e-4])
def test_gates_of_any_size(place, gate):
    """No exponent that could overflow is positive, however large the sums of gates are."""
    q, k, v, beta, decay = inputs(1, 200, 1, 64, 64, gate=gate)
    decay[0, 100:120] = -50
    decay[0, 130:160] = 0
    agree(place, q, k, v, beta, decay)


def test_repeated_keys(place):
    """A and its powers are as large as they can be. The reference with low=True corrects the rounding error of a token in the
    next token, chunks in the next chunk: hence the factor."""
    q, k, v, beta, _ = inputs(1, 200, 1, 64, 64)
    k[:] = k[:, :1]
    beta[:] = 1
    agree(place, q, k, v, beta, None, factor=4)


def test_dtypes_of_beta_and_decay(place):
    q, k, v, beta, decay = inputs(1, 100, 2, 64, 64)
    agree(place, q, k, v, beta.astype(BF16), decay.astype(BF16))


ENDS = [[0, 64, 128], [0, 1, 70, 70, 200, 263], [0, 300]]
PACKED = [(ENDS[0], False), (ENDS[1], True), (ENDS[2], True)]
PACKED += [pytest.param(ends, not gated, marks=pytest.mark.release) for ends, gated in PACKED]


@pytest.mark.parametrize(("ends", "gated"), PACKED, ids=str)
def test_packed_sequences(place, ends, gated):
    """Each has the outputs and the state that it has by itself, also next to NaN."""
    ends = np.array(ends, np.int32)
    q, k, v, beta, decay = inputs(1, ends[-1], 1, 64, 128)
    decay = decay if gated else None
    start = 0.3 * np.random.default_rng(1).standard_normal((len(ends) - 1, 1, 64, 128), np.float32)
    out, state = agree(place, q, k, v, beta, decay, cu_seqlens=ends, initial_state=start)
    for n in range(0, len(ends) - 1, 2):
        own_tokens = slice(ends[n], ends[n + 1])
        poisoned = [np.full_like(x, np.nan) for x in (q, k, v, beta)] + [np.full_like(decay, np.nan) if gated else None]
        for x, p in zip((q, k, v, beta, decay), poisoned, strict=True):
            if p is not None:
                p[:, own_tokens] = x[:, own_tokens]
        put = [None if x is None else place.put(x) for x in poisoned]
        actual, last = delta_rule(
            *put[:4], decay=put[4], cu_seqlens=place.put(ends), initial_state=place.put(start), return_state=True
        )
        assert (place.get(actual)[:, own_tokens] == out[:, own_tokens]).all()
        assert (place.get(last)[n] == state[n]).all()


def test_no_token():
    q, k, v, beta, decay = inputs(1, 0, 2, 64, 64)
    start = np.random.default_rng(1).standard_normal((1, 2, 64, 64), np.float32)
    out, state = delta_rule(q, k, v, beta, decay=decay, initial_state=start, return_state=True)
    assert out.shape == v.shape and (state == start).all()


def test_bad_arguments():
    q, k, v, beta, decay = inputs(1, 10, 2, 64, 64)
    with pytest.raises(ValueError, match="beta"):
        delta_rule(q, k, v, beta[:, :5])
    with pytest.raises(ValueError, match="decay"):
        delta_rule(q, k, v, beta, decay=decay[..., None, None])
    with pytest.raises(TypeError, match="beta"):
        delta_rule(q, k, v, None)


def test_another_schedule(monkeypatch):
    """In any order of the warps."""
    monkeypatch.setenv("TILES_SEED", "0")
    place = type("Here", (), {"put": staticmethod(lambda x: x), "get": staticmethod(lambda x: x)})
    agree(place, *inputs(1, 200, 1, 64, 128))


@pytest.mark.parametrize(("key_dim", "value_dim", "gate"), [(256, 64, 0.1), (208, 80, 0.1), (256, 16, 3)])
def test_wide_keys(place, monkeypatch, nothing_known, key_dim, value_dim, gate):
    """With one consumer; strong chunks, too."""
    monkeypatch.setattr(token_loop, "launch", lambda *_: pytest.fail("the token loop was launched"))
    agree(place, *inputs(1, 150, 1, key_dim, value_dim, gate=gate))


OTHERS = [
    (delta_hopper, delta_hopper.Config(256, bf16, True)),
    (delta_transform_hopper, delta_transform_hopper.Config(128, bf16, True, l2norm=True)),
    (delta_walk_hopper, delta_walk_hopper.Config(128, bf16, True, True)),
]
SHIPPED = [(delta_hopper, delta_hopper.Config(128, bf16, True, True, consumers=2))]
SHIPPED += [pytest.param(*kernel, marks=pytest.mark.release) for kernel in OTHERS]


@pytest.mark.parametrize(("kernels", "config"), SHIPPED, ids=lambda x: str(x) if hasattr(x, "threads") else "")
def test_machine_code(kernels, config):
    """No spills, and no wgmma serialised by ptxas."""
    kernel, _ = kernels.make(config)
    compiled = compile_kernel(kernel, signature(kernel), "sm_90a")
    assert (compiled.spill_bytes, compiled.local_bytes, compiled.warnings) == (0, 0, [])
