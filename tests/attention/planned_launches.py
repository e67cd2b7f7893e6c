"""What a call would launch on a GPU that need not be there. Only planners run: tensors lie on torch's device "meta", which has
shapes and no memory, and launches are noted."""

import contextlib
import sys
from types import SimpleNamespace
from typing import NamedTuple

import torch

from tiles import device as devices
from tiles.arrays import Form
from tiles.program import Program

launching = sys.modules["tiles.launch"]
GPUS = {  # what planners ask of a GPU
    "H200": dict(capability=(9, 0), processors=132, cache_bytes=50 * 2**20, shared_bytes=227 * 1024, arch="sm_90a"),
    "A100": dict(capability=(8, 0), processors=108, cache_bytes=40 * 2**20, shared_bytes=163 * 1024, arch="sm_80"),
    "RTX 4090": dict(capability=(8, 9), processors=128, cache_bytes=72 * 2**20, shared_bytes=99 * 1024, arch="sm_89"),
}


class PlannedLaunch(NamedTuple):
    """A launch that was planned: its configuration, the arrays of the call by name, and what the kernel is told."""

    config: object
    arrays: dict
    call_options: dict


def form_of(x):
    """The Form of a tensor, also of one without memory, which lies at an address that TMA takes if its offset does."""
    size = x.element_size()
    strides = tuple([size * stride for stride in x.stride()])
    past = size * x.storage_offset() % 16 if x.is_meta else x.data_ptr() % 16
    return Form(tuple(x.shape), strides, str(x.dtype).removeprefix("torch."), None, size, past)


@contextlib.contextmanager
def noted(monkeypatch, gpu):
    """What is planned inside is noted in the list that this gives, for a GPU of this name. What comes back from calls is on no
    device, either."""
    found = []
    target = SimpleNamespace(**GPUS[gpu], ordinal=0)

    def kernel_for(family, config, ordinal):
        return SimpleNamespace(bind=lambda grid, **call_options: SimpleNamespace(config=config, call_options=call_options))

    def call(self, stream, arrays, options, layout="bshd"):
        given = {name: form_of(x) for name, x in zip(self.names, arrays) if x is not None}
        problem, plan, results = self.steps(given, None, options, layout)
        every = dict(zip(self.names, arrays))
        found.extend([PlannedLaunch(step.config, every, step.call_options) for step in plan.steps if hasattr(step, "config")])
        out = [every[name] if every.get(name) is not None else made(*problem.made(name)) for name in results]
        return out[0] if len(out) == 1 else tuple(out)

    with monkeypatch.context() as patched:
        patched.setattr(devices, "INTERPRETER", target)
        patched.setattr(Program, "__call__", call)
        for module in [m for name, m in sys.modules.items() if name.startswith("attention.")]:
            if getattr(module, "kernel_for", None) is launching.kernel_for:
                patched.setattr(module, "kernel_for", kernel_for)
        with torch.no_grad():
            yield found


def made(shape, dtype):
    """A tensor without memory."""
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
