"""Gradients for values of more than 128 columns where kernels take no more: of the delta rule on Hopper, and of linear
attention with gates. The columns of a state do not wait for one another, so a head's values, in two parts or more, are those of
as many heads that share its key head, its beta and its gates. What is summed over columns, dq, dk, dbeta and the gates'
gradients, is then summed over the parts, dq and dk as those of heads that share keys.

The parts of v, dout and dv are views. Where the strides of heads allow none, as with heads before tokens, they are those of
copies, with heads side by side. Beta, gates and states are copied."""

from collections.abc import Callable

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.cp_async import VECTOR_SIZES
from tiles.launching.arrays import Operand

from ...kernels.recurrent import sum_head_groups
from ...kernels.recurrent.linear_gradients_hopper import VALUES
from ..partial_sums import sum_groups
from .raw_inputs import by_tma, launch_copies
from .recurrent_chunks import Arrays, ScratchAllocator

VECTOR = 8  # columns of 16 bytes, of which a part has a multiple, as TMA reads it
VALUE_ARRAYS, GATES = ("v", "dout", "dv"), ("beta", "decay", "dbeta", "ddecay")
STATES = "initial_state", "dstate", "dinitial_state"
KEY_GRADIENTS = "dq", "dk"
RESULTS = "dv", "dbeta", "ddecay", "dinitial_state", *KEY_GRADIENTS
COPIED_RESULTS = "dv", "ddecay", "dinitial_state"  # to these, rows of four axes may have to be copied


