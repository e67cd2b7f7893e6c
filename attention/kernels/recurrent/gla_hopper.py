"""Linear attention for Hopper where every channel of a key decays by itself (gated linear attention, Yang et al. 2024).

    S_t = diag(exp(g_t)) S_(t-1) + k_t^T v_t        o_t = scale q_t S_t        g_t: Dk numbers, never positive

With the decays factored around a reference r, a chunk is one of linear attention without decays (b, q', k* and S' are those of
channel_decay.py):

    P = tril(q' k*^T)        O = scale (q' S' + P V)        S = exp(b_last - r) (S' + k*^T V)

Two warpgroups compute what does not depend on the state: the preparer q' and k* of a chunk, then the scorer its P and b of the
chunk after the next, while the preparer is at the next one. Consumers, of 64 value columns each, update the state. They hold it
transposed, 64 x Dk, and O too. They give back queries, keys and values last, so they have TMA load the next ones.

The rounding errors of q' and of P (their residuals) are multiplied as well. Without that, factoring would add half as much
error as all other roundings together."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from numba import cuda
from numpy import int32

from ops import columns, divmod, store, subtile, viewed, warpgroup, zeros
from tiles import bf16, fp16, fp32, inlined, ring, rt, shared, st, sv
from tiles.launching.arguments import ENDS, FLOAT, INT, array, tiled
from tiles.targets import Target

from ...parts.recurrent import channel_config, channel_decay
from ...parts.recurrent.anchored_scores import AnchoredScores
from ...parts.recurrent.l2norm import L2Norm
from ...parts.recurrent.query_scores import QueryScores, QueryScoreTiles
from ...parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout, block_coord
from ...parts.recurrent.transposed_state import TransposedState

REGISTERS = {1: (184, 80, 240), 2: (112, 80, 160)}  # consumers -> registers a thread of preparer, scorer and consumer
STAGES = {64: 2, 128: 2, 256: 1}  # padded key dim: chunks in flight
WIDE_KEY_DIM = 128  # beyond it a state takes half of a consumer's registers: there is one consumer


@dataclass(frozen=True)
class Config(channel_config.Config):
    """A kernel's configuration: that of channel_config.py, with two preparers: the preparer of this kernel and its scorer.
    stores_states: is the state before each chunk stored, transposed, for a backward pass?"""

    stores_states: bool = field(default=False, kw_only=True)
    preparers: ClassVar[int] = 2

    def __str__(self):
        return super().__str__() + ", states of chunks" * self.stores_states


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations. Without `everything`, varlen ones come in one size only, and fp16 is left out."""
    yield from channel_config.channel_space(Config, channel_config.GLA_SIZES, target, everything)
    if target.has_wgmma:
        for input_dtype, varlen in itertools.product((bf16, fp16), (False, True)) if everything else ((bf16, False),):
            yield Config(128, 2, fp32, input_dtype, varlen, stores_states=True)


class GlaDecay(channel_decay.ChannelDecay):
    """The decays of GLA's kernel, which also stores the residual of q', its rounding error."""

    @inlined
    def store_extra(self, residual, query, key, decay, strong):
        """Store the residual of q', unless the chunk is strong."""
        if not strong:
            store(residual, query - fp32(self.dtype(query)))


