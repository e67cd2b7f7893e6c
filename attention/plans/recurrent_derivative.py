"""The derivative of a member of linear attention, as torch's autograd (recurrent_autograd.py) and JAX take it."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class RecurrentDerivative(NamedTuple):
    """How a member is differentiated. name: of its function, as errors say it. backward: the function of (dout, inputs by name,
    the gradient of the state, options) that returns gradients, those of `always` first and then those of `optional` that it is
    asked for by a flag, "d" before their names. values: the input that outputs are like. state: the result that is the last
    state. shared: the options that backward takes, too. tiles: the inputs that torch.autocast casts."""

    name: str
    backward: Callable[..., Sequence[Any]]
    always: tuple[str, ...]
    optional: tuple[str, ...] = ("decay", "initial_state")
    values: str = "v"
    state: str = "state"
    shared: tuple[str, ...] = ("scale", "family", "layout")
    tiles: tuple[str, ...] = ("q", "k", "v")

    @property
    def no_second_derivatives(self) -> str:
        """What is said where a derivative of gradients is requested."""
        return f"{self.name}: has no second derivatives"

    def compute(
        self, dout: Any, dstate: Any, inputs: dict[str, Any], options: dict[str, Any], wanted: Sequence[str]
    ) -> dict[str, Any]:
        """{name: gradient} of a call with these arrays and options, for those in `wanted`. dstate: None if the state has no
        gradient."""
        more = [name for name in self.optional if name in wanted]
        flags = {"d" + name: name in more for name in self.optional}
        results = self.backward(dout, **inputs, **{"d" + self.state: dstate}, **(options | flags))
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
            return self.compute(dout, of_results.get(self.state), inputs, shared, names)

        return gradients


def choose_optional_gradients(decay: Any, initial_state: Any, ddecay: Any, dinitial_state: Any) -> tuple[str, tuple[Any, Any]]:
    """(the names of the optional gradients that are computed, the arrays of the caller for ddecay and dinitial_state or None).
    An array, or True, asks for a gradient, False does not, None does if there is such an argument. ValueError: ddecay is asked
    for, and there is no decay."""
    wanted = {"ddecay": ddecay, "dinitial_state": dinitial_state}
    for (name, x), argument in zip(wanted.items(), (decay, initial_state)):
        wanted[name] = (argument is not None) if x is None else x
    if decay is None and wanted["ddecay"] is not False:
        raise ValueError(f"ddecay: must be None where there is no decay: {ddecay=!r:.60}")
    more = [None if isinstance(x, bool) else x for x in wanted.values()]
    return " ".join([name for name, x in wanted.items() if x is not False]), (more[0], more[1])


def recurrent_autograd() -> Any:
    """The module recurrent_autograd.py, for tensors that require grad. It imports torch, which must be imported already."""
    from .. import recurrent_autograd

    return recurrent_autograd
