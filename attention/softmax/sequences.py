"""How sequences lie in memory, as objects with the same methods: which rows of q, k and v a tile has."""

import math
from typing import Any, NamedTuple

from numpy import int32

from ops import divmod, full, store, warpgroup, zeros
from tiles import inlined, static
from tiles.arguments import ENDS, INT


class Sequence(NamedTuple):
    """A sequence: the batch in which it lies, where its queries and keys begin there, and how many it has of each."""

    batch: Any
    query: Any
    queries: Any
    key: Any
    keys: Any


GROWING = {"lengths": ENDS, "added": INT, "new_ends": ENDS}  # what `in_use` reads


@inlined
def in_use(number, given):
    """How many keys a sequence has in a cache: given.lengths, plus those that are being appended: given.added for each
    sequence, and those from given.new_ends[n] to given.new_ends[n + 1], if there are any."""
    length = int32(given.lengths[number] + given.added)
    if given.new_ends.shape[0] > 0:
        length = int32(length + given.new_ends[number + 1] - given.new_ends[number])
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
class Batched:
    """Each sequence has a batch, and all have the same length. rows: query rows of the kernel's tiles."""

    rows: int

    @property
    def given(self) -> dict[str, Any]:
        """The kernel's arguments that it reads, and what they are."""
        return {"q_len": INT, "kv_len": INT}

    apart = True  # do rows behind a sequence's end belong to no other sequence?
    packed = False  # do sequences lie one behind the other, so that tiles begin at any row?

    @inlined
    def find(self, block, pair, heads, given):
        """(query block of the sequence, the sequence's number, head) of a tile."""
        batch, head = divmod(pair, heads)
        return block, batch, head

    @inlined
    def has(self, block, batch, given):
        """Does block number `block` of the sequence's queries exist?"""
        return True

    @inlined
    def sequence(self, batch, given):
        """The Sequence of that number."""
        return Sequence(batch, int32(0), given.q_len, int32(0), given.kv_len)

    @inlined
    def find_keys(self, block, pair, heads, rows, given):
        """The same as `find`, for a block of `rows` keys."""
        batch, head = divmod(pair, heads)
        return block, batch, head

    @inlined
    def has_keys(self, key, batch, given):
        """Does the sequence have a key of that number, in use or not?"""
        return True

    @inlined
    def nobodys(self, block, batch, given):
        """(whether rows of a tile of queries lie behind the last sequence, the first of them in the batch). Tiles that the last
        sequence does not need go on to the end of the batch."""
        return False, int32(0)

    @inlined
    def clear_nobodys(self, tile, gO, gLse, block, batch, head, mine, joins, given):
        """Write 0, and -inf like that of a row which sees no key, to these rows: a warp's, `mine` rows behind the first, unless
        the output `joins` what is there. tile: the type of a warp's output."""

    @inlined
    def nobodys_keys(self, key, batch, rows, given):
        """The same of a block of `rows` keys, from `key` on."""
        return False, int32(0)

    @inlined
    def first_tile(self, batch, given):
        """The number of the sequence's first tile of queries among the tiles of a batch; each sequence has whole tiles."""
        return int32(0)

    @inlined
    def begins(self, first, tile, rows):
        """Where tile number `tile` begins, in the units in which TMA counts, for a sequence that begins with row `first`."""
        return tile

    @inlined
    def last_key(self, batch, given):
        """Where the sequence's keys end, in use or not, if another sequence's keys follow."""
        return int32(0)

    @inlined
    def clear(self, values, left, groups):
        """Zero the rows of a shared tile that belong to other sequences, all but the first `left`: a weight of 0 does not make
        up for a NaN. Done by the block's first `groups` warpgroups together."""
        if not self.apart and left < values.rows:
            warpgroup.zero_rows(values, left, groups)


class InUse(Batched):
    """The same; given.lengths says how many keys of each are in use."""

    @property
    def given(self) -> dict[str, Any]:
        return {"q_len": INT, "lengths": ENDS}

    apart = False

    @inlined
    def sequence(self, batch, given):
        return Sequence(batch, int32(0), given.q_len, int32(0), int32(given.lengths[batch]))


