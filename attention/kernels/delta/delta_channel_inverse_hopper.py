"""What gradients of the delta rule need of each chunk before its state is known, of all chunks at once, for Hopper, where each
channel of the keys has a decay (parts/delta/delta_channels.py has the equations): the queries and keys that states are
multiplied by, exp(b) Q, exp(b) K and exp(b_last - b) K, the chunk's decay exp(b_last), the scores P / scale, and -L^T in two
parts.

A block has some chunks of a head, one after the other. A chunk is two blocks of 32 tokens with a reference each
(two_block_scores.py), or it is halved (anchored_scores.py). A warpgroup computes, and a fifth warp loads and stores: the next
chunk is loaded while this one's triangle is inverted."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import int32

from ops import divmod, exp2, load, store, store_wait, subtile, tma_store, truncate, viewed, warpgroup
from ops.for_attention.triangular_inverse import TRIANGLES, inverse_transposed
from tiles import bf16, fp16, fp32, inlined, ring, shared, st, sv
from tiles.launching.arguments import ENDS, INT, array, tiled
from tiles.targets import Target

from ...parts.delta.delta_chunk_solver import away_from_zero
from ...parts.delta.delta_chunks import KEY_DIMS, LEAST_BETA, TwoParts
from ...parts.recurrent import channel_config
from ...parts.recurrent.anchored_scores import KdaScores
from ...parts.recurrent.channel_decay import KdaDecay
from ...parts.recurrent.gates import CHUNK_COL_VEC, COL_VEC, ROW_VEC, TILE
from ...parts.recurrent.tokens import CHUNK, ChunkPlace, SequenceLayout, block_coord
from ...parts.recurrent.two_block_scores import ScoreTiles, TwoBlockScores

SENDER = 1  # the warpgroup whose first warp loads and stores
REGISTERS = 40, 216  # of a thread of the sender, of the warpgroup that computes


@dataclass(frozen=True)
class Config(channel_config.Config):
    """A kernel's configuration: that of channel_config.py. There are no consumers."""

    ctas_per_sm = 2

    @property
    def threads(self):
        return 2 * warpgroup.THREADS

    @property
    def decayed_keys(self):
        """The tile of exp(b) K, which takes the place of 16-bit gates once they are summed up, and this is a small one."""
        return self.key if self.gates is fp32 else st(16, 16, self.dtype)

    def __str__(self):
        return f"inverses of chunks, {super().__str__()}"


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations of both padded key dims, with gates in fp32 and in bf16; fp16 too if `everything`."""
    if target.has_wgmma:
        for input_dtype in (bf16, fp16) if everything else (bf16,):
            for key_dim, gates, varlen in itertools.product(KEY_DIMS, (fp32, input_dtype), (False, True)):
                yield Config(key_dim, 0, gates, input_dtype, varlen)


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, IN_PLACE, LEAST, KEY = config.dtype, config.gates is fp32, LEAST_BETA[config.dtype], config.key
    SQUARE = st(CHUNK, CHUNK, INPUT, width=KEY.width)  # as wide as KEY, which gives it room
    seq_layout, two_parts = SequenceLayout(config.varlen), TwoParts(INPUT)
    decay, channel_gates = KdaDecay(config.key_dim, INPUT, 1, False), config.channel_gates
    halved_scores, block_scores = KdaScores(config.key_dim, INPUT), TwoBlockScores(config.key_dim, INPUT)
    KEYS, CHUNK_KEYS = tiled(KEY, unit=1), tiled(KEY, rows=2)
    SENDER_REGISTERS, COMPUTE_REGISTERS = REGISTERS
    smem = shared(
        q=ring(KEY, 1, 1),
        k=ring(KEY, 1, 1),
        g=ring(config.gate, 1, 1),
        k_decayed=ring(config.decayed_keys, 1, 1, writers=warpgroup.WARPGROUP),
        square=SQUARE,
        triangles=TRIANGLES,
        state_decay=config.state_decay,
        gate_sums=config.gate_sums,
        beta=ring(sv(CHUNK, fp32), 1, warpgroup.WARPGROUP + 1, writers=1),
    )

    @inlined
    def fill(rings, arrays, tails, j, n, seq, sequence, head, key_head):
        """Have TMA load the queries, keys and gates of the j-th of a sequence's n chunks, if there is one."""
        (q, k, g), (gQ, gK, gGates), (gTailQ, gTailK, gTailGates) = rings, arrays, tails
        if j < n:
            place = ChunkPlace(j, head, sequence, seq.chunk_start(j), seq)
            seq_layout.fill_chunk(g, j, gGates, gTailGates, place, head)
            seq_layout.fill_chunk(k, j, gK, gTailK, place, key_head)
            seq_layout.fill_chunk(q, j, gQ, gTailQ, place, key_head)

    @inlined
    def store_beta(beta, betas, j, n, seq, head):
        """Write beta of the j-th of a sequence's n chunks, if there is one, as others divide by it."""
        if j < n:
            x = load(betas, CHUNK_COL_VEC, (seq.batch, seq.chunk_start(j), head), cols=1)
            store(beta.claim(j), away_from_zero(x, LEAST))
            beta.publish(j)

    @inlined
    def send_chunk(tiles, arrays, at):
        """Store what is known of a chunk before the inverse: its decayed queries and keys, its own decay, its betas and P.
        Returns when they have left shared memory."""
        queries, decayed_keys, keys, state_decay, beta, scores = tiles
        gDecayedQ, gReadKeys, gWriteKeys, gB, gChunkBeta, gScores = arrays
        tma_store(gDecayedQ, at, queries)
        tma_store(gReadKeys, at, decayed_keys)
        tma_store(gWriteKeys, at, keys)
        tma_store(gB, at, state_decay)
        tma_store(gChunkBeta, at, beta)
        tma_store(gScores, at, scores)
        store_wait()

    @inlined
    def low_part(decayed_keys, reads):
        """The tile of the second part of -L^T: free once P has been sent."""
        if IN_PLACE:
            return subtile(decayed_keys, CHUNK, 0, CHUNK, 0)
        else:
            return subtile(block_scores.read_part(reads, 1), CHUNK, 0, CHUNK, 0)

    @cuda.jit(launch_bounds=(config.threads, config.ctas_per_sm), fastmath=True)
    def invert(
        gQ: KEYS, gK: KEYS, gBeta: array(3), gGates: tiled(config.gate, unit=1), gDecayedQ: CHUNK_KEYS, gReadKeys: CHUNK_KEYS,
        gWriteKeys: CHUNK_KEYS, gB: tiled(config.state_decay, 3, None, 2), gChunkBeta: tiled(sv(CHUNK, fp32), 3, None, 2),
        gScores: tiled(SQUARE, rows=2), gSolutions: tiled(SQUARE, rows=2), gTailQ: KEYS, gTailK: KEYS,
        gTailGates: tiled(config.gate, unit=1), gCuSeqlens: ENDS, length: INT, parts: INT, heads: INT, group: INT,
    ):  # fmt: skip
        """Each of the `parts` blocks of a head of a sequence has as many of its chunks. gB, gChunkBeta: exp(b_last) and beta of
        each chunk and head, LEAST_BETA for one that is less, as others divide by it; gSolutions: -L^T, high above low. gTailQ
        .. gTailGates: see packed_tails.py. `group` value heads share one of the key `heads`."""
        q, k, g, k_decayed, square, triangles, state_decay, gate_sums, beta = smem.open()
        _, part, head, sequence = block_coord(cuda.blockIdx.x, 1, parts, heads * group)
        key_head, _ = divmod(head, group)
        seq = seq_layout.segment_tokens(gCuSeqlens, sequence, length, part, parts)
        n, first, warp = seq.num_chunks(), seq_layout.chunk_index(seq.start, sequence, length), warpgroup.rank()
        if warpgroup.id() == SENDER:
            warpgroup.release_registers(SENDER_REGISTERS)
            if warpgroup.rank() == 0:
                rings, arrays, tails = (q, k, g), (gQ, gK, gGates), (gTailQ, gTailK, gTailGates)
                sent_arrays = gDecayedQ, gReadKeys, gWriteKeys, gB, gChunkBeta, gScores
                fill(rings, arrays, tails, int32(0), n, seq, sequence, head, key_head)
                betas = truncate(gBeta, 1, seq.end)
                store_beta(beta, betas, int32(0), n, seq, head)
                for j in range(n):
                    decayed_keys, queries, keys, gates = k_decayed.wait(int32(2 * j)), q.wait(j), k.wait(j), g.wait(j)
                    if IN_PLACE:
                        sums = gates
                    else:
                        sums, decayed_keys = gate_sums, viewed(gates, KEY)
                    reads = viewed(sums, block_scores.reads)
                    scores, at = subtile(reads, CHUNK, 0, CHUNK, 0), (int32(first + j), head)
                    send_chunk((queries, decayed_keys, keys, state_decay, beta.wait(j), scores), sent_arrays, at)
                    beta.release(j)
                    k_decayed.release(int32(2 * j))
                    q.release(j)
                    k.release(j)
                    g.release(j)
                    fill(rings, arrays, tails, int32(j + 1), n, seq, sequence, head, key_head)
                    second_tile = low_part(k_decayed.wait(int32(2 * j + 1)), reads)
                    tma_store(gSolutions, (*at, 0), square)
                    tma_store(gSolutions, (*at, 1), second_tile)
                    store_wait()
                    k_decayed.release(int32(2 * j + 1))
                    store_beta(beta, betas, int32(j + 1), n, seq, head)
        else:
            warpgroup.claim_registers(COMPUTE_REGISTERS)
            (high, low), (writes, _) = decay.open_triangles(triangles, ())
            far_writes = block_scores.open_far_writes(square)
            for j in range(n):
                queries, keys, gates = q.wait(j), k.wait(j), g.wait(j)
                if IN_PLACE:
                    sums = gates
                    channel_gates.cumsum(sums, gates, (), warp, seq.remaining(j))
                    decayed_keys = k_decayed.claim(int32(2 * j))
                else:
                    sums, decayed_keys = gate_sums, viewed(gates, KEY)
                    k_decayed.claim(int32(2 * j))  # the chunk before has left the place of sums, among others
                    channel_gates.cumsum(sums, gates, (), warp, seq.remaining(j))
                tiles = ScoreTiles(queries, keys, decayed_keys, viewed(sums, block_scores.reads), writes, far_writes)
                block_sums = block_scores.load_sums(sums, 0, warp), block_scores.load_sums(sums, 1, warp)
                references = block_scores.find_references(*block_sums)
                store(subtile(state_decay, decay.warp_tile.cols, warp), exp2(references.last))
                if references.halved:
                    scores = halved_scores.compute(queries, keys, (high, low), sums, decayed_keys, warp)
                    warpgroup.sync()  # all have read what is decayed now
                    b_last = decay.load_last_sums(sums, warp)
                    decay.factor_chunk_decays(queries, keys, decayed_keys, sums, b_last, warp, True)
                    warpgroup.sync()  # all have read the sums, whose place scores take
                    a = warpgroup.load(high, TILE) + warpgroup.load(low, TILE)
                else:
                    block_scores.factor(tiles, block_sums, references, warp)
                    warpgroup.sync()
                    scores, a = block_scores.compute(tiles, references.mild, warp)
                    scores = INPUT(warpgroup.causal(scores, 0, 0.0))
                warpgroup.store(subtile(tiles.reads, CHUNK, 0, CHUNK, 0), scores)  # a warp's rows are those of its Q^
                k_decayed.publish(int32(2 * j))
                chunk_beta = beta.wait(j)
                a = a * load(chunk_beta, ROW_VEC)
                x = warpgroup.triu(inverse_transposed(a, high, low), 1, 0.0) / warpgroup.load(chunk_beta, COL_VEC)
                beta.release(j)
                first_part, second_part = two_parts.split(x)
                second_tile = low_part(k_decayed.claim(int32(2 * j + 1)), tiles.reads)
                warpgroup.store(square, first_part)
                warpgroup.store(second_tile, second_part)
                k_decayed.publish(int32(2 * j + 1))

    return invert, smem
