"""The plan of Based's gradients: those of linear attention with its 160 features as queries and keys, between the two kernels
of based_gradients.py."""

from ops.for_attention.taylor_features import FEATURES
from tiles.calls.plan import Fill, Plan, Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand
from tiles.launching.launch import kernel_for

from ..kernels.based_gradients import TOKENS, BasedFeatureGradients, BasedFeatures
from .normalizer_gradients import plan_normalized_gradients
from .recurrent_checks import DTYPES, is_varlen
from .recurrent_chunks import Arrays, ScratchAllocator, intern_value
from .token_loop_gradients import plan_linear_gradients

SQUARES = {"q": 1.0, "k": 0.5}  # what squares among features are multiplied by


def plan_based_gradients(problem: Problem, scale: float, normalize: bool, wants_state: bool, vector_bytes: int) -> Plan:
    """The Plan of a call of based_backward. wants_state: are the gradients of the initial state computed? vector_bytes: how
    many bytes a cp.async copies, 0 for TMA."""
    batch, length, heads, key_heads = problem("batch", "seqlen", "heads", "heads_k")
    names = ["dq", "dk", "dv", *["dinitial_state"] * wants_state, *["dinitial_z"] * (wants_state and normalize)]
    if not batch * length * heads:
        return Plan([Fill(x, 0.0) for x in map(problem.__getitem__, names) if 0 not in x.form.shape])
    scratch, dtype = ScratchAllocator(problem), DTYPES[problem.dtype]
    features, gradients = (
        {x: scratch(batch, length, key_heads, FEATURES, dtype=problem.dtype) for x in SQUARES} for _ in range(2)
    )
    arrays: Arrays = {"decay": None, "ddecay": None} | features
    arrays |= {name: problem[name] for name in ("dout", "v", "dv", "initial_state", "dstate", "initial_z")}
    arrays |= {name: problem[name] if name in names else None for name in ("dinitial_state", "dinitial_z")}
    arrays |= {"dq": gradients["q"], "dk": gradients["k"], "dfinal_z": problem["dz"]}
    # the same call, of linear attention
    wide = Problem(problem.schema, problem.forms, problem.extents | {"key_dim": FEATURES}, problem.bits, problem.layout)
    plan = plan_normalized_gradients if normalize else plan_linear_gradients
    tiles = -(-length // TOKENS)
    steps: list[Step] = []

    def launch(config, x: str, **more: Operand | int | None) -> Step:
        sizes = {"tiles": tiles, "heads": key_heads, "scale": scale if x == "q" else 1.0, "squares": SQUARES[x]}
        kernel = kernel_for(config, config, problem.device)
        return kernel.bind(batch * key_heads * tiles, gX=problem[x], **sizes, **more)

    steps += [launch(intern_value(BasedFeatures, dtype), x, gFeatures=features[x]) for x in SQUARES]
    steps += plan(wide, arrays, 1.0, vector_bytes, scratch)
    back = intern_value(BasedFeatureGradients, dtype, is_varlen(problem))
    for x in SQUARES:
        outputs = {"gDFeatures": gradients[x], "gDX": problem["d" + x], "gCuSeqlens": problem["cu_seqlens"]}
        steps.append(launch(back, x, length=length, **outputs))
    return Plan(steps, scratch.shapes)
