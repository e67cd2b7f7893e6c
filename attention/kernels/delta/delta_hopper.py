"""The delta rule for Hopper, chunk by chunk, with decays that are one number a token and head (or none).

    u_t = beta_t (v_t - exp(g_t) k_t S_(t-1))        S_t = exp(g_t) S_(t-1) + k_t^T u_t        o_t = scale q_t S_t

In a chunk of 64 tokens every u depends on those before it. The WY representation and its UT transform (Yang et al. 2024)
compute all of them at once. With b the cumulative sum of the gates and U' = exp(-b) U, which takes the decays out of the chunk,

    A = tril(beta K K^T, -1)                T = (I + A)^-1 beta                     (UT transform)
    U' = T (exp(-b) V - K S)                O = scale exp(b) (Q S + tril(Q K^T) U')
    S = exp(b_last) (S + K^T U')

A chunk is strong if it decays by more than U' could hold. Its decays are placed where no exponent is positive, so that nothing
overflows:

    A = tril(beta exp(b - b^T) * K K^T, -1)                 U = T (V - exp(b) K S)
    S = exp(b_last) S + (exp(b_last - b) K)^T U             O = scale (exp(b) Q S + tril(exp(b - b^T) * Q K^T) U)

T and the intra-chunk scores P = tril(Q K^T) do not depend on the state. So one warpgroup, the solver, computes T for later
chunks, and another, the scorer, computes P, starts all TMA loads and computes b, a chunk for each of its warps. Meanwhile
consumers, of 64 value columns each, update the state with the chunk that is ready. They hold it transposed, 64 x Dk, and U and
O as well: the product of one step, rounded, is the left operand of the next one without leaving the registers."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, store, subtile, warpgroup
from ops.for_attention.triangular_inverse import TRIANGLE
from tiles import bf16, fp32, ring, rt, shared, st, sv
from tiles.launching.arguments import ENDS, FLOAT, INT, array, tiled
from tiles.targets import Target

from ...parts.delta.delta_config import DeltaScanConfig
from ...parts.delta.delta_solver import UTTransform
from ...parts.recurrent.gate_formulas import FORMULAS, BetaFormula
from ...parts.recurrent.gates import load_line
from ...parts.recurrent.l2norm import L2Norm
from ...parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout, block_coord
from ...parts.recurrent.transposed_state import TransposedState

REGISTERS = {1: (88, 104, 256), 2: (72, 88, 176)}  # consumers -> registers a thread of scorer, solver and consumer
STAGES = {64: 4, 128: 3, 256: 2}  # padded key dim: chunks in flight
SIZES = (64, 1), (64, 2), (128, 1), (128, 2), (256, 1)  # padded key dim, consumers
WIDE_KEY_DIM = 128  # beyond it a state takes half of a consumer's registers: there is one consumer
AHEAD = 2  # chunks by which the solver and the scorer may be ahead of consumers
VECTORS = 8  # chunks whose gates are in shared memory: two for each warp that computes b
K_NORMS, Q_NORMS = range(2)  # rings of inverse norms


@dataclass(frozen=True)
class Config(DeltaScanConfig):
    """A kernel's configuration, whose fields are those of DeltaScanConfig."""

    @property
    def output(self):
        """A consumer's tile of the output for a chunk."""
        return st(CHUNK, COLUMNS, self.dtype)


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of SIZES, as DeltaScanConfig.scan_space has them; of one size with each formula of gates, and of all
    sizes with norms of queries and keys."""
    yield from Config.scan_space(SIZES, target, everything)
    if target.has_wgmma:
        for formula in FORMULAS:
            yield Config(128, bf16, True, formula=formula, beta=BetaFormula(1.0), consumers=2)
        yield from (Config(key_dim, bf16, True, l2norm=True, consumers=n) for key_dim, n in SIZES)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    CONSUMERS, INPUT, STATE = config.consumers, config.dtype, rt(16, config.key_dim, fp32)
    seq_layout, decay, PARAMS = SequenceLayout(config.varlen), config.decay, config.decay.params()
    state, norm = TransposedState(config.key_dim, INPUT, seq_layout), L2Norm(config.l2norm, config.key_dim)
    solver = UTTransform(seq_layout, decay, config.consumers + 2, norm)
    SOLVER, SCORER, (scorer_registers, solver_registers, consumer_registers) = CONSUMERS, CONSUMERS + 1, REGISTERS[CONSUMERS]
    WARPS, WARPGROUPS, BETA = warpgroup.WARPGROUP, CONSUMERS + 2, config.beta
    readers, stages = CONSUMERS * WARPS, STAGES[config.key_dim]
    members = dict(
        q=ring(config.key, stages, readers + WARPS),
        k=ring(config.key, stages, readers + 2 * WARPS),
        v=ring(config.values, stages, readers),
        t=ring(config.square, AHEAD, readers, writers=WARPS),
        p=ring(config.square, AHEAD, readers, writers=WARPS),
        beta=ring(sv(CHUNK, fp32), VECTORS, WARPS, writers=1),
        b=ring(sv(CHUNK, fp32), VECTORS, 2 * WARPS, writers=1),
        exp_b=ring(sv(CHUNK, fp32), VECTORS, readers + 2 * WARPS, writers=1),
        edge_decay=ring(sv(CHUNK, fp32), VECTORS, readers, writers=1),
        high=TRIANGLE,
        low=TRIANGLE,
        out=st(CHUNK * CONSUMERS, COLUMNS, INPUT),
    )
    smem, NORM_RINGS = shared(**members, **norm.rings(stages, k_norms=readers, q_norms=readers)), len(members)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def scan(
        gQ: tiled(config.key, unit=1), gK: tiled(config.key, unit=1), gV: tiled(config.values, unit=1), gBeta: array(3),
        gGates: array(3), gO: seq_layout.output_argument(config.output), gInitialState: array(4), gFinalState: array(4),
        gCuSeqlens: ENDS, length: INT, blocks: INT, segments: INT, heads: INT, group: INT, scale: FLOAT,
        params: PARAMS,
    ):  # fmt: skip
        """The outputs of a segment, and after the last one the state. Each of the `segments` of a sequence has thread blocks of
        its own. gInitialState: the state before each segment. `group` value heads share one of the `heads` of keys;
        each is `blocks` blocks of columns wide."""
        memory = smem.open()
        q, k, v, t, p, beta = memory.q, memory.k, memory.v, memory.t, memory.p, memory.beta
        b, exp_b, edge_decay, norm_rings = memory.b, memory.exp_b, memory.edge_decay, memory[NORM_RINGS:]
        wg = warpgroup.id()
        block, segment, value_head, sequence = block_coord(cuda.blockIdx.x, blocks, segments, heads * group)
        key_head, _ = divmod(value_head, group)
        seq = seq_layout.segment_tokens(gCuSeqlens, sequence, length, segment, segments)
        n = seq.num_chunks()
        if wg == SCORER:
            warpgroup.release_registers(scorer_registers)
            rate_and_bias = decay.load_rate_and_bias(params, value_head)
            warp = warpgroup.rank()
            at = seq.batch, seq.chunk_start(max(int32(AHEAD - WARPS + warp), 0)), value_head
            beta_chunk, gates = load_line(gBeta, seq.end, at), decay.load_gates(gGates, seq, at)
            for j in range(-WARPS, n + 1):  # loads chunk j, computes P of chunk j - 1; each warp computes b of a later one
                if j >= 0 and j < n:
                    token = seq.chunk_start(j)
                    k.fill(j, gK, (seq.batch, token, key_head))
                    q.fill(j, gQ, (seq.batch, token, key_head))
                    v.fill(j, gV, (seq.batch, token, value_head, block))
                if j > 0:
                    chunk = j - 1
                    keys = k.wait(chunk)
                    seq_layout.zero_other_rows(keys, seq.remaining(chunk), WARPGROUPS)
                    queries = q.wait(chunk)
                    scores = warpgroup.mm_ABt(queries, keys)
                    norm.publish(norm_rings, Q_NORMS, chunk, queries, scale)
                    scores = warpgroup.wait(scores)
                    k.release(chunk)
                    q.release(chunk)
                    scores = decay.decay_scores(scores, decay.wait(exp_b, chunk), decay.wait(b, chunk))
                    decay.release(exp_b, chunk)
                    decay.release(b, chunk)
                    warpgroup.store(p.claim(chunk), warpgroup.causal(scores, 0, 0.0))
                    p.publish(chunk)
                if j % WARPS == 0:
                    later_chunk = int32(j + AHEAD + warp)
                    if later_chunk >= 0 and later_chunk < n:
                        store(beta.claim(later_chunk), BETA.compute(beta_chunk))
                        beta.publish(later_chunk)
                        sums = decay.cumsum(gates, rate_and_bias, seq.remaining(later_chunk))
                        decay.publish_sums(memory, later_chunk, sums)
                    at = seq.batch, seq.chunk_start(later_chunk + WARPS), value_head
                    beta_chunk, gates = load_line(gBeta, seq.end, at), decay.load_gates(gGates, seq, at)
        elif wg == SOLVER:
            warpgroup.release_registers(solver_registers)
            for j in range(n):
                t_transposed = solver.solve(memory, norm_rings, j, seq.remaining(j))
                warpgroup.store(t.claim(j), t_transposed)
                t.publish(j)
        else:
            warpgroup.claim_registers(consumer_registers)
            column, out_tile = COLUMNS * (CONSUMERS * block + wg), subtile(memory.out, CHUNK, wg)
            s_t = warpgroup.load(gInitialState, STATE, (sequence * segments + segment, value_head, 0, column), 3, 2)
            for j in range(n):
                keys = k.wait(j)
                seq_layout.zero_other_rows(keys, seq.remaining(j), WARPGROUPS)
                s_k, o = state.apply(s_t, keys, q.wait(j))
                q.release(j)
                values = fp32(warpgroup.load_transposed(subtile(v.wait(j), CHUNK, 0, COLUMNS, wg), state.values))
                v.release(j)
                exp_b_chunk, edge_decay_chunk = decay.wait(exp_b, j), decay.wait(edge_decay, j)
                strong = decay.is_strong(exp_b_chunk)
                s_k = norm.scale_columns(s_k, norm_rings, K_NORMS, j)
                norm.release(norm_rings, K_NORMS, j)
                values = seq_layout.zero_other_columns(values, seq.remaining(j))
                error, o = decay.decay_inputs(values, s_k, o, exp_b_chunk, edge_decay_chunk, strong)
                u = warpgroup.wait(warpgroup.mm_AB(INPUT(error), t.wait(j)))
                t.release(j)
                u_rounded = INPUT(u)
                s_t = decay.decay_state(s_t, exp_b_chunk, strong)
                s_t = warpgroup.mma_AB(s_t, INPUT(decay.decay_update(u, edge_decay_chunk, strong)), keys)
                o = warpgroup.mma_ABt(o, u_rounded, p.wait(j))
                decay.release(edge_decay, j)
                s_t = decay.decay_state(warpgroup.wait(s_t, newer=1), exp_b_chunk, not strong)
                k.release(j)
                o = decay.decay_outputs(warpgroup.wait(o), exp_b_chunk, strong)
                o = norm.scale_outputs(o, norm_rings, Q_NORMS, j, scale)
                norm.release(norm_rings, Q_NORMS, j)
                decay.release(exp_b, j)
                p.release(j)
                state.store_output(gO, out_tile, o, seq, seq.chunk_start(j), value_head, CONSUMERS * block + wg)
            warpgroup.store_wait()
            if segment == segments - 1:
                warpgroup.store(gFinalState, s_t, (sequence, value_head, 0, column), 3, 2)
                seq_layout.zero_padding(gO, gCuSeqlens, sequence, length, value_head, CONSUMERS * block + wg)

    return scan, smem
