"""Linear attention for Hopper, for few long sequences: blocks of a cluster share a sequence, and each token is read once. A
decay is one number for a token and head, or for a head.

    S_t = exp(g_t) S_(t-1) + k_t^T v_t        o_t = scale q_t S_t

A sequence is cut into runs of two chunks of 64 tokens, which the blocks of a cluster have in turn, each one run of a round. All
have the same head and the same 64 columns of its values. Where b is the cumulative sum of a chunk's gates, a block's warpgroups
are

    a producer, whose first warp loads Q, K and V; others compute b
    one for states:   N^T = (exp(b_last - b) V)^T K       the local state: that after the run if the state before it is 0
                      N and b_last go to all peers, and those of the peers' runs come
                      S^T = exp(b_last) S^T + N^T         from run to run of all blocks, so each has the whole state
    two for outputs:  O   = exp(b) Q S + tril(exp(b - b^T) Q K^T) V      of a chunk each, where S is the state before it

What blocks send each other depends on no state, so it is under way while outputs of earlier runs are computed. From run to run
a state takes one multiplication and addition in registers. Local states are rounded to 16 bits: their errors are those of the
values' products. Every exponent that is used is a sum of gates, so never positive."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import float32, int32

from ops import cluster, divmod, last_element, log2, raw, subtile, warpgroup, zeros
from tiles import barrier, bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st, sv
from tiles.launching.arguments import FLOAT, INT, array, tiled
from tiles.targets import Target

from ..parts.recurrent.gates import COL_VEC, DecayGate, Gate, HeadGate, TokenGate
from ..parts.recurrent.tokens import CHUNK, COLUMNS

BLOCKS = 2, 3  # of a cluster
RUN = 2  # chunks of a run
STAGES = {64: 8, 128: 4}  # by the padded key dim: chunks of keys and values in shared memory, a multiple of a run's
STATES, PRODUCER = RUN, RUN + 1  # the warpgroups after those that compute outputs
OUTPUT_REGISTERS, STATE_REGISTERS, PRODUCER_REGISTERS = 112, 240, 48
CUMSUM_WARPS = 2  # warps of the producer that compute b, a chunk each in turn
NUMBERS = rt(16, 16, fp32).row_vec  # a vector in which a warp sends a number
KEY_DIMS = 64, 128  # as padded
KINDS: tuple[type[Gate], ...] = Gate, HeadGate, TokenGate


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. key_dim: the channels of keys, rounded up to one of KEY_DIMS. gate: the kind of gates.
    blocks: of a cluster."""

    key_dim: int
    dtype: dtype
    gate: Gate
    blocks: int = BLOCKS[0]

    @property
    def threads(self):
        """Threads of a block: two warpgroups for outputs, one for states, and the producer."""
        return warpgroup.THREADS * (PRODUCER + 1)

    @property
    def cluster(self):
        """The number of blocks of a cluster, as launches know it."""
        return self.blocks

    @property
    def query_stages(self):
        """Chunks of queries in shared memory. The more peers send states, the fewer it holds."""
        return RUN * (max(BLOCKS) + 1 - self.blocks)

    def __str__(self):
        return ", ".join(filter(None, (f"Dk {self.key_dim} {self.dtype}", str(self.gate), f"{self.blocks} blocks")))


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations. everything: fp16 as well, whose code takes as many registers as bf16's."""
    if target.has_wgmma:
        for input_dtype, key_dim, kind in itertools.product((bf16, fp16) if everything else (bf16,), KEY_DIMS, KINDS):
            yield from (Config(key_dim, input_dtype, kind(), blocks) for blocks in BLOCKS)
            if issubclass(kind, DecayGate) and everything:
                yield Config(key_dim, input_dtype, kind(scale_at_end=True))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    KEYS, INPUT, gate, BLOCKS = config.key_dim, config.dtype, config.gate, config.blocks
    KEY, VALUE = st(CHUNK, KEYS, INPUT), st(CHUNK, COLUMNS, INPUT)  # a chunk of Q or K, and of V or the outputs
    STATE, TRANSPOSED = rt(16, KEYS, fp32), rt(16, CHUNK, INPUT)
    WARPS = warpgroup.WARPGROUP
    READERS = 2 * WARPS  # of a chunk: the warpgroup that computes its outputs, and that for states
    SENT = rt(16, KEYS, INPUT)
    PEERS = BLOCKS - 1
    PART = st(SENT.rows * SENT.cols // 64, 64, INPUT)  # of what is received, by a warp
    NUMBER_BYTES = NUMBERS.length * fp32.itemsize
    smem = shared(
        k=ring(KEY, STAGES[KEYS], READERS),
        v=ring(VALUE, STAGES[KEYS], READERS, once=True),
        q=ring(KEY, config.query_stages, WARPS),
        b=ring(sv(CHUNK, fp32), STAGES[KEYS] if gate.per_token else 1, READERS, writers=1),
        start=ring(st(COLUMNS, KEYS, INPUT), RUN, WARPS, writers=WARPS),
        out=st(RUN * CHUNK, COLUMNS, INPUT),
        state=st(PEERS * WARPS * PART.rows, PART.cols, INPUT),
        decay=sv(PEERS * WARPS * NUMBERS.length, fp32),
        token=sv(PEERS * NUMBERS.length, fp32),
        full=barrier(WARPS),
        free=barrier(),
    )

    @inlined
    def first_token(block, j):
        """The first token of a block's j-th chunk."""
        r, i = divmod(int32(j), RUN)
        return int32(CHUNK * (RUN * (BLOCKS * r + block) + i))

    @inlined
    def peer_of(block, i):
        """The i-th peer of a block, in the order of runs after that of the block. To it, the block is peer PEERS - 1 - i."""
        _, peer = divmod(int32(block + 1 + i), BLOCKS)
        return peer

    @inlined
    def send_state(memory, run_t, run_decay, i):
        """Send this warp's part of a run's local state and its decay to the i-th peer."""
        peer, slot = peer_of(cluster.rank(), i), WARPS * (PEERS - 1 - i) + warpgroup.rank()
        state, decay, full = subtile(memory.state, PART.rows, slot), subtile(memory.decay, NUMBERS.length, slot), memory.full
        cluster.store_fragment_async(cluster.map(state, peer), run_t, cluster.map(full, peer))
        cluster.store_async(cluster.map(decay, peer), zeros(NUMBERS) + run_decay, cluster.map(full, peer))

    @inlined
    def add_peers(memory, s_t, r):
        """The state before the block's run r, from that after its run r - 1, once the states of the runs between them, which
        peers have, are there."""
        raw.expect(memory.full, PEERS * (PART.nbytes + NUMBER_BYTES))
        cluster.receive(memory.full, r + 1)
        for i in range(PEERS):
            decay = last_element(subtile(memory.decay, NUMBERS.length, WARPS * i + warpgroup.rank()))
            received = warpgroup.load_shared_fragment(subtile(memory.state, WARPS * PART.rows, i), SENT)
            s_t = gate.decay(s_t, decay) + fp32(received)
        return s_t

    @inlined
    def allow_next(memory, i):
        """Tell the i-th peer that what it sent has been read. By a store, as an arrival that releases to a cluster waits for
        all of the GPU's memory."""
        if warpgroup.rank() == 0:
            peer, token = peer_of(cluster.rank(), i), subtile(memory.token, NUMBERS.length, PEERS - 1 - i)
            cluster.store_async(cluster.map(token, peer), zeros(NUMBERS), cluster.map(memory.free, peer))

    @inlined
    def wait_for_peers(memory, r):
        """Wait until all peers have read what this warpgroup has sent."""
        if warpgroup.rank() == 0:
            raw.expect(memory.free, PEERS * NUMBER_BYTES)
        cluster.receive(memory.free, r + 1)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def scan_in_turn(
        gQ: tiled(KEY, unit=1), gK: tiled(KEY, unit=1), gV: tiled(VALUE, unit=1), gGates: array(gate.rank), gA: array(2),
        gDtBias: array(2), gO: tiled(VALUE, unit=1), gInitialState: array(4), gFinalState: array(4), length: INT, rounds: INT,
        heads: INT, group: INT, width: INT, scale: FLOAT,
    ):  # fmt: skip
        """The outputs of a block's runs. `group` of the value heads share a key head, and each is `width` blocks of 64 columns
        wide."""
        memory = smem.open()
        k, v, q, b, start = memory.k, memory.v, memory.q, memory.b, memory.start
        cluster.sync()
        wg, block = warpgroup.id(), cluster.rank()
        index, column = divmod(cuda.blockIdx.x // BLOCKS, width)
        sequence, head = divmod(index, heads)
        key_head, _ = divmod(head, group)
        if wg == PRODUCER:
            warpgroup.release_registers(PRODUCER_REGISTERS)
            warp = cuda.threadIdx.x // 32 - 4 * PRODUCER
            if warp == 0:
                for j in range(RUN * rounds):
                    token = first_token(block, j)
                    k.fill(j, gK, (sequence, token, key_head, 0))
                    v.fill(j, gV, (sequence, token, head, column))
                    q.fill(j, gQ, (sequence, token, key_head, 0))
            elif gate.per_token and warp <= CUMSUM_WARPS:
                for j in range(warp - 1, RUN * rounds, CUMSUM_WARPS):
                    gate.produce_cumsum(b, b, j, gGates, gA, gDtBias, sequence, first_token(block, j), length, head)
        elif wg == STATES:
            warpgroup.claim_registers(STATE_REGISTERS)
            at = sequence, head, int32(COLUMNS * column), 0
            s_t, g = warpgroup.load(gInitialState, STATE, at, aligned=False), gate.load_head_gate(gGates, head)
            for i in range(PEERS):
                if peer_of(block, i) < block:  # to whom this block has a run before their first one: an empty one
                    send_state(memory, INPUT(zeros(STATE)), float32(0), i)
                    allow_next(memory, i)
            for r in range(rounds):
                first, second = RUN * r, RUN * r + 1
                remaining = int32(length - first_token(block, first))
                keys, values = k.wait(first), v.wait(first)
                _, a_cols, b_first = gate.consume_cumsum(b, b, first, g, max(remaining, int32(0)))
                v_t = fp32(warpgroup.load_transposed(values, TRANSPOSED))
                v_t = INPUT(gate.decay_values(v_t, a_cols, b_first))
                n_t = warpgroup.mm_AB(v_t, cluster.unmap(keys))
                keys, values = k.wait(second), v.wait(second)
                _, a_cols, b_second = gate.consume_cumsum(b, b, second, g, max(int32(remaining - CHUNK), int32(0)))
                v_t = fp32(warpgroup.load_transposed(values, TRANSPOSED))
                v_t = INPUT(gate.decay_values(v_t, a_cols, b_second))
                n_t = warpgroup.wait(n_t)
                k.release(first)
                v.release(first)
                first_t = INPUT(n_t)
                n_t = warpgroup.mma_AB(gate.decay(n_t, b_second), v_t, cluster.unmap(keys))
                run_t = INPUT(warpgroup.wait(n_t))
                k.release(second)
                v.release(second)
                wait_for_peers(memory, r)
                for i in range(PEERS):
                    if peer_of(block, i) > block or r + 1 < rounds:
                        send_state(memory, run_t, b_first + b_second, i)
                s_t = add_peers(memory, s_t, r)
                warpgroup.sync(fenced=True)  # all warps have read
                for i in range(PEERS):
                    if peer_of(block, i) > block or r + 1 < rounds:
                        allow_next(memory, i)
                warpgroup.store(start.claim(first), s_t)
                start.publish(first)
                warpgroup.store(start.claim(second), gate.decay(s_t, b_first) + fp32(first_t))
                start.publish(second)
                s_t = gate.decay(s_t, b_first + b_second) + fp32(run_t)
            if block == BLOCKS - 1:
                warpgroup.store(gFinalState, s_t, at, aligned=False)
        else:
            warpgroup.release_registers(OUTPUT_REGISTERS)
            g, log2_scale = gate.load_head_gate(gGates, head), log2(zeros(COL_VEC) + scale)
            out = subtile(memory.out, CHUNK, wg)
            for j in range(wg, RUN * rounds, RUN):
                token = first_token(block, j)
                b_rows, a_cols, _ = gate.consume_cumsum(b, b, j, g, max(int32(length - token), int32(0)))
                if gate.folds_scale:
                    b_rows = b_rows + log2_scale
                queries, keys, values = q.wait(j), k.wait(j), v.wait(j)
                s = warpgroup.wait(warpgroup.mm_ABt(queries, keys))
                p = INPUT(gate.decay_scores(s, b_rows, a_cols))
                o = warpgroup.wait(warpgroup.mm_AB(p, values))
                k.release(j)
                v.release(j)
                o = o + gate.decay(warpgroup.wait(warpgroup.mm_ABt(queries, start.wait(j))), b_rows)
                start.release(j)
                q.release(j)
                if not gate.folds_scale:
                    o = o * scale
                warpgroup.send(gO, (sequence, token, head, column), out, o)
            warpgroup.store_wait()
        cluster.sync()

    return scan_in_turn, smem
