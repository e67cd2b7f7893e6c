"""The launches of the gradients of what scores are made of besides q and k: of a bias, of ALiBi's slopes, of arrays that a
score in Python reads."""

import math
from collections.abc import Sequence
from typing import Any

from tiles.plan import Fill
from tiles.schema import REAL, Problem

from ..assembled import VariantSpec
from ..call_options import AUX
from ..launches import LOG2_E, Before
from ..score_derivative import Derivatives
from . import bias, elements, hopper_bias, recomputed_scores

AT_ONCE = 2 * elements.SHARED_BY  # shares of a multiprocessor, at least, where there are so many blocks of keys
GRADIENTS = "dbias", "dalibi", "dsink", *(f"daux{n}" for n in range(AUX))  # besides dq, dk and dv, in this order


def read_by(problem: Problem, name: str, found: Derivatives | None) -> Sequence[recomputed_scores.Added]:
    """What reads the array that this gradient belongs to. ValueError, TypeError: there is none, or it has no gradient."""
    array = name.removeprefix("d")
    if array not in problem:
        raise ValueError(f"{name}: must be None where there is no {array}: {array}=None")
    form = problem.forms[array]
    if form.dtype not in REAL:
        raise TypeError(f"{name}: must be None of an array that holds no real numbers: {array}.dtype={form.dtype!r}")
    if math.prod(form.shape) >= elements.NOWHERE and array != "bias":
        raise ValueError(f"{name}: must be None of an array of 2**24 elements or more: {array}.shape={form.shape}")
    both = None if found is None or found.even else found.score_and_grad
    if array == "bias":
        return [recomputed_scores.Added(both)]
    if array == "alibi":
        return [recomputed_scores.Slope(both, len(form.shape) == 2 and form.shape[0] > 1)]
    number = int(array.removeprefix("aux"))
    return [recomputed_scores.Element(both, x.by, x.place) for x in found.reads if x.array == number] if found else []


class Learned:
    """Launches after the main one, which has this configuration. late: where they are put; told: the arrays that their kernels
    read, and what they are told of the variant."""

    def __init__(self, problem: Problem, spec: VariantSpec, config: Any, late: Before, told: dict[str, Any], processors: int):
        self.problem, self.spec, self.config, self.late = problem, spec, config, late
        self.told, self.processors = told, processors
        self.queries, self.kv = recomputed_scores.SHAPES[config.head_dim]
        rows, heads, cols, kv_heads = problem("SHTG")
        self.tiles, self.blocks = -(-rows // self.queries), -(-cols // self.kv)
        self.shape = {"group": heads // kv_heads, "scale": spec.unit * LOG2_E}

    def kind(self, read: recomputed_scores.Added) -> dict[str, Any]:
        """What a configuration is made of: recomputed_scores.Config's fields."""
        main, before = self.config, self.spec.before if "score_unit" in self.spec.numbers else None
        dims = {"head_dim": main.head_dim, "value_dim": main.value_dim, "dtype": main.dtype, "kv": self.kv}
        rows = {"queries": self.queries, "others": main.rows, "vector_bytes": self.problem.bytes_at_once()}
        rows["seq_layout"] = main.seq_layout
        rows["surveyed"] = main.kv if "classes" in self.told else None
        return dims | rows | {"variant": self.spec.variant, "before": before, "read": read, "axes": main.axes}

    def launch(self, name: str, reads: Sequence[recomputed_scores.Added]) -> None:
        """Those of the gradient of this name; reads: what reads its array."""
        if name == "dbias":
            self.of_bias(*reads)
        else:
            self.of_elements(name, reads)

    def of_bias(self, read: recomputed_scores.Added) -> None:
        """The gradient of a bias."""
        batch, heads, batches, own_heads, rows = self.problem("NHWXY")
        shared_by = {"own_heads": own_heads, "batches": batch // batches, "heads": heads // own_heads}
        given = {"gDBias": self.problem["dbias"], **shared_by, **self.shape, **self.told}
        if hopper_bias.serves(self.config, read):
            config = hopper_bias.config_for(self.config)
            tiles, blocks = -(-rows // config.rows), -(-self.problem("T")[0] // config.kv)
            every = batches * own_heads * tiles * blocks
            grid = min(every, self.processors)
            self.late.launch(hopper_bias, config, grid, own_tiles=tiles, blocks=blocks, every=every, **given)
        else:
            one_row = rows == 1
            tiles, blocks = 1 if one_row else self.tiles, self.blocks
            each = bias.Config(**self.kind(read), one_row=one_row, adds=self.config.adds)
            grid = batches * own_heads * tiles * blocks
            self.late.launch(bias, each, grid, own_tiles=tiles, blocks=blocks, tiles=self.tiles // tiles, **given)

    def dealt(self) -> tuple[int, int, int, int]:
        """(batches, heads, tiles of queries, blocks of keys) that thread blocks go through, or of packed sequences (1, heads,
        the tiles of all of them, in how many shares the blocks of keys are that a tile sees): see elements.py."""
        batch, rows, heads = self.problem("BSH")
        if not self.config.seq_layout.packed:
            return batch, heads, self.tiles, self.blocks
        (ends,) = self.problem("E")
        tiles = rows // self.queries + ends - 1
        return 1, heads, tiles, min(self.blocks, -(-AT_ONCE * self.processors // (heads * tiles)))

    def of_elements(self, name: str, reads: Sequence[recomputed_scores.Added]) -> None:
        """The gradient of an array that these read."""
        out, (batches, heads, tiles, blocks) = self.problem[name], self.dealt()
        size, warps = math.prod(out.form.shape), self.queries // recomputed_scores.BAND
        if not reads or not size:
            self.late.steps += [] if self.config.adds else [Fill(out, 0.0)]
            return
        most = max(1, elements.BYTES // (4 * size * warps * len(reads)))
        grid = min(batches * heads * tiles * blocks, elements.SHARED_BY * self.processors, most)
        found = self.late.memory((len(reads) * grid * warps, size), "float32")
        for n, read in enumerate(reads):
            extents = {"batches": batches, "heads": heads, "tiles": tiles, "blocks": blocks, "first": n * grid * warps}
            self.late.launch(
                elements, recomputed_scores.Config(**self.kind(read)), grid, gFound=found, **extents, **self.shape, **self.told
            )
        self.add_up(name, found)

    def add_up(self, name: str, found: Any) -> None:
        """The gradient of this name, of rows of sums."""
        out, adding = self.problem[name], elements.Total(self.config.adds)
        size = math.prod(out.form.shape)
        try:
            flat = out.reshape(1, size)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        self.late.launch(adding, adding, -(-size // elements.AT_ONCE), gFound=found, gOut=flat)
