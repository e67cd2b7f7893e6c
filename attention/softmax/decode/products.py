"""The two products of attention, by what a cache holds, as objects with the same methods: as queries are, or fp8."""

from typing import Any

from numpy import float32, int32

from ops import abs, load, mma_AB, mma_AB_unzipped, mma_ABt, mma_ABt_unzipped, rescale, rezipped, tile_max, unzipped
from tiles import dtype, fp8e4m3, fp16, fp32, inlined, pipeline, static, sv
from tiles.arguments import array

LIFT, LEAST = 2.0**7, 2.0**-100  # of weights times descales, which then end at 2^15; of the greatest of these


@static
class SameDtypeProducts:
    """The cache has the dtype of the queries, `wide`."""

    q_dtype: dtype

    def __str__(self):
        return str(self.q_dtype)

    @property
    def cache_dtype(self) -> dtype:
        """The dtype of the cache."""
        return self.q_dtype

    @property
    def params(self) -> dict[str, Any]:
        """{kernel's argument: its type} of what this needs in the kernel."""
        return {}

    @property
    def has_key_descales(self) -> bool:
        """Does each key have descales of its own?"""
        return False

    def descale_pipelines(self, kv: int, stages: int, warps: int) -> dict[str, pipeline]:
        """The pipelines that bring these descales, for tiles of so many keys; none here."""
        return {}

    @property
    def mma_dtype(self) -> dtype:
        """The dtype in which the products take queries."""
        return self.q_dtype

    @inlined
    def convert_q(self, x):
        """Some columns of the queries, in registers, as the products take them."""
        return self.q_dtype(x)

    @inlined
    def head_descales(self, sequence, head, params):
        """(the numbers by which keys are multiplied, those for values)"""
        return 1.0, 1.0

    @inlined
    def look_up_descales(self, pipes, cache, sequence, key, end, params):
        """Look up where the descales of a tile of keys lie, from `key` on: see caches.py."""
        return int32(0)

    @inlined
    def fill_k_descales(self, pipes, j, cache, lookup, sequence, key, head, end, n, params):
        """Start copying the descales of tile j's keys, one group of copies ahead of K's."""

    @inlined
    def fill_v_descales(self, pipes, j, cache, lookup, sequence, key, head, end, n, params):
        """Start copying the descales of tile j's values, ahead of V's."""

    @inlined
    def k_descales(self, unit, pipes, j, newer, like):
        """What keys are multiplied by: `unit`, or a descale of each, a vector of type `like`, once all but the `newer` last
        groups of copies have arrived."""
        return unit

    @inlined
    def v_descales(self, unit, pipes, j, newer, like):
        """The same of values."""
        return unit

    @inlined
    def initial_unit(self):
        """The unit of a warp's O at the beginning, if it has one."""
        return int32(0)

    @inlined
    def mma_qk(self, s, queries, keys, of_keys):
        """s, which is 0, + Q K^T."""
        return mma_ABt(s, queries, keys)

    @inlined
    def rescale_o(self, state, unit, of_values):
        """(O as the next keys' P V is added to it, its unit from then on)"""
        return state.rescale(), unit

    @inlined
    def mma_pv(self, o, p, values, unit, of_values):
        """O + P V. O's columns are in an order of their own."""
        return mma_AB(o, self.q_dtype(p), values)

    @inlined
    def merge_weight(self, weight, unit):
        """What a warp's O is multiplied by before it is added to the others': the weight of its rows, and its unit, if it has
        one of its own."""
        return weight

    @inlined
    def finish_columns(self, o, unit):
        """Some columns of O, each at its place."""
        return o


@static
class Fp8Products(SameDtypeProducts):
    """The cache is fp8. Keys and values become fp16 on the way to the products, exactly; queries are rounded to fp16. scaled:
    are they multiplied by params.k_descale[n, head] and params.v_descale[n, head] for sequence n?"""

    scaled: bool = False

    def __str__(self):
        return f"{self.q_dtype} of {fp8e4m3}" + " scaled" * self.scaled

    @property
    def cache_dtype(self) -> dtype:
        return fp8e4m3

    @property
    def params(self) -> dict[str, Any]:
        return {"k_descale": array(2), "v_descale": array(2)} if self.scaled else {}

    @property
    def mma_dtype(self) -> dtype:
        return fp16

    @inlined
    def convert_q(self, x):
        """See Same: with their columns unzipped."""
        return unzipped(fp16(x))

    @inlined
    def head_descales(self, sequence, head, params):
        if self.scaled:
            return params.k_descale[sequence, head], params.v_descale[sequence, head]
        return 1.0, 1.0

    @inlined
    def mma_qk(self, s, queries, keys, of_keys):
        s = mma_ABt_unzipped(s, queries, keys)
        if self.scaled:
            s = s * of_keys
        return s

    @inlined
    def mma_pv(self, o, p, values, unit, of_values):
        return mma_AB_unzipped(o, fp16(p), values)

    @inlined
    def finish_columns(self, o, unit):
        o = rezipped(o)
        if self.scaled:
            o = o * unit
        return o


@static
class Fp8KeyScaledProducts(Fp8Products):
    """The same with descales for each key and head, which lie as the cache does. The scores of a key are multiplied by
    params.k_descale, its weight by params.v_descale. Such weights become fp16, which begins at 2^-24. So O is kept in units of
    the greatest descale of values that a warp has met, times 2^-LIFT, and the other descales are divided by it."""

    def __str__(self):
        return f"{self.q_dtype} of {fp8e4m3} scaled by key"

    @property
    def params(self) -> dict[str, Any]:
        return {"k_descale": array(3), "v_descale": array(3)}

    @property
    def has_key_descales(self) -> bool:
        return True

    def descale_pipelines(self, kv: int, stages: int, warps: int) -> dict[str, pipeline]:
        """See Same: of keys, and of values."""
        return {name: pipeline(sv(kv, fp32), stages, warps) for name in ("k_descale", "v_descale")}

    @inlined
    def head_descales(self, sequence, head, params):
        return 1.0, 1.0

    @inlined
    def initial_unit(self):
        return float32(LEAST)

    @inlined
    def look_up_descales(self, pipes, cache, sequence, key, end, params):
        return cache.look_up(pipes[0], params.k_descale, sequence, key, end, params)

    @inlined
    def fill_k_descales(self, pipes, j, cache, lookup, sequence, key, head, end, n, params):
        cache.fill_descales(pipes[0], j, params.k_descale, lookup, sequence, key, (head,), end, n, params)

    @inlined
    def fill_v_descales(self, pipes, j, cache, lookup, sequence, key, head, end, n, params):
        cache.fill_descales(pipes[1], j, params.v_descale, lookup, sequence, key, (head,), end, n, params)

    @inlined
    def k_descales(self, unit, pipes, j, newer, like):
        return load(pipes[0].own(j, newer), like)

    @inlined
    def v_descales(self, unit, pipes, j, newer, like):
        return load(pipes[1].own(j, newer), like)

    @inlined
    def rescale_o(self, state, unit, of_values):
        greatest = max(unit, tile_max(abs(of_values)))
        less = unit / greatest if greatest > unit else float32(1.0)
        return rescale(state.o, state.o_scale * less), greatest

    @inlined
    def mma_pv(self, o, p, values, unit, of_values):
        return mma_AB_unzipped(o, fp16(p * (of_values * (float32(LIFT) / unit))), values)

    @inlined
    def merge_weight(self, weight, unit):
        return weight * (unit / float32(LIFT))

    @inlined
    def finish_columns(self, o, unit):
        return rezipped(o)
