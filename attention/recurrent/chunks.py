"""From a problem of linear attention to launches of the kernels of chunks (chunk_hopper.py, chunk_ampere.py, heads_hopper.py,
gla_hopper.py).

There is one, or two where few long sequences are cut into segments, and one before it where a normalizer is wanted.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from tiles.arrays import Operand
from tiles.device import machine
from tiles.launch import kernel_for
from tiles.lengths import follows
from tiles.plan import Step
from tiles.schema import Problem

from .kernels import chunk_ampere, chunk_hopper, gla_hopper, gla_states_hopper, heads_hopper, starts
from .kernels.gates import ByHead, BySteps, ByToken, Gate
from .kernels.results import Normalizer, Outputs, Result, States
from .rules import DTYPES, padded, varlen

MIN_SEGMENT_CHUNKS = 8  # chunks of a segment of attention.parallel's, beside which others run
MIN_GPU_SEGMENT_CHUNKS = 4  # chunks of a segment of one GPU's
STATE = 1.5  # chunks that could be walked while the last pass adds up the state of one segment
BLOCK = 1.5  # chunks that could be walked while a thread block begins and ends
FACTORS = 2**-6, 1  # scales that scores in fp16 may be multiplied with: neither too small nor too large for them
SWAPPED = 0, 1, 3, 2  # the axes of a state that kernels have transposed
SEGMENT_RESULTS = """
    local  NHPVK  float32
    total  NHPO   float32
"""  # what `of_segments` finds, as rows of a schema


def join_rows(*tables: str) -> str:
    """The rows of these tables of a schema as one table."""
    return "".join([table.rstrip() for table in tables])


Arrays = dict[str, Operand | None]  # a kernel's, by the names of its parameters
Scratch = list[tuple[tuple[int, ...], str]]


@functools.lru_cache(1024)
def one(kind, *fields):
    """kind(*fields), one object for equal fields: to look it up takes a tenth of the time that it takes to make it."""
    return kind(*fields)


class Costs(NamedTuple):
    """How long the parts of a member's computation take. The unit is the time for a chunk in the last pass, with one consumer
    in each block. both: a chunk with two consumers. again: a chunk in the pass before. added: to go on from the state before
    one segment to the state before the next. launches: two more launches. within: up to so many segments, the last pass itself
    adds up what segments leave."""

    both: float
    again: float
    added: float
    launches: float
    within: int = 1


@follows
@functools.lru_cache(1024)
def in_launches(items: int, width: int, before: int, chunks: int, places: int, costs: Costs) -> int:
    """Into how many segments each sequence should be cut, for the shortest time. items: how many sequences there are, counted
    by head. width: the blocks of columns of their states in the last pass; before: in the pass before. chunks: of each
    sequence. places: how many thread blocks the GPU runs at once."""

    def rounds(blocks, width):
        if blocks * width <= places:
            return 1
        return math.ceil(blocks * -(-width // 2) / places) * costs.both

    def time(parts):
        last, walked = rounds(items * parts, width), -(-chunks // parts) + BLOCK
        if parts == 1:
            return last * walked
        between = (parts - 1) * STATE if parts <= costs.within else costs.launches + parts * costs.added
        return (last + costs.again * rounds(items * parts, before)) * walked + between

    return min(range(1, max(1, min(chunks // MIN_GPU_SEGMENT_CHUNKS, places)) + 1), key=time)


BY_CHANNEL = Costs(both=1, again=0.55, added=0.35, launches=2)
BY_TOKEN = Costs(both=1, again=0.6, added=0.5, launches=3, within=4)


class Scratches:
    """The scratch memory of a plan. A call with a shape adds a float32 array of that shape and returns it."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.every: Scratch = []

    def __call__(self, *shape: int) -> Operand:
        self.every.append((shape, "float32"))
        return self.problem.scratch(len(self.every) - 1, *self.every[-1])


