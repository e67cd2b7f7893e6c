"""The recurrences of the delta rule over a sequence's chunks, for Hopper, where each channel of the keys has a decay
(delta_channels.py has the equations). Forward in time

    Y = V - K^ S        E = Y - L (beta Y)        S after = exp(b_last) S + K~^T (beta E)
    O = scale (exp(b) Q S + P (beta E)), if it is wanted

and in reverse, with P without the scale,

    dU = scale P^T dO + K~ dS        Z = dU - L^T (beta dU)        dV = beta Z
    dS before = exp(b_last) dS + scale exp(b) Q^T dO - K^^T dV

The two are independent, and so are their columns of values: a thread block has 64 columns of one of them. All that does not
depend on S or dS is in memory (delta_channel_inverse_hopper.py), so a step is three products that wait for one another, and
others in the gaps between them. What a step computes goes through rings to warps of the producer, which store it, so that the
consumer waits for no fence. S and dS are transposed in registers and in memory.

The kernels delta_channel_chains_hopper.py (both recurrences), delta_channel_outputs_hopper.py (forward, with O) and
delta_channel_state_gradients_hopper.py (in reverse) say which recurrence a block has."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from numpy import int32

from ops import load, warpgroup
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, st, static, sv
from tiles.launching.arguments import record, tiled
from tiles.targets import Target

from ..recurrent.gates import ROW_VEC
from ..recurrent.segment_spans import OverlappingSegments, WholeSequences
from ..recurrent.tokens import CHUNK, COLUMNS, ChunkPlace, SequenceLayout, send_tile
from .delta_chunks import KEY_DIMS, TwoParts

CONSUMER, PRODUCER = 0, 1  # warpgroups of a thread block
LOADER, SENDER, STATE_SENDER, OUTPUT_SENDER = range(4)  # warps of the producer
STAGES, VALUE_STAGES = 2, 3  # chunks in flight; of V, dO, P and L
UNFENCED = False  # no fence at a synchronisation or a release, because another one is there already


@dataclass(frozen=True)
class RecurrenceConfig:
    """The configuration of a kernel of these recurrences. key_dim: the channels of keys, padded. varlen: are sequences packed
    (cu_seqlens)? spans: which chunks a block goes through. label: what the kernel computes."""

    key_dim: int
    dtype: dtype
    varlen: bool = False
    spans: WholeSequences = field(default=WholeSequences())
    label: ClassVar[str] = ""
    threads: ClassVar[int] = warpgroup.THREADS * 2

    @property
    def fields(self) -> tuple[int, Any, bool, WholeSequences]:
        """The fields of the recurrences that the kernel runs."""
        return self.key_dim, self.dtype, self.varlen, self.spans

    def __str__(self):
        size = f"{self.label}, by channel, Dk {self.key_dim} {self.dtype}{', varlen' * self.varlen}"
        return ", ".join(filter(None, (size, str(self.spans))))

    @classmethod
    def space(cls, target: Target, everything: bool) -> Iterator[Any]:
        """The configurations: both padded key dims, sequences packed, not packed, and not packed in segments, in bf16; fp16 too
        if `everything`."""
        if target.has_wgmma:
            for key_dim, input_dtype in itertools.product(KEY_DIMS, (bf16, fp16) if everything else (bf16,)):
                yield from (cls(key_dim, input_dtype, varlen) for varlen in (False, True))
                yield cls(key_dim, input_dtype, spans=OverlappingSegments())


@static
class NoOutputRing:
    """What a recurrence does about outputs: nothing, as nobody wants them."""

    products = 0  # of a step that run while the consumer waits for E

    def rings(self, values, scores):
        """The further members of the shared storage. values, scores: the types of their tiles."""
        return {}

    @inlined
    def fill(self, rings, j, factors, at):
        """Have TMA load what O needs of the j-th chunk."""

    @inlined
    def read_state(self, rounded, rings, j):
        """The part of O that comes from the state before the chunk, pending."""
        return 0.0

    @inlined
    def add_chunk(self, o, u, rings, j):
        """O without the scale, pending, from that part. u: beta E, a left operand."""
        return 0.0

    @inlined
    def store(self, o, rings, j, scale):
        """Pass O to the producer, while the state's product runs."""

    @inlined
    def send(self, rings, j, rank, layout, arrays, place, block):
        """A warp stores O of the j-th chunk, which lies at a ChunkPlace. arrays: O and the copy of its tails."""

    @inlined
    def drop(self, rings, j, rank):
        """A warp gives back O of the j-th chunk, as nobody wants it."""


