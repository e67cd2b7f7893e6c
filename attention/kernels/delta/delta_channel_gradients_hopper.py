"""Gradients of the delta rule's queries, keys, betas and gates where each channel of the keys has a decay, chunk by chunk in
any order, for Hopper: the results of delta_channel_gradients_ampere.py, from the same arrays (parts/delta/delta_channels.py
has the equations). It serves any decays: of the largest sizes the strong chunks, which
delta_channel_block_gradients_hopper.py leaves, and all chunks of others.

Two warpgroups, the consumers, have half of the channels of the keys each. Products with states, dP and G are wgmmas; while
they run, two warps of each consumer sum up the gates. Then a warp has a block of 16 tokens (block_pairs.py), and adds the pairs
of tokens to the accumulators of the products with states. A third warpgroup loads the next chunk's states, errors and dO as
soon as they are multiplied, and stores dbeta."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import cumsum_columns, divmod, exp2, finish_sum, lane_col_sum, load, store, subtile, truncate, warpgroup, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, ring, shared, st, sv
from tiles.launching.arguments import ENDS, FLOAT, INT, array, tiled
from tiles.layout import LANES
from tiles.targets import Target

from ...parts.delta.delta_channel_chunks import ChunkInputs
from ...parts.delta.delta_gradient_sums import diagonal, store_beta_gradients
from ...parts.recurrent.block_pairs import BlockGradients, BlockPairs, BlockTiles
from ...parts.recurrent.channel_chunks import HALVES, KEY_DIMS, ROWS, UNFENCED, ChunkChannels
from ...parts.recurrent.chunk_items import ChunkGrid, ChunkItems
from ...parts.recurrent.gates import COL_VEC, FLOOR, ROW_VEC
from ...parts.recurrent.tokens import CHUNK, SequenceLayout
from .delta_channel_block_gradients_hopper import SIZES

PRODUCER, DP_CONSUMER = HALVES, 0  # the warpgroup that loads and stores; the consumer that computes dP, the other one G
LOADER, BETA_SENDER = range(2)  # warps of the producer
GATE_WARPS = 2  # warps of a consumer that sum up over tokens
REGISTERS = 24, 240  # of a thread of producer and consumers
VALUE_DIMS = 64, 128  # as padded
WARPS = warpgroup.WARPGROUP * HALVES  # of consumers


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. key_dim, value_dim: the channels of keys and values, padded. gates: the dtype of the gates;
    dtype: of everything else. with_gates: are the gates' gradients wanted? varlen: are sequences packed (cu_seqlens)?"""

    key_dim: int
    value_dim: int
    gates: dtype
    dtype: dtype
    with_gates: bool = True
    varlen: bool = False
    threads = warpgroup.THREADS * (PRODUCER + 1)

    @property
    def only_strong(self):
        """Does delta_channel_block_gradients_hopper.py serve these sizes, so that only its strong chunks are computed here?"""
        return (self.key_dim, self.value_dim) == SIZES

    def __str__(self):
        flags = ", without gates" * (not self.with_gates) + ", varlen" * self.varlen
        flags += ", strong chunks" * self.only_strong
        size = f"Dk {self.key_dim}, Dv {self.value_dim} {self.dtype}, gates {self.gates}"
        return f"gradients in chunks, gates by channel, {size}{flags}"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of all padded sizes in bf16, and the largest without gates and of packed sequences. everything:
    these of all sizes, and fp16, too."""
    if target.has_wgmma:
        for input_dtype in (bf16, fp16) if everything else (bf16,):
            yield from itertools.starmap(Config, itertools.product(KEY_DIMS, VALUE_DIMS, (fp32, input_dtype), (input_dtype,)))
            largest = max(KEY_DIMS), max(VALUE_DIMS)
            yield Config(*largest, fp32, input_dtype, with_gates=False)
            for size in itertools.product(KEY_DIMS, VALUE_DIMS) if everything else (largest,):
                for gates, with_gates in itertools.product((fp32, input_dtype), (False, True)):
                    yield Config(*size, gates, input_dtype, with_gates, varlen=True)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, VALUES, WITH_GATES, GATES = config.dtype, config.value_dim, config.with_gates, config.gates
    IN_PLACE, UNUSED = GATES is fp32, st(16, 16, INPUT)  # b takes the place of fp32 gates, K^ later that of others
    channels, seq_layout = ChunkChannels(config.key_dim), SequenceLayout(config.varlen)
    pairs, PART, OUT = BlockPairs(channels, INPUT), channels.half, channels.rows
    ONLY_STRONG, STATE_ROWS = config.only_strong, VALUES // (warpgroup.WARPGROUP - GATE_WARPS)
    chunk_items = ChunkItems(seq_layout, ONLY_STRONG)
    KEY = st(CHUNK, config.key_dim, INPUT, width=min(128, PART * INPUT.itemsize))  # a panel belongs to one consumer
    GATE = st(CHUNK, config.key_dim, GATES, width=LANES * GATES.itemsize)  # a panel belongs to one warp that sums gates up
    VALUE, SCORES = st(CHUNK, VALUES, INPUT), st(2 * CHUNK, CHUNK, INPUT, width=32)
    STATE = st(VALUES, config.key_dim, INPUT, width=KEY.width)
    inputs = ChunkInputs(seq_layout, KEY, VALUE, GATE, STATE)
    INPUTS, GATE_OUTPUT = inputs.params(), tiled(st(CHUNK, PART, fp32, width=channels.sums.width), unit=1)
    DKEYS, (PRODUCER_REGISTERS, CONSUMER_REGISTERS) = tiled(st(CHUNK, PART, INPUT), unit=1), REGISTERS
    smem = shared(
        q=ring(KEY, 1, WARPS),
        k=ring(KEY, 1, WARPS),
        do=ring(VALUE, 1, WARPS),
        e=ring(VALUE, 1, WARPS),
        dv=ring(VALUE, 1, WARPS),
        s=ring(STATE, 1, WARPS),
        ds=ring(STATE, 1, WARPS),
        g=ring(GATE, 1, WARPS),
        beta=ring(sv(CHUNK, fp32), 1, WARPS + 1),
        w=ring(SCORES, 1, WARPS, writers=WARPS),
        dbeta=ring(sv(CHUNK, fp32), 1, 1, writers=warpgroup.WARPGROUP),
        gate_sums=UNUSED if IN_PLACE else channels.sums,
        read_keys=KEY if IN_PLACE else UNUSED,
        vectors=pairs.vectors,
        carried=sv(WARPS * PART, fp32),
    )

    @inlined
    def dot_states(states, d_states):
        """<S, dS> of each channel, over the warp's columns of values, which are divided among the warps that sum up no
        gates."""
        dots = lane_col_sum(zeros(OUT))
        for i in range(STATE_ROWS // 16):
            row = int32(STATE_ROWS // 16 * (warpgroup.rank() - GATE_WARPS) + i)
            s = fp32(load(subtile(states, 16, row), pairs.operand, fenced=False))
            dots = dots + lane_col_sum(s * fp32(load(subtile(d_states, 16, row), pairs.operand, fenced=False)))
        return finish_sum(dots)

    @inlined
    def finish_scores(scores, beta, dbeta, j, scale):
        """dP from dO E^T, or G from dV E^T, whose diagonal is beta dbeta."""
        cols = load(beta, ROW_VEC)
        if warpgroup.id() == DP_CONSUMER:
            scores = warpgroup.causal(scores * (cols * scale), 0, 0.0)
        else:
            warpgroup.store(dbeta.claim(j), diagonal(scores))
            dbeta.publish(j)
            scores = warpgroup.causal(scores * (0.0 - cols), -1, 0.0)
        return INPUT(scores)

    @inlined
    def store_part(gX, gTails, place, tile, wg):
        """Store a consumer's part of a shared tile."""
        array, batch, row = seq_layout.whole_tile(gX, gTails, place.seq, place.token, place.sequence)
        warpgroup.tma_store(array, (batch, row, place.head, wg), subtile(tile, CHUNK, 0, PART, wg))

    @inlined
    def sum_gates(target, source):
        """Write the running sums over tokens of the consumer's part of the gates."""
        rank = warpgroup.rank()
        if rank < PART // LANES:
            index = int32(PART // LANES * warpgroup.id() + rank)
            cumsum_columns(subtile(target, CHUNK, 0, LANES, index), subtile(source, CHUNK, 0, LANES, index), FLOOR)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def differentiate(
        arrays: INPUTS, gDQ: DKEYS, gDK: DKEYS, gDBeta: array(3), gDGates: GATE_OUTPUT, gQueryRows: array(4, INPUT),
        gKeyRows: array(4, INPUT), gGateRows: array(4, GATES), gStrong: array(2), gStrongBlocks: array(1), gTailDQ: DKEYS,
        gTailDK: DKEYS, gTailDGates: GATE_OUTPUT, gCuSeqlens: ENDS, length: INT, chunks: INT, items: INT, heads: INT,
        group: INT, scale: FLOAT,
    ):  # fmt: skip
        """arrays: see ChunkInputs; chunks, items: ChunkGrid; gTailDQ .. gTailDGates: packed_tails.py; gStrong, gStrongBlocks:
        delta_channel_block_gradients_hopper.py. gQueryRows, gKeyRows, gGateRows: gQ, gK and gGates, for rows of blocks that are
        not gentle."""
        memory = smem.open()
        q, k, do, e, dv, s, ds, g, beta, w, dbeta, gate_sums, read_keys, vectors, carried = memory
        grid = ChunkGrid(gCuSeqlens, length, chunks, items, heads)
        if ONLY_STRONG and gStrongBlocks[cuda.blockIdx.x] == 0:
            return
        if warpgroup.id() == PRODUCER:
            warpgroup.release_registers(PRODUCER_REGISTERS)
            item, j = chunk_items.next_item(grid, int32(0), gStrong), int32(0)
            if warpgroup.rank() == LOADER:
                while chunk_items.has(grid, item):
                    inputs.fill(memory, arrays, j, chunk_items.locate(grid, item), group)
                    item, j = chunk_items.next_item(grid, int32(item + 1), gStrong), int32(j + 1)
            elif warpgroup.rank() == BETA_SENDER:
                while chunk_items.has(grid, item):
                    _, head, _, token, seq = chunk_items.locate(grid, item)
                    betas, sums = beta.wait(j), dbeta.wait(j)
                    store_beta_gradients(gDBeta, seq, head, token, sums, betas)
                    beta.release(j)
                    dbeta.release(j)
                    item, j = chunk_items.next_item(grid, int32(item + 1), gStrong), int32(j + 1)
        else:
            warpgroup.claim_registers(CONSUMER_REGISTERS)
            item, j = chunk_items.next_item(grid, int32(0), gStrong), int32(0)
            while chunk_items.has(grid, item):  # range would hold a register more
                wg, rank = warpgroup.id(), warpgroup.rank()
                # products with states, dP and G, while gates are summed up
                errors, left = e.wait(j), do.wait(j)
                douts, dvs = left, dv.wait(j)
                if wg != DP_CONSUMER:
                    left = dvs
                states, d_states = subtile(s.wait(j), VALUES, 0, PART, wg), subtile(ds.wait(j), VALUES, 0, PART, wg)
                scores = warpgroup.mm_ABt(left, errors)
                dq = warpgroup.mm_AB(douts, states)
                dk_read = warpgroup.mm_AB(dvs, states)
                dk_write = warpgroup.mm_AB(errors, d_states)
                gates, betas = g.wait(j), beta.wait(j)
                if IN_PLACE:
                    b, decayed_keys = gates, read_keys
                else:
                    b, decayed_keys = gate_sums, gates
                warp_carried = subtile(carried, PART, int32(warpgroup.WARPGROUP * wg + rank))
                if rank < GATE_WARPS:
                    sum_gates(b, gates)
                    store(warp_carried, zeros(OUT.row_vec))
                elif WITH_GATES:
                    store(warp_carried, dot_states(states, d_states))
                scores = finish_scores(warpgroup.wait(scores, newer=3), betas, dbeta, j, scale)
                warpgroup.store(subtile(w.claim(j), CHUNK, wg), scores)
                w.publish(j, UNFENCED)
                rows = warpgroup.load(betas, COL_VEC)
                beta.release(j)
                dq, dk_read = warpgroup.wait(dq, newer=2) * scale, 0.0 - warpgroup.wait(dk_read, newer=1)
                dk_write = warpgroup.wait(dk_write) * rows
                do.release(j)
                e.release(j)
                dv.release(j)
                s.release(j)
                ds.release(j)
                warpgroup.sync(UNFENCED)  # the gates' sums are written
                tiles = BlockTiles(q.wait(j), k.wait(j), decayed_keys, b, vectors, w.wait(j))
                is_gentle, has_floor_gates = pairs.prepare(tiles)
                warpgroup.sync(UNFENCED)  # all warps' writes of `prepare` are visible

                # pairs of tokens
                if WITH_GATES:
                    state_part = load(warp_carried, OUT.row_vec) * exp2(pairs.last_sum(b))
                    cuda.syncwarp()
                    store(warp_carried, state_part + pairs.sum_dk_write(tiles, dk_write))
                sums = pairs.add_pairs(BlockGradients(dq, dk_read, dk_write), tiles, is_gentle)
                r = pairs.dot_tokens(sums, tiles)
                dq, dk = pairs.finish(sums, tiles)
                wg, place = warpgroup.id(), chunk_items.locate(grid, item)  # again, to save registers
                key_rows = truncate(gQueryRows, 1, place.seq.end), truncate(gKeyRows, 1, place.seq.end)
                key_head, _ = divmod(place.head, group)
                keys_at = place.seq.batch, int32(place.token + ROWS * warpgroup.rank()), key_head, int32(PART * wg)
                dq, dk, r = pairs.add_near_pairs(dq, dk, r, tiles, is_gentle, key_rows, keys_at)
                w.release(j)
                warpgroup.sync(UNFENCED)  # all have read what `prepare` wrote
                wg, place = warpgroup.id(), chunk_items.locate(grid, item)
                store(channels.part(tiles.q), INPUT(dq))
                store(channels.part(tiles.k), INPUT(dk))
                store_part(gDQ, gTailDQ, place, tiles.q, wg)
                store_part(gDK, gTailDK, place, tiles.k, wg)
                if WITH_GATES:
                    gates_at = place.seq.batch, int32(place.token + ROWS * warpgroup.rank()), place.head, int32(PART * wg)
                    gate_rows = truncate(gGateRows, 1, place.seq.end)
                    pairs.write_gate_gradients(b, r, carried, has_floor_gates, gate_rows, gates_at)
                    store_part(gDGates, gTailDGates, place, b, wg)
                warpgroup.store_wait()
                q.release(j)
                k.release(j)
                g.release(j)
                item, j = chunk_items.next_item(grid, int32(item + 1), gStrong), int32(j + 1)

    return differentiate, smem
