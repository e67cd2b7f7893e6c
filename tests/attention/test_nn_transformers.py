"""attention.nn.from_transformers and to_transformers: transformers' recurrent layers, and ours with a copy of their weights.
Skipped without transformers."""

import copy
import importlib

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from attention import nn  # noqa: E402
from tiles.testing import compare  # noqa: E402

DIM, TOKENS, PADDING = 32, 21, 4
TYPES = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=32, **TYPES)
KIMI = dict(linear_num_heads=2, linear_head_dim=16, mlp_layer_types=["dense", "dense"], **TYPES)
MAMBA = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16, mamba_n_groups=2, mamba_expand=2, num_hidden_layers=2)
FALCON = MAMBA | dict(ssm_in_multiplier=0.7, ssm_multipliers=[0.5, 1.5, 0.8, 1.2, 0.9], mamba_d_ssm=None)
# name: (its folder, its class, its configuration and what stands in that, the class here)
LAYERS = {
    "Qwen3-Next": ("qwen3_next", "Qwen3NextGatedDeltaNet", "Qwen3NextConfig", DELTA, nn.GatedDeltaNet),
    "Qwen3.5": ("qwen3_5", "Qwen3_5GatedDeltaNet", "Qwen3_5TextConfig", DELTA, nn.GatedDeltaNet),
    "Qwen4, sigmoid": ("qwen4_exp", "Qwen4ExpTextGatedDeltaNet", "Qwen4ExpTextConfig",
                       DELTA | dict(output_gate_type="sigmoid"), nn.GatedDeltaNet),
    "OLMo hybrid": ("olmo_hybrid", "OlmoHybridGatedDeltaNet", "OlmoHybridConfig",
                    DELTA | dict(linear_allow_neg_eigval=True), nn.GatedDeltaNet),
    "Kimi Linear": ("kimi_linear", "KimiLinearDeltaAttention", "KimiLinearConfig", KIMI, nn.KimiDeltaAttention),
    "GLM-5": ("glm5_next", "Glm5NextTextLinearAttention", "Glm5NextTextConfig", KIMI, nn.KimiDeltaAttention),
    "Bailing": ("bailing_hybrid", "BailingHybridDeltaAttention", "BailingHybridConfig", KIMI, nn.KimiDeltaAttention),
    "Bailing, no bound": ("bailing_hybrid", "BailingHybridDeltaAttention", "BailingHybridConfig",
                          KIMI | dict(kda_safe_gate=False), nn.KimiDeltaAttention),
    "Bamba": ("bamba", "BambaMixer", "BambaConfig", MAMBA, nn.Mamba2),
    "Nemotron-H": ("nemotron_h", "NemotronHMamba2Mixer", "NemotronHConfig",
                   dict(mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=16, n_groups=2), nn.Mamba2),
    "Mamba-2, limits": ("mamba2", "Mamba2Mixer", "Mamba2Config",
                        dict(num_heads=4, head_dim=16, state_size=16, n_groups=1, use_bias=True, time_step_limit=(0.4, 0.8)),
                        nn.Mamba2),
    "Zamba-2": ("zamba2", "Zamba2MambaMixer", "Zamba2Config",
                dict(n_mamba_heads=4, mamba_headdim=16, mamba_d_state=16, mamba_ngroups=2), nn.Mamba2),
    "Granite 4": ("granitemoehybrid", "GraniteMoeHybridMambaLayer", "GraniteMoeHybridConfig",
                  MAMBA | dict(layer_types=["mamba", "attention"]), nn.Mamba2),
    "Falcon-H1": ("falcon_h1", "FalconH1Mixer", "FalconH1Config",
                  FALCON | dict(mamba_rms_norm=True, mamba_norm_before_gate=True, mamba_proj_bias=True), nn.Mamba2),
    "Falcon-H1, no norm": ("falcon_h1", "FalconH1Mixer", "FalconH1Config", FALCON | dict(mamba_rms_norm=False), nn.Mamba2),
}  # fmt: skip


