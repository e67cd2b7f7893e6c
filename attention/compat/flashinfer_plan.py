"""What FlashInfer's wrappers (flashinfer.py) share: options computed by `plan`, and checks of the arrays of `run`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from .arguments import array_namespace, drop_none, refuse


class PlannedWrapper:
    """The base of all wrappers. planned: the options of attention's function that `plan` has computed; None before."""

    def __init__(self, float_workspace_buffer: Any, kv_layout: str, use_cuda_graph: bool, jit_args: Any):
        if kv_layout not in ("NHD", "HND"):
            raise ValueError(f"kv_layout: must be NHD or HND: {kv_layout=}")
        refuse("jit_args", jit_args is not None, "attention.decode(.., mask=, score=, aux=) takes functions in Python")
        self.workspace, self.heads_first, self.graph = float_workspace_buffer, kv_layout == "HND", use_cuda_graph
        self.graph_arrays: dict[str, Any] = {}  # the arrays that CUDA graphs have captured
        self.planned: dict[str, Any] | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}  # the last axes that q, k and v must have
        self.dtypes: dict[str, str] = {}  # their dtypes, if `plan` named them
        self.tokens = 0  # tokens of q

    def end_forward(self) -> None:
        """Does nothing: FlashInfer's older versions free their buffers here."""

    def hold_for_graph(self, name: str, array: Any) -> Any:
        """The array that `run` will read; with CUDA graphs a copy at an address that stays the same in later plans."""
        if not self.graph:
            return array
        copy = self.graph_arrays.get(name)
        if copy is None:  # a copy: the caller's own array must not change in a later plan
            copy = self.graph_arrays[name] = array.clone() if hasattr(array, "clone") else array.copy()
            return copy
        if copy.shape != array.shape:
            raise ValueError(f"{name}: must have the same shape in every plan of a graph: {array.shape}, {copy.shape}")
        copy[...] = array
        return copy

    def score_options(
        self,
        causal: bool,
        sm_scale: float | None,
        window_left: int,
        logits_soft_cap: float | None,
        pos_encoding_mode: str,
        head_dim: int,
    ) -> dict[str, Any]:
        """attention's options for these arguments."""
        refuse("pos_encoding_mode", pos_encoding_mode != "NONE", "pass q and k rotated, or attention.decode(.., alibi=)")
        window = None if window_left < 0 else (window_left, None)
        scale = head_dim**-0.5 if sm_scale is None else sm_scale
        return {"causal": causal, "scale": scale} | drop_none(window=window, softcap=logits_soft_cap or None)

    def record_expected(
        self,
        heads: int,
        kv_heads: int,
        columns: int,
        columns_v: int | None,
        tokens: int,
        q_type: Any,
        kv_type: Any,
        o_type: Any,
    ) -> None:
        """Remember the heads, head dims, tokens and dtypes that `plan` was called with, for check_arrays. ValueError: heads do
        not divide."""
        if kv_heads < 1 or heads % kv_heads:
            raise ValueError(f"num_qo_heads: must be a multiple of num_kv_heads: {heads=}, {kv_heads=}")
        self.tokens, of_values = tokens, columns_v or columns
        self.shapes = {"q": (heads, columns), "k": (kv_heads, columns), "v": (kv_heads, of_values)}
        named = {"q": q_type, "k": kv_type or q_type, "v": kv_type or q_type, "out": o_type}
        self.dtypes = {name: _dtype(x) for name, x in named.items() if x is not None}

    def check_arrays(self, q: Any, k: Any, v: Any, size: tuple[int, ...] = ()) -> None:
        """ValueError: an array of `run` does not match `plan`. size: (page size,) for caches, () otherwise."""
        rows = q.shape[0]
        if rows != self.tokens and not (self.graph and rows > self.tokens):
            raise ValueError(f"q: must have the {self.tokens} tokens that were planned: q.shape={tuple(q.shape)}")
        for name, x in ("q", q), ("k", k), ("v", v):
            planned = (*(() if name == "q" else size), *self.shapes[name])
            if x.shape[1:] != planned:
                axes = ("num_qo_heads" if name == "q" else "num_kv_heads"), ("head_dim_vo" if name == "v" else "head_dim")
                axes_text = ", ".join(("page_size", *axes)[-len(planned) :])
                raise ValueError(
                    f"{name}: must have ({axes_text}) = {planned}, as in plan, in its last axes: {name}.shape={tuple(x.shape)}"
                )
            if name in self.dtypes and _dtype(x.dtype) != self.dtypes[name]:
                argument = "q_data_type" if name == "q" else "kv_data_type"
                raise ValueError(f"{name}: must be {self.dtypes[name]}, the {argument} of plan: {name}.dtype={x.dtype}")
        planned_dtype, dtype = self.dtypes.get("out"), _dtype(q.dtype)
        if planned_dtype not in (None, dtype):
            refuse("o_data_type", True, f"out has q's dtype, {dtype}, and o_data_type={planned_dtype} was planned: convert it")

    def page_options(self, indptr: Any, indices: Any, last_page_len: Any, size: int, prefix: str = "") -> dict[str, Any]:
        """decode's pages and lengths. prefix: of these arguments' names in errors. ValueError: the arguments do not match each
        other."""
        ends = read_indptr(f"{prefix}indptr", indptr, indices, f"{prefix}indices")
        name = f"{prefix}last_page_len"
        last, counts = _read_integers(name, last_page_len), np.diff(ends)
        if last.shape != counts.shape:
            raise ValueError(f"{name}: must have a number for each of {prefix}indptr's {len(counts)} sequences: {len(last)}")
        if (over := (counts > 0) & ((last < 0) | (last > size))).any():
            b = int(over.argmax())
            raise ValueError(f"{name}: must be from 0 to page_size={size}: {name}[{b}]={last[b]}")
        self.page_size = size
        xp, (indptr, last) = array_namespace(indices), (to_device_of(x, indices) for x in (indptr, last_page_len))
        lengths = ((indptr[1:] - indptr[:-1] - 1) * size + last).clip(0)
        batch, longest = len(counts), int(counts.max(initial=0))
        entries = indptr[:-1, None] + to_device_of(xp.arange(longest, dtype=indptr.dtype), indices)[None]
        table = indices[entries.clip(0, max(0, len(indices) - 1))]  # entries beyond a sequence's own pages are never read
        if self.graph:
            workspace = self.workspace.reshape(-1).view(xp.int32)
            width = len(workspace) // max(1, batch)
            if longest > width:
                raise ValueError(f"float_workspace_buffer: has room for {width} pages of each of {batch} sequences: {longest}")
            pages = workspace[: batch * width].reshape(batch, width)
            pages[:, :longest] = table
            table = pages
        return {"pages": table, "lengths": self.hold_for_graph("lengths", lengths)}

    def split_caches(self, q: Any, paged_kv_cache: Any) -> tuple[Any, Any]:
        """(k, v), as (pages, page size, Hk, D), for these queries. ValueError: they do not match `plan`."""
        k, v = paged_kv_cache if isinstance(paged_kv_cache, (tuple, list)) else (paged_kv_cache[:, 0], paged_kv_cache[:, 1])
        k, v = (k.swapaxes(1, 2), v.swapaxes(1, 2)) if self.heads_first else (k, v)
        if len(k.shape) == 4 and k.shape[1] != self.page_size:
            planned = f"page_size={self.page_size} and {'HND' if self.heads_first else 'NHD'} were planned"
            raise ValueError(f"paged_kv_cache: has pages of {k.shape[1]} tokens, and {planned}")
        self.check_arrays(q, k, v, (self.page_size,))
        return k, v

    def merge_options(self, q_scale: Any, k_scale: Any, window_left: int | None, sinks: Any) -> dict[str, Any]:
        """The planned options, updated with the arguments of `run`. RuntimeError: `plan` was not called."""
        if self.planned is None:
            raise RuntimeError("run: plan must be called first")
        for name, factor in ("q_scale", q_scale), ("k_scale", k_scale):
            refuse(name, not (factor is None or isinstance(factor, (int, float))), "it must be a number")
        planned: dict[str, Any] = self.planned | drop_none(sink=sinks)
        if window_left is not None:
            planned["window"] = None if window_left < 0 else (window_left, None)
        return planned | {"scale": planned["scale"] * (q_scale or 1.0) * (k_scale or 1.0)}


