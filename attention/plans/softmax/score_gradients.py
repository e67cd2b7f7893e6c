"""The launches for the gradients of what scores depend on besides q and k: a bias, ALiBi's slopes, arrays that a score in
Python reads."""

import math
from collections.abc import Sequence
from typing import Any

from tiles.calls.argument import REAL
from tiles.calls.plan import Fill
from tiles.calls.schema import Problem

from ...kernels.softmax import bias_gradient, bias_gradient_hopper, element_gradients
from ...parts.backward import recomputed_scores
from ...scoring.score_derivative import Derivatives
from .call_options import AUX
from .forward_launches import LOG2_E, PreparationSteps
from .variant_spec import VariantSpec

CTAS_PER_SM = 2 * element_gradients.MAX_BLOCKS_PER_SM  # at least, of packed sequences, where there are so many key blocks
GRADIENTS = "dbias", "dalibi", "dsink", *(f"daux{n}" for n in range(AUX))  # besides dq, dk and dv, in this order


def reads_of(problem: Problem, name: str, derivatives: Derivatives | None) -> Sequence[recomputed_scores.BiasRead]:
    """How scores read the array whose gradient has this name: a BiasRead or the like for each place where they read it.
    ValueError, TypeError: there is no such array, or it has no gradient."""
    array = name.removeprefix("d")
    if array not in problem:
        raise ValueError(f"{name}: must be None where there is no {array}: {array}=None")
    form = problem.forms[array]
    if form.dtype not in REAL:
        raise TypeError(f"{name}: must be None, because {array} holds no floating-point numbers: {array}.dtype={form.dtype!r}")
    if math.prod(form.shape) >= element_gradients.MAX_ELEMENTS and array != "bias":
        raise ValueError(f"{name}: must be None, because {array} has 2**24 elements or more: {array}.shape={form.shape}")
    score_and_grad = None if derivatives is None or derivatives.linear else derivatives.score_and_grad
    if array == "bias":
        return [recomputed_scores.BiasRead(score_and_grad)]
    if array == "alibi":
        return [recomputed_scores.SlopeRead(score_and_grad, len(form.shape) == 2 and form.shape[0] > 1)]
    number = int(array.removeprefix("aux"))
    reads = derivatives.reads if derivatives else []
    return [recomputed_scores.ElementRead(score_and_grad, x.gradient, x.element_index) for x in reads if x.array == number]


