"""The gradients of norms of queries and keys, which are computed before and after the gradients of attention. Before, rows are
normalised once more, into scratch memory. After, the gradients of the rows and of the norm's weights follow from those of the
normalised rows.

With n = (x - mean) / deviation of a row x, y = n weights + bias, and dy the gradient of y:

    dn = dy weights    dx = (dn - mean(dn) - n mean(dn n)) / deviation    dweights = sum dy n    dbias = sum dy

for a layer norm; an RMS norm has no mean, no mean(dn) and no bias. The gradient of weights that heads share is the sum over the
heads. The order of sums depends on the shapes alone: the same bits every time.

If gradients accumulate in float32 arrays, dy is float32, too: attention's kernels have accumulated it, from zeros."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from numba import cuda
from numpy import int32

from ops import block, col_sum, divmod, load, row_sum, store, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, rt, shared, sv
from tiles.arguments import INT, array, record
from tiles.arrays import ALIGNMENT, Operand
from tiles.launch import kernel_for
from tiles.layout import LANES
from tiles.plan import Fill, Plan, nothing
from tiles.program import Program, program
from tiles.schema import Problem, Schema

from ...options import split_norm
from .. import norms
from ..gradient import ONCE
from ..hopper import SHAPES
from ..launches import DTYPES, norm_arrays
from ..norms import Layer, Rms
from .results import StoreGradient, float32_output, times

WARPS, PART = 8, rt(16, 32, fp32)  # warps of a thread block; the tile that a warp works on at a time
TILES_PER_BLOCK = 8 * WARPS  # tiles of rows whose columns a thread block sums
ROWS_OF = {"q": "BSHD", "k": "BTGD"}  # the axes of the normalised array


@inlined
def normed_and_dy(gX, gDY, at, row_stats):
    """(n, dy) of a tile. row_stats: (mean, 1 / deviation) of its rows."""
    mean, rstd = row_stats
    return (load(gX, PART, at, 1, 3) - mean) * rstd, load(gDY, PART, at, 1, 3)


@inlined
def normed_and_dn(gX, gDY, at, row_stats, params):
    """(n, dn) of a tile. row_stats: as for normed_and_dy."""
    n, dy = normed_and_dy(gX, gDY, at, row_stats)
    return n, dy * load(params.norm_weights, PART.row_vec, (at[2], at[3]), 0, 1, True)


@inlined
def mean_of(sums, params):
    """The means of rows from their sums. (params.columns is the number of columns, which are padded in the kernel.)"""
    return sums / params.columns


@dataclass(frozen=True)
class NormRowGradients:
    """The configuration of the kernel that computes dx: the norm, the columns of a row, padded, whether rows begin at multiples
    of 16 bytes, and whether dx is added to what the array holds."""

    norm: Rms
    head_dim: int
    dtype: dtype
    aligned: bool
    accumulate: bool = False
    threads = LANES * WARPS
    rows = PART.rows * WARPS

    @property
    def result(self) -> StoreGradient:
        """How dx reaches its array."""
        return float32_output(True) if self.accumulate else StoreGradient(self.dtype)

    def __str__(self):
        of = f"{self.norm} rows, D {self.head_dim} {self.dtype}"
        return of + ", by elements" * (not self.aligned) + ", accumulates" * self.accumulate

    @staticmethod
    @functools.cache
    def make(config: "NormRowGradients"):
        """(kernel, shared memory) of a configuration."""
        INPUT, X, ALIGNED = config.dtype, rt(PART.rows, config.head_dim, fp32), config.aligned or None
        norm, CENTRED, PARAMS = config.norm, isinstance(config.norm, Layer), record(**config.norm.params)
        result, OUT = config.result, config.result.dtype

        @cuda.jit(launch_bounds=(config.threads, 1))
        def rows(
            gX: array(4, INPUT), gDY: array(4, OUT), gDX: array(4, OUT), gRowStats: array(3),
            params: PARAMS, blocks: INT, heads: INT,
        ):  # fmt: skip
            """dx of every row of gX (batch, row, head, column). gRowStats (batch and head, 2, row) = mean and 1 / deviation."""
            batch_head, block = divmod(cuda.blockIdx.x, blocks)
            batch, head = divmod(batch_head, heads)
            row = int32(PART.rows * (WARPS * block + cuda.threadIdx.x // LANES))
            row_stats = norm.of_rows(load(gX, X, (batch, row, head, 0), 1, 3, ALIGNED), params)
            mean, rstd = row_stats
            store(gRowStats, mean, (batch_head, 0, row))
            store(gRowStats, rstd, (batch_head, 1, row))
            mean_dn, mean_dn_n = zeros(PART.col_vec), zeros(PART.col_vec)
            for col in range(0, X.cols, PART.cols):
                n, dn = normed_and_dn(gX, gDY, (batch, row, head, col), row_stats, params)
                mean_dn_n = mean_dn_n + row_sum(times(dn, n))
                if CENTRED:
                    mean_dn = mean_dn + row_sum(dn)
            mean_dn, mean_dn_n = mean_of(mean_dn, params), mean_of(mean_dn_n, params)
            for col in range(0, X.cols, PART.cols):
                at = batch, row, head, col
                n, dn = normed_and_dn(gX, gDY, at, row_stats, params)
                result.store(gDX, times(dn - mean_dn - times(mean_dn_n, n), rstd), at, ALIGNED)

        return rows, None


@dataclass(frozen=True)
class NormColumnSums:
    """The configuration of the kernel that sums columns over rows: of dy n, or of dy for the bias. accumulate: is dy
    float32?"""

    dtype: dtype
    bias: bool
    accumulate: bool = False
    threads = LANES * WARPS

    def __str__(self):
        return f"columns of dy{' n' * (not self.bias)}, {self.dtype}" + ", accumulates" * self.accumulate

    @staticmethod
    @functools.cache
    def make(config: "NormColumnSums"):
        """(kernel, shared memory) of a configuration."""
        INPUT, WEIGHTS, DY = config.dtype, not config.bias, fp32 if config.accumulate else config.dtype
        smem = shared(scratch=sv(PART.cols * WARPS, fp32))

        @cuda.jit(launch_bounds=(config.threads, 1))
        def columns(
            gX: array(4, INPUT), gDY: array(4, DY), gRowStats: array(3), gPartials: array(3),
            batches: INT, heads: INT, tiles: INT, panels: INT, splits: INT,
        ):  # fmt: skip
            """gPartials (head, split, column) = the sums of 32 columns of a head over one of `splits` parts of the rows."""
            (scratch,) = smem.open()
            rest, panel = divmod(cuda.blockIdx.x, panels)
            head, split = divmod(rest, splits)
            warp, col = int32(cuda.threadIdx.x // LANES), int32(PART.cols * panel)
            total = zeros(PART)
            for n in range(WARPS * split + warp, batches * tiles, WARPS * splits):
                batch, tile = divmod(int32(n), tiles)
                row = int32(PART.rows * tile)
                batch_head = int32(heads * batch + head)
                row_stats = (
                    load(gRowStats, PART.col_vec, (batch_head, 0, row)),
                    load(gRowStats, PART.col_vec, (batch_head, 1, row)),
                )
                normed, dy = normed_and_dy(gX, gDY, (batch, row, head, col), row_stats)
                total = total + (times(dy, normed) if WEIGHTS else dy)
            column_sums = block.reduce_sum(col_sum(total), scratch)
            if warp == 0:
                store(gPartials, column_sums, (head, split, col))

        return columns, smem


@dataclass(frozen=True)
class SumNormPartials:
    """The configuration of the kernel that sums the partial sums of `columns`. accumulate: does it add to what the array
    holds?"""

    accumulate: bool = False
    threads = LANES * WARPS

    def __str__(self):
        return "norm partials" + ", accumulates" * self.accumulate

    @staticmethod
    @functools.cache
    def make(config: "SumNormPartials"):
        """(kernel, shared memory) of a configuration."""
        smem, result = shared(scratch=sv(PART.cols * WARPS, fp32)), float32_output(config.accumulate)

        @cuda.jit(launch_bounds=(config.threads, 1))
        def sum_partials(gPartials: array(3), gSum: array(2), panels: INT, splits: INT):
            """gSum (group, column) = the sum of gPartials (group, split, column) over splits, for 32 columns."""
            (scratch,) = smem.open()
            group, panel = divmod(cuda.blockIdx.x, panels)
            warp, col = int32(cuda.threadIdx.x // LANES), int32(PART.cols * panel)
            total = zeros(PART)
            for row in range(PART.rows * warp, splits, PART.rows * WARPS):
                total = total + load(gPartials, PART, (group, int32(row), col))
            column_sums = block.reduce_sum(col_sum(total), scratch)
            if warp == 0:
                result.store_vector(gSum, column_sums, PART.row_vec, (group, col))

        return sum_partials, smem


def space(arch: str, everything: bool) -> Iterator[NormRowGradients | NormColumnSums | SumNormPartials]:
    """Configurations to compile and inspect, the same for all architectures."""
    for of in (bf16, fp16) if everything else (bf16,):
        for norm, head_dim, aligned in itertools.product((Rms(), Layer()), SHAPES, (True, False) if everything else (True,)):
            yield NormRowGradients(norm, head_dim, of, aligned)
        yield from (NormColumnSums(of, bias) for bias in (False, True))
    yield SumNormPartials()


@functools.cache
def make(config: NormRowGradients | NormColumnSums | SumNormPartials):
    """(kernel, shared memory) of a configuration."""
    return config.make(config)


# ---- programs --------------------------------------------------------------------------------------------------------
def _normalise_program(x: str, axes: str) -> Program:
    """The program that normalises the rows of x."""
    schema = Schema(
        f"norm_{x}",
        f"""
        {x}            {axes}          tile
        {x}_norm       D|{axes[2]}D  real
        {x}_norm_bias  D|{axes[2]}D  real  optional
        normed         {axes}          tile  made
        """,
    )

    @program(schema, no_gradient=ONCE)
    def normalise(problem: Problem, norm_eps: float) -> Plan:
        """The launch that normalises."""
        batch, rows, heads, columns = problem(axes)
        params = norm_arrays(problem, f"{x}_norm", axes[2:])
        if 0 in (batch, rows, heads):
            return Plan([])
        padded = min(dim for dim in SHAPES if dim >= columns)
        norm = Layer() if f"{x}_norm_bias" in problem else Rms()
        config = norms.Config(norm, padded, DTYPES[problem.dtype], problem.bytes_at_once(x) == ALIGNMENT)
        blocks, numbers = -(-rows // config.rows), {"norm_eps": norm_eps, "columns": columns}
        arrays = {"gX": problem[x], "gOut": problem["normed"]} | params
        launch = kernel_for(norms, config, problem.device)
        return Plan([launch.bind(batch * heads * blocks, blocks=blocks, heads=heads, **numbers, **arrays)])

    return normalise


def _gradient_program(x: str, axes: str, accumulate: bool = False) -> Program:
    """The program of the gradients of x and of the norm's weights and bias, which have one row for all heads or one for each.
    accumulate: does it add to what the arrays hold?"""
    grad_dtype, role, layer_role = ("float32", "updated", "updated?") if accumulate else ("tile", "made", "made  layer")
    schema = Schema(
        f"norm_{x}_gradient" + "_into" * accumulate,
        f"""
        {x}            {axes}          tile
        dy             {axes}          {grad_dtype}
        {x}_norm       D|{axes[2]}D  real
        {x}_norm_bias  D|{axes[2]}D  real     optional
        d{x}           {axes}          {grad_dtype}   {role}
        d{x}_norm      ={x}_norm       float32  {role}
        d{x}_norm_bias ={x}_norm_bias  float32  {layer_role}
        """,
    )

    @program(schema, no_gradient=ONCE)
    def differentiate(problem: Problem, norm_eps: float, layer: bool) -> Plan:
        """The launches that compute these gradients."""
        batch, rows, heads, columns = problem(axes)
        sums = {name: _as_groups(problem[name]) for name in (f"d{x}_norm", f"d{x}_norm_bias")[: 1 + layer]}
        outputs = nothing if accumulate else None
        if 0 in (batch, rows, heads):
            return Plan(
                [Fill(problem[name], 0.0) for name in sums if not accumulate and 0 not in problem[name].form.shape], (), outputs
            )
        norm, dtype = Layer() if layer else Rms(), DTYPES[problem.dtype]
        padded = min(dim for dim in SHAPES if dim >= columns)
        config = NormRowGradients(norm, padded, dtype, problem.bytes_at_once() == ALIGNMENT, accumulate)
        tiles, blocks, panels = -(-rows // PART.rows), -(-rows // config.rows), -(-columns // PART.cols)
        splits = batch * tiles // TILES_PER_BLOCK + 1
        scratch = [((batch * heads, 2, rows), "float32"), *[((heads, splits, columns), "float32") for _ in sums]]
        row_stats = problem.scratch(0, *scratch[0])
        arrays = {"gX": problem[x], "gDY": problem["dy"], "gRowStats": row_stats}
        params = {"norm_eps": norm_eps, "columns": columns} | norm_arrays(problem, f"{x}_norm", axes[2:])
        steps = [
            kernel_for(config, config, problem.device).bind(
                batch * heads * blocks, gDX=problem[f"d{x}"], blocks=blocks, heads=heads, **arrays, **params
            )
        ]
        for n, (name, target) in enumerate(sums.items(), 1):
            summing, adding = NormColumnSums(dtype, name == f"d{x}_norm_bias", accumulate), SumNormPartials(accumulate)
            lengths = {"batches": batch, "heads": heads, "tiles": tiles, "panels": panels, "splits": splits}
            launch = kernel_for(summing, summing, problem.device)
            steps.append(launch.bind(heads * splits * panels, gPartials=problem.scratch(n, *scratch[n]), **arrays, **lengths))
            (groups, _) = target.form.shape
            partials = problem.scratch(n, (groups, heads * splits // groups, columns), "float32")
            launch = kernel_for(adding, adding, problem.device)
            steps.append(
                launch.bind(groups * panels, gPartials=partials, gSum=target, panels=panels, splits=heads * splits // groups)
            )
        return Plan(steps, scratch, outputs)

    return differentiate


def _as_groups(x: Operand) -> Operand:
    """An array of a norm's gradient as (group, column): one group if all heads share it."""
    form = x.form
    return x if len(form.shape) == 2 else x._replace(form=form._replace(shape=(1, *form.shape), strides=(0, *form.strides)))


