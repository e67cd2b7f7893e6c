"""Inputs of the recurrent family as layers project them: gates before their formula, beta before its sigmoid, queries and keys
before they are divided by their L2 norms (attention.gates)."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from tiles.calls import jax_call, torch_op
from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import ALIGNMENT, Operand
from tiles.launching.launch import kernel_for
from tiles.launching.tensor_maps import STRIDE_END

from ... import gates
from ...gates import RawBeta, RawGate
from ...kernels.recurrent import copy_rows
from ...parts.recurrent.gate_formulas import BetaFormula, GateFormula, list_gates, make_gate_formula
from ...parts.recurrent.tokens import CHUNK
from ..requires_grad import requires_grad
from . import recurrent_checks
from .raw_gradients import evaluate_by_kernels, normalize_by_kernels
from .recurrent_checks import DTYPES
from .recurrent_chunks import Arrays, ScratchAllocator, intern_value

RAW_GATES = """
    gate     (batch, seqlen, heads)|(batch, seqlen, heads, key_dim)  real  optional
    A_log    (heads)                                                 real  optional
    dt_bias  (heads)|(heads, key_dim)                                real  optional
"""  # rows of a schema: what a gate is computed from


NO_RAW_GRADIENT = "raw gates, raw beta, qk_l2norm: evaluate them first, with attention.gates.evaluate and normalize"


class RawOptions(NamedTuple):
    """The formulas that kernels apply to a call's raw inputs. formula: the name of the gates' formula, "" if gates are passed;
    number: the formula's constant. beta_scale: beta is beta_scale sigmoid(x) of the x that is passed; 0: beta itself is passed.
    l2norm: are queries and keys divided by their L2 norms?"""

    formula: str = ""
    number: float = 0.0
    beta_scale: float = 0.0
    l2norm: bool = False

    @property
    def gate(self) -> GateFormula | None:
        """The formula of the gates for kernels, None if they are in memory."""
        return make_gate_formula(self.formula, self.number) if self.formula else None

    @property
    def beta(self) -> BetaFormula:
        """The object by which kernels compute beta from raw beta."""
        return intern_value(BetaFormula, self.beta_scale)


NOT_RAW = RawOptions()
RAW_TYPES = RawGate, RawBeta


class RawInputs(NamedTuple):
    """The inputs of a call that may be raw. decay: None if it is raw. gate: (x, A_log, dt_bias) of a raw decay. options: the
    formulas that kernels apply."""

    q: Any
    k: Any
    decay: Any
    beta: Any
    gate: tuple[Any, Any, Any]
    options: RawOptions


def is_raw(decay: Any, beta: Any = None, l2norm: Any = False) -> bool:
    """Is one of these raw, or are queries and keys to be normalised?"""
    return type(decay) in RAW_TYPES or type(beta) in RAW_TYPES or l2norm is not False


def split_raw(q: Any, k: Any, decay: Any, beta: Any, l2norm: bool, layout: str, other_arrays: Iterable[Any]) -> RawInputs:
    """The RawInputs of a call. If a tensor requires grad, or JAX traces the call, the framework evaluates the formulas, and
    kernels get gates and beta themselves. other_arrays: further arrays of the call, v first. ValueError: an array of a raw gate
    has too few axes, or too many. TypeError: a raw beta stands where a decay belongs, or the other way round."""
    if type(decay) is RawBeta:
        raise TypeError(f"decay: must be an array or a gate, gates.{list_gates()}, not gates.beta")
    if type(beta) is RawGate:
        raise TypeError(f"beta: must be an array or gates.beta, not a gate: gates.{beta.formula} belongs in decay")
    raw_gate, raw_beta = type(decay) is RawGate, type(beta) is RawBeta
    arrays = q, k, *other_arrays, *(decay.arrays if raw_gate else (decay,)), beta.x if raw_beta else beta
    if requires_grad(*arrays) or torch_op.is_mapped_with_grad(arrays) or any(map(jax_call.is_jax_tracer, arrays)):
        values, *_ = other_arrays
        if raw_gate:
            _check_gate(decay, len(getattr(values, "shape", ())))
        q, k = (normalize_by_kernels(x) for x in (q, k)) if l2norm else (q, k)
        decay = _in_float32(evaluate_by_kernels(decay, layout)) if raw_gate else decay
        beta = _in_float32(gates.evaluate(beta, layout)) if raw_beta else beta
        return RawInputs(q, k, decay, beta, (None, None, None), NOT_RAW)
    formula, number = (decay.formula, decay.number) if raw_gate else ("", 0.0)
    options = RawOptions(formula, number, beta.scale if raw_beta else 0.0, l2norm)
    gate = decay.arrays if raw_gate else (None, None, None)
    return RawInputs(q, k, None if raw_gate else decay, beta.x if raw_beta else beta, gate, options)


def refuse_raw(**arguments: Any) -> None:
    """TypeError: one of the arguments of a gradient is a raw gate or beta."""
    for name, x in arguments.items():
        if isinstance(x, (RawGate, RawBeta)):
            remedy = f"pass attention.gates.evaluate({name}), in float32, and take its own derivative by torch or JAX"
            raise TypeError(f"{name}: must be an array, not {type(x).__name__}: {remedy}")


def _check_gate(gate: RawGate, rank: int) -> None:
    """ValueError: x of the gate, or its dt_bias, has axes that no gate has. rank: how many v has."""
    if len(gate.shape) not in (rank - 1, rank):
        raise ValueError(f"decay: a raw gate must have the axes of v, or all but the last: gate.shape={gate.shape}")
    bias_shape = tuple(getattr(gate.dt_bias, "shape", ()))
    if len(bias_shape) > 1 and len(gate.shape) < rank:
        must = "must have no axis of channels if the gate has none"
        raise ValueError(f"dt_bias: {must}: dt_bias.shape={bias_shape}, gate.shape={gate.shape}")


def _in_float32(x: Any) -> Any:
    """An array that `evaluate` returned: NumPy's, which are float64, in float32."""
    return x.astype(np.float32) if isinstance(x, np.ndarray) else x


