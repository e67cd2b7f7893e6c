"""Registration of all ops of the public functions as torch.ops.tiles (tiles/calls/torch_op.py)."""

import sys


def register_torch_ops() -> None:
    """Register the ops of all functions with torch, which must be imported: for torch.export.load, and for calls by name.
    Without it the first call that needs an op registers it. RuntimeError: torch is not imported."""
    if "torch" not in sys.modules:
        raise RuntimeError("register_torch_ops: torch is not imported: say `import torch` first")
    from .plans.softmax.forward_programs import _forward, _forward_fp8, _fp8_cache, _variant
    from .plans.softmax.norm_gradients import DIFFERENTIATE, INTO, NORMALISE, ZEROS
    from .public import cache_append, decoding, softmax_backward
    from .public.based_features import _based
    from .public.based_gradients import _based_backward
    from .public.cache_quantize import _quantize, _quantize_blocks
    from .public.delta_gradients import _delta_rule_backward, _delta_rule_backward_into
    from .public.delta_rules import _delta_rule, _delta_rule_raw
    from .public.gated_norms import _gated_norm, _gated_norm_backward
    from .public.hedgehog_features import _hedgehog
    from .public.hedgehog_gradients import _hedgehog_backward
    from .public.linear_family import _linear, _linear_raw
    from .public.linear_gradients import _linear_backward, _linear_backward_into
    from .public.mamba import _mamba2
    from .public.mamba_gradients import _mamba2_backward, _mamba2_backward_into
    from .public.mla_decoding import _mla_decode, _mla_decode_fp8
    from .public.projected_qkv import projected, projected_backward
    from .public.short_convolution import _short_conv, _short_conv_backward
    from .public.token_steps import _linear_step, _linear_step_raw

    of_norms = [program for table in (NORMALISE, DIFFERENTIATE, INTO, ZEROS) for program in table.values()]
    backward = softmax_backward._backward, softmax_backward._variant, softmax_backward._accumulate, *of_norms
    of_linear = _linear, _linear_backward, _linear_backward_into, _linear_step, _mamba2, _mamba2_backward, _mamba2_backward_into
    recurrent = (
        _based,
        _based_backward,
        _delta_rule,
        _delta_rule_backward,
        _delta_rule_backward_into,
        _gated_norm,
        _gated_norm_backward,
        _hedgehog,
        _hedgehog_backward,
        *of_linear,
        _short_conv,
        _short_conv_backward,
    )
    raw = _delta_rule_raw, _linear_raw, _linear_step_raw
    decode = decoding._decode, decoding._variant, _mla_decode, _mla_decode_fp8
    append = cache_append._append, cache_append._append_with_queries
    quantise = _quantize, _quantize_blocks, cache_append._append_quantising, cache_append._append_quantising_with_queries
    forward = _forward, _variant, _forward_fp8, _fp8_cache, projected, projected_backward
    for program in *backward, *append, *quantise, *decode, *forward, *recurrent, *raw:
        program.op()
