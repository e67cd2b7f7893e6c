"""attention/compat/fla.py: each name and default, and flash-linear-attention's own formulas, token by token, in NumPy."""

import numpy as np
import pytest
from eager import arguments

import attention
from attention import reference
from attention.compat import fla

START = "scale=None, initial_state=None, output_final_state=False"
STATES = "state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None"
L2, SIGMOID = "use_qk_l2norm_in_kernel=False", "use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False"
SIGNATURES = {  # flash-linear-attention of August 2026
    "chunk_linear_attn": f"q, k, v, {START}, normalize=True, cu_seqlens=None",
    "chunk_retention": f"q, k, v, {START}, cu_seqlens=None",
    "chunk_lightning_attn": f"q, k, v, layer_idx, num_layers, {START}, cu_seqlens=None",
    "chunk_simple_gla": f"q, k, v, g=None, g_gamma=None, {START}, {STATES}",
    "chunk_gla": f"q, k, v, g, {START}, {STATES}",
    "chunk_delta_rule": f"q, k, v, beta, {START}, {L2}, cu_seqlens=None, cu_seqlens_cpu=None",
    "chunk_gated_delta_rule": f"q, k, v, g, beta, {START}, {L2}, {SIGMOID}, {STATES}, chunk_indices=None, cp_context=None",
    "chunk_kda": f"q, k, v, g, beta, {START}, {L2}, use_gate_in_kernel=False, {SIGMOID}, safe_gate=False, lower_bound=None, "
    f"disable_recompute=False, return_intermediate_states=False, {STATES}, cp_context=None",
}
CALLS = {  # what each takes behind q, k and v, and the function that it calls
    "chunk_linear_attn": ("", "linear"),
    "chunk_retention": ("", "retention"),
    "chunk_lightning_attn": ("layers", "lightning"),
    "chunk_simple_gla": ("g", "linear"),
    "chunk_gla": ("g of channels", "gla"),
    "chunk_delta_rule": ("beta", "delta_rule"),
    "chunk_gated_delta_rule": ("g, beta", "delta_rule"),
    "chunk_kda": ("g of channels, beta", "delta_rule"),
}
B, S, H, DK, DV = 2, 5, 2, 4, 3
HEADS = np.arange(H)
RATES = {"chunk_retention": np.log(1 - 2.0 ** (-5 - HEADS)), "chunk_lightning_attn": -8 / H * (1 - 1 / 4) * HEADS}


@pytest.fixture
def calls(monkeypatch):
    """Replace our functions by the reference's recurrence. Returns a list of their names and options."""
    call_options = []

    def ours(name, arguments, *, return_state, normalize=False, **options):
        call_options.append((name, options))
        for key, rates in RATES.items():
            if CALLS[key][1] == name:
                assert name == "retention" or arguments == (1, 4)
                options["decay"], arguments = rates, ()
        names = {"gla": ("decay",), "delta_rule": ("beta",)}.get(name, ())
        options |= dict(zip(names, arguments, strict=True))
        qkv = [options.pop(x) for x in "qkv"]
        layout = options.get("layout", "bshd")
        for key in "decay", "beta":
            if isinstance(options.get(key), (attention.gates.RawGate, attention.gates.RawBeta)):
                options[key] = attention.gates.evaluate(options[key], layout)
        if options.pop("qk_l2norm", False):
            qkv[:2] = map(attention.gates.normalize, qkv[:2])
        out, state = reference.linear(*qkv, normalize=normalize, **options)
        return (out, state) if return_state else out

    for name in {function for _, function in CALLS.values()}:
        called = lambda q, k, v, *rest, name=name, **options: ours(name, rest, q=q, k=k, v=v, **options)
        monkeypatch.setattr(attention, name, called)
    return call_options


def extras(kind, draw, *shape):
    """The arguments after q, k and v, in order."""
    result = {
        "layers": [1, 4],
        "g": [-np.abs(draw(shape))],
        "g of channels": [-np.abs(draw((*shape, DK)))],
        "beta": [np.abs(draw(shape)) / 2],
    }
    return [x for name in kind.split(", ") if name for x in result[name]]


