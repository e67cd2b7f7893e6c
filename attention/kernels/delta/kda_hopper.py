"""The delta rule for Hopper, chunk by chunk, where every channel of a key decays by itself (Kimi delta attention, 2025).

    S = diag(exp(g_t)) S_(t-1)        u_t = beta_t (v_t - k_t S)        S_t = S + k_t^T u_t        o_t = scale q_t S_t

With the decays factored around a reference r, a chunk is one of the delta rule without decays (b, q', k', k* and S' are those
of channel_decay.py):

    A  = tril(beta k' k*^T, -1)       T = (I + A)^-1 beta                                     (the UT transform)
    U  = T (V - k' S')                O = scale (q' S' + tril(q' k*^T) U)
    S  = exp(b_last - r) (S' + k*^T U)

The scores of a strong chunk are those of stepped_scores.py, or in float16 it may be halved (anchored_scores.py).

q', k', k*, T and the intra-chunk scores do not depend on the state: one warpgroup, the preparer, computes them for the next
chunk, while consumers, of 64 value columns each, update the state with this one."""

import functools

from numba import cuda

from ops import divmod, store, subtile, tile_min, truncate, viewed, warpgroup
from ops.for_attention.triangular_inverse import TRIANGLES, inverse_transposed
from tiles import fp32, inlined, ring, rt, shared, st
from tiles.launching.arguments import ENDS, FLOAT, INT, array, tiled

from ...parts.recurrent.anchored_scores import KdaScores
from ...parts.recurrent.channel_config import DELTA_REGISTERS, DELTA_STAGES
from ...parts.recurrent.channel_config import KdaScanConfig as Config
from ...parts.recurrent.channel_decay import FLAG, KdaDecay
from ...parts.recurrent.l2norm import choose_channel_norms
from ...parts.recurrent.stepped_scores import SteppedScores, SteppedTiles
from ...parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout, block_coord
from ...parts.recurrent.transposed_state import TransposedState

