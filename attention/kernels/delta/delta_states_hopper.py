"""The state after a sequence under the delta rule, for Hopper: delta_hopper.py without queries and outputs.

    u_t = beta_t (v_t - exp(g_t) k_t S_(t-1))        S_t = exp(g_t) S_(t-1) + k_t^T u_t

A state may have more columns than v; v_t is 0 in those, for which TMA writes zeros without a read. So a scan that starts from
[S | I] tells what the tokens do to any state (attention.parallel).

Tokens whose effect on the final state has decayed to nothing need not be scanned: gSkippedChunks is the number of chunks to
skip at the start of each sequence and head, together with the state before them, if there are decays.

The solver computes T of each chunk as in delta_hopper.py. In place of the scorer there is a loader: one of its warps starts the
TMA loads of keys and values, the others compute b.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, load, store, subtile, tile_max, warpgroup
from ops.for_attention.triangular_inverse import TRIANGLE
from tiles import fp32, ring, rt, shared, sv
from tiles.launching.arguments import ENDS, INT, array, tiled
from tiles.targets import Target

from ...parts.delta.delta_config import DeltaScanConfig
from ...parts.delta.delta_decay import COL_VEC
from ...parts.delta.delta_solver import UTTransform
from ...parts.recurrent.gates import load_line
from ...parts.recurrent.l2norm import L2Norm
from ...parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout, TokenRange, block_coord
from .delta_hopper import VECTORS

KEY_DIMS = 64, 128  # as padded
REGISTERS = {1: (56, 104, 240), 2: (48, 96, 184)}  # consumers -> registers a thread of loader, solver and consumer
STAGES = 4  # chunks in flight
AHEAD = 3  # chunks by which the solver may be ahead of consumers
CUMSUM_WARPS = warpgroup.WARPGROUP - 1  # warps of the loader that compute b, a chunk each in turn


@dataclass(frozen=True)
class Config(DeltaScanConfig):
    """A kernel's configuration. consumers: warpgroups that have 64 columns of a state each."""

    label = "states"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of both padded key dims; see DeltaScanConfig.scan_space."""
    return Config.scan_space(itertools.product(KEY_DIMS, REGISTERS), target, everything)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    CONSUMERS, INPUT, STATE = config.consumers, config.dtype, rt(16, config.key_dim, fp32)
    VALUES, seq_layout = rt(16, CHUNK, INPUT), SequenceLayout(config.varlen)
    decay, NO_FORMULA = config.decay, (0.0, 0.0)
    SOLVER, LOADER, (loader_registers, solver_registers, consumer_registers) = CONSUMERS, CONSUMERS + 1, REGISTERS[CONSUMERS]
    WARPS, READERS = warpgroup.WARPGROUP, CONSUMERS + 1  # warpgroups that read keys
    readers, GATED = CONSUMERS * WARPS, config.gated
    solver = UTTransform(seq_layout, decay, READERS, L2Norm(False, config.key_dim))
    smem = shared(
        k=ring(config.key, STAGES, readers + WARPS),
        v=ring(config.values, STAGES, readers),
        t=ring(config.square, AHEAD, readers, writers=WARPS),
        beta=ring(sv(CHUNK, fp32), VECTORS, WARPS, writers=1),
        b=ring(sv(CHUNK, fp32), VECTORS, WARPS, writers=1),
        exp_b=ring(sv(CHUNK, fp32), VECTORS, readers + WARPS, writers=1),
        edge_decay=ring(sv(CHUNK, fp32), VECTORS, readers, writers=1),
        high=TRIANGLE,
        low=TRIANGLE,
    )

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def scan(
        gK: tiled(config.key, unit=1), gV: tiled(config.values, unit=1), gBeta: array(3), gGates: array(3),
        gInitialState: array(4), gFinalState: array(4), gSkippedChunks: array(3), gCuSeqlens: ENDS, length: INT, blocks: INT,
        heads: INT, group: INT,
    ):  # fmt: skip
        """The state after each sequence. `group` value heads share a key head; each is `blocks` blocks of columns wide."""
        memory = smem.open()
        k, v, t, beta, exp_b, edge_decay = memory.k, memory.v, memory.t, memory.beta, memory.exp_b, memory.edge_decay
        wg = warpgroup.id()
        block, _, value_head, sequence = block_coord(cuda.blockIdx.x, blocks, 1, heads * group)
        key_head, _ = divmod(value_head, group)
        all_tokens = seq_layout.sequence_tokens(gCuSeqlens, sequence, length)
        skipped_chunks = int32(tile_max(load(gSkippedChunks, COL_VEC, (sequence, value_head, 0)))) if GATED else int32(0)
        start = int32(min(all_tokens.end, all_tokens.start + CHUNK * skipped_chunks))
        seq = TokenRange(start, all_tokens.end, all_tokens.batch)
        n = seq.num_chunks()
        if wg == LOADER:
            warpgroup.release_registers(loader_registers)
            warp = warpgroup.rank()
            if warp == 0:
                for j in range(n):
                    k.fill(j, gK, (seq.batch, seq.chunk_start(j), key_head))
                    v.fill(j, gV, (seq.batch, seq.chunk_start(j), value_head, block))
            else:
                for j in range(warp - 1, n, CUMSUM_WARPS):
                    at = seq.batch, seq.chunk_start(j), value_head
                    beta_chunk, gates = load_line(gBeta, seq.end, at), decay.load_gates(gGates, seq, at)
                    store(beta.claim(j), beta_chunk)
                    beta.publish(j)
                    decay.publish_sums(memory, j, decay.cumsum(gates, NO_FORMULA, seq.remaining(j)))
        elif wg == SOLVER:
            warpgroup.release_registers(solver_registers)
            for j in range(n):
                t_transposed = solver.solve(memory, (), j, seq.remaining(j))
                warpgroup.store(t.claim(j), t_transposed)
                t.publish(j)
        else:
            warpgroup.claim_registers(consumer_registers)
            column = COLUMNS * (CONSUMERS * block + wg)
            s_t = warpgroup.load(gInitialState, STATE, (sequence, value_head, 0, column), 3, 2)
            s_t = s_t * (0.0 if skipped_chunks > 0 else 1.0)
            for j in range(n):
                keys = k.wait(j)
                seq_layout.zero_other_rows(keys, seq.remaining(j), READERS)
                s_k = warpgroup.mm_ABt(INPUT(s_t), keys)
                values = fp32(warpgroup.load_transposed(subtile(v.wait(j), CHUNK, 0, COLUMNS, wg), VALUES))
                v.release(j)
                exp_b_chunk, edge_decay_chunk = decay.wait(exp_b, j), decay.wait(edge_decay, j)
                strong, s_k = decay.is_strong(exp_b_chunk), warpgroup.wait(s_k)
                values = seq_layout.zero_other_columns(values, seq.remaining(j))
                error, _ = decay.decay_inputs(values, s_k, s_k, exp_b_chunk, edge_decay_chunk, strong)
                u = warpgroup.wait(warpgroup.mm_AB(INPUT(error), t.wait(j)))
                t.release(j)
                s_t = decay.decay_state(s_t, exp_b_chunk, strong)
                s_t = warpgroup.wait(warpgroup.mma_AB(s_t, INPUT(decay.decay_update(u, edge_decay_chunk, strong)), keys))
                k.release(j)
                decay.release(edge_decay, j)
                s_t = decay.decay_state(s_t, exp_b_chunk, not strong)
                decay.release(exp_b, j)
            warpgroup.store(gFinalState, s_t, (sequence, value_head, 0, column), 3, 2)

    return scan, smem
