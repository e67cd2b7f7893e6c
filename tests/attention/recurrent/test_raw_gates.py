"""attention.gates: raw gates, raw beta and qk_l2norm, in every kernel that computes them, against the recurrence of what they
mean."""

import itertools
import math

import numpy as np
import pytest
from members import BF16, F32, FP16
from poison import Packing, as_on_a_device

import attention
from attention import gates, reference
from attention.kernels.delta import kda_transform_hopper
from attention.plans.recurrent import token_loop
from attention.public.delta_rules import delta_rule
from attention.public.linear_family import gla, linear
from attention.public.token_steps import linear_step

HEADS, KEY_HEADS, KEY_DIM, VALUE_DIM = 2, 1, 64, 48
RAW = {
    "softplus": gates.softplus,
    "sigmoid": gates.sigmoid,
    "sigmoid, -2": lambda *x: gates.sigmoid(*x, lower=-2),
    "logsigmoid": lambda a, A_log, dt_bias: gates.logsigmoid(a, dt_bias),
    "softplus alone": lambda a, A_log, dt_bias: gates.softplus(a),
}
FORMULAS = {  # by other words than the module's
    "softplus": lambda a, A, bias: -np.exp(A) * np.log1p(np.exp(a + bias)),
    "sigmoid": lambda a, A, bias: -5 / (1 + np.exp(-np.exp(A) * (a + bias))),
    "sigmoid, -2": lambda a, A, bias: -2 / (1 + np.exp(-np.exp(A) * (a + bias))),
    "logsigmoid": lambda a, A, bias: np.log(1 / (1 + np.exp(-(a + bias)))) / 16,
    "softplus alone": lambda a, A, bias: -np.log1p(np.exp(a)),
}


def draw(length, channels=False, batch=1, dtype=BF16, seed=0):
    """q, k, v, beta's x, and (x, A_log, dt_bias) of a gate."""
    rng, shape = np.random.default_rng(seed), (batch, length, HEADS)
    q, k = (2 * rng.standard_normal((2, batch, length, KEY_HEADS, KEY_DIM))).astype(BF16)
    v, b = rng.standard_normal((*shape, VALUE_DIM)).astype(BF16), rng.standard_normal(shape).astype(dtype)
    last = (KEY_DIM,) if channels else ()
    A_log, dt_bias = np.log(rng.uniform(0.05, 2, HEADS)).astype(F32), rng.standard_normal((HEADS, *last)).astype(dtype)
    return q, k, v, b, (rng.standard_normal((*shape, *last)).astype(dtype), A_log, dt_bias)


def meaning(name, a, A_log, dt_bias):
    """The gate that these raw values mean, in float64."""
    per_channel = a.ndim == 4
    A = A_log.astype(float)[:, None] if per_channel else A_log.astype(float)
    return FORMULAS[name](a.astype(float), A, dt_bias.astype(float))


def normalised(x):
    x = x.astype(float)
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def agree(place, name, length, member=linear, channels=False, doubled=False, dtype=BF16, l2norm=True, **options):
    """Call linear or delta_rule with raw inputs, and compare outputs and the state with the recurrence of what they mean."""
    q, k, v, b, of_gate = draw(length, channels, dtype=dtype)
    if not l2norm:
        q, k = (normalised(x).astype(BF16) for x in (q, k))
    raw = RAW[name](*(place.put(x) for x in of_gate))
    more = {"beta": gates.beta(place.put(b), doubled=doubled)} if member is delta_rule else {}
    put = {key: place.put(x) if isinstance(x, np.ndarray) else x for key, x in options.items()}
    inputs = [place.put(x) for x in (q, k, v)]
    out, state = member(*inputs, decay=raw, **more, qk_l2norm=l2norm, return_state=True, **put)
    options = {key: x for key, x in options.items() if key != "family"} | {"decay": meaning(name, *of_gate)}
    if more:
        options["beta"] = (2 if doubled else 1) / (1 + np.exp(-b.astype(float)))
    exact, rounded = (q, k), (q, k)
    if l2norm:
        exact = normalised(q), normalised(k)
        rounded = [x.astype(BF16) for x in exact]
    ref, last = reference.linear(*exact, v, **options)
    low, low_state = reference.linear(*rounded, v, low=True, **options)
    reference.assert_close(place.get(out), ref, low)
    assert np.abs(place.get(state) - last).max() <= 2 * np.abs(low_state - last).max() + 2.0**-8 * np.abs(last).max()
    return place.get(out)