class ChunkOutputRing(NoOutputRing):
    """O^T = scale (S^T (exp(b) Q)^T + U^T P^T), through a ring."""

    products = 1

    def rings(self, values, scores):
        return {"p": ring(scores, STAGES), "outputs": ring(values, 1, 1, writers=warpgroup.WARPGROUP)}

    @inlined
    def fill(self, rings, j, factors, at):
        rings.q.fill(j, factors.gDecayedQ, at)
        rings.p.fill(j, factors.gScores, at)

    @inlined
    def read_state(self, rounded, rings, j):
        return warpgroup.mm_ABt(rounded, rings.q.wait(j))

    @inlined
    def add_chunk(self, o, u, rings, j):
        return warpgroup.mma_ABt(o, u, rings.p.wait(j))

    @inlined
    def store(self, o, rings, j, scale):
        o = warpgroup.wait(o, newer=1) * scale
        rings.q.release(j)
        rings.p.release(j)
        warpgroup.store_transposed(rings.outputs.claim(j), o)
        rings.outputs.publish(j, UNFENCED)

    @inlined
    def send(self, rings, j, rank, layout, arrays, place, block):
        gO, gTailO = arrays
        if rank == OUTPUT_SENDER:
            layout.send_chunk(rings.outputs, j, gO, gTailO, place, block)

    @inlined
    def drop(self, rings, j, rank):
        if rank == OUTPUT_SENDER:
            rings.outputs.wait(j)
            rings.outputs.release(j)


@static
class ChannelRecurrence:
    """What both recurrences have in common. key_dim: the channels of keys, padded. varlen: are sequences packed? spans: which
    chunks a block goes through. outputs: what becomes of O."""

    key_dim: int
    dtype: dtype
    varlen: bool
    spans: WholeSequences
    outputs: NoOutputRing = NoOutputRing()
    reversed: ClassVar[bool] = False

    @property
    def layout(self):
        """The layout of sequences in the direction of the recurrence."""
        return SequenceLayout(self.varlen, self.reversed)

    @property
    def two_parts(self):
        """The two parts of L, and of what it is multiplied by."""
        return TwoParts(self.dtype)

    @property
    def keys(self):
        """The tile of a chunk's queries or keys."""
        return st(CHUNK, self.key_dim, self.dtype)

    @property
    def values(self):
        """The tile of a chunk's values, of a block's columns."""
        return st(CHUNK, COLUMNS, self.dtype)

    @property
    def transposed_values(self):
        """The type of a warp's part of a chunk's values, transposed."""
        return rt(16, CHUNK, self.dtype)

    @property
    def scores(self):
        """The tile of P, the scores of a chunk's queries with its keys."""
        return st(CHUNK, CHUNK, self.dtype)

    @property
    def state(self):
        """The type of a warp's part of a transposed state."""
        return rt(16, self.key_dim, fp32)

    @property
    def state_tile(self):
        """The tile of a block's columns of a transposed state."""
        return st(COLUMNS, self.key_dim, self.dtype)

    @property
    def state_decay(self):
        """The decay of each channel over a chunk."""
        return sv(self.key_dim, fp32)

    @property
    def beta(self):
        """The vector of the betas of a chunk's tokens."""
        return sv(CHUNK, fp32)

    def rings(self):
        """The rings of a thread block, by name. read_keys, write_keys, solutions: K^, K~ and L, as in `factors`."""
        return {
            "read_keys": ring(self.keys, STAGES),
            "write_keys": ring(self.keys, STAGES),
            "v": ring(self.values, VALUE_STAGES),  # dO in blocks of the reverse recurrence
            "solutions": ring(self.two_parts.square, VALUE_STAGES),
            "decay": ring(self.state_decay, STAGES),
            "beta": ring(self.beta, STAGES),
            "q": ring(self.keys, STAGES),
            "p": ring(self.scores, VALUE_STAGES),
            "states": ring(self.state_tile, 1, 1, writers=warpgroup.WARPGROUP),  # S, in reverse dS, to be stored
            "out": ring(self.values, 1, 1, writers=warpgroup.WARPGROUP),  # E, in reverse dV, to be stored
        }

    def factors(self):
        """The arrays that a kernel reads of each chunk and head, as a record: delta_channel_inverse_hopper.py stores them.
        gDecayedQ, gReadKeys, gWriteKeys: exp(b) Q, K^ and K~. gB: exp(b_last). gChunkBeta: beta. gScores: P. gSolutions: L."""
        tokens: dict[str, Any] = dict.fromkeys(("gDecayedQ", "gReadKeys", "gWriteKeys"), tiled(self.keys, rows=2))
        numbers = {"gB": tiled(self.state_decay, 3, None, 2), "gChunkBeta": tiled(self.beta, 3, None, 2)}
        squares = {"gScores": tiled(self.scores, rows=2), "gSolutions": tiled(self.two_parts.square, rows=2)}
        return record(**tokens, **numbers, **squares)

    def results(self) -> tuple[Any, Any, Any]:
        """(the type of V, dO, O or dV, of all tokens; of E of each chunk and head; of S or dS of each, transposed)"""
        return tiled(self.values, unit=1), tiled(self.values, rows=2), tiled(self.state_tile, rows=2)

    @inlined
    def locate(self, gCuSeqlens, sequence, length, head_sequence, segment, span_args):
        """The SegmentSpan of a block, in the direction of the recurrence. Arguments are those of WholeSequences.locate."""
        return self.spans.locate(self.layout, gCuSeqlens, sequence, length, head_sequence, segment, span_args)

    @inlined
    def load_and_store(self, rings, span, length, factors, inputs, results, sequence, head, block):
        """The producer's part: one warp loads what the consumer needs of a span's chunks, others store what it has computed.
        inputs, results: arrays, see `fill` and `send`. block: of columns."""
        rank, seq = warpgroup.rank(), span.seq
        first_chunk = self.layout.chunk_index(seq.start, sequence, length)
        for j in range(seq.num_chunks()):
            place = ChunkPlace(int32(first_chunk + seq.chunk_number(j)), head, sequence, seq.chunk_start(j), seq)
            if rank == LOADER:
                self.fill(rings, j, factors, inputs, place, block)
            elif self.spans.is_overlap(span, j):
                self.drop(rings, j, rank)
            else:
                self.send(rings, j, rank, results, place, block)

    @inlined
    def drop(self, rings, j, rank):
        """A warp gives back what the step of the j-th chunk has computed, as nobody wants it."""
        if rank == SENDER:
            rings.out.wait(j)
            rings.out.release(j)
        elif rank == STATE_SENDER:
            rings.states.wait(j)
            rings.states.release(j)
        self.outputs.drop(rings, j, rank)


