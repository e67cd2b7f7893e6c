"""The derivative of a member of linear attention, as torch's autograd (recurrent_autograd.py) and JAX take it."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class RecurrentDerivative(NamedTuple):
    """How a member is differentiated. name: of its function, as errors say it. backward: the function of (dout, inputs by name,
    the gradients of the last state, options) that returns gradients, those of `always` first and then those of `optional` that
    it is asked for by a flag, "d" before their names. values: the input that outputs are like. states: the results that are the
    last state. shared: the options that backward takes, too. tiles: the inputs that torch.autocast casts."""

    name: str
    backward: Callable[..., Sequence[Any]]
    always: tuple[str, ...]
    optional: tuple[str, ...] = ("decay", "initial_state")
    values: str = "v"
    states: tuple[str, ...] = ("state",)
    shared: tuple[str, ...] = ("scale", "family", "layout")
    tiles: tuple[str, ...] = ("q", "k", "v")

    @property
    def no_second_derivatives(self) -> str:
        """What is said where a derivative of gradients is requested."""
        return f"{self.name}: has no second derivatives"

    def compute(
        self, dout: Any, dstates: Sequence[Any], inputs: dict[str, Any], options: dict[str, Any], wanted: Sequence[str]
    ) -> dict[str, Any]:
        """{name: gradient} of a call with these arrays and options, for those in `wanted`. dstates: the gradients of `states`,
        or of the first of them; None for what has none."""
        more = [name for name in self.optional if name in wanted]
        flags = {"d" + name: name in more for name in self.optional}
        of_states = {"d" + name: x for name, x in zip(self.states, dstates)}
        results = self.backward(dout, **inputs, **of_states, **(options | flags))
        return {name: x for name, x in zip((*self.always, *more), results, strict=True) if name in wanted}

    def of_program(self, names: Sequence[str], options: dict[str, Any], layout: str) -> Callable[..., dict[str, Any]]:
        """The gradient of the member's program for JAX, as `tiles.calls.program` takes it."""

        def gradients(inputs, results, of_results):
            if not of_results:
                return {}
            dout = of_results.get("out")
            if dout is None:  # the loss depends on the state alone
                dout = sys.modules["jax"].numpy.zeros_like(inputs[self.values])
            shared = {name: value for name, value in (options | {"layout": layout}).items() if name in self.shared}
            return self.compute(dout, [of_results.get(name) for name in self.states], inputs, shared, names)

        return gradients


def choose_optional_gradients(**gradients: tuple[Any, Any]) -> tuple[str, list[Any]]:
    """(the names of the optional gradients that are computed, the caller's arrays for these or None, in order). gradients: by
    name, (the argument, what the caller passed for its gradient). An array, or True, asks for a gradient, False does not, None
    does if there is such an argument. ValueError: one is asked for whose argument is missing, and is no initial state."""
    wanted = {}
    for name, (argument, gradient) in gradients.items():
        wanted[name] = (argument is not None) if gradient is None else gradient
        if argument is None and wanted[name] is not False and not name.startswith("dinitial_"):
            raise ValueError(f"{name}: must be None where there is no {name[1:]}: {name}={gradient!r:.60}")
    also = " ".join([name for name, gradient in wanted.items() if gradient is not False])
    return also, [None if isinstance(gradient, bool) else gradient for gradient in wanted.values()]


def backward_with_parts(backward: Callable[..., Sequence[Any]], of_z: str) -> Callable[..., Sequence[Any]]:
    """The function that computes gradients as `backward` does, and takes and returns the parts of pairs (state, z) by
    themselves. of_z: the name that the gradient of the last z has as an argument."""

    def backward_of_parts(
        dout: Any, *, normalize: bool, initial_state: Any = None, initial_z: Any = None, dstate: Any = None,
        dinitial_state: bool = False, dinitial_z: bool = False, **options: Any,
    ) -> Sequence[Any]:  # fmt: skip
        """The gradients, those of the initial state and z last, as far as they are asked for."""
        dz, wants_state, options = options.pop(of_z, None), dinitial_state or dinitial_z, options | {"normalize": normalize}
        if not normalize:
            return backward(dout, initial_state=initial_state, dstate=dstate, dinitial_state=dinitial_state, **options)
        start, end = (None if x is y is None else (x, y) for x, y in ((initial_state, initial_z), (dstate, dz)))
        results = backward(dout, initial_state=start, dstate=end, dinitial_state=wants_state, **options)
        if not wants_state:
            return results
        return *results[:-1], *[x for x, wanted in zip(results[-1], (dinitial_state, dinitial_z)) if wanted]

    return backward_of_parts