# ---- the meaning -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("name", RAW)
def test_gates_mean_their_formulas(name, channels):
    """In NumPy, in torch, and with heads before tokens."""
    torch = pytest.importorskip("torch")
    _, _, _, b, of_gate = draw(5, channels, batch=2, dtype=F32)
    expected = meaning(name, *of_gate)
    np.testing.assert_allclose(gates.evaluate(RAW[name](*of_gate)), expected, rtol=1e-12)
    turned = of_gate[0].swapaxes(1, 2), *of_gate[1:]
    np.testing.assert_allclose(gates.evaluate(RAW[name](*turned), "bhsd").swapaxes(1, 2), expected, rtol=1e-12)
    in_torch = gates.evaluate(RAW[name](*map(torch.tensor, of_gate)))
    assert in_torch.dtype == torch.float32
    np.testing.assert_allclose(in_torch, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gates.evaluate(gates.beta(b, doubled=True)), 2 / (1 + np.exp(-b.astype(float))), rtol=1e-12)


def test_far_inputs_have_gates():
    """No overflow on the way: of x far from 0 the gate is its limit."""
    far = np.array([[[-1e4, 1e4]]])
    np.testing.assert_array_equal(gates.evaluate(gates.softplus(far)), [[[0, -1e4]]])
    np.testing.assert_array_equal(gates.evaluate(gates.sigmoid(far)), [[[0, -5]]])
    np.testing.assert_array_equal(gates.evaluate(gates.logsigmoid(far)), [[[-625, 0]]])


# ---- kernels ---------------------------------------------------------------------------------------------------------
WAYS = [  # name, member, channels, doubled, dtype of raw inputs, family
    ("softplus", delta_rule, False, False, BF16, None),
    ("sigmoid", delta_rule, True, False, BF16, None),
    ("softplus", delta_rule, True, True, F32, None),
    ("logsigmoid", delta_rule, False, True, FP16, None),
    ("sigmoid, -2", delta_rule, False, False, F32, "sm_80"),
    ("softplus", delta_rule, True, True, BF16, "sm_80"),
    ("softplus", linear, False, False, BF16, None),
    ("logsigmoid", linear, True, False, BF16, None),
    ("sigmoid", linear, True, False, F32, None),
    ("softplus alone", linear, False, False, FP16, None),
    ("softplus", linear, False, False, F32, "sm_80"),
    ("sigmoid, -2", linear, True, False, FP16, "sm_80"),
]


@pytest.mark.smoke
@pytest.mark.parametrize(("name", "member", "channels", "doubled", "dtype", "family"), WAYS)
def test_raw_inputs(place, name, member, channels, doubled, dtype, family):
    """With a last chunk that is shorter: what follows the last token has no gate."""
    agree(place, name, 70, member, channels, doubled, dtype, family=family)


def test_walk(place, monkeypatch, nothing_known):
    """Norms as factors of rows where a launch before the walk decays them."""
    launched = set()
    make = kda_transform_hopper.make
    monkeypatch.setattr(kda_transform_hopper, "make", lambda config: launched.add(config) or make(config))
    monkeypatch.setattr("attention.public.delta_rules.serves_channel_walk", lambda _: True)
    agree(place, "sigmoid", 70, delta_rule, True)
    assert [config.l2norm for config in launched] == [True]


SEGMENTED = [(delta_rule, False), (linear, True)]
SEGMENTED += [pytest.param(*case, marks=pytest.mark.release) for case in ((delta_rule, True), (linear, False))]


@pytest.mark.parametrize(("member", "channels"), SEGMENTED)
def test_segments(place, nothing_known, member, channels):
    """A sequence that is long enough for several segments, whose states other kernels compute."""
    agree(place, "softplus", 64 * 9 + 5, member, channels)