def _zeros_program(x: str, axes: str) -> Program:
    """The program that creates a float32 array of zeros, in which the gradients of x's normalised rows accumulate."""

    @program(Schema(f"zeros_{x}", f"{x} {axes} tile\n zeros {axes} float32 made"), no_gradient=ONCE)
    def zeros_like(problem: Problem) -> Plan:
        """The step that writes the zeros."""
        return Plan([Fill(problem["zeros"], 0.0)] if 0 not in problem[x].form.shape else [])

    return zeros_like


NORMALISE = {x: _normalise_program(x, axes) for x, axes in ROWS_OF.items()}
DIFFERENTIATE = {x: _gradient_program(x, axes) for x, axes in ROWS_OF.items()}
INTO = {x: _gradient_program(x, axes, accumulate=True) for x, axes in ROWS_OF.items()}
ZEROS = {x: _zeros_program(x, axes) for x, axes in ROWS_OF.items()}


def normalise_rows(name: str, x: Any, norm: Any, eps: Any, stream: Any, layout: str) -> Any:
    """x, which is q or k, as attention.forward normalises it; x itself where there is no norm."""
    if norm is None:
        return x
    return NORMALISE[name](stream, (x, *split_norm(f"{name}_norm", norm), None), (eps,), layout)


def gradient_buffer(name: str, x: Any, norm: Any, dx: Any, stream: Any, layout: str) -> Any:
    """The float32 array in which gradients of the normalised rows of x, q or k, accumulate: dx itself where there is no
    norm."""
    return dx if norm is None else ZEROS[name](stream, (x, None), (), layout)


