"""Programs as torch's ops: what torch.compile, torch.export, vmap, autocast and fake tensors see of a call.

    torch.ops.tiles.forward(q, k, v, causal, scale, return_lse, family, layout)     of attention.forward's Program

A Program's Schema and the annotations of its planner's options determine the op: its signature, its fake, what a vmapped axis
is folded into, what autocast casts. Results that the options ask for are new tensors: none, one, or a list if the Schema has
several. What is `updated` is written in place, and declared so. There is no gradient: a tensor that requires grad, or has a
tangent, is refused, not detached.

A call on plain tensors bypasses all of this (`traced` costs it 0.4 us). An op is registered when the first call needs it, and
torch is never imported here.
"""

from __future__ import annotations

import re
import string
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any

from ..launching.arrays import Number
from ..launching.frameworks import computes_tangents, no_backward, refuse_tangent
from .argument import FREE, Argument
from .plan import ProgramProtocol

NAMESPACE = "tiles"
# of options, in torch's signatures
TYPES: dict[Any, str] = {bool: "bool", int: "int", float: "float", str: "str"}
TYPES |= {kind | None: f"{name}?" for kind, name in TYPES.items()} | {Number | None: "SymInt?"}
DEVICES = {"cpu": "CPU", "cuda": "CUDA"}  # as torch writes them in a device, and in a dispatch key
_LOCK = threading.Lock()


# ---- what Dynamo reads -----------------------------------------------------------------------------------------------
def imported_module(name: str) -> Any:
    """The module of this name if it is imported, otherwise None. Dynamo must not trace sys.modules: torch 2.11 wraps every
    module there, and fails if one that is lazy imports others meanwhile. It reads _MODULES, after it has called _find."""
    return _MODULES[name] if _find(name) else None


def _find(name: str) -> bool:
    """Is a module imported? Then it is in _MODULES, and so are all others of LOOKED_FOR, also those that were imported since
    the last call: what is added to a dict after Dynamo's trace has read it, the trace does not see."""
    modules = sys.modules
    for other in LOOKED_FOR if name in LOOKED_FOR else (*LOOKED_FOR, name):
        if other not in _MODULES and modules.get(other) is not None:
            _MODULES[other] = modules[other]
    return name in _MODULES


_find._dynamo_marked_constant = True  # type: ignore[attr-defined]
LOOKED_FOR = "torch", "jax"
_MODULES: dict[str, Any] = {}


def is_traced(x: Any) -> bool:
    """Does torch trace or transform the calls that it sees now, x being one of its tensors? That is torch.compile and
    torch.export, a mode that watches ops (fake tensors, a counter of FLOPs), vmap and its siblings, forward-mode derivatives,
    autocast of float32."""
    torch = imported_module("torch")
    return (
        torch is not None
        and (
            torch.compiler.is_compiling()
            or torch._C._len_torch_dispatch_stack() > 0
            or torch._C._functorch.peek_interpreter_stack() is not None
            or computes_tangents()
            or (torch._C._is_any_autocast_enabled() and getattr(x, "dtype", None) is torch.float32)
        )
        and isinstance(x, torch.Tensor)  # the dearest question, and the last
    )


def is_compiling() -> bool:
    """Is the call traced by Dynamo, so that the op stands for it?"""
    torch = imported_module("torch")
    return torch is not None and torch.compiler.is_compiling()


def is_exporting() -> bool:
    """Does torch.export trace this? Of an autograd.Function it would keep the forward pass alone. torch is there. Dynamo takes
    torch.compiler.is_exporting() for true whatever it traces, in torch 2.11 at least, so the flag is read that this reads."""
    return getattr(imported_module("torch").compiler, "_is_exporting_flag", False)


def is_transformed() -> bool:
    """Is one of torch.func's transforms at work, outside of what Dynamo traces?"""
    torch = imported_module("torch")
    if torch is None or torch.compiler.is_dynamo_compiling():  # which takes a third of what is_compiling takes
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None and not torch.compiler.is_compiling()


def is_mapped_with_grad(arrays: Iterable[Any]) -> bool:
    """Are gradients to come of a tensor whose elements torch.vmap goes through? What stands for these denies it."""
    if not is_transformed():
        return False
    torch = imported_module("torch")
    if not torch.is_grad_enabled():
        return False
    functorch = torch._C._functorch
    tensors = [x for x in arrays if isinstance(x, torch.Tensor)]
    while mapped := [functorch.get_unwrapped(x) for x in tensors if functorch.is_batchedtensor(x)]:
        tensors = mapped
        if any([x.requires_grad for x in tensors]):
            return True
    return False


