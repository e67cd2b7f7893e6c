"""The checks of attention.forward for the whole sequence's arrays. A rank's shards have other shapes: an array that is too
short for the whole, or a wrong end of a sequence, might pass the checks of each subcall, or fail on some ranks only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tiles.launching.arrays import Form, Number
from tiles.launching.checks import ENDS_K, ENDS_Q, KEY_LENGTHS, Check, check_options
from tiles.launching.frameworks import describe

from ..options import ScoreOptions, check_flag
from ..plans.softmax.call_options import AUX, block_options, dropout_options, score_options
from ..plans.softmax.forward_launches import expand_axes
from ..plans.softmax.forward_programs import VARIANTS, find_kv_block_size
from ..plans.softmax.gradient import NORMS, flatten_arrays
from ..plans.softmax.planning import check_extents, norm_and_dropout_parts
from ..scoring.index_checks import IndexingFunctions, plan_index_checks
from .peers import check_torch_tensors

COUNTS = {"cu_seqlens": ENDS_Q, "cu_seqlens_k": ENDS_K, "lengths_k": KEY_LENGTHS}  # the checks of their values
CHECKED_ARRAYS = "alibi", "sink", "bias", *COUNTS


def check_whole(q: Any, k: Any, v: Any, length: int, length_k: int, options: Mapping[str, Any]) -> None:
    """TypeError, ValueError, NotImplementedError: one GPU would not take these options with so many queries and keys; or the
    bias does not have the rows of this rank's queries."""
    check_torch_tensors(**{name: options[name] for name in ("bias", *COUNTS) if name in options})
    block_options(options.get("blocks"))
    aux = options.get("aux", ())
    if len(aux) == AUX and options.keys() & {"mask", "score"}:
        raise TypeError(
            f"aux: must have at most {AUX - 1} arrays on several ranks, which pass one more to mask and score: {len(aux)=}"
        )
    problem = VARIANTS.problem(_forms(q, k, v, length, length_k, options), "bshd")
    check_extents(problem)
    expand_axes(problem, "bias", ("sequences", "heads", "seqlen_q", "seqlen_k"))
    expand_axes(problem, "alibi", ("sequences", "heads"))
    if "parts" in problem.extents:
        raise NotImplementedError(
            "lengths_k: for parts of queries it is not supported on several ranks; give one length for each batch"
        )
    read = [problem[f"aux{n}"] for n in range(len(aux))]
    scores = ScoreOptions(bool(options.get("causal")), *score_options(options))
    plan_index_checks(problem, IndexingFunctions(options.get("mask"), options.get("score"), read, scores, length_k))


def find_kv_block(q: Any, k: Any, v: Any, length: int, length_k: int, options: Mapping[str, Any]) -> int | None:
    """How many keys a block has in the kernel by which one GPU computes the whole; None if there is nothing to compute. q, k,
    v: a rank's shards."""
    blocks, random = block_options(options.get("blocks")), dropout_options(options, {})
    norms = {name: options[name] for name in NORMS if name in options}
    others = flatten_arrays(norms)[0] | random.seeds | blocks.arrays
    forms = _forms(q, k, v, length, length_k, options)
    forms |= {name: describe(x, name).form for name, x in others.items() if x is not None}
    problem = VARIANTS.problem(forms, "bshd")
    if 0 in problem("batch", "seqlen_q", "heads", "seqlen_k"):
        return None
    scores = ScoreOptions(check_flag("causal", options.get("causal", False)), *score_options(options))
    seed = None if random.seed is None else Number(0)  # its value does not affect the plan
    extra_parts = norm_and_dropout_parts(problem, options.get("norm_eps", 1e-6), random.dropout, seed)
    return find_kv_block_size(problem, scores, blocks.options, options.get("scale"), options.get("family"), extra_parts)


def _forms(q: Any, k: Any, v: Any, length: int, length_k: int, options: Mapping[str, Any]) -> dict[str, Form]:
    """The forms of the whole's arrays, by name. ValueError: the bias does not have the rows of this rank's queries."""
    arrays = {"q": q, "k": k, "v": v} | {name: options[name] for name in CHECKED_ARRAYS if name in options}
    arrays |= {f"aux{n}": x for n, x in enumerate(options.get("aux", ()))}
    forms = {name: describe(x, name).form for name, x in arrays.items()}
    for name, tokens in ("q", length), ("k", length_k), ("v", length_k):
        forms[name] = _with_tokens(forms[name], 1, tokens)
    if "bias" in forms and len(shape := forms["bias"].shape) == 4 and shape[2] != 1:
        if shape[2] != q.shape[1]:
            raise ValueError(f"bias: must have one row, or one for each query of this rank: {shape=}, queries={q.shape[1]}")
        forms["bias"] = _with_tokens(forms["bias"], 2, length)
    return forms


def check_values(options: Mapping[str, Any], length: int, length_k: int, planning: bool = False) -> None:
    """ValueError: cu_seqlens or lengths_k have values that one GPU would not take for the whole. The subcalls clamp them, so no
    kernel would notice. Checked in every call, because the values may differ between calls with one signature; values on a GPU
    are read only when planning with TILES_CHECK."""
    for name in COUNTS.keys() & options.keys():
        x = options[name]
        if x.is_cuda and not (planning and check_options().values):
            continue
        array = describe(x, name)
        stream = 0 if array.device is None else array.kind.stream(x, array.device)
        Check([(name, 0, array.form, COUNTS[name])], {"seqlen_q": length, "seqlen_k": length_k}).run(stream, [array.pointer])


def _with_tokens(form: Form, axis: int, tokens: int) -> Form:
    """The form with so many tokens along an axis."""
    return form._replace(shape=(*form.shape[:axis], tokens, *form.shape[axis + 1 :]))


def check_tensors(**arrays: Any) -> None:
    """TypeError, ValueError, NotImplementedError: q, k and v cannot be shards."""
    check_torch_tensors(**arrays)
    for name, x in arrays.items():
        if x.dtype is torch.float8_e4m3fn:
            raise NotImplementedError(f"{name}: float8_e4m3fn is not supported on several ranks: convert it to bfloat16")
        if x.ndim != 4:
            raise ValueError(f"{name}: must have the axes B, S, H, D: {name}.shape={tuple(x.shape)}")


def autocast(*tensors: Any) -> list[Any]:
    """The tensors as torch.autocast casts them, if it is on: float32 becomes its dtype."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return [*tensors]
    to = torch.get_autocast_dtype(kind)
    return [x.to(to) if x.dtype is torch.float32 else x for x in tensors]


def parse_length(name: str, number: Any) -> int | None:
    """A number of tokens as an integer, or None. TypeError, ValueError."""
    if number is None:
        return None
    if isinstance(number, (bool, float, str, torch.Tensor)) or not hasattr(number, "__index__"):
        raise TypeError(f"{name}: must be an integer, the number of all tokens: {name}={number!r}")
    if number < 0:
        raise ValueError(f"{name}: must not be negative: {name}={number}")
    return int(number)
