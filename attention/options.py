"""The options of calls, which are all arguments but arrays: the arguments that several functions take, once; groups of options
as planners take them; and checks. A check returns a plain Python value, so that equal options compare equal, whatever types the
caller used."""

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, NamedTuple, TypedDict

import numpy as np

from tiles.launching.arrays import Number

SCALE_RANGE = (2.0**-120, 2.0**120)  # float32 holds such a scale, and the scale times log2(e)


# ---- what callers pass -----------------------------------------------------------------------------------------------
class ScoreArguments(TypedDict, total=False):
    """The arguments of attention.forward, backward and decode that say what becomes of scores, beside those that decode names
    itself: it runs for every token, and Python compares each keyword that a function does not name with all that it names. A
    new one belongs here. softcap is the exception, for decode's speed: decode names it, AttentionArguments has it for the
    others."""

    bias: Any
    mask: Callable | None
    score: Callable | None
    aux: Sequence[Any]


class AttentionArguments(ScoreArguments, total=False):
    """The arguments that attention.forward and backward have in common, beside q, k, v, causal, scale and those of results."""

    window: tuple[int | None, int | None] | None
    softcap: float | None
    alibi: Any
    sink: Any
    blocks: Any
    cu_seqlens: Any
    cu_seqlens_k: Any
    lengths_k: Any
    q_norm: Any
    k_norm: Any
    norm_eps: float
    dropout: float
    seed: Any


DEFAULTS: dict[str, Any] = {"aux": (), "norm_eps": 1e-6, "dropout": 0.0}  # of those arguments; of the others None


# ---- what planners take ----------------------------------------------------------------------------------------------
# Groups are flat in a Program's options (tiles/calls/planner_options.py).
class ScoreOptions(NamedTuple):
    """Which keys a query sees and what becomes of scores, besides arrays. left, right: of the window. mask, score: the names
    under which python_functions.py has registered the functions. attention.decode fills the first four by their places."""

    causal: bool = False
    left: int | None = None
    right: int | None = None
    softcap: float | None = None
    mask: str | None = None
    score: str | None = None


class ListOptions(NamedTuple):
    """What is known of lists of key blocks, besides arrays. block_rows, block_cols: the block size of a BlockMask.
    prepared_for: BlockLists.prepared_for of lists that the call passes (prepared_lists.py)."""

    block_rows: int | None = None
    block_cols: int | None = None
    prepared_for: str | None = None

    @property
    def block_size(self) -> tuple[int, int] | None:
        """(rows, columns) of a BlockMask's blocks; None if there is none."""
        return None if self.block_rows is None or self.block_cols is None else (self.block_rows, self.block_cols)


class RandomOptions(NamedTuple):
    """dropout: the probability, None for no dropout. seed_value: the seed, unless it is in an array."""

    dropout: float | None = None
    seed_value: Number | None = None


class ResultOptions(NamedTuple):
    """The options that every form of forward has."""

    scale: float | None
    return_lse: bool
    family: str | None


# ---- checks ----------------------------------------------------------------------------------------------------------
def check_flag(name: str, value: Any) -> bool:
    """The value as a bool; NumPy's bools are taken. TypeError: it is something else."""
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    raise TypeError(f"{name}: must be a bool: {name}={value!r}")


def check_number(name: str, value: Any) -> float | None:
    """The value as a float, or None. TypeError: it is no real number."""
    if value is None or type(value) is float:
        return value
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name}: must be a number or None: {name}={value!r}")
    return float(value)


def show_argument(name: str, value: Any) -> str:
    """An argument as errors print it: of an array the shape."""
    return f"{name}.shape={tuple(value.shape)}" if hasattr(value, "shape") else f"{name}={value!r:.60}"


def check_positive(name: str, value: Any) -> float | None:
    """The value as a float, or None: a softcap, or the epsilon of a norm. TypeError: it is no real number. ValueError: it is
    not within SCALE_RANGE."""
    number = check_number(name, value)
    if number is not None and not SCALE_RANGE[0] <= number <= SCALE_RANGE[1]:
        raise ValueError(f"{name}: must be positive, and finite in float32: {name}={value!r}")
    return number


def split_norm(name: str, norm: Any) -> tuple[Any, Any]:
    """(weights, bias) of a norm: (norm, None) of an RMS norm, the pair itself of a layer norm. TypeError: a tuple is no pair,
    or has None in it."""
    if type(norm) is not tuple:  # an Operand is a tuple of another type
        return norm, None
    if len(norm) != 2 or any([x is None for x in norm]):
        raise TypeError(f"{name}: must be weights, or a pair (weights, bias): a tuple of {len(norm)}")
    return norm


def check_accumulators(arrays: dict[str, Any]) -> None:
    """TypeError: one of these arguments is no array that gradients can be added to."""
    for name, x in arrays.items():
        if x is None or x is True:
            raise TypeError(f"{name}: must be a float32 array with accumulate=True, got {name}={x}")
