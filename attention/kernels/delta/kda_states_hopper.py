"""How each segment of a sequence changes a state under the delta rule, for Hopper where every channel of a key decays by
itself: kda_hopper.py without queries and outputs.

A segment takes a state S to M S + N. The scan starts from [0 | I], where v is 0 in the columns of I (TMA writes zeros for
these), and so ends with [N | M]. delta_compose_states_hopper.py composes these."""

import functools

from numba import cuda
from numpy import int32

from ops import divmod, truncate, warpgroup
from ops.for_attention.triangular_inverse import TRIANGLES, inverse_transposed, store_block_parts
from tiles import fp32, inlined, ring, rt, shared, st
from tiles.launching.arguments import ENDS, INT, array, tiled

from ...parts.recurrent.anchored_scores import AnchoredScores
from ...parts.recurrent.block_scores import BlockScores
from ...parts.recurrent.channel_config import DELTA_REGISTERS, DELTA_STAGES, KdaScanConfig
from ...parts.recurrent.channel_decay import FLAG, KdaDecay
from ...parts.recurrent.l2norm import L2Norm
from ...parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout, block_coord
from ...parts.recurrent.transposed_state import TransposedState


class Config(KdaScanConfig):
    """A kernel's configuration: that of channel_config.py. consumers: warpgroups that have 64 columns of a state each."""

    def __str__(self):
        return f"states, {super().__str__()}"


space = Config.space


class KeyScores(AnchoredScores):
    """The scores of a halved chunk's keys with keys."""

    @inlined
    def round_scores(self, triangles, scores, warp, block):
        """The scores of keys, rounded, which are stored to two triangles, too."""
        store_block_parts(triangles, scores, warp, block)
        return self.dtype(scores)


