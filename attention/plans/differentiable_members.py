"""Members of linear attention's family that have gradients, as torch's autograd takes them (linear_autograd.py)."""

from collections.abc import Callable
from typing import Any, NamedTuple


class DifferentiableMember(NamedTuple):
    """A function with gradients. call: the function. gradients: a function of (dout, dstate, inputs, options, wanted) that
    returns {name: gradient} for the inputs in `wanted`; dout and dstate are None for what the loss does not depend on.
    return_state: the option that asks for the last state. tiles: the arrays that torch.autocast casts, that with the shape of
    the output first."""

    name: str
    call: Callable
    gradients: Callable
    return_state: str
    tiles: tuple[str, ...]

    @property
    def no_second_derivatives(self) -> str:
        """The message of an error."""
        return f"{self.name}: has no second derivatives"


def call_with_gradients(
    member: DifferentiableMember, arrays: dict[str, Any], options: dict[str, Any], return_state: bool
) -> Any:
    """The result of a call of the member, differentiable once with respect to its arrays. arrays, options: of `call`, by name;
    options are those that `gradients` takes, too. torch is imported already."""
    from ..linear_autograd import call_member

    return call_member(member, arrays, options, return_state)