class StateRecurrence(ChannelRecurrence):
    """The recurrence of S, from the first chunk on, and O of each chunk, if it is wanted."""

    def rings(self):
        return ChannelRecurrence.rings(self) | self.outputs.rings(self.values, self.scores)

    @inlined
    def fill(self, rings, j, factors, values, place, block):
        """The loader fills the rings of the j-th chunk, which lies at a ChunkPlace. values: V, and the copy of its tails.
        block: of columns."""
        at, (gV, gTailV) = (place.chunk, place.head), values
        rings.read_keys.fill(j, factors.gReadKeys, at)
        self.layout.fill_chunk(rings.v, j, gV, gTailV, place, place.head, block)
        rings.beta.fill(j, factors.gChunkBeta, at)
        rings.solutions.fill(j, factors.gSolutions, at)
        self.outputs.fill(rings, j, factors, at)
        rings.decay.fill(j, factors.gB, at)
        rings.write_keys.fill(j, factors.gWriteKeys, at)

    @inlined
    def send(self, rings, j, rank, results, place, block):
        """A warp stores E, S before the chunk, or O of the j-th chunk. results: the arrays of E and S, and those of O."""
        gErrors, gStates, outputs = results
        if rank == SENDER:
            send_tile(rings.out, j, gErrors, (place.chunk, place.head, 0, block))
        elif rank == STATE_SENDER:
            send_tile(rings.states, j, gStates, (place.chunk, place.head, block))
        self.outputs.send(rings, j, rank, self.layout, outputs, place, block)

    @inlined
    def scan(self, rings, span, gInitialState, at, scale):
        """S after a span's chunks, by the consumer. at: of the block's columns in an array of states."""
        s_t = self.spans.load_state(gInitialState, self.state, at, span)
        for j in range(span.seq.num_chunks()):
            s_t = self.advance(s_t, j, rings, scale)
        return s_t

    @inlined
    def advance(self, s_t, j, rings, scale):
        """The state after the j-th chunk from the state before it. Passes the state before it, the chunk's E and O to the
        producer, which stores them."""
        rounded = self.dtype(s_t)
        u = warpgroup.mm_ABt(rounded, rings.read_keys.wait(j))
        warpgroup.store(rings.states.claim(j), rounded)
        rings.states.publish(j, UNFENCED)
        values = fp32(warpgroup.load_transposed(rings.v.wait(j), self.transposed_values, fenced=False))
        betas = load(rings.beta.wait(j), ROW_VEC)
        y = values - warpgroup.wait(u)
        rings.read_keys.release(j)
        e = self.two_parts.mma_AB(y, self.two_parts.split(y * betas), self.two_parts.halves(rings.solutions.wait(j)))
        o = self.outputs.read_state(rounded, rings, j)
        s_t = s_t * load(rings.decay.wait(j), self.state.row_vec)
        e = warpgroup.wait(e, newer=self.outputs.products)
        u = self.dtype(e * betas)
        o = self.outputs.add_chunk(o, u, rings, j)
        s_t = warpgroup.mma_AB(s_t, u, rings.write_keys.wait(j))
        rings.solutions.release(j)
        warpgroup.store_transposed(rings.out.claim(j), e)
        rings.out.publish(j, UNFENCED)
        self.outputs.store(o, rings, j, scale)
        rings.beta.release(j)  # its fence is that of all loads of this chunk
        rings.decay.release(j, None, UNFENCED)
        rings.v.release(j)
        s_t = warpgroup.wait(s_t)
        rings.write_keys.release(j)
        return s_t


