"""Programs under jax.jit: a call on tracers becomes one of jax.experimental.buffer_callback, which calls the program when the
arrays are there, on XLA's stream, and with memory of XLA's for the results.

JAX's arrays cannot be written: what is `updated` in place is refused. There is no gradient: jax.grad says so.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from .arrays import c_ordered
from .frameworks import HOST

if TYPE_CHECKING:
    from .program import Program


def tracing(x: Any) -> bool:
    """Is this a tracer: are jax.jit, jax.vmap or jax.grad at work?"""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.core.Tracer)


def serves(arrays: tuple, program: Program) -> bool:
    """Is one of these a tracer?"""
    return any(map(tracing, arrays))


def call(program: Program, stream: Any, arrays: tuple, options: tuple, layout: str) -> Any:
    """What the program gives, traced. Shapes and dtypes are checked now, all else when the call is made."""
    jax, schema = sys.modules["jax"], program.schema
    if stream is not None:
        raise TypeError("stream: must be None under jax.jit: calls run on XLA's stream")
    given = {name: x for name, x in zip(schema.names, arrays) if x is not None}
    for name in given:
        if schema.arguments[name].written:
            raise TypeError(f"{name}: JAX's arrays cannot be written; under jax.jit results are new arrays")
    problem = schema.problem({name: c_ordered(x.shape, str(np.dtype(x.dtype)), None) for name, x in given.items()}, layout)
    results = schema.results(dict(zip(program.options, options)))
    made = [problem.made(name) for name in results]

    def run(context, out, *buffers):
        known = dict(zip(given, buffers)) | dict(zip(results, out))
        on_host = buffers[0].__dlpack_device__()[0] in HOST
        program.run(None if on_host else context.stream, tuple([known.get(name) for name in schema.names]), options, layout)

    callback = _buffer_callback()(run, [jax.ShapeDtypeStruct(*what) for what in made], vmap_method="sequential")
    found = _without_gradient(jax, tuple(given), callback)(*given.values())
    return found[0] if len(found) == 1 else tuple(found)


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


def _without_gradient(jax: Any, names: tuple[str, ...], function: Any) -> Any:
    """The function, which refuses to be differentiated."""
    traced = jax.custom_jvp(function)

    @traced.defjvp
    def refuse(primals, tangents):
        raise NotImplementedError(
            f"{names[0]}: the backward pass is not there yet; under jax.grad and jax.jvp put jax.lax.stop_gradient around the "
            f"arrays: {', '.join(names)}"
        )

    return traced
