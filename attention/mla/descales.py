"""What a sequence's quantised latents are to be multiplied by, a number a key, as objects with the same method: one for each
way that caches lie in (softmax/decode/caches.py)."""

from typing import Any

from numpy import int32

from ops import col_index, load, minimum, truncate, where
from tiles import inlined, static

from ..softmax.decode import caches


@static
class Dense:
    """Of an array (batch, row)."""

    @inlined
    def of(self, keys, gDescale, sequence, key, end, given):
        """The numbers of the keys from `key` on, as a vector of the type `keys`; 0 from `end` on."""
        return load(truncate(gDescale, 1, end), keys, (sequence, key))


class Indexed(Dense):
    """Of batch given.batch_index[n]."""

    @inlined
    def of(self, keys, gDescale, sequence, key, end, given):
        """See Dense."""
        return load(truncate(gDescale, 1, end), keys, (int32(given.batch_index[sequence]), key))


class Paged(Dense):
    """Of pages of an array (page, row)."""

    @inlined
    def of(self, keys, gDescale, sequence, key, end, given):
        """See Dense."""
        place = col_index(keys) + key
        known = minimum(place, float(end - 1))  # behind the end no page is looked up
        entry = known // gDescale.shape[1]
        found = gDescale[given.pages[sequence, entry], known - entry * gDescale.shape[1]]
        return where(place < end, found, 0.0)


def descales_of(cache: caches.Dense) -> Any:
    """Those that lie like such a cache."""
    return {caches.Dense: Dense, caches.Indexed: Indexed, caches.Paged: Paged}[type(cache)]()
