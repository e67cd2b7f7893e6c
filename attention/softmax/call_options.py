"""What a call of attention.forward asks for, made plain and looked at: its options, and the arrays that some of them hold."""

import operator
import sys
from typing import Any, NamedTuple

from tiles.torch_op import exporting

from ..options import number
from .block_masks import FIELDS
from .dropped import SEED_END
from .prepared_lists import BlockLists, Making

AUX = 8  # arrays that functions in Python may read
# Rows of schemas: those arrays, and what a caller's blocks consist of.
OF_AUX = "".join([f"    aux{n}  *  any  optional\n" for n in range(AUX)])
OF_BLOCKS = """\
    kv_num_blocks       IJP   index  optional
    kv_indices          IJPQ  index  optional
    full_kv_num_blocks  IJP   index  optional
    full_kv_indices     IJPL  index  optional
"""


def differentiated(*arrays: Any) -> bool:
    """Are gradients with respect to one of these arrays, torch's, to come?"""
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return False
    for x in arrays:  # half of what `any` takes
        if getattr(x, "requires_grad", False):
            return not exporting()  # then it is the op's to refuse it
    return False


def ends_of(window: Any) -> tuple[int | None, int | None]:
    """The two ends of a window; TypeError, ValueError."""
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window: must be (left, right), each an integer or None: {window=}")
    for end in window:
        if isinstance(end, bool) or not (end is None or isinstance(end, int) or hasattr(end, "__index__")):
            raise TypeError(f"window: its ends must be integers or None: {window=}")
        if end is not None and not 0 <= end < 2**30:
            raise ValueError(f"window: its ends must not be negative, and below 2**30; None is open: {window=}")
    left, right = (None if end is None else int(end) for end in window)
    return left, right


def eight(aux: Any) -> tuple:
    """The arrays that functions read, and None for those that could be; TypeError."""
    if not isinstance(aux, (tuple, list)):
        raise TypeError(f"aux: must be a tuple of arrays, (array,) of one: it is of {type(aux).__name__}")
    if len(aux) > AUX or any([x is None for x in aux]):
        what = [type(x).__name__ for x in aux]
        raise TypeError(f"aux: must be up to {AUX} arrays: {len(aux)} of {what}")
    return *aux, *(None,) * (AUX - len(aux))


class Random(NamedTuple):
    """A dropout, None if nothing is dropped, and its seed: a number, or an array of one."""

    dropout: float | None
    seed: int | None
    seeds: Any


KEPT = Random(None, None, None)


def random_of(dropout: Any, seed: Any) -> Random:
    """What dropout and seed ask for; TypeError, ValueError."""
    share = number("dropout", dropout)
    if share is None or not 0 <= share < 1:
        raise ValueError(f"dropout: must be from 0 to below 1: {dropout=}")
    if isinstance(seed, (bool, float, str)):
        raise TypeError(f"seed: must be an integer, or an array of one: {seed=}")
    if share == 0:
        return KEPT
    if seed is None:
        raise ValueError(f"seed: must be given where something is dropped: {dropout=}")
    if not isinstance(seed, int):  # Dynamo's are, and can be asked for nothing else
        if getattr(seed, "shape", ()) or not hasattr(seed, "__index__"):
            return Random(share, None, seed)
        seed = operator.index(seed)
    if not 0 <= seed < SEED_END:
        raise ValueError(f"seed: must be from 0 to below 2**63: {seed=}")
    return Random(share, seed, None)


class Asked(NamedTuple):
    """What blocks= asks for: (rows, columns) of a caller's blocks, and its lists; of lists that are ready which calls they are
    for, and they themselves. None for what there is not."""

    size: tuple[int | None, int | None] = None, None
    ready_for: str | None = None
    arrays: tuple = (None,) * (len(FIELDS) + 2)


EVERY_BLOCK = Asked()


def blocks_of(blocks: Any) -> Asked:
    """What a BlockMask or BlockLists asks for; TypeError, ValueError."""
    if isinstance(blocks, Making):
        blocks = blocks.blocks
    if blocks is None:
        return EVERY_BLOCK
    if isinstance(blocks, BlockLists):
        return Asked(blocks.size, blocks.made_for, (*(None,) * len(FIELDS), blocks.lists, blocks.marks))
    missing = [name for name in ("BLOCK_SIZE", *FIELDS) if not hasattr(blocks, name)]
    if missing:
        raise TypeError(f"blocks: must have the fields of a BlockMask: {type(blocks).__name__} has no {', '.join(missing)}")
    size = blocks.BLOCK_SIZE
    size = size if isinstance(size, (tuple, list)) else (size, size)
    if len(size) != 2 or not all([isinstance(n, int) and n > 0 for n in size]):
        raise ValueError(f"blocks: BLOCK_SIZE must be a positive integer, or two: {blocks.BLOCK_SIZE=}")
    lists = [getattr(blocks, name) for name in FIELDS]
    if any([x is None for x in lists[:2]]) or (lists[2] is None) != (lists[3] is None):
        what = [name for name, x in zip(FIELDS, lists) if x is None]
        raise ValueError(f"blocks: must have lists of partly seen blocks, and none or both of whole ones: {what} are None")
    return Asked(tuple(size), None, (*lists, None, None))


def several(norm: Any) -> tuple:
    """What a norm consists of, whatever it is."""
    return norm if type(norm) is tuple else (norm,)
