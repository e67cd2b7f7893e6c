"""Raw inputs in training: gates of channels and L2 norms are computed before the function that takes them, by programs with
gradients. They are members of the recurrent family that `split_raw` and attention.parallel alone call."""

import math
from typing import Any

from tiles.calls.plan import Plan, Step
from tiles.calls.program import program
from tiles.calls.schema import Problem, Schema
from tiles.calls.torch_op import imported_module
from tiles.launching.launch import kernel_for

from ... import gates
from ...gates import RawGate
from ...kernels.recurrent.channel_gate_values import PART, STRIP, WARPS, GateValueGradients, GateValues
from ...parts.recurrent.gate_formulas import make_gate_formula
from ...parts.recurrent.tokens import CHUNK
from ..partial_sums import sum_partials
from ..requires_grad import recurrent_autograd
from .gated_norm import plan_l2norm, plan_l2norm_gradients, serves
from .recurrent_checks import DTYPES
from .recurrent_chunks import Arrays, intern_value
from .recurrent_derivative import RecurrentDerivative, has_adjacent_rows, no_second_derivatives

ROWS = """
    x    (batch, seqlen, heads, head_dim)  tile
"""
L2NORM = Schema("l2norm", ROWS + "    out  (batch, seqlen, heads, head_dim)  tile  output")
L2NORM_BACKWARD = Schema(
    "l2norm_backward",
    "    dout  (batch, seqlen, heads, head_dim)  tile" + ROWS + "    dx  (batch, seqlen, heads, head_dim)  tile  output",
)
GATE = """
    gate     (batch, seqlen, heads, key_dim)  tile
    A_log    (heads)                          real  optional
    dt_bias  (heads)|(heads, key_dim)         real  optional
"""
GATE_GRADIENTS = """
    dgate     (batch, seqlen, heads, key_dim)  tile     output
    dA_log    (heads)                          float32  output  grads:dA_log
    ddt_bias  =dt_bias                         float32  output  grads:ddt_bias
"""
CHANNEL_GATES = Schema("channel_gates", GATE + "    out  (batch, seqlen, heads, key_dim)  float32  output")
CHANNEL_GATES_BACKWARD = Schema(
    "channel_gates_backward", GATE + "    dout  (batch, seqlen, heads, key_dim)  float32" + GATE_GRADIENTS
)


def normalize_by_kernels(x: Any) -> Any:
    """attention.gates.normalize of queries or keys (B, S, H, D) or (B, H, S, D), by kernels if these serve the array."""
    if not _is_tile_of_torch(x) or not serves(x.shape[-1]):
        return gates.normalize(x)
    if has_adjacent_rows(x):
        return recurrent_autograd().call_with_gradients("l2norm", (x,), ())
    if has_adjacent_rows(x.transpose(1, 2)):
        return recurrent_autograd().call_with_gradients("l2norm", (x.transpose(1, 2),), ()).transpose(1, 2)
    return gates.normalize(x)


def evaluate_by_kernels(gate: RawGate, layout: str) -> Any:
    """attention.gates.evaluate of a gate, by kernels if it is one of channels of torch."""
    if not _is_tile_of_torch(gate.x):
        return gates.evaluate(gate, layout)
    gates.check_parameters(gate, 2 if layout == "bshd" else 1)
    return recurrent_autograd().call_with_gradients("channel_gates", gate.arrays, (gate.formula, gate.number), layout)


def _is_tile_of_torch(x: Any) -> bool:
    """Is x a torch tensor of four axes, bfloat16 or float16?"""
    torch = imported_module("torch")
    return torch is not None and isinstance(x, torch.Tensor) and x.ndim == 4 and x.dtype in (torch.bfloat16, torch.float16)


@program(L2NORM_BACKWARD, no_gradient=no_second_derivatives("qk_l2norm"))
def _l2norm_backward(problem: Problem) -> Plan:
    """The Plan of the gradients of L2 norms."""
    return plan_l2norm_gradients(problem)


