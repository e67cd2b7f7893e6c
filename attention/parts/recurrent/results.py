"""What a scan over a sequence computes (chunk_hopper.py, chunk_ampere.py): outputs, their normalizer, or only states.

The methods are Hopper's, where values and z come through rings, and `ones` is a shared tile full of ones.
"""

import itertools
from collections.abc import Iterator

from numpy import int32

from ops import row_max, silu, truncate, warpgroup
from tiles import fp32, inlined, static
from tiles.launching.arguments import array, record, tiled

from .gates import COL_VEC, Gate, Mamba2Gate
from .recent_chunks import count_recent_chunks

NORMALIZER_EPSILON = 1e-10  # added to a normalizer, as flash-linear-attention does


@static
class ScanResult:
    """The base of what a scan can compute. has_outputs: does it compute outputs, or a normalizer, so that it reads queries?
    reads_values: does it read values? If not, all of them are 1. from_zero: does the scan of a segment begin with a state of 0,
    and store the last one as a local state? skip, normalized, silu: see ScanOutputs. reads_z: is there an array z of the
    outputs' shape that it reads beside the values? unrounded: are outputs float32? scales_scores: are scores multiplied by the
    scale before they are rounded, instead of outputs at the end? stores_states: is the state before each chunk stored,
    transposed, in the dtype of the inputs? groups_queries, dots_states: see gradients.py."""

    has_outputs = True
    reads_values = True
    from_zero = False
    skip = normalized = silu = unrounded = scales_scores = stores_states = groups_queries = dots_states = False
    label = ""

    @property
    def reads_z(self):
        """Is there an array z? It gates outputs."""
        return self.silu

    def params(self, dtype, state=None):
        """The further parameters of a kernel, as a record. dtype: of its inputs. state: the tile of a consumer's part of a
        transposed state, if TMA stores it. states: by the index of a chunk (SequenceLayout.chunk_index) and head."""
        return record(states=tiled(state, 4, 2, 3) if state else array(4, dtype)) if self.stores_states else record()

    def output_argument(self, seq_layout, tile):
        """The type of a kernel's argument gO. tile: a consumer's tile of outputs."""
        return array(4) if self.unrounded else seq_layout.output_argument(tile)

    def __str__(self):
        return self.label

    @inlined
    def recent_tokens(self, params, seq, first_chunk, heads, is_reversed):
        """The tokens of a segment that a scan goes through: all of them, or for local states those that still count at its end.
        first_chunk: the index of the segment's first one. heads: those of the block's values. is_reversed: does the scan begin
        with the last chunk?"""
        return seq

    @inlined
    def fill_queries(self, q, j, gQ, at):
        """Have TMA load the j-th tile of queries, if there are outputs, from the coordinates `at`."""
        q.fill(j, gQ, at)

    @inlined
    def fill_values(self, v, z, j, gV, gZ, at):
        """Have TMA load the j-th tile of values, and of z if there is one, from the coordinates `at`."""
        v.fill(j, gV, at)
        if self.reads_z:
            z.fill(j, gZ, at)

    @inlined
    def query_head(self, key_head, group, first, width):
        """The head of queries and keys that a thread block reads. first: its first block of columns, of `width` for each of the
        `group` value heads of a key head."""
        return key_head

    @inlined
    def value_head(self, key_head, group, group_head):
        """The head of values and z that a consumer reads."""
        return key_head * group + group_head

    @inlined
    def scale_scores(self, x, scale):
        """x times the scale if `scales_scores`. x: scores, or what queries read of the state."""
        return x

    @inlined
    def store_row_dots(self, params, o, z, j, at, tile_type):
        """Gradients: store the products of the rows of o and of the j-th tile z. at: (the tokens of the scan, the first one of
        the chunk, which part of a token's products this is). tile_type: as in add_skip."""

    @inlined
    def dot_carried(self, seq_layout, params, o, z, j, index, head, part, tile_type, remaining):
        """Gradients: store the product of z and o, what queries read of the state. index, part: as in dot_state. remaining: the
        number of rows that belong to the sequence, if it is below that of all."""

    @inlined
    def dot_state(self, params, s_t, half, index, head, row, col, part):
        """Gradients: before a chunk, store the product of its state and a stored one. half: the type of half of its columns.
        index: of the chunk (SequenceLayout.chunk_index). row, col: where s_t begins in the transposed state. part: which of a
        state's parts this warpgroup has."""

    @inlined
    def store_state(self, params, s_t, index, head, row, col):
        """Store the state before a chunk, if such states are stored."""
        if self.stores_states:
            warpgroup.store(params.states, s_t, (index, head, row, col), aligned=True)

    @inlined
    def wait_values(self, v, ones, j):
        """The j-th tile of values, once it is loaded."""
        return v.wait(j)

    @inlined
    def gate_values(self, v_t, z, j, tile_type):
        """Transposed values, times silu(z) where a scan of states has a z. tile_type: of a warp's part of z, transposed."""
        return v_t

    @inlined
    def release_values(self, v, j):
        """Release the j-th tile of values."""
        v.release(j)

    @inlined
    def add_skip(self, o, values, d, tile_type):
        """o + D v. d: D of the tile's columns. tile_type: the type of a warp's part of v and of z."""
        return o

    @inlined
    def normalize_and_gate(self, o, z, j, gNormalizer, at, tile_type):
        """o / normalizer * silu(z). at: the coordinates of the normalizers. tile_type: as in add_skip."""
        return o

    @inlined
    def store_output(self, seq_layout, gO, tile, o, seq, token, head, column):
        """Store the outputs of the chunk that starts at `token`, through a shared tile or, if they are float32 or sequences are
        packed, from registers. The warps synchronise here, so that all have read the state before it is overwritten by the next
        one."""
        if seq_layout.varlen or self.unrounded:
            warpgroup.sync()
        if self.unrounded:
            seq_layout.store_rows(gO, o, seq, token, head, column)
        else:
            seq_layout.store(gO, tile, o, seq, token, head, column)

    @inlined
    def wait_stored(self):
        """Wait until all outputs have left shared memory."""
        warpgroup.store_wait()

    @inlined
    def zero_padding(self, seq_layout, gO, gCuSeqlens, sequence, length, head, column):
        """Store 0 to 64 columns of the outputs of the padding (SequenceLayout.zero_padding)."""
        seq_layout.zero_padding(gO, gCuSeqlens, sequence, length, head, column)


