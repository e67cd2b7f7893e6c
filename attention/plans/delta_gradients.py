"""The plan of the delta rule's gradients token by token (delta_gradient_token_loop.py): four walks, and small kernels for gates
and for what is added up."""

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.launch import kernel_for

from ..kernels import delta_gradient_token_loop
from ..kernels.linear_token_loop import MAX_GRID_YZ, WARPS
from .recurrent_checks import is_varlen
from .recurrent_chunks import SWAP_STATE_AXES, Arrays, ScratchAllocator
from .recurrent_gradients import partial_gradients, spread_to_tokens, sum_heads
from .token_loop_gradients import sum_gates_by_token


def plan_delta_token_loop(problem: Problem, arrays: Arrays, scale: float, scratch: ScratchAllocator) -> list[Step]:
    """The launches for the gradients of the delta rule. arrays: those of delta_rule_backward by their names, None for a
    gradient that is not wanted."""
    batch, length, heads, value_dim, key_dim, sequences = problem(
        "batch", "seqlen", "heads", "value_dim", "key_dim", "sequences"
    )
    if max(heads, sequences) > MAX_GRID_YZ:
        raise ValueError(f"q: must have at most {MAX_GRID_YZ} heads and sequences: {heads=}, {sequences=}")
    wants_gates = arrays["ddecay"] is not None
    errors, du = (scratch(batch, length, heads, value_dim) for _ in range(2))
    partial: Arrays = {"dq": partial_gradients(problem, scratch), "dk": scratch(batch, length, 2 * heads, key_dim)}
    states = {name: arrays[name] for name in ("initial_state", "dstate", "dinitial_state")}
    swapped = {name: x and x.permuted(SWAP_STATE_AXES) for name, x in states.items()}
    last_state = scratch(sequences, heads, value_dim, key_dim) if wants_gates and arrays["dstate"] else None
    inputs = {"gQ": arrays["q"], "gK": arrays["k"], "gV": arrays["v"], "gDOut": arrays["dout"], "gBeta": arrays["beta"]}
    inputs |= {"gErrors": errors, "gDU": du, "gDV": arrays["dv"], "gDBeta": arrays["dbeta"]}
    inputs |= {"gDQ": partial["dq"], "gDK": partial["dk"]}
    ends = {  # of the states of each walk
        "errors": (states["initial_state"], None),
        "values": (states["dstate"], states["dinitial_state"]),
        "queries": (swapped["initial_state"], last_state),
        "keys": (swapped["dstate"], None),
    }
    steps = [
        _walk(problem, walk, scale, inputs | {"gInitialState": first, "gFinalState": last}, arrays)
        for walk, (first, last) in ends.items()
    ]
    if wants_gates:
        steps.append(sum_gates_by_token(problem, arrays, partial, last_state, swapped["dstate"], delta=True))
    steps += sum_heads(problem, partial["dq"], arrays["dq"])
    return [*steps, *sum_heads(problem, partial["dk"], arrays["dk"], parts=2)]


def _walk(problem: Problem, walk: str, scale: float, inputs: Arrays, arrays: Arrays) -> Step:
    """The launch of one of the four walks. inputs: its arrays by the names of the kernel's parameters, without the decays."""
    length, heads, key_heads, sequences = problem("seqlen", "heads", "heads_k", "sequences")
    rows, columns = problem("key_dim", "value_dim")
    if walk in ("queries", "keys"):
        rows, columns = columns, rows
    decay, kind = arrays["decay"], ""
    if decay is not None:
        kind = "channel" if len(decay.form.shape) == 4 else "token"
        decay = decay if kind == "channel" else spread_to_tokens(problem, decay)
    config = delta_gradient_token_loop.Config(walk, rows, kind, is_varlen(problem))
    parts = -(-columns // delta_gradient_token_loop.WARP_COLUMNS)
    blocks = parts if config.splits_rows else -(-parts // WARPS)
    return kernel_for(delta_gradient_token_loop, config, problem.device).bind(
        (blocks, heads, sequences),
        parts=parts,
        group=heads // key_heads,
        length=length,
        scale=scale,
        gDecay=decay,
        gCuSeqlens=problem["cu_seqlens"],
        **inputs,
    )
