"""How sequences lie in memory, as objects with the same methods: which rows of q, k and v a tile has."""

import math
from typing import Any, NamedTuple

from numpy import int32

from ops import divmod, full, store, warpgroup, zeros
from tiles import inlined, static
from tiles.arguments import ENDS, INT


class Sequence(NamedTuple):
    """A sequence in memory. batch: the index of the first axis. offset_q, offset_k: the rows of its first query and key there.
    seqlen_q, seqlen_k: how many it has of each."""

    batch: Any
    offset_q: Any
    seqlen_q: Any
    offset_k: Any
    seqlen_k: Any


GROWING = {"lengths": ENDS, "added": INT, "new_ends": ENDS}  # what `in_use` reads


@inlined
def in_use(number, params):
    """How many keys a sequence has in a cache: params.lengths, plus those that are being appended: params.added for each
    sequence, and those from params.new_ends[n] to params.new_ends[n + 1], if there are any."""
    length = int32(params.lengths[number] + params.added)
    if params.new_ends.shape[0] > 0:
        length = int32(length + params.new_ends[number + 1] - params.new_ends[number])
    return length


@inlined
def _sequence_of(block, ends, rows):
    """The packed sequence to which a block of so many rows belongs: see Packed."""
    low, high = int32(0), int32(ends.shape[0] - 1)
    while high - low > 1:
        middle = int32((low + high) // 2)
        if ends[middle] // rows + middle <= block:
            low = middle
        else:
            high = middle
    return low


@inlined
def _behind_the_last(row, batch, rows, ends):
    """(do some of `rows` rows of a packed sequence, from `row` on, lie behind the last sequence? the first of these)"""
    end = int32(ends[batch + 1] - ends[batch])
    return batch + 2 == ends.shape[0] and row + rows > end, int32(ends[batch] + max(row, end))


@static
class BatchedLayout:
    """Each sequence has a batch, and all have the same length. rows: query rows of the kernel's tiles."""

    label = ""  # in the names of configurations

    rows: int

    @property
    def params(self) -> dict[str, Any]:
        """The kernel's arguments that it reads, and what they are."""
        return {"q_len": INT, "kv_len": INT}

    apart = True  # do rows behind a sequence's end belong to no other sequence?
    packed = False  # do sequences lie one behind the other, so that tiles begin at any row?

    @inlined
    def find(self, block, batch_head, heads, params):
        """(query block of the sequence, the sequence's number, head) of a tile."""
        batch, head = divmod(batch_head, heads)
        return block, batch, head

    @inlined
    def has(self, block, batch, params):
        """Does block number `block` of the sequence's queries exist?"""
        return True

    @inlined
    def sequence(self, batch, params):
        """The Sequence of that number."""
        return Sequence(batch, int32(0), params.q_len, int32(0), params.kv_len)

    @inlined
    def find_keys(self, block, batch_head, heads, rows, params):
        """The same as `find`, for a block of `rows` keys."""
        batch, head = divmod(batch_head, heads)
        return block, batch, head

    @inlined
    def has_keys(self, key, batch, params):
        """Does the sequence have a key of that number, in use or not?"""
        return True

    @inlined
    def nobodys(self, block, batch, params):
        """(whether rows of a tile of queries lie behind the last sequence, the first of them in the batch). Tiles that the last
        sequence does not need go on to the end of the batch."""
        return False, int32(0)

    @inlined
    def clear_nobodys(self, tile, gO, gLse, block, batch, head, mine, accumulates, params):
        """Write 0, and -inf like that of a row which sees no key, to these rows: a warp's, `mine` rows behind the first, unless
        the output `joins` what is there. tile: the type of a warp's output."""

    @inlined
    def nobodys_keys(self, key, batch, rows, params):
        """The same of a block of `rows` keys, from `key` on."""
        return False, int32(0)

    @inlined
    def first_tile(self, batch, params):
        """The number of the sequence's first tile of queries among the tiles of a batch; each sequence has whole tiles."""
        return int32(0)

    @inlined
    def begins(self, first, tile, rows):
        """Where tile number `tile` begins, in the units in which TMA counts, for a sequence that begins with row `first`."""
        return tile

    @inlined
    def last_key(self, batch, params):
        """Where the sequence's keys end, in use or not, if another sequence's keys follow."""
        return int32(0)

    @inlined
    def clear(self, values, left, groups):
        """Zero the rows of a shared tile that belong to other sequences, all but the first `left`: a weight of 0 does not make
        up for a NaN. Done by the block's first `groups` warpgroups together."""
        if not self.apart and left < values.rows:
            warpgroup.zero_rows(values, left, groups)


class SeqUsedLayout(BatchedLayout):
    """The same; params.lengths says how many keys of each are in use."""

    label = " in use"

    @property
    def params(self) -> dict[str, Any]:
        return {"q_len": INT, "lengths": ENDS}

    apart = False

    @inlined
    def sequence(self, batch, params):
        return Sequence(batch, int32(0), params.q_len, int32(0), int32(params.lengths[batch]))


class QueryPartsLayout(SeqUsedLayout):
    """The queries of a batch are divided into `parts` parts of q_len each, and every part is a sequence by itself. Part n of
    batch b uses the first params.lengths[parts b + n] keys; its last query stands at the last of them."""

    label = " parts"

    @property
    def params(self) -> dict[str, Any]:
        return {"q_len": INT, "lengths": ENDS, "parts": INT}

    @inlined
    def find(self, block, batch_head, heads, params):
        batch, head = divmod(batch_head, heads)
        part, block = divmod(block, (params.q_len + self.rows - 1) // self.rows)
        return int32(block), int32(params.parts * batch + part), head

    @inlined
    def sequence(self, batch, params):
        place, part = divmod(batch, params.parts)
        return Sequence(place, int32(params.q_len * part), params.q_len, int32(0), int32(params.lengths[batch]))


class PackedLayout(BatchedLayout):
    """All sequences lie one behind the other in one batch: sequence n has queries params.ends[n] to params.ends[n + 1], and its
    keys in the same way.

    Its blocks of queries begin at block ends[n] // rows + n, which leaves room for all of them, and is found by bisection; so
    do its blocks of keys."""

    label = " packed"

    @property
    def params(self) -> dict[str, Any]:
        return {"ends": ENDS, "ends_k": ENDS}

    apart = False
    packed = True

    @inlined
    def find(self, block, batch_head, heads, params):
        low = _sequence_of(block, params.ends, self.rows)
        return int32(block - params.ends[low] // self.rows - low), low, batch_head

    @inlined
    def find_keys(self, block, batch_head, heads, rows, params):
        low = _sequence_of(block, params.ends_k, rows)
        return int32(block - params.ends_k[low] // rows - low), low, batch_head

    @inlined
    def has(self, block, batch, params):
        return self.rows * block < params.ends[batch + 1] - params.ends[batch]

    @inlined
    def sequence(self, batch, params):
        query, key = int32(params.ends[batch]), int32(params.ends_k[batch])
        return Sequence(int32(0), query, int32(params.ends[batch + 1] - query), key, int32(params.ends_k[batch + 1] - key))

    @inlined
    def has_keys(self, key, batch, params):
        return key < params.ends_k[batch + 1] - params.ends_k[batch]

    @inlined
    def nobodys(self, block, batch, params):
        return _behind_the_last(self.rows * block, batch, self.rows, params.ends)

    @inlined
    def clear_nobodys(self, tile, gO, gLse, block, batch, head, mine, accumulates, params):
        some, row = self.nobodys(block, batch, params)
        if some and not accumulates:
            store(gO, zeros(tile), (int32(0), int32(row + mine), head, 0), 1, 3)
            store(gLse, full(tile.col_vec, -math.inf), (int32(0), head, int32(row + mine)))

    @inlined
    def nobodys_keys(self, key, batch, rows, params):
        return _behind_the_last(key, batch, rows, params.ends_k)

    @inlined
    def first_tile(self, batch, params):
        return int32(params.ends[batch] // self.rows + batch)

    @inlined
    def begins(self, first, tile, rows):
        return first + rows * tile

    @inlined
    def last_key(self, batch, params):
        return int32(params.ends_k[batch + 1])


class PackedSeqUsedLayout(PackedLayout):
    """The same; params.lengths says how many keys of each sequence are in use."""

    label = " packed in use"

    @property
    def params(self) -> dict[str, Any]:
        return {"ends": ENDS, "ends_k": ENDS, "lengths": ENDS}

    @inlined
    def sequence(self, batch, params):
        query = int32(params.ends[batch])
        queries = int32(params.ends[batch + 1] - query)
        return Sequence(int32(0), query, queries, int32(params.ends_k[batch]), int32(params.lengths[batch]))


class KvCacheLayout(SeqUsedLayout):
    """Keys lie in caches that may be growing (`in_use`). The keys before params.leftpad[n], if there is such, do not count."""

    label = " cached"

    @property
    def params(self) -> dict[str, Any]:
        return {"q_len": INT, "leftpad": ENDS, **GROWING}

    @inlined
    def sequence(self, batch, params):
        first, end = _counting(batch, params)
        return Sequence(batch, int32(0), params.q_len, first, int32(end - first))


class PackedKvCacheLayout(PackedLayout):
    """Queries lie one behind the other, and the keys of each sequence in such a cache."""

    label = " packed cached"

    @property
    def params(self) -> dict[str, Any]:
        return {"ends": ENDS, "leftpad": ENDS, **GROWING}

    @inlined
    def sequence(self, batch, params):
        query, (first, end) = int32(params.ends[batch]), _counting(batch, params)
        return Sequence(int32(0), query, int32(params.ends[batch + 1] - query), first, int32(end - first))


@inlined
def _counting(number, params):
    """(the first key of a sequence that counts, where its keys end)"""
    first, end = int32(0), in_use(number, params)
    if params.leftpad.shape[0] > 0:
        first = int32(params.leftpad[number])
    return first, end
