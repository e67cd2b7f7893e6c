"""Lists of key blocks that are made once and serve many calls: attention.block_lists."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tiles.arrays import Operand

from .block_masks import Blocked


@dataclass(frozen=True, eq=False)
class BlockLists:
    """What `attention.block_lists` gives, for forward's blocks=. lists: which blocks of keys each tile of queries sees (see
    key_block_lists.py). made_for: of which calls, in words: `name=value; name=value`. Made of a BlockMask they keep its map of
    blocks, too, and the (rows, columns) of these."""

    lists: Any
    made_for: str
    marks: Any = None
    size: tuple[int | None, int | None] = None, None

    def __repr__(self):
        return f"BlockLists({self.made_for})"


def giving(made_for: str, lists: Operand, marked: tuple[Operand, int, int] | None) -> Callable[[Sequence[Any]], BlockLists]:
    """A plan's `give`. marked: the map of a caller's blocks, and their rows and columns, if there are any."""

    def give(every: Sequence[Any]) -> BlockLists:
        found = every[lists.source]
        return BlockLists(found, made_for, every[marked[0].source], marked[1:]) if marked else BlockLists(found, made_for)

    return give


class Listing(NamedTuple):
    """How a call's key blocks are listed. seen: what says which keys are seen, in words. varies: do lists differ by batch, and
    by head? blocked: the blocks that a caller has. ready_for: which calls lists are for that are given."""

    seen: str
    varies: tuple[bool, bool]
    blocked: Blocked | None = None
    ready_for: str | None = None


@dataclass(frozen=True)
class Making:
    """Stands in forward's blocks= for lists that are to be made, of these blocks and the call's other options."""

    blocks: Any


def check(made_for: str, call: str, but: str = "nothing") -> None:
    """ValueError that names what differs, `but` for that, between calls that lists were made for and one that is given them."""
    both = zip(made_for.split("; "), call.split("; "))
    pairs = [(have, want) for have, want in both if have != want and not have.startswith(f"{but}=")]
    if pairs:
        made, here = (", ".join(words) for words in zip(*pairs))
        raise ValueError(f"blocks: these lists were made for {made}, and this call has {here}: make them with its arguments")
