"""Programs that add gradients to float32 arrays, made of those that write them (accumulate=True of mamba2_backward and
delta_rule_backward): gradients go to scratch memory, in the dtypes that they have elsewhere, and are added from there."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from tiles.calls.plan import Plan, return_none
from tiles.calls.program import Program, program
from tiles.calls.schema import Problem, Schema
from tiles.launching.arrays import Operand

from ...options import check_accumulators
from .recurrent_gradients import plan_addition

RESULT = re.compile(r"(?:tile|float32) +output(?: +(grads:\w+))?$", re.MULTILINE)  # the end of a row


class ScratchGradients(Problem):
    """A problem whose results lie in the plan's first scratch arrays, and not where the caller's sums are. tiles: the names of
    results that have the dtype of tiles."""

    def __init__(self, problem: Problem, tiles: frozenset[str]):
        """The caller's problem with other places of its results."""
        names = [name for name in problem.forms if problem.schema.arguments[name].written]
        inputs = {name: x for name, x in problem.forms.items() if name not in names}
        bits = {name: x for name, x in problem.bits.items() if name not in names}
        super().__init__(problem.schema, inputs, problem.extents, bits, problem.layout)
        self.totals: dict[str, Operand] = {name: problem[name] for name in names}
        self.shapes = [(x.form.shape, self.dtype if name in tiles else "float32") for name, x in self.totals.items()]
        self.gradients = {name: super(ScratchGradients, self).scratch(n, *self.shapes[n]) for n, name in enumerate(names)}

    def __getitem__(self, name: str) -> Any:
        return self.gradients.get(name) or super().__getitem__(name)

    def scratch(self, number: int, shape: tuple[int, ...], dtype: str) -> Operand:
        """The Operand of the `number`-th scratch array behind the gradients."""
        return super().scratch(len(self.gradients) + number, shape, dtype)


def accumulating_schema(schema: Schema, table: str, make_schema: Callable[[str, str], Schema]) -> Schema:
    """The schema of gradients whose results are float32 arrays that are added to. table: its rows. make_schema: makes a schema
    of its name and rows."""
    return make_schema(f"{schema.name}_into", RESULT.sub(lambda x: f"float32  updated{'?' if x[1] else ''}", table))


def make_accumulating_program(writing: Program, schema: Schema) -> Program:
    """The program with this schema that adds the gradients which the program `writing` computes."""
    tiles = frozenset(name for name, row in writing.schema.arguments.items() if row.written and row.holds == "tile")

    @functools.wraps(writing.planner)
    def plan_additions(problem: Problem, *options: Any) -> Plan:
        gradients = ScratchGradients(problem, tiles)
        plan = writing.planner(gradients, *options)
        additions = [
            plan_addition(problem, name, gradients.gradients[name], total)
            for name, total in gradients.totals.items()
            if 0 not in total.form.shape
        ]
        return Plan([*plan.steps, *additions], [*gradients.shapes, *plan.scratch], return_none)

    return program(schema)(plan_additions)


def add_gradients(
    adding: Program, stream: Any, inputs: Sequence[Any], gradients: dict[str, Any], options: tuple, grads: str, layout: str
) -> tuple[Any, ...]:
    """Call a program that adds gradients; the sums. gradients: the caller's arrays by the names of results. grads: the names of
    those that may be left out and are wanted. TypeError: the array of a gradient that is wanted is missing."""
    optional = {name for name, row in adding.schema.arguments.items() if row.role == "updated?"}
    wanted = {name: x for name, x in gradients.items() if name not in optional or name in grads.split()}
    check_accumulators(wanted)
    adding(stream, (*inputs, *[wanted.get(name) for name in gradients]), options, layout)
    return tuple(wanted.values())