@static
class StatesResult(ScanResult):
    """The base of scans that compute states alone. gated: are values multiplied by silu(z)?"""

    gated: bool = False
    has_outputs = False

    @property
    def reads_z(self):
        """Is there an array z?"""
        return self.gated

    def output_argument(self, seq_layout, tile):
        return array(4)

    def __str__(self):
        return self.label + " of gated values" * self.gated

    @inlined
    def fill_queries(self, q, j, gQ, at):
        pass

    @inlined
    def gate_values(self, v_t, z, j, tile_type):
        if self.gated:
            v_t = v_t * silu(fp32(warpgroup.load_transposed(z.wait(j), tile_type)))
            z.release(j)
        return v_t

    @inlined
    def wait_stored(self):
        pass

    @inlined
    def zero_padding(self, seq_layout, gO, gCuSeqlens, sequence, length, head, column):
        pass


class ScanStates(StatesResult):
    """Only the states: what each segment makes of a state of 0. chunk_decays: see recent_chunks.py; optional."""

    from_zero, label = True, "states"

    def params(self, dtype, state=None):
        return record(chunk_decays=array(2))

    @inlined
    def recent_tokens(self, params, seq, first_chunk, heads, is_reversed):
        n, count = seq.num_chunks(), int32(0)
        for head in heads:
            count = max(count, count_recent_chunks(params.chunk_decays, head, first_chunk, n, is_reversed))
        return seq.keep(count)


class ChunkStates(StatesResult):
    """The result of a scan that stores the states before each chunk, and no outputs."""

    stores_states, label = True, "states of chunks alone"


class ScanNormalizer(ScanResult):
    """The normalizer, by which outputs are divided: the output for values that are all 1, one fp32 number for each token and
    head."""

    reads_values, label = False, "normalizer"

    def output_argument(self, seq_layout, tile):
        return array(3)

    @inlined
    def fill_values(self, v, z, j, gV, gZ, at):
        pass

    @inlined
    def wait_values(self, v, ones, j):
        return ones

    @inlined
    def release_values(self, v, j):
        pass

    @inlined
    def store_output(self, seq_layout, gO, tile, o, seq, token, head, column):
        """Store one of the columns, which are all the same."""
        warpgroup.sync()  # no TMA store follows, which would synchronise the warps
        warpgroup.store(truncate(gO, 1, seq.end), row_max(o), (seq.batch, token, head), cols=1)

    @inlined
    def zero_padding(self, seq_layout, gO, gCuSeqlens, sequence, length, head, column):
        pass  # outputs of padding are 0, whatever they are divided by


@static
class ScanOutputs(ScanResult):
    """The outputs, (o + D v) / normalizer * silu(z). skip: is D v added? normalized: is o divided by a normalizer? silu: is o
    multiplied by silu(z)? stores_states: are the states before each chunk stored, too, for a backward pass?"""

    skip: bool = False
    normalized: bool = False
    silu: bool = False
    stores_states: bool = False

    def __str__(self):
        labels = {"skip": self.skip, "divided": self.normalized, "silu": self.silu, "states of chunks": self.stores_states}
        return ", ".join(label for label, used in labels.items() if used)

    @inlined
    def add_skip(self, o, values, d, tile_type):
        if self.skip:
            o = o + fp32(warpgroup.load(values, tile_type)) * d
        return o

    @inlined
    def normalize_and_gate(self, o, z, j, gNormalizer, at, tile_type):
        if self.normalized:
            o = o / (warpgroup.load(gNormalizer, COL_VEC, at, cols=1) + NORMALIZER_EPSILON)
        if self.silu:
            o = o * silu(fp32(warpgroup.load(z.wait(j), tile_type)))
            z.release(j)
        return o


def scan_forms(kind: type[Gate], everything: bool) -> Iterator[tuple[Gate, ScanResult, bool]]:
    """(gate, result, varlen) of all scans with gates of this kind, except for gates with `scale_at_end`. The plainest comes
    first, the others with `everything` only. Mamba-2's D, z and softplus come together, with limits of steps and without."""
    yield kind(), ScanOutputs(), False
    if everything and kind is Mamba2Gate:
        yield from ((Mamba2Gate(), ScanStates(), False), (Mamba2Gate(), ScanOutputs(), True))
        full = ScanOutputs(skip=True, silu=True)
        yield from ((Mamba2Gate(softplus=True), full, varlen) for varlen in (False, True))
        yield Mamba2Gate(softplus=True, low=0.001, high=0.1), full, True
    elif everything:
        yield kind(), ScanOutputs(), True
        yield from itertools.product((kind(),), (ScanStates(), ScanNormalizer(), ScanOutputs(normalized=True)), (False, True))