class ScoreGradients:
    """Adds launches to `after_main`, for after the main kernel of this configuration. args: the arguments that all their
    kernels have in common."""

    def __init__(
        self,
        problem: Problem,
        spec: VariantSpec,
        config: Any,
        after_main: PreparationSteps,
        args: dict[str, Any],
        processors: int,
    ):
        self.problem, self.spec, self.config, self.after_main = problem, spec, config, after_main
        self.args, self.processors = args, processors
        self.queries, self.kv = recomputed_scores.SHAPES[config.head_dim]
        rows, heads, cols, kv_heads = problem("seqlen_q", "heads", "seqlen_k", "heads_k")
        self.tiles, self.blocks = -(-rows // self.queries), -(-cols // self.kv)
        self.shape = {"group": heads // kv_heads, "scale": spec.unit * LOG2_E}

    def config_fields(self, read: recomputed_scores.BiasRead) -> dict[str, Any]:
        """The fields of recomputed_scores.Config for one way in which scores read an array."""
        main, score_before = self.config, self.spec.before if "score_unit" in self.spec.numbers else None
        dims = {"head_dim": main.head_dim, "value_dim": main.value_dim, "dtype": main.dtype, "kv": self.kv}
        rows = {"queries": self.queries, "main_rows": main.rows, "vector_bytes": self.problem.bytes_at_once()}
        rows["seq_layout"] = main.seq_layout
        rows["surveyed_keys"] = main.kv if "classes" in self.args else None
        return dims | rows | {"variant": self.spec.variant, "score_before": score_before, "read": read, "axes": main.axes}

    def launch(self, name: str, reads: Sequence[recomputed_scores.BiasRead]) -> None:
        """Launch the kernels for the gradient of this name, of an array that scores read in these ways."""
        if name == "dbias":
            self.launch_bias_gradient(*reads)
        else:
            self.launch_element_gradient(name, reads)

    def launch_bias_gradient(self, read: recomputed_scores.BiasRead) -> None:
        """Launch the kernel for the gradient of a bias."""
        batch, heads, batches, bias_heads, rows = self.problem("sequences", "heads", "bias_batch", "bias_heads", "bias_seqlen")
        shared_by = {"bias_heads": bias_heads, "batches": batch // batches, "heads": heads // bias_heads}
        bias_args = {"gDBias": self.problem["dbias"], **shared_by, **self.shape, **self.args}
        if bias_gradient_hopper.serves(self.config) and read.score_and_grad is None:
            config = bias_gradient_hopper.config_for(self.config, self.config.accumulate)
            tiles, blocks = -(-rows // config.rows), -(-self.problem.extents["seqlen_k"] // config.kv)
            dbias_tiles = batches * bias_heads * tiles * blocks
            grid = min(dbias_tiles, self.processors)
            self.after_main.launch(
                bias_gradient_hopper, config, grid, bias_q_tiles=tiles, blocks=blocks, dbias_tiles=dbias_tiles, **bias_args
            )
        else:
            one_row = rows == 1
            tiles, blocks = 1 if one_row else self.tiles, self.blocks
            bias_config = bias_gradient.Config(**self.config_fields(read), one_row=one_row, accumulate=self.config.accumulate)
            grid = batches * bias_heads * tiles * blocks
            self.after_main.launch(
                bias_gradient, bias_config, grid, bias_q_tiles=tiles, blocks=blocks, tiles=self.tiles // tiles, **bias_args
            )

    def work_extents(self) -> tuple[int, int, int, int]:
        """(batches, heads, query tiles, key blocks) that thread blocks go through; of packed sequences (1, heads, the query
        tiles of all, the number of thread blocks that a tile's visible key blocks are dealt to): see element_gradients.py."""
        batch, rows, heads = self.problem("batch", "seqlen_q", "heads")
        if not self.config.seq_layout.packed:
            return batch, heads, self.tiles, self.blocks
        ends = self.problem.extents["ends"]
        tiles = rows // self.queries + ends - 1
        return 1, heads, tiles, min(self.blocks, -(-CTAS_PER_SM * self.processors // (heads * tiles)))

    def launch_element_gradient(self, name: str, reads: Sequence[recomputed_scores.BiasRead]) -> None:
        """Launch the kernels for the gradient of an array that scores read in these ways."""
        out, (batches, heads, tiles, blocks) = self.problem[name], self.work_extents()
        size, warps = math.prod(out.form.shape), self.queries // recomputed_scores.WARP_ROWS
        if not reads or not size:
            self.after_main.steps += [] if self.config.accumulate else [Fill(out, 0.0)]
            return
        max_grid = max(1, element_gradients.MAX_BYTES // (4 * size * warps * len(reads)))
        grid = min(batches * heads * tiles * blocks, element_gradients.MAX_BLOCKS_PER_SM * self.processors, max_grid)
        partials = self.after_main.allocate((len(reads) * grid * warps, size), "float32")
        for n, read in enumerate(reads):
            extents = {"batches": batches, "heads": heads, "tiles": tiles, "blocks": blocks, "first": n * grid * warps}
            self.after_main.launch(
                element_gradients,
                recomputed_scores.Config(**self.config_fields(read)),
                grid,
                gPartials=partials,
                **extents,
                **self.shape,
                **self.args,
            )
        self.launch_sum(name, partials)

    def launch_sum(self, name: str, partials: Any) -> None:
        """Launch the kernel that sums these rows of partial sums into the gradient of this name."""
        out, summing = self.problem[name], element_gradients.SumElementRows(self.config.accumulate)
        size = math.prod(out.form.shape)
        try:
            flat = out.reshape(1, size)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        self.after_main.launch(summing, summing, -(-size // element_gradients.COLUMNS_AT_ONCE), gPartials=partials, gOut=flat)