space = Config.space


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    CONSUMERS, INPUT, IN_PLACE = config.consumers, config.dtype, config.gates is fp32
    PREPARER, (preparer_registers, consumer_registers), SETMAXNREG = CONSUMERS, DELTA_REGISTERS[CONSUMERS], CONSUMERS > 1
    STATE, SCORES = rt(16, config.key_dim, fp32), rt(16, CHUNK, fp32)
    COL_VEC, WARPS = SCORES.col_vec, warpgroup.WARPGROUP
    readers = CONSUMERS * WARPS
    square, KEY = st(CHUNK, CHUNK, INPUT), config.key
    decay = KdaDecay(config.key_dim, INPUT, CONSUMERS, False)
    channel_norms = choose_channel_norms(config)
    channel_gates, PARAMS, BETA = config.limited_gates, config.limited_gates.params(), config.beta
    first_gates = channel_gates.compact()  # for the sums of the first chunk
    condition, CONDITION = config.condition, config.condition.params()
    smem = shared(
        q=ring(config.key, DELTA_STAGES, readers + WARPS),
        k=ring(config.key, DELTA_STAGES, readers + WARPS),
        k_decayed=ring(config.key, DELTA_STAGES, readers + WARPS, writers=WARPS),
        g=ring(config.gate, 1, WARPS),
        v=ring(config.value, CONSUMERS, WARPS),
        t=ring(square, DELTA_STAGES, readers, writers=WARPS),
        p=ring(square, 1, readers, writers=WARPS),
        state_decay=ring(config.state_decay, DELTA_STAGES, readers, writers=WARPS),
        flag=ring(FLAG, DELTA_STAGES, readers, writers=WARPS),
        triangles=TRIANGLES,
        out=st(CHUNK * CONSUMERS, COLUMNS, INPUT),
        gate_sums=ring(config.gate_sums, 1, WARPS, writers=WARPS),
        biases=channel_gates.biases,
        rates=channel_gates.rates,
        norms=channel_norms.make_ring(readers, WARPS),
        reads=config.key if IN_PLACE else st(16, 16, INPUT),
    )
    halved_scores, block_scores = KdaScores(config.key_dim, INPUT), SteppedScores(config.key_dim, INPUT)
    seq_layout = SequenceLayout(config.varlen)
    state = TransposedState(config.key_dim, INPUT, seq_layout)

    @inlined
    def sum_gates(gates_of_channels, g, gate_sums, constants, seq, j, warp):
        """Write b of the j-th chunk, if there is one. A consumer calls this, as it waits for T in any case."""
        if j < seq.num_chunks():
            gates, sums, remaining = g.wait(j), gate_sums.claim(j), seq.remaining(j)
            seq_layout.zero_other_rows(gates, remaining)
            gates_of_channels.cumsum(gates if IN_PLACE else sums, gates, constants, warp, remaining)
            gate_sums.publish(j)

    @inlined
    def publish_decays(published, j):
        """Publish a chunk's decayed keys and the decay of its state."""
        k_decayed, state_decay, flag = published
        k_decayed.publish(j)
        state_decay.publish(j)
        flag.publish(j)

    @inlined
    def finish_beta(beta, inverse_norms):
        """The factors of the rows of T and of A, from what is loaded as beta: at the top of a chunk this would wait for it."""
        beta = channel_norms.scale_rows(BETA.compute(beta), inverse_norms)
        return beta, channel_norms.scale_rows(beta, inverse_norms)

    @inlined
    def release_sums(gate_sums, g, j):
        """The sums of a chunk are no longer read."""
        gate_sums.release(j)
        g.release(j)

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def scan(
        gQ: tiled(config.key, unit=1), gK: tiled(config.key, unit=1), gV: tiled(config.value, unit=1),
        gBeta: array(3), gGates: tiled(config.gate, unit=1), gO: seq_layout.output_argument(config.value),
        gInitialState: array(4), gFinalState: array(4), gCuSeqlens: ENDS, length: INT, blocks: INT, segments: INT, heads: INT,
        group: INT, scale: FLOAT, params: PARAMS, condition_args: CONDITION,
    ):  # fmt: skip
        """The outputs of a segment, and after the last one the state. Each of the `segments` of a sequence has thread blocks of
        its own. gInitialState: the state before each segment. `group` value heads share a key head; each is `blocks` blocks of
        columns wide. condition_args: see launch_conditions.py."""
        if condition.is_skipped(condition_args):
            return
        q, k, k_decayed, g, v, t, p, state_decay, flag, triangles, out, gate_sums, biases, rates, norms, reads = smem.open()
        wg = warpgroup.id()
        block, segment, head, sequence = block_coord(cuda.blockIdx.x, blocks, segments, heads * group)
        seq = seq_layout.segment_tokens(gCuSeqlens, sequence, length, segment, segments)
        n = seq.num_chunks()
        if wg == PREPARER:
            if SETMAXNREG:
                warpgroup.release_registers(preparer_registers)
            betas, (key_head, _) = truncate(gBeta, 1, seq.end), divmod(head, group)
            warp = warpgroup.rank()
            rings, arrays = (q, k, v, g), (gQ, gK, gV, gGates)
            published = k_decayed, state_decay, flag
            decay.fill(rings, arrays, 0, n, seq, head, key_head, block)
            beta = warpgroup.load(betas, COL_VEC, (seq.batch, seq.chunk_start(0), head), cols=1)
            (high, low), (writes, _) = decay.open_triangles(triangles, ())
            for j in range(n):
                warp = warpgroup.rank()  # for each chunk: addresses that follow from it would be kept, and spill
                queries, keys, gates, sum_tile = q.wait(j), k.wait(j), g.wait(j), gate_sums.wait(j)
                sums = gates if IN_PLACE else sum_tile
                inverse_norms = channel_norms.wait(norms, j)
                seq_layout.zero_other_rows(keys, seq.remaining(j))
                b_last = decay.load_last_sums(sums, warp)
                strong = warpgroup.reduce_any(tile_min(b_last) < decay.min_log2_decay)
                decayed_keys, solved = k_decayed.claim(j), t.claim(j)
                decay.store_state_decay(state_decay.claim(j), flag.claim(j), b_last, warp, strong, False)
                if strong:
                    if block_scores.is_halved(sums, warp):
                        scores = halved_scores.compute(queries, keys, (high, low), sums, decayed_keys, warp)
                        warpgroup.store(p.claim(j), scores)
                        warpgroup.sync()
                        b_last = decay.load_last_sums(sums, warp)
                        decay.factor_chunk_decays(queries, keys, decayed_keys, sums, b_last, warp, True)
                        publish_decays(published, j)
                        warpgroup.sync()
                        beta, row_beta = finish_beta(beta, inverse_norms)
                        a = (warpgroup.load(high, SCORES) + warpgroup.load(low, SCORES)) * row_beta
                    else:
                        step_reads = reads if IN_PLACE else viewed(gates, KEY)
                        block_reads = viewed(sums, block_scores.block_reads)
                        step_writes = block_scores.open_far_writes(solved)
                        tiles = SteppedTiles(queries, keys, decayed_keys, block_reads, step_reads, writes, step_writes)
                        block_scores.factor(tiles, sums, warp)
                        publish_decays(published, j)
                        warpgroup.sync()
                        beta, row_beta = finish_beta(beta, inverse_norms)
                        scores, a = block_scores.score(tiles, warp)
                        store(block_scores.query_rows(p.claim(j), warp), scores)
                        a = a * row_beta
                    release_sums(gate_sums, g, j)
                    decay.fill_scored(rings, arrays, j + 1, n, seq, head, key_head)
                else:
                    decay.factor_chunk_decays(queries, keys, decayed_keys, sums, b_last, warp, False)
                    publish_decays(published, j)
                    release_sums(gate_sums, g, j)
                    warpgroup.sync()
                    decay.fill_scored(rings, arrays, j + 1, n, seq, head, key_head)
                    beta, row_beta = finish_beta(beta, inverse_norms)
                    a, query_scores = warpgroup.mm_ABt(decayed_keys, keys), warpgroup.mm_ABt(queries, keys)
                    a, query_scores = warpgroup.wait(a, newer=1) * row_beta, warpgroup.wait(query_scores)
                    warpgroup.store(p.claim(j), warpgroup.causal(query_scores, 0, 0.0))  # with one stage, claimed late
                p.publish(j)
                k_decayed.release(j)
                q.release(j)
                k.release(j)
                inverse = inverse_transposed(a, high, low)  # a has beta in each branch: wgmma's registers would be joined here
                warpgroup.store(solved, inverse * beta)
                t.publish(j)  # a load under way would be waited for at each fence
                beta = warpgroup.load(betas, COL_VEC, (seq.batch, seq.chunk_start(j + 1), head), cols=1)
        else:
            if SETMAXNREG:
                warpgroup.claim_registers(consumer_registers)
            column, out_tile = COLUMNS * (CONSUMERS * block + wg), subtile(out, CHUNK, wg)
            warp, constants = warpgroup.rank(), (biases, rates)
            if wg == 0:
                channel_gates.load_constants(constants, params, head, warp)
                sum_gates(first_gates, g, gate_sums, constants, seq, 0, warp)
            if wg == CONSUMERS - 1:
                channel_norms.measure(norms, q, k, 0, seq, scale, warp)
            s_t = warpgroup.load(gInitialState, STATE, (sequence * segments + segment, head, 0, column), 3, 2)
            for j in range(n):
                decayed_keys, state_factor, strong = k_decayed.wait(j), state_decay.wait(j), decay.is_strong(flag.wait(j))
                s_t = decay.decay_state(s_t, state_factor, not strong)
                u, o = state.apply(s_t, decayed_keys, q.wait(j))
                q.release(j)
                k_decayed.release(j)
                values = fp32(warpgroup.load_transposed(v.wait(CONSUMERS * j + wg), state.values))
                v.release(CONSUMERS * j + wg)
                u = channel_norms.scale_key_columns(u, norms, j)
                u = INPUT(seq_layout.zero_other_columns(values, seq.remaining(j)) - u)
                if wg == 0:
                    sum_gates(channel_gates, g, gate_sums, constants, seq, j + 1, warp)
                if wg == CONSUMERS - 1:
                    channel_norms.measure(norms, q, k, j + 1, seq, scale, warp)
                decay.fill_values(v, gV, j + 1, n, seq, head, block, wg)
                u = INPUT(warpgroup.wait(warpgroup.mm_AB(u, t.wait(j))))
                t.release(j)
                s_t = warpgroup.wait(warpgroup.mma_AB(decay.decay_state(s_t, state_factor, strong), u, k.wait(j)))
                k.release(j)
                s_t = decay.decay_state(s_t, state_factor, not strong)
                state_decay.release(j)
                flag.release(j)
                o = channel_norms.scale_query_columns(warpgroup.wait(warpgroup.mma_ABt(o, u, p.wait(j))), norms, j, scale)
                p.release(j)
                state.store_output(gO, out_tile, o, seq, seq.chunk_start(j), head, CONSUMERS * block + wg)
            warpgroup.store_wait()
            if segment == segments - 1:
                warpgroup.store(gFinalState, s_t, (sequence, head, 0, column), 3, 2)
                seq_layout.zero_padding(gO, gCuSeqlens, sequence, length, head, CONSUMERS * block + wg)

    return scan, smem
