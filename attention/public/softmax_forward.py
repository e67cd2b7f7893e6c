"""attention.forward and attention.block_lists: they check a user's arguments and choose the program of forward_programs.py."""

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from tiles.calls.jax_call import is_jax_tracer
from tiles.calls.torch_op import imported_module, is_mapped_with_grad, is_traced

from ..names import suggests_argument_names
from ..options import DEFAULTS, AttentionArguments, check_flag, check_number, check_positive
from ..plans.requires_grad import autograd, refuse_with_gradients, requires_grad
from ..plans.softmax.call_options import block_options, dropout_options, score_options
from ..plans.softmax.forward_programs import (
    _block_lists,
    _forward,
    _forward_accumulated,
    _forward_float32,
    _forward_fp8,
    _fp8_cache,
    _variant,
)
from ..plans.softmax.fp8_checks import DESCALES, NOT_WITH_FP8, is_fp8, refuse_with_fp8, split_descale
from ..plans.softmax.gradient import flatten_arrays
from ..plans.softmax.prepared_lists import BlockLists, BlockListsRequest

if TYPE_CHECKING:
    from typing_extensions import Unpack

ITEM_BYTES = 2  # of bfloat16 and float16
FORWARD_ARGUMENTS = frozenset(AttentionArguments.__annotations__)