PACKED = [
    (delta_rule, True, None), (linear, True, None), (linear, False, "sm_80"),
    pytest.param(delta_rule, False, None, marks=pytest.mark.release),
    pytest.param(delta_rule, True, "sm_80", marks=pytest.mark.release),
]  # fmt: skip


@pytest.mark.parametrize(("member", "channels", "family"), PACKED)
def test_packed_sequences_among_poison(place, monkeypatch, member, channels, family):
    """Each sequence has the bits that it has by itself, next to others of which everything is NaN."""
    as_on_a_device(monkeypatch)
    packed = Packing([0, 1, 70], neighbour=2, nobodys=3)
    q, k, v, b, (a, *of_head) = draw(packed.cu_seqlens[-1], channels)
    call = lambda q, k, v, b, a, **more: member(
        *map(place.put, (q, k, v)),
        **({"beta": gates.beta(place.put(b))} if member is delta_rule else {}),
        decay=gates.sigmoid(place.put(a), *map(place.put, of_head)),
        qk_l2norm=True,
        family=family,
        **more,
    )
    tokens = q, k, v, b, a
    out = place.get(call(*map(packed.spread, tokens), cu_seqlens=place.put(packed.ends)))
    assert (out[:, packed.nobodys] == 0).all()
    for first, end in itertools.pairwise(packed.cu_seqlens):
        if end > first:
            alone = place.get(call(*(x[:, first:end].copy() for x in tokens)))
            assert (packed.gather(out)[:, first:end] == alone).all()


@pytest.mark.parametrize("channels", [False, True])
def test_linear_step_after_a_sequence(place, channels):
    """The token after 70 others, from their state."""
    q, k, v, b, (a, *of_head) = draw(71, channels)
    of_head = [place.put(x) for x in of_head]
    inputs = lambda at: [place.put(np.ascontiguousarray(x[:, at])) for x in (q, k, v, b, a)]
    x = inputs(slice(None, 70))
    _, state = delta_rule(*x[:3], gates.beta(x[3]), decay=gates.softplus(x[4], *of_head), qk_l2norm=True, return_state=True)
    x = inputs(70)
    raw = dict(beta=gates.beta(x[3]), decay=gates.softplus(x[4], *of_head))
    out = place.get(linear_step(state, *x[:3], **raw, qk_l2norm=True))
    options = {"decay": meaning("softplus", a, *map(place.get, of_head)), "beta": 1 / (1 + np.exp(-b.astype(float)))}
    ref, low = (reference.linear(normalised(q), normalised(k), v, **options, low=low)[0][:, 70] for low in (False, True))
    reference.assert_close(out, ref, low, factor=3)


def test_long_queries_and_keys_in_float16(place):
    """Whose products are beyond its range before they are normalised."""
    q, k, v, b, _ = draw(70)
    q, k, v = ((x.astype(F32) * factor).astype(FP16) for x, factor in ((q, 100), (k, 100), (v, 1)))
    out = place.get(delta_rule(*map(place.put, (q, k, v)), gates.beta(place.put(b)), qk_l2norm=True))
    exact, beta = [normalised(x) for x in (q, k)], 1 / (1 + np.exp(-b.astype(float)))
    low = reference.linear(*(x.astype(FP16) for x in exact), v, beta=beta, low=True)[0]
    reference.assert_close(out, reference.linear(*exact, v, beta=beta)[0], low)


def test_scale_and_layouts(place):
    """Heads before tokens, with another scale."""
    q, k, v, b, (a, *of_head) = draw(70, batch=2)
    of_head = [place.put(x) for x in of_head]
    call = lambda q, k, v, b, a, **more: delta_rule(
        q, k, v, gates.beta(b), decay=gates.sigmoid(a, *of_head), qk_l2norm=True, scale=0.5, **more
    )
    expected = place.get(call(*map(place.put, (q, k, v, b, a))))
    turned = [place.put(x.swapaxes(1, 2).copy()) for x in (q, k, v, b, a)]
    assert (place.get(call(*turned, layout="bhsd")).swapaxes(1, 2) == expected).all()