def gate_operand(problem: Problem) -> Operand | None:
    """The array of gates, or that of what they are computed from."""
    return problem["decay"] if "decay" in problem else problem["gate"]


def formula_arrays(problem: Problem) -> Arrays:
    """A_log and dt_bias by the names of kernels' parameters, with an axis of channels. ValueError: dt_bias has one, and the
    gate has none."""
    if "gate" not in problem:
        return {}
    A_log, dt_bias = problem["A_log"], problem["dt_bias"]
    if dt_bias and len(dt_bias.form.shape) > 1 and "key_dim" not in problem.axes("gate"):
        raise problem.error("dt_bias", "must have no axis of channels if the gate has none", "dt_bias", "gate")
    extent = max(CHUNK, *problem("key_dim", "value_dim"))
    bias_by_channel = dt_bias if dt_bias is None or len(dt_bias.form.shape) > 1 else dt_bias.spread(1, extent)
    return {"gA": A_log and A_log.spread(1, extent), "gDtBias": bias_by_channel}


def by_tma(problem: Problem, name: str) -> bool:
    """Can TMA address this array, or is there none?"""
    bits = problem.bits.get(name, 0)  # of strides, one that is negative or too large makes these so
    return 0 <= bits < STRIDE_END and bits % ALIGNMENT == 0


def prepare_rows(
    problem: Problem, scratch: ScratchAllocator, l2norm: bool, needs_tma: bool = True, channel_gates: bool = False
) -> tuple[list[Step], Arrays]:
    """(launches that copy arrays which kernels do not take as they are, the copies by the names of chunk kernels' parameters).
    With l2norm queries and keys are copied, divided by their L2 norms; with needs_tma all arrays that TMA cannot address, and
    gates among them with channel_gates."""
    steps: list[Step] = []
    copies: Arrays = {}
    misaligned = {name: needs_tma and not by_tma(problem, name) for name in ("q", "k", "v", *recurrent_checks.GATES)}

    def copy(arrays: dict[str, Operand], normalize: bool) -> None:
        step, copied = copy_arrays(problem, arrays, scratch, normalize)
        steps.append(step)
        copies.update(copied)

    if l2norm or misaligned["q"] or misaligned["k"]:
        copy({"gQ": problem["q"], "gK": problem["k"]}, l2norm)
    if misaligned["v"]:
        copy({"gV": problem["v"]}, False)
    gates = gate_operand(problem)
    if channel_gates and gates and (misaligned["decay"] or misaligned["gate"]):
        copy({"gGates": gates}, False)
    return steps, copies


def copy_arrays(
    problem: Problem, arrays: dict[str, Operand], scratch: ScratchAllocator, l2norm: bool = False
) -> tuple[Step, Arrays]:
    """(the launch that copies one or two arrays of the same shape to scratch memory, the copies by the same names). l2norm: are
    rows divided by their L2 norms?"""
    copies = [scratch(*x.form.shape, dtype=x.form.dtype) for x in arrays.values()]
    return launch_copies(problem, list(arrays.values()), copies, l2norm), dict(zip(arrays, copies))


def launch_copies(problem: Problem, sources: list[Operand], targets: list[Operand], l2norm: bool = False) -> Step:
    """The launch that copies one array (batch, token, head, column), or two of the same shape, to others, of which TMA can
    address each row. l2norm: are rows divided by their L2 norms?"""
    batch, length, heads, columns = sources[0].form.shape
    tiles, all_heads = -(-length // copy_rows.ROWS), heads * len(sources)
    config = intern_value(copy_rows.Config, columns, DTYPES[sources[0].form.dtype], l2norm)
    head_blocks = -(-all_heads // copy_rows.WARPS)
    return kernel_for(copy_rows, config, problem.device).bind(
        batch * tiles * head_blocks,
        gX=sources[0],
        gY=sources[1] if sources[1:] else None,
        gCopiedX=targets[0],
        gCopiedY=targets[1] if targets[1:] else None,
        tiles=tiles,
        head_blocks=head_blocks,
        heads=heads,
        all_heads=all_heads,
    )
