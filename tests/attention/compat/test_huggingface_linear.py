"""compat/huggingface_linear: small hybrid models of transformers with random weights, compared with transformers' own functions
in float32. Skipped without torch or transformers."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.bailing_hybrid", reason="a later transformers has Bailing's hybrids")

from transformers.models.bailing_hybrid import modeling_bailing_hybrid  # noqa: E402
from transformers.models.glm5_next import modeling_glm5_next  # noqa: E402
from transformers.models.kimi_linear import modeling_kimi_linear  # noqa: E402
from transformers.models.qwen3_next import modeling_qwen3_next  # noqa: E402
from transformers_models import (  # noqa: E402
    DELTA_RULES,
    NEW,
    PROMPT,
    STATE_SPACES,
    check_generates,
    check_norm,
    check_trains,
    models,
    prompts,
    record_calls,
    recurrent_layers,
    step,
)

import attention  # noqa: E402
from attention.compat import huggingface, huggingface_linear  # noqa: E402

FEW = ["qwen3_next", "kimi_linear", "bamba"]  # each with functions of its own
STEPS = 20


@pytest.fixture
def calls(monkeypatch):
    """The names of our functions, call by call."""
    return record_calls(monkeypatch)


def test_layers_are_replaced_once():
    ours = models("qwen3_next")[0]
    with recurrent_layers(ours, "qwen3_next"):
        once = modeling_qwen3_next.torch_chunk_gated_delta_rule
        huggingface.linear_layers(ours)
        assert modeling_qwen3_next.torch_chunk_gated_delta_rule is once and once.replaces
        assert not hasattr(modeling_qwen3_next.Qwen3NextRMSNormGated.forward.replaces, "replaces")
    assert not hasattr(modeling_qwen3_next.torch_chunk_gated_delta_rule, "replaces")
    with pytest.raises(
        ValueError, match="model: has no layers that call one of torch_chunk_gated_delta_rule.*LlamaForCausalLM"
    ):
        huggingface.linear_layers(models("llama")[0])


@pytest.mark.parametrize("name", FEW)
def test_generates_as_eager(name, calls):
    check_generates(name, "cpu", disable_compile=True)
    counts = {"delta_rule": 1, "linear_step": NEW - 1} if name in DELTA_RULES else {"mamba2": NEW}
    assert {one: calls.count(one) for one in ("delta_rule", "linear_step", "mamba2") if one in calls} == counts
    assert calls.count("short_conv") == NEW


@pytest.mark.parametrize("name", [*DELTA_RULES, *STATE_SPACES])
def test_trains_as_eager(name, calls):
    """The loss and all gradients. transformers' own functions are in float32 inside, so the allowance is greater."""
    check_trains(name, "cpu", factor=3, slack=0.05, padded=name in FEW)
    layers = 2 if name in ("mamba2", "zamba2", "falcon_h1") else 1
    norms = ["gated_rms_norm"] * (name != "falcon_h1")  # which has none
    for function in "delta_rule" if name in DELTA_RULES else "mamba2", "short_conv", *norms:
        assert calls.count(function) == layers, function


@pytest.mark.parametrize("name", ["kimi_linear", "bailing_hybrid"])
def test_kernels_compute_gates_that_modules_project(name, monkeypatch):
    """In the first pass and in steps: they get projections of half the bytes, and the layer reads and writes no gates."""
    decays = []
    for function in "delta_rule", "linear_step":
        serve = getattr(attention, function)
        monkeypatch.setattr(attention, function, lambda *a, serve=serve, **o: decays.append(o["decay"]) or serve(*a, **o))
    check_generates(name, "cpu", disable_compile=True)
    assert {(x.formula, x.x.dtype) for x in decays} == {("softplus" if name == "kimi_linear" else "sigmoid", torch.bfloat16)}
    assert len(decays) == NEW