@inlined
def halved_scores_part(tile):
    """Where the scores of a halved chunk lie in a tile of the ring `scored`."""
    return subtile(tile, CHUNK, 0, CHUNK, 0)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    CONSUMERS, INPUT, IN_PLACE = config.consumers, config.dtype, config.gates is fp32
    PREPARER, SCORER, (preparer_registers, scorer_registers, consumer_registers) = (
        CONSUMERS,
        CONSUMERS + 1,
        REGISTERS[CONSUMERS],
    )
    STORES_STATES = config.stores_states
    KEY_DIM, STAGE_COUNT, SETMAXNREG = config.key_dim, STAGES[config.key_dim], CONSUMERS == 1
    GATE_STAGES = STAGE_COUNT if IN_PLACE else 1
    SCORED_STAGES = STAGE_COUNT if IN_PLACE or KEY_DIM < WIDE_KEY_DIM else 1
    NEAR_AND_MORE = st(2 * CHUNK, KEY_DIM, INPUT, width=config.key.width)
    STATE, WEIGHTS, SCORES = rt(16, KEY_DIM, fp32), rt(16, CHUNK, INPUT), rt(16, CHUNK, fp32)
    WARPS, readers = warpgroup.WARPGROUP, CONSUMERS * warpgroup.WARPGROUP
    decay = GlaDecay(KEY_DIM, INPUT, CONSUMERS, KEY_DIM <= WIDE_KEY_DIM)
    channel_gates = config.limited_gates if decay.has_references else config.channel_gates
    PARAMS = channel_gates.params()
    halved_scores, block_scores = AnchoredScores(KEY_DIM, INPUT), QueryScores(KEY_DIM, INPUT)
    START = block_scores.to_start
    smem = shared(
        q=ring(config.key, STAGE_COUNT, readers + 2 * WARPS),
        k=ring(config.key, STAGE_COUNT, readers + 2 * WARPS),
        v=ring(config.value, CONSUMERS, WARPS),
        g=ring(config.gate, GATE_STAGES, WARPS),
        p=ring(st(2 * CHUNK, CHUNK, INPUT), 1, readers, writers=WARPS),
        # what the scorer takes beside q' and k*: the residual of q'; of a strong chunk K*_i (QueryScoreTiles), or its scores
        scored=ring(config.key, SCORED_STAGES, WARPS, writers=WARPS),
        out=st(CHUNK * CONSUMERS, COLUMNS, INPUT),
        gate_sums=ring(config.gate_sums, STAGE_COUNT, WARPS, writers=WARPS),
        state_decay=ring(config.state_decay, STAGE_COUNT, readers, writers=WARPS),
        flag=ring(channel_decay.FLAG, STAGE_COUNT, readers + WARPS, writers=WARPS),
        to_start=sv(2 * START.length if decay.has_references else 16, fp32),
        biases=channel_gates.biases,
        rates=channel_gates.rates,
    )
    norm = L2Norm(config.l2norm, config.key_dim, config.key_dim // warpgroup.WARPGROUP)
    seq_layout = SequenceLayout(config.varlen)
    state = TransposedState(KEY_DIM, INPUT, seq_layout)

    @inlined
    def apply_state(s_t, queries, state_decay, strong):
        """(S'^T q'^T, pending; the state to which the keys are added). A wide state is multiplied in two halves, because
        registers do not hold all of it rounded."""
        if KEY_DIM <= WIDE_KEY_DIM:
            rounded = INPUT(s_t)
            s_t = decay.decay_state(s_t, state_decay, strong)
            return warpgroup.mm_ABt(rounded, queries), s_t
        else:
            rounded = INPUT(columns(s_t, WIDE_KEY_DIM, 0))
            o = warpgroup.wait(warpgroup.mm_ABt(rounded, subtile(queries, CHUNK, 0, WIDE_KEY_DIM, 0)))
            rounded = INPUT(columns(s_t, WIDE_KEY_DIM, 1))
            s_t = decay.decay_state(s_t, state_decay, strong)
            return warpgroup.mma_ABt(o, rounded, subtile(queries, CHUNK, 0, WIDE_KEY_DIM, 1)), s_t

    @inlined
    def pick_start(to_start, j):
        """The vector exp(r) of a chunk's blocks: there are two, as a scorer reads one while the next is written."""
        return subtile(to_start, START.length, j % 2)

    @inlined
    def open_tiles(queries, keys, block_keys, sums, to_start):
        """The tiles of a strong chunk whose blocks have references."""
        return QueryScoreTiles(queries, keys, block_keys, subtile(viewed(sums, NEAR_AND_MORE), CHUNK, 1), to_start)

    @inlined
    def factor_blocks(queries, keys, block_keys, sums, to_start, warp):
        """Decay the tokens of a strong chunk whose blocks have references."""
        if decay.has_references:
            block_scores.factor(open_tiles(queries, keys, block_keys, sums, to_start), sums, warp)

    @inlined
    def score_blocks(queries, keys, scored, g, gate_sums, to_start, j):
        """The scores of a strong chunk whose blocks have references. Gives back what the preparer waits for, then decays
        queries to the start of the chunk."""
        if decay.has_references:
            warp = warpgroup.rank()
            tiles = open_tiles(queries, keys, scored.wait(j), pick_sums(g, gate_sums, j), pick_start(to_start, j))
            scores = warpgroup.causal(block_scores.score(tiles, warp), 0, 0.0)
            scored.release(j)
            release_sums(g, gate_sums, j)
            warpgroup.sync()  # all warps have multiplied
            block_scores.decay_to_start(tiles, warp)
            return scores
        else:
            return zeros(SCORES)

    @inlined
    def fill_gates(g, gGates, seq, j, head):
        """Have TMA load the gates of the j-th chunk, if there is one."""
        if j < seq.num_chunks():
            g.fill(j, gGates, (seq.batch, seq.chunk_start(j), head))

    @inlined
    def sum_gates(g, gGates, gate_sums, constants, seq, j, head, warp):
        """Write b of the j-th chunk, if there is one. The scorer calls this, as it waits for the preparer in any case."""
        if IN_PLACE and j >= GATE_STAGES:
            fill_gates(g, gGates, seq, j, head)
        if j < seq.num_chunks():
            sums, gates, remaining = gate_sums.claim(j), g.wait(j), seq.remaining(j)
            seq_layout.zero_other_rows(gates, remaining)
            channel_gates.cumsum(gates if IN_PLACE else sums, gates, constants, warp, remaining)
            gate_sums.publish(j)
            if not IN_PLACE:
                g.release(j)
                fill_gates(g, gGates, seq, j + 1, head)

    @inlined
    def pick_sums(g, gate_sums, j):
        """The tile of b of the j-th chunk."""
        sums = gate_sums.wait(j)
        return g.wait(j) if IN_PLACE else sums

    @inlined
    def release_sums(g, gate_sums, j):
        """The place of b of the j-th chunk is no longer read."""
        gate_sums.release(j)
        if IN_PLACE:
            g.release(j)

    @inlined
    def fill_tokens(q, k, gQ, gK, seq, j, key_head):
        """Have TMA load the queries and keys of the j-th chunk, if there is one."""
        if j < seq.num_chunks():
            at = seq.batch, seq.chunk_start(j), key_head
            k.fill(j, gK, at)
            q.fill(j, gQ, at)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def scan(
        gQ: tiled(config.key, unit=1), gK: tiled(config.key, unit=1), gV: tiled(config.value, unit=1),
        gGates: tiled(config.gate, unit=1), gO: seq_layout.output_argument(config.value), gInitialState: array(4),
        gFinalState: array(4), gStates: array(4, INPUT), gCuSeqlens: ENDS, length: INT, blocks: INT, segments: INT, heads: INT,
        group: INT, scale: FLOAT, params: PARAMS,
    ):  # fmt: skip
        """The outputs of a segment, and after the last one the state. Each of the `segments` of a sequence has thread blocks of
        its own. gInitialState: the state before each segment. `group` value heads share a key head; each is `blocks` blocks of
        columns wide. gStates: the state before each chunk, if it is stored."""
        q, k, v, g, p, scored, out, gate_sums, state_decay, flag, to_start, biases, rates = smem.open()
        wg = warpgroup.id()
        block, segment, head, sequence = block_coord(cuda.blockIdx.x, blocks, segments, heads)
        seq = seq_layout.segment_tokens(gCuSeqlens, sequence, length, segment, segments)
        n = seq.num_chunks()
        if wg == PREPARER:
            if SETMAXNREG:
                warpgroup.claim_registers(preparer_registers)
            else:
                warpgroup.release_registers(preparer_registers)
            warp = warpgroup.rank()
            for j in range(n):
                sums = pick_sums(g, gate_sums, j)
                b_last = decay.load_last_sums(sums, warp)
                strong, halved = decay.vote(sums, b_last, warp)
                by_blocks = decay.has_references and strong and not halved
                queries, keys = q.wait(j), k.wait(j)
                seq_layout.zero_other_rows(keys, seq.remaining(j))
                norm.normalize(queries, warp)
                norm.normalize(keys, warp)
                norm.sync()
                scored_tile = scored.claim(j)
                if halved:
                    scores = halved_scores.compute(queries, keys, scored_tile, sums, scored_tile, warp)
                    warpgroup.sync()
                    warpgroup.store(halved_scores_part(scored_tile), scores)
                    warpgroup.sync()
                if by_blocks:
                    factor_blocks(queries, keys, scored_tile, sums, pick_start(to_start, j), warp)
                else:
                    decay.factor_chunk_decays(queries, keys, scored_tile, sums, b_last, warp, strong)
                decay.store_state_decay(state_decay.claim(j), flag.claim(j), b_last, warp, strong, halved)
                scored.publish(j)  # first: its fence is that of the queries and keys, too
                state_decay.publish(j)
                flag.publish(j)
                if not by_blocks:
                    release_sums(g, gate_sums, j)
                q.release(j)
                k.release(j)
        elif wg == SCORER:
            warpgroup.release_registers(scorer_registers)
            key_head, _ = divmod(head, group)
            warp, constants = warpgroup.rank(), (biases, rates)
            channel_gates.load_constants(constants, params, head, warp)
            for j in range(GATE_STAGES):
                fill_gates(g, gGates, seq, j, head)
            for j in range(STAGE_COUNT):
                fill_tokens(q, k, gQ, gK, seq, j, key_head)
            for j in range(1 - STAGE_COUNT, n):
                sum_gates(g, gGates, gate_sums, constants, seq, j + STAGE_COUNT - 1, head, warp)
                if j >= 0:
                    scored_tile, strength, queries, keys = scored.wait(j), decay.load_flag(flag.wait(j)), q.wait(j), k.wait(j)
                    flag.release(j)
                    if decay.halves and strength > 1:
                        s = fp32(warpgroup.load(halved_scores_part(scored_tile), WEIGHTS))
                        scored.release(j)
                    elif strength > 0:
                        s = score_blocks(queries, keys, scored, g, gate_sums, to_start, j)
                    else:
                        residual = scored_tile
                        s = warpgroup.wait(warpgroup.mma_ABt(warpgroup.mm_ABt(queries, keys), residual, keys))
                        s = warpgroup.causal(s, 0, 0.0)  # in each branch: wgmma's registers would be joined behind them
                        scored.release(j)
                    q.release(j)
                    k.release(j)
                    weights, rounded = p.claim(j), INPUT(s)
                    warpgroup.store(subtile(weights, CHUNK, 0), rounded)
                    warpgroup.store(subtile(weights, CHUNK, 1), s - fp32(rounded))
                    p.publish(j)
        else:
            warpgroup.claim_registers(consumer_registers)
            column, out_tile = COLUMNS * (CONSUMERS * block + wg), subtile(out, CHUNK, wg)
            key_head, _ = divmod(head, group)
            s_t = warpgroup.load(gInitialState, STATE, (sequence * segments + segment, head, column, 0), aligned=False)
            first_chunk = seq_layout.chunk_index(seq.start, sequence, length)
            decay.fill_values(v, gV, 0, n, seq, head, block, wg)
            for j in range(n):
                if STORES_STATES:
                    warpgroup.store(gStates, s_t, (int32(first_chunk + j), head, column, 0), aligned=True)
                state_factor, strong, queries, keys = state_decay.wait(j), decay.is_strong(flag.wait(j)), q.wait(j), k.wait(j)
                values = v.wait(CONSUMERS * j + wg)
                seq_layout.zero_other_rows(values, seq.remaining(j))
                s_t = decay.decay_state(s_t, state_factor, not strong)
                if strong:
                    p.wait(j)  # until then the scorer decays queries
                o, s_t = apply_state(s_t, queries, state_factor, strong)
                weights = p.wait(j)
                o = warpgroup.mma_AtBt(o, values, subtile(weights, CHUNK, 0))
                o = warpgroup.mma_AtBt(o, values, subtile(weights, CHUNK, 1))
                s_t = warpgroup.mma_AtB(s_t, values, keys)
                o = warpgroup.wait(o, newer=1) * scale
                q.release(j)
                p.release(j)
                s_t = decay.decay_state(warpgroup.wait(s_t), state_factor, not strong)
                k.release(j)
                v.release(CONSUMERS * j + wg)
                if wg == 0:
                    fill_tokens(q, k, gQ, gK, seq, j + STAGE_COUNT, key_head)
                decay.fill_values(v, gV, j + 1, n, seq, head, block, wg)
                state_decay.release(j)
                flag.release(j)
                state.store_output(gO, out_tile, o, seq, seq.chunk_start(j), head, CONSUMERS * block + wg)
            warpgroup.store_wait()
            if segment == segments - 1:
                warpgroup.store(gFinalState, s_t, (sequence, head, column, 0), aligned=False)
                seq_layout.zero_padding(gO, gCuSeqlens, sequence, length, head, CONSUMERS * block + wg)

    return scan, smem