class StateGradientRecurrence(ChannelRecurrence):
    """The recurrence of dS, from the last chunk on."""

    reversed = True

    @inlined
    def fill(self, rings, j, factors, gradients, place, block):
        """The loader fills the rings of the j-th chunk from the end, which lies at a ChunkPlace. gradients: dO, and the copy of
        its tails."""
        at, (gDOut, gTailDOut) = (place.chunk, place.head), gradients
        rings.write_keys.fill(j, factors.gWriteKeys, at)
        self.layout.fill_chunk(rings.v, j, gDOut, gTailDOut, place, place.head, block)
        rings.p.fill(j, factors.gScores, at)
        rings.decay.fill(j, factors.gB, at)
        rings.q.fill(j, factors.gDecayedQ, at)
        rings.beta.fill(j, factors.gChunkBeta, at)
        rings.solutions.fill(j, factors.gSolutions, at)
        rings.read_keys.fill(j, factors.gReadKeys, at)

    @inlined
    def send(self, rings, j, rank, results, place, block):
        """A warp stores dV or dS after the chunk, of the j-th chunk from the end. results: the arrays of dV, of the copy of its
        tails, and of dS."""
        gDV, gTailDV, gStateGradients = results
        if rank == SENDER:
            self.layout.send_chunk(rings.out, j, gDV, gTailDV, place, block)
        elif rank == STATE_SENDER:
            send_tile(rings.states, j, gStateGradients, (place.chunk, place.head, block))

    @inlined
    def scan(self, rings, span, gLastState, at, scale):
        """dS before a span's chunks, by the consumer. at: of the block's columns in an array of states."""
        ds_t, n = self.spans.load_state(gLastState, self.state, at, span), span.seq.num_chunks()
        if n > 0:
            from_outputs = warpgroup.wait(warpgroup.mm_AtB(rings.v.wait(0), rings.p.wait(0)))  # P^T dO of the last chunk
            for j in range(n):
                ds_t, from_outputs = self.advance(ds_t, from_outputs, j, int32(n - 1), rings, scale)
        return ds_t

    @inlined
    def advance(self, ds_t, from_outputs, j, last, rings, scale):
        """(dS before the j-th chunk, counted from the end, P^T dO of the next one, or of this one if it is the `last`) from dS
        after the chunk and from its P^T dO. Passes dS after it, and the chunk's dV, to the producer, which stores them."""
        rounded = self.dtype(ds_t)
        du = warpgroup.mm_ABt(rounded, rings.write_keys.wait(j))
        warpgroup.store(rings.states.claim(j), rounded)
        rings.states.publish(j, UNFENCED)
        do_t = fp32(warpgroup.load_transposed(rings.v.wait(j), self.transposed_values, fenced=False))
        ds_t = ds_t * load(rings.decay.wait(j), self.state.row_vec)
        ds_t = warpgroup.mma_AB(ds_t, self.dtype(do_t * scale), rings.q.wait(j))
        betas = load(rings.beta.wait(j), ROW_VEC)
        du = warpgroup.wait(du, newer=1) + from_outputs * scale
        rings.write_keys.release(j)
        z = self.two_parts.mma_ABt(du, self.two_parts.split(du * betas), self.two_parts.halves(rings.solutions.wait(j)))
        next_chunk = int32(min(j + 1, last))
        from_outputs = warpgroup.mm_AtB(rings.v.wait(next_chunk), rings.p.wait(next_chunk))
        z, ds_t = warpgroup.wait(z, newer=1), warpgroup.wait(ds_t, newer=1)
        dv_t = z * betas
        ds_t = warpgroup.mma_AB(ds_t, self.dtype(0.0 - dv_t), rings.read_keys.wait(j))
        rings.solutions.release(j)
        rings.q.release(j)
        warpgroup.store_transposed(rings.out.claim(j), dv_t)
        rings.out.publish(j, UNFENCED)
        rings.beta.release(j)  # its fence is that of all loads of this chunk
        rings.decay.release(j, None, UNFENCED)
        from_outputs = warpgroup.wait(from_outputs, newer=1)
        rings.v.release(j)
        rings.p.release(j)
        ds_t = warpgroup.wait(ds_t)
        rings.read_keys.release(j)
        return ds_t, from_outputs
