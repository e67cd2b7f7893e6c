"""The derivative of a member of linear attention, as torch's autograd (recurrent_autograd.py) and JAX take it."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class RecurrentDerivative(NamedTuple):
    """How a member is differentiated. name: of its function, as errors say it. backward: the function of (dout, inputs by name,
    dstate=, options) that returns gradients, those of `always` first and then those of `optional` that it is asked for by a
    flag, "d" before their names. values: the input that outputs are like."""

    name: str
    backward: Callable[..., Sequence[Any]]
    always: tuple[str, ...]
    optional: tuple[str, ...] = ("decay", "initial_state")
    values: str = "v"

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
        results = self.backward(dout, **inputs, dstate=dstate, **(options | flags))
        return {name: x for name, x in zip((*self.always, *more), results, strict=True) if name in wanted}

    def of_program(self, names: Sequence[str], options: dict[str, Any], layout: str) -> Callable[..., dict[str, Any]]:
        """The gradient of the member's program for JAX, as `tiles.calls.program` takes it."""

        def gradients(inputs, results, of_results):
            if not of_results:
                return {}
            dout = of_results.get("out")
            if dout is None:  # the loss depends on the state alone
                dout = sys.modules["jax"].numpy.zeros_like(inputs[self.values])
            shared = {"scale": options["scale"], "family": options["family"], "layout": layout}
            return self.compute(dout, of_results.get("state"), inputs, shared, names)

        return gradients


def recurrent_autograd() -> Any:
    """The module recurrent_autograd.py, for tensors that require grad. It imports torch, which must be imported already."""
    from .. import recurrent_autograd

    return recurrent_autograd
