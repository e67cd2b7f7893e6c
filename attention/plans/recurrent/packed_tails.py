"""The launches around kernels that read and write the tails of packed sequences (kernels/recurrent/packed_tails.py)."""

from collections.abc import Sequence

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand
from tiles.launching.launch import kernel_for

from ...kernels.recurrent import packed_tails
from ...parts.recurrent.tokens import CHUNK
from .recurrent_checks import DTYPES, is_varlen, pad_key_dim
from .recurrent_chunks import Arrays, ScratchAllocator, intern_value

NameGroups = Sequence[tuple[str, ...]]  # the names of what one launch copies: an array, or two of the same shape
INPUTS: NameGroups = (("gQ", "gK"), ("gV", "gDOut"))
KEY_GRADIENTS: NameGroups = (("gDQ", "gDK"),)
VALUE_GRADIENTS: NameGroups = (("gDV",),)
VALUE_RESULTS: NameGroups = (("gO",),)
GRADIENTS: NameGroups = (*KEY_GRADIENTS, *VALUE_GRADIENTS)


def plan_tails(
    problem: Problem,
    arrays: Arrays,
    scratch: ScratchAllocator,
    inputs: NameGroups,
    results: NameGroups,
    beta_gradient: Operand | None = None,
) -> tuple[list[Step], list[Step]]:
    """(launches that copy the tails of packed inputs, launches that copy the tails of results back), if sequences are packed.
    arrays: those of tokens, by the names of parameters; their tails are added to it. beta_gradient becomes 0 where no sequence
    is, by the launch for the last of the results, which has as many heads."""
    tails_of = {name: f"gTail{name[1:]}" for names in (*inputs, *results) for name in names}
    arrays |= dict.fromkeys(tails_of.values())
    if not is_varlen(problem):
        return [], []
    sequences = problem.extents["sequences"]
    steps: dict[bool, list[Step]] = {False: [], True: []}
    for copies_back, names in [*((False, names) for names in inputs), *((True, names) for names in results)]:
        operands_by_name = {name: x for name in names for x in [arrays[name]] if x}
        if not operands_by_name:
            continue
        form = operands_by_name[names[0]].form
        operands = list(operands_by_name.values())
        length, heads, columns = form.shape[1:]
        tails = [scratch(sequences, CHUNK, heads, columns, dtype=form.dtype) for _ in operands_by_name]
        arrays |= {tails_of[name]: x for name, x in zip(operands_by_name, tails, strict=True)}
        config = intern_value(packed_tails.Config, pad_key_dim(columns, packed_tails.COLUMNS), DTYPES[form.dtype], copies_back)
        all_heads = heads * len(operands_by_name)
        head_blocks = -(-all_heads // packed_tails.WARPS)
        step = kernel_for(packed_tails, config, problem.device).bind(
            sequences * packed_tails.PARTS * head_blocks,
            gX=operands[0],
            gY=operands[-1],
            gTailX=tails[0],
            gTailY=tails[-1],
            gTokens=beta_gradient if copies_back and names == results[-1] else None,
            gCuSeqlens=problem["cu_seqlens"],
            length=length,
            head_blocks=head_blocks,
            heads=heads,
            all_heads=all_heads,
        )
        steps[copies_back].append(step)
    return steps[False], steps[True]
