"""Attention of a few tiles of queries: keys in parts, so that all multiprocessors have work.

    y = sum over parts of exp(lse - max(lse)) * attended, divided by the sum of the weights

attention.forward gives a block to each 128 queries of a head; where these are too few for the card, each block has a part of
the keys. Every part is a sequence of its own to forward, all with the same queries, and gives a mean of values, in float32,
and the logarithm of the sum of its weights. One small kernel joins them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .. import terms
from ..axes import Axis
from ..module import KernelText
from ..names import array, unused
from ..terms import Term
from ..writing import ExpressionWriter
from .attention import AttentionCall

if TYPE_CHECKING:
    from typing_extensions import Self

QUERIES, LEAST, AXES = 128, 512, 3  # of a block; the fewest keys of a part that are worth it; heads, rows, columns


class SplitKVAttention(AttentionCall):
    """Attention computed on `parts` equal parts of the keys, whose results a kernel joins: see the module."""

    has_launch, early = True, True
    held: Term  # what is found in each part
    ahead: tuple[Term, ...] = ()

    @classmethod
    def of_parts(cls, root: Term, processors: int) -> Iterator[Self]:
        """The kernel that computes a term, if it is attention with too few blocks for all multiprocessors, and with enough
        keys to cut them into equal parts."""
        for one in cls.kernels_for(root):
            heads, queries, _ = one.q.array.extents if one.q.array.ndim == AXES else (processors, 1, 1)
            parts, keys = processors // (heads * -(-queries // QUERIES)), one.k.array.extents[-2]
            parts = 1 << max(0, parts.bit_length() - 1)
            while parts > 1 and (keys % parts or keys // parts < LEAST):
                parts //= 2
            if parts > 1 and one.heads is one.root and not (one.causal or one.k.normed or one.few):
                one.held = terms.attended(one.root, parts)
                one.roots = one.root, one.held
                yield one

    @property
    def cut(self) -> Any:
        """See Attention."""
        return self.held.attr, self.few

    @property
    def fixed(self) -> dict[Axis, int]:
        """See Attention. The number of keys must be a multiple of the parts, and the kernel that joins them has all columns of
        v in a tile."""
        keys, columns = self.k.array.axes[-2], self.v.axes[-1]
        known = (keys, 5 * self.held.attr), (columns, self.v.extents[-1])
        return super().fixed | {axis.root: n for axis, n in known if axis is not None}

    def describe(self) -> str:
        """What it does, in words."""
        return f"{super().describe()}, for {self.held.attr} parts of the keys, which a small kernel joins"

    def text(self, name: str, parameters: dict[Term, str], local_names: dict[Term, str]) -> KernelText:
        """See RowMap.text."""
        writer = ExpressionWriter({x: parameters[x] for x in self.leaves}, local_names)
        arrays = parameters[self.q.array], parameters[self.k.array], parameters[self.v]
        names = list(dict.fromkeys(arrays))
        cut = {one: unused(f"{one}_parts", parameters.values()) for one in names}
        y, parts = parameters[self.root], parameters[self.held]
        k, v = arrays[1:]
        q, lse = unused("queries", parameters.values()), unused("lse", parameters.values())
        given = [q, cut[k], cut[v]]
        norms = {"q_norm": self.q.weights, "norm_eps": self.eps}
        given += [f"{key}={writer.expression(x)}" for key, x in norms.items() if x is not None]
        given += [f"scale={writer.expression(self.scale) if self.scale is not None else 1.0}", 'layout="bhsd"']
        views = [
            f"{one} = {name}.reshape({name}.shape[0], {parts}.shape[0], -1, {name}.shape[2]).swapaxes(0, 1)"
            for name, one in ((name, cut[name]) for name in dict.fromkeys((k, v)))
        ]
        text = KernelText(bounds="32, 1", globals=[f"TILE = rt(16, {-(-self.v.extents[-1] // 16) * 16}, fp32)"])
        lies = array(lse)
        text.kernel = [
            "grid.follow()",
            "row, head = TILE.rows * int32(cuda.blockIdx.x), int32(cuda.blockIdx.y)",
            f"greatest = load({lies}, TILE.col_vec, (0, head, row))",
            f"for part in range(1, {lies}.shape[0]):",
            f"    greatest = maximum(greatest, load({lies}, TILE.col_vec, (part, head, row)))",
            "total, mean = zeros(TILE.col_vec), zeros(TILE)",
            f"for part in range({lies}.shape[0]):",
            f"    weight = exp(load({lies}, TILE.col_vec, (part, head, row)) - greatest)",
            f"    total, mean = total + weight, mean + load({array(parts)}, TILE, (part, head, row, 0)) * weight",
            f"store({array(y)}, mean / total, (head, row, 0))",
        ]
        text.before = [
            f"{q} = repeated({arrays[0]}, {parts}.shape[0])",
            *views,
            f"_, {lse} = attention.forward({', '.join(given)}, out={parts}, return_lse=True)",
        ]
        text.launch = f"(-(-{y}.shape[1] // TILE.rows), {y}.shape[0]), 32, early=True"
        text.arguments = [(array(parts), parts), (lies, lse), (array(y), y)]
        return text
