"""The programs that run before and after the gradients of attention if there are norms of queries or keys: the first normalise
rows once more, the others compute the gradients of rows, weights and biases from those of the normalised rows."""

from typing import Any

from tiles.calls.plan import Fill, Plan, Step, return_none
from tiles.calls.program import Program, program
from tiles.calls.schema import Problem, Schema
from tiles.launching.arrays import ALIGNMENT, Operand
from tiles.launching.launch import kernel_for

from ...kernels.softmax import key_norms
from ...kernels.softmax.forward_hopper_shapes import SHAPES
from ...kernels.softmax.norm_gradients import PART, ROWS_OF, TILES_PER_BLOCK, NormColumnSums, NormRowGradients
from ...options import show_argument, split_norm
from ...parts.norms import LayerNorm, RmsNorm
from ..partial_sums import sum_partials
from .forward_launches import DTYPES, norm_arrays
from .gradient import NO_SECOND_DERIVATIVES


def _in_table(axes: tuple[str, ...]) -> str:
    """Axes as a row of a schema has them."""
    return f"({', '.join(axes)})"


def _normalise_program(x: str, axes: tuple[str, ...]) -> Program:
    """The program that normalises the rows of x."""
    shape, weights = _in_table(axes), f"{_in_table(axes[3:])}|{_in_table(axes[2:])}"
    schema = Schema(
        f"norm_{x}",
        f"""
        {x}            {shape}    tile
        {x}_norm       {weights}  real
        {x}_norm_bias  {weights}  real  optional
        normed         {shape}    tile  output
        """,
    )

    @program(schema, no_gradient=NO_SECOND_DERIVATIVES)
    def normalise(problem: Problem, norm_eps: float) -> Plan:
        """The launch of the kernel that normalises rows."""
        batch, rows, heads, columns = problem(*axes)
        params = norm_arrays(problem, f"{x}_norm", axes[2:])
        if 0 in (batch, rows, heads):
            return Plan([])
        padded = min(dim for dim in SHAPES if dim >= columns)
        norm = LayerNorm() if f"{x}_norm_bias" in problem else RmsNorm()
        config = key_norms.Config(norm, padded, DTYPES[problem.dtype], problem.bytes_at_once(x) == ALIGNMENT)
        blocks, numbers = -(-rows // config.rows), {"norm_eps": norm_eps, "columns": columns}
        arrays = {"gX": problem[x], "gOut": problem["normed"]} | params
        launch = kernel_for(key_norms, config, problem.device)
        return Plan([launch.bind(batch * heads * blocks, blocks=blocks, heads=heads, **numbers, **arrays)])

    return normalise


def _gradient_program(x: str, axes: tuple[str, ...], accumulate: bool = False) -> Program:
    """The program of the gradients of x and of the norm's weights and bias, which have one row for all heads or one for each.
    accumulate: does it add to what the arrays hold?"""
    grad_dtype, role, layer_role = ("float32", "updated", "updated?") if accumulate else ("tile", "output", "output  layer")
    shape, weights = _in_table(axes), f"{_in_table(axes[3:])}|{_in_table(axes[2:])}"
    schema = Schema(
        f"norm_{x}_gradient" + "_into" * accumulate,
        f"""
        {x}             {shape}         tile
        dy              {shape}         {grad_dtype}
        {x}_norm        {weights}       real
        {x}_norm_bias   {weights}       real          optional
        d{x}            {shape}         {grad_dtype}  {role}
        d{x}_norm       ={x}_norm       float32       {role}
        d{x}_norm_bias  ={x}_norm_bias  float32       {layer_role}
        """,
    )

    @program(schema, no_gradient=NO_SECOND_DERIVATIVES)
    def differentiate(problem: Problem, norm_eps: float, layer: bool) -> Plan:
        """The launches that compute these gradients."""
        batch, rows, heads, columns = problem(*axes)
        sums = {name: _as_groups(problem[name]) for name in (f"d{x}_norm", f"d{x}_norm_bias")[: 1 + layer]}
        outputs = return_none if accumulate else None
        if 0 in (batch, rows, heads):
            return Plan(
                [Fill(problem[name], 0.0) for name in sums if not accumulate and 0 not in problem[name].form.shape], (), outputs
            )
        norm, dtype = LayerNorm() if layer else RmsNorm(), DTYPES[problem.dtype]
        padded = min(dim for dim in SHAPES if dim >= columns)
        config = NormRowGradients(norm, padded, dtype, problem.bytes_at_once() == ALIGNMENT, accumulate)
        tiles, blocks, panels = -(-rows // PART.rows), -(-rows // config.rows), -(-columns // PART.cols)
        splits = batch * tiles // TILES_PER_BLOCK + 1
        scratch = [((batch * heads, 2, rows), "float32"), *[((heads, splits, columns), "float32") for _ in sums]]
        row_stats = problem.scratch(0, *scratch[0])
        arrays = {"gX": problem[x], "gDY": problem["dy"], "gRowStats": row_stats}
        params = {"norm_eps": norm_eps, "columns": columns} | norm_arrays(problem, f"{x}_norm", axes[2:])
        steps: list[Step] = [
            kernel_for(config, config, problem.device).bind(
                batch * heads * blocks, gDX=problem[f"d{x}"], blocks=blocks, heads=heads, **arrays, **params
            )
        ]
        for n, (name, target) in enumerate(sums.items(), 1):
            summing = NormColumnSums(dtype, name == f"d{x}_norm_bias", accumulate)
            lengths = {"batches": batch, "heads": heads, "tiles": tiles, "panels": panels, "splits": splits}
            launch = kernel_for(summing, summing, problem.device)
            steps.append(launch.bind(heads * splits * panels, gPartials=problem.scratch(n, *scratch[n]), **arrays, **lengths))
            (groups, _) = target.form.shape
            partials = problem.scratch(n, (groups, heads * splits // groups, columns), "float32")
            steps.append(sum_partials(problem, partials, target, accumulate))
        return Plan(steps, scratch, outputs)

    return differentiate


def _as_groups(x: Operand) -> Operand:
    """An array of a norm's gradient as (group, column): one group if all heads share it."""
    form = x.form
    return x if len(form.shape) == 2 else x._replace(form=form._replace(shape=(1, *form.shape), strides=(0, *form.strides)))


def _zeros_program(x: str, axes: tuple[str, ...]) -> Program:
    """The program that creates a float32 array of zeros, in which the gradients of x's normalised rows accumulate."""

    @program(
        Schema(f"zeros_{x}", f"{x} {_in_table(axes)} tile\n zeros {_in_table(axes)} float32 output"),
        no_gradient=NO_SECOND_DERIVATIVES,
    )
    def zeros_like(problem: Problem) -> Plan:
        """The step that writes 0 to the result, unless it has no elements."""
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
        raise ValueError(f"{argument}: must be None where there is no {name}_norm: {show_argument(argument, d_norm)}")
    weights, gradients = split_norm(f"{name}_norm", norm), split_norm(argument, d_norm)
    if (weights[1] is None) != (gradients[1] is None):
        raise TypeError(f"{argument}: must be {'an array' if weights[1] is None else 'a pair of arrays'}, as {name}_norm is")
    for x, like in zip(gradients, weights):
        shape, expected_shape = (tuple(getattr(array, "shape", ())) for array in (x, like))
        if shape != expected_shape:
            raise ValueError(
                f"{argument}: must have {name}_norm's shape: {argument}.shape={shape}, {name}_norm.shape={expected_shape}"
            )
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
