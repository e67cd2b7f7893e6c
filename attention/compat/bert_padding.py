"""flash_attn.bert_padding: `from attention.compat.bert_padding import pad_input, unpad_input`.

These convert a padded batch (batch, seqlen, ...) to packed sequences (total, ...), as flash_attn_varlen_func takes them, and
back. They consist of torch ops, are differentiable, and launch no kernel of ours."""

from __future__ import annotations

from typing import Any

__all__ = ["index_first_axis", "pad_input", "unpad_input"]


def unpad_input(hidden_states: Any, attention_mask: Any, unused_mask: Any = None) -> tuple[Any, Any, Any, int, Any]:
    """(tokens, indices, cu_seqlens, max_seqlen, seqused). tokens: the rows of hidden_states (batch, seqlen, ...) where
    attention_mask or unused_mask (batch, seqlen) is true, packed. indices: their positions in (batch * seqlen). cu_seqlens:
    where each sequence begins and ends, int32. max_seqlen: the longest length. seqused: how many tokens of each sequence
    attention_mask marks. ValueError: a mask has another shape. The host waits for the device, as torch.nonzero does."""
    shape = tuple(hidden_states.shape[:2])
    for name, mask in ("attention_mask", attention_mask), ("unused_mask", unused_mask):
        if mask is not None and tuple(mask.shape) != shape:
            raise ValueError(f"{name}: must be (batch, seqlen) of hidden_states, {shape}: {name}.shape={tuple(mask.shape)}")
    used = attention_mask.bool()
    visible = used if unused_mask is None else used | unused_mask.bool()
    indices = visible.flatten().nonzero().flatten()
    lengths = visible.sum(-1)
    ends = lengths.new_zeros(len(lengths) + 1).int()
    ends[1:] = lengths.cumsum(0)
    longest = int(lengths.max()) if len(lengths) else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, ends, longest, used.sum(-1).int()


def pad_input(hidden_states: Any, indices: Any, batch: int, seqlen: int) -> Any:
    """The packed rows (total, ...) at their indices in (batch * seqlen), as (batch, seqlen, ...), with 0 everywhere else."""
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))


def index_first_axis(x: Any, indices: Any) -> Any:
    """x[indices]: the rows of x at these indices."""
    return x.index_select(0, indices)