def choose_is_compiling() -> Callable[[], bool]:
    """The function that answers `compiling`: torch's own once torch is imported, which takes 0.2 us less."""
    torch = imported_module("torch")
    return is_compiling if torch is None else torch.compiler.is_dynamo_compiling


def call(program: ProgramProtocol, stream: Any, arrays: tuple, options: tuple, layout: str) -> Any:
    """What the program gives, by way of its op. A result that the caller has memory for is copied there, so that torch knows
    of the write."""
    if stream is not None:
        raise TypeError("stream: must be None where torch traces or transforms the call: its ops run on the current stream")
    name, input_numbers, output_numbers = program.op()
    returned = getattr(getattr(imported_module("torch").ops, NAMESPACE), name).default(
        *[arrays[n] for n in input_numbers], *options, layout
    )
    results = list(returned) if isinstance(returned, (list, tuple)) else [returned]
    if any([arrays[n] is not None for n in output_numbers]):
        _copy(program, arrays, options, results)
    return results[0] if len(results) == 1 else tuple(results)


def _copy(program: ProgramProtocol, arrays: tuple, options: tuple, results: list) -> None:
    """Copy results to the caller's arrays."""
    arrays_by_name = dict(zip(program.schema.names, arrays))
    for place, name in enumerate(program.schema.results(dict(zip(program.options, options)))):
        out = arrays_by_name[name]
        if out is not None:
            if out.shape != results[place].shape or out.dtype != results[place].dtype:
                expected = f"shape={tuple(results[place].shape)}, dtype={results[place].dtype}"
                raise ValueError(f"{name}: must have {expected}: {name}.shape={tuple(out.shape)}, {name}.dtype={out.dtype}")
            results[place] = out.copy_(results[place])


def register_op(program: ProgramProtocol) -> Callable[[], tuple[str, list[int], list[int]]]:
    """A function that registers the program's op, if it is not yet, and gives its name, the places of the arrays that it takes,
    and of those that it gives back. Dynamo calls it and goes on with what it returned, without a look inside and a guard for
    each thing that it saw there: that says the attribute, which torch.compiler.assume_constant_result sets."""
    ops: list[_Op] = []
    rows = [*enumerate(program.schema.arguments.values())]
    registration = program.schema.name, [n for n, row in rows if not row.result], [n for n, row in rows if row.result]

    def op() -> tuple[str, list[int], list[int]]:
        with _LOCK:
            if not ops:
                ops.append(_Op(program))
        return registration

    op._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return op


# ---- on a call that was refused --------------------------------------------------------------------------------------
def serves(arrays: tuple, program: ProgramProtocol) -> bool:
    """Can the op do what the program refused? It can if no tensor has memory (meta, fake), or if autocast is on and some tile,
    not the first, is float32."""
    torch = imported_module("torch")
    if torch is None:
        return False
    plain = torch._C._disabled_torch_dispatch_impl
    tensors = [(x, row) for x, row in zip(arrays, program.schema.arguments.values()) if isinstance(x, torch.Tensor)]
    if any([x.is_nested for x, _ in tensors]):
        return False
    shapes_only = all(x.is_meta or getattr(type(x), "__torch_dispatch__", plain) is not plain for x, _ in tensors)
    return (len(tensors) > 0 and shapes_only) or any(_cast_to(torch, x, row) != x.dtype for x, row in tensors)


def _cast_to(torch: Any, x: Any, row: Argument) -> Any:
    """The dtype that autocast wants this argument to have."""
    kind = x.device.type
    if row.holds != "tile" or x.dtype != torch.float32 or kind not in DEVICES or not torch.is_autocast_enabled(kind):
        return x.dtype
    return torch.get_autocast_dtype(kind)


# ---- the op ----------------------------------------------------------------------------------------------------------
def ascii_name(name: str) -> str:
    """A name of Python's as torch's signatures take it, which know ASCII alone: Δx is u394x."""
    return re.sub(r"[^\x00-\x7f]", lambda match: f"u{ord(match[0]):x}", name)


