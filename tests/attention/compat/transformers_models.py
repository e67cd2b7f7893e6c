"""Small models of transformers with random weights, which must generate and train as eager attention in float32 does, on
torch's CPU wheel through the interpreter."""

import contextlib
import sys

import torch
import transformers

import attention
from attention.compat import huggingface, huggingface_linear

VOCABULARY, PROMPT, NEW, PAD = 64, 20, 5, 3
COMMON = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0,
    num_key_value_heads=2, bos_token_id=1, eos_token_id=None, initializer_range=0.3,
)  # fmt: skip
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=16)  # as many as there are: rounding chooses none
LINEAR = dict(layer_types=["linear_attention", "full_attention"])
DELTA = dict(
    linear_key_head_dim=16, linear_value_head_dim=32, linear_num_key_heads=1, linear_num_value_heads=2, head_dim=16, **LINEAR
)  # fmt: skip
# values are narrower than keys
LATENT = dict(num_key_value_heads=4, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16)
KIMI = dict(linear_num_heads=2, linear_head_dim=32, mlp_layer_types=["dense", "dense"], **LINEAR, **LATENT)
MAMBA = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16, mamba_n_groups=1, mamba_expand=2)
SOFTMAX = {  # name: (config, what it differs in from COMMON)
    "llama": ("LlamaConfig", dict(head_dim=16)),
    "qwen3": ("Qwen3Config", dict(head_dim=16)),  # QK-norm
    "gpt_oss": ("GptOssConfig", dict(head_dim=16, num_local_experts=2, num_experts_per_tok=2, sliding_window=4,
                                     layer_types=["sliding_attention", "full_attention"])),
    "gemma2": ("Gemma2Config", dict(head_dim=16, sliding_window=4, attn_logit_softcapping=5.0, query_pre_attn_scalar=16)),
    "deepseek_v3": ("DeepseekV3Config", dict(q_lora_rank=16, first_k_dense_replace=2, **LATENT)),
}  # fmt: skip
DELTA_RULES = {
    "qwen3_next": ("Qwen3NextConfig", dict(num_experts=2, shared_expert_intermediate_size=16, **EXPERTS, **DELTA)),
    "qwen3_5": ("Qwen3_5TextConfig", DELTA),
    "olmo_hybrid": ("OlmoHybridConfig", dict(linear_allow_neg_eigval=True, **DELTA)),
    "kimi_linear": ("KimiLinearConfig", KIMI),
    "bailing_hybrid": ("BailingHybridConfig", KIMI),
}
STATE_SPACES = {
    "bamba": ("BambaConfig", dict(attn_layer_indices=[1], **MAMBA)),
    "nemotron_h": ("NemotronHConfig", dict(head_dim=16, mamba_num_heads=4, n_groups=1, mamba_head_dim=16,
                                           ssm_state_size=16, **LINEAR)),
    "mamba2": ("Mamba2Config", dict(num_heads=4, head_dim=16, state_size=16, n_groups=1)),
    "zamba2": ("Zamba2Config", dict(n_mamba_heads=4, mamba_headdim=16, mamba_d_state=16, mamba_ngroups=1,
                                    layers_block_type=["mamba", "hybrid"])),
    "falcon_h1": ("FalconH1Config", dict(mamba_d_ssm=None, mamba_rms_norm=True, **MAMBA)),
    "granitemoehybrid": ("GraniteMoeHybridConfig", dict(layer_types=["mamba", "attention"], num_local_experts=0,
                                                        shared_intermediate_size=32, **MAMBA)),
}  # fmt: skip
MODELS = SOFTMAX | DELTA_RULES | STATE_SPACES
huggingface.register()


def record_calls(monkeypatch):
    """The names of our functions, call by call."""
    names = []
    for name in "forward", "decode", "linear_step", "delta_rule", "mamba2", "short_conv", "gated_rms_norm":
        function = getattr(attention, name)
        monkeypatch.setattr(
            attention, name, lambda *a, name=name, function=function, **o: names.append(name) or function(*a, **o)
        )
    return names


@contextlib.contextmanager
def recurrent_layers(model, name):
    """Our recurrent layers, and afterwards transformers' own again, because models of other implementations call them too."""
    if name in SOFTMAX:
        yield
        return
    assert huggingface.linear_layers(model) is model
    yield
    module = sys.modules[type(model).__module__]
    homes = [(module, key) for key in huggingface_linear.REPLACEMENTS if hasattr(module, key)]
    for home, key in homes + [(kind, "forward") for kind in huggingface_linear.replaced_classes(module)]:
        setattr(home, key, getattr(home, key).replaces)


