"""Lists of key blocks that are made once and serve many calls: attention.block_lists."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tiles.arrays import Operand

from .block_masks import Blocked


@dataclass(frozen=True, eq=False)
class BlockLists:
    """The result of `attention.block_lists`, for forward's `blocks`. lists: which blocks of keys each tile of queries sees
    (key_block_lists.py). made_for: the calls that they serve, in words: `name=value; name=value`. marks, size: if they were
    made from a BlockMask, its map of blocks, and the (rows, columns) of a block."""

    lists: Any
    made_for: str
    marks: Any = None
    size: tuple[int | None, int | None] = None, None

    def __repr__(self):
        return f"BlockLists({self.made_for})"


def return_block_lists(
    made_for: str, lists: Operand, marked: tuple[Operand, int, int] | None
) -> Callable[[Sequence[Any]], BlockLists]:
    """The `give` of a Plan that makes lists. marked: (the map of a caller's blocks, its rows, its columns), if there is
    one."""

    def give(every: Sequence[Any]) -> BlockLists:
        found = every[lists.source]
        return BlockLists(found, made_for, every[marked[0].source], marked[1:]) if marked else BlockLists(found, made_for)

    return give


class BlockListPlan(NamedTuple):
    """How the key blocks of a call are listed. seen: which keys are seen, in words. varies: (do lists differ by batch? by
    head?). blocked: the caller's blocks. ready_for: if lists are given, the calls that they serve."""

    seen: str
    varies: tuple[bool, bool]
    blocked: Blocked | None = None
    ready_for: str | None = None


@dataclass(frozen=True)
class MakeBlockLists:
    """Given as forward's blocks=, it asks for lists to be made, of these blocks and the call's other options."""

    blocks: Any


def check_call(made_for: str, call: str, but: str = "nothing") -> None:
    """ValueError: the lists were made for other calls. It names what differs, apart from `but`."""
    both = zip(made_for.split("; "), call.split("; "))
    pairs = [(have, want) for have, want in both if have != want and not have.startswith(f"{but}=")]
    if pairs:
        made, here = (", ".join(words) for words in zip(*pairs))
        raise ValueError(f"blocks: these lists were made for {made}, and this call has {here}: make them with its arguments")
