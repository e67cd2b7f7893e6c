"""attention/names.py: an unknown argument that other libraries use is answered with our name for it."""

import inspect
import re

import ml_dtypes
import numpy as np
import pytest

import attention
from attention.names import ARGUMENT_HINTS, HINTS_BY_NAME, suggests_argument_names
from attention.options import AttentionArguments
from attention.public.linear_family import LinearArguments


def said(function, name):
    """The hint after Python's own message."""
    with pytest.raises(TypeError) as error:
        function(**{name: None})
    return str(error.value).partition(f"{function.__name__}() got an unexpected keyword argument {name!r}")[2]


KNOWN = [
    (attention.gla, "g", "decay"),
    (attention.lightning, "layer_idx", "layer"),
    (attention.retention, "decay", "an argument of attention.linear, gla and delta_rule"),
    (attention.linear, "beta", "an argument of attention.delta_rule"),
    (attention.delta_rule, "use_qk_l2norm_in_kernel", "qk_l2norm"),
    (attention.based, "use_qk_l2norm_in_kernel", "not an argument: divide q and k by their norms before the call"),
    (attention.delta_rule, "use_gate_in_kernel", "decay=attention.gates.softplus(a, A_log, dt_bias), or sigmoid"),
    (attention.based, "output_final_state", "return_state"),
    (attention.mamba2, "return_state", "return_final_states"),
    (attention.mamba2, "A_log", "A=-exp(A_log)"),
    (attention.hedgehog, "head_first", 'layout="bhsd" or "bshd"'),
    (attention.linear_step, "log_decay", "decay"),
    (attention.forward, "softmax_scale", "scale"),
    (attention.forward, "is_causal", "causal"),
    (attention.forward, "attn_mask", "bias=, which is added to the scores, or mask=, a function of b, h, i, j"),
    (attention.decode, "attn_bias", "bias=, which is added to the scores, or mask=, a function of b, h, i, j"),
    (attention.forward, "dropout_p", "dropout=, with a seed"),
    (attention.forward, "window_size", "window=(left, right), None where it is open"),
    (attention.forward, "cu_seqlens_q", "cu_seqlens"),
    (attention.forward, "block_table", "pages of attention.decode"),
    (attention.decode, "block_table", "pages"),
    (attention.decode, "cache_seqlens", "lengths"),
    (attention.forward, "cache_seqlens", "lengths_k"),
    (attention.decode, "cu_seqlens_k", "lengths"),
    (attention.mla_decode, "sm_scale", "scale"),
    (attention.append, "k_cache", "k"),
    (attention.backward, "grad_output", "dout"),
    (attention.backward, "softmax_lse", "lse"),
    (attention.quantize, "tensor_layout", 'layout="bhsd" or "bshd"'),
]


@pytest.mark.parametrize(("function", "theirs", "ours"), KNOWN)
def test_other_libraries_names(function, theirs, ours):
    """Errors name our arguments; help and editors see the function's own parameters."""
    assert said(function, theirs) == f"; here that is {ours}"
    assert theirs not in inspect.signature(function).parameters


def test_slips():
    assert said(attention.forward, "casual") == "; did you mean causal?"
    assert said(attention.decode, "lenghts") == "; did you mean lengths?"
    assert said(attention.forward, "xyz") == ""


def test_a_missing_argument_is_what_the_docstring_says_of_it():
    q = np.zeros((1, 4, 2, 16), ml_dtypes.bfloat16)
    with pytest.raises(TypeError, match=r"^decode\(\) missing 1 .*: 'lengths'; lengths: \(B\), int32 or int64, on q's"):
        attention.decode(q, q, q)
    with pytest.raises(TypeError, match=r"^delta_rule\(\) missing 1 .*: 'beta'; beta: \(B, S, H\)$"):
        attention.delta_rule(q, q, q)
    with pytest.raises(TypeError, match=r"^mla_decode\(\) missing 1 .*: 'scale'; scale: scores are scale q . k$"):
        attention.mla_decode(q, q, lengths=q)
    with pytest.raises(TypeError, match=r"^lightning\(\) missing 1 required positional argument: 'layers'$"):  # nothing to say
        attention.lightning(q, q, q, 1)


def test_options_have_names():
    q = np.zeros((1, 4, 2, 16), ml_dtypes.bfloat16)
    with pytest.raises(TypeError, match=r"^forward\(\) takes 3 .* but 4 were given; the others have names, such as bias=$"):
        attention.forward(q, q, q, True)


