"""How sequences lie in memory, as objects with the same methods, which say which rows of q, k and v a tile has."""

import math
from typing import Any, NamedTuple

from numpy import int32

from ops import divmod, full, store, warpgroup, zeros
from tiles import inlined, static
from tiles.launching.arguments import ENDS, INT

from .part import KernelPart
from .variant import ScoreContext


class Sequence(NamedTuple):
    """A sequence in memory. batch: the index of the first axis. offset_q, offset_k: the rows of its first query and key there.
    seqlen_q, seqlen_k: how many it has of each."""

    batch: Any
    offset_q: Any
    seqlen_q: Any
    offset_k: Any
    seqlen_k: Any

    @inlined
    def context(self, sequence, head, row, params, aux):
        """The ScoreContext of a head's queries from `row` on. sequence: the number of this one."""
        shift = self.seqlen_k - self.seqlen_q
        return ScoreContext(sequence, head, row, shift, self.seqlen_q, self.seqlen_k, params, aux, 0)


APPENDING = {"lengths": ENDS, "added": INT, "new_ends": ENDS}  # the arguments that `in_use` reads


@inlined
def in_use(number, params):
    """How many keys a sequence has in a cache: params.lengths[number], plus those that this call appends, which are
    params.added for each sequence, or params.new_ends[number + 1] - params.new_ends[number] if there are any."""
    length = int32(params.lengths[number] + params.added)
    if params.new_ends.shape[0] > 0:
        length = int32(length + params.new_ends[number + 1] - params.new_ends[number])
    return length


