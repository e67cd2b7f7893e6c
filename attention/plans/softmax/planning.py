"""Helpers of the planners of forward, its gradients and decode: parts of variants, functions, windows, lists, checks."""

from collections.abc import Callable, Sequence

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Number, Operand

from ...options import SCALE_RANGE, ListOptions, ScoreOptions
from ...parts.block_masks import FIELDS, BlockSparseMask, BlockSparseMaskMod
from ...parts.norms import QueryNorm
from ...parts.scores import KeyBias, ScoreBias, ScoreMod, ScoreModAlibi
from ...parts.variant import Variant
from ...parts.weight_dropout import Dropout, DropoutWithDeviceSeed, dropout_numbers
from ...scoring.algebra import mask_bounds, min_end
from ...scoring.index_checks import IndexingFunctions, plan_index_checks
from ...scoring.python_functions import check_function, find_function, reads_argument
from .call_options import AUX
from .forward_launches import choose_norm
from .prepared_lists import BlockListPlan
from .variant_spec import VariantSpec, build_variant

INDICES = 2**24  # indices in kernels are float32, exact below this


def norm_and_dropout_parts(
    problem: Problem, norm_eps: float, dropout: float | None, seed_value: Number | None
) -> list[tuple[Variant, dict[str, float | Number]]]:
    """[(variant, {argument: number})] for norms of queries and for dropout."""
    parts: list[tuple[Variant, dict[str, float | Number]]] = []
    if norm := choose_norm(problem, "q_norm"):
        parts.append((QueryNorm(norm), {"norm_eps": norm_eps, "columns": problem.extents["head_dim"]}))
    if dropout is not None:
        parts.append(dropout_part(problem, dropout, seed_value))
    return parts


def dropout_part(problem: Problem, dropout: float, seed: Number | None) -> tuple[Dropout, dict[str, float | Number]]:
    """(the variant for dropout, {argument: number}). seed: None if it is in device memory."""
    if seed is None:
        return DropoutWithDeviceSeed(), {**dropout_numbers(dropout)}
    return Dropout(), {**dropout_numbers(dropout), "seed": seed}


def bias_part(problem: Problem, is_last: bool, in_units_of_one: bool = False) -> ScoreBias | None:
    """The variant for the problem's bias, None if there is none. It follows from the bias's strides. is_last,
    in_units_of_one: see ScoreBias."""
    if "bias" not in problem:
        return None
    form = problem["bias"].form
    one_row = form.shape[-2] == 1 or form.strides[-2] == 0
    adjacent = (
        form.shape[-1] > 1 and form.strides[-1] == form.itemsize
    )  # an axis of length 1 is broadcast: see forward_launches.expand_axes
    return KeyBias(is_last, in_units_of_one, adjacent) if one_row else ScoreBias(is_last, in_units_of_one)


def load_functions(
    problem: Problem, options: ScoreOptions, most_keys: int | None = None
) -> tuple[Callable | None, Callable | None, list[Operand]]:
    """(mask, score, [the arrays of aux]) from the names under which functions are registered. most_keys: of a sequence, if keys
    are in a paged cache. ValueError, TypeError: there are too many keys for float32 indices, a function cannot be called, or
    nothing reads aux."""
    mask, score = options.mask, options.score
    q_len, kv_len = problem("seqlen_q", "seqlen_k")
    kv_len = kv_len if most_keys is None else most_keys
    if (mask or score) and max(q_len, kv_len) >= INDICES:
        name = "mask" if mask else "score"
        raise problem.error(name, "has float32 indices of queries and keys: there must be fewer than 2**24 of each", "q", "k")
    aux = [x for x in (problem[f"aux{n}"] for n in range(AUX)) if x is not None]
    if aux and not (mask or score):
        shapes = ", ".join([str(x.form.shape) for x in aux])
        raise TypeError(f"aux: is what mask= or score= reads, and this call has neither; its arrays have the shapes {shapes}")
    masking, scoring = find_function(mask), find_function(score)
    for name, function in ("mask", masking), ("score", scoring):
        if function is not None:
            check_function(name, function, [x.form for x in aux])
    return masking, scoring, aux


def build_scores(
    problem: Problem,
    options: ScoreOptions,
    lists: ListOptions,
    warp_rows: int,
    scale: float,
    score_variant: Callable[[Callable, tuple[int, ...], bool], ScoreMod | ScoreModAlibi],
    extra_parts: Sequence[tuple[Variant, dict[str, float | Number]]],
    for_gradients: bool = False,
) -> tuple[VariantSpec, list[Step]]:
    """(the VariantSpec of a call's options, the steps that check the indices of aux). warp_rows: see BlockSparseMask.
    score_variant(function, axes, signed_distance): the variant of the score function. for_gradients: then scores keep their
    unit, and have no sink, which nothing but lse knows."""
    masking, scoring, aux = load_functions(problem, options)
    index_functions = IndexingFunctions(masking, scoring, aux, options, problem.extents["seqlen_k"])
    index_checks = plan_index_checks(problem, index_functions, lists.prepared_for is not None)
    axes = tuple([len(x.form.shape) for x in aux])
    masking, options = reduce_to_window(problem, masking, axes, options)
    end = 0 if options.causal else options.right
    listing = plan_block_lists(problem, masking, f"mask={options.mask}; window={(options.left, end)}", lists, warp_rows)
    block_mask = listing and listing.block_mask
    spec = build_variant(
        scale,
        options,
        alibi="alibi" in problem,
        bias=bias_part(problem, is_last=scoring is None, in_units_of_one=not for_gradients),
        sink="sink" in problem and not for_gradients,
        mask=None if block_mask else masking,
        score=scoring and score_variant(scoring, axes, sees_no_later_key(problem, end)),
        extra_parts=[*extra_parts, (block_mask, {})] if block_mask else extra_parts,
    )
    return spec._replace(aux=aux, listing=listing), index_checks


