"""Gradients of the delta rule on Hopper for values of more than 128 columns. The columns of a state do not wait for one
another, so a head's values, in two parts or more, are those of as many heads that share its key head, its beta and its gates.
What is summed over columns, dq, dk, dbeta and the gates' gradients, is then summed over the parts, dq
and dk as those of heads that share keys.

The parts of v, dout and dv are views. Beta, gates and states are copied."""

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand

from ..kernels import sum_head_groups
from ..parts.recurrent.delta_gradient_config import VALUES
from .delta_channel_gradients import plan_delta_channel_gradients
from .delta_gradient_walk import plan_delta_gradient_walk
from .partial_sums import sum_groups
from .recurrent_checks import has_channel_decay
from .recurrent_chunks import Arrays, ScratchAllocator

VECTOR = 8  # columns of 16 bytes, of which a part has a multiple, as TMA reads it
VALUE_ARRAYS, GATES = ("v", "dout", "dv"), ("beta", "decay", "dbeta", "ddecay")
STATES = "initial_state", "dstate", "dinitial_state"


def count_value_parts(problem: Problem) -> int:
    """The parts of a head's values, of up to 128 columns each; 1: they are not cut."""
    columns = problem.extents["value_dim"]
    parts = -(-columns // VALUES)
    return 1 if columns % (VECTOR * parts) else parts


def serves_value_parts(problem: Problem, arrays: Arrays) -> bool:
    """Can the heads of such a call be cut into parts? arrays: as in delta_gradients.plan_delta_gradients."""
    parts = count_value_parts(problem)
    values = [x for name in VALUE_ARRAYS for x in [arrays[name]] if x]
    merged = [x for name in (*STATES, *GATES) for x in [arrays[name]] if x and len(x.shape) == 4]
    return parts > 1 and all([_split_heads(x, parts) for x in values]) and all([_merge_axes(x) for x in merged])


def plan_value_parts(problem: Problem, arrays: Arrays, scale: float, scratch: ScratchAllocator, record: Arrays) -> list[Step]:
    """The launches. arrays, record: as in delta_gradients.plan_delta_gradients; forward stores nothing for these."""
    parts = count_value_parts(problem)
    heads, columns, key_dim, sequences = problem("heads", "value_dim", "key_dim", "sequences")
    extents = problem.extents | {"heads": parts * heads, "value_dim": columns // parts}
    part_problem = Problem(problem.schema, problem.forms, extents, problem.bits, problem.layout)
    part_arrays, before, after = dict(arrays), list[Step](), list[Step]()
    for name in VALUE_ARRAYS:
        x = arrays[name]
        part_arrays[name] = x and _split_heads(x, parts)
    for name in GATES:
        x = arrays[name]
        if x and len(x.shape) == 4:
            tokens, gates = x.shape[:2], _merge_axes(x)
            assert gates
            copy = scratch(*tokens, parts * heads, key_dim)
            by_part = _reshape(copy, tokens[0] * tokens[1], heads, parts, key_dim)
            if name == "decay":
                before.append(sum_groups(problem, sum_head_groups.FLOAT32, gates.spread(2, parts), by_part))
            else:
                after.append(sum_groups(problem, sum_head_groups.FLOAT32, by_part, gates.spread(2, 1)))
            part_arrays[name] = copy
        elif x:
            per_head, x = len(x.shape) == 1, x if len(x.shape) == 3 else x.spread(0, 1).spread(0, 1)
            batch, length, _ = x.shape
            copy = scratch(batch, length, heads, parts)
            by_part = copy.permuted((0, 1, 3, 2))
            if name in ("beta", "decay"):
                before.append(sum_groups(problem, sum_head_groups.FLOAT32, x.spread(2, parts), by_part))
            else:
                after.append(sum_groups(problem, sum_head_groups.FLOAT32, by_part, x.spread(2, 1)))
            part_arrays[name] = _reshape(copy, *(() if per_head else (batch, length)), parts * heads)
    for name in STATES:
        if x := arrays[name]:
            states, copy = _merge_axes(x), scratch(sequences, parts * heads, key_dim, columns // parts)
            assert states
            by_part = _reshape(copy, sequences * heads, parts, key_dim, columns // parts).permuted((0, 2, 1, 3))
            states = _split_columns(states, parts)
            if name == "dinitial_state":
                after.append(sum_groups(problem, sum_head_groups.FLOAT32, by_part, states))
            else:
                before.append(sum_groups(problem, sum_head_groups.FLOAT32, states, by_part))
            part_arrays[name] = copy
    plan = plan_delta_channel_gradients if has_channel_decay(problem) else plan_delta_gradient_walk
    return [*before, *plan(part_problem, part_arrays, scale, scratch, record), *after]


def _split_heads(x: Operand, parts: int) -> Operand | None:
    """An array (B, S, H, D) with the parts of each head's columns as heads of their own; None: their strides differ."""
    (*tokens, heads, columns), (*strides, head_stride, stride) = x.form.shape, x.form.strides
    if heads > 1 and head_stride != columns * stride:
        return None
    columns //= parts
    form = x.form._replace(shape=(*tokens, parts * heads, columns), strides=(*strides, columns * stride, stride))
    return x._replace(form=form)


def _merge_axes(x: Operand) -> Operand | None:
    """An array (N, H, ..) as (N H, ..), None: that needs a copy."""
    (count, rows, *shape), (stride, row_stride, *strides) = x.form.shape, x.form.strides
    if count > 1 and stride != rows * row_stride:
        return None
    return x._replace(form=x.form._replace(shape=(count * rows, *shape), strides=(row_stride, *strides)))


def _split_columns(x: Operand, parts: int) -> Operand:
    """An array (.., D) as (.., parts, D / parts)."""
    (*shape, columns), (*strides, stride) = x.form.shape, x.form.strides
    columns //= parts
    return x._replace(form=x.form._replace(shape=(*shape, parts, columns), strides=(*strides, columns * stride, stride)))


def _reshape(x: Operand, *shape: int) -> Operand:
    """Scratch memory under another shape."""
    strides, stride = [], x.form.itemsize
    for n in reversed(shape):
        strides.append(stride)
        stride = n * stride
    return x._replace(form=x.form._replace(shape=shape, strides=tuple(reversed(strides))))