class Parts(InUse):
    """The queries of a batch are divided into `parts` parts of q_len each, and every part is a sequence by itself. Part n of
    batch b uses the first given.lengths[parts b + n] keys; its last query stands at the last of them."""

    @property
    def given(self) -> dict[str, Any]:
        return {"q_len": INT, "lengths": ENDS, "parts": INT}

    @inlined
    def find(self, block, pair, heads, given):
        batch, head = divmod(pair, heads)
        part, block = divmod(block, (given.q_len + self.rows - 1) // self.rows)
        return int32(block), int32(given.parts * batch + part), head

    @inlined
    def sequence(self, batch, given):
        place, part = divmod(batch, given.parts)
        return Sequence(place, int32(given.q_len * part), given.q_len, int32(0), int32(given.lengths[batch]))


class Packed(Batched):
    """All sequences lie one behind the other in one batch: sequence n has queries given.ends[n] to given.ends[n + 1], and its
    keys in the same way.

    Its blocks of queries begin at block ends[n] // rows + n, which leaves room for all of them, and is found by bisection; so
    do its blocks of keys."""

    @property
    def given(self) -> dict[str, Any]:
        return {"ends": ENDS, "ends_k": ENDS}

    apart = False
    packed = True

    @inlined
    def find(self, block, pair, heads, given):
        low = _sequence_of(block, given.ends, self.rows)
        return int32(block - given.ends[low] // self.rows - low), low, pair

    @inlined
    def find_keys(self, block, pair, heads, rows, given):
        low = _sequence_of(block, given.ends_k, rows)
        return int32(block - given.ends_k[low] // rows - low), low, pair

    @inlined
    def has(self, block, batch, given):
        return self.rows * block < given.ends[batch + 1] - given.ends[batch]

    @inlined
    def sequence(self, batch, given):
        query, key = int32(given.ends[batch]), int32(given.ends_k[batch])
        return Sequence(int32(0), query, int32(given.ends[batch + 1] - query), key, int32(given.ends_k[batch + 1] - key))

    @inlined
    def has_keys(self, key, batch, given):
        return key < given.ends_k[batch + 1] - given.ends_k[batch]

    @inlined
    def nobodys(self, block, batch, given):
        return _behind_the_last(self.rows * block, batch, self.rows, given.ends)

    @inlined
    def clear_nobodys(self, tile, gO, gLse, block, batch, head, mine, joins, given):
        some, row = self.nobodys(block, batch, given)
        if some and not joins:
            store(gO, zeros(tile), (int32(0), int32(row + mine), head, 0), 1, 3)
            store(gLse, full(tile.col_vec, -math.inf), (int32(0), head, int32(row + mine)))

    @inlined
    def nobodys_keys(self, key, batch, rows, given):
        return _behind_the_last(key, batch, rows, given.ends_k)

    @inlined
    def first_tile(self, batch, given):
        return int32(given.ends[batch] // self.rows + batch)

    @inlined
    def begins(self, first, tile, rows):
        return first + rows * tile

    @inlined
    def last_key(self, batch, given):
        return int32(given.ends_k[batch + 1])


class PackedInUse(Packed):
    """The same; given.lengths says how many keys of each sequence are in use."""

    @property
    def given(self) -> dict[str, Any]:
        return {"ends": ENDS, "ends_k": ENDS, "lengths": ENDS}

    @inlined
    def sequence(self, batch, given):
        query = int32(given.ends[batch])
        queries = int32(given.ends[batch + 1] - query)
        return Sequence(int32(0), query, queries, int32(given.ends_k[batch]), int32(given.lengths[batch]))


class Cached(InUse):
    """Keys lie in caches that may be growing (`in_use`). The keys before given.leftpad[n], if there is such, do not count."""

    @property
    def given(self) -> dict[str, Any]:
        return {"q_len": INT, "leftpad": ENDS, **GROWING}

    @inlined
    def sequence(self, batch, given):
        first, end = _counting(batch, given)
        return Sequence(batch, int32(0), given.q_len, first, int32(end - first))


class PackedCached(Packed):
    """Queries lie one behind the other, and the keys of each sequence in such a cache."""

    @property
    def given(self) -> dict[str, Any]:
        return {"ends": ENDS, "leftpad": ENDS, **GROWING}

    @inlined
    def sequence(self, batch, given):
        query, (first, end) = int32(given.ends[batch]), _counting(batch, given)
        return Sequence(int32(0), query, int32(given.ends[batch + 1] - query), first, int32(end - first))


@inlined
def _counting(number, given):
    """(the first key of a sequence that counts, where its keys end)"""
    first, end = int32(0), in_use(number, given)
    if given.leftpad.shape[0] > 0:
        first = int32(given.leftpad[number])
    return first, end