def models(name, device="cpu"):
    """The same weights three times: ours in bfloat16, eager in bfloat16, eager in float32."""
    torch.manual_seed(0)
    kind, more = MODELS[name]
    config = lambda: getattr(transformers, kind)(**COMMON | more)
    kinds = (("tiles", torch.bfloat16), ("eager", torch.bfloat16), ("eager", torch.float32))
    result = [
        transformers.AutoModelForCausalLM.from_config(config(), attn_implementation=implementation, dtype=dtype)
        for implementation, dtype in kinds
    ]
    ours, low, exact = (model.to(device).eval() for model in result)
    with torch.no_grad():
        for key, parameter in ours.named_parameters():
            if "sinks" in key:
                parameter.normal_()
    for model in low, exact:
        model.load_state_dict(ours.state_dict())
    return ours, low, exact


def prompts(tokens=PROMPT, padded=True, device="cpu"):
    """(two sequences, where they are not padding): the second begins with padding."""
    ids = torch.randint(2, VOCABULARY, (2, tokens), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if padded:
        ids[1, :PAD] = mask[1, :PAD] = 0
    return ids.to(device), mask.to(device)


def check_close(ours, low, exact, what=""):
    """Our error is at most twice the rounding error of eager attention in bfloat16."""
    scale = exact.float().std()
    error, usual = ((x.float() - exact.float()).abs().max() for x in (ours, low))
    assert error <= 2 * usual + 0.02 * scale, f"{what}: {error:.3g}, eager in bfloat16 {usual:.3g}, of {scale:.3g}"
    return 2 * usual + 0.02 * scale


def check_norm(ours, low, exact, what="", factor=2, slack=0.02):
    """The same of the root of the mean square, which a single element near 0 in a norm does not decide."""
    error, usual = ((x.float() - exact).norm() / (exact.norm() + 1e-6) for x in (ours, low))
    assert error <= factor * usual + slack, f"{what}: {error:.3g}, eager in bfloat16 {usual:.3g}"


def check_generates(name, device, tokens=PROMPT, padded=True, **options):
    """Each generated token is eager's most likely one, unless two are equally likely within rounding."""
    ours, low, exact = models(name, device)
    ids, mask = prompts(tokens, padded, device)
    call_options = dict(
        attention_mask=mask, max_new_tokens=NEW, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    with recurrent_layers(ours, name):
        result = ours.generate(ids, **call_options, **options)
    actual, sequences = torch.stack(result.logits, 1), result.sequences
    assert sequences.shape == (2, tokens + NEW)
    mask = torch.cat([mask, mask.new_ones(2, NEW)], 1)[:, :-1]
    with torch.no_grad():
        theirs = [m(sequences[:, :-1], attention_mask=mask, use_cache=False).logits[:, tokens - 1 :] for m in (low, exact)]
    tolerance = check_close(actual, *theirs, "logits")
    likeliest = theirs[1].topk(2)
    sure = likeliest.values[..., 0] - likeliest.values[..., 1] > 2 * tolerance
    assert (sequences[:, tokens:] == likeliest.indices[..., 0])[sure].all()


def step(model, ids, mask, **options):
    """(the loss, the gradients by parameter names) of a training step on next-token prediction."""
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 1:][mask[:, :-1] == 0] = -100  # of a query that is padding
    model.train().zero_grad()
    loss = model(ids, attention_mask=mask if (mask == 0).any() else None, labels=labels, use_cache=False, **options).loss
    loss.backward()
    return loss.detach(), {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


def check_trains(name, device, factor=2, slack=0.02, **options):
    """The loss and each gradient are as close to eager's in float32 as eager's in bfloat16 are."""
    (mine, *theirs), inputs = models(name, device), prompts(**options, device=device)
    with recurrent_layers(mine, name):
        ours, grads = step(mine, *inputs)
    (low, of_low), (exact, of_exact) = (step(model, *inputs) for model in theirs)
    check_close(ours, low, exact + torch.tensor([0.0, 1.0], device=device), "loss")
    assert grads.keys() == of_exact.keys()
    for key, gradient in of_exact.items():
        check_norm(grads[key], of_low[key], gradient, key, factor, slack)
