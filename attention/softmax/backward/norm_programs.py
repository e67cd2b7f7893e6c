"""The programs around the gradients of attention where queries or keys are normalised: rows are normalised once more before,
and the gradients of rows, weights and biases follow from those of the normalised rows."""

from typing import Any

from tiles.arrays import ALIGNMENT, Operand
from tiles.launch import kernel_for
from tiles.plan import Fill, Plan, nothing
from tiles.program import Program, program
from tiles.schema import Problem, Schema

from ...options import split_norm
from .. import norms
from ..gradient import ONCE
from ..hopper import SHAPES
from ..launches import DTYPES, norm_arrays
from ..norm_parts import Layer, Rms
from .norms import PART, ROWS_OF, SHARE, NormColumnSums, NormRowGradients, SumNormPartials


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