def _read_integers(name: str, x: Any) -> np.ndarray:
    """A small array of integers, copied to host memory, for which the host waits. TypeError: it is not one."""
    if not hasattr(x, "shape"):
        raise TypeError(f"{name}: must be an array of int32: {name}={x!r:.60}")
    array = np.asarray(x.cpu() if hasattr(x, "cpu") else x.get() if hasattr(x, "get") else x)
    if array.ndim != 1 or array.dtype.kind != "i":
        raise TypeError(
            f"{name}: must be an array of int32 with one axis: {name}.shape={array.shape}, {name}.dtype={array.dtype}"
        )
    return array


def read_indptr(name: str, indptr: Any, indexed: Any = None, its_name: str = "") -> np.ndarray:
    """indptr in host memory: where each sequence begins and ends in `indexed`. ValueError: it does not rise from 0, or ends
    beyond len(indexed)."""
    ends = _read_integers(name, indptr)
    if not len(ends) or ends[0] or (np.diff(ends) < 0).any():
        raise ValueError(f"{name}: must begin with 0 and not fall: {name}={np.array2string(ends, threshold=8)}")
    if its_name and ends[-1] > len(indexed):
        raise ValueError(f"{name}: must not end after {its_name}: {name}[-1]={ends[-1]}, len({its_name})={len(indexed)}")
    return ends


def read_indptr_like(name: str, indptr: Any, other_name: str, other: Any) -> np.ndarray:
    """read_indptr, and ValueError if it does not have as many entries as `other`."""
    ends = read_indptr(name, indptr)
    if len(ends) != len(other):
        raise ValueError(f"{name}: must have as many ends as {other_name}: len({name})={len(ends)}, {len(other)}")
    return ends


@functools.lru_cache
def _dtype(x: Any) -> str:
    """The name of a dtype, which is torch's, NumPy's, or a string, as FlashInfer takes it."""
    name = x if isinstance(x, str) else str(x) if type(x).__module__ == "torch" else np.dtype(x).name
    return {"half": "float16"}.get(name := name.removeprefix("torch."), name)


def to_device_of(x: Any, like: Any) -> Any:
    """x on the device of `like`."""
    return x.to(like.device) if array_namespace(like).__name__ == "torch" else x
