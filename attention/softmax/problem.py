"""One forward call, validated: what `attention.forward` was asked to compute, and nothing about how.

`check` raises before anything is launched. It is called when a form or an address is new (see tiles/plans.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, reduce
from numbers import Real
from operator import or_
from typing import Any, Protocol

import numpy as np

from tiles.arrays import FORMS, Array, Form, c_ordered, overlaps, overlaps_itself

AXES = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3)}  # where batch, sequence, head and column stand in the caller's axes
DTYPES = ("bfloat16", "float16")
PIECES = 16, 8, 4  # bytes that a kernel copies at once: base addresses and strides are multiples; TMA asks for the first
ALIGNMENT = PIECES[-1]
STRIDE_END = 2**40  # bytes: TMA's strides are less
SCALES = (2.0**-120, 2.0**120)  # float32 holds the scale, and the scale times log2(e)


class Strided(Protocol):
    """A problem of any kind: `strides` has all bits that any stride has, but for those of columns."""

    @property
    def strides(self) -> int: ...


class Placed(Protocol):
    """Likewise: `device` is the CUDA ordinal of the GPU that all its arrays lie on, None being host memory."""

    @property
    def device(self) -> int | None: ...


@dataclass(frozen=True, eq=False)
class Problem:
    """The forward problem of a call. Equal calls share one object, so it is compared and hashed by identity.

    Strides are in bytes and in (batch, sequence, head, column) order whatever `layout` says; an axis of extent 1, whose
    stride nobody uses, is given that of one row. heads_q is a multiple of heads_kv: query head h reads h // group.
    """

    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_kv: int
    head_dim: int
    dtype: str
    causal: bool
    scale: float
    layout: str
    device: int | None
    out_shape: tuple[int, ...]  # in the caller's axes, as are all shapes in messages
    q_strides: tuple[int, ...]
    k_strides: tuple[int, ...]
    v_strides: tuple[int, ...]
    out_strides: tuple[int, ...]
    strides: int  # all bits that any of them has, but for those of columns

    @property
    def group(self) -> int:
        """Query heads that share a key head: 1 is MHA, heads_q is MQA."""
        return self.heads_q // self.heads_kv

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        """lse is float32 and C-ordered in both layouts."""
        return self.batch, self.heads_q, self.seqlen_q

    @property
    def trivial(self) -> bool:
        """Nothing to launch: no row of out, or no key, and then out = 0 and lse = -inf (see arrays.fill)."""
        return 0 in self.out_shape or self.seqlen_kv == 0


def check(
    q: Array,
    k: Array,
    v: Array,
    out: Array | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    layout: str = "bshd",
) -> Problem:
    """The Problem of these arguments, out being what the caller passed, if anything.

    q, out: (B, Sq, Hq, D); k, v: (B, Sk, Hkv, D), for layout="bshd"; sequence and head swapped for "bhsd". All bfloat16
    or all float16, on one device, D a multiple of 8 up to 256, last axis contiguous, base and strides multiples of 4
    bytes. Inputs may overlap each other; out may be q itself and must otherwise lie apart. Raises ValueError or
    TypeError that names the argument and prints the values.
    """
    causal, scale = options(causal, scale)
    if not isinstance(layout, str):
        raise TypeError(f"layout: must be one of {tuple(AXES)}: {layout=}")
    problem = _problem(q.form, k.form, v.form, None if out is None else out.form, causal, scale, layout)
    if (q.pointer | k.pointer | v.pointer | (0 if out is None else out.pointer)) % ALIGNMENT:
        require(alignment_rules({"q": q, "k": k, "v": v, "out": out}))
    if out is not None and (out.readonly or overlaps(out, k) or overlaps(out, v) or overlaps(out, q)):
        require(_apart(q, k, v, out, problem))
    return problem


def options(causal: Any, scale: Any) -> tuple[bool, float | None]:
    """A bool, and a float or None: equal ones now mean the same. TypeError: causal is no bool, or scale is no number."""
    if isinstance(causal, np.bool_):
        causal = bool(causal)
    if causal is not True and causal is not False:
        raise TypeError(f"causal: must be a bool: {causal=}")
    if scale is None or type(scale) is float:
        return causal, scale
    if not isinstance(scale, Real) or isinstance(scale, bool):
        raise TypeError(f"scale: must be a number or None: {scale=}")
    return causal, float(scale)


def conversion(dtype: str) -> str:
    """What makes 2-byte elements of wider ones, to end a message with; empty for all that is no such float."""
    return "; convert it: x.astype(tiles.bf16.np), or torch's x.bfloat16()" if dtype in ("float32", "float64") else ""


def piece(problem: Strided, *pointers: int) -> int:
    """The bytes that all base addresses and strides are multiples of: 16, 8 or 4."""
    bits = problem.strides
    for pointer in pointers:
        bits |= pointer
    return next(size for size in PIECES if bits % size == 0)


Rule = tuple[bool, type[Exception], str]  # (holds, the error if it does not, its message)


def require(rules: Iterator[Rule]) -> None:
    """Raise the first rule's error that does not hold. Rules are lazy: one may rely on those before it."""
    for holds, error, message in rules:
        if not holds:
            raise error(message)