def configured(name):
    """(the module of the layer's model, the layer's configuration); skipped if this version of transformers lacks it."""
    folder, kind, configuration, options, _ = LAYERS[name]
    module = pytest.importorskip(f"transformers.models.{folder}.modeling_{folder}")
    configurations = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
    return module, getattr(configurations, configuration)(hidden_size=DIM, **options)


def layers(name):
    """(ours in bfloat16, theirs in bfloat16, theirs in float32, the configuration), with the same weights."""
    module, config = configured(name)
    theirs = getattr(module, LAYERS[name][1])(config, layer_idx=0)
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=chance) + key.endswith("norm.weight"))
    if "Falcon" in name:
        theirs.register_buffer("mup_vector", module.compute_mup_vector(config))
    theirs = theirs.to(torch.bfloat16).eval()
    return nn.from_transformers(theirs), theirs, copy.deepcopy(theirs).float(), config


def inputs():
    return torch.randn(2, TOKENS, DIM, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_is_the_same_layer(name):
    """Two sequences, of which one begins with padding; ours are packed."""
    ours, theirs, exact, _ = layers(name)
    assert type(ours) is LAYERS[name][-1] and not ours.training
    x, mask = inputs(), torch.ones(2, TOKENS)
    padding = 0 if getattr(theirs, "use_bias", False) else PADDING  # with a bias their convolution reads padding
    mask[1, :padding] = 0
    packed, ends = x[mask > 0][None], torch.tensor([0, TOKENS, 2 * TOKENS - padding])
    ref, low = (layer(y, attention_mask=mask)[mask > 0][None] for layer, y in ((exact, x.float()), (theirs, x)))
    compare.assert_close(ours(packed, cu_seqlens=ends), ref, low)
    empty = copy.deepcopy(theirs)
    for parameter in empty.parameters():
        parameter.zero_()
    back = nn.to_transformers(ours, empty).state_dict()
    for key, x in theirs.state_dict().items():  # Falcon-H1's multipliers are rounded twice
        torch.testing.assert_close(back[key], x, **({} if "Falcon" in name else {"rtol": 0, "atol": 0}))


@pytest.mark.parametrize("name", ["Qwen3-Next", "Kimi Linear", "Bamba", "Falcon-H1, no norm"])
@torch.no_grad()
def test_its_cache_is_the_same(name):
    """A prompt, two tokens more, then two tokens one by one."""
    ours, theirs, exact, config = layers(name)
    mine, of_low, of_exact = ours.new_cache(2), *(transformers.DynamicCache(config=config) for _ in range(2))
    for x in inputs().split([TOKENS - 4, 2, 1, 1], 1):
        compare.assert_close(ours(x, cache=mine), exact(x.float(), of_exact), theirs(x, of_low))


def test_frozen_layers_stay_frozen():
    theirs = layers("Qwen3-Next")[1].requires_grad_(False)
    theirs.A_log.requires_grad_()
    assert [name for name, x in nn.from_transformers(theirs).named_parameters() if x.requires_grad] == ["A_log"]


def test_layers_that_are_refused():
    theirs = layers("Qwen4, sigmoid")[1]
    theirs.norm.activation = "tanh"
    with pytest.raises(ValueError, match="^layer: its norm's activation must be silu or sigmoid: 'tanh'"):
        nn.from_transformers(theirs)
    theirs.activation = "gelu"
    with pytest.raises(ValueError, match="^layer: its activation must be silu: 'gelu'"):
        nn.from_transformers(theirs)
    theirs = layers("Mamba-2, limits")[1]
    theirs.time_step_limit = 0.1, 0.001
    with pytest.raises(ValueError, match=r"^dt_limit: must be two numbers, 0 <= low <= high: dt_limit=\(0.1, 0.001\)"):
        nn.from_transformers(theirs)
    with pytest.raises(ValueError, match=r"^layer: A_log must be \(4,\), not \(3,\)"):
        nn.to_transformers(nn.Mamba2(DIM, expand=1.5, d_state=16, headdim=16), theirs)
    with pytest.raises(TypeError, match="^layer: must have in_proj_qkvz, in_proj_ba, .*; or in_proj_qkv, .*: Linear has"):
        nn.from_transformers(torch.nn.Linear(2, 2))