class _Op:
    """The op of a program, registered while this object lives. All methods take the op's arguments: tensors, options,
    layout."""

    def __init__(self, program: ProgramProtocol):
        self.torch = torch = imported_module("torch")
        self.program, self.schema, name = program, program.schema, program.schema.name
        self.rows = [row for row in self.schema.arguments.values() if not row.result]
        self.results = sum(row.result for row in self.schema.arguments.values())
        self.several = self.results > 1
        self.counts = any(row.axes == FREE for row in self.rows)
        self.updated = [place for place, row in enumerate(self.rows) if row.written]
        places = {row.name: place for place, row in enumerate(self.rows)}
        self.arrays = itemgetter(*[places.get(name, -1) for name in self.schema.names])  # of the op's arguments and None
        if self.several and self.updated:
            raise TypeError(f"{name}: torch makes no functional op of one that writes in place and gives several results")
        self.below, key = torch._C._after_autograd_keyset, torch._C.DispatchKey
        self.memory = [getattr(key, device) for device in DEVICES.values()]
        self.library = torch.library.Library(NAMESPACE, "FRAGMENT")
        self.library.define(f"{name}{self.signature()}", tags=torch.Tag.pt2_compliant_tag)
        self.op = getattr(getattr(torch.ops, NAMESPACE), name).default
        for device in DEVICES.values():
            self.library.impl(name, self.run, device)
            self.library.impl(name, self.autocast(getattr(key, f"Autocast{device}")), f"Autocast{device}")
        self.library.impl(name, self.without_gradient, "Autograd", with_keyset=True)
        torch.library.register_fake(f"{NAMESPACE}::{name}", self.fake, lib=self.library)
        torch.library.register_vmap(f"{NAMESPACE}::{name}", self.vmap, lib=self.library)

    def signature(self) -> str:
        """The op's schema in torch's language: "(Tensor q, ..., bool causal, float? scale, ..., str layout) -> Tensor[]"."""
        letters = iter(string.ascii_lowercase)
        written = [f"({next(letters)}!)" if row.written else "" for row in self.rows]
        tensors = [f"Tensor{mark}{'' if row.needed else '?'} {ascii_name(row.name)}" for mark, row in zip(written, self.rows)]
        options = [f"{TYPES[kind]} {ascii_name(name)}" for name, kind in self.option_types().items()]
        returns = "Tensor[]" if self.several else "Tensor" if self.results else "()"
        return f"({', '.join([*tensors, *options, 'str layout'])}) -> {returns}"

    def option_types(self) -> dict[str, Any]:
        """{name: type} of the options. TypeError: one has a type that torch does not know."""
        for name, kind in self.program.option_types.items():
            if kind not in TYPES:
                message = f"{self.program.planner.__qualname__}'s annotation is {kind!r}"
                raise TypeError(f"{name}: an option of a torch op must be one of {tuple(TYPES)}: {message}")
        return self.program.option_types

    def split_arguments(self, args: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any], str]:
        """(tensors, one for each row that is no result; options by name; layout)"""
        count = len(self.rows)
        return args[:count], dict(zip(self.program.options, args[count:])), args[-1]

    def run(self, *args: Any) -> Any:
        """The op for tensors in memory. Where torch.compile gives up on the frame that called, it looks into all that is called
        next; but what plans and launches is not for it to trace."""
        return (self.run_untraced if "torch._dynamo" in sys.modules else self.run_eagerly)(*args)

    @cached_property
    def run_untraced(self) -> Callable[..., Any]:
        """`run_eagerly`, into which Dynamo does not look: this takes 0.4 us."""
        return self.torch.compiler.disable(self.run_eagerly)

    def run_eagerly(self, *args: Any) -> Any:
        """The results of the program for these arrays, in the op's form."""
        results = self.program.run(None, self.arrays((*args, None)), args[len(self.rows) : -1], args[-1])
        return (list(results) if isinstance(results, tuple) else [results]) if self.several else results

    def fake(self, *args: Any) -> Any:
        """The op for fake tensors, without memory: results of the right shapes, strides and dtypes. No extent is compared
        (Schema.shapes)."""
        tensors, options, layout = self.split_arguments(args)
        present = {row.name: x for row, x in zip(self.rows, tensors) if x is not None}
        self.schema.check_dtypes({name: str(x.dtype).removeprefix("torch.") for name, x in present.items()})
        shapes, first = self.schema.shapes({name: x.shape for name, x in present.items()}, layout), tensors[0]
        rows = [self.schema.arguments[name] for name in self.schema.results(options)]
        dtypes = [first.dtype if row.holds == "tile" else getattr(self.torch, row.dtypes[0]) for row in rows]
        results = [first.new_empty(shapes[row.name], dtype=dtype) for row, dtype in zip(rows, dtypes)]
        return results if self.several else results[0] if results else None

    def without_gradient(self, keys: Any, *args: Any) -> Any:
        """Where autograd would write down what is done. If nothing but memory comes after it the call is made from here, for
        torch takes 8 us to come to `run` once more."""
        torch, below = self.torch, keys & self.below
        if computes_tangents():
            for row, x in zip(self.rows, args):
                if x is not None:
                    refuse_tangent(x, row.name)
        if self.updated:
            torch.autograd.graph.increment_version([x for place in self.updated if (x := args[place]) is not None])
        if below.highestPriorityTypeId() in self.memory:
            return self.run(*args)  # which refuses what requires grad
        if torch.is_grad_enabled() and not is_exporting():  # an exported call is refused when it runs
            for row, x in zip(self.rows, args):
                if x is not None and x.requires_grad:
                    raise NotImplementedError(self.refusal_message(row.name))
        with torch._C._AutoDispatchBelowAutograd():
            return self.op.redispatch(below, *args)

    def refusal_message(self, name: str) -> str:
        """The error message for a tensor that requires grad, where torch traces or transforms the call. If the program has a
        gradient, the function that calls the op asked for it as torch.autograd.Function: Dynamo passes over that in
        torch.func.grad."""
        if self.program.gradient is None:
            return no_backward(name)
        remedy = "where torch.compile traces torch.func.grad leave fullgraph=True out, and this part runs as it is"
        return (
            f"{name}: requires grad, and the op {NAMESPACE}::{self.schema.name} has no gradient without its function; {remedy}"
        )

    def autocast(self, key: Any) -> Callable[..., Any]:
        """The op's kernel for an autocast dispatch key: it casts tiles of float32 to the autocast dtype."""
        torch, keys = self.torch, self.torch._C.DispatchKeySet(key)

        def cast(*args):
            tensors, *_ = self.split_arguments(args)
            tensors = [x if x is None else x.to(_cast_to(torch, x, row)) for row, x in zip(self.rows, tensors)]
            with torch._C._ExcludeDispatchKeyGuard(keys):
                return self.op(*tensors, *args[len(tensors) :])

        return cast

    def vmap(self, info: Any, in_dims: tuple, *args: Any) -> tuple[Any, Any]:
        """The op under torch.vmap: the axis that `in_dims` names is folded into the batch; where an argument with that axis has
        no batch to fold it into (a rate of each head, cu_seqlens), there is a call for each of its elements. So there is where
        a result is a sum over batches (the gradient of such an argument), and where there may be arrays of any axes, for
        functions read them that count batches."""
        tensors, options, layout = self.split_arguments(args)
        count, rest, dims = info.batch_size, args[len(tensors) :], in_dims[: len(tensors)]
        for row, x, dim in zip(self.rows, tensors, dims):
            if row.written and dim is None and x is not None:
                raise ValueError(f"{row.name}: is written in place, so it must be mapped over where another argument is")
        batched = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(tensors, dims)]
        folded = [self._fold(row, x, dim is not None, count, layout) for row, x, dim in zip(self.rows, batched, dims)]
        no_batch = self.counts or any(x is not None and y is None for x, y in zip(tensors, folded))
        ranks = {row.name: x.dim() - (dim is not None) for row, x, dim in zip(self.rows, tensors, dims) if x is not None}
        no_batch = no_batch or any(self._sums_batches(name, ranks, layout) for name in self.schema.results(options))
        if no_batch or any(
            x is not None and row.axes == (("ends",),) for row, x in zip(self.rows, tensors)
        ):  # ends of sequences
            each = [self.op(*[x if d is None else x[n] for x, d in zip(batched, dims)], *rest) for n in range(count)]
            if not self.results:
                return None, None
            stacked = [self.torch.stack(parts) for parts in zip(*each)] if self.several else self.torch.stack(each)
        else:
            result = self.op(*folded, *rest)
            if not self.results:
                return None, None
            stacked = [_unfold(x, count) for x in result] if self.several else _unfold(result, count)
        return stacked, [0] * len(stacked) if self.several else 0

    def _sums_batches(self, name: str, ranks: dict[str, int], layout: str) -> bool:
        """Is this result a sum over batches? ranks: how many axes an argument has, without those that are mapped over."""
        row = self.schema.arguments[name]
        if row.like:
            return not _has_batch(self.schema.arguments[row.like], ranks[row.like], layout)
        return not all(_has_batch(row, len(axes), layout) for axes in row.axes)

    def _fold(self, row: Argument, x: Any, mapped: bool, count: int, layout: str) -> Any:
        """A tensor whose batch is `count` times as long; None if it has none, or was not given."""
        if x is None:
            return None
        if not _has_batch(row, x.dim() - mapped, layout):
            return None if mapped else x
        if not mapped:
            return x.expand(count, *x.shape).flatten(0, 1)
        if row.written:  # a view, or nothing: a copy would be written instead
            size, stride = x.shape, x.stride()
            return x.flatten(0, 1) if size[1] == 1 or stride[0] == size[1] * stride[1] else None
        return x.flatten(0, 1)


def _has_batch(row: Argument, rank: int, layout: str) -> bool:
    """Is the first of so many axes of this argument one of batches, or of sequences?"""
    first, *_ = row.choices(layout).get(rank, ("",))
    return first in ("batch", "sequences")


def _unfold(x: Any, count: int) -> Any:
    return x.unflatten(0, (count, x.shape[0] // count))
