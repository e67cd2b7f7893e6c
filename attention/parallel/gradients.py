"""The gradients of a call, as they come piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import attention

from .pieces import CallPiece, ForwardCall

LEARNED = "bias", "alibi", "aux"  # whose gradients attention.backward is asked for


def dlse_of(dlse: Any, rows: slice, heads: slice = slice(None)) -> Any:
    """The gradient of lse for some queries and heads; None if it has none."""
    return None if dlse is None else dlse[:, heads, rows]


@dataclass
class GradientAccumulator:
    """dq, dk, dv: in float32. others: by their flat names (sink, bias, alibi, aux0 ..) those of arrays that every rank has:
    this rank's share of them, which the ranks' sum completes. wanted: of which arrays, at least. first: the first of the heads
    that these have."""

    dq: Any
    dk: Any
    dv: Any
    wanted: Sequence[str]
    first: int = 0
    others: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def begin(cls, q: Any, k: Any, v: Any, call: ForwardCall, wanted: Sequence[str]) -> GradientAccumulator:
        """Of nothing yet."""
        dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
        found = cls(dq, dk, dv, wanted, call.heads.start)
        for name, x in call.options.items():
            arrays = {f"aux{n}": one for n, one in enumerate(x)} if name == "aux" else {name: x}
            for flat, one in arrays.items():
                if flat in wanted:
                    found.others[flat] = torch.zeros(one.shape, dtype=torch.float32, device=one.device)
        return found

    def add(
        self,
        part: CallPiece,
        call: ForwardCall,
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any,
        dlse: Any,
        into: Sequence[Any],
        accumulate: bool = True,
    ) -> None:
        """The gradients of a piece of a call of some heads; into: where those of its queries, keys and values are summed.
        accumulate: by the kernel, which may be another one then than one GPU would take, and give other last bits."""
        options: dict[str, Any] = dict(part.options)
        learned = [name for name in LEARNED if name in options and any([x.startswith(name) for x in self.others])]
        sinks, backward = "sink" in options, partial(attention.backward, dout, q, k, v, out, lse, dlse=dlse)
        if accumulate and not learned:
            places = dict(zip(("dq", "dk", "dv"), into)) | ({"dsink": torch.zeros_like(options["sink"])} if sinks else {})
            rest = backward(accumulate=True, **places, **options)[3:]
        else:
            asked: dict[str, Any] = {f"d{name}": True for name in learned if name != "aux"}
            if "aux" in learned:
                asked["daux"] = [x.is_floating_point() or None for x in options["aux"]]
            found = backward(**asked, **options)
            for total, x in zip(into, found):
                total += x
            rest = found[3:]
        names = [name for name in ("bias", "alibi") if name in learned] + ["sink"] * sinks
        if "aux" in learned:
            names += [f"aux{n - part.placed}" for n, x in enumerate(options["aux"]) if x.is_floating_point()]
        for name, x in zip(names, rest, strict=True):
            if name in self.others:
                self._place(name, part, call).add_(x)

    def _place(self, name: str, part: CallPiece, call: ForwardCall) -> Any:
        """Where the gradient of a piece belongs in that of a whole array."""
        total, mine = self.others[name], slice(call.heads.start - self.first, call.heads.stop - self.first)
        if name in ("sink", "alibi"):
            return total[..., mine]
        if name == "bias":
            heads = mine if total.shape[1] > 1 else slice(None)
            rows = slice(part.at, part.at + len(part.rows)) if total.shape[2] > 1 else slice(None)
            return total[:, heads, rows, slice(*part.keys)]
        return total

    def results(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """Those of q, k and v, rounded once."""
        return self.dq.to(q.dtype), self.dk.to(k.dtype), self.dv.to(v.dtype)