@pytest.mark.parametrize("length", [1, 16, 40])
@pytest.mark.parametrize("key_dim", [16, 208])
def test_lengths_of_queries_and_keys_alone(place, key_dim, length):
    """qk_l2norm without raw gates, for heads of any size."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 2, length, 3, key_dim)).astype(BF16)
    q[:, 0], v = 0, rng.standard_normal((2, length, 3, 32)).astype(BF16)
    out = place.get(linear(*map(place.put, (q, k, v)), qk_l2norm=True))
    exact = [normalised(x) for x in (q, k)]
    low = reference.linear(*(x.astype(BF16) for x in exact), v, low=True)[0]
    reference.assert_close(out, reference.linear(*exact, v)[0], low)


@pytest.mark.parametrize(("member", "channels"), [(delta_rule, False), (delta_rule, True), (linear, True)])
def test_no_pass_before_the_kernels(monkeypatch, nothing_known, member, channels):
    """Raw gates, raw beta and the norms of queries and keys go into the chunk kernels: one launch, and no memory."""
    monkeypatch.setattr(token_loop, "launch", lambda *_, **__: pytest.fail("the token loop was launched"))
    monkeypatch.setattr(gates, "evaluate", lambda *_: pytest.fail("gates were evaluated"))
    plans = []
    module = __import__(member.__module__, fromlist=["plan"])
    name = "plan_delta_rule" if member is delta_rule else "plan_linear"
    plan = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *x: plans.append(plan(*x)) or plans[-1])
    q, k, v, b, of_gate = draw(70, channels)
    more = {"beta": gates.beta(b)} if member is delta_rule else {}
    member(q, k, v, decay=gates.softplus(*of_gate), **more, qk_l2norm=True)
    ((steps, scratch, *_),) = plans
    assert len(steps) == 1 and not scratch


@pytest.mark.release  # the kernel: test_members.py
def test_as_compiled_for_hopper(as_compiled):
    """The PTX of the kernel that passes inverse norms through rings, for two chunks of which the last is shorter."""
    as_compiled("sm_90a")
    place = type("Compiled", (), {"put": staticmethod(lambda x: x), "get": staticmethod(lambda x: x)})
    agree(place, "softplus", 70, delta_rule)


# ---- gradients and graphs --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("member", [linear, delta_rule])
def test_gradients_are_those_of_the_formula(member):
    """Of everything that raw gates and raw beta are made of, and of queries and keys before they are normalised."""
    torch = pytest.importorskip("torch")
    softplus, norm = torch.nn.functional.softplus, torch.nn.functional.normalize
    *tiles, b, of_gate = draw(20, dtype=F32)
    inputs = [*(torch.tensor(x.astype(F32)).bfloat16() for x in tiles), *map(torch.tensor, of_gate), torch.tensor(b)]
    by_kernels, by_hand = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))

    def train(q, k, v, decay, beta, **more):
        beta = {"beta": beta} if member is delta_rule else {}
        member(q, k, v, decay=decay, **beta, **more).float().square().sum().backward()

    q, k, v, a, A_log, dt_bias, b = by_kernels
    train(q, k, v, gates.softplus(a, A_log, dt_bias), gates.beta(b), qk_l2norm=True)
    q, k, v, a, A_log, dt_bias, b = by_hand
    q, k = (norm(x.float(), dim=-1).bfloat16() for x in (q, k))
    train(q, k, v, -A_log.exp() * softplus(a + dt_bias), b.sigmoid())
    for actual, expected in zip(by_kernels[: None if member is delta_rule else -1], by_hand, strict=False):
        assert expected.grad.abs().max() > 0
        torch.testing.assert_close(actual.grad, expected.grad, rtol=2**-6, atol=2**-7 * float(expected.grad.abs().max()))


def test_under_jax_jit():
    """Traced calls evaluate the formulas in JAX, and have their gradients."""
    jax = pytest.importorskip("jax")
    q, k, v, b, of_gate = draw(20, dtype=F32)
    call = lambda q, k, v, b, *of_gate: delta_rule(
        q, k, v, gates.beta(b), decay=gates.sigmoid(*of_gate), qk_l2norm=True, return_state=True
    )
    arrays = q, k, v, b, *of_gate
    expected, state = call(*arrays)
    actual, last = jax.jit(call)(*map(jax.numpy.asarray, arrays))
    np.testing.assert_allclose(actual.astype(F32), expected.astype(F32), atol=2**-6 * np.abs(expected.astype(F32)).max())
    np.testing.assert_allclose(last, state, atol=2**-7 * np.abs(state).max())
    loss = lambda A_log: linear(q, k, v, decay=gates.softplus(of_gate[0], A_log)).astype("float32").sum()
    step = jax.grad(loss)(jax.numpy.asarray(of_gate[1]))
    assert step.shape == (HEADS,) and (np.abs(step) > 0).all()


# ---- errors ----------------------------------------------------------------------------------------------------------
def test_bad_gates():
    q, k, v, b, (a, A_log, dt_bias) = draw(5)
    for lower in 0, 1.0, math.nan, -math.inf:
        with pytest.raises(ValueError, match="lower: must be negative"):
            gates.sigmoid(a, lower=lower)
    for divisor in 0, -16, math.nan:
        with pytest.raises(ValueError, match="divisor: must be positive"):
            gates.logsigmoid(a, divisor=divisor)
    with pytest.raises(ValueError, match="dt_bias: must have no axis of channels"):
        linear(q, k, v, decay=gates.softplus(a, A_log, np.ones((HEADS, KEY_DIM), F32)))
    with pytest.raises(ValueError, match="A_log"):
        linear(q, k, v, decay=gates.softplus(a, A_log[:1]))
    with pytest.raises(ValueError, match="gate"):
        delta_rule(q, k, v, b, decay=gates.softplus(a[:, :3]))
    with pytest.raises(TypeError, match="gate: dtype must be"):
        linear(q, k, v, decay=gates.softplus(a.astype(np.float64)))
    with pytest.raises(ValueError, match="decay: must have an axis of channels"):
        gla(q, k, v, gates.softplus(a))
    with pytest.raises(TypeError, match="^decay: must be an array or a gate, .* not gates.beta"):
        delta_rule(q, k, v, b, decay=gates.beta(b))
    with pytest.raises(TypeError, match="^beta: must be an array or gates.beta, not a gate: gates.softplus belongs in decay"):
        delta_rule(q, k, v, gates.softplus(a))
    with pytest.raises(TypeError, match="qk_l2norm: must be a bool"):
        linear(q, k, v, qk_l2norm=1)
    for make in gates.softplus, gates.sigmoid, gates.logsigmoid:  # no gate would be no decay
        for nothing in None, 0.5:
            with pytest.raises(TypeError, match=f"^a: must be an array, which a formula makes gates of: a={nothing}"):
                make(nothing)
    with pytest.raises(TypeError, match="^b: must be an array, which a formula makes beta of: b=None"):
        gates.beta(None)

    for make, name in (gates.sigmoid, "lower"), (gates.logsigmoid, "divisor"):
        with pytest.raises(TypeError, match=f"{name}: must be a number"):
            make(a, **{name: "5"})
    with pytest.raises(TypeError, match="doubled: must be a bool"):
        gates.beta(b, doubled=None)
    with pytest.raises(TypeError, match="raw: must be made by softplus, .*, and is a ndarray"):
        gates.evaluate(a)
    with pytest.raises(ValueError, match="layout: must be"):
        gates.evaluate(gates.softplus(a), "sbhd")


def test_gradients_of_arrays_take_no_raw_inputs():
    q, a = np.zeros((1, 4, HEADS, 16), F32), np.zeros((1, 4, HEADS), F32)
    remedy = r"must be an array, not Raw\w+: pass attention.gates.evaluate\({}\), in float32"
    with pytest.raises(TypeError, match="^decay: " + remedy.format("decay")):
        attention.linear_backward(q, q, q, q, decay=gates.softplus(a))
    with pytest.raises(TypeError, match="^beta: " + remedy.format("beta")):
        attention.delta_rule_backward(q, q, q, q, gates.beta(a))
    with pytest.raises(TypeError, match="^decay: " + remedy.format("decay")):
        attention.delta_rule_backward(q, q, q, q, a, decay=gates.sigmoid(a))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_bad_gates_in_training(layout):
    """Where the framework evaluates formulas, it must not repeat arrays along other axes than heads and channels."""
    torch = pytest.importorskip("torch")
    q, k, v = (torch.randn(1, HEADS, HEADS, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    a, one, square = torch.randn(1, HEADS, HEADS), torch.ones(HEADS), torch.ones(HEADS, HEADS)
    for of_gate, words in {
        (a, a): rf"A_log: must be \({HEADS},\), as the gate: A_log.shape=\(1, {HEADS}, {HEADS}\), gate.shape=",
        (a, one[:1]): "A_log: must be", (a, 1.0): "A_log: must be", (a, one, one[:1]): "dt_bias: must be",
        (a, one, torch.tensor(1.0)): "dt_bias: must be", (a, one, square): "dt_bias: must have no axis of channels",
        (a[..., None].expand(-1, -1, -1, 16), one, square): "dt_bias: must be",
        (a[0], one): "decay: a raw gate must have the axes of v",
        (one,): "decay: a raw gate must have the axes of v",
    }.items():  # fmt: skip
        for function, more in (linear, ()), (delta_rule, (a.sigmoid(),)):
            with pytest.raises(ValueError, match=f"^{words}"):
                function(q, k, v, *more, decay=gates.softplus(*of_gate), layout=layout)
    for arguments in {"beta": gates.softplus(a)}, {"beta": a.sigmoid(), "decay": gates.beta(a)}:
        with pytest.raises(TypeError, match="^(beta|decay): must be an array"):
            delta_rule(q, k, v, **arguments)


def test_the_module_is_an_attribute():
    assert attention.gates is gates and "gates" in dir(attention)


# ---- views of a projection ---------------------------------------------------------------------------------------------
VIEWS = [  # odd: how many elements lie before q, 0 for multiples of 16 bytes, 2 for those of 4
    (delta_rule, "token", 0), (delta_rule, "token", 1), (delta_rule, "channel", 2), (delta_rule, "channel", 1),
    (linear, "channel", 0), (linear, "channel", 2), (linear, "token", 1), (linear, "token", 0),
]  # fmt: skip


@pytest.mark.parametrize(("member", "gate", "odd"), VIEWS)
def test_views_of_one_projection(place, monkeypatch, nothing_known, member, gate, odd):
    """q, k, v, the gate and beta's x as slices of one row a token, also of rows that TMA cannot address: chunk kernels take
    them."""
    monkeypatch.setattr(token_loop, "launch", lambda *_, **__: pytest.fail("the token loop was launched"))
    channels = gate == "channel"
    q, k, v, b, (a, A_log, dt_bias) = draw(70, channels)
    arrays = *(normalised(x).astype(BF16) for x in (q, k)), v, a.reshape(1, 70, HEADS, -1), b[..., None]
    parts = [np.full((1, 70, odd), np.nan, BF16), *(x.reshape(1, 70, -1) for x in arrays)]
    parts.append(np.full((1, 70, -sum(x.shape[2] for x in parts) % 8 + odd), np.nan, BF16))
    rows, ends = place.put(np.concatenate(parts, axis=2)), np.cumsum([x.shape[2] for x in parts])
    views = [rows[..., first:end].reshape(*x.shape) for x, (first, end) in zip(arrays, itertools.pairwise(ends))]
    assert all(np.shares_memory(x, rows) for x in views if isinstance(x, np.ndarray))
    of_head = place.put(A_log), place.put(dt_bias)

    def call(q, k, v, a, b):
        beta = {"beta": gates.beta(b[..., 0])} if member is delta_rule else {}
        return member(q, k, v, decay=gates.softplus(a if channels else a[..., 0], *of_head), **beta, return_state=True)

    for actual, expected in zip(call(*views), call(*map(place.put, arrays)), strict=True):
        actual, expected = (place.get(x).astype(float) for x in (actual, expected))
        assert np.isfinite(expected).all()
        by_cp_async = odd and member is linear and not channels  # by another kernel
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2**-6 * np.abs(expected).max() if by_cp_async else 0)
