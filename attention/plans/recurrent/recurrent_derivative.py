"""The derivative of a function of the recurrent family, as torch's autograd (recurrent_autograd.py) and JAX take it."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tiles.calls.plan import Plan
from tiles.calls.program import Program
from tiles.calls.schema import Schema
from tiles.launching.arrays import Array, Form

from ...options import show_argument
from ..requires_grad import needs_gradient

STATES = {"initial_state", "initial_z"}  # the parts of a normalised state, whose gradients are computed together


class Members:
    """(program, derivative) of each member whose module is imported, as an attribute of its name. A dictionary would not do:
    torch.compile sees one as it was at its first look-up, without members that are imported while it traces."""


def find_member(name: str) -> tuple[Program, "RecurrentDerivative"]:
    """(program, derivative) of a member. name: Dynamo takes it as a constant."""
    return getattr(Members, name)


def no_second_derivatives(name: str) -> str:
    """The error message for a derivative of gradients. name: of the function."""
    return f"{name}: has no second derivatives"


def has_adjacent_rows(x: Any) -> bool:
    """Do the rows of a tensor (a, b, c, D) lie one behind the other along c, as kernels of norms of rows take them?"""
    return x.stride(3) == 1 and (x.shape[2] == 1 or x.stride(2) == x.shape[3])


class GradientCall(NamedTuple):
    """A call of a program of gradients. arrays: the index of each of its arrays in the caller's list of arrays, -1 for an array
    that is not passed. results: {input: the index of its gradient among the results} of all gradients that are computed."""

    arrays: tuple[int, ...]
    options: tuple
    results: dict[str, int]


class RecurrentDerivative(NamedTuple):
    """How a function of the family (a member) is differentiated. name: its name in errors. program: the program of its
    gradients. The arrays of that program's schema are the member's inputs, the gradients of its results, and the gradients of
    its inputs, which have the names of these with a d before them; its options are the member's, and `grads`. values: the input
    whose shape and dtype `out` has. tiles: the inputs that torch.autocast casts. stored: the member's last results, which its
    program returns in training for the program of gradients, as far as the options say so; the schemas of both have rows for
    them. of_rows: does the program of gradients take none of `out` but with adjacent rows, as norms of rows do?"""

    name: str
    program: Program
    values: str = "v"
    tiles: tuple[str, ...] = ("q", "k", "v")
    stored: tuple[str, ...] = ()
    of_rows: bool = False

    @property
    def no_second_derivatives(self) -> str:
        """The error message for a derivative of these gradients."""
        return no_second_derivatives(self.name)

    def options_in_training(self, schema: Schema, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """(the options with which the member's program stores what gradients read, the names of what it stores). schema: the
        member's. options: of a call, by name."""
        flags = {schema.arguments[name].flags[0] for name in self.stored}
        in_training = options | dict.fromkeys(flags, True)
        return in_training, [name for name in schema.results(in_training) if name in self.stored]

    def make_program(self, schema: Schema) -> Callable[[Callable[..., Plan]], Program]:
        """Decorator: makes the member's program of its planner, and its entry in Members. TypeError: the planner has an option
        that gradients do not take, and that does not just say which results there are."""

        def decorate(planner: Callable[..., Plan]) -> Program:
            member = Program(schema, planner, self.make_vjp, self.no_second_derivatives, self.prepare)
            of_results = {flag.partition(":")[0] for row in schema.arguments.values() for flag in row.flags}
            if ignored := {*member.options} - {*self.program.options} - of_results:
                raise TypeError(f"{self.name}: its gradients would ignore {sorted(ignored)}")
            setattr(Members, self.name.removeprefix("attention."), (member, self))
            return member

        return decorate

    def call(self, names: Sequence[str], requested_names: Sequence[str], options: dict[str, Any]) -> GradientCall:
        """The call that computes the gradients of the inputs `requested_names`. names: those of the arrays that the caller has.
        options: those of the member, by name."""
        schema, requested = self.program.schema, {*requested_names}
        if options.get("normalize") and requested & STATES:
            requested |= STATES
        words = [word.removeprefix("grads:") for row in schema.arguments.values() for word in row.flags]
        values = options | {"grads": " ".join([word for word in words if word[1:] in requested])}
        places = {name: place for place, name in enumerate(names)}
        results = {name[1:]: place for place, name in enumerate(schema.results(values))}
        arrays = tuple([places.get(name, -1) for name in schema.names])
        return GradientCall(arrays, tuple([values[name] for name in self.program.options]), results)

    def prepare(self, arrays: dict[str, Array], results: dict[str, Form], options: dict[str, Any], layout: str) -> None:
        """Compile the kernels of a call's gradients, if `out` is all that a loss depends on, while those of the call are
        compiled (`prepare_next` of tiles.calls.program)."""
        if not needs_gradient(*arrays.values()):
            return
        forms = {name: x.form for name, x in arrays.items() if name in self.program.names} | {"dout": results["out"]}
        forms |= {name: form for name, form in results.items() if name in self.stored}
        requested = [name for name, x in arrays.items() if needs_gradient(x)]
        call = self.call([*forms], requested, options)
        self.program.prepare(forms, call.options, layout)

    def make_vjp(self, names: Sequence[str], options: dict[str, Any], layout: str) -> Callable[..., dict[str, Any]]:
        """The gradient of the member's program for JAX, as `tiles.calls.program` takes it."""

        def compute_gradients(inputs, results, doutputs):
            if not doutputs:
                return {}
            arrays_by_name = inputs | {"d" + name: x for name, x in doutputs.items()}
            arrays_by_name |= {name: x for name, x in results.items() if name in self.stored}
            if "dout" not in arrays_by_name:  # the loss depends on the state alone
                arrays_by_name["dout"] = sys.modules["jax"].numpy.zeros_like(inputs[self.values])
            call, arrays = self.call([*arrays_by_name], names, options), (*arrays_by_name.values(), None)
            gradients = self.program(None, tuple([arrays[place] for place in call.arrays]), call.options, layout)
            return {name: gradients[place] for name, place in call.results.items() if name in names}

        return compute_gradients


def choose_optional_gradients(**gradients: tuple[Any, Any]) -> tuple[str, list[Any]]:
    """(the names of the optional gradients that are computed, the caller's arrays for these or None, in order). gradients: by
    name, (the argument, what the caller passed for its gradient). An array, or True, asks for a gradient, False does not, None
    does if there is such an argument. ValueError: one is asked for whose argument is missing, and is no initial state."""
    requested = {}
    for name, (argument, gradient) in gradients.items():
        requested[name] = (argument is not None) if gradient is None else gradient
        if argument is None and requested[name] is not False and not name.startswith("dinitial_"):
            raise ValueError(f"{name}: must be None where there is no {name[1:]}: {show_argument(name, gradient)}")
    grads = " ".join([name for name, gradient in requested.items() if gradient is not False])
    return grads, [None if isinstance(gradient, bool) else gradient for gradient in requested.values()]