L2NORM_DERIVATIVE = RecurrentDerivative("l2norm", _l2norm_backward, "x", ("x",), of_rows=True)


@L2NORM_DERIVATIVE.make_program(L2NORM)
def _l2norm(problem: Problem) -> Plan:
    """The Plan that divides rows by their L2 norms."""
    return plan_l2norm(problem)


@program(CHANNEL_GATES_BACKWARD, no_gradient=no_second_derivatives("raw gates"))
def _channel_gates_backward(problem: Problem, formula: str, number: float, grads: str) -> Plan:
    """The Plan of the gradients of raw gates of channels. grads: which of "dA_log", "ddt_bias" are wanted."""
    batch, heads, columns = problem("batch", "heads", "key_dim")
    sizes, requested = _gate_sizes(problem), grads.split()
    strips, panels = sizes["strips"], sizes["panels"]
    bias = "" if "ddt_bias" not in requested else "channel" if len(problem.axes("dt_bias")) == 2 else "head"
    config = intern_value(
        GateValueGradients, DTYPES[problem.dtype], make_gate_formula(formula, number), "dA_log" in requested, bias
    )
    by_head, by_channel = (batch * strips * panels, heads), (heads, batch * strips, columns)
    shapes: dict[str, tuple[int, ...]] = {"gRateSums": by_head} if config.sums_rate else {}
    shapes |= {"gBiasSums": by_head} if bias == "head" else {"gChannelSums": by_channel} if bias else {}
    scratch = [(shape, "float32") for shape in shapes.values()]
    sums = {name: problem.scratch(n, *scratch[n]) for n, name in enumerate(shapes)}
    steps = list[Step]()
    if blocks := -(-batch * strips * heads * panels // WARPS):
        arrays = _gate_arrays(problem) | sums | {"gDGates": problem["dout"], "gDX": problem["dgate"]}
        steps.append(kernel_for(config, config, problem.device).bind(blocks, **arrays, **sizes))
    totals = {"gRateSums": "dA_log", "gBiasSums": "ddt_bias", "gChannelSums": "ddt_bias"}
    steps += [sum_partials(problem, x, problem[totals[name]]) for name, x in sums.items()]
    return Plan(steps, scratch)


CHANNEL_GATES_DERIVATIVE = RecurrentDerivative("channel_gates", _channel_gates_backward, "gate", ("gate",))


@CHANNEL_GATES_DERIVATIVE.make_program(CHANNEL_GATES)
def _channel_gates(problem: Problem, formula: str, number: float) -> Plan:
    """The Plan of raw gates of channels, as an array."""
    sizes = _gate_sizes(problem)
    blocks = -(-problem.extents["batch"] * math.prod(sizes.values()) // WARPS)
    if not blocks:
        return Plan([])
    config = intern_value(GateValues, DTYPES[problem.dtype], make_gate_formula(formula, number))
    launch = kernel_for(config, config, problem.device)
    return Plan([launch.bind(blocks, gOut=problem["out"], **_gate_arrays(problem), **sizes)])


def _gate_sizes(problem: Problem) -> dict[str, int]:
    """What kernels of gates' values take besides arrays: how a batch is divided into the parts of warps."""
    length, heads, columns = problem("seqlen", "heads", "key_dim")
    return {"strips": -(-length // STRIP), "panels": -(-columns // PART.cols), "heads": heads}


def _gate_arrays(problem: Problem) -> Arrays:
    """The arrays that gates are computed from, by the names of kernels' parameters: A_log and dt_bias (head, channel)."""
    extent = max(CHUNK, problem.extents["key_dim"])
    A_log, dt_bias = problem["A_log"], problem["dt_bias"]
    bias = dt_bias if dt_bias is None or len(dt_bias.form.shape) == 2 else dt_bias.spread(1, extent)
    return {"gX": problem["gate"], "gA": A_log and A_log.spread(1, extent), "gDtBias": bias}