@suggests_argument_names
def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    scale: float | None = None,
    deterministic: bool = False,
    layout: str = "bshd",
    out: Any = None,
    lse: Any = None,
    return_lse: bool = False,
    accumulate: bool = False,
    stream: Any = None,
    family: str | None = None,
    **arguments: "Unpack[AttentionArguments]",
) -> Any:
    """Attention: out = softmax(scale * q k^T) v, per batch and head.

    q: (B, Sq, H, D). k: (B, Sk, Hk, D). v: (B, Sk, Hk, Dv). With layout="bhsd": (B, H, S, D) and so on. bfloat16 or
    float16 (for fp8 see below). D and Dv: multiples of 8 up to 256. H: a multiple of Hk (GQA, MQA); query head h reads key
    head h // (H // Hk). Any lengths. Any base addresses, and any strides with a contiguous last axis; multiples of 16 bytes
    are fast. Nothing is ever copied.

    Which keys a query sees: those that all of these allow. A query that sees no key gives 0.
        causal: query i sees key j if j <= i + Sk - Sq (aligned bottom-right).
        window: (left, right): the keys from i + Sk - Sq - left to i + Sk - Sq + right; None is open.
        mask: mask(b, h, i, j, *aux), in Python.
        blocks: lists of blocks of keys for each block of queries; keys in other blocks are not seen. FlexAttention's
            BlockMask, or an object with its fields: BLOCK_SIZE, (rows, columns) of a block; for each row of blocks how many are
            partly seen, and which: kv_num_blocks (B or 1, H or 1, rows) and kv_indices (.., n); the same for blocks that are
            seen whole, full_kv_num_blocks and full_kv_indices, or None. mask is evaluated in partly seen blocks only. Or the
            result of `block_lists` for such calls, whose key blocks are then not searched again.

    What becomes of a score s = scale q_i . k_j, in this order:
        scale: 1 / sqrt(D) by default.
        softcap: softcap tanh(s / softcap).
        alibi: slopes (H) or (B, H): s - slope |i + Sk - Sq - j|.
        bias: s + bias; (B or 1, H or 1, Sq or 1, Sk) of float32, bfloat16 or float16.
        score: score(s, b, h, i, j, *aux), in Python.
        sink: (H) logits; exp(sink) joins the sum of weights.

    mask and score are written as for FlexAttention, with b, h, i, j counting from 0. In kernels they get tiles: s is one of
    scores, i a vector of queries, j one of keys, whole numbers below 2**24. Elsewhere they get NumPy arrays. Comparisons, &
    | ~, + - * / // %, abs, `where` and the maps of `ops` work on both. So do elements of aux, up to 8 arrays of numbers,
    indexed by i, j, b and h: `docs[i] == docs[j]`. They must exist wherever a key is seen: docs/variants.md says which
    indices are checked. Key blocks in which a mask holds nowhere are skipped, except for packed sequences.

    Sequences:
        cu_seqlens: (N + 1), ascending from 0 to Sq, in a batch of 1: sequence n has the queries from cu_seqlens[n] to
            cu_seqlens[n + 1]. Everything above then applies to each sequence by itself, and b is its number. Of queries behind
            the last one, which a GPU's arrays may have, out is 0 and lse is -inf.
        cu_seqlens_k: the same for keys; cu_seqlens by default.
        lengths_k: (B) or (N), how many keys of each sequence are in use. Or (B, C): each of C equal parts of a batch's queries
            is a sequence by itself, of which the first lengths_k[b, c] keys are in use; without gradients, mask, score, bias,
            dropout and slopes of each batch.

    q_norm, k_norm, norm_eps: norms of the rows of q and k, before everything else. Weights (D), or (H, D) and (Hk, D), of
    an RMS norm: x / sqrt(mean(x^2) + norm_eps) * weights. Or a pair (weights, bias) of a layer norm: the same of x -
    mean(x), plus bias. Queries are normalised in the kernel. Keys are normalised by a small kernel before it, and rounded to
    k's dtype.

    dropout: the probability that a weight is dropped, from 0 to below 1, in steps of 2^-16. The others count 1 / (1 -
    dropout) times, and lse is that of all. Which are dropped depends on seed, b, h, i and j only: attention.dropout_mask
    returns it. seed: an integer from 0 to 2^63, or an array of one (int64), whose value may change while a graph that holds
    the call lives. Changing either costs nothing.

    fp8. q, k and v of float8_e4m3fn (on Hopper, D and Dv multiples of 16): both products are computed in fp8, with weights
    rounded to e4m3 at 2^8 times their size, and summed in float32. out is bfloat16, or float16 if you give such an array. There
    is no bias, q_norm, k_norm, dropout or gradient.
        q_descale, k_descale, v_descale: positive numbers by which the arrays are multiplied; 1 by default. A number or float32
            (Hk) or (B, Hk), with N instead of B for packed sequences. Or one for each block of 128 rows, as
            attention.quantize makes them: (B, blocks, H) for q, (B, blocks, Hk) for k and v, with layout="bhsd" the blocks
            last; for up to 128 columns, and sequences that have a batch each.
        If only k and v are float8_e4m3fn, on any GPU that knows it, small kernels convert them to q's dtype first, with
        descales of heads; everything but gradients works as without.

    deterministic: torch's gradients of this call have the same bits every time, as they have under
    torch.use_deterministic_algorithms: see backward. The results of forward itself always have.

    out, lse: written in place instead of new arrays. out has q's dtype, or is float32, unrounded; lse needs return_lse=True.

    accumulate: out and lse (float32, both given) hold the result for other keys, as calls with return_lse=True returned it,
    and are updated to the result of one softmax over those keys and these. So keys may come in parts:

        lse = log(exp(lse) + exp(lse'))        out = exp(lse_before - lse) out + exp(lse' - lse) out'

    A sink joins the sum once for each call that has it. Not with fp8 or gradients.

    stream: the CUDA stream; by default the current one of q's framework. family: the instructions to use, "sm_90" (wgmma and
    TMA: Hopper, and multiples of 16 bytes) or "sm_80" (mma.sync and cp.async: any GPU since Ampere); by default the first
    where it can run, and for few queries of many keys, without options, decode's kernels, which share out the keys.

    Returns `out`, the same kind of array as q, or with return_lse=True `(out, lse)`. lse, (B, H, Sq) in float32, is the
    natural logarithm of the sum of exp(score), and -inf for a query that sees no key. Both have
    gradients, in torch and JAX: `backward`.

    Arrays are torch's, CuPy's, JAX's, Numba's or anything with `__dlpack__` or `__cuda_array_interface__`. NumPy arrays and
    others in host memory run in the interpreter, which is slow and checks every access.

    ValueError, TypeError: an argument is wrong; the message names it and prints the values. Nothing was launched."""
    common = check_number("scale", scale), check_flag("return_lse", return_lse), family
    arrays, options = flatten_arrays(arguments, FORWARD_ARGUMENTS) if arguments else ({}, {})
    keys_fp8, descales = is_fp8(k), (q_descale, k_descale, v_descale)
    if keys_fp8 or not (q_descale is k_descale is v_descale is None):
        _check_fp8_options(q, keys_fp8, descales, arrays | options)
    if deterministic is not False and check_flag("deterministic", deterministic) and is_jax_tracer(q):
        raise NotImplementedError(
            "deterministic: is not supported for JAX's gradients; call attention.backward with deterministic=True"
        )
    simple = not (arrays or options or keys_fp8)
    # Most calls are simple. They return here, so each line before costs them time.
    if simple and stream is lse is None and accumulate is False:
        if not requires_grad(q, k, v):
            if out is None or getattr(out, "itemsize", 0) == ITEM_BYTES:
                try:
                    return _forward(None, (q, k, v, out, None), (check_flag("causal", causal), *common), layout)
                except NotImplementedError:  # tensors inside those of torch.vmap may require grad
                    if not is_mapped_with_grad((q, k, v)):
                        raise
        elif out is None:
            few_options = check_flag("causal", causal), common[0], deterministic, family, layout
            results = autograd().attend_without_options(q, k, v, few_options, common[1])
            if results is not None:
                return results
    # Calls with tensors that require grad.
    arrays = {"q": q, "k": k, "v": v} | arrays
    differentiable = arrays.values()
    if keys_fp8 and requires_grad(*differentiable):
        raise NotImplementedError("q: requires grad, and fp8 attention has no gradients; call it under torch.no_grad()")
    blocks = options.get("blocks")
    if (requires_grad(*differentiable) or is_mapped_with_grad(differentiable)) and not isinstance(blocks, BlockListsRequest):
        refuse_with_gradients(out=out, lse=lse, stream=stream, accumulate=check_flag("accumulate", accumulate) or None)
        options |= {"causal": causal, "scale": scale, "layout": layout, "family": family}
        options |= {"deterministic": True} if deterministic else {}
        options = {name: x for name, x in options.items() if x is not None}
        return autograd().attend_with_gradients(arrays, options, common[1])
    # All other calls: choose the program, and pass its arrays and options in their order.
    float32_out = out is not None and getattr(out, "itemsize", 0) != ITEM_BYTES and "float32" in str(getattr(out, "dtype", ""))
    accumulates = accumulate is not False and check_flag("accumulate", accumulate)
    if accumulates and (keys_fp8 or out is None or lse is None):
        raise TypeError("accumulate: needs out and lse of float32, and k and v that are not fp8")
    if lse is not None and not (accumulates or return_lse):
        raise TypeError("lse: needs return_lse=True")
    if simple and not (float32_out or accumulates):
        return _forward(stream, (q, k, v, out, lse), (check_flag("causal", causal), *common), layout)
    random, (list_options, lists) = dropout_options(options, arrays), block_options(blocks)
    arrays |= {**lists, **random.seeds}
    scores = check_flag("causal", causal), *score_options(options), *list_options
    if keys_fp8:
        units, descales = zip(*[split_descale(name, x) for name, x in zip(DESCALES, descales)])
        arrays |= {name: x for name, x in zip(DESCALES, descales) if x is not None}
    if not isinstance(blocks, BlockListsRequest):
        arrays |= {"out": out, "lse": lse}
    if is_fp8(q):
        return _forward_fp8(stream, _forward_fp8.in_order(arrays), (*scores, *units, *common), layout)
    norm_eps = check_positive("norm_eps", options.get("norm_eps", DEFAULTS["norm_eps"]))
    in_order = *scores, norm_eps, random.dropout, random.seed, *common
    if keys_fp8:
        return _fp8_cache(stream, _fp8_cache.in_order(arrays), (*units[1:], *in_order), layout)
    if isinstance(blocks, BlockListsRequest):
        return _block_lists(stream, _block_lists.in_order(arrays), in_order, layout)
    program = _forward_accumulated if accumulates else _forward_float32 if float32_out else _variant
    results = program(stream, program.in_order(arrays), in_order, layout)
    if accumulates:
        return (out, lse) if return_lse else out
    return results


