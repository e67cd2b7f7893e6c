"""Based's local states for Hopper: what each segment of a long sequence adds to the state (based_hopper.py) and to the sum of
features, or in reverse to their gradients (based_gradients_hopper.py),

    S = sum f(k_j)^T v_j     z = sum f(k_j)          dS = sum f(q_i)^T w_i dO_i     dz = -sum w_i (dO_i . O_i) f(q_i)

compose_segment_states.py adds these up to the states before segments."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import float32

from ops import divmod, mma_AB, mma_AtB, ones, taylor, warpgroup, zeros
from tiles import bf16, fp16, ring, rt, shared
from tiles.launching.arguments import ENDS, FLOAT, INT, array, tiled
from tiles.targets import Target

from ...parts.recurrent.based_segments import VECTORS, KeySide, QuerySide
from ...parts.recurrent.based_walk import CONSUMER_REGISTERS, CTAS_PER_SM, LOADER, LOADER_REGISTERS, STATE, THREADS, BasedTiles
from ...parts.recurrent.taylor_sums import COL_VEC, SQUARE, store_sums
from ...parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout

STAGES = 4  # chunks in flight


@dataclass(frozen=True)
class Config(BasedTiles):
    """A kernel's configuration. reverse: are the sums gradients, of queries and dO? varlen: are sequences packed
    (cu_seqlens)?"""

    reverse: bool = False
    varlen: bool = False

    def __str__(self):
        flags = "normalized" * self.normalize, "reverse" * self.reverse, "varlen" * self.varlen
        return ", ".join(filter(None, (f"Based's local states, {self.dtype}", *flags)))


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations; those of fp16 with `everything` only."""
    if target.has_wgmma:
        dtypes = (bf16, fp16) if everything else (bf16,)
        yield from itertools.starmap(Config, itertools.product(dtypes, *[(False, True)] * 3))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, NORMALIZE, seq_layout = config.dtype, config.normalize, SequenceLayout(config.varlen, config.reverse)
    side = (QuerySide if config.reverse else KeySide)(INPUT, NORMALIZE)
    ONES, LOADS_VECTORS = rt(16, CHUNK, INPUT), config.reverse and NORMALIZE
    weights = {"weighted": config.key, "vectors": ring(VECTORS, STAGES)} if LOADS_VECTORS else {}
    smem = shared(x=ring(config.key, STAGES), v=ring(config.value, STAGES), features=config.features, **weights)

    @cuda.jit(launch_bounds=(THREADS, CTAS_PER_SM), fastmath=True)
    def scan(
        gX: tiled(config.key, unit=1), gV: tiled(config.value, unit=1), gVectors: tiled(VECTORS, 3, None, 2),
        gLocalStates: array(4), gLocalZ: array(3), gCuSeqlens: ENDS, length: INT, segments: INT, scanned_segments: INT,
        heads: INT, columns: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """The local state of one of the first `scanned_segments` of the `segments` of a sequence, for one of the `heads`, of
        which `group` share a key head, and one of `columns` blocks of 64 value columns. gX, gV: k and v, or q and dO. gVectors:
        w and -w dO . O of each chunk. gLocalStates, gLocalZ: (sequence, head and segment, ..) with features last."""
        tiles = smem.open()
        index, column = divmod(cuda.blockIdx.x, columns)
        slot, head = divmod(index, heads)
        sequence, segment = divmod(slot, scanned_segments)
        seq = seq_layout.segment_tokens(gCuSeqlens, sequence, length, segment, segments)
        place = head * scanned_segments + segment
        n = seq.num_chunks()
        if warpgroup.id() == LOADER:
            warpgroup.release_registers(LOADER_REGISTERS)
            key_head, _ = divmod(head, group)
            for j in range(n):
                tiles.x.fill(j, gX, (seq.batch, seq.chunk_start(j), key_head))
                tiles.v.fill(j, gV, (seq.batch, seq.chunk_start(j), head, column))
                if LOADS_VECTORS:
                    tiles.vectors.fill(j, gVectors, (seq_layout.chunk_index(seq.chunk_start(j), sequence, length), head))
        else:
            warpgroup.claim_registers(CONSUMER_REGISTERS)
            s_t, count, z, zz = zeros(STATE), float32(0), zeros(SQUARE), zeros(SQUARE)
            for j in range(n):
                rows, values = tiles.x.wait(j), tiles.v.wait(j)
                seq_layout.zero_other_rows(rows, seq.remaining(j))
                seq_layout.zero_other_rows(values, seq.remaining(j))
                x, tokens = side.prepare(tiles, j, rows, values, seq.remaining(j), scale)
                warpgroup.store(tiles.features, taylor(x, side.squares))
                warpgroup.sync()
                s_t = warpgroup.mma_AtB(s_t, values, tiles.features)
                if NORMALIZE:
                    weighted = side.weighted(tiles, rows)
                    count, z, zz = count + tokens, mma_AB(z, ones(ONES), weighted), mma_AtB(zz, weighted, rows)
                s_t = warpgroup.wait(s_t)
                warpgroup.sync()
                tiles.x.release(j)
                tiles.v.release(j)
            warpgroup.store(gLocalStates, s_t, (sequence, place, COLUMNS * column, 0), rows=2, cols=3, aligned=True)
            if NORMALIZE and column == 0:
                store_sums(gLocalZ, sequence, place, count, z, zz, side.squares, zeros(COL_VEC))

    return scan, smem