def reduce_to_window(
    problem: Problem, mask: Callable | None, axes: Sequence[int], options: ScoreOptions
) -> tuple[Callable | None, ScoreOptions]:
    """(mask, options), with the mask replaced by a window if it is one. All sequences must have the same lengths, and there
    must be no lists of blocks, neither as an argument nor as the result. axes: how many axes each array of aux has."""
    listed = not problem.schema.written or "lists" in problem or FIELDS[0] in problem
    if mask is None or listed or _is_ragged(problem):
        return mask, options
    window = window_of_mask(mask, axes, options.causal, (options.left, options.right), *problem("seqlen_q", "seqlen_k"))
    return (mask, options) if window is None else (None, options._replace(causal=False, left=window[0], right=window[1]))


def window_of_mask(
    mask: Callable, axes: Sequence[int], causal: bool, window: tuple[int | None, int | None], queries: int, keys: int
) -> tuple[int | None, int | None] | None:
    """The window that a mask function amounts to, intersected with causal and another window, for so many queries and keys;
    None if the mask is no window. axes: how many axes each array of aux has."""
    ends = mask_bounds(mask, axes)
    if ends is None:
        return None
    shift, (left, right) = keys - queries, window
    left = min_end(left, None if ends.left is None else ends.left + shift)
    right = min_end(0 if causal else right, None if ends.right is None else ends.right - shift)
    if left is not None and right is not None and left + right < 0:
        return None, -(queries + keys)  # no query sees a key: every window ends before the first key
    return left, right


def sees_no_later_key(problem: Problem, right: int | None) -> bool:
    """Does no query i see a key j > i, both counted from 0? right: the right edge of the window."""
    queries, keys = problem("seqlen_q", "seqlen_k")
    return right is not None and not _is_ragged(problem) and right + keys - queries <= 0


def _is_ragged(problem: Problem) -> bool:
    """May sequences have different numbers of queries or keys?"""
    return any([name in problem for name in ("cu_seqlens", "cu_seqlens_k", "lengths_k")])


def plan_block_lists(
    problem: Problem,
    mask: Callable | None,
    description: str,
    lists: ListOptions,
    warp_rows: int,
) -> BlockListPlan | None:
    """How lists of key blocks are written for a mask and a BlockMask; None if none are needed. description: of the mask and
    the window. warp_rows: see BlockSparseMask."""
    listing, size, prepared_for = None, lists.block_size, lists.prepared_for
    if mask is not None or prepared_for:
        varies = (reads_argument(mask, 0), reads_argument(mask, 1)) if mask else (False, False)
        listing = BlockListPlan(description, varies, None, prepared_for)
    if size is not None:
        batches, heads = problem["marks"].form.shape[:2] if prepared_for else problem("list_batch", "list_heads")
        block_mask = BlockSparseMask(*size, warp_rows) if mask is None else BlockSparseMaskMod(*size, warp_rows, mask)
        by_batch, by_head = listing.varies if listing else (False, False)
        listing = BlockListPlan(
            description, (bool(by_batch or batches > 1), bool(by_head or heads > 1)), block_mask, prepared_for
        )
    return listing


def resolve_scale(problem: Problem, scale: float | None) -> float:
    """The scale of scores, D^-1/2 by default. ValueError: it is not positive, or too large or small for float32."""
    head_dim = problem.extents["head_dim"]
    scale = head_dim**-0.5 if scale is None else scale
    if not SCALE_RANGE[0] <= scale <= SCALE_RANGE[1]:  # a masked score of -inf must stay -inf when scaled
        raise ValueError(f"scale: must be positive, and finite in float32: {scale=}")
    return scale


def check_extents(problem: Problem, multiple: int = 8) -> None:
    """ValueError: the kernels do not support these extents. multiple: of head dims."""
    q_len, heads, head_dim, kv_len, kv_heads, value_dim = problem(
        "seqlen_q", "heads", "head_dim", "seqlen_k", "heads_k", "head_dim_v"
    )
    for name, dim, option in (("q", head_dim, "head_dim"), ("v", value_dim, "value_dim")):
        if dim % multiple or not multiple <= dim <= 256:
            cure = "; pad it with columns of zeros, and pass scale" * (0 < dim < 256)
            message = f"head_dim must be a multiple of {multiple}, from {multiple} to 256{cure}: {option}={dim}"
            raise problem.error(name, message, name)
    if kv_heads == 0:
        raise problem.error("k", "must have at least one head", "k")
    if heads % kv_heads:
        swapped = problem.layout == "bshd" and kv_len and q_len % kv_len == 0  # are the sequence and head axes swapped?
        other = ', or are they (B, H, S, D)? That is layout="bhsd"' if swapped else ""
        raise problem.error("q", f"heads must be a multiple of k's{other}: {heads=}, {kv_heads=}", "q", "k")
    if q_len >= 2**31 or kv_len >= 2**31:
        raise problem.error("q" if q_len >= 2**31 else "k", "sequence must be shorter than 2**31", "q", "k")