def by_token(
    problem: Problem,
    arrays: Arrays,
    scale: float,
    piece: int = 0,
    softplus: bool = False,
    normalizer: Arrays | None = None,
) -> tuple[list[Step], Scratch]:
    """(the launches, the scratch memory between them) for decays that are one number for each token and head, or for each
    head.

    arrays: those of chunk_hopper.py by its parameters' names, the states with their columns first. piece: how many bytes
    cp.async copies at once, 0 if TMA brings whole tiles. softplus: Mamba-2's option. normalizer: {"gStart": , "gState": } of
    the sum of keys, if outputs are divided by a normalizer."""
    batch, length, heads, key_heads, columns, sequences = problem("BSHGVN")
    arrays = _as_kernels_have_them(problem, arrays, bool(piece))
    width, group = -(-columns // chunk_hopper.COLUMNS), heads // key_heads
    gate = _gate(arrays, softplus, apart=not (piece or FACTORS[0] <= scale <= FACTORS[1]))
    result = one(Outputs, arrays.get("gSkip") is not None, normalizer is not None, arrays.get("gZ") is not None)
    main = _config(problem, gate, result, piece, width)
    local = arrays.get("gLocal")  # what a pass before this one has found that segments leave
    parts = local.form.shape[2] if local else _parts(problem, main, width)
    if parts == 1:
        arrays = {name: x for name, x in arrays.items() if name not in ("gLocal", "gTotal")}
    if parts == 1 and not piece and heads_hopper.serves(main, group * width):
        return [_of_heads(problem, main, arrays, width)], []
    scratched, steps = Scratches(problem), []

    def launch(config, width: int, segments: int, walked: int, given: Arrays, begun: int = 1) -> Step:
        return _of_chunks(problem, config, width, segments, walked, given, scale, piece, begun)

    if parts > 1 and not local:
        steps.append(_alone(problem, arrays, piece, softplus, parts, parts - 1, scratched))
    begins, begun = arrays.get("gStart"), 1
    if parts > BY_TOKEN.within:
        left, first, begun = {name: arrays.pop(name) for name in ("gLocal", "gTotal")}, begins, parts
        begins = scratched(sequences * parts, heads, columns, problem.extents["K"])
        steps.append(before_segments(problem, parts, columns, False, gStart=first, gStarts=begins, **left))
    if normalizer is not None:
        divisor = scratched(batch, length, heads)
        start, end = normalizer["gStart"], normalizer["gState"]
        rows = {"gO": divisor, "gStart": start and start.spread(2, chunk_hopper.COLUMNS), "gState": end and end.spread(2, 1)}
        steps.append(launch(_config(problem, gate, one(Normalizer), piece, 1), 1, 1, 1, arrays | rows))
        arrays["gDivisor"] = divisor
    steps.append(launch(main, width, parts, parts, arrays | {"gStart": begins}, begun))
    return steps, scratched.every


def of_segments(problem: Problem, arrays: Arrays, piece: int = 0, softplus: bool = False) -> tuple[list[Step], Scratch]:
    """(the launch that finds what each segment does to a state, its scratch memory). The scratch memory is what it finds: what
    the segment leaves of a state of 0, (sequence, head, segment, columns, Dk), and the logarithm to the base 2 of the number
    by which it multiplies a state, (sequence, head, segment, 1). There are as many segments as by_token would cut, at least
    one."""
    arrays = _as_kernels_have_them(problem, arrays, bool(piece))
    scratched = Scratches(problem)
    width = -(-problem.extents["V"] // chunk_hopper.COLUMNS)
    parts = _parts(problem, _config(problem, _gate(arrays, softplus), one(Outputs), piece, width), width)
    return [_alone(problem, arrays, piece, softplus, parts, parts, scratched)], scratched.every


def _alone(
    problem: Problem,
    arrays: Arrays,
    piece: int,
    softplus: bool,
    parts: int,
    walked: int,
    scratched: Callable[..., Operand],
) -> Step:
    """The launch of the first `walked` of `parts` segments, each from a state of 0. It adds to `arrays` where the results
    are."""
    sequences, heads, columns = problem("NHV")
    width = -(-columns // chunk_hopper.COLUMNS)
    arrays["gLocal"] = scratched(sequences, heads, walked, columns, problem.extents["K"])
    arrays["gTotal"] = scratched(sequences, heads, walked, 1)
    config = _config(problem, _gate(arrays, softplus), one(States), piece, width)  # which know no scale
    return _of_chunks(problem, config, width, parts, walked, arrays | {"gStart": None, "gO": None}, 1.0, piece)


def _of_chunks(
    problem: Problem,
    config: chunk_hopper.Config,
    width: int,
    segments: int,
    walked: int,
    given: Arrays,
    scale: float,
    piece: int,
    begun: int = 1,
) -> Step:
    """The launch of a kernel of chunks for `walked` of the segments. begun: how many states each sequence is given to begin
    with."""
    length, heads, key_heads, sequences = problem("SHGN")
    group = heads // key_heads
    blocks = group * width // config.consumers
    return kernel_for(chunk_ampere if piece else chunk_hopper, config, problem.device).bind(
        sequences * key_heads * walked * blocks,
        length=length,
        blocks=blocks,
        segments=segments,
        walked=walked,
        begun=begun,
        heads=key_heads,
        group=group,
        width=width,
        scale=scale,
        **given,
    )


def _as_kernels_have_them(problem: Problem, arrays: Mapping[str, Operand | None], by_copies: bool) -> Arrays:
    """The arrays with one number for each token or column, where the caller gave one for each head. The elements are repeated
    by steps of 0 bytes."""
    batch, length, columns = problem("BSV")
    arrays, chunk = dict(arrays), chunk_hopper.CHUNK
    gates = arrays.get("gGates")
    if by_copies and gates and len(gates.form.shape) == 1:  # each token's is the head's
        arrays["gGates"] = gates.spread(0, length).spread(0, batch)
    for name, extent in ("gGates", chunk), ("gRate", chunk), ("gBias", chunk), ("gSkip", columns):
        given = arrays.get(name)
        if given and len(given.form.shape) == 1:
            arrays[name] = given.spread(1, extent)
    return arrays


def _gate(arrays: Arrays, softplus: bool, apart: bool = False) -> Gate:
    """The kind of gates that these arrays hold. apart: is the scale to be multiplied in at the end (see gates.Decay)?"""
    given = arrays.get("gGates")
    if given is None:
        return one(Gate)
    if arrays.get("gRate"):
        return one(BySteps, False, softplus)
    return one(ByHead if len(given.form.shape) == 2 else ByToken, apart)


def _config(problem: Problem, gate: Gate, result: Result, piece: int, width: int) -> chunk_hopper.Config:
    """The configuration of the kernel for values of `width` blocks of columns."""
    heads, key_heads, key_dim = problem("HGK")
    key_dim, dtype = padded(key_dim, chunk_hopper.KEY_DIMS), DTYPES[problem.dtype]
    if piece:
        return one(chunk_ampere.Config, key_dim, 1, dtype, gate, result, varlen(problem), piece)
    consumers = 2 if heads // key_heads * width % 2 == 0 and key_dim <= chunk_hopper.WIDE else 1
    return one(chunk_hopper.Config, key_dim, consumers, dtype, gate, result, varlen(problem))


def _parts(problem: Problem, config: chunk_hopper.Config, width: int) -> int:
    """Into how many segments each sequence is cut."""
    if not config.segmented:
        return 1
    batch, length, heads, sequences = problem("BSHN")
    chunks = length * batch // sequences // chunk_hopper.CHUNK
    places = config.resident * machine(problem.device).processors
    return in_launches(sequences * heads * width // config.consumers, 1, 1, chunks, places, BY_TOKEN)


def _of_heads(problem: Problem, form: chunk_hopper.Config, arrays: Arrays, width: int) -> Step:
    """The launch of heads_hopper.py that does the work of chunk_hopper.py's kernel of this form."""
    length, heads, key_heads, sequences = problem("SHGN")
    group = heads // key_heads
    blocks = group * width // heads_hopper.CONSUMERS
    config = one(heads_hopper.Config, form.key_dim, form.dtype, form.gate, form.result, form.varlen)
    return kernel_for(heads_hopper, config, problem.device).bind(
        sequences * key_heads * blocks,
        length=length,
        blocks=blocks,
        heads=key_heads,
        group=group,
        width=width,
        **{name: given for name, given in arrays.items() if name != "gDivisor"},
    )


def by_channel(problem: Problem, arrays: Arrays, scale: float) -> tuple[list[Step], Scratch]:
    """(the launches, the scratch memory between them) for decays of channels. arrays: those of gla_hopper.py."""
    batch, length, heads, key_heads, key_dim, columns, sequences = problem("BSHGKVN")
    width, padded_dim = -(-columns // gla_hopper.COLUMNS), padded(key_dim, gla_hopper.STAGES)
    consumers = 2 if width % 2 == 0 and padded_dim <= gla_hopper.WIDE else 1
    blocks, chunks = width // consumers, length * batch // sequences // gla_hopper.CHUNK
    parts = in_launches(sequences * heads, blocks, blocks, chunks, machine(problem.device).processors, BY_CHANNEL)
    sizes = padded_dim, consumers, DTYPES[problem.forms["decay"].dtype], DTYPES[problem.dtype], varlen(problem)
    steps, scratch = [], Scratches(problem)

    def launch(module, begun: int, **given) -> Step:
        return kernel_for(module, one(module.Config, *sizes), problem.device).bind(
            sequences * heads * blocks * begun,
            length=length,
            blocks=blocks,
            segments=parts,
            heads=heads,
            group=heads // key_heads,
            **given,
        )

    if parts > 1:
        left = {"gLocal": scratch(sequences, heads, parts - 1, columns, key_dim)}
        left["gTotal"] = scratch(sequences, heads, parts - 1, key_dim)
        begins = scratch(sequences * parts, heads, columns, key_dim)
        of_keys = {name: arrays[name] for name in ("gK", "gV", "gGates", "gEnds")}
        steps.append(launch(gla_states_hopper, parts - 1, walked=parts - 1, **left, **of_keys))
        steps.append(before_segments(problem, parts, columns, True, gStart=arrays["gStart"], gStarts=begins, **left))
        arrays = arrays | {"gStart": begins}
    return [*steps, launch(gla_hopper, parts, scale=scale, **arrays)], scratch.every


def before_segments(problem: Problem, parts: int, columns: int, channels: bool, **arrays: Operand | None) -> Step:
    """The launch that computes the state before each segment."""
    rows, cols = -(-columns // starts.TILE.rows), -(-problem.extents["K"] // starts.TILE.cols)
    sequences, heads = problem("NH")
    grid = sequences * heads * rows * cols
    kernel = kernel_for(starts, one(starts.Config, channels), problem.device)
    return kernel.bind(grid, heads=heads, segments=parts, rows=rows, cols=cols, **arrays)
