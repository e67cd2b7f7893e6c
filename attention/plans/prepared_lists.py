"""Lists of key blocks that are written once and serve many calls: attention.block_lists."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tiles.launching.arrays import Operand

from ..parts.block_masks import Blocked


@dataclass(frozen=True, eq=False)
class BlockLists:
    """The result of `attention.block_lists`, for forward's `blocks`. lists: which key blocks each query tile reads
    (key_block_lists.py). made_for: a description of the calls that they serve, `name=value; name=value`. marks, size: if they
    were made from a BlockMask, its map of blocks, and the (rows, columns) of a block."""

    lists: Any
    made_for: str
    marks: Any = None
    size: tuple[int | None, int | None] = None, None

    def __repr__(self):
        return f"BlockLists({self.made_for})"


def return_block_lists(
    made_for: str, lists: Operand, marked: tuple[Operand, int, int] | None
) -> Callable[[Sequence[Any]], BlockLists]:
    """The `give` of a Plan that writes lists. marked: (the map of a BlockMask, the rows and the columns of its blocks), if
    there is one."""

    def give(arrays: Sequence[Any]) -> BlockLists:
        source = arrays[lists.source]
        return BlockLists(source, made_for, arrays[marked[0].source], marked[1:]) if marked else BlockLists(source, made_for)

    return give


class BlockListPlan(NamedTuple):
    """How the key blocks of a call are listed. description: of the mask and the window. varies: (do lists differ by batch? by
    head?). blocked: the variant of a BlockMask. ready_for: if the call passes lists, a description of the calls that they
    serve."""

    description: str
    varies: tuple[bool, bool]
    blocked: Blocked | None = None
    ready_for: str | None = None


@dataclass(frozen=True)
class MakeBlockLists:
    """A value of forward's blocks= that requests the lists of such a call instead of its output."""

    blocks: Any


def check_call(made_for: str, call: str, but: str = "nothing") -> None:
    """ValueError: the lists were made for other calls. It names what differs, except for `but`."""
    both = zip(made_for.split("; "), call.split("; "))
    pairs = [(have, want) for have, want in both if have != want and not have.startswith(f"{but}=")]
    if pairs:
        prepared_for, wanted = (", ".join(words) for words in zip(*pairs))
        raise ValueError(
            f"blocks: these lists were made for {prepared_for}, and this call has {wanted}: call block_lists with its arguments"
        )
