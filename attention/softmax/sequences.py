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


GROWING = {"lengths": ENDS, "added": INT, "new_ends": ENDS}  # what `in_use` reads


@inlined
def in_use(number, given):
    """The keys of a sequence in a cache: given.lengths, and those that are being appended, given.added of each sequence, and
    given.new_ends[n] to given.new_ends[n + 1] if there are such."""
    length = int32(given.lengths[number] + given.added)
    if given.new_ends.shape[0] > 0:
        length = int32(length + given.new_ends[number + 1] - given.new_ends[number])
    return length


@inlined
def _sequence_of(block, ends, rows):
    """The sequence in which a block of so many rows lies: see Packed."""
    low, high = int32(0), int32(ends.shape[0] - 1)
    while high - low > 1:
        middle = int32((low + high) // 2)
        if ends[middle] // rows + middle <= block:
            low = middle
        else:
            high = middle
    return low


@static
class Batched:
    """Each in a batch of its own, all of one length. Of kernels whose tiles have `rows` query rows."""

    rows: int

    @property
    def given(self) -> dict[str, Any]:
        """The kernel's arguments that it reads, and what they are."""
        return {"q_len": INT, "kv_len": INT}

    apart = True  # does what lies behind a sequence's end belong to nobody?
    packed = False  # does one lie behind the other, so that tiles of rows begin anywhere?

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
    def find_keys(self, block, pair, heads, rows, given):
        """The same as `find` of a block of so many keys."""
        batch, head = divmod(pair, heads)
        return block, batch, head

    @inlined
    def has_keys(self, key, batch, given):
        """Has the sequence a key of that number, used or not?"""
        return True

    @inlined
    def first_tile(self, batch, given):
        """Where the sequence's tiles of queries begin among all of a batch's, each sequence having whole ones."""
        return int32(0)

    @inlined
    def begins(self, first, tile, rows):
        """Where a tile of so many rows begins, of a sequence whose `first` row is given, as TMA counts."""
        return tile

    @inlined
    def last_key(self, batch, given):
        """Where the sequence's keys end, used or not, of one behind which another one's follow."""
        return int32(0)

    @inlined
    def clear(self, values, left, groups):
        """Zero the rows of a shared tile that belong to others, all but `left`: a weight of 0 does not make up for a NaN. The
        work of the block's first `groups` warpgroups together."""
        if not self.apart and left < values.rows:
            warpgroup.zero_rows(values, left, groups)


class InUse(Batched):
    """The same, with so many keys in use in each: given.lengths."""

    @property
    def given(self) -> dict[str, Any]:
        return {"q_len": INT, "lengths": ENDS}

    apart = False

    @inlined
    def sequence(self, batch, given):
        return Sequence(batch, int32(0), given.q_len, int32(0), int32(given.lengths[batch]))


class Parts(InUse):
    """Parts of a batch's queries, `parts` of q_len each, of which every one is a sequence by itself: of part n of batch b the
    first given.lengths[parts b + n] keys are in use, its last query standing at the last of them."""

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
    """One behind the other in one batch: sequence n has queries given.ends[n] to given.ends[n + 1], and such keys.

    Its blocks of queries begin at block number ends[n] // rows + n, which leaves room for all of them, and which a search by
    halves finds; those of keys likewise."""

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
    def first_tile(self, batch, given):
        return int32(given.ends[batch] // self.rows + batch)

    @inlined
    def begins(self, first, tile, rows):
        return first + rows * tile

    @inlined
    def last_key(self, batch, given):
        return int32(given.ends_k[batch + 1])


class PackedInUse(Packed):
    """The same, with so many keys in use of each: given.lengths."""

    @property
    def given(self) -> dict[str, Any]:
        return {"ends": ENDS, "ends_k": ENDS, "lengths": ENDS}

    @inlined
    def sequence(self, batch, given):
        query = int32(given.ends[batch])
        queries = int32(given.ends[batch + 1] - query)
        return Sequence(int32(0), query, queries, int32(given.ends_k[batch]), int32(given.lengths[batch]))


class Cached(InUse):
    """The same of caches that may be growing (`in_use`), of which the keys before given.leftpad[n], if there is such, do not
    count."""

    @property
    def given(self) -> dict[str, Any]:
        return {"q_len": INT, "leftpad": ENDS, **GROWING}

    @inlined
    def sequence(self, batch, given):
        first, end = _counting(batch, given)
        return Sequence(batch, int32(0), given.q_len, first, int32(end - first))


class PackedCached(Packed):
    """Queries one behind the other, and each sequence's keys in such a cache of its own."""

    @property
    def given(self) -> dict[str, Any]:
        return {"ends": ENDS, "leftpad": ENDS, **GROWING}

    @inlined
    def sequence(self, batch, given):
        query, (first, end) = int32(given.ends[batch]), _counting(batch, given)
        return Sequence(int32(0), query, int32(given.ends[batch + 1] - query), first, int32(end - first))


@inlined
def _counting(number, given):
    """The first key of a sequence that counts, and where keys end."""
    first, end = int32(0), in_use(number, given)
    if given.leftpad.shape[0] > 0:
        first = int32(given.leftpad[number])
    return first, end
