"""Hedgehog attention (Zhang et al. 2024; LoLCATS) for Hopper: softmax attention to the newest keys and linear attention, by
learned features, to all older ones, both normalised by the sum of all weights. With blocks of 64 tokens,

    w_ij = beta exp((q_i . k_j - max) / sqrt(D))      j <= i in i's block or the one before it
    w_ij = alpha f(q_i M_q) . f(k_j M_k)              j in older blocks;  f(x) = max([softmax(x), softmax(-x)], 1e-6)
    o_i  = sum_j w_ij v_j / (sum_j w_ij + 1e-6)

A thread block scans the chunks of 64 tokens of one head, for all columns of the values, with four warpgroups. The first
computes the weights of the window, the second the features; the third multiplies both by the values and by the state
S = sum f(k)^T v over older blocks, and the fourth loads:

    O   = W_far V_old + W_near V + f(Q) S        S is read from shared memory, rounded
    S^T = S^T + V_old^T f(K_old)                 in registers, transposed: 128 x 128
"""

import functools
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from numba import cuda

from ops import divmod, exp2, hstack, load, maximum, right_fill, row_max, row_min, row_sum, subtile, warpgroup, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st, sv
from tiles.launching.arguments import ENDS, FLOAT, INT, array, tiled
from tiles.targets import Target

from ...parts.recurrent.gates import LOG2_E
from ...parts.recurrent.hedgehog_chunks import FLOOR, HALF
from ...parts.recurrent.tokens import CHUNK, COLUMNS, SequenceLayout

HEAD = 128  # columns of queries, keys and values
WINDOW, FEATURES, OUTPUT, LOADER = range(4)  # the indices of the warpgroups
THREADS = 4 * warpgroup.THREADS
REGISTERS = 24, 136, 224  # of a thread of LOADER, FEATURES and OUTPUT; all start with 128, and WINDOW keeps these


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. dtype: of q, k, v, the maps and out. varlen: are sequences packed (cu_seqlens)?"""

    dtype: dtype
    varlen: bool = False
    threads: ClassVar[int] = THREADS

    def __str__(self):
        return f"{self.dtype}{', varlen' * self.varlen}"

    @property
    def rows(self):
        """The tile of Q, K or V for a chunk."""
        return st(CHUNK, HEAD, self.dtype)

    @property
    def map(self):
        """The tile of the weights of a head's feature map, (head_dim, half of the features)."""
        return st(HEAD, HALF, self.dtype)