@pytest.mark.parametrize(
    ("kind", "bound"),
    [
        (modeling_kimi_linear.KimiLinearForgetGate, None),
        (modeling_glm5_next.Glm5NextTextForgetGate, -3.0),
        (modeling_glm5_next.Glm5NextTextForgetGate, None),
        (modeling_bailing_hybrid.BailingHybridForgetGate, -3.0),
        (modeling_bailing_hybrid.BailingHybridForgetGate, None),
    ],
)
def test_gates_are_those_of_modules(kind, bound):
    """Kernels compute what the module returns, and torch the same gradients of it."""
    bounds = dict(linear_lower_bound=bound, kda_lower_bound=bound, kda_safe_gate=bound is not None)
    gate = kind(SimpleNamespace(hidden_size=8, linear_head_dim=4, linear_num_heads=2, **bounds))
    for x in gate.parameters():
        torch.nn.init.normal_(x)
    hidden_states = torch.randn(1, 5, 8)
    expected = kind.forward(gate, hidden_states)
    raw = huggingface_linear.raw_gate(kind.forward, gate, hidden_states)
    results, parameters = (attention.gates.evaluate(raw), expected), [*gate.parameters()]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), parameters) for x in results))


@pytest.mark.parametrize("packing", ["cu_seq_lens", "seq_idx"])
@pytest.mark.parametrize("name", FEW)
def test_packed_sequences_are_apart(name, packing, calls):
    """Each document gives what it gives alone; with gradients as without."""
    ours, low, exact = models(name)
    ids, lengths = prompts(padded=False)[0][:1], (9, PROMPT - 9)
    alone = [torch.cat([m(x, use_cache=False).logits for x in ids.split(lengths, 1)], 1) for m in (low, exact)]
    ends, positions = torch.tensor([0, 9, PROMPT], dtype=torch.int32), torch.cat([torch.arange(n) for n in lengths])[None]
    options = dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=11, max_length_k=11)
    if packing == "seq_idx":
        options = dict(seq_idx=torch.arange(2, dtype=torch.int32).repeat_interleave(torch.tensor(lengths))[None])
    with recurrent_layers(ours, name):
        check_norm(ours(ids, position_ids=positions, use_cache=False, **options).logits, *alone)


@pytest.mark.parametrize("name", ["olmo_hybrid", "kimi_linear", "bamba"])
def test_compiled_and_checkpointed(name):
    """A compiled step, whole, and a checkpointed one have the loss and the gradients of an eager one with our kernels."""
    ours, inputs = models(name)[0], prompts(padded=False)
    with recurrent_layers(ours, name):
        loss, grads = step(ours, *inputs)
        grads = {key: x.clone() for key, x in grads.items()}
        forward = ours.forward
        ours.forward = torch.compile(forward, fullgraph=True, backend="aot_eager")
        compiled = step(ours, *inputs)
        ours.forward = forward
        ours.gradient_checkpointing_enable()
        again = step(ours, *inputs)
    for actual, of_got in compiled, again:
        torch.testing.assert_close(actual, loss)
        for key, x in grads.items():
            assert (of_got[key] - x).norm() <= 0.05 * x.norm(), key  # sums of a few numbers in bfloat16


def curve(model, ids):
    """The losses of some steps of AdamW on the same tokens, with parameters in float32."""
    call = torch.compile(model.forward, fullgraph=True, backend="aot_eager") if model.compiled else model.forward
    optimiser, losses = torch.optim.AdamW(model.float().train().parameters(), 0.005), []
    for _ in range(STEPS):
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=model.lowered):
            loss = call(ids, labels=ids, use_cache=False).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def check_learns(name, device):
    """Twenty compiled steps under autocast have the losses of eager ones in float32, as transformers' under autocast have."""
    three, ids = models(name, device), prompts(padded=False, device=device)[0][:1]
    for model, lowered, compiled in zip(three, (True, True, False), (True, False, False)):
        model.lowered, model.compiled = lowered, compiled
    with recurrent_layers(three[0], name):
        ours = curve(three[0], ids)
    low, exact = (curve(model, ids) for model in three[1:])
    assert exact[-1] < 0.5 * exact[0]
    assert (ours - exact).abs().max() <= 2 * (low - exact).abs().max() + 0.02 * exact[0]


def test_learns_as_eager():
    check_learns("nemotron_h", "cpu")


# ---- on the card: few, for each compiles kernels of its own ------------------------------------------------------------
@pytest.mark.gpu
def test_generates_on_the_card():
    check_generates("qwen3_next", "cuda", 150, disable_compile=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3_5", "olmo_hybrid", "kimi_linear", "bamba", "nemotron_h"])
def test_learns_on_the_card(name):
    check_learns(name, "cuda")
