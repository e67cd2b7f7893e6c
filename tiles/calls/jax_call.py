"""Programs under jax.jit: a call on tracers becomes one of jax.experimental.buffer_callback, which calls the program when the
arrays are there, on XLA's stream, and with memory of XLA's for the results.

JAX's arrays cannot be written: what is `updated` in place is refused. jax.grad and jax.vjp take the `gradient` that a program
has, which is called on tracers in turn; where there is none they say so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..launching.arrays import c_ordered
from ..launching.frameworks import HOST
from .plan import ProgramProtocol


def is_jax_tracer(x: Any) -> bool:
    """Is this a tracer: are jax.jit, jax.vmap or jax.grad at work?"""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.core.Tracer)


def serves(arrays: tuple, program: ProgramProtocol) -> bool:
    """Is one of these a tracer?"""
    return any(map(is_jax_tracer, arrays))


def call(program: ProgramProtocol, stream: Any, arrays: tuple, options: tuple, layout: str) -> Any:
    """The program's results as JAX traces them. Shapes and dtypes are checked now, all else when the call is made."""
    jax, schema = sys.modules["jax"], program.schema
    if stream is not None:
        raise TypeError("stream: must be None under jax.jit: calls run on XLA's stream")
    passed = {name: x for name, x in zip(schema.names, arrays) if x is not None}
    for name in passed:
        if schema.arguments[name].written:
            raise TypeError(f"{name}: JAX's arrays cannot be written; under jax.jit results are new arrays")
    problem = schema.problem({name: c_ordered(x.shape, str(np.dtype(x.dtype)), None) for name, x in passed.items()}, layout)

    def make(options: tuple, *values: Any) -> tuple:
        """The results for these arrays and options, as a tuple."""
        results = schema.results(dict(zip(program.options, options)))

        def run(context, out, *buffers):
            known = dict(zip(passed, buffers)) | dict(zip(results, out))
            stream = None if buffers[0].__dlpack_device__()[0] in HOST else context.stream
            program.run(stream, tuple([known.get(name) for name in schema.names]), options, layout)

        shapes = [jax.ShapeDtypeStruct(*problem.result_form(name)) for name in results]
        return tuple(_buffer_callback()(run, shapes, vmap_method="sequential")(*values))

    if program.gradient is None:
        differentiable_function = _without_gradient(jax, tuple(passed), program.no_gradient, partial(make, options))
    else:
        gradient = partial(program.gradient, options=dict(zip(program.options, options)), layout=layout)
        differentiable_function = _with_gradient(jax, tuple(passed), program, options, gradient, make)
    outputs = differentiable_function(*passed.values())
    return outputs[0] if len(outputs) == 1 else outputs


def _buffer_callback() -> Any:
    """JAX's function of that name; NotImplementedError: this JAX has none."""
    try:
        from jax.experimental.buffer_callback import buffer_callback
    except ImportError:
        version = sys.modules["jax"].__version__
        raise NotImplementedError(
            f"jax.jit: needs jax.experimental.buffer_callback, which jax {version} has not; update jax, or call outside of jit"
        ) from None
    return buffer_callback


def _with_gradient(
    jax: Any, names: tuple[str, ...], program: ProgramProtocol, options: tuple, gradient: Callable, make: Callable[..., tuple]
) -> Any:
    """make(options, *arrays), whose derivative is `gradient`: see program. In a forward pass that a backward pass follows all
    is made for which the first option that a row names can ask, as the gradient may read it."""
    schema = program.schema
    requesting_options = {row.flags[0] for row in schema.arguments.values() if row.flags}
    all_options = tuple([name in requesting_options or value for name, value in zip(program.options, options)])
    results, all_results = (schema.results(dict(zip(program.options, x))) for x in (options, all_options))
    function = jax.custom_vjp(partial(make, options))
    second_order = _without_gradient(
        jax, names, program.no_gradient, partial(make, all_options)
    )  # who differentiates this does so again

    def forward(*inputs):
        requested = {name: None for name, x in zip(names, inputs) if x.perturbed}  # to JAX a tree without leaves
        gradient(tuple(requested))
        values = [x.value for x in inputs]
        outputs = dict(zip(all_results, second_order(*values)))
        return tuple([outputs[name] for name in results]), (values, outputs, requested)

    def backward(residuals, gradients):
        values, outputs, requested = residuals
        output_gradients = {n: x for n, x in zip(results, gradients) if not isinstance(x, jax.custom_derivatives.SymbolicZero)}
        computed_gradients = gradient(tuple(requested))(dict(zip(names, values)), outputs, output_gradients)
        return tuple(
            [
                None if name not in computed_gradients else computed_gradients[name].astype(x.dtype)
                for name, x in zip(names, values)
            ]
        )

    function.defvjp(forward, backward, symbolic_zeros=True)
    return function


def _without_gradient(jax: Any, names: tuple[str, ...], reason: str | None, function: Any) -> Any:
    """The function, which refuses to be differentiated, and says why."""
    guarded_function, stop = jax.custom_jvp(function), "under jax.grad and jax.jvp put jax.lax.stop_gradient around the arrays"
    message = reason or f"{names[0]}: this call computes no gradient of it; {stop}: {', '.join(names)}"

    @guarded_function.defjvp
    def refuse(primals, tangents):
        raise NotImplementedError(message)

    return guarded_function
