"""Linear attention for Hopper, for few long sequences: blocks of a cluster share a sequence, and each token is read once. A
decay is one number for a token and head.

    S_t = exp(g_t) S_(t-1) + k_t^T v_t        o_t = scale q_t S_t

A sequence is cut into runs of two chunks of 64 tokens, which the two blocks of a cluster have in turn, each one run of a round.
Both have the same head and the same 64 columns of its values. Where b is the cumulative sum of a chunk's gates, a block's
warpgroups are

    a producer, whose first warp loads Q, K and V; others compute b
    one for states:   N^T = (exp(b_last - b) V)^T K       the local state: that after the run if the state before it is 0
                      N and b_last go to the peer, and those of the peer's run come
                      S^T = exp(b_last) S^T + N^T         from run to run of both blocks, so each has the whole state
    two for outputs:  O   = exp(b) Q S + tril(exp(b - b^T) Q K^T) V      of a chunk each, where S is the state before it

What blocks send each other depends on no state, and may be under way while outputs of earlier runs are computed: for a message
and its answer a round is too short, so there are two mailboxes. From run to run a state takes one multiplication and addition
in registers. Local states are rounded to 16 bits: their errors are those of the values' products. Every exponent that is used
is a sum of gates, so never positive. A cluster lies in one GPC, so of clusters of four not 32 run at once on 132
multiprocessors."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from numba import cuda
from numpy import float32, int32

from ops import cluster, divmod, last_element, log2, raw, subtile, warpgroup, zeros
from tiles import barrier, bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st, sv
from tiles.launching.arguments import FLOAT, INT, array, tiled
from tiles.targets import Target

from ..parts.recurrent.gates import COL_VEC, DecayGate, Gate, TokenGate
from ..parts.recurrent.tokens import CHUNK, COLUMNS

BLOCKS = 2  # of a cluster
RUN = 2  # chunks of a run
STAGES, QUERY_STAGES = (
    {64: 8, 128: 4},
    4,
)  # by the padded key dim: chunks of keys and values in shared memory, a multiple of a run's
STATES, PRODUCER = RUN, RUN + 1  # the warpgroups after those that compute outputs
OUTPUT_REGISTERS, STATE_REGISTERS, PRODUCER_REGISTERS = 104, 256, 48
CUMSUM_WARPS = 2  # warps of the producer that compute b, a chunk each in turn
NUMBERS = rt(16, 16, fp32).row_vec  # a vector in which a warp sends a number
KEY_DIMS = 64, 128  # as padded
KINDS: tuple[type[Gate], ...] = Gate, TokenGate


class Mailbox(NamedTuple):
    """Shared memory for a message of the peer. state, decay: what it sends. full: the barrier on which their bytes count.
    token, free: the same of the answer, by which the peer says that it has read what this block has sent to its mailbox."""

    state: Any
    decay: Any
    token: Any
    full: Any
    free: Any


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
    KEY, VALUE = st(CHUNK, KEYS, INPUT), st(CHUNK, COLUMNS, INPUT)  # a chunk of Q or K, and of V or the outputs
    STATE, TRANSPOSED = rt(16, KEYS, fp32), rt(16, CHUNK, INPUT)
    WARPS = warpgroup.WARPGROUP
    READERS = 2 * WARPS  # of a chunk: the warpgroup that computes its outputs, and that for states
    SENT = rt(16, KEYS, INPUT)
    PART = st(SENT.rows * SENT.cols // 64, 64, INPUT)  # of what is received, by a warp
    RECEIVED, NUMBER = st(WARPS * PART.rows, PART.cols, INPUT), sv(NUMBERS.length, fp32)
    smem = shared(
        k=ring(KEY, STAGES[KEYS], READERS),
        v=ring(VALUE, STAGES[KEYS], READERS, once=True),
        q=ring(KEY, QUERY_STAGES, 1),
        b=ring(sv(CHUNK, fp32), STAGES[KEYS] if gate.per_token else 1, READERS, writers=1),
        start=ring(st(COLUMNS, KEYS, INPUT), RUN, WARPS, writers=WARPS),
        state_0=RECEIVED, state_1=RECEIVED, decay_0=NUMBER, decay_1=NUMBER, token_0=NUMBER, token_1=NUMBER,
        full_0=barrier(WARPS), full_1=barrier(WARPS), free_0=barrier(), free_1=barrier(),
    )  # fmt: skip

    @inlined
    def first_token(block, j):
        """The first token of a block's j-th chunk."""
        r, i = divmod(int32(j), RUN)
        return int32(CHUNK * (RUN * (BLOCKS * r + block) + i))

    @inlined
    def send_state(mailbox, run_t, run_decay, n):
        """Send the local state and decay of a run to the peer, as its n-th message, once it has read the one before in this
        mailbox. A mailbox is every other one's: a message need not wait for an answer to the last one."""
        warp, peer = warpgroup.rank(), 1 - cluster.rank()
        if n >= 2:
            if warp == 0:
                raw.expect(mailbox.free, NUMBER.nbytes)
            cluster.receive(mailbox.free, n // 2)
        full = cluster.map(mailbox.full, peer)
        cluster.store_fragment_async(cluster.map(subtile(mailbox.state, PART.rows, warp), peer), run_t, full)
        if warp == 0:
            cluster.store_async(cluster.map(mailbox.decay, peer), zeros(NUMBERS) + run_decay, full)

    @inlined
    def add_peer(mailbox, s_t, n, last):
        """The state before the block's n-th run, from that after the one before, once the peer's n-th message is there: the
        local state of the run between them. Then the peer may send the next but one, unless this is one of the `last` two: a
        store says so, as an arrival that releases to a cluster waits for all of the GPU's memory."""
        raw.expect(mailbox.full, PART.nbytes + (NUMBER.nbytes if warpgroup.rank() == 0 else 0))
        cluster.receive(mailbox.full, n // 2 + 1)
        s_t = gate.decay(s_t, last_element(mailbox.decay)) + fp32(warpgroup.load_shared_fragment(mailbox.state, SENT))
        if not last:
            warpgroup.sync(fenced=True)  # all warps have read
            if warpgroup.rank() == 0:
                peer = 1 - cluster.rank()
                cluster.store_async(cluster.map(mailbox.token, peer), zeros(NUMBERS), cluster.map(mailbox.free, peer))
        return s_t

    @inlined
    def scan_run(memory, mailbox, other, s_t, r, rounds):
        """The state after the block's r-th run, from that after the one before. The peer's r-th message comes to `mailbox`."""
        k, v, b, start, block = memory.k, memory.v, memory.b, memory.start, cluster.rank()
        first, second = int32(RUN * r), int32(RUN * r + 1)
        keys, values = k.wait(first), v.wait(first)
        _, a_cols, b_first = gate.consume_cumsum(b, b, first, float32(0), CHUNK)
        v_t = fp32(warpgroup.load_transposed(values, TRANSPOSED))
        v_t = INPUT(gate.decay_values(v_t, a_cols, b_first))
        n_t = warpgroup.mm_AB(v_t, cluster.unmap(keys))
        keys, values = k.wait(second), v.wait(second)
        _, a_cols, b_second = gate.consume_cumsum(b, b, second, float32(0), CHUNK)
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
        if block == 0:
            send_state(mailbox, run_t, b_first + b_second, r)
        elif r + 1 < rounds:
            send_state(other, run_t, b_first + b_second, r + 1)
        s_t = add_peer(mailbox, s_t, r, r + 2 >= rounds)
        warpgroup.store(start.claim(first), s_t)
        start.publish(first)
        warpgroup.store(start.claim(second), gate.decay(s_t, b_first) + fp32(first_t))
        start.publish(second)
        return gate.decay(s_t, b_first + b_second) + fp32(run_t)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def scan_in_turn(
        gQ: tiled(KEY, unit=1), gK: tiled(KEY, unit=1), gV: tiled(VALUE, unit=1), gGates: array(gate.rank), gA: array(2),
        gDtBias: array(2), gO: tiled(VALUE, unit=1), gInitialState: array(4), gFinalState: array(4), length: INT, rounds: INT,
        heads: INT, group: INT, width: INT, scale: FLOAT,
    ):  # fmt: skip
        """The outputs of a block's runs. `group` of the value heads share a key head, and each is `width` blocks of 64 columns
        wide."""
        memory = smem.open()
        even = Mailbox(memory.state_0, memory.decay_0, memory.token_0, memory.full_0, memory.free_0)
        odd = Mailbox(memory.state_1, memory.decay_1, memory.token_1, memory.full_1, memory.free_1)
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
            s_t = warpgroup.load(gInitialState, STATE, at, aligned=False)
            if block == 1:  # it has a run before the peer's first one: an empty one
                send_state(even, INPUT(zeros(STATE)), float32(0), 0)
            for r in range(0, rounds, 2):
                s_t = scan_run(memory, even, odd, s_t, r, rounds)
                s_t = scan_run(memory, odd, even, s_t, r + 1, rounds)
            if block == BLOCKS - 1:
                warpgroup.store(gFinalState, s_t, at, aligned=False)
        else:
            warpgroup.release_registers(OUTPUT_REGISTERS)
            log2_scale = log2(zeros(COL_VEC) + scale)
            for j in range(wg, RUN * rounds, RUN):
                token = first_token(block, j)
                b_rows, a_cols, _ = gate.consume_cumsum(b, b, j, float32(0), CHUNK)
                if gate.folds_scale:
                    b_rows = b_rows + log2_scale
                queries, keys, values = q.wait(j), k.wait(j), v.wait(j)
                s = warpgroup.mm_ABt(queries, keys)
                if j >= RUN and warpgroup.rank() == 0:
                    warpgroup.store_wait()
                    q.release(j - RUN)
                p = INPUT(gate.decay_scores(warpgroup.wait(s), b_rows, a_cols))
                o = warpgroup.wait(warpgroup.mm_AB(p, values))
                k.release(j)
                v.release(j)
                o = o + gate.decay(warpgroup.wait(warpgroup.mm_ABt(queries, start.wait(j))), b_rows)
                start.release(j)
                if not gate.folds_scale:
                    o = o * scale
                warpgroup.sync(fenced=True)  # all warps have read the queries, whose memory the outputs take
                out = subtile(queries, CHUNK, 0, COLUMNS, 0)
                warpgroup.store(out, o)
                warpgroup.tma_store(gO, (sequence, token, head, column), out)
            warpgroup.store_wait()
        cluster.sync()

    return scan_in_turn, smem
