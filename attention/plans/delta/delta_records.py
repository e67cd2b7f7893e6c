"""What the delta rule's forward pass stores of each chunk in training, for gradients that read it (delta_gradient_walk.py): a
record of arrays, which are results of the forward program and arguments of the backward program (with decays of channels:
delta_channel_gradients.py).

With T the bytes of an array of tokens, bf16 and H = Hk, Dk = Dv = 128, the record has 4 T (states 2 T, errors T, solutions T),
where q, k and v are 3 T; with scores, for few heads, 4.5 T. The pass that computes it is most of the forward pass, so gradients
that find it need a walk in reverse alone.

Of each packed sequence up to one chunk index belongs to no chunk (SequenceLayout.chunk_index), and padding has others: there
nobody writes the record, nor reads it. torch.library.opcheck compares it all the same, and fails. Zeros there would cost
forward 65 KiB for each sequence and head, 121 with decays of channels: of 1024 tokens each a 16th of the record, of 64 as much
again as the record. Without such indices its extents would depend on numbers in device memory.

With decays of channels it has 7.5 T: states 2 T, errors T, solutions T, scores 0.5 T, decayed queries and keys 3 T. Forward
writes them in 18 T of traffic, for 6 T without a record, and gradients then move 23.5 T of 39 T."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from tiles.calls.schema import Problem, Schema
from tiles.launching.arrays import Operand
from tiles.launching.devices import machine

from ...families import AMPERE_FAMILY
from ...parts.delta.delta_chunks import KEY_DIMS, VECTORS
from ...parts.delta.delta_gradient_config import VALUES
from ...parts.recurrent.tokens import CHUNK
from ..recurrent.chunk_states import RECOMPUTED, device_ordinal, is_hopper, merge_chunks
from ..recurrent.recurrent_chunks import MIN_SEGMENT_CHUNKS, Arrays, count_chunks


class RecordField(NamedTuple):
    """An array of a record. row: its axes and elements, as schemas have them. parameter: its name in kernels."""

    row: str
    parameter: str


FIELDS = {
    "states": RecordField("(batch, chunks, heads, value_dim, key_dim)  tile", "gStates"),
    "errors": RecordField("(batch, chunks, heads, chunk, value_dim)  tile", "gErrors"),
    "solutions": RecordField("(batch, chunks, heads, two_chunks, chunk)  tile", "gSolutions"),
    "vectors": RecordField("(batch, chunks, heads, chunk_vectors)  float32", "gVectors"),
    "scores": RecordField("(batch, chunks, heads, chunk, chunk)  tile", "gScores"),
    "queries": RecordField("(batch, chunks, heads, chunk, key_dim)  tile", "gDecayedQ"),
    "read_keys": RecordField("(batch, chunks, heads, chunk, key_dim)  tile", "gReadKeys"),
    "write_keys": RecordField("(batch, chunks, heads, chunk, key_dim)  tile", "gWriteKeys"),
    "state_decays": RecordField("(batch, chunks, heads, key_dim)  float32", "gB"),
    "betas": RecordField("(batch, chunks, heads, chunk)  float32", "gChunkBeta"),
}  # those of DeltaChunkRecord, which says what they are
# The fields of a record where channels have decays; for gradients of many heads, by one walk; of few heads, by segments
BY_CHANNEL = "states errors solutions scores queries read_keys write_keys state_decays betas"
ONE_WALK = "states errors solutions vectors"
SEGMENTED = f"{ONE_WALK} scores"
UNTIMED = SEGMENTED  # by count 7 % faster with 32 heads of 32768 tokens, both passes; stored if a caller asks for it
# A record is faster if there are fewer multiprocessors than this for each head of a sequence. Otherwise the recurrences of
# states and of their gradients run side by side and take no longer than one of them, and forward has a faster way
PROCESSORS_PER_HEAD = 8


class DeltaChunkRecord(NamedTuple):
    """What attention.delta_rule(.., return_chunk_states=True) returns of each chunk of 64 tokens, for delta_rule_backward;
    arrays (B, chunks, H, ..). states: the state before it, transposed, (Dv, Dk). errors: v - S^T k of its tokens. solutions:
    its inverse without the identity, -L^T, high above low. vectors: beta and decays of its tokens. scores: of its queries and
    keys, where heads are few or channels have decays. Of these alone queries, read_keys, write_keys: queries and keys decayed
    from the chunk's start, and keys decayed to its end; state_decays: the decays of the state; betas."""

    states: Any
    errors: Any
    solutions: Any
    vectors: Any = None
    scores: Any = None
    queries: Any = None
    read_keys: Any = None
    write_keys: Any = None
    state_decays: Any = None
    betas: Any = None


# The fields as results of forward's program and arguments of backward's: their names, and their rows in the schemas
STORED_NAMES = tuple([f"chunk_{field}" for field in FIELDS])
RESULT_ROWS = "".join(
    [f"    chunk_{field}  {x.row}  output  return_chunk_states  memory:{field}\n" for field, x in FIELDS.items()]
)
ARGUMENT_ROWS = "".join([f"    chunk_{field}  {x.row}  optional\n" for field, x in FIELDS.items()])


def _constant(number: int) -> Any:
    return lambda extents: number