def check_norm_gradient(name: str, norm: Any, d_norm: Any) -> None:
    """ValueError, TypeError: d_norm cannot take the gradient of the norm of "q" or "k". The program that writes there raises
    these, too, but only after earlier programs have run, and have added to the arrays that they were given."""
    if d_norm is None:
        return
    argument = f"d{name}_norm"
    if norm is None:
        raise ValueError(f"{argument}: must be None where there is no {name}_norm: {argument}={d_norm!r:.60}")
    weights, gradients = split_norm(f"{name}_norm", norm), split_norm(argument, d_norm)
    if (weights[1] is None) != (gradients[1] is None):
        raise TypeError(f"{argument}: must be {'an array' if weights[1] is None else 'a pair of arrays'}, as {name}_norm is")
    for x, like in zip(gradients, weights):
        shape, wanted = (tuple(getattr(array, "shape", ())) for array in (x, like))
        if shape != wanted:
            raise ValueError(f"{argument}: must have {name}_norm's shape: {argument}.shape={shape}, {name}_norm.shape={wanted}")
        if x is not None and "float32" not in str(getattr(x, "dtype", "float32")):
            raise TypeError(f"{argument}: dtype must be float32: {argument}.dtype={str(x.dtype)!r}")


def norm_gradients(
    name: str,
    x: Any,
    dy: Any,
    norm: Any,
    eps: Any,
    dx: Any,
    stream: Any,
    layout: str,
    d_norm: Any = None,
    accumulate: bool = False,
) -> tuple[Any, tuple[Any, ...]]:
    """(dx, the norm's gradients in float32: (), (dweights,) or ((dweights, dbias),)), from dy, the gradient of the normalised
    rows. dx, d_norm: arrays to write to instead of new ones. accumulate: dx and d_norm are float32, as dy is, and results are
    added to what they hold."""
    if norm is None:
        return dy, ()
    weights, gradients = split_norm(f"{name}_norm", norm), split_norm(f"d{name}_norm", d_norm)
    layer = weights[1] is not None
    arrays = x, dy, *weights, dx, *gradients
    if accumulate:
        INTO[name](stream, arrays, (eps, layer), layout)
        return dx, (d_norm,)
    dx, *d_weights = DIFFERENTIATE[name](stream, arrays, (eps, layer), layout)
    return dx, (tuple(d_weights) if layer else d_weights[0],)
