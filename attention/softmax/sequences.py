"""How sequences lie in memory, as objects with the same methods: which rows of q, k and v a tile has."""

from typing import Any, NamedTuple

from numpy import int32

from ops import divmod, warpgroup
from tiles import inlined, static
from tiles.arguments import ENDS, INT


class Sequence(NamedTuple):
    """One of them: the batch that it lies in, where its queries and keys begin there, and how many it has of each."""

    batch: Any
    query: Any
    queries: Any
    key: Any
    keys: Any


@static
class Batched:
    """Each in a batch of its own, all of one length. Of kernels whose tiles have `rows` query rows."""

    rows: int

    @property
    def given(self) -> dict[str, Any]:
        """The kernel's arguments that it reads, and what they are."""
        return {"q_len": INT, "kv_len": INT}

    apart = True  # does what lies behind a sequence's end belong to nobody?

    @inlined
    def find(self, block, pair, heads, given):
        """(query block of the sequence, the sequence's number, head) of a tile."""
        batch, head = divmod(pair, heads)
        return block, batch, head

    @inlined
    def has(self, block, batch, given):
        """Has the sequence that many blocks of queries?"""
        return True

    @inlined
    def sequence(self, batch, given):
        """The Sequence of that number."""
        return Sequence(batch, int32(0), given.q_len, int32(0), given.kv_len)

    @inlined
    def clear(self, values, left, groups):
        """Zero the rows of a shared tile of values that belong to others, all but `left`: a weight of 0 does not make up for a
        NaN. The work of the block's first `groups` warpgroups together."""
        if not self.apart and left < values.rows:
            warpgroup.zero_rows(values, left, groups)


class InUse(Batched):
    """The same, with so many keys in use in each: given.lengths."""

    @property
    def given(self) -> dict[str, Any]:
        """See Batched."""
        return {"q_len": INT, "lengths": ENDS}

    apart = False

    @inlined
    def sequence(self, batch, given):
        """See Batched."""
        return Sequence(batch, int32(0), given.q_len, int32(0), int32(given.lengths[batch]))


class Packed(Batched):
    """One behind the other in one batch: sequence n has queries given.ends[n] to given.ends[n + 1], and such keys.

    Its blocks of queries begin at block number ends[n] // rows + n, which leaves room for all of them, and which a search by
    halves finds."""

    @property
    def given(self) -> dict[str, Any]:
        """See Batched."""
        return {"ends": ENDS, "ends_k": ENDS}

    apart = False

    @inlined
    def find(self, block, pair, heads, given):
        """See Batched."""
        low, high = int32(0), int32(given.ends.shape[0] - 1)
        while high - low > 1:
            middle = int32((low + high) // 2)
            if given.ends[middle] // self.rows + middle <= block:
                low = middle
            else:
                high = middle
        return int32(block - given.ends[low] // self.rows - low), low, pair

    @inlined
    def has(self, block, batch, given):
        """See Batched."""
        return self.rows * block < given.ends[batch + 1] - given.ends[batch]

    @inlined
    def sequence(self, batch, given):
        """See Batched."""
        query, key = int32(given.ends[batch]), int32(given.ends_k[batch])
        return Sequence(int32(0), query, int32(given.ends[batch + 1] - query), key, int32(given.ends_k[batch + 1] - key))


class PackedInUse(Packed):
    """The same, with so many keys in use of each: given.lengths."""

    @property
    def given(self) -> dict[str, Any]:
        """See Batched."""
        return {"ends": ENDS, "ends_k": ENDS, "lengths": ENDS}

    @inlined
    def sequence(self, batch, given):
        """See Batched."""
        query = int32(given.ends[batch])
        queries = int32(given.ends[batch + 1] - query)
        return Sequence(int32(0), query, queries, int32(given.ends_k[batch]), int32(given.lengths[batch]))