@lru_cache(FORMS)
def _problem(q: Form, k: Form, v: Form, out: Form | None, causal: bool, scale: float | None, layout: str) -> Problem:
    forms = {"q": q, "k": k, "v": v} | ({} if out is None else {"out": out})
    require(_shape_rules(forms, layout))
    require(memory_rules(forms))
    batch, seqlen_q, heads_q, head_dim = (q.shape[axis] for axis in AXES[layout])
    _, seqlen_kv, heads_kv, _ = (k.shape[axis] for axis in AXES[layout])
    scale = head_dim**-0.5 if scale is None else scale
    if not SCALES[0] <= scale <= SCALES[1]:  # a masked score is -inf, and must be -inf when scaled
        raise ValueError(f"scale: must be positive, and finite in float32: {scale=}")
    out = out or c_ordered(q.shape, q.dtype, q.device)
    of_q, of_k, of_v, of_out = strides = [_strides(x, layout) for x in (q, k, v, out)]
    sizes = batch, heads_q, heads_kv, seqlen_q, seqlen_kv, head_dim
    bits = reduce(or_, (stride for one in strides for stride in one[:-1]))
    return Problem(*sizes, q.dtype, causal, scale, layout, q.device, q.shape, of_q, of_k, of_v, of_out, bits)


def _shape_rules(forms: dict[str, Form], layout: str) -> Iterator[Rule]:
    """dtypes, devices and shapes: what the formula asks."""

    def values(field: str, *names: str) -> str:
        return ", ".join(f"{name}.{field}={getattr(forms[name], field)!r}" for name in names)

    yield layout in AXES, ValueError, f"layout: must be one of {tuple(AXES)}: {layout=}"
    for name, x in forms.items():
        rank = f"{name}: must have 4 axes, {', '.join(layout.upper())}: {values('shape', name)}"
        yield len(x.shape) == 4, ValueError, rank
        dtypes = f"{name}: dtype must be one of {DTYPES}: {values('dtype', name)}{conversion(x.dtype)}"
        yield x.dtype in DTYPES, TypeError, dtypes
    for name in list(forms)[1:]:
        dtypes, devices = values("dtype", name, "q"), values("device", name, "q")
        yield forms[name].dtype == forms["q"].dtype, TypeError, f"{name}: dtype must be q's: {dtypes}"
        elsewhere = f"{name}: must lie where q does (None: host memory): {devices}"
        yield forms[name].device == forms["q"].device, ValueError, elsewhere

    (batch, seqlen_q, heads_q, head_dim), (batch_kv, seqlen_kv, heads_kv, head_dim_kv) = (
        [forms[name].shape[axis] for axis in AXES[layout]] for name in "qk"
    )
    both = values("shape", "k", "q")
    valid = head_dim % 8 == 0 and 8 <= head_dim <= 256
    yield valid, ValueError, f"q: head_dim must be a multiple of 8, from 8 to 256: {head_dim=}, {values('shape', 'q')}"
    yield head_dim_kv == head_dim, ValueError, f"k: head_dim must equal q's: {both}"
    yield batch_kv == batch, ValueError, f"k: batch must equal q's: {both}"
    yield forms["v"].shape == forms["k"].shape, ValueError, f"v: shape must equal k's: {values('shape', 'v', 'k')}"
    yield heads_kv > 0, ValueError, f"k: must have at least one head: {values('shape', 'k')}"
    yield heads_q % heads_kv == 0, ValueError, f"q: heads must be a multiple of k's: {heads_q=}, {heads_kv=}, {both}"
    for name, length in (("q", seqlen_q), ("k", seqlen_kv)):
        yield length < 2**31, ValueError, f"{name}: sequence must be shorter than 2**31: {values('shape', name)}"
    if "out" in forms:
        fits = forms["out"].shape == forms["q"].shape
        yield fits, ValueError, f"out: shape must equal q's: {values('shape', 'out', 'q')}"


