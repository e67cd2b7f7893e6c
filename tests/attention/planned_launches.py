"""What a call would launch on a GPU that need not exist. Only planners run: tensors are on torch's device "meta", with shapes
and without memory, and launches are recorded."""

import contextlib
import sys
from types import SimpleNamespace
from typing import NamedTuple

import torch

from tiles.calls.program import Program
from tiles.launching import devices
from tiles.launching.arguments import declared
from tiles.launching.arrays import Form
from tiles.targets import AMPERE, HOPPER, Target

launching = sys.modules["tiles.launching.launch"]
GPUS = {  # what planners ask of a GPU
    "H200": dict(target=HOPPER, processors=132, cache_bytes=50 * 2**20, shared_bytes=227 * 1024, arch="sm_90a"),
    "A100": dict(target=AMPERE, processors=108, cache_bytes=40 * 2**20, shared_bytes=163 * 1024, arch="sm_80"),
    "RTX 4090": dict(target=Target(8, 9), processors=128, cache_bytes=72 * 2**20, shared_bytes=99 * 1024, arch="sm_89"),
}


class PlannedLaunch(NamedTuple):
    """A planned launch: its configuration, the call's arrays by name, and the kernel's arguments."""

    config: object
    arrays: dict
    kernel_args: dict


def form_of(x):
    """The Form of a tensor; one without memory gets an address that TMA supports if its offset does."""
    size = x.element_size()
    strides = tuple([size * stride for stride in x.stride()])
    past = size * x.storage_offset() % 16 if x.is_meta else x.data_ptr() % 16
    return Form(tuple(x.shape), strides, str(x.dtype).removeprefix("torch."), None, size, past)


@contextlib.contextmanager
def noted(monkeypatch, gpu):
    """Yields a list to which launches planned inside, for a GPU of this name, are appended. Results of calls have no memory
    either."""
    actual = []
    target = SimpleNamespace(**GPUS[gpu], ordinal=0)

    def kernel_for(family, config, ordinal):
        def bind(grid, **kernel_args):
            return SimpleNamespace(config=config, kernel_args=kernel_args)

        def bind_declared(grid, arrays, **numbers):
            kernel, _ = family.make(config)
            return bind(grid, **numbers, **{name: arrays[name] for name in declared(kernel.py_func) if name in arrays})

        return SimpleNamespace(bind=bind, bind_declared=bind_declared)

    def call(self, stream, arrays, options, layout="bshd"):
        inputs = {name: form_of(x) for name, x in zip(self.names, arrays) if x is not None}
        problem, plan, results = self.steps(inputs, None, options, layout)
        arrays_by_name = dict(zip(self.names, arrays))
        actual.extend(
            [PlannedLaunch(step.config, arrays_by_name, step.kernel_args) for step in plan.steps if hasattr(step, "config")]
        )
        out = [
            arrays_by_name[name] if arrays_by_name.get(name) is not None else made(*problem.result_form(name))
            for name in results
        ]
        return out[0] if len(out) == 1 else tuple(out)

    with monkeypatch.context() as patched:
        patched.setattr(devices, "INTERPRETER", target)
        patched.setattr(Program, "__call__", call)
        for module in [m for name, m in sys.modules.items() if name.startswith("attention.")]:
            if getattr(module, "kernel_for", None) is launching.kernel_for:
                patched.setattr(module, "kernel_for", kernel_for)
        with torch.no_grad():
            yield actual


def made(shape, dtype):
    """A tensor on the meta device."""
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
