"""The gradients of norms of queries and keys, which are computed around the gradients of attention. Before, rows are normalised
once more, into scratch memory. Afterwards the gradients of the rows and of the norm's weights follow from those of the
normalised rows.

With n = (x - mean) / deviation of a row x, y = n weights + bias, and dy the gradient of y:

    dn = dy weights    dx = (dn - mean(dn) - n mean(dn n)) / deviation    dweights = sum dy n    dbias = sum dy

for a layer norm; an RMS norm has no mean, no mean(dn) and no bias. The gradient of weights that heads share is the sum over the
heads. The order of sums depends on the shapes alone: the same bits every time.

If gradients are added to float32 arrays, dy is float32, too: attention's own kernels have added it up from zeros."""

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
SHARE = 8 * WARPS  # tiles, one below the other, whose columns a thread block sums up
ROWS_OF = {"q": "BSHD", "k": "BTGD"}  # the axes of the normalised array


@inlined
def normed_and_dy(gX, gDY, at, of_rows):
    """(n, dy) of a tile; of_rows: (mean, 1 / deviation) of its rows."""
    mean, scale = of_rows
    return (load(gX, PART, at, 1, 3) - mean) * scale, load(gDY, PART, at, 1, 3)


@inlined
def normed_and_dn(gX, gDY, at, of_rows, params):
    """(n, dn) of a tile; of_rows as in `seen`."""
    n, dy = normed_and_dy(gX, gDY, at, of_rows)
    return n, dy * load(params.norm_weights, PART.row_vec, (at[2], at[3]), 0, 1, True)


@inlined
def mean_of(sums, params):
    """The means of rows, from their sums."""
    return sums / params.columns


