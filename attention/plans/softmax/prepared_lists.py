"""Lists of key blocks that are written once and serve many calls: attention.block_lists."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tiles.launching.arrays import Operand

from ...parts.block_masks import BlockSparseMask


@dataclass(frozen=True, eq=False)
class BlockLists:
    """The result of `attention.block_lists`, for forward's `blocks`. lists: which key blocks each query tile reads
    (key_block_lists.py). prepared_for: a description of the calls that they serve, `name=value; name=value`. marks, size: if
    they were made from a BlockMask, its map of blocks, and the (rows, columns) of a block."""

    lists: Any
    prepared_for: str
    marks: Any = None
    size: tuple[int | None, int | None] = None, None

    def __repr__(self):
        return f"BlockLists({self.prepared_for})"


def return_block_lists(
    prepared_for: str, lists: Operand, block_map: tuple[Operand, int, int] | None
) -> Callable[[Sequence[Any]], BlockLists]:
    """The `make_result` of a Plan that writes lists. block_map: (the map of a BlockMask, the rows and the columns of its
    blocks), if there is one."""

    def make_result(arrays: Sequence[Any]) -> BlockLists:
        source = arrays[lists.source]
        return (
            BlockLists(source, prepared_for, arrays[block_map[0].source], block_map[1:])
            if block_map
            else BlockLists(source, prepared_for)
        )

    return make_result


class BlockListPlan(NamedTuple):
    """How the key blocks of a call are listed. description: of the mask and the window. varies: (do lists differ by batch? by
    head?). block_mask: the variant of a BlockMask. prepared_for: if the call passes lists, a description of the calls that they
    serve."""

    description: str
    varies: tuple[bool, bool]
    block_mask: BlockSparseMask | None = None
    prepared_for: str | None = None


@dataclass(frozen=True)
class BlockListsRequest:
    """A value of forward's blocks= that requests the lists of such a call instead of its output."""

    blocks: Any


def check_call(prepared_for: str, call: str, ignored: str = "nothing") -> None:
    """ValueError: the lists were made for other calls. It names what differs, except for `ignored`."""
    fields = zip(prepared_for.split("; "), call.split("; "))
    pairs = [(have, want) for have, want in fields if have != want and not have.startswith(f"{ignored}=")]
    if pairs:
        lists_text, call_text = (", ".join(words) for words in zip(*pairs))
        raise ValueError(
            f"blocks: these lists were made for {lists_text}, and this call has {call_text}: "
            "call block_lists with its arguments"
        )
