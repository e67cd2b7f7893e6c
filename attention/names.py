"""The names that other libraries use for arguments of ours: a table. When a public function gets an argument that it does not
have, its TypeError says the name to use instead; when it lacks one, what its docstring says of it."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from .options import DEFAULTS

F = TypeVar("F", bound=Callable)
BIAS, MASK = "bias=, which is added to the scores, or mask=, a function of b, h, i, j", "mask=, a function of b, h, i, j"
# (names of other libraries, hints ...): the first hint counts that is a sentence, or an argument that the function has
ARGUMENT_HINTS = (
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
    ("enable_gqa num_key_value_groups pack_gqa", "not an argument: the shapes of q and k say it"),
    ("num_kv_heads num_key_value_heads n_kv_heads", "kv_heads", "not an argument: the shapes of q and k say it"),
    ("kv_cache_dtype kv_dtype cache_dtype", "not an argument: the dtype of k and v says it"),
    ("max_seqlen max_seqlen_q max_seqlen_k max_s", "not an argument: cu_seqlens says it"),
    ("cu_seqlens_q qo_indptr cu_seq_lens_q q_start_loc", "cu_seqlens"),
    ("cu_seqlens_kv kv_indptr cu_seq_lens_k", "cu_seqlens_k", "lengths", "cu_seqlens"),
    ("cu_seqlens_k", "lengths", "cu_seqlens"),
    ("cu_seqlens_k_new", "cu_seqlens_new"),
    ("cache_seqlens context_lens seq_lens kv_seq_lens lengths_k", "lengths", "lengths_k"),
    ("seqused_k kv_lens kv_len seq_lens_k key_padding_mask lengths", "lengths_k", "lengths"),
    ("attention_mask", "lengths_k=, or cu_seqlens of packed sequences", "lengths", "cu_seqlens=, of sequences without padding"),
    ("block_table block_tables page_table kv_indices", "pages", "pages of attention.decode"),
    ("dropout", "an argument of attention.forward"),
    ("slot_mapping", "not an argument: lengths and pages say where new tokens go"),
    ("pages", "an argument of attention.decode"),
    ("page_size block_size num_pages num_blocks num_gpu_blocks", "layers=, the pools (pages, page size, Hk, D) of each layer"),
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
    # layers
    ("heads num_heads n_heads n_head nhead num_attention_heads", "heads", "num_heads", "headdim=, the columns of a head"),
    ("dim hidden_size d_model embed_dim n_embd", "dim", "hidden_size", "d_model"),
    ("d_head dim_head headdim", "head_dim"),
    ("is_rotary rope rope_theta rotary_base", "rotary=10_000, the base of the angles"),
    # flash-linear-attention and mamba_ssm
    ("output_final_state return_final_states return_final_state", "return_state"),
    ("g gk g_gamma log_decay", "decay"),
    ("decay", "an argument of attention.linear, gla and delta_rule"),
    ("beta", "an argument of attention.delta_rule"),
    ("normalize", "an argument of attention.linear"),
    ("initial_states h0", "initial_state"),
    ("use_norm use_normalize", "normalize"),
    ("conv_state conv_states cache", "initial_state=, the last W - 1 tokens"),
    ("act_fn act", "activation"),
    ("return_state output_final_states", "return_final_states"),
    ("initial_state", "initial_states"),
    ("layer_idx", "layer", "not an argument: each layer that is given a cache has one of its own, layer.new_cache(batch_size)"),
    ("mode chunk_size use_mem_eff_path fuse_norm", "not an argument: shapes and dtypes say which kernels run"),
    ("use_output_gate", "use_gate"),
    ("past_key_values past_key_value use_cache", "cache=, which layer.new_cache(batch_size) makes"),
    ("num_layers", "layers"),
    ("feature_map_q", "q_map"),
    ("feature_map_k", "k_map"),
    (
        "use_qk_l2norm_in_kernel l2norm normalize_qk",
        "qk_l2norm",
        "not an argument: divide q and k by their norms before the call",
    ),
    (
        "A_log dt_bias use_gate_in_kernel safe_gate lower_bound",
        "decay=attention.gates.softplus(a, A_log, dt_bias), or sigmoid",
        "lower_bound=, the lowest gate",
        "A=-exp(A_log)",
    ),
    ("use_beta_sigmoid_in_kernel allow_neg_eigval", "beta=attention.gates.beta(b, doubled=False)"),
    ("return_varlen_states", "return_final_states with cu_seqlens"),
)
HINTS_BY_NAME = {name: hints for names, *hints in ARGUMENT_HINTS for name in names.split()}


def suggests_argument_names(function: F, defaults: Mapping[str, Any] = DEFAULTS) -> F:
    """Decorator: a TypeError about an unknown argument also says what argument_hint knows of it, one about arguments that are
    missing or have no names what binding_hint knows. A correct call pays for one more Python call, and for no check. defaults:
    see flatten_signature."""

    signature = flatten_signature(function, defaults)

    @functools.wraps(function)
    def call(*args, **options):
        try:
            return function(*args, **options)
        except TypeError as error:
            name = next((name for name in options if name not in signature.parameters), None)
            if name is not None:
                message = f"{function.__qualname__}() got an unexpected keyword argument {name!r}"
                hint = argument_hint(name, [*signature.parameters])
            else:
                message, was_called = str(error), error.__traceback__.tb_next is not None
                documented = type(args[0]) if function.__name__ == "__init__" else function
                hint = "" if was_called else binding_hint(message, signature, inspect.getdoc(documented) or "")
                if not hint:
                    raise
            raise TypeError(f"{message}; {hint}" if hint else message) from None

    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__annotations__ = {name: x.annotation for name, x in signature.parameters.items()}
    call.__annotations__["return"] = signature.return_annotation
    return cast(F, call)


def flatten_signature(function: Callable, defaults: Mapping[str, Any] = DEFAULTS) -> inspect.Signature:
    """The function's signature. Where it takes `**arguments: Unpack[Fields]`, the fields of this TypedDict are parameters, with
    these defaults, or else None."""
    signature = inspect.signature(function)
    *parameters, last = signature.parameters.values()
    unpacked = re.fullmatch(r"Unpack\[(\w+)\]", str(last.annotation))
    if unpacked is None:
        return signature
    fields = inspect.unwrap(function).__globals__[unpacked[1]].__annotations__
    kinds = [parameter.kind for parameter in parameters]
    first = kinds.index(last.KEYWORD_ONLY) if last.KEYWORD_ONLY in kinds else len(kinds)
    flat = [last.replace(name=x, kind=last.KEYWORD_ONLY, default=defaults.get(x), annotation=fields[x]) for x in fields]
    return signature.replace(parameters=[*parameters[:first], *flat, *parameters[first:]])


def argument_hint(name: str, parameters: list[str]) -> str:
    """What to use instead of an argument `name` in a call of a function that has these parameters; "" if nothing is known."""
    for hint in HINTS_BY_NAME.get(name, ()):
        argument = re.match(r"(\w+)(=|$)", hint)
        if argument is None or argument[1] in parameters:
            return f"here that is {hint}"
    similar = difflib.get_close_matches(name, parameters, 1, 0.75)
    return f"did you mean {similar[0]}?" if similar else ""


def binding_hint(message: str, signature: inspect.Signature, docstring: str) -> str:
    """What Python's message about a call that does not fit the signature leaves out: the first sentence that the docstring has
    about a missing argument, or which arguments have names; "" if there is nothing to say."""
    if missing := re.search(r" missing .*?: '(\w+)'", message):
        names, end = rf"(?:\w+, )*{missing[1]}(?:, \w+)*", r"(?:(?<=\S)\.(?:\s|$)|\n\n)"
        meaning = re.search(rf"(?:^|[\s.;])({names}: .+?){end}", docstring, re.DOTALL)
        return " ".join(meaning[1].split()) if meaning else ""
    named = [name for name, x in signature.parameters.items() if x.kind is x.KEYWORD_ONLY]
    return f"the others have names, such as {named[0]}=" if named and " positional argument" in message else ""
