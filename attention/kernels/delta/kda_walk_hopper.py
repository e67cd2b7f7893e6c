"""KDA on few long sequences, for Hopper: delta_walk_hopper.py's walk with decays of channels (kda_hopper.py has the equations).
U = T (V - k' S') occurs in two products, whose other factors have T in them already (kda_transform_hopper.py):

    D = V - k' S'        O = scale q' S' + P~ D           S = exp(b_last) S + k~^T D
    S' = exp(r) S        P~ = scale tril(q' k*^T) T       k~ = exp(b_last - r) T^T k*

so that a chunk is four products, and its chain two. k' S' and q' S' have the same left operand, transposed, and so have the
last two: the right ones lie side by side in shared memory, and each pair is one product. A round of the loop is the second
product of a chunk and the first one of the next chunk, beside which the state decays: ptxas would wait for a product before it
used what a product of the round before gave. A consumer has 64 columns of values; two in a block share what it loads. That
takes longer, on half as many multiprocessors, which is faster where the grid before, beside which this one runs, needs the
others."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from numba import cuda
from numpy import int32

from ops import columns, compute_now, hstack, load, subtile, warpgroup, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st, sv
from tiles.launching.arguments import ENDS, FLOAT, INT, array, tiled
from tiles.targets import Target

from ...parts.delta.delta_chunks import KEY_DIMS
from ...parts.recurrent.chunk_order import ChunkMajor, HeadMajor
from ...parts.recurrent.launch_conditions import HistoryCondition, NoCondition, SuccessorGrid
from ...parts.recurrent.segment_spans import OverlappingSegments
from ...parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout, block_coord
from ...parts.recurrent.transposed_state import TransposedState

WATCHER, SENDER = 1, 2  # the loader's warps that wait for what the grid before stores, and from which on they store outputs
CONSUMERS_OF_BLOCK = 1, 2
LOADER_REGISTERS, CONSUMER_REGISTERS = 40, 232  # of a thread beside two consumers; one has as many as a thread can have
# (padded key dim, consumers) -> chunks in flight: of k', q' and decays; k~ and P~; V; outputs, one for each warp that stores
STAGES = {(64, 1): (4, 4, 4, 2), (64, 2): (4, 4, 3, 1), (128, 1): (3, 3, 3, 2), (128, 2): (3, 3, 2, 1)}
WARPS = warpgroup.WARPGROUP


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. key_dim: the channels of keys, padded. varlen: are sequences packed (cu_seqlens)? order: in
    which the grid before computes what this one reads. condition: of the grid. consumers: warpgroups that have 64 value
    columns each."""

    key_dim: int
    dtype: dtype
    varlen: bool = False
    order: HeadMajor = field(default=HeadMajor())
    condition: NoCondition = field(default=NoCondition())
    consumers: int = 1

    @property
    def threads(self):
        """Threads of a block: those of consumers and loader."""
        return warpgroup.THREADS * (self.consumers + 1)

    @property
    def key(self):
        """The tile of q', k' or k~ for a chunk."""
        return st(CHUNK, self.key_dim, self.dtype)

    @property
    def decayed(self):
        """The tile of k' and, below it, q' for a chunk."""
        return st(2 * CHUNK, self.key_dim, self.dtype)

    @property
    def solved(self):
        """The tile of k~ and, beside it, P~^T for a chunk."""
        return st(CHUNK, self.key_dim + CHUNK, self.dtype)

    @property
    def value(self):
        """The tile of V or O for a chunk."""
        return st(CHUNK, COLUMNS * self.consumers, self.dtype)

    @property
    def state_decays(self):
        """The vectors exp(r) and exp(b_last), a number for each channel."""
        return sv(2 * self.key_dim, fp32)

    @property
    def overlaps_previous(self) -> bool:
        """Does the kernel begin while the grid before still runs?"""
        return self.order.overlaps or self.condition.overlaps

    def __str__(self):
        walk = f"walk of KDA, Dk {self.key_dim} {self.dtype}"
        columns = f"{COLUMNS * self.consumers} columns" * (self.consumers > 1)
        return ", ".join(filter(None, (walk, columns, "varlen" * self.varlen, str(self.order), str(self.condition))))


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of both padded key dims; fp16 and all packed ones if `everything`."""
    if target.has_wgmma:
        for key_dim, input_dtype, varlen in itertools.product(KEY_DIMS, (bf16, fp16) if everything else (bf16,), (False, True)):
            if not varlen or key_dim == max(KEY_DIMS) or everything:
                yield Config(key_dim, input_dtype, varlen)
            if not varlen and (everything or key_dim == max(KEY_DIMS)):
                yield from (Config(key_dim, input_dtype, order=ChunkMajor(), consumers=n) for n in CONSUMERS_OF_BLOCK)
            if everything:
                conditions = HistoryCondition(True), SuccessorGrid()
                yield from (Config(key_dim, input_dtype, varlen, condition=condition) for condition in conditions)
            if everything and not varlen:
                condition = HistoryCondition(False, True)
                yield from (Config(key_dim, input_dtype, False, ChunkMajor(), condition, n) for n in CONSUMERS_OF_BLOCK)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, STATE = config.dtype, rt(16, config.key_dim, fp32)
    seq_layout = SequenceLayout(config.varlen)
    read_stages, solved_stages, value_stages, output_stages = STAGES[config.key_dim, config.consumers]
    chunk_order, ORDER = config.order, config.order.walk_params()
    spans = OverlappingSegments()
    SPANS: Any = spans.params()
    condition, CONDITION = config.condition, config.condition.params()
    state = TransposedState(config.key_dim, INPUT, seq_layout)
    CONSUMERS, READERS, SETMAXNREG = config.consumers, config.consumers * WARPS, config.consumers > 1
    LOADER = CONSUMERS
    KEYS, KEY_DIM, PANELS = tiled(config.key, rows=2), config.key_dim, config.key_dim // CHUNK
    DECAY_TO_REFERENCE, DECAY = range(2)
    smem = shared(
        decayed=ring(config.decayed, read_stages, READERS),
        solved=ring(config.solved, solved_stages, READERS),
        v=ring(config.value, value_stages, READERS),
        state_decays=ring(config.state_decays, read_stages, READERS),
        out=ring(config.value, output_stages, 1, writers=READERS),
        **chunk_order.rings(),
    )

    @inlined
    def part(tile):
        """A consumer's columns of a tile of values or outputs."""
        return subtile(tile, CHUNK, 0, COLUMNS, warpgroup.id()) if CONSUMERS > 1 else tile

    @inlined
    def load_decay(decays, index):
        """One of the vectors of `state_decays`."""
        return load(subtile(decays, KEY_DIM, index), STATE.row_vec)

    @inlined
    def all_but_last(x):
        """All columns but the last 64."""
        if PANELS > 1:
            return hstack(columns(x, CHUNK, 0), columns(x, CHUNK, 1))
        else:
            return columns(x, CHUNK, 0)

    @inlined
    def subtract_read(read, values, remaining, scale):
        """(D, scale q' S') of a chunk, transposed. read: k' S' and q' S'."""
        values = seq_layout.zero_other_columns(fp32(values), remaining)
        return INPUT(values - columns(read, CHUNK, 0)), columns(read, CHUNK, 1) * scale

    @inlined
    def read_first_state(rings, s_t, remaining, scale):
        """read_state of the first chunk."""
        (decayed, v, state_decays, _), j = rings, int32(0)
        decays = state_decays.wait(j)
        rounded = INPUT(s_t * load_decay(decays, DECAY_TO_REFERENCE))
        s_t = compute_now(s_t * load_decay(decays, DECAY))  # beside the product ptxas would wait for that one
        read = warpgroup.mm_ABt(rounded, decayed.wait(j))
        values = warpgroup.load_transposed(part(v.wait(j)), state.values)
        v.release(j)
        state_decays.release(j)
        d, o = subtract_read(warpgroup.wait(read), values, remaining, scale)
        decayed.release(j)
        return s_t, d, o

    @inlined
    def read_state(rings, s_t, o, j, remaining, scale):
        """(the state decayed over the j-th chunk, D, scale q' S'). o: the outputs of the chunk before, which are stored."""
        decayed, v, state_decays, out = rings
        decays = state_decays.wait(j)
        rounded = INPUT(s_t * load_decay(decays, DECAY_TO_REFERENCE))
        read = warpgroup.mm_ABt(rounded, decayed.wait(j))  # k' S' and q' S'
        warpgroup.store_transposed(part(out.claim(j - 1)), INPUT(o))
        values = warpgroup.load_transposed(part(v.wait(j)), state.values, fenced=False)
        s_t = compute_now(s_t * load_decay(decays, DECAY))
        out.publish(j - 1)  # its fence is also that of the loads from V and the decays
        v.release(j)
        state_decays.release(j, fenced=False)
        d, o = subtract_read(warpgroup.wait(read), values, remaining, scale)
        decayed.release(j)
        return s_t, d, o

    @inlined
    def add_chunk(solved, s_t, d, o, j):
        """(the state after the j-th chunk, its outputs) of the state decayed, D and scale q' S'. One product: its right factors
        lie side by side."""
        both = warpgroup.wait(warpgroup.mma_AB(hstack(s_t, o), d, solved.wait(j)))
        solved.release(j)
        return all_but_last(both), columns(both, CHUNK, PANELS)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def walk(
        gQueries: KEYS, gDecayedKeys: KEYS, gSolved: tiled(config.solved, rows=2),
        gStateDecays: tiled(config.state_decays, 3, None, 2), gV: tiled(config.value, unit=1),
        gO: seq_layout.output_argument(config.value), gInitialState: array(4), gFinalState: array(4), gCuSeqlens: ENDS,
        length: INT, blocks: INT, heads: INT, scale: FLOAT, order_args: ORDER, span_args: SPANS, condition_args: CONDITION,
    ):  # fmt: skip
        """The outputs of a span of a sequence, and after the last one the state. gQueries .. gStateDecays: of each chunk and
        head, as kda_transform_hopper.py stores them; gSolved: k~ and, beside it, P~^T. order_args: see chunk_order.py;
        span_args: segment_spans.py; condition_args: launch_conditions.py. Each of the value `heads` is `blocks` blocks of
        columns wide."""
        if condition.is_skipped(condition_args):
            return
        tiles = smem.open()
        condition.follow()
        decayed, solved, v, state_decays, out = tiles[:5]
        wg = warpgroup.id()
        block, segment, head, sequence = block_coord(cuda.blockIdx.x, blocks, span_args.segments, heads)
        head_sequence = int32(sequence * heads + head)
        span = spans.locate(seq_layout, gCuSeqlens, sequence, length, head_sequence, segment, span_args)
        seq, n = span.seq, span.seq.num_chunks()
        if wg == LOADER:
            if SETMAXNREG:
                warpgroup.release_registers(LOADER_REGISTERS)
            first = seq_layout.chunk_index(seq.start, sequence, length)
            if warpgroup.rank() == 0:
                for j in range(n):
                    chunk_order.take_item(tiles[5:], order_args, j)
                    chunk = int32(first + j)
                    decayed.fill(j, gDecayedKeys, (chunk, head), 0, 2)
                    decayed.fill(j, gQueries, (chunk, head), 1, 2)
                    state_decays.fill(j, gStateDecays, (chunk, head))
                    solved.fill(j, gSolved, (chunk, head))
                    v.fill(j, gV, (seq.batch, seq.chunk_start(j), head, block))
            elif warpgroup.rank() == WATCHER:
                chunk_order.watch_items(tiles[5:], order_args, head_sequence, n)
            elif warpgroup.rank() < SENDER + output_stages:
                for j in range(warpgroup.rank() - SENDER, n, output_stages):
                    tile = out.wait(j)
                    if j >= span.overlap:
                        seq_layout.send_rows(gO, tile, seq, seq.chunk_start(j), head, block)
                    out.release(j)
            if span.ends:
                for panel in range(CONSUMERS):
                    seq_layout.zero_padding(gO, gCuSeqlens, sequence, length, head, int32(CONSUMERS * block + panel))
        else:
            if SETMAXNREG:
                warpgroup.claim_registers(CONSUMER_REGISTERS)
            state_coord, rings = (sequence, head, 0, COLUMNS * (CONSUMERS * block + wg)), (decayed, v, state_decays, out)
            s_t = zeros(STATE)
            if span.begins:
                s_t = warpgroup.load(gInitialState, STATE, state_coord, 3, 2)
            if n > 0:
                s_t, d, o = read_first_state(rings, s_t, seq.remaining(0), scale)
                for j in range(n - 1):
                    s_t, o = add_chunk(solved, s_t, d, o, j)
                    s_t, d, o = read_state(rings, s_t, o, int32(j + 1), seq.remaining(j + 1), scale)
                s_t, o = add_chunk(solved, s_t, d, o, int32(n - 1))
                warpgroup.store_transposed(part(out.claim(n - 1)), INPUT(o))
                out.publish(n - 1)
            if span.ends:
                warpgroup.store(gFinalState, s_t, state_coord, 3, 2)

    return walk, smem
