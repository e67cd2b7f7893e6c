"""What other libraries call our arguments: one table, by which public functions answer a name that they do not know."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable
from typing import TypeVar, cast

F = TypeVar("F", bound=Callable)
BIAS, MASK = "bias=, which is added to the scores, or mask=, a function of b, h, i, j", "mask=, a function of b, h, i, j"
TABLE = (  # their names; the first that fits of: `ours`, or `ours=...`, where the function has it; a sentence
    ("sm_scale softmax_scale scaling", "scale"),
    ("is_causal use_causal_mask", "causal"),
    ("window_size sliding_window local_window_size", "window=(left, right), None where it is open"),
    ("soft_cap logits_soft_cap logit_cap attn_logit_softcapping", "softcap"),
    ("attn_mask attn_bias", BIAS, MASK),
    ("mask_mod", "mask"),
    ("score_mod", "score"),
    ("block_mask", "blocks"),
    ("dropout_p p_dropout dropout_rate", "dropout=, with a seed"),
    ("philox_seed rng_seed", "seed"),
    ("alibi_slopes slopes", "alibi"),
    ("sinks s_aux learnable_sink attention_sink", "sink"),
    ("enable_gqa num_kv_heads num_key_value_groups pack_gqa", "nothing that need be said: shapes tell"),
    ("max_seqlen max_seqlen_q max_seqlen_k max_s", "nothing that need be said: cu_seqlens tells"),
    ("cu_seqlens_q qo_indptr cu_seq_lens_q q_start_loc", "cu_seqlens"),
    ("cu_seqlens_kv kv_indptr cu_seq_lens_k", "cu_seqlens_k", "lengths", "cu_seqlens"),
    ("cu_seqlens_k", "lengths", "cu_seqlens"),
    ("cu_seqlens_k_new", "cu_seqlens_new"),
    ("cache_seqlens context_lens seq_lens kv_seq_lens lengths_k", "lengths", "lengths_k"),
    ("seqused_k kv_lens kv_len seq_lens_k key_padding_mask lengths", "lengths_k", "lengths"),
    ("block_table block_tables page_table kv_indices", "pages", "pages of attention.decode"),
    ("pages", "an argument of attention.decode"),
    ("cache_batch_idx kv_batch_idx block_idx", "batch_index"),
    ("cache_leftpad leftpad_k", "leftpad"),
    ("rotary_cos rotary_sin cos sin position_embeddings", "rotary=(cos, sin)"),
    ("rotary_interleaved", "interleaved"),
    ("query q_nope", "q"),
    ("key k_cache key_cache", "k"),
    ("value v_cache value_cache", "v"),
    ("key_new", "k_new"),
    ("value_new", "v_new"),
    ("kv_cache blocked_k kv_c_cache ckv", "latent"),
    ("q_scale", "q_descale"),
    ("k_scale", "k_descale", "descale"),
    ("v_scale", "v_descale", "descale"),
    ("num_splits num_kv_splits", "splits"),
    ("return_softmax_lse return_attn_probs return_softmax", "return_lse"),
    ("softmax_lse logsumexp", "lse", "return_lse"),
    ("do d_out grad_out grad_output", "dout"),
    ("d_lse grad_lse dsoftmax_lse grad_logsumexp", "dlse"),
    ("qk_norm", "q_norm=, and k_norm"),
    ("head_first tensor_layout qkv_format input_layout kv_layout", 'layout="bhsd" or "bshd"'),
    # of flash-linear-attention and mamba_ssm
    ("output_final_state return_final_states return_final_state", "return_state"),
    ("g gk g_gamma log_decay", "decay"),
    ("initial_states h0", "initial_state"),
    ("use_norm use_normalize", "normalize"),
    ("return_state output_final_states", "return_final_states"),
    ("initial_state", "initial_states"),
    ("layer_idx", "layer"),
    ("num_layers", "layers"),
    ("feature_map_q", "q_map"),
    ("feature_map_k", "k_map"),
    ("use_qk_l2norm_in_kernel", "what q and k are: divide them by their norms before"),
    ("dt_limit", "always (0, inf): clamp dt before"),
    ("return_varlen_states", "return_final_states with cu_seqlens"),
)
THEIRS = {name: ours for names, *ours in TABLE for name in names.split()}


def by_other_names(function: F) -> F:
    """Decorator: a call that uses one of THEIRS is told what it is here. What is right costs a call more, and no check."""

    @functools.wraps(function)
    def call(*args, **given):
        try:
            return function(*args, **given)
        except TypeError as error:
            unknown = re.match(rf"{function.__qualname__}\(\) got an unexpected keyword argument '(\w+)'", str(error))
            said = unknown and what_it_is_here(unknown[1], list(inspect.signature(function).parameters))
            if not said:
                raise
            raise TypeError(f"{str(error).partition('. Did you')[0]}; {said}") from None

    return cast(F, call)


def what_it_is_here(theirs: str, parameters: list[str]) -> str:
    """What to say of a name that a function with these parameters does not know; "" if nobody knows what is meant."""
    for ours in THEIRS.get(theirs, ()):
        name = re.match(r"(\w+)(=|$)", ours)
        if name is None or name[1] in parameters:
            return f"here that is {ours}"
    alike = difflib.get_close_matches(theirs, parameters, 1, 0.75)
    return f"did you mean {alike[0]}?" if alike else ""