def count_value_parts(problem: Problem) -> int:
    """The parts of a head's values, of up to 128 columns each; 1: they are not cut."""
    columns = problem.extents["value_dim"]
    parts = -(-columns // VALUES)
    return 1 if columns % (VECTOR * parts) else parts


def serves_value_parts(problem: Problem, arrays: Arrays) -> bool:
    """Can the heads of such a call be cut into parts? arrays: as in delta_gradients.plan_delta_gradients."""
    parts = count_value_parts(problem)
    copied = [name for name in COPIED_RESULTS if needs_copy(name, arrays[name], parts)]
    return parts > 1 and all([by_tma(problem, name) for name in copied])


def serves_linear_value_parts(problem: Problem, arrays: Arrays) -> bool:
    """Can the heads of a call of linear attention be cut into parts? Arrays may have other names than the problem's, and states
    other orders of axes, so none of these is copied. arrays: as in recurrent_gradients.plan_chunk_gradients."""
    parts = count_value_parts(problem)
    copied = {name for name in (*VALUE_ARRAYS, *GATES, *STATES) if needs_copy(name, arrays.get(name), parts)}
    copied -= {"v", "dout"} if problem.bytes_at_once() < VECTOR_SIZES[0] else {*VALUE_ARRAYS}
    return parts > 1 and not copied


def needs_copy(name: str, x: Operand | None, parts: int) -> bool:
    """Do the strides of an array of four axes allow no view of parts, or none with batches and rows as one axis?"""
    if x is None or len(x.shape) < 4:
        return False
    return (_split_heads(x, parts) if name in VALUE_ARRAYS else _merge_axes(x)) is None


class ValueParts:
    """The arrays of a call with the parts of heads as heads of their own. before: the launches that copy inputs; sums: those
    that sum gradients over parts; results: those that copy results to where the caller wants them."""

    def __init__(self, problem: Problem, scratch: ScratchAllocator):
        self.problem, self.scratch, self.parts = problem, scratch, count_value_parts(problem)
        self.before, self.sums, self.results = list[Step](), list[Step](), list[Step]()

    @property
    def after(self) -> list[Step]:
        """The launches that follow those of the parts."""
        return [*self.sums, *self.results]

    def make_contiguous(self, name: str, x: Operand) -> Operand:
        """Scratch memory in place of an array, and the launch that copies from or to it."""
        copy = self.scratch(*x.shape, dtype=x.dtype)
        if name in RESULTS:
            self.results.append(launch_copies(self.problem, [copy], [x]))
        else:
            self.before.append(launch_copies(self.problem, [x], [copy]))
        return copy

    def connect(self, name: str, by_head: Operand, by_part: Operand) -> None:
        """Add the launch that copies an input to its parts or sums a gradient over them. by_head, by_part: the call's array and
        scratch memory as (batch, row, head and part, column)."""
        steps, source, target = (self.sums, by_part, by_head) if name in RESULTS else (self.before, by_head, by_part)
        steps.append(sum_groups(self.problem, sum_head_groups.FLOAT32, source, target))

    def spread(self, name: str, x: Operand) -> Operand:
        """An array of gates with a further axis for parts, which all read it, or of which it is the sum."""
        return x.spread(2, 1 if name in RESULTS else self.parts)

    def channel_gates(self, name: str, x: Operand) -> Operand:
        """Gates of channels (B, S, H, Dk) or their gradients, by part."""
        batch, length, heads, key_dim = x.shape
        copy, merged = self.scratch(batch, length, self.parts * heads, key_dim), _merge_axes(x)
        assert merged
        self.connect(name, self.spread(name, merged), _reshape(copy, batch * length, heads, self.parts, key_dim))
        return copy

    def token_gates(self, name: str, x: Operand) -> Operand:
        """Beta, gates (B, S, H) or (H,), or their gradients, by part."""
        per_head = len(x.shape) == 1
        x = x.spread(0, 1).spread(0, 1) if per_head else x
        batch, length, heads = x.shape
        copy = self.scratch(batch, length, heads, self.parts)
        self.connect(name, self.spread(name, x), copy.permuted((0, 1, 3, 2)))
        return _reshape(copy, *(() if per_head else (batch, length)), self.parts * heads)

    def key_gradients(self, name: str, x: Operand) -> Operand:
        """dQ or dK of each value head (B, S, H, Dk), in float32, by part."""
        batch, length, heads, key_dim = x.shape
        partial = self.scratch(batch, length, heads * self.parts, key_dim)
        self.connect(name, x, partial)
        return partial

    def states(self, name: str, x: Operand) -> Operand:
        """States (N, H, Dk, Dv) or their gradients, by part."""
        (sequences, heads, key_dim, columns), merged = x.shape, _merge_axes(x)
        copy = self.scratch(sequences, self.parts * heads, key_dim, columns // self.parts)
        by_part = _reshape(copy, sequences * heads, self.parts, key_dim, columns // self.parts)
        assert merged
        self.connect(name, _split_columns(merged, self.parts), by_part.permuted((0, 2, 1, 3)))
        return copy


def divide_values(problem: Problem) -> Problem:
    """The problem of the parts, as heads."""
    parts = count_value_parts(problem)
    heads, columns = problem("heads", "value_dim")
    extents = problem.extents | {"heads": parts * heads, "value_dim": columns // parts}
    return Problem(problem.schema, problem.forms, extents, problem.bits, problem.layout)


def plan_value_parts(
    problem: Problem, arrays: Arrays, scratch: ScratchAllocator, plan: Callable[[Problem, Arrays], list[Step]]
) -> list[Step]:
    """The launches. arrays: as in serves_value_parts, and others that parts take as they are. plan: the launches for the
    problem and the arrays of parts."""
    by_part, part_arrays = ValueParts(problem, scratch), dict(arrays)
    for name, x in arrays.items():
        if x and name in (*VALUE_ARRAYS, *GATES, *STATES) and needs_copy(name, x, by_part.parts):
            x = by_part.make_contiguous(name, x)
        if x and name in VALUE_ARRAYS:
            part_arrays[name] = _split_heads(x, by_part.parts)
        elif x and name in GATES:
            part_arrays[name] = (by_part.channel_gates if len(x.shape) == 4 else by_part.token_gates)(name, x)
        elif x and name in STATES:
            part_arrays[name] = by_part.states(name, x)
        elif x and name in KEY_GRADIENTS and x.dtype == "float32":
            part_arrays[name] = by_part.key_gradients(name, x)
    return [*by_part.before, *plan(divide_values(problem), part_arrays), *by_part.after]


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