def _check_fp8_options(q: Any, keys_fp8: bool, descales: tuple, options: dict[str, Any]) -> None:
    """NotImplementedError: fp8 attention does not support an argument. ValueError: there are descales, but no array of fp8."""
    q_descale, *_ = descales
    lists = isinstance(options.get("blocks"), BlockListsRequest)
    if keys_fp8 and is_fp8(q):
        refuse_with_fp8(**{name: options.get(name) for name in NOT_WITH_FP8}, block_lists=lists)
    elif keys_fp8:
        refuse_with_fp8(q_descale=q_descale, block_lists=lists)
    else:
        name = next(name for name, x in zip(DESCALES, descales) if x is not None)
        raise ValueError(f"{name}: needs k and v of float8_e4m3fn, as attention.quantize makes them; otherwise omit it")


def forward_without_options(
    q: Any, k: Any, v: Any, causal: bool, scale: float | None, family: str | None, layout: str
) -> tuple[Any, Any]:
    """(out, lse) of forward on the current stream, with these options only."""
    return _forward(None, (q, k, v, None, None), (causal, scale, True, family), layout)


def block_lists(q: Any, k: Any, v: Any, *, blocks: Any = None, **variant: Any) -> BlockLists:
    """The lists of key blocks of a mask, or of blocks, made once for many calls:

        lists = block_lists(q, k, v, mask=mask, aux=(docs,))
        out = forward(q, k, v, mask=mask, aux=(docs,), blocks=lists)

    In every call forward finds anew which blocks of keys a mask lets a tile of queries see, because what aux holds may have
    changed. If you know that it has not, make the lists once. They serve all calls with the same number of queries and keys,
    the same mask, window and causal, and the same tile size, which depends on D, Dv, the dtype, the family and the other
    options. If the mask does not read b and h, batches and heads may differ. forward refuses other calls, but does not look
    at what aux holds.

    q, k, v and variant: forward's arguments in those calls. Only the arrays of aux and blocks are read. The lists are made
    on the stream; calls on other streams must wait for them. They live as long as the object does.

    ValueError, TypeError: as forward; or there is neither a mask nor blocks; or sequences are packed, or have lengths_k."""
    if refused := {"out", "return_lse"} & variant.keys():
        raise TypeError(f"{min(refused)}: is an argument of forward; block_lists has no output")
    if is_traced(q) or is_jax_tracer(q):
        raise TypeError("q: call block_lists outside of torch.compile and jax.jit, and pass the lists in")
    torch = imported_module("torch")
    with nullcontext() if torch is None else torch.no_grad():  # of tensors that require grad, too
        return forward(q, k, v, blocks=BlockListsRequest(blocks), **variant)
