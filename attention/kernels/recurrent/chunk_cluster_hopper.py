"""Linear attention for Hopper, for few long sequences: blocks of a cluster share a sequence, and each token is read once. A
decay is one number for a token and head, or for a head.

    S_t = exp(g_t) S_(t-1) + k_t^T v_t        o_t = scale q_t S_t

A sequence is cut into runs of two chunks of 64 tokens, which the two blocks of a cluster have in turn, each one run of a round.
Both have the same head and the same 64 columns of its values. Where b is the cumulative sum of gates from the beginning of a
run on, a block's warpgroups are

    a producer, whose first warp loads Q, K and V; others compute b
    one for states:   N^T = (exp(b_last - b) V)^T K       the local state of a run: the state after it if that before it is 0
                      N and b_last go to the peer, and those of the peer's run come
                      S^T = exp(b_last) S^T + N^T         from run to run of both blocks, so each has the whole state
    two for outputs:  O   = exp(b) Q S + tril(exp(b - b^T) Q K^T) V      of a chunk each, where S is the state before the run

Block 0 has runs 0, 2, .. and block 1 runs 1, 3, .. of the sequence. Before its round r a block needs the peer's run just before
it, so block 1 first sends an empty run, and its last run goes to nobody:

    round                0        1        2
    block 0: has run     0        2        4
             needs     empty      1        3       of block 1
    block 1: has run     1        3        5
             needs       0        2        4       of block 0

A block has room for one run of the peer's, the inbox. Once it has read that, it gives the peer credit for the next one. Block 1
gives its first credit before its first round; the empty run needs none.

What blocks send each other depends on no state, so it is under way while outputs of earlier runs are computed. From run to run
a state takes one multiplication and addition in registers. Every exponent that is used is a sum of gates, so never positive.

The ring b has each chunk's own sums; b of the second chunk is that plus the first one's decay, its last sum."""

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

from ...parts.recurrent.gates import COL_VEC, TILE, DecayGate, Gate, HeadGate, TokenGate
from ...parts.recurrent.tokens import CHUNK, COLUMNS, ChunkPlace, TokenRange