def test_an_error_inside_a_call_stays_as_it_is():
    def lacks():
        raise TypeError("f() missing 1 required positional argument: 'q'")

    def function(q):
        """The result of lacks, whose error is not about a call of this. q: (B, S)."""
        return lacks()

    with pytest.raises(TypeError, match="argument: 'q'$"):
        suggests_argument_names(function)(1)


@pytest.mark.parametrize(
    ("name", "homes"),
    [
        ("flash_attn_func", "attention.compat.flash_attn and attention.compat.flash_attn_interface have it"),
        ("scaled_dot_product_attention", "attention.compat.sdpa has it"),
        ("fused_recurrent_kda", "attention.compat.fla has it"),
    ],
)
def test_functions_of_other_libraries_have_homes(name, homes):
    with pytest.raises(AttributeError, match=f"^module 'attention' has no attribute '{name}'; {homes}$"):
        getattr(attention, name)
    with pytest.raises(AttributeError, match="^module 'attention' has no attribute 'fwd'$"):
        attention.fwd  # noqa: B018


OTHERS = "block_lists", "dropout_mask", "register_torch_ops"  # take options of another's, few arrays, nothing
PUBLIC = [getattr(attention, name) for name in attention.__all__ if name not in OTHERS]


@pytest.mark.parametrize("function", PUBLIC, ids=lambda f: f.__name__)
def test_every_public_function_answers(function):
    assert said(function, "streem") == "; did you mean stream?"


@pytest.mark.parametrize(
    ("layer", "given", "hint"),
    [
        ("GatedDeltaNet", "heads", "here that is num_heads"),
        ("Attention", "num_kv_heads", "here that is kv_heads"),
        ("Attention", "rope_theta", "here that is rotary=10_000, the base of the angles"),
        ("Mamba2", "n_heads", "here that is headdim=, the columns of a head"),
        ("Mamba2", "chunk_size", "here that is not an argument: shapes and dtypes say which kernels run"),
        ("GatedDeltaNet", "mode", "here that is not an argument: shapes and dtypes say which kernels run"),
        ("GatedDeltaNet", "layer_idx", "here that is not an argument: each layer that is given a cache has one of its own"),
        ("KimiDeltaAttention", "safe_gate", "here that is lower_bound=, the lowest gate"),
        ("GatedLinearAttention", "use_output_gate", "here that is use_gate"),
    ],
)
def test_layers(layer, given, hint):
    nn = pytest.importorskip("attention.nn")
    with pytest.raises(TypeError, match=f"{layer}.__init__.*'{given}'; {hint}"):
        getattr(nn, layer)(64, **{given: 2})


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("attention_mask", "here that is cu_seqlens=, of sequences without padding"),
        ("past_key_values", "here that is cache=, which layer.new_cache"),
    ],
)
def test_calls_of_layers(given, hint):
    torch = pytest.importorskip("torch")
    layer = pytest.importorskip("attention.nn").Mamba2(64, d_state=16, headdim=16)
    with pytest.raises(TypeError, match=f"^RecurrentLayer.forward.*'{given}'; {hint}"):
        layer(torch.zeros(1, 2, 64), **{given: None})


def test_every_row_serves():
    """No name is in two rows, and each answer is an argument of a function, or a sentence."""
    assert len(HINTS_BY_NAME) == sum(len(names.split()) for names, *_ in ARGUMENT_HINTS)
    nn = pytest.importorskip("attention.nn")
    layers = [getattr(nn, layer) for layer in ("Attention", "GatedDeltaNet", "KimiDeltaAttention", "Mamba2")]
    functions = *PUBLIC, *layers, nn.GatedDeltaNet.forward
    known = {name for function in functions for name in inspect.signature(function).parameters}
    for theirs, hints in HINTS_BY_NAME.items():
        for ours in hints:
            name = re.match(r"(\w+)(=|$)", ours)
            assert name is None or name[1] in known, (theirs, ours)


def test_help_shows_the_arguments_that_functions_share():
    """They come first among those that have names, as if the function had them itself."""
    for function, shared in (attention.forward, AttentionArguments), (attention.gla, LinearArguments):
        parameters = inspect.signature(function).parameters
        named = [name for name, x in parameters.items() if x.kind is x.KEYWORD_ONLY]
        assert named[: len(shared.__annotations__)] == [*shared.__annotations__] and "arguments" not in parameters
