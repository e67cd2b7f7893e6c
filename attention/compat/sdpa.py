"""torch.nn.functional's function: `from attention.compat.sdpa import scaled_dot_product_attention`."""

from __future__ import annotations

from typing import Any

from .arguments import ERRORS, array_namespace, attend_heads_first, draw_dropout_options, drop_none, refuse, rename_arguments

__all__ = ["scaled_dot_product_attention"]

ARGUMENT_NAMES = {"q": "query", "k": "key", "v": "value", "bias": "attn_mask", "dropout": "dropout_p", "causal": "is_causal"}


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """softmax(scale query key^T + attn_mask) value. query: (B, Hq, Sq, D); key: (B, Hk, Sk, D); value: (B, Hk, Sk, Dv); also
    without B and with one H, (N, S, D).

    | torch                                       | attention.forward                                            |
    | ------------------------------------------- | ------------------------------------------------------------ |
    | (B, H, S, D)                                | layout="bhsd"                                                |
    | attn_mask of floats                         | bias                                                         |
    | attn_mask of booleans, true where seen      | bias of 0 and -inf                                           |
    | is_causal: aligned at the top left          | causal where Sq = Sk; `align_top_left` says how otherwise    |
    | causal_upper_left, causal_lower_right       | the same; causal                                             |
    | dropout_p                                   | dropout; the seed is drawn, see `draw_dropout_options`      |
    | enable_gqa                                  | ignored: GQA follows from the shapes                         |

    If query's heads lie inside its tokens in memory, as in x.transpose(1, 2), so do the output's and the gradients'. A query
    that sees no key gives 0. A mask in Python costs no memory and skips blocks: attention.forward(.., mask=..)."""
    if is_causal and attn_mask is not None:
        padded = "if it hides padded keys, call attention.forward(.., causal=True, lengths_k=lengths)"
        raise ValueError(f"attn_mask: must be None with is_causal=True, as in torch; {padded}")
    refuse("query", query.ndim not in (3, 4), "reshape query, key and value to (B, H, S, D)")
    is_causal_bias = type(attn_mask).__module__ == "torch.nn.attention.bias"  # a CausalBias has no elements
    if query.ndim == 3:
        attn_mask = attn_mask if attn_mask is None or is_causal_bias or attn_mask.ndim < 3 else attn_mask[:, None]
        result = scaled_dot_product_attention(
            query[:, None], key[:, None], value[:, None], attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return result[:, 0]
    options = drop_none(scale=scale) | draw_dropout_options(dropout_p, query)
    if is_causal_bias:
        mask_sizes, sizes = (attn_mask.seq_len_q, attn_mask.seq_len_kv), (query.shape[2], key.shape[2])
        if mask_sizes != sizes:
            raise ValueError(f"attn_mask: must be a CausalBias of query's and key's tokens, {sizes}: it is of {mask_sizes}")
        is_causal = attn_mask.variant.name == "UPPER_LEFT"
        options |= {} if is_causal else {"causal": True}
    elif attn_mask is not None:
        options["bias"] = as_bias(attn_mask, key.shape[2])
    if is_causal:
        key, value, mask_options = align_top_left(query.shape[2], key, value)
        options |= mask_options
    try:
        return attend_heads_first(query, key, value, **options)
    except ERRORS as error:
        rename_arguments(error, ARGUMENT_NAMES)
        raise


def align_top_left(queries: int, key: Any, value: Any) -> tuple[Any, Any, dict[str, Any]]:
    """(key, value, options) with which query i sees the keys j <= i, although forward aligns the last query with the last key.

    Keys after the last query are seen by no query, and are cut off. With fewer keys than queries, j <= i is j <= d + Sq - Sk,
    where d = i + Sk - Sq is the key on query i's diagonal: a window that is open to the left."""
    keys = key.shape[2]
    if keys > queries:
        key, value, keys = key[:, :, :queries], value[:, :, :queries], queries
    return key, value, {"causal": True} if keys == queries else {"window": (None, queries - keys)}


def as_bias(attn_mask: Any, keys: int) -> Any:
    """A mask that broadcasts to (B, H, Sq, Sk) as forward's bias (B or 1, H or 1, Sq or 1, Sk)."""
    xp = array_namespace(attn_mask)
    if len(attn_mask.shape) > 4 or not attn_mask.shape or attn_mask.shape[-1] not in (1, keys):
        raise ValueError(f"attn_mask: must broadcast to (B, H, Sq, Sk), Sk={keys}: attn_mask.shape={tuple(attn_mask.shape)}")
    if "int" in str(attn_mask.dtype):
        raise TypeError(
            f"attn_mask: must hold booleans, true where a key is seen, or floats to add: attn_mask.dtype={attn_mask.dtype}"
        )
    if attn_mask.dtype in (bool, getattr(xp, "bool", None)):
        attn_mask = xp.where(attn_mask, 0.0, -float("inf"))
        if hasattr(attn_mask, "astype"):  # NumPy makes it float64, torch float32
            attn_mask = attn_mask.astype("float32")
    attn_mask = attn_mask[(None,) * (4 - attn_mask.ndim)]
    return attn_mask if attn_mask.shape[-1] == keys else xp.broadcast_to(attn_mask, (*attn_mask.shape[:-1], keys))