def space(target: Target, everything: bool) -> Iterator[Config]:
    """List all configurations. Those for fp16, whose code takes as many registers as bf16's, come with `everything` only."""
    if target.has_wgmma:
        yield from itertools.starmap(Config, itertools.product((bf16, fp16) if everything else (bf16,), (False, True)))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, WARPS, seq_layout = config.dtype, warpgroup.WARPGROUP, SequenceLayout(config.varlen)
    QUERY, STATE, O, TRANSPOSED = rt(16, HEAD, INPUT), rt(16, 2 * HALF, fp32), rt(16, HEAD, fp32), rt(16, CHUNK, INPUT)
    ROWS, MAP = tiled(config.rows, unit=1), tiled(config.map, 3, 1, 2)
    Z, (loader_registers, features_registers, output_registers) = rt(16, HALF, fp32).row_vec, REGISTERS
    smem = shared(
        q=ring(config.rows, 1, readers=2 * WARPS),
        k=ring(config.rows, 3, readers=2 * WARPS),
        v=ring(config.rows, 3),
        maps=ring(config.map, 2),
        window=ring(st(CHUNK, CHUNK, INPUT), 2, writers=WARPS),
        q_features=ring(st(CHUNK, 2 * HALF, INPUT), 1, writers=WARPS),
        k_features=ring(st(CHUNK, 2 * HALF, INPUT), 1, writers=WARPS),
        state=st(HEAD, 2 * HALF, INPUT),
        near_sum=ring(sv(CHUNK, fp32), 1, writers=WARPS),
        far_sum=ring(sv(CHUNK, fp32), 1, writers=WARPS),
        z_up=sv(HALF, fp32),
        z_down=sv(HALF, fp32),
    )

    @inlined
    def weighted_features(x, weight):
        """The two halves of weight * f(x). x: the product of queries or keys with the map."""
        x = x * LOG2_E
        up, down = exp2(x - row_max(x)), exp2(row_min(x) - x)
        up_sum, down_sum = row_sum(up), row_sum(down)
        return maximum(up, up_sum * FLOOR) * (weight / up_sum), maximum(down, down_sum * FLOOR) * (weight / down_sum)

    @inlined
    def write_slot(ring, j, tile):
        """Write the warpgroup's tile to the j-th slot of a ring."""
        warpgroup.store(ring.claim(j), tile)
        ring.publish(j)

    @inlined
    def feature_sums(tile, half):
        """The sums of a tile's columns, in one half of it. Each warp has those of 16 columns."""
        return row_sum(fp32(warpgroup.load_transposed(subtile(tile, CHUNK, 0, HALF, half), TRANSPOSED)))

    @cuda.jit(launch_bounds=(THREADS, 1), fastmath=True)
    def attend(
        gQ: ROWS, gK: ROWS, gV: ROWS, gQMap: MAP, gKMap: MAP, gAlphas: array(1), gBetas: array(1), gO: array(4, INPUT),
        gCuSeqlens: ENDS, length: INT, heads: INT, group: INT, scale: FLOAT,
    ):  # fmt: skip
        """The outputs of one of the `heads`, of which `group` share a key head. scale: log2(e) / sqrt(D)."""
        q, k, v, maps, window, q_features, k_features, state, near_sum, far_sum, z_up, z_down = smem.open()
        sequence, head = divmod(cuda.blockIdx.x, heads)
        key_head, _ = divmod(head, group)
        seq = seq_layout.sequence_tokens(gCuSeqlens, sequence, length)
        n = seq.num_chunks()
        wg = warpgroup.id()
        if wg == LOADER:
            warpgroup.release_registers(loader_registers)
            maps.fill(0, gQMap, (key_head, 0, 0))
            maps.fill(1, gKMap, (key_head, 0, 0))
            for j in range(n):
                token = seq.chunk_start(j)
                q.fill(j, gQ, (seq.batch, token, key_head))
                k.fill(j, gK, (seq.batch, token, key_head))
                v.fill(j, gV, (seq.batch, token, head))
        elif wg == WINDOW:
            beta = gBetas[head]
            for j in range(n):
                queries = warpgroup.load(q.wait(j), QUERY)
                q.release(j)
                near = warpgroup.mm_ABt(queries, k.wait(j))
                far = warpgroup.mm_ABt(queries, k.wait(max(j - 1, 0)))
                near = warpgroup.causal(warpgroup.wait(near, newer=1), 0, -math.inf)
                far = right_fill(warpgroup.wait(far), CHUNK * min(j, 1), -math.inf)
                if j > 0:
                    k.release(j - 1)
                row_maxima = row_max(near, row_max(far)) * scale
                near, far = exp2(near * scale - row_maxima) * beta, exp2(far * scale - row_maxima) * beta
                rounded_near, rounded_far = INPUT(near), INPUT(far)
                write_slot(window, 2 * j, rounded_far)
                write_slot(window, 2 * j + 1, rounded_near)
                write_slot(near_sum, j, row_sum(fp32(rounded_near), row_sum(fp32(rounded_far))))
        elif wg == FEATURES:
            warpgroup.claim_registers(features_registers)
            alpha, q_map, k_map = gAlphas[head], maps.wait(0), maps.wait(1)
            sums_up, sums_down = zeros(O.col_vec), zeros(O.col_vec)
            warpgroup.store(z_up, sums_up)
            warpgroup.store(z_down, sums_down)
            for j in range(n):
                queries = warpgroup.load(q.wait(j), QUERY)
                q.release(j)
                up, down = weighted_features(warpgroup.wait(warpgroup.mm_AB(queries, q_map)), alpha)
                write_slot(q_features, j, INPUT(hstack(up, down)))
                warpgroup.sync()
                write_slot(far_sum, j, row_sum(up * load(z_up, Z) + down * load(z_down, Z)))
                if j > 0:
                    up, down = weighted_features(warpgroup.wait(warpgroup.mm_AB(k.wait(j - 1), k_map)), 1.0)
                    k.release(j - 1)
                    f = k_features.claim(j - 1)
                    warpgroup.store(f, INPUT(hstack(up, down)))
                    warpgroup.sync()
                    sums_up, sums_down = sums_up + feature_sums(f, 0), sums_down + feature_sums(f, 1)
                    k_features.publish(j - 1)
                    warpgroup.store(z_up, sums_up)
                    warpgroup.store(z_down, sums_down)
        else:
            warpgroup.claim_registers(output_registers)
            s_t_0, s_t_1 = zeros(STATE), zeros(STATE)
            for j in range(n):
                warpgroup.store(subtile(state, CHUNK, 0), s_t_0)
                warpgroup.store(subtile(state, CHUNK, 1), s_t_1)
                warpgroup.sync()
                values, old_values = v.wait(j), v.wait(max(j - 1, 0))
                seq_layout.zero_other_rows(values, seq.remaining(j))
                o = warpgroup.mm_AB(window.wait(2 * j), old_values)
                o = warpgroup.mma_AB(o, window.wait(2 * j + 1), values)
                o = warpgroup.mma_ABt(o, q_features.wait(j), state)
                if j > 0:
                    f = k_features.wait(j - 1)
                    s_t_0 = warpgroup.mma_AtB(s_t_0, subtile(old_values, CHUNK, 0, HALF, 0), f)
                    s_t_1 = warpgroup.mma_AtB(s_t_1, subtile(old_values, CHUNK, 0, HALF, 1), f)
                    s_t_0, s_t_1 = warpgroup.wait(s_t_0), warpgroup.wait(s_t_1)
                    k_features.release(j - 1)
                    v.release(j - 1)
                o = warpgroup.wait(o)
                window.release(2 * j)
                window.release(2 * j + 1)
                q_features.release(j)
                o = o / (warpgroup.load(near_sum.wait(j), O.col_vec) + warpgroup.load(far_sum.wait(j), O.col_vec) + FLOOR)
                near_sum.release(j)
                far_sum.release(j)
                seq_layout.store_rows(gO, o, seq, seq.chunk_start(j), head, 0)
                warpgroup.sync()
            for block in range(HEAD // COLUMNS):
                seq_layout.zero_padding(gO, gCuSeqlens, sequence, length, head, block)

    return attend, smem
