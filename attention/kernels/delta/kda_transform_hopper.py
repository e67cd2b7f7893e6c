"""What KDA's chunks need and do not get from the state, of all chunks at once, for Hopper (kda_hopper.py has the equations):
q' and k' of channel_decay.py, where r is 0, and, as U = T (V - k' S') occurs in two products only, T as a factor of what it
meets there:

    exp(b_last - r) k*^T T        scale tril(q' k*^T) T

kda_walk_hopper.py reads them. A chunk is two blocks of 32 tokens with references (row_scores.py), or in float16 it may be
halved (anchored_scores.py).

A warpgroup has some chunks, one after the other, in one of two orders (parts/recurrent/chunk_order.py). q' and k* take the
place of q and k in shared memory. The next chunk is loaded while this one's triangle is inverted, but for its keys, which k* is
in the way of."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from numba import cuda
from numpy import int32

from ops import exp2, load, store, subtile, tma_store, truncate, viewed, warpgroup
from ops.for_attention.triangular_inverse import TRIANGLES, inverse_transposed
from tiles import fp32, inlined, ring, rt, shared, st, sv
from tiles.launching.arguments import ENDS, FLOAT, INT, array, tiled
from tiles.targets import Target

from ...parts.recurrent import channel_config
from ...parts.recurrent.anchored_scores import KdaScores
from ...parts.recurrent.channel_config import DELTA_KEY_DIMS
from ...parts.recurrent.channel_decay import KdaDecay
from ...parts.recurrent.chunk_order import ChunkMajor, HeadMajor
from ...parts.recurrent.gate_formulas import BetaFormula
from ...parts.recurrent.l2norm import choose_channel_norms
from ...parts.recurrent.launch_conditions import HistoryCondition, SuccessorGrid
from ...parts.recurrent.row_scores import RowScores
from ...parts.recurrent.segment_spans import OverlapCounts
from ...parts.recurrent.tokens import CHUNK, SequenceLayout
from ...parts.recurrent.two_block_scores import ScoreTiles

CTAS_PER_SM = 2  # blocks of one warpgroup for which shared memory has room
WARPS = warpgroup.WARPGROUP


@dataclass(frozen=True)
class Config(channel_config.ConditionalConfig):
    """A kernel's configuration: that of channel_config.py. There are no consumers. order: of the chunks."""

    order: HeadMajor = field(default=HeadMajor(), kw_only=True)

    @property
    def threads(self):
        return warpgroup.THREADS * self.order.block_workers

    @property
    def ctas_per_sm(self):
        """How many thread blocks shared memory has room for."""
        return CTAS_PER_SM // self.order.block_workers

    @property
    def decayed_keys(self):
        """The tile of k', which takes the place of 16-bit gates once they are summed up, and this is a small one."""
        return self.key if self.gates is fp32 else st(16, 16, self.dtype)

    @property
    def solved_keys(self):
        """The tile of T^T k*: that of k' once it is stored, or 16-bit gates' sums once they are used."""
        return self.key if self.gates is fp32 else st(CHUNK, self.key_dim, self.dtype, width=self.gate_sums.width)

    @property
    def square(self):
        """The tile of P or of T for a chunk: a row and a column for each of its tokens."""
        return st(CHUNK, CHUNK, self.dtype)

    @property
    def state_decays(self):
        """The vectors exp(r) and exp(b_last), a number for each channel."""
        return sv(2 * self.key_dim, fp32)

    def __str__(self):
        return ", ".join(filter(None, (f"UT transforms, {super().__str__()}", str(self.order))))


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations that channel_space has of both padded key dims; of the larger one for a walk beside this grid, too.
    everything: for that of both, and under all conditions of launch_conditions.py."""
    sizes = tuple((key_dim, 0) for key_dim in DELTA_KEY_DIMS)
    for config in channel_config.channel_space(Config, sizes, target, everything, BetaFormula(1.0)):
        yield replace(config, consumers=0)
        if not config.varlen and (everything or config.key_dim == max(DELTA_KEY_DIMS)):
            yield replace(config, consumers=0, order=ChunkMajor())
            if everything:
                yield replace(config, consumers=0, order=ChunkMajor(), condition=HistoryCondition(False))
        if everything:
            yield from (replace(config, consumers=0, condition=x) for x in (HistoryCondition(True), SuccessorGrid()))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, IN_PLACE, SCORES = config.dtype, config.gates is fp32, rt(16, CHUNK, fp32)
    COL_VEC, seq_layout, chunk_order = SCORES.col_vec, SequenceLayout(config.varlen), config.order
    decay, channel_gates, BETA = KdaDecay(config.key_dim, INPUT, 1, False), config.limited_gates, config.beta
    PARAMS, ORDER = channel_gates.params(), chunk_order.params()
    channel_norms = choose_channel_norms(config)
    halved_scores = KdaScores(config.key_dim, INPUT, chunk_order.block_workers)
    block_scores = RowScores(config.key_dim, INPUT, channel_norms.are_factors)
    overlap_counts, condition = OverlapCounts(config.history, seq_layout), config.condition
    OVERLAPS, CONDITION = overlap_counts.params(), condition.params()
    KEY, KEY_DIM, SOLVED_KEYS = config.key, config.key_dim, config.solved_keys
    KEYS, CHUNK_KEYS = tiled(KEY, unit=1), tiled(KEY, rows=2)
    smem = shared(
        q=ring(config.key, 1, WARPS),
        k=ring(config.key, 1, WARPS),
        g=ring(config.gate, 1, WARPS),
        k_decayed=config.decayed_keys,
        square=config.square,
        triangles=TRIANGLES,
        state_decays=config.state_decays,
        key_decays=sv(config.key_dim, fp32),
        gate_sums=config.gate_sums,
        biases=channel_gates.biases,
        rates=channel_gates.rates,
        row_sums=overlap_counts.history.sums,
        roots=block_scores.roots,
        norms=channel_norms.vector,
    ).per_warpgroup(chunk_order.block_workers)

    @inlined
    def fill(rings, arrays, j, n, at):
        """Have TMA load the queries and gates of the j-th of n chunks, if there is one."""
        (q, g), (gQ, gGates) = rings, arrays
        if j < n:
            g.fill(j, gGates, (at.seq.batch, at.token, at.head))
            q.fill(j, gQ, (at.seq.batch, at.token, at.key_head))

    @inlined
    def fill_keys(k, gK, j, n, at):
        """Have TMA load the keys of the j-th of n chunks, if there is one."""
        if j < n:
            k.fill(j, gK, (at.seq.batch, at.token, at.key_head))

    @inlined
    def store_decays(state_decays, key_decays, references, halved, warp):
        """Write exp(r), which is 1, exp(b_last), and what is left to multiply keys by, of the warp's channels."""
        cols, last, none = decay.warp_tile.cols, references.last, references.last * 0.0
        store(subtile(state_decays, cols, warp), none + 1.0)
        store(subtile(state_decays, cols, int32(WARPS + warp)), exp2(last))
        store(subtile(key_decays, cols, warp), exp2(none if halved else last - references.end))

    @inlined
    def send_decayed(tiles, arrays, at, warp):
        """The first warp stores q', k', exp(r) and exp(b_last) of a chunk, which all have written."""
        (queries, decayed_keys, state_decays), (gQueries, gDecayedKeys, gStateDecays) = tiles, arrays
        if warp == 0:
            tma_store(gQueries, at, queries)
            tma_store(gDecayedKeys, at, decayed_keys)
            tma_store(gStateDecays, at, state_decays)

    @cuda.jit(launch_bounds=(config.threads, config.ctas_per_sm), fastmath=True)
    def transform(
        gQ: KEYS, gK: KEYS, gBeta: array(3), gGates: tiled(config.gate, unit=1), gQueries: CHUNK_KEYS, gDecayedKeys: CHUNK_KEYS,
        gSolvedKeys: tiled(SOLVED_KEYS, rows=2), gSolvedScores: tiled(config.square, rows=2),
        gStateDecays: tiled(config.state_decays, 3, None, 2), gCuSeqlens: ENDS, length: INT, order_args: ORDER, heads: INT,
        group: INT, scale: FLOAT, params: PARAMS, counts: INT, overlap_args: OVERLAPS, condition_args: CONDITION,
    ):  # fmt: skip
        """gQueries .. gStateDecays: of each chunk and head, q', k', exp(b_last - r) T^T k*, scale T^T tril(q' k*^T)^T, exp(r)
        and exp(b_last). order_args: see chunk_order.py; condition_args: launch_conditions.py. heads: of keys, each of which
        `group` value heads share. The first `counts` blocks of the grid count overlaps (segment_spans.py), the others have
        chunks."""
        if condition.is_skipped(condition_args):
            return
        (
            q, k, g, k_decayed, square, triangles, state_decays, key_decays, gate_sums, biases, rates, row_sums, roots, norms,
        ) = smem.open()  # fmt: skip
        block_index = int32(cuda.blockIdx.x - counts)
        if block_index < 0:
            overlap_counts.store(overlap_args, params, gBeta, gCuSeqlens, length, heads, group, cuda.blockIdx.x, row_sums)
            return
        chunks = chunk_order.begin(block_index, seq_layout, gCuSeqlens, length, heads, group, order_args)
        n, chunk, warp = chunks.n, chunks.locate(int32(0)), warpgroup.rank()
        rings, arrays = (q, g), (gQ, gGates)
        decayed_arrays = gQueries, gDecayedKeys, gStateDecays
        fill(rings, arrays, int32(0), n, chunk)
        fill_keys(k, gK, int32(0), n, chunk)
        chunks.let_next_grid_begin()
        constants, ((high, low), (writes, _)) = (biases, rates), decay.open_triangles(triangles, ())
        far_writes = block_scores.open_far_writes(square)
        channel_gates.load_constants(constants, params, chunk.head, warp)
        betas = truncate(gBeta, 1, chunks.end())
        beta = warpgroup.load(betas, COL_VEC, (chunk.seq.batch, chunk.token, chunk.head), cols=1)
        condition.follow()
        for j in range(n):
            chunk = chunks.locate(j)
            queries, gates, at = q.wait(j), g.wait(j), (chunk.chunk, chunk.head)

            # b, and queries and keys as they are multiplied
            if j > 0 and chunks.changes_head(chunk):
                channel_gates.load_constants(constants, params, chunk.head, warp)
            sums = gates if IN_PLACE else gate_sums
            if not IN_PLACE:
                warpgroup.store_wait()  # of the chunk before, from the place of sums
                warpgroup.sync()
            seq_layout.zero_other_rows(gates, chunk.remaining)
            channel_gates.cumsum(sums, gates, constants, warp, chunk.remaining)
            keys = k.wait(j)
            seq_layout.zero_other_rows(keys, chunk.remaining)
            channel_norms.prepare(norms, queries, keys, chunk.remaining, warp)
            beta = BETA.compute(beta)
            if IN_PLACE:
                decayed_keys, solved_keys = k_decayed, k_decayed
            else:
                decayed_keys = viewed(gates, KEY)
                solved_keys = viewed(subtile(gate_sums, CHUNK, 0, KEY_DIM // 2, 0), SOLVED_KEYS)
            decayed = queries, decayed_keys, state_decays

            # decayed queries and keys, which leave, and scores
            block_sums = block_scores.load_sums(sums, 0, warp), block_scores.load_sums(sums, 1, warp)
            if IN_PLACE:
                warpgroup.store_wait()  # of the chunk before, from the tiles that are written once the warps have voted
            references = block_scores.find_references(*block_sums)
            halved = references.halved
            store_decays(state_decays, key_decays, references, halved, warp)
            chunks.count_previous(chunk, warp)
            if halved:
                scores = halved_scores.compute(queries, keys, (high, low), sums, decayed_keys, warp)
                warpgroup.sync()  # all warps have read what they overwrite now
                b_last = decay.load_last_sums(sums, warp)
                decay.factor_chunk_decays(queries, keys, decayed_keys, sums, b_last, warp, True)
                warpgroup.sync()
                send_decayed(decayed, decayed_arrays, at, warp)
                a = warpgroup.load(high, SCORES) + warpgroup.load(low, SCORES)
            else:
                tiles = ScoreTiles(queries, keys, decayed_keys, viewed(sums, block_scores.reads), writes, far_writes)
                block_scores.factor(tiles, roots, norms, block_sums, references, warp)
                warpgroup.sync()
                products = block_scores.issue(tiles, roots, references, warp)
                send_decayed(decayed, decayed_arrays, at, warp)
                scores, a = block_scores.finish(products, warp)
                scores = INPUT(warpgroup.causal(scores, 0, 0.0))
                warpgroup.sync()  # all warps have read the keys whose place scores take
            warpgroup.store(square, scores)
            warpgroup.store_wait()
            warpgroup.sync()
            q.release(j)
            g.release(j)

            # T, while the next chunk is loaded, and its products with keys and scores, which leave
            next_chunk = chunks.locate(int32(j + 1))
            fill(rings, arrays, int32(j + 1), n, next_chunk)
            t_transposed = INPUT(inverse_transposed(a * beta, high, low) * beta)
            beta = warpgroup.load(betas, COL_VEC, (next_chunk.seq.batch, next_chunk.token, next_chunk.head), cols=1)
            solved, solved_scores = warpgroup.mm_AB(t_transposed, keys), warpgroup.mm_ABt(t_transposed, square)
            solved, solved_scores = warpgroup.wait(solved, newer=1), warpgroup.wait(solved_scores)
            warpgroup.sync()
            k.release(j)
            fill_keys(k, gK, int32(j + 1), n, next_chunk)
            warpgroup.store(solved_keys, solved * load(key_decays, decay.channel_vec))
            warpgroup.store(square, solved_scores * scale)
            warpgroup.sync()
            if warp == 0:
                tma_store(gSolvedKeys, at, solved_keys)
                tma_store(gSolvedScores, (*at, 0, KEY_DIM // CHUNK), square)
        chunks.finish(warp)

    return transform, smem
