"""The options of a call of attention.forward, checked and normalised, with the arrays that some of them hold."""

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ...options import ListOptions, ScoreOptions, check_number
from ...parts.block_masks import FIELDS
from ...parts.score_mods import BUILTIN_SCORE_MODS
from ...parts.weight_dropout import SEED_END
from ...scoring.python_functions import find_function, register_function
from .prepared_lists import BlockLists, BlockListsRequest

AUX = 8  # the most arrays of aux
# Rows of schemas for the arrays of aux, and of a BlockMask
AUX_ROWS = "".join([f"    aux{n}  *  any  optional\n" for n in range(AUX)])
BLOCK_MASK_ROWS = """
    kv_num_blocks       (list_batch, list_heads, list_rows)                 index  optional
    kv_indices          (list_batch, list_heads, list_rows, list_len)       index  optional
    full_kv_num_blocks  (list_batch, list_heads, list_rows)                 index  optional
    full_kv_indices     (list_batch, list_heads, list_rows, full_list_len)  index  optional
"""


def window_ends(window: Any) -> tuple[int | None, int | None]:
    """(left, right) of a window, (None, None) for None. TypeError, ValueError: it is not a pair of integers or None, or an end
    is negative or too large."""
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window: must be (left, right), each an integer or None: {window=}")
    for end in window:
        if isinstance(end, bool) or not (end is None or isinstance(end, int) or hasattr(end, "__index__")):
            raise TypeError(f"window: its ends must be integers or None: {window=}")
        if end is not None and not 0 <= end < 2**30:
            raise ValueError(f"window: its ends must not be negative, and below 2**30; None is open: {window=}")
    left, right = window
    return None if left is None else int(left), None if right is None else int(right)


def check_aux(aux: Any) -> Any:
    """The sequence aux itself. TypeError: it is not a sequence of up to AUX arrays."""
    if not isinstance(aux, (tuple, list)):
        raise TypeError(f"aux: must be a tuple of arrays, (array,) for a single one, and not {type(aux).__name__}")
    if len(aux) > AUX or any([x is None for x in aux]):
        kinds = [type(x).__name__ for x in aux]
        raise TypeError(f"aux: must be up to {AUX} arrays: {len(aux)} of {kinds}")
    return aux


_CHECKS: dict[str, Callable[[Any], Any]] = {
    **{mod.option: mod.check for mod in BUILTIN_SCORE_MODS},
    **{name: functools.partial(register_function, name) for name in ("mask", "score")},
}
SCORE_CHECKS = {name: _CHECKS[name] for name in ScoreOptions._fields[3:]}  # of the options besides causal and the window
NO_SCORES = ScoreOptions()[1:]
_NO_FIELDS = dict(zip(ScoreOptions._fields[1:], NO_SCORES))


def score_options(arguments: Mapping[str, Any]) -> tuple:
    """The fields of ScoreOptions after causal, for these ScoreArguments. TypeError, ValueError: one of them is wrong."""
    fields = {**_NO_FIELDS}
    for name, x in arguments.items():  # a comprehension would take longer
        if name in SCORE_CHECKS:
            fields[name] = SCORE_CHECKS[name](x)
        elif name == "window":
            fields["left"], fields["right"] = window_ends(x)
    return (*fields.values(),)


def score_arguments(options: ScoreOptions) -> dict[str, Any]:
    """The arguments of a call with these options, without those that are None."""
    _, left, right, *_ = options
    arguments = {name: x for name, x in options._asdict().items() if x is not None and name not in ("left", "right")}
    arguments |= {name: find_function(arguments[name]) for name in ("mask", "score") if name in arguments}
    return arguments if left is right is None else arguments | {"window": (left, right)}


class DropoutOptions(NamedTuple):
    """Options of dropout. dropout: the probability, None for no dropout. seed: an integer seed. seeds: {"seed": an array of one
    seed} instead."""

    dropout: float | None
    seed: int | None
    seeds: dict[str, Any]


NO_DROPOUT = DropoutOptions(None, None, {})


def dropout_options(options: Mapping[str, Any], arrays: dict[str, Any]) -> DropoutOptions:
    """The DropoutOptions of a call with these arguments, of which dropout and seed count; a seed is removed from `arrays`.
    TypeError, ValueError: dropout is not in [0, 1), or the seed is missing, negative, too large, or of a wrong type."""
    if "dropout" not in options:
        return NO_DROPOUT
    dropout, seed = options["dropout"], arrays.pop("seed", options.get("seed"))
    probability = check_number("dropout", dropout)
    if probability is None or not 0 <= probability < 1:
        raise ValueError(f"dropout: must be from 0 to below 1: {dropout=}")
    if isinstance(seed, (bool, float, str)):
        raise TypeError(f"seed: must be an integer, or an array of one: {seed=}")
    if probability == 0:
        return NO_DROPOUT
    if seed is None:
        raise ValueError(f"seed: is required with dropout > 0: {dropout=}, seed=None")
    if not isinstance(seed, int):  # Dynamo's symbolic integers are ints without __index__
        if getattr(seed, "shape", ()) or not hasattr(seed, "__index__"):
            return DropoutOptions(probability, None, {"seed": seed})
        try:
            seed = operator.index(seed)
        except TypeError:  # jax.jit traces it
            raise TypeError(f"seed: must be an integer, or an array of one: {seed=}; seed.reshape(1) is one") from None
    if not 0 <= seed < SEED_END:
        raise ValueError(f"seed: must be from 0 to below 2**63: {seed=}")
    return DropoutOptions(probability, seed, {})


class BlockOptions(NamedTuple):
    """The contents of a call's `blocks`. arrays: the lists of a BlockMask, or the lists and the map of BlockLists, by the names
    of schemas."""

    options: ListOptions = ListOptions()
    arrays: dict[str, Any] = {}  # noqa: RUF012


NO_BLOCKS = BlockOptions()


def block_options(blocks: Any) -> BlockOptions:
    """The BlockOptions of a BlockMask, of BlockLists or of None. TypeError, ValueError: a field is missing or wrong."""
    if isinstance(blocks, BlockListsRequest):
        blocks = blocks.blocks
    if blocks is None:
        return NO_BLOCKS
    if isinstance(blocks, BlockLists):
        return BlockOptions(ListOptions(*blocks.size, blocks.prepared_for), {"lists": blocks.lists, "marks": blocks.marks})
    missing = [name for name in ("BLOCK_SIZE", *FIELDS) if not hasattr(blocks, name)]
    if missing:
        raise TypeError(f"blocks: must have the fields of a BlockMask: {type(blocks).__name__} has no {', '.join(missing)}")
    size = blocks.BLOCK_SIZE
    size = size if isinstance(size, (tuple, list)) else (size, size)
    if len(size) != 2 or not all([isinstance(n, int) and n > 0 for n in size]):
        raise ValueError(f"blocks: BLOCK_SIZE must be a positive integer, or two: {blocks.BLOCK_SIZE=}")
    lists = [getattr(blocks, name) for name in FIELDS]
    if any([x is None for x in lists[:2]]) or (lists[2] is None) != (lists[3] is None):
        missing = [name for name, x in zip(FIELDS, lists) if x is None]
        raise ValueError(
            f"blocks: needs kv_num_blocks and kv_indices, and full_kv_num_blocks only with full_kv_indices: {missing} are None"
        )
    rows, columns = size
    return BlockOptions(ListOptions(rows, columns), dict(zip(FIELDS, lists)))
