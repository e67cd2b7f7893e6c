"""The launches around kernels that read and write the tails of packed sequences (kernels/packed_tails.py)."""

from collections.abc import Sequence

from tiles.calls.plan import Step
from tiles.calls.schema import Problem
from tiles.launching.launch import kernel_for

from ..kernels import packed_tails
from ..parts.recurrent.tokens import CHUNK
from .recurrent_checks import DTYPES, is_varlen, pad_key_dim
from .recurrent_chunks import Arrays, ScratchAllocator, intern_value

INPUTS_AND_GRADIENTS = ("gQ", "gK"), ("gV", "gDOut"), ("gDQ", "gDK"), ("gDV",)  # what one launch copies


def plan_tails(
    problem: Problem, arrays: Arrays, scratch: ScratchAllocator, groups: Sequence[tuple[str, ...]]
) -> tuple[list[Step], list[Step]]:
    """(launches that copy the tails of packed inputs, launches that copy the tails of results back), if sequences are packed.
    arrays: those of tokens, by the names of parameters; their tails are added to it. groups: the names that one launch copies,
    of one array or of two of the same shape."""
    tails_of = {name: f"gTail{name[1:]}" for names in groups for name in names}
    arrays |= dict.fromkeys(tails_of.values())
    if not is_varlen(problem):
        return [], []
    sequences = problem.extents["sequences"]
    steps: dict[bool, list[Step]] = {False: [], True: []}
    for names in groups:
        operands_by_name = {name: x for name in names for x in [arrays[name]] if x}
        if not operands_by_name:
            continue
        form = operands_by_name[names[0]].form
        copies_back = names[0].startswith("gD") and names[0] != "gDOut"
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
            gTokens=arrays.get("gDBeta") if names[0] == "gDV" else None,
            gCuSeqlens=problem["cu_seqlens"],
            length=length,
            head_blocks=head_blocks,
            heads=heads,
            all_heads=all_heads,
        )
        steps[copies_back].append(step)
    return steps[False], steps[True]
