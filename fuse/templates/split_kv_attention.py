"""Split-KV attention: with few query tiles, each block attends to a part of the keys, so that all multiprocessors are busy.

    y = sum over parts of exp(lse - max(lse)) * partial output, divided by the sum of these weights

attention.forward gives a block 128 queries of a head. Where there are fewer blocks than multiprocessors, the keys are split
into equal parts: each part is a sequence of its own to forward, all with the same queries, and gives a partial output, in
float32, and its log-sum-exp. A second kernel combines them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..language import term_operations
from ..language.axes import Axis
from ..language.expression_text import ExpressionWriter
from ..language.names import array, unused
from ..language.terms import Term
from ..writing.kernel_text import KernelText
from .attention import AttentionCall

if TYPE_CHECKING:
    from typing_extensions import Self

QUERIES, LEAST, AXES = 128, 512, 3  # queries of a block; the fewest keys of a part; axes: heads, rows, columns


class SplitKVAttention(AttentionCall):
    """Attention over `parts` equal splits of the keys, whose partial outputs a kernel combines: see the module."""

    has_launch, overlaps_previous = True, True
    partial_outputs: Term
    early_reads: tuple[Term, ...] = ()

    @classmethod
    def split_kernels_for(cls, root: Term, processors: int) -> Iterator[Self]:
        """The kernels that compute a term, if it is attention with fewer blocks than multiprocessors, and with enough keys to
        split into equal parts."""
        for one in cls.kernels_for(root):
            heads, queries, _ = one.q.array.extents if one.q.array.ndim == AXES else (processors, 1, 1)
            parts, keys = processors // (heads * -(-queries // QUERIES)), one.k.array.extents[-2]
            parts = 1 << max(0, parts.bit_length() - 1)
            while parts > 1 and (keys % parts or keys // parts < LEAST):
                parts //= 2
            if parts > 1 and one.heads is one.root and not (one.causal or one.k.normalised or one.uses_decode):
                one.partial_outputs = term_operations.split_outputs(one.root, parts)
                one.roots = one.root, one.partial_outputs
                yield one

    @property
    def text_key(self) -> Any:
        return self.partial_outputs.attr, self.uses_decode

    @property
    def fixed_extents(self) -> dict[Axis, int]:
        """The extents of a proof's run. The number of keys must be a multiple of the parts, and the kernel that combines has
        all columns of v in a tile."""
        keys, columns = self.k.array.axes[-2], self.v.axes[-1]
        known = (keys, 5 * self.partial_outputs.attr), (columns, self.v.extents[-1])
        return super().fixed_extents | {axis.root: n for axis, n in known if axis is not None}

    def describe(self) -> str:
        """A description of the kernel, for `explain`."""
        return f"{super().describe()}, for {self.partial_outputs.attr} splits of the keys, combined by a second kernel"

    def text(self, name: str, parameters: dict[Term, str], local_names: dict[Term, str]) -> KernelText:
        writer = ExpressionWriter({x: parameters[x] for x in self.leaves}, local_names)
        arrays = parameters[self.q.array], parameters[self.k.array], parameters[self.v]
        names = list(dict.fromkeys(arrays))
        part_names = {one: unused(f"{one}_parts", parameters.values()) for one in names}
        y, parts = parameters[self.root], parameters[self.partial_outputs]
        k, v = arrays[1:]
        q, lse = unused("queries", parameters.values()), unused("lse", parameters.values())
        arguments = [q, part_names[k], part_names[v]]
        norms = {"q_norm": self.q.weights, "norm_eps": self.eps}
        arguments += [f"{key}={writer.expression(x)}" for key, x in norms.items() if x is not None]
        arguments += [f"scale={writer.expression(self.scale) if self.scale is not None else 1.0}", 'layout="bhsd"']
        views = [
            f"{one} = {name}.reshape({name}.shape[0], {parts}.shape[0], -1, {name}.shape[2]).swapaxes(0, 1)"
            for name, one in ((name, part_names[name]) for name in dict.fromkeys((k, v)))
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
            f"_, {lse} = attention.forward({', '.join(arguments)}, out={parts}, return_lse=True)",
        ]
        text.launch = f"(-(-{y}.shape[1] // TILE.rows), {y}.shape[0]), 32, overlaps_previous=True"
        text.arguments = [(array(parts), parts), (lies, lse), (array(y), y)]
        return text