@dataclass(frozen=True)
class NormRowGradients:
    """The kernel that gives dx: the norm, the columns of a row as padded, whether rows begin at multiples of 16 bytes, whether
    dx is added to what is there."""

    norm: Rms
    head_dim: int
    dtype: dtype
    aligned: bool
    accumulate: bool = False
    threads = LANES * WARPS
    rows = PART.rows * WARPS

    @property
    def result(self) -> StoreGradient:
        """What becomes of dx."""
        return float32_output(True) if self.accumulate else StoreGradient(self.dtype)

    def __str__(self):
        of = f"{self.norm} rows, D {self.head_dim} {self.dtype}"
        return of + ", by elements" * (not self.aligned) + ", adds" * self.accumulate

    @staticmethod
    @functools.cache
    def make(config: "NormRowGradients"):
        """(kernel, shared memory) of a configuration."""
        INPUT, X, ALIGNED = config.dtype, rt(PART.rows, config.head_dim, fp32), config.aligned or None
        norm, CENTRED, PARAMS = config.norm, isinstance(config.norm, Layer), record(**config.norm.params)
        result, OUT = config.result, config.result.dtype

        @cuda.jit(launch_bounds=(config.threads, 1))
        def rows(
            gX: array(4, INPUT), gDY: array(4, OUT), gDX: array(4, OUT), gRows: array(3),
            params: PARAMS, blocks: INT, heads: INT,
        ):  # fmt: skip
            """dx of every row (batch, row, head, column); mean and 1 / deviation go to gRows (head, which, row)."""
            batch_head, block = divmod(cuda.blockIdx.x, blocks)
            batch, head = divmod(batch_head, heads)
            row = int32(PART.rows * (WARPS * block + cuda.threadIdx.x // LANES))
            of_rows = norm.of_rows(load(gX, X, (batch, row, head, 0), 1, 3, ALIGNED), params)
            mean, scale = of_rows
            store(gRows, mean, (batch_head, 0, row))
            store(gRows, scale, (batch_head, 1, row))
            mean_dn, mean_dn_n = zeros(PART.col_vec), zeros(PART.col_vec)
            for col in range(0, X.cols, PART.cols):
                n, dn = normed_and_dn(gX, gDY, (batch, row, head, col), of_rows, params)
                mean_dn_n = mean_dn_n + row_sum(times(dn, n))
                if CENTRED:
                    mean_dn = mean_dn + row_sum(dn)
            mean_dn, mean_dn_n = mean_of(mean_dn, params), mean_of(mean_dn_n, params)
            for col in range(0, X.cols, PART.cols):
                at = batch, row, head, col
                n, dn = normed_and_dn(gX, gDY, at, of_rows, params)
                result.store(gDX, times(dn - mean_dn - times(mean_dn_n, n), scale), at, ALIGNED)

        return rows, None


@dataclass(frozen=True)
class NormColumnSums:
    """The kernel that sums columns: of dy n, or of dy for a bias. adds: see Rows."""

    dtype: dtype
    bias: bool
    accumulate: bool = False
    threads = LANES * WARPS

    def __str__(self):
        return f"columns of dy{' n' * (not self.bias)}, {self.dtype}" + ", adds" * self.accumulate

    @staticmethod
    @functools.cache
    def make(config: "NormColumnSums"):
        """(kernel, shared memory) of a configuration."""
        INPUT, WEIGHTS, SLOPES = config.dtype, not config.bias, fp32 if config.accumulate else config.dtype
        smem = shared(scratch=sv(PART.cols * WARPS, fp32))

        @cuda.jit(launch_bounds=(config.threads, 1))
        def columns(
            gX: array(4, INPUT), gDY: array(4, SLOPES), gRows: array(3), gParts: array(3),
            batches: INT, heads: INT, tiles: INT, panels: INT, parts: INT,
        ):  # fmt: skip
            """Of 32 columns of a head, and one of `parts` shares of the rows: gParts is (head, share, column)."""
            (scratch,) = smem.open()
            rest, panel = divmod(cuda.blockIdx.x, panels)
            head, part = divmod(rest, parts)
            warp, col = int32(cuda.threadIdx.x // LANES), int32(PART.cols * panel)
            total = zeros(PART)
            for n in range(WARPS * part + warp, batches * tiles, WARPS * parts):
                batch, tile = divmod(int32(n), tiles)
                row = int32(PART.rows * tile)
                batch_head = int32(heads * batch + head)
                of_rows = load(gRows, PART.col_vec, (batch_head, 0, row)), load(gRows, PART.col_vec, (batch_head, 1, row))
                normed, dy = normed_and_dy(gX, gDY, (batch, row, head, col), of_rows)
                total = total + (times(dy, normed) if WEIGHTS else dy)
            found = block.reduce_sum(col_sum(total), scratch)
            if warp == 0:
                store(gParts, found, (head, part, col))

        return columns, smem


@dataclass(frozen=True)
class SumNormPartials:
    """The kernel that adds what `columns` left. adds: to what is there?"""

    accumulate: bool = False
    threads = LANES * WARPS

    def __str__(self):
        return "total of columns" + ", adds" * self.accumulate

    @staticmethod
    @functools.cache
    def make(config: "SumNormPartials"):
        """(kernel, shared memory) of a configuration."""
        smem, result = shared(scratch=sv(PART.cols * WARPS, fp32)), float32_output(config.accumulate)

        @cuda.jit(launch_bounds=(config.threads, 1))
        def total(gParts: array(3), gSum: array(2), panels: INT, parts: INT):
            """Of 32 columns: gSum (group, column) of gParts (group, part, column)."""
            (scratch,) = smem.open()
            group, panel = divmod(cuda.blockIdx.x, panels)
            warp, col = int32(cuda.threadIdx.x // LANES), int32(PART.cols * panel)
            some = zeros(PART)
            for row in range(PART.rows * warp, parts, PART.rows * WARPS):
                some = some + load(gParts, PART, (group, int32(row), col))
            found = block.reduce_sum(col_sum(some), scratch)
            if warp == 0:
                result.store_vector(gSum, found, PART.row_vec, (group, col))

        return total, smem


def space(arch: str, everything: bool) -> Iterator[NormRowGradients | NormColumnSums | SumNormPartials]:
    """What norms are differentiated with: of any GPU alike."""
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
def _normalising(x: str, axes: str) -> Program:
    """The norm of x's rows, by itself."""
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
        """How it is done for calls of this form."""
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


def _differentiating(x: str, axes: str, accumulate: bool = False) -> Program:
    """The gradients of x, and of the norm's weights and bias, which have these's shapes: one for all heads, or one for each.
    adds: to what is there?"""
    held, role, if_layer = ("float32", "updated", "updated?") if accumulate else ("tile", "made", "made  layer")
    schema = Schema(
        f"norm_{x}_gradient" + "_into" * accumulate,
        f"""
        {x}            {axes}          tile
        dy             {axes}          {held}
        {x}_norm       D|{axes[2]}D  real
        {x}_norm_bias  D|{axes[2]}D  real     optional
        d{x}           {axes}          {held}   {role}
        d{x}_norm      ={x}_norm       float32  {role}
        d{x}_norm_bias ={x}_norm_bias  float32  {if_layer}
        """,
    )

    @program(schema, no_gradient=ONCE)
    def differentiate(problem: Problem, norm_eps: float, layer: bool) -> Plan:
        """How it is done for calls of this form."""
        batch, rows, heads, columns = problem(axes)
        sums = {name: _by_group(problem[name]) for name in (f"d{x}_norm", f"d{x}_norm_bias")[: 1 + layer]}
        give = nothing if accumulate else None
        if 0 in (batch, rows, heads):
            return Plan(
                [Fill(problem[name], 0.0) for name in sums if not accumulate and 0 not in problem[name].form.shape], (), give
            )
        norm, dtype = Layer() if layer else Rms(), DTYPES[problem.dtype]
        padded = min(dim for dim in SHAPES if dim >= columns)
        config = NormRowGradients(norm, padded, dtype, problem.bytes_at_once() == ALIGNMENT, accumulate)
        tiles, blocks, panels = -(-rows // PART.rows), -(-rows // config.rows), -(-columns // PART.cols)
        parts = batch * tiles // SHARE + 1
        scratch = [((batch * heads, 2, rows), "float32"), *[((heads, parts, columns), "float32") for _ in sums]]
        of_rows = problem.scratch(0, *scratch[0])
        arrays = {"gX": problem[x], "gDY": problem["dy"], "gRows": of_rows}
        params = {"norm_eps": norm_eps, "columns": columns} | norm_arrays(problem, f"{x}_norm", axes[2:])
        steps = [
            kernel_for(config, config, problem.device).bind(
                batch * heads * blocks, gDX=problem[f"d{x}"], blocks=blocks, heads=heads, **arrays, **params
            )
        ]
        for n, (name, target) in enumerate(sums.items(), 1):
            summing, adding = NormColumnSums(dtype, name == f"d{x}_norm_bias", accumulate), SumNormPartials(accumulate)
            lengths = {"batches": batch, "heads": heads, "tiles": tiles, "cuts": panels, "parts": parts}
            launch = kernel_for(summing, summing, problem.device)
            steps.append(launch.bind(heads * parts * panels, gParts=problem.scratch(n, *scratch[n]), **arrays, **lengths))
            (groups, _) = target.form.shape
            all_parts = problem.scratch(n, (groups, heads * parts // groups, columns), "float32")
            launch = kernel_for(adding, adding, problem.device)
            steps.append(
                launch.bind(groups * panels, gParts=all_parts, gSum=target, panels=panels, parts=heads * parts // groups)
            )
        return Plan(steps, scratch, give)

    return differentiate


def _by_group(x: Operand) -> Operand:
    """Sums as (group, column): one group if there is one for all heads."""
    form = x.form
    return x if len(form.shape) == 2 else x._replace(form=form._replace(shape=(1, *form.shape), strides=(0, *form.strides)))


def _clearing(x: str, axes: str) -> Program:
    """Where the gradients of x's normalised rows are summed up, before there are any."""

    @program(Schema(f"zeros_{x}", f"{x} {axes} tile\n zeros {axes} float32 made"), no_gradient=ONCE)
    def zeros_like(problem: Problem) -> Plan:
        """How it is done for calls of this form."""
        return Plan([Fill(problem["zeros"], 0.0)] if 0 not in problem[x].form.shape else [])

    return zeros_like


NORMALISE = {x: _normalising(x, axes) for x, axes in ROWS_OF.items()}
DIFFERENTIATE = {x: _differentiating(x, axes) for x, axes in ROWS_OF.items()}
INTO = {x: _differentiating(x, axes, accumulate=True) for x, axes in ROWS_OF.items()}
ZEROS = {x: _clearing(x, axes) for x, axes in ROWS_OF.items()}


def normalised(name: str, x: Any, norm: Any, eps: Any, stream: Any, layout: str) -> Any:
    """x, "q" or "k", as attention.forward normalises it; x itself where there is no norm."""
    if norm is None:
        return x
    return NORMALISE[name](stream, (x, *split_norm(f"{name}_norm", norm), None), (eps,), layout)


def cleared(name: str, x: Any, norm: Any, dx: Any, stream: Any, layout: str) -> Any:
    """Where gradients of the rows of x, "q" or "k", are added, as they are normalised: dx itself where there is no norm."""
    return dx if norm is None else ZEROS[name](stream, (x, None), (), layout)


def check(name: str, norm: Any, of_norm: Any) -> None:
    """ValueError, TypeError: of_norm is not where the gradient of the norm of "q" or "k" can go. The program that writes there
    would say so, too, but after those before it have run, and have added to what they were given."""
    if of_norm is None:
        return
    asked = f"d{name}_norm"
    if norm is None:
        raise ValueError(f"{asked}: must be None where there is no {name}_norm: {asked}={of_norm!r:.60}")
    parts, params = split_norm(f"{name}_norm", norm), split_norm(asked, of_norm)
    if (parts[1] is None) != (params[1] is None):
        raise TypeError(f"{asked}: must be {'an array' if parts[1] is None else 'a batch_head of arrays'}, as {name}_norm is")
    for x, like in zip(params, parts):
        shape, wanted = (tuple(getattr(array, "shape", ())) for array in (x, like))
        if shape != wanted:
            raise ValueError(f"{asked}: must have {name}_norm's shape: {asked}.shape={shape}, {name}_norm.shape={wanted}")
        if x is not None and "float32" not in str(getattr(x, "dtype", "float32")):
            raise TypeError(f"{asked}: dtype must be float32: {asked}.dtype={str(x.dtype)!r}")


def gradients(
    name: str,
    x: Any,
    dy: Any,
    norm: Any,
    eps: Any,
    dx: Any,
    stream: Any,
    layout: str,
    of_norm: Any = None,
    accumulate: bool = False,
) -> tuple[Any, tuple[Any, ...]]:
    """(dx, the norm's gradient in float32: (), (that of weights,) or ((that of weights, that of the bias),)), dy being the
    gradient of the normalised rows. dx, of_norm: written in place of new arrays, or if it adds to what they hold, in float32,
    of which dy is then, too."""
    if norm is None:
        return dy, ()
    parts, params = split_norm(f"{name}_norm", norm), split_norm(f"d{name}_norm", of_norm)
    layer = parts[1] is not None
    arrays = x, dy, *parts, dx, *params
    if accumulate:
        INTO[name](stream, arrays, (eps, layer), layout)
        return dx, (of_norm,)
    found, *made = DIFFERENTIATE[name](stream, arrays, (eps, layer), layout)
    return found, (tuple(made) if layer else made[0],)
