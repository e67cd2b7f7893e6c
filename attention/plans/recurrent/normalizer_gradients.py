"""The plan of the gradients of linear attention with normalize=True: the launches without a normalizer, between the two walks
of normalizer_gradients.py."""

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand, c_ordered
from tiles.launching.launch import kernel_for

from ...kernels.recurrent.normalizer_gradients import DIMS, NormalizerGradients, NormalizerSums
from ..partial_sums import sum_partials
from .recurrent_checks import DTYPES, is_varlen, pad_key_dim
from .recurrent_chunks import Arrays, ScratchAllocator, intern_value
from .recurrent_gradients import partial_gradients, spread_to_tokens, sum_heads, wants_value_heads
from .token_loop import decay_kind
from .token_loop_gradients import plan_linear_gradients


def plan_normalized_gradients(
    problem: Problem, arrays: Arrays, scale: float, vector_bytes: int, scratch: ScratchAllocator
) -> list[Step]:
    """The launches. The arguments are those of plan_chunk_gradients; arrays has initial_z, dfinal_z and dinitial_z, too."""
    batch, length, heads, key_heads, key_dim, value_dim = problem("batch", "seqlen", "heads", "heads_k", "key_dim", "value_dim")
    decay, gradient, dtype = arrays["decay"], arrays["ddecay"], DTYPES[problem.dtype]
    decays = decay_kind(decay)
    by_head = decay is not None and len(decay.form.shape) == 1
    decay = decay and spread_to_tokens(problem, decay)
    token_gradient = scratch(batch, length, heads) if by_head and gradient else gradient
    z, normalizers = scratch(batch, length, heads, key_dim), scratch(batch, length, heads)
    dnumerators = scratch(batch, length, heads, value_dim, dtype=problem.dtype)
    sums_heads = not wants_value_heads(arrays)
    dq, dk = (partial_gradients(problem, scratch) if sums_heads else arrays[name] for name in ("dq", "dk"))
    shared = {"length": length, "heads": heads, "group": heads // key_heads, "scale": scale}
    inputs: Arrays = {"gQ": arrays["q"], "gDecay": _with_channels(decay), "gInitialZ": arrays["initial_z"], "gZ": z}
    inputs |= {"gNormalizer": normalizers, "gCuSeqlens": problem["cu_seqlens"]}
    sizes = [pad_key_dim(dim, DIMS) for dim in (key_dim, value_dim)]
    sum_kernel = intern_value(NormalizerSums, dtype, *sizes, decays, is_varlen(problem))
    gradient_kernel = intern_value(NormalizerGradients, dtype, sizes[0], decays, gradient is not None, is_varlen(problem))
    sum_arrays: Arrays = {"gK": arrays["k"], "gDOut": arrays["dout"], "gDNumerator": dnumerators}
    sum_arrays |= inputs
    gradient_arrays: Arrays = {"gDQ": dq, "gDK": dk, "gDDecay": _with_channels(token_gradient), "gDFinalZ": arrays["dfinal_z"]}
    gradient_arrays |= inputs | {"gDInitialZ": arrays["dinitial_z"]}
    grid = problem.extents["sequences"] * heads
    linear_arrays = arrays | {"dout": dnumerators, "decay": decay, "ddecay": token_gradient, "dq": dq, "dk": dk}
    steps: list[Step] = []
    if problem.extents["sequences"]:
        steps = [
            kernel_for(sum_kernel, sum_kernel, problem.device).bind(grid, **sum_arrays, **shared),
            *plan_linear_gradients(problem, linear_arrays, scale, vector_bytes, scratch),
            kernel_for(gradient_kernel, gradient_kernel, problem.device).bind(grid, **gradient_arrays, **shared),
        ]
    if by_head and gradient:
        assert token_gradient is not None
        rows = token_gradient._replace(form=c_ordered((batch * length, heads), "float32", problem.device))
        steps.append(sum_partials(problem, rows, gradient))
    for name, partial in (("dq", dq), ("dk", dk)) if sums_heads else ():
        steps += sum_heads(problem, partial, arrays[name])
    return steps


def _with_channels(x: Operand | None) -> Operand | None:
    """An array (B, S, H) with an axis of one channel, (B, S, H, 1); others as they are."""
    return x.spread(3, 1) if x and len(x.form.shape) == 3 else x
