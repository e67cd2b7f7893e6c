"""The two products of attention, S = Q K^T and O += P V, by what the cache holds, as classes with the same methods: keys and
values in the dtype of the queries, or quantised, in fp8 or int8."""

from typing import Any

from numpy import float32, int32

from ops import abs, load, mma_AB, mma_AB_unzipped, mma_ABt, mma_ABt_unzipped, rescale, rezipped, tile_max, unzipped
from tiles import dtype, fp8e4m3, fp16, fp32, inlined, pipeline, static, sv
from tiles.launching.arguments import array

from ..part import KernelPart

P_SCALE = 2.0**7  # of weights times descales, which lifts them into fp16's range: they are at most 2^15 then
MIN_DESCALE = 2.0**-100  # of the largest descale of values that a warp has met


@static
class SameDtypeProducts(KernelPart):
    """The cache has the dtype of the queries."""

    q_dtype: dtype

    def __str__(self):
        return str(self.q_dtype)

    @property
    def cache_dtype(self) -> dtype:
        """The dtype of the cache."""
        return self.q_dtype

    @property
    def has_key_descales(self) -> bool:
        """Does each key have descales of its own?"""
        return False

    def descale_pipelines(self, kv: int, stages: int, warps: int) -> dict[str, pipeline]:
        """{name: pipeline} of each key's descales, for tiles of `kv` keys."""
        return {}

    @property
    def mma_dtype(self) -> dtype:
        """The dtype of the queries in the product."""
        return self.q_dtype

    @inlined
    def convert_q(self, x):
        """Some columns of the queries, in registers, as the product takes them."""
        return self.q_dtype(x)

    @inlined
    def head_descales(self, sequence, head, params):
        """(the descale of a head's keys, that of its values)"""
        return 1.0, 1.0

    @inlined
    def look_up_descales(self, pipes, cache, sequence, key, end, params):
        """Look up where the descales of a tile of keys are, from `key` on, by `cache`, a loader. pipes: those of
        descale_pipelines, in this and the methods below."""
        return int32(0)

    @inlined
    def fill_k_descales(self, pipes, j, cache, lookup, sequence, key, head, end, n, params):
        """Start copying the descales of tile j's keys, as one commit group before that of K."""

    @inlined
    def fill_v_descales(self, pipes, j, cache, lookup, sequence, key, head, end, n, params):
        """Start copying the descales of tile j's values, as one commit group before that of V."""

    @inlined
    def k_descales(self, head_descale, pipes, j, newer, like):
        """What tile j's scores are multiplied by: the head's descale; or the keys', a vector of type `like`, once all but the
        `newer` latest commit groups have arrived."""
        return head_descale

    @inlined
    def v_descales(self, head_descale, pipes, j, newer, like):
        """What tile j's weights are multiplied by: as k_descales, of values."""
        return head_descale

    @inlined
    def initial_unit(self):
        """The unit of a warp's O at first: O is stored divided by it. 0 if O has none."""
        return int32(0)

    @inlined
    def mma_qk(self, s, queries, keys, k_descales):
        """s + Q K^T, where s is 0."""
        return mma_ABt(s, queries, keys)

    @inlined
    def rescale_o(self, state, unit, v_descales):
        """(O, rescaled to the state's new maximum and to the unit for the next P V; that unit)"""
        return state.rescale(), unit

    @inlined
    def mma_pv(self, o, p, values, unit, v_descales):
        """O + P V. O's columns may be in an order that only finish_columns undoes."""
        return mma_AB(o, self.q_dtype(p), values)

    @inlined
    def merge_weight(self, weight, unit):
        """What a warp's O is multiplied by before the warps' are added: the weight of its rows, times its unit if it has
        one."""
        return weight

    @inlined
    def finish_columns(self, o, v_descale):
        """Some columns of the summed O, each at its place, times the head's descale."""
        return o


@static
class QuantizedProducts(SameDtypeProducts):
    """The cache has `quantized`, a dtype of one byte. Keys and values become fp16 on the way to the products, exactly; queries
    are rounded to fp16. scaled: are there descales, params.k_descale and params.v_descale (sequence, head)?"""

    quantized: dtype = fp8e4m3
    scaled: bool = False

    def __str__(self):
        return f"{self.q_dtype} of {self.quantized}" + " scaled" * self.scaled

    @property
    def cache_dtype(self) -> dtype:
        return self.quantized

    @property
    def params(self) -> dict[str, Any]:
        return {"k_descale": array(2), "v_descale": array(2)} if self.scaled else {}

    @property
    def mma_dtype(self) -> dtype:
        return fp16

    @inlined
    def convert_q(self, x):
        """Some columns of the queries in fp16, in the order in which keys are converted (ops.unzipped)."""
        return unzipped(fp16(x))

    @inlined
    def head_descales(self, sequence, head, params):
        if self.scaled:
            return params.k_descale[sequence, head], params.v_descale[sequence, head]
        return 1.0, 1.0

    @inlined
    def mma_qk(self, s, queries, keys, k_descales):
        s = mma_ABt_unzipped(s, queries, keys)
        if self.scaled:
            s = s * k_descales
        return s

    @inlined
    def mma_pv(self, o, p, values, unit, v_descales):
        return mma_AB_unzipped(o, fp16(p), values)

    @inlined
    def finish_columns(self, o, v_descale):
        o = rezipped(o)
        if self.scaled:
            o = o * v_descale
        return o


@static
class KeyScaledProducts(QuantizedProducts):
    """The cache is quantised, with a descale for each key and head, laid out as the cache is: params.k_descale multiplies the
    key's scores, params.v_descale its weights. P times descales becomes fp16, whose smallest number is 2^-24. So O is kept in
    units of the largest descale of values that a warp has met, divided by P_SCALE, and the other descales are divided by that
    descale."""

    def __str__(self):
        return f"{self.q_dtype} of {self.quantized} scaled by key"

    @property
    def params(self) -> dict[str, Any]:
        return {"k_descale": array(3), "v_descale": array(3)}

    @property
    def has_key_descales(self) -> bool:
        return True

    def descale_pipelines(self, kv: int, stages: int, warps: int) -> dict[str, pipeline]:
        return {name: pipeline(sv(kv, fp32), stages, warps) for name in ("k_descale", "v_descale")}

    @inlined
    def head_descales(self, sequence, head, params):
        return 1.0, 1.0

    @inlined
    def initial_unit(self):
        return float32(MIN_DESCALE)

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
    def k_descales(self, head_descale, pipes, j, newer, like):
        return load(pipes[0].wait_warp(j, newer), like)

    @inlined
    def v_descales(self, head_descale, pipes, j, newer, like):
        return load(pipes[1].wait_warp(j, newer), like)

    @inlined
    def rescale_o(self, state, unit, v_descales):
        largest = max(unit, tile_max(abs(v_descales)))
        factor = unit / largest if largest > unit else float32(1.0)
        return rescale(state.o, state.o_scale * factor), largest

    @inlined
    def mma_pv(self, o, p, values, unit, v_descales):
        return mma_AB_unzipped(o, fp16(p * (v_descales * (float32(P_SCALE) / unit))), values)

    @inlined
    def merge_weight(self, weight, unit):
        return weight * (unit / float32(P_SCALE))

    @inlined
    def finish_columns(self, o, v_descale):
        return rezipped(o)
