"""The states before chunks, which forward stores in training for gradients that read them (linear_gradient_walk.py,
channel_gradient_walk.py, shared_heads_gradients.py).

With T the bytes of an array of tokens, bf16 and H = Hk, Dk = Dv = 128: forward writes 2 T more (6 T instead of 4 T), and the
backward pass, which reads them among 9 T, need not read k and v and write the states first (4 T). So stored states save 2 T of
17 T, and cost 2 T of memory between the passes, where q, k and v are 3 T. That is why they are stored unless a caller says
otherwise."""

import sys
from typing import Any

from tiles.calls import jax_call, torch_op
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand
from tiles.launching.devices import machine

from ...families import AMPERE_FAMILY
from ...kernels.recurrent import channel_gradients_hopper
from ...kernels.recurrent.linear_gradients_hopper import KEY_DIMS, VALUES
from .recurrent_checks import has_channel_decay

MEMORY = STORED, RECOMPUTED = "states", "recompute"


def check_memory(memory: str) -> str:
    """`memory`, as a caller of attention.linear passed it. ValueError: it is not one of MEMORY."""
    if not isinstance(memory, str) or memory not in MEMORY:
        raise ValueError(f"memory: must be one of {MEMORY}: {memory=}")
    return memory


def choose_memory(memory: str, q: Any, v: Any, decay: Any, normalize: bool, family: str | None) -> str:
    """Whether forward stores the states for the backward pass, one of MEMORY: as the caller says, but only if its kernel can
    read them. The other arguments are those of attention.linear, checked or not."""
    shapes = [tuple(getattr(x, "shape", ())) for x in (q, v)]
    if memory == RECOMPUTED or family == AMPERE_FAMILY or any([len(shape) != 4 for shape in shapes]):
        return RECOMPUTED
    (*_, key_dim), (*_, value_dim) = shapes
    if len(getattr(decay, "shape", ())) == 4 and (
        normalize or key_dim <= channel_gradients_hopper.HALF or not str(decay.dtype).endswith("float32")
    ):
        return RECOMPUTED
    if key_dim > KEY_DIMS[-1] or value_dim > VALUES or not is_hopper(device_ordinal(q)):
        return RECOMPUTED
    return STORED


def device_ordinal(x: Any) -> int | None:
    """The CUDA ordinal of an array's device, None for host memory; for an array that JAX traces, that of the first device."""
    # asked in this order because most processes have no JAX, and the second question takes five functions
    if torch_op.imported_module("jax") is not None and not torch_op.is_compiling() and jax_call.is_jax_tracer(x):
        first = sys.modules["jax"].devices()[0]
        return None if first.platform == "cpu" else first.id
    device: Any = getattr(x, "device", None)
    return device.index if getattr(device, "type", None) == "cuda" else None


def is_hopper(ordinal: int | None) -> bool:
    """Is the device with this CUDA ordinal (None: host memory) a Hopper GPU?"""
    return machine(ordinal).target.is_hopper


is_hopper._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile does not look inside


def check_chunk_states(problem: Problem, keys: str = "q", values: str = "v") -> None:
    """ValueError: no gradients read the states before chunks of such a problem. keys, values: the names of two arguments with
    Dk and Dv channels."""
    key_dim, value_dim = problem("key_dim", "value_dim")
    gates = problem["decay"]
    if has_channel_decay(problem) and key_dim <= channel_gradients_hopper.HALF:
        message = f"with decays of channels takes Dk above {channel_gradients_hopper.HALF}: q.shape={problem.shape('q')}"
    elif has_channel_decay(problem) and gates and gates.form.dtype != "float32":
        message = f"with decays of channels takes float32 ones: decay.dtype={gates.form.dtype}"
    elif key_dim > KEY_DIMS[-1] or value_dim > VALUES:
        shapes = ", ".join([f"{name}.shape={problem.shape(name)}" for name in (keys, values)])
        message = f"takes Dk up to {KEY_DIMS[-1]} and Dv up to {VALUES}: {shapes}"
    else:
        return
    raise ValueError(f"return_chunk_states: {message}; without it {problem.member}_backward computes these states itself")


def merge_chunks(states: Operand) -> Operand:
    """The states before the chunks of all batches as a view (chunk, head, value, key), as kernels take them. ValueError: the
    strides allow no such view."""
    form = states.form
    batch, chunks, *state = form.shape
    batch_stride, *strides = form.strides
    if batch > 1 and batch_stride != chunks * strides[0]:
        raise ValueError(f"chunk_states: batches must follow each other: strides={form.strides} bytes, shape={form.shape}")
    return states._replace(form=form._replace(shape=(batch * chunks, *state), strides=tuple(strides)))