class KdaStatesDecay(KdaDecay):
    """The decays of a chunk without queries: k* and k' only."""

    @inlined
    def store_query(self, queries, decay):
        return 0.0


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    CONSUMERS, INPUT, IN_PLACE, KEY_DIM = config.consumers, config.dtype, config.gates is fp32, config.key_dim
    PREPARER, (preparer_registers, consumer_registers), SETMAXNREG = CONSUMERS, DELTA_REGISTERS[CONSUMERS], CONSUMERS > 1
    SCORES, WARPS = rt(16, CHUNK, fp32), warpgroup.WARPGROUP
    COL_VEC = SCORES.col_vec
    readers = CONSUMERS * WARPS
    decay, channel_gates = KdaStatesDecay(KEY_DIM, INPUT, CONSUMERS), config.limited_gates
    PARAMS, BETA = channel_gates.params(), config.beta
    condition, CONDITION = config.condition, config.condition.params()
    smem = shared(
        k=ring(config.key, DELTA_STAGES, readers + WARPS),
        k_decayed=ring(config.key, DELTA_STAGES, readers + WARPS, writers=WARPS),
        g=ring(config.gate, 1, WARPS),
        v=ring(config.value, DELTA_STAGES * CONSUMERS, WARPS),
        t=ring(st(CHUNK, CHUNK, INPUT), DELTA_STAGES, readers, writers=WARPS),
        state_decay=ring(config.state_decay, DELTA_STAGES, readers, writers=WARPS),
        flag=ring(FLAG, DELTA_STAGES, readers, writers=WARPS),
        triangles=TRIANGLES,
        gate_sums=config.gate_sums,
        block_decays=decay.block_decays,
        biases=channel_gates.biases,
        rates=channel_gates.rates,
    )
    norm = L2Norm(config.l2norm, config.key_dim, config.key_dim // warpgroup.WARPGROUP)
    seq_layout = SequenceLayout(config.varlen)
    state = TransposedState(KEY_DIM, INPUT, seq_layout)
    halved_scores, block_scores = KeyScores(KEY_DIM, INPUT), BlockScores(KEY_DIM, INPUT)

    @inlined
    def publish_decays(published, rings, arrays, j, n, seq, head, key_head, block):
        """Publish a chunk's decayed keys, the decay of its state and its flag, and have TMA load the next chunk."""
        k_decayed, state_decay, flag, g = published
        k_decayed.publish(j)
        state_decay.publish(j)
        flag.publish(j)
        g.release(j)
        warpgroup.sync()
        decay.fill_keys(rings, arrays, j + 1, n, seq, head, key_head, block)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def scan(
        gK: tiled(config.key, unit=1), gV: tiled(config.value, unit=1), gBeta: array(3), gGates: tiled(config.gate, unit=1),
        gFinalState: array(4), gCuSeqlens: ENDS, length: INT, blocks: INT, segments: INT, scanned_segments: INT,
        heads: INT, group: INT, values: INT, params: PARAMS, condition_args: CONDITION,
    ):  # fmt: skip
        """[N | M] of each of the first `scanned_segments` of the `segments` of a sequence. values: the number of columns of v
        and N. `group` value heads share a key head; each is `blocks` blocks of columns wide. condition_args: see
        launch_conditions.py."""
        if condition.is_skipped(condition_args):
            return
        k, k_decayed, g, v, t, state_decay, flag, triangles, gate_sums, block_decays, biases, rates = smem.open()
        wg = warpgroup.id()
        block, segment, head, sequence = block_coord(cuda.blockIdx.x, blocks, scanned_segments, heads * group)
        seq = seq_layout.segment_tokens(gCuSeqlens, sequence, length, segment, segments)
        n = seq.num_chunks()
        if wg == PREPARER:
            if SETMAXNREG:
                warpgroup.release_registers(preparer_registers)
            betas, (key_head, _) = truncate(gBeta, 1, seq.end), divmod(head, group)
            warp = warpgroup.rank()
            rings, arrays = (k, v, g), (gK, gV, gGates)
            published = k_decayed, state_decay, flag, g
            decay.fill_keys(rings, arrays, 0, n, seq, head, key_head, block)
            (high, low), blocks = decay.open_triangles(triangles, block_decays)
            constants = biases, rates
            channel_gates.load_constants(constants, params, head, warp)
            beta = warpgroup.load(betas, COL_VEC, (seq.batch, seq.chunk_start(0), head), cols=1)
            for j in range(n):
                keys, gates = k.wait(j), g.wait(j)
                seq_layout.zero_other_rows(keys, seq.remaining(j))
                seq_layout.zero_other_rows(gates, seq.remaining(j))
                norm.normalize(keys, warp)
                norm.sync()
                beta = BETA.compute(beta)
                sums = gates if IN_PLACE else gate_sums
                channel_gates.cumsum(sums, gates, constants, warp, seq.remaining(j))
                b_last = decay.load_last_sums(sums, warp)
                strong, halved = decay.vote(sums, b_last, warp)
                decayed_keys = k_decayed.claim(j)
                if halved:
                    halved_scores.compute(keys, keys, (high, low), sums, decayed_keys, warp)
                    warpgroup.sync()
                decay.factor_decays(keys, keys, decayed_keys, blocks, sums, b_last, warp, strong, halved)
                decay.store_state_decay(state_decay.claim(j), flag.claim(j), b_last, warp, strong, halved)
                if halved:
                    publish_decays(published, rings, arrays, j, n, seq, head, key_head, block)
                    a = warpgroup.load(high, SCORES) + warpgroup.load(low, SCORES)
                elif strong:
                    warpgroup.sync()
                    a = block_scores.compute(decayed_keys, blocks, warp)
                    publish_decays(published, rings, arrays, j, n, seq, head, key_head, block)
                else:
                    publish_decays(published, rings, arrays, j, n, seq, head, key_head, block)
                    a = warpgroup.wait(warpgroup.mm_ABt(decayed_keys, keys))
                k_decayed.release(j)
                k.release(j)
                inverse = inverse_transposed(a * beta, high, low)
                warpgroup.store(t.claim(j), inverse * beta)
                t.publish(j)  # a load under way would be waited for at each fence
                beta = warpgroup.load(betas, COL_VEC, (seq.batch, seq.chunk_start(j + 1), head), cols=1)
        else:
            if SETMAXNREG:
                warpgroup.claim_registers(consumer_registers)
            column = int32(COLUMNS * (CONSUMERS * block + wg))
            s_t = state.start_transition(column, values)
            for j in range(n):
                decayed_keys, state_factor, strong = k_decayed.wait(j), state_decay.wait(j), decay.is_strong(flag.wait(j))
                s_t = decay.decay_state(s_t, state_factor, not strong)
                s_k = warpgroup.mm_ABt(INPUT(s_t), decayed_keys)
                values_t = fp32(warpgroup.load_transposed(v.wait(CONSUMERS * j + wg), state.values))
                v.release(CONSUMERS * j + wg)
                u = seq_layout.zero_other_columns(values_t, seq.remaining(j)) - warpgroup.wait(s_k)
                k_decayed.release(j)
                u = INPUT(warpgroup.wait(warpgroup.mm_AB(INPUT(u), t.wait(j))))
                t.release(j)
                s_t = warpgroup.wait(warpgroup.mma_AB(decay.decay_state(s_t, state_factor, strong), u, k.wait(j)))
                k.release(j)
                s_t = decay.decay_state(s_t, state_factor, not strong)
                state_decay.release(j)
                flag.release(j)
            warpgroup.store(gFinalState, s_t, (sequence * scanned_segments + segment, head, 0, column), 3, 2)

    return scan, smem