def memory_rules(forms: Mapping[str, Form]) -> Iterator[Rule]:
    """Strides of arrays that are moved as tiles: what a kernel can address."""
    for name, x in forms.items():
        if x.extent == 0:
            continue
        seen = f"{name}.strides={x.strides} bytes, {name}.shape={x.shape}"
        yield x.strides[-1] == x.itemsize, ValueError, f"{name}: last axis must be contiguous: {seen}"
        used = [stride for stride, n in zip(x.strides, x.shape) if n > 1][:-1]
        aligned = all(stride % ALIGNMENT == 0 for stride in used)
        yield aligned, ValueError, f"{name}: strides must be multiples of {ALIGNMENT} bytes: {seen}"
        # The driver's manual does not say that a tensor map may have a stride of 0: broadcast axes are refused for now.
        in_range = all(0 < stride < STRIDE_END for stride in used)
        hint = "pass shared heads once (GQA), and copy other broadcast or flipped axes"
        yield in_range, ValueError, f"{name}: strides must be positive and below 2**40 bytes ({hint}): {seen}"
        if name == "out":
            yield not overlaps_itself(x), ValueError, f"out: its elements must not overlap each other: {seen}"


def alignment_rules(arrays: Mapping[str, Array | None]) -> Iterator[Rule]:
    """Addresses, likewise."""
    for name, array in arrays.items():
        if array is not None and array.form.extent:
            message = f"{name}: must start at a multiple of {ALIGNMENT} bytes: address {array.pointer:#x}"
            yield array.pointer % ALIGNMENT == 0, ValueError, message


def _apart(q: Array, k: Array, v: Array, out: Array, problem: Problem) -> Iterator[Rule]:
    yield not out.readonly, ValueError, f"out: must be writable, and this {type(out.owner).__name__} is read-only"
    in_place = out.pointer == q.pointer and problem.out_strides == problem.q_strides
    for name, array in ({"k": k, "v": v} | ({} if in_place else {"q": q})).items():
        where = f"out at {out.pointer:#x}, {name} at {array.pointer:#x}, {out.shape=}, {name}.shape={array.shape}"
        yield not overlaps(out, array), ValueError, f"out: must not overlap {name}: {where}"


def _strides(x: Form, layout: str) -> tuple[int, ...]:
    """Canonical strides; for a broken-off axis (extent 1, or an empty array) those of one row, which TMA accepts."""
    row = x.shape[-1] * x.itemsize
    axes = [(x.shape[axis], x.strides[axis]) for axis in AXES[layout][:3]]
    return *(stride if n > 1 and x.extent else row for n, stride in axes), x.itemsize