BLOCKS = 2  # of a cluster. It lies in one GPC, so of clusters of four not 32 run at once on 132 multiprocessors
RUN = 2  # chunks of a run; the code writes out both
STAGES = 2  # runs of keys and values in shared memory: while outputs of one are computed, the next one's state is
QUERY_STAGES = 4  # chunks of queries in shared memory; a multiple of the two warpgroups that take turns at them
STATES, PRODUCER = RUN, RUN + 1  # the warpgroups after those that compute outputs
STATE_REGISTERS, PRODUCER_REGISTERS = 208, 48  # those that compute outputs keep the 128 of a launch of 512 threads
CUMSUM_WARPS = 2  # warps of the producer that compute b, a chunk each in turn
NUMBERS = rt(16, 16, fp32).row_vec  # a vector in which a warp sends a number
KEY_DIMS = 64, 128  # as padded
KINDS: tuple[type[Gate], ...] = Gate, HeadGate, TokenGate


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. key_dim: the channels of keys, rounded up to one of KEY_DIMS. gate: the kind of gates."""

    key_dim: int
    dtype: dtype
    gate: Gate

    @property
    def threads(self):
        """Threads of a block: two warpgroups for outputs, one for states, and the producer."""
        return warpgroup.THREADS * (PRODUCER + 1)

    @property
    def cluster(self):
        """The number of blocks of a cluster, as launches know it."""
        return BLOCKS

    def __str__(self):
        return ", ".join(filter(None, (f"Dk {self.key_dim} {self.dtype}", str(self.gate))))


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations. everything: fp16 as well, whose code takes as many registers as bf16's."""
    if target.has_wgmma:
        for input_dtype, key_dim, kind in itertools.product((bf16, fp16) if everything else (bf16,), KEY_DIMS, KINDS):
            yield Config(key_dim, input_dtype, kind())
            if issubclass(kind, DecayGate) and everything:
                yield Config(key_dim, input_dtype, kind(scale_at_end=True))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    KEYS, INPUT, gate = config.key_dim, config.dtype, config.gate
    KEY, VALUE, QUERY = st(RUN * CHUNK, KEYS, INPUT), st(RUN * CHUNK, COLUMNS, INPUT), st(CHUNK, KEYS, INPUT)
    OUT, STATE, TRANSPOSED = st(CHUNK, COLUMNS, INPUT), rt(16, KEYS, fp32), rt(16, CHUNK, INPUT)
    WARPS, CONSUMERS = warpgroup.WARPGROUP, warpgroup.WARPGROUP * (RUN + 1)
    SENT = rt(16, KEYS, INPUT)
    PART = st(SENT.rows * SENT.cols // 64, 64, INPUT)  # of what is received, by a warp
    NUMBER_BYTES = NUMBERS.length * fp32.itemsize
    smem = shared(
        k=ring(KEY, STAGES, CONSUMERS),
        v=ring(VALUE, STAGES, CONSUMERS, once=True),
        q=ring(QUERY, QUERY_STAGES, WARPS),
        b=ring(sv(CHUNK, fp32), RUN * STAGES if gate.per_token else 1, CONSUMERS, writers=1),
        state_before=ring(st(COLUMNS, KEYS, INPUT), 2, RUN * WARPS, writers=WARPS),
        out=st(RUN * CHUNK, COLUMNS, INPUT),
        inbox_state=st(WARPS * PART.rows, PART.cols, INPUT),
        inbox_decay=sv(WARPS * NUMBERS.length, fp32),
        credit=sv(NUMBERS.length, fp32),
        full=barrier(WARPS),
        free=barrier(),
    )

    @inlined
    def send_state(memory, n_t, run_decay):
        """Send this warp's part of a run's local state and its decay to the peer. The state is rounded: its error is that of
        the values' products, which are of 16 bits, too."""
        warp, peer, full = warpgroup.rank(), 1 - cluster.rank(), memory.full
        state, decay = subtile(memory.inbox_state, PART.rows, warp), subtile(memory.inbox_decay, NUMBERS.length, warp)
        cluster.store_fragment_async(cluster.map(state, peer), INPUT(n_t), cluster.map(full, peer))
        cluster.store_async(cluster.map(decay, peer), zeros(NUMBERS) + run_decay, cluster.map(full, peer))

    @inlined
    def add_peer(memory, s_t, r):
        """The state before the block's run r, from that after its run r - 1, once the local state of the run between them,
        which the peer has, is there."""
        raw.expect(memory.full, PART.nbytes + NUMBER_BYTES)
        cluster.receive(memory.full, r + 1)
        decay = last_element(subtile(memory.inbox_decay, NUMBERS.length, warpgroup.rank()))
        return gate.decay(s_t, decay) + fp32(warpgroup.load_shared_fragment(memory.inbox_state, SENT))

    @inlined
    def allow_next(memory):
        """Give the peer credit: what it sent has been read. By a store, as an arrival that releases to a cluster waits for all
        of the GPU's memory."""
        if warpgroup.rank() == 0:
            peer = 1 - cluster.rank()
            cluster.store_async(cluster.map(memory.credit, peer), zeros(NUMBERS), cluster.map(memory.free, peer))

    @inlined
    def wait_for_peer(memory, r):
        """Wait for the peer's r-th credit: it has read what this warpgroup has sent."""
        if warpgroup.rank() == 0:
            raw.expect(memory.free, NUMBER_BYTES)
        cluster.receive(memory.free, r + 1)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def scan_in_turn(
        gQ: tiled(QUERY, unit=1), gK: tiled(KEY, unit=1), gV: tiled(VALUE, unit=1), gGates: array(gate.rank), gA: array(2),
        gDtBias: array(2), gO: tiled(OUT, unit=1), gInitialState: array(4), gFinalState: array(4), length: INT, rounds: INT,
        heads: INT, group: INT, width: INT, scale: FLOAT,
    ):  # fmt: skip
        """The outputs of a block's runs. heads: of values, `group` of which share a key head, and each of which is `width`
        blocks of 64 columns wide."""
        memory = smem.open()
        k, v, q, b, state_before = memory.k, memory.v, memory.q, memory.b, memory.state_before
        cluster.sync()
        wg, block = warpgroup.id(), cluster.rank()
        index, column = divmod(cuda.blockIdx.x // BLOCKS, width)
        sequence, head = divmod(index, heads)
        key_head, _ = divmod(head, group)
        if wg == PRODUCER:
            warpgroup.release_registers(PRODUCER_REGISTERS)
            warp = cuda.threadIdx.x // 32 - 4 * PRODUCER
            if warp == 0:
                for r in range(rounds):
                    token = int32(CHUNK * RUN * (BLOCKS * r + block))
                    k.fill(r, gK, (sequence, token, key_head, 0))
                    v.fill(r, gV, (sequence, token, head, column))
                    for i in range(RUN):
                        q.fill(RUN * r + i, gQ, (sequence, int32(token + CHUNK * i), key_head, 0))
            elif gate.per_token and warp <= CUMSUM_WARPS:
                for j in range(warp - 1, RUN * rounds, CUMSUM_WARPS):
                    r, i = divmod(j, RUN)
                    chunk = int32(RUN * (BLOCKS * r + block) + i)
                    place = ChunkPlace(chunk, head, sequence, int32(CHUNK * chunk), TokenRange(int32(0), length, sequence))
                    gate.produce_cumsum(b, b, j, (gGates, gA, gDtBias), place)
        elif wg == STATES:
            warpgroup.claim_registers(STATE_REGISTERS)
            at = sequence, head, int32(COLUMNS * column), 0
            s_t, g = warpgroup.load(gInitialState, STATE, at, aligned=False), gate.load_head_gate(gGates, head)
            if block == 1:  # it has a run before the peer's first one: an empty one
                send_state(memory, zeros(STATE), float32(0))
                allow_next(memory)
            for r in range(rounds):
                remaining = int32(length - CHUNK * RUN * (BLOCKS * r + block))
                keys, values = k.wait(r), v.wait(r)
                # no gate here has weights, so a is b
                _, a_first, first_decay = gate.consume_cumsum(b, b, RUN * r, g, max(remaining, int32(0)))
                _, a_second, second_decay = gate.consume_cumsum(b, b, RUN * r + 1, g, max(int32(remaining - CHUNK), int32(0)))
                run_decay = first_decay + second_decay
                v_t = fp32(warpgroup.load_transposed(subtile(values, CHUNK, 0), TRANSPOSED, fenced=False))
                v_t = INPUT(gate.decay_values(v_t, a_first, run_decay))
                n_t = warpgroup.mm_AB(v_t, cluster.unmap(subtile(keys, CHUNK, 0)))
                v_t = fp32(warpgroup.load_transposed(subtile(values, CHUNK, 1), TRANSPOSED))
                v_t = INPUT(gate.decay_values(v_t, a_second, second_decay))
                n_t = warpgroup.wait(warpgroup.mma_AB(n_t, v_t, cluster.unmap(subtile(keys, CHUNK, 1))))
                k.release(r)
                v.release(r)
                wait_for_peer(memory, r)
                if block == 0 or r + 1 < rounds:
                    send_state(memory, n_t, run_decay)
                s_t = add_peer(memory, s_t, r)
                warpgroup.sync(fenced=False)  # all warps have read
                if block == 0 or r + 1 < rounds:
                    allow_next(memory)
                warpgroup.store(state_before.claim(r), s_t)
                state_before.publish(r)
                s_t = gate.decay(s_t, run_decay) + n_t
            if block == BLOCKS - 1:
                warpgroup.store(gFinalState, s_t, at, aligned=False)
        else:
            g, log2_scale = gate.load_head_gate(gGates, head), log2(zeros(COL_VEC) + scale)
            out = subtile(memory.out, CHUNK, wg)
            for r in range(rounds):
                token = int32(CHUNK * (RUN * (BLOCKS * r + block) + wg))
                remaining = max(int32(length - token), int32(0))
                b_rows, a_cols, _ = gate.consume_cumsum(b, b, int32(RUN * r + wg), g, remaining)
                if gate.folds_scale:
                    b_rows = b_rows + log2_scale
                _, a_other, other_decay = gate.consume_cumsum(b, b, int32(RUN * r + 1 - wg), g, CHUNK)
                queries, keys, values = q.wait(int32(RUN * r + wg)), k.wait(r), v.wait(r)
                o, b_run = zeros(TILE), b_rows
                if wg > 0:
                    s = warpgroup.wait(warpgroup.mm_ABt(queries, subtile(keys, CHUNK, 0)))
                    b_run = b_rows + other_decay
                    p = INPUT(gate.decay_all_scores(s, b_run, a_other))
                    o = warpgroup.wait(warpgroup.mm_AB(p, subtile(values, CHUNK, 0)))
                s = warpgroup.wait(warpgroup.mm_ABt(queries, subtile(keys, CHUNK, wg)))
                p = INPUT(gate.decay_scores(s, b_rows, a_cols))
                o = warpgroup.wait(warpgroup.mma_AB(o, p, subtile(values, CHUNK, wg)))
                k.release(r)
                v.release(r)
                o = o + gate.decay(warpgroup.wait(warpgroup.mm_ABt(queries, state_before.wait(r))), b_run)
                state_before.release(r)
                q.release(int32(RUN * r + wg))
                if not gate.folds_scale:
                    o = o * scale
                warpgroup.send(gO, (sequence, token, head, column), out, o)
            warpgroup.store_wait()
        cluster.sync()

    return scan_in_turn, smem