@inlined
def sequence_of_block(block, ends, rows):
    """The packed sequence to which a block of `rows` rows belongs, by bisection: see PackedLayout."""
    low, high = int32(0), int32(ends.shape[0] - 1)
    while high - low > 1:
        middle = int32((low + high) // 2)
        if ends[middle] // rows + middle <= block:
            low = middle
        else:
            high = middle
    return low


@inlined
def _rows_behind_last(row, batch, rows, ends):
    """(whether some of the `rows` rows from `row` on lie after the last packed sequence, the first such row)"""
    end = int32(ends[batch + 1] - ends[batch])
    return batch + 2 == ends.shape[0] and row + rows > end, int32(ends[batch] + max(row, end))


@static
class BatchedLayout(KernelPart):
    """Each sequence has a batch, and all have the same lengths. rows: query rows of the kernel's tiles."""

    label = ""  # in the names of configurations

    rows: int

    @property
    def params(self) -> dict[str, Any]:
        return {"q_len": INT, "kv_len": INT}

    bounded_by_array = True  # does a sequence end where its arrays end, so that their bounds suffice?
    packed = False  # do sequences share a batch, so that tiles begin at any row?

    @inlined
    def find_tile(self, block, batch_head, heads, params):
        """(query block of the sequence, the sequence's number, head) of query tile `block` of the grid."""
        batch, head = divmod(batch_head, heads)
        return block, batch, head

    @inlined
    def has_tile(self, block, batch, params):
        """Does the sequence have a query block of this number?"""
        return True

    @inlined
    def sequence(self, batch, params):
        """The Sequence of this number."""
        return Sequence(batch, int32(0), params.q_len, int32(0), params.kv_len)

    @inlined
    def find_key_block(self, block, batch_head, heads, rows, params):
        """(key block of the sequence, the sequence's number, head) of block `block` of `rows` keys of the grid."""
        batch, head = divmod(batch_head, heads)
        return block, batch, head

    @inlined
    def has_key(self, key, batch, params):
        """Does the sequence have a key of this number, in use or not?"""
        return True

    @inlined
    def padding_rows(self, block, batch, params):
        """(whether rows of a query tile lie after the last sequence, the first such row of the batch). The tiles behind the
        last sequence's go on to the end of the batch."""
        return False, int32(0)

    @inlined
    def clear_padding(self, tile, gO, gLse, block, batch, head, offset, accumulates, params):
        """Write out = 0 and lse = -inf to the padding rows of a warp, which begin `offset` rows behind the first one of the
        tile. With `accumulates` they stay as they are. tile: the type of a warp's output."""

    @inlined
    def padding_keys(self, key, batch, rows, params):
        """(whether some of the `rows` keys from `key` on lie after the last sequence, the first such row of the batch)"""
        return False, int32(0)

    @inlined
    def first_tile(self, batch, params):
        """The number of the sequence's first query tile among the tiles of a batch. No two sequences share a tile."""
        return int32(0)

    @inlined
    def tma_offset(self, first, tile, rows):
        """The TMA coordinate of tile number `tile`, for a sequence that begins at row `first`."""
        return tile

    @inlined
    def end_of_keys(self, batch, params):
        """The row where the sequence's keys end, in use or not, if another sequence's keys follow."""
        return int32(0)

    @inlined
    def zero_foreign_rows(self, values, valid, groups):
        """Zero the rows of a shared tile that belong to other sequences, all but the first `valid`, because a weight of 0 times
        NaN is NaN. The CTA's first `groups` warpgroups do it together."""
        if not self.bounded_by_array and valid < values.rows:
            warpgroup.zero_rows(values, valid, groups)


class SeqUsedLayout(BatchedLayout):
    """Each sequence has a batch, of whose keys the first params.lengths[n] are in use (FlashAttention's seqused_k)."""

    label = " in use"

    @property
    def params(self) -> dict[str, Any]:
        return {"q_len": INT, "lengths": ENDS}

    bounded_by_array = False

    @inlined
    def sequence(self, batch, params):
        return Sequence(batch, int32(0), params.q_len, int32(0), int32(params.lengths[batch]))


class QueryPartsLayout(SeqUsedLayout):
    """The queries of a batch are divided into `parts` parts of q_len each, and every part is a sequence by itself. Part n of
    batch b sees the first params.lengths[parts b + n] keys, and its last query is aligned with the last of them."""

    label = " parts"

    @property
    def params(self) -> dict[str, Any]:
        return {"q_len": INT, "lengths": ENDS, "parts": INT}

    @inlined
    def find_tile(self, block, batch_head, heads, params):
        batch, head = divmod(batch_head, heads)
        part, block = divmod(block, (params.q_len + self.rows - 1) // self.rows)
        return int32(block), int32(params.parts * batch + part), head

    @inlined
    def sequence(self, batch, params):
        place, part = divmod(batch, params.parts)
        return Sequence(place, int32(params.q_len * part), params.q_len, int32(0), int32(params.lengths[batch]))


class PackedLayout(BatchedLayout):
    """Packed sequences (varlen): all are in one batch, and sequence n has the queries params.ends[n] to params.ends[n + 1], its
    keys likewise by params.ends_k (cu_seqlens).

    Its query blocks have the numbers from ends[n] // rows + n on, which never overlap, and bisection finds the sequence of a
    number. The same holds for its key blocks."""

    label = " packed"

    @property
    def params(self) -> dict[str, Any]:
        return {"ends": ENDS, "ends_k": ENDS}

    bounded_by_array = False
    packed = True

    @inlined
    def find_tile(self, block, batch_head, heads, params):
        low = sequence_of_block(block, params.ends, self.rows)
        return int32(block - params.ends[low] // self.rows - low), low, batch_head

    @inlined
    def find_key_block(self, block, batch_head, heads, rows, params):
        low = sequence_of_block(block, params.ends_k, rows)
        return int32(block - params.ends_k[low] // rows - low), low, batch_head

    @inlined
    def has_tile(self, block, batch, params):
        return self.rows * block < params.ends[batch + 1] - params.ends[batch]

    @inlined
    def sequence(self, batch, params):
        query, key = int32(params.ends[batch]), int32(params.ends_k[batch])
        return Sequence(int32(0), query, int32(params.ends[batch + 1] - query), key, int32(params.ends_k[batch + 1] - key))

    @inlined
    def has_key(self, key, batch, params):
        return key < params.ends_k[batch + 1] - params.ends_k[batch]

    @inlined
    def padding_rows(self, block, batch, params):
        return _rows_behind_last(self.rows * block, batch, self.rows, params.ends)

    @inlined
    def clear_padding(self, tile, gO, gLse, block, batch, head, offset, accumulates, params):
        has_padding, row = self.padding_rows(block, batch, params)
        if has_padding and not accumulates:
            store(gO, zeros(tile), (int32(0), int32(row + offset), head, 0), 1, 3)
            store(gLse, full(tile.col_vec, -math.inf), (int32(0), head, int32(row + offset)))

    @inlined
    def padding_keys(self, key, batch, rows, params):
        return _rows_behind_last(key, batch, rows, params.ends_k)

    @inlined
    def first_tile(self, batch, params):
        return int32(params.ends[batch] // self.rows + batch)

    @inlined
    def tma_offset(self, first, tile, rows):
        return first + rows * tile

    @inlined
    def end_of_keys(self, batch, params):
        return int32(params.ends_k[batch + 1])


class PackedSeqUsedLayout(PackedLayout):
    """Packed sequences, of whose keys the first params.lengths[n] are in use."""

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
    """The keys of each sequence are in a cache to which this call may append (`in_use`). The keys before params.leftpad[n], if
    leftpad is not empty, are padding."""

    label = " cached"

    @property
    def params(self) -> dict[str, Any]:
        return {"q_len": INT, "leftpad": ENDS, **APPENDING}

    @inlined
    def sequence(self, batch, params):
        first, end = _valid_keys(batch, params)
        return Sequence(batch, int32(0), params.q_len, first, int32(end - first))


class PackedKvCacheLayout(PackedLayout):
    """Packed queries, with the keys of each sequence in a cache: see KvCacheLayout."""

    label = " packed cached"

    @property
    def params(self) -> dict[str, Any]:
        return {"ends": ENDS, "leftpad": ENDS, **APPENDING}

    @inlined
    def sequence(self, batch, params):
        query, (first, end) = int32(params.ends[batch]), _valid_keys(batch, params)
        return Sequence(int32(0), query, int32(params.ends[batch + 1] - query), first, int32(end - first))


@inlined
def _valid_keys(number, params):
    """(the first key of a sequence that is no padding, where its keys end)"""
    first, end = int32(0), in_use(number, params)
    if params.leftpad.shape[0] > 0:
        first = int32(params.leftpad[number])
    return first, end