def record_schema(name: str, table: str) -> Schema:
    """The Schema of a function whose table has RESULT_ROWS or ARGUMENT_ROWS: it knows the extents of their axes."""
    extents = {"chunk": CHUNK, "two_chunks": 2 * CHUNK, "chunk_vectors": VECTORS * CHUNK}
    return Schema(name, table, chunks=count_chunks, **{axis: _constant(n) for axis, n in extents.items()})


def choose_record(memory: str, q: Any, v: Any, decay: Any, cu_seqlens: Any, layout: str, family: str | None) -> str:
    """The fields that forward stores in training, "" for none: as the caller says by `memory`, but only if gradients can read
    them and are faster so. The other arguments are those of attention.delta_rule, checked or not."""
    if memory == RECOMPUTED or family == AMPERE_FAMILY:
        return ""
    (*_, key_dim), (*_, value_dim) = shapes = [tuple(getattr(x, "shape", ())) or (0,) for x in (q, v)]
    if any([len(shape) != 4 for shape in shapes]) or key_dim > max(KEY_DIMS) or value_dim > VALUES:
        return ""
    ordinal, counts = device_ordinal(q), _count(v, cu_seqlens, layout)
    if not is_hopper(ordinal) or not gains_record(counts[0], _processors(ordinal)):
        return ""
    fields = BY_CHANNEL if _has_channels(decay) else choose_fields(*counts, _processors(ordinal))
    return "" if fields == UNTIMED else fields


def gains_record(head_sequences: int, processors: int) -> bool:
    """Are both passes together faster with a record? The arguments are those of choose_fields."""
    return head_sequences * PROCESSORS_PER_HEAD > processors


def choose_fields(head_sequences: int, length: int, packed: bool, processors: int) -> str:
    """The fields of a record where tokens have decays: SEGMENTED if a walk in one segment would leave most of the GPU idle.
    head_sequences: the number of sequences times heads. length: of each sequence. packed: are they packed (cu_seqlens)?
    processors: the GPU's multiprocessors."""
    few = 2 * head_sequences <= processors and not packed and length >= 2 * MIN_SEGMENT_CHUNKS * CHUNK
    return SEGMENTED if few else ONE_WALK


def record_fields(q: Any, v: Any, decay: Any, cu_seqlens: Any, layout: str) -> str:
    """The fields that forward stores if it is told to, by the arguments of attention.delta_rule."""
    if _has_channels(decay):
        return BY_CHANNEL
    return choose_fields(*_count(v, cu_seqlens, layout), _processors(device_ordinal(q)))


def _has_channels(decay: Any) -> bool:
    """Has each channel of the keys a decay of its own?"""
    return len(getattr(decay, "shape", ())) == 4


def _count(v: Any, cu_seqlens: Any, layout: str) -> tuple[int, int, bool]:
    """(the number of sequences times heads, the length of each sequence, are they packed?); zeros for arrays of other ranks,
    which the program refuses."""
    packed, shape, ends = cu_seqlens is not None, tuple(getattr(v, "shape", ())), tuple(getattr(cu_seqlens, "shape", ()))
    if len(shape) != 4 or (packed and len(ends) != 1):
        return 0, 0, packed
    batch, *tokens_and_heads, _ = shape
    length, heads = reversed(tokens_and_heads) if layout == "bhsd" else tokens_and_heads
    return heads * (ends[0] - 1 if packed else batch), length, packed


def _processors(ordinal: int | None) -> int:
    return machine(ordinal).processors


_processors._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compile does not look inside


def check_record(problem: Problem, on_hopper: bool) -> None:
    """ValueError: no gradients read a record of such a problem."""
    key_dim, value_dim = problem("key_dim", "value_dim")
    if key_dim > max(KEY_DIMS) or value_dim > VALUES:
        shapes = ", ".join([f"{name}.shape={problem.shape(name)}" for name in ("q", "v")])
        message = f"takes Dk up to {max(KEY_DIMS)} and Dv up to {VALUES}: {shapes}"
    elif not on_hopper:
        message = "needs a Hopper GPU, no family='sm_80', and an `out` whose address and strides are multiples of 16 bytes"
    else:
        return
    raise ValueError(f"return_chunk_states: {message}; without it {problem.member}_backward computes what it needs itself")


def split_record(record: Any) -> tuple[Any, ...]:
    """The arrays of a record in the order of schemas, None for those that it lacks. TypeError: it is none."""
    if record is None:
        return (None,) * len(FIELDS)
    if not isinstance(record, DeltaChunkRecord):
        kind = type(record).__name__
        raise TypeError(f"chunk_states: must be what delta_rule(.., return_chunk_states=True) returned last, not {kind}")
    return tuple([getattr(record, field, None) for field in FIELDS])


def join_record(fields: str, arrays: Iterable[Any]) -> DeltaChunkRecord:
    """The DeltaChunkRecord with these arrays, one for each of the fields that are named."""
    return DeltaChunkRecord(**dict(zip(fields.split(), arrays, strict=True)))


def record_buffers(record: Mapping[str, Operand | None], fields: str = "") -> Arrays:
    """The arrays of a record as views of all chunks, by the names of kernels' parameters. record: by field. ValueError: it has
    some, but not all of `fields`."""
    missing = [field for field in fields.split() if not record[field]]
    if missing and any(record.values()):
        cause = f"lacks {', '.join(missing)}: decay must have as many axes as in the call of delta_rule that returned it"
        raise ValueError(f"chunk_states: {cause}")
    return {FIELDS[field].parameter: merge_chunks(x) for field, x in record.items() if x}
