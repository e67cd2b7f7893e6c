"""The gradients of a call: the sums of those of its subcalls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import attention

from .subcalls import ForwardCall, SubCall

OPTIONAL = "bias", "alibi", "aux"  # attention.backward computes their gradients on request


def slice_dlse(dlse: Any, rows: slice, heads: slice = slice(None)) -> Any:
    """The gradient of lse for some queries and heads; None if lse has no gradient."""
    return None if dlse is None else dlse[:, heads, rows]


@dataclass
class GradientAccumulator:
    """dq, dk, dv: sums in float32. others: by flat names (sink, bias, alibi, aux0 ..) this rank's part of the gradients of
    arrays that every rank has; the sum over ranks completes them. wanted: the flat names of arrays that need gradients. first:
    the first head of these arrays."""

    dq: Any
    dk: Any
    dv: Any
    wanted: Sequence[str]
    first: int = 0
    others: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def zeros(cls, q: Any, k: Any, v: Any, call: ForwardCall, wanted: Sequence[str]) -> GradientAccumulator:
        """Gradients of 0 for the arrays of a call."""
        dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
        sums = cls(dq, dk, dv, wanted, call.heads.start)
        for name, x in call.options.items():
            arrays = {f"aux{n}": one for n, one in enumerate(x)} if name == "aux" else {name: x}
            for flat, one in arrays.items():
                if flat in wanted:
                    sums.others[flat] = torch.zeros(one.shape, dtype=torch.float32, device=one.device)
        return sums

    def add(
        self,
        subcall: SubCall,
        call: ForwardCall,
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        dlse: Any,
        targets: Sequence[Any],
        accumulate: bool = True,
    ) -> None:
        """Add the gradients of a subcall of `call`, which has some of the heads. targets: the slices of dq, dk and dv to which
        they are added. accumulate: the kernel adds to them itself; this may select another kernel than one GPU would take, with
        other last bits."""
        options: dict[str, Any] = dict(subcall.options)
        differentiable = [name for name in OPTIONAL if name in options and any([x.startswith(name) for x in self.others])]
        has_sink, backward = "sink" in options, partial(attention.backward, dout, q, k, v, out, lse, dlse=dlse)
        if accumulate and not differentiable:
            results = dict(zip(("dq", "dk", "dv"), targets)) | (
                {"dsink": torch.zeros_like(options["sink"])} if has_sink else {}
            )
            other_gradients = backward(accumulate=True, **results, **options)[3:]
        else:
            requests: dict[str, Any] = {f"d{name}": True for name in differentiable if name != "aux"}
            if "aux" in differentiable:
                requests["daux"] = [x.is_floating_point() or None for x in options["aux"]]
            gradients = backward(**requests, **options)
            for total, x in zip(targets, gradients):
                total += x
            other_gradients = gradients[3:]
        names = [name for name in ("bias", "alibi") if name in differentiable] + ["sink"] * has_sink
        if "aux" in differentiable:
            names += [f"aux{n - subcall.has_offsets}" for n, x in enumerate(options["aux"]) if x.is_floating_point()]
        for name, x in zip(names, other_gradients, strict=True):
            if name in self.others:
                self._slice_of(name, subcall, call).add_(x)

    def _slice_of(self, name: str, subcall: SubCall, call: ForwardCall) -> Any:
        """The slice of an array's gradient that belongs to a subcall."""
        total, heads = self.others[name], slice(call.heads.start - self.first, call.heads.stop - self.first)
        if name in ("sink", "alibi"):
            return total[..., heads]
        if name == "bias":
            heads = heads if total.shape[1] > 1 else slice(None)
            rows = slice(subcall.bias_row, subcall.bias_row + len(subcall.rows)) if total.shape[2] > 1 else slice(None)
            return total[:, heads, rows, slice(*subcall.keys)]
        return total

    def results(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """dq, dk and dv, rounded once to the dtypes of q, k and v."""
        return self.dq.to(q.dtype), self.dk.to(k.dtype), self.dv.to(v.dtype)