def recurrence(name, q, k, v, more, S0):
    """(o, S) of flash-linear-attention's naive loops, for one sequence (T, H, D)."""
    named = dict(zip([x.partition("=")[0] for x in SIGNATURES[name].split(", ")[3:]], more))
    g, beta = named.get("g"), named.get("beta")
    if name in RATES:
        g = np.broadcast_to(RATES[name], q.shape[:2])
    state, out, z = S0.copy(), np.zeros_like(v), np.zeros_like(k[0])
    for t in range(len(q)):
        for h in range(H):
            if g is not None:
                state[h] *= np.exp(g[t, h])[:, None] if g.ndim == 3 else np.exp(g[t, h])
            new = v[t, h] if beta is None else beta[t, h] * (v[t, h] - k[t, h] @ state[h])
            state[h] += np.outer(k[t, h], new)
            z[h] += k[t, h]
            out[t, h] = q[t, h] @ state[h] * 0.4
            if name == "chunk_linear_attn":
                out[t, h] /= q[t, h] @ z[h] * 0.4 + 1e-10
    return out, state, z


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    assert arguments(getattr(fla, name)) == SIGNATURES[name] and fla.chunk_gdn is fla.chunk_gated_delta_rule


@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize("name", SIGNATURES)
def test_formulas(name, head_first, calls, draw):
    kind, called = CALLS[name]
    q, k, v = draw((B, S, H, DK)), draw((B, S, H, DK)), draw((B, S, H, DV))
    more, start = extras(kind, draw, B, S, H), draw((B, H, DK, DV))
    start = start * 0 if name == "chunk_linear_attn" else start
    inputs = {} if name == "chunk_linear_attn" else {"initial_state": start}
    turned = [x.swapaxes(1, 2) if head_first and isinstance(x, np.ndarray) else x for x in (q, k, v, *more)]
    o, state = getattr(fla, name)(*turned, scale=0.4, output_final_state=True, head_first=head_first, **inputs)
    default_results = getattr(fla, name)(*turned, scale=0.4, head_first=head_first, **inputs)
    assert isinstance(default_results, tuple) and default_results[1] is None and (default_results[0] == o).all()
    assert [call_options[0] for call_options in calls] == [called, called]
    o = o.swapaxes(1, 2) if head_first else o
    for b in range(B):
        of_one = [x[b] if isinstance(x, np.ndarray) else x for x in more]
        expected, last, z = recurrence(name, q[b], k[b], v[b], of_one, start[b])
        np.testing.assert_allclose(o[b], expected, rtol=1e-7, atol=1e-10)
        S_found = state[0] if isinstance(state, tuple) else state
        np.testing.assert_allclose(S_found[b], last, rtol=1e-10, atol=1e-12)
        if isinstance(state, tuple):
            np.testing.assert_allclose(state[1][b, 0], z, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", [name for name, signature in SIGNATURES.items() if "state_v_first" in signature])
def test_states_with_the_columns_of_values_first(name, calls, draw):
    """state_v_first, with which flash-linear-attention's layers call: (N, H, Dv, Dk) goes in and comes out."""
    arrays = draw((B, S, H, DK)), draw((B, S, H, DK)), draw((B, S, H, DV)), *extras(CALLS[name][0], draw, B, S, H)
    start = draw((B, H, DK, DV))
    out, state = getattr(fla, name)(*arrays, initial_state=start, output_final_state=True)
    turned = start.swapaxes(-1, -2)
    same, final = getattr(fla, name)(*arrays, initial_state=turned, output_final_state=True, state_v_first=True)
    assert (same == out).all() and (final.swapaxes(-1, -2) == state).all()
    assert getattr(fla, name)(*arrays, state_v_first=True)[1] is None


@pytest.mark.parametrize("name", [name for name in fla.__all__ if name.startswith("fused_recurrent_")])
def test_functions_token_by_token_are_those_by_chunks(name, calls, draw):
    chunked = name.replace("fused_recurrent_", "chunk_")
    arrays = draw((B, S, H, DK)), draw((B, S, H, DK)), draw((B, S, H, DV))
    names = [x.partition("=")[0] for x in SIGNATURES[chunked].split(", ")[3:]]
    named = dict(zip(names, extras(CALLS[chunked][0], draw, B, S, H)))
    theirs = {"gk": named["g"]} if name == "fused_recurrent_gla" else named
    pairs = (name, theirs), (chunked, named)
    results = [getattr(fla, form)(*arrays, **one, scale=0.4, output_final_state=True) for form, one in pairs]
    assert all((x == y).all() for x, y in zip(*map(flat, results)))
    with pytest.raises(TypeError, match="positional argument"):  # their order is another in each version
        getattr(fla, name)(*arrays, None, None, 0.4)


def test_gla_token_by_token(calls, draw):
    q, k, v = draw((B, S, H, DK)), draw((B, S, H, DK)), draw((B, S, H, DV))
    plain, _ = fla.fused_recurrent_gla(q, k, v, scale=1.0)
    assert (plain == fla.chunk_simple_gla(q, k, v, scale=1.0)[0]).all()
    with pytest.raises(NotImplementedError, match="^gv: is not supported; decays are those of the keys' columns, gk$"):
        fla.fused_recurrent_gla(q, k, v, gv=v)
    with pytest.raises(NotImplementedError, match="^reverse: is not supported; flip all arrays along the sequence"):
        fla.fused_recurrent_gla(q, k, v, reverse=True)


def flat(x):
    """The arrays of a pair, which may have a pair in it."""
    return [y for part in x for y in flat(part)] if isinstance(x, tuple) else [x]


def test_states_of_normalized_attention_go_on(calls, draw):
    """flash-linear-attention's z has an axis of one; two calls with half of the tokens each equal one call."""
    q, k, v = np.abs(draw((B, 6, H, DK))), np.abs(draw((B, 6, H, DK))), draw((B, 6, H, DV))
    whole, (S, z) = fla.chunk_linear_attn(q, k, v, output_final_state=True)
    _, state = fla.chunk_linear_attn(q[:, :2], k[:, :2], v[:, :2], output_final_state=True)
    rest, (S2, z2) = fla.chunk_linear_attn(q[:, 2:], k[:, 2:], v[:, 2:], None, state, True)
    assert state[1].shape == (B, 1, H, DK)
    for x, y in (whole[:, 2:], rest), (S, S2), (z, z2):
        np.testing.assert_allclose(x, y, rtol=1e-9)


def test_errors_name_its_arguments(draw):
    q = draw((1, 3, 2, 16)).astype(np.float16)
    with pytest.raises(ValueError, match=r"^g: must not be above 0: g\[0, 0, 0\]=0.5, g.shape=\(1, 3, 2\)"):
        fla.chunk_gated_delta_rule(q, q, q, np.full((1, 3, 2), 0.5, np.float32), np.ones((1, 3, 2), np.float32))


def test_packed_sequences_and_rates_of_heads(calls, draw):
    q, k, v, ends = draw((1, 7, H, DK)), draw((1, 7, H, DK)), draw((1, 7, H, DV)), np.array([0, 3, 7])
    rates = np.array([-0.1, -0.5])
    o, state = fla.chunk_simple_gla(q, k, v, g_gamma=rates, scale=0.4, output_final_state=True, cu_seqlens=ends, chunk_size=32)
    for n, tokens in enumerate((slice(0, 3), slice(3, 7))):
        g = np.broadcast_to(rates, (tokens.stop - tokens.start, H))
        expected, last, _ = recurrence("chunk_simple_gla", q[0, tokens], k[0, tokens], v[0, tokens], [g], np.zeros((H, DK, DV)))
        np.testing.assert_allclose(o[0, tokens], expected)
        np.testing.assert_allclose(state[n], last)
    with pytest.raises(ValueError, match="g: must be None if g_gamma is given"):
        fla.chunk_simple_gla(q, k, v, g=rates, g_gamma=rates)


@pytest.mark.parametrize("head_first", [False, True])
@pytest.mark.parametrize(("name", "lower_bound"), [("chunk_gated_delta_rule", None), ("chunk_kda", None), ("chunk_kda", -5.0)])
def test_what_kernels_compute(name, lower_bound, head_first, calls, draw):
    """Gates of A_log and dt_bias, beta's sigmoid, doubled, and the norm of queries and keys: flash-linear-attention's
    formulas."""
    q, k, v, b = draw((B, S, H, DK)), draw((B, S, H, DK)), draw((B, S, H, DV)), draw((B, S, H))
    per_channel = name == "chunk_kda"
    g, A_log, dt_bias = (
        draw((B, S, H, DK) if per_channel else (B, S, H)),
        draw((1, 1, H, 1) if per_channel else (H,)),
        draw((H,)),
    )
    bias = draw((H * DK,)) if per_channel else dt_bias
    options = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    options |= {"allow_neg_eigval": True, "A_log": A_log, "dt_bias": bias, "scale": 0.4, "head_first": head_first}
    options |= {"safe_gate": True, "lower_bound": lower_bound} if lower_bound else {}
    turned = [x.swapaxes(1, 2) if head_first else x for x in (q, k, v, g, b)]
    o, _ = getattr(fla, name)(*turned, **options)
    x = g + (bias.reshape(H, DK) if per_channel else bias)
    rate = np.exp(A_log.reshape(H, 1) if per_channel else A_log)
    decay = lower_bound / (1 + np.exp(-rate * x)) if lower_bound else -rate * np.log1p(np.exp(x))
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    for n in range(B):
        reference_values, _, _ = recurrence(name, q[n], k[n], v[n], [decay[n], 2 / (1 + np.exp(-b[n]))], np.zeros((H, DK, DV)))
        np.testing.assert_allclose((o.swapaxes(1, 2) if head_first else o)[n], reference_values, rtol=1e-7, atol=1e-10)


def test_a_safe_gate_needs_its_bound(calls, draw):
    q, k, v, g, b = draw((B, S, H, DK)), draw((B, S, H, DK)), draw((B, S, H, DV)), draw((B, S, H, DK)), draw((B, S, H))
    with pytest.raises(ValueError, match="lower_bound: must be given with safe_gate"):
        fla.chunk_kda(q, k, v, g, b, use_gate_in_kernel=True, A_log=draw((H,)), safe_gate=True)
    assert not calls


def test_a_gate_needs_its_rates(calls, draw):
    q, k, v, g, b = draw((B, S, H, DK)), draw((B, S, H, DK)), draw((B, S, H, DV)), draw((B, S, H, DK)), draw((B, S, H))
    for name, gate in ("chunk_gated_delta_rule", g[..., 0]), ("chunk_kda", g):
        with pytest.raises(ValueError, match="^A_log: must be given with use_gate_in_kernel=True"):
            getattr(fla, name)(q, k, v, gate, b, use_gate_in_kernel=True)
    with pytest.raises(ValueError, match=r"^A_log: must have 2 elements: A_log.shape=\(3,\)"):
        fla.chunk_kda(q, k, v, g, b, use_gate_in_kernel=True, A_log=draw((3,)))
    with pytest.raises(ValueError, match=r"^dt_bias: must have 2 x 4 elements: dt_bias.shape=\(2,\)"):
        fla.chunk_kda(q, k, v, g, b, use_gate_in_kernel=True, A_log=draw((H,)), dt_bias=draw((H,)))
    assert not calls


REFUSED = [
    ("chunk_gated_delta_rule", {"allow_neg_eigval": True}, "allow_neg_eigval: .* 2 . beta"),
    ("chunk_kda", {"allow_neg_eigval": True}, "allow_neg_eigval: .* 2 . beta"),
    ("chunk_kda", {"return_intermediate_states": True}, "return_intermediate_states: .* once per chunk"),
    ("chunk_kda", {"cp_context": object()}, "cp_context: .* several GPUs"),
]


@pytest.mark.parametrize(("name", "options", "words"), REFUSED, ids=[f"{name}-{next(iter(o))}" for name, o, _ in REFUSED])
def test_what_is_refused(name, options, words, calls):
    required = SIGNATURES[name].partition(", scale")[0].split(", ")
    with pytest.raises(NotImplementedError, match=words):
        getattr(fla, name)(*[None] * len(required), **options)
    assert not calls
