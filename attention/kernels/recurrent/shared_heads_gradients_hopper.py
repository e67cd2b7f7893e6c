"""Gradients of linear attention for Hopper where value heads share queries and keys, of all chunks at once; a decay is one
number for a token and head. With S the state before a chunk, dS the gradient of the state after it, b the cumulative sum of
the chunk's gates, w the weights of its keys (1, or Mamba-2's dt), both of a head, and

    dO' = exp(b) dO        V' = w exp(-b) V        P = tril(Q K^T)        dP = scale tril(sum of dO' V'^T)

these are, the sums being those over the value heads of a key head,

    of a head         dV = w (exp(b_last - b) K dS + scale exp(-b) P^T dO') + D dO
    of its key head   dQ = scale (sum of dO' S^T) + dP K
                      dK = sum of exp(b_last) V' dS^T + dP^T Q

so that the scores of all heads are the same, and products of a head add up in the tensor cores. A thread block has some of the
value heads, of one chunk after another: it loads Q and K of a chunk once, computes P once, and keeps dQ, dK and dP in
registers. One consumer has the rows of queries, dQ and dP, and makes dO' and V'; the other those of keys, dK and dV, and reads
dO'. The first one waits for nothing that the second does. Both states are in memory, transposed, in the input's dtype
(results.ChunkStates), so that chunks are independent, and no block waits for another one. A head of more than 64 columns is
divided into blocks of 64, which this kernel treats as heads with the same gates. b, and a = b - log(w), come from memory, too
(gate_sums.py).

A chunk is strong if it decays by so much that V' would be too large; in float16 all are. There the consumers decay the scores
of a head themselves, tril(exp(b - b^T)) * P. No exponent is positive there, nor in dO'.

With Mamba-2's gate silu(z) of the outputs y, dO stands for dy = dout silu(z) in all of this, and the first consumer computes
dz = dout y silu'(z) with y = exp(b) (Q S + P V') + D v, which costs no product. Of a strong chunk it hands over dy, not dO'.

For the gates' gradients (gradients.py) the consumers compute q . dq and v . dv / w of each token, and of the latter the part
that comes from dS, times w; the former as dO' . (Q S + P V'), so that the terms of a chunk's scores are the same products of
rounded numbers in both, and cancel. Warps of the producer compute <S, dS>. For D's gradient there are the sums of dO V over the
chunk, of a head or of each column. Consumers store nothing but dQ and dK: a fence, which tiles of products need, would wait for
these stores. A warp of the producer does."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from numba import cuda
from numpy import int32

from ops import divmod, grid, row_sum, store_wait, truncate, warpgroup, zeros
from tiles import bf16, dtype, fp16, fp32, ring, rt, shared, st, sv
from tiles.launching.arguments import ENDS, FLOAT, INT, array, tiled
from tiles.targets import Target

from ...parts.recurrent.gates import TILE
from ...parts.recurrent.shared_heads import GATE_KINDS, SKIPS, STATE_WARPS, HeadDecay, HeadOutputGate, HeadRows
from ...parts.recurrent.tokens import CHUNK, COLUMNS, ChunkPlace, SequenceLayout

CONSUMERS = 2
DQ_CONSUMER, DK_CONSUMER, PRODUCER = range(CONSUMERS + 1)  # warpgroups
WARPS = CONSUMERS * warpgroup.WARPGROUP  # of the consumers
LOAD_WARP, STORE_WARP = range(2)  # of the producer; the others multiply S and dS
REGISTERS = 56, 224  # of a thread of the producer, of a consumer
STAGES = 3  # heads whose V, dO and states are in flight


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. key_dim: the channels of keys, padded. gates: one of GATE_KINDS. skip: one of SKIPS. partial:
    are dQ and dK float32, to be added over the blocks that share the value heads of a key head? varlen: are sequences packed
    (cu_seqlens)? with_gates: are the sums for the gates' gradients stored, too? gated: are outputs multiplied by silu(z)?
    keys_ahead: are Q and K of a block's next chunk loaded during the one before, in place of one more head's states?"""

    key_dim: int
    dtype: dtype
    gates: str
    skip: str = ""
    partial: bool = False
    varlen: bool = False
    with_gates: bool = True
    gated: bool = False
    keys_ahead: bool = False
    threads, overlaps_previous = warpgroup.THREADS * (CONSUMERS + 1), True

    def __str__(self):
        size, gates = f"Dk {self.key_dim} {self.dtype}", f"gates by {self.gates}" * bool(self.gates)
        flags = f"D by {self.skip}" * bool(self.skip), "z" * self.gated, "partial" * self.partial, "varlen" * self.varlen
        flags += ("keys ahead" * self.keys_ahead,)
        return ", ".join(filter(None, (size, gates, "gradients of gates" * self.with_gates, *flags)))


KEY_DIMS = 64, 128  # as padded


def space(target: Target, everything: bool) -> Iterator[Config]:
    """The configurations. everything: fp16, packed sequences, partial sums and D of columns at all sizes, too."""
    if target.has_wgmma:
        for input_dtype, key_dim, gates in itertools.product((bf16, fp16) if everything else (bf16,), KEY_DIMS, GATE_KINDS):
            for varlen, partial in itertools.product((False, True), repeat=2) if everything else ((False, False),):
                steps = gates == "step"
                for skip in SKIPS if everything and steps else ("head" * steps,):
                    config = Config(key_dim, input_dtype, gates, skip, partial, varlen, bool(gates))
                    yield config
                    if not varlen:
                        yield replace(config, keys_ahead=True)
                    if steps and input_dtype is bf16 and not varlen:
                        yield from (replace(config, gated=True, keys_ahead=ahead) for ahead in (False, True))


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    INPUT, KEYS, decay = config.dtype, config.key_dim, HeadDecay(config.gates, config.dtype, config.with_gates)
    (producer_registers, consumer_registers), seq_layout = REGISTERS, SequenceLayout(config.varlen)
    head_rows, output_gate = HeadRows(decay, config.skip, config.gated), HeadOutputGate(decay, config.skip, config.gated)
    SUMS = rt(16, KEYS, fp32)
    KEY, VALUE, STATE = st(CHUNK, KEYS, INPUT), st(CHUNK, COLUMNS, INPUT), st(COLUMNS, KEYS, INPUT)
    ALL_KEYS, ALL_VALUES = tiled(KEY, unit=1), tiled(VALUE, unit=1)
    DQK = array(4, fp32 if config.partial else INPUT)
    WEIGHTED_V, Z = (VALUE if used else st(16, 16, INPUT) for used in (decay.factored, config.gated))
    KEY_STAGES, STATE_STAGES = 1 + config.keys_ahead, STAGES - config.keys_ahead
    VALUE_STAGES, DOUT_READERS = STAGES - config.gated, warpgroup.WARPGROUP * (1 + config.gated)
    GATE_SUMS, TWO_ROWS = sv(CHUNK * (1 + decay.weighted), fp32), sv(2 * CHUNK, fp32)
    STATE_READERS = warpgroup.WARPGROUP + STATE_WARPS * config.with_gates
    smem = shared(
        q=ring(KEY, KEY_STAGES, WARPS),
        k=ring(KEY, KEY_STAGES, WARPS),
        v=ring(VALUE, VALUE_STAGES, WARPS),
        do=ring(VALUE, VALUE_STAGES, WARPS),
        z=ring(Z, VALUE_STAGES if config.gated else 1, warpgroup.WARPGROUP),
        s=ring(STATE, STATE_STAGES, STATE_READERS),
        ds=ring(STATE, STATE_STAGES, STATE_READERS),
        sums=ring(GATE_SUMS, STAGES, WARPS),
        decayed_dos=ring(VALUE, 1 + decay.factored, DOUT_READERS, writers=warpgroup.WARPGROUP),
        weighted_vs=ring(WEIGHTED_V, 1, warpgroup.WARPGROUP, writers=warpgroup.WARPGROUP),
        query_dots=ring(TWO_ROWS, 2, 1, writers=warpgroup.WARPGROUP),
        key_dots=ring(TWO_ROWS, 2, 1, writers=warpgroup.WARPGROUP),
        out=ring(VALUE, 2 - config.gated, 1, writers=warpgroup.WARPGROUP),
        dzs=ring(Z, 1, 1, writers=warpgroup.WARPGROUP),
    )

    @cuda.jit(launch_bounds=(config.threads, 1), fastmath=True)
    def differentiate_shared_heads(
        gQ: ALL_KEYS, gK: ALL_KEYS, gV: ALL_VALUES, gDOut: ALL_VALUES, gStates: tiled(STATE, 4, 2, 3),
        gDStates: tiled(STATE, 4, 2, 3), gSums: tiled(GATE_SUMS, 3, None, 2), gD: array(2), gZ: ALL_VALUES,
        gDZ: ALL_VALUES, gDQ: DQK, gDK: DQK, gDV: ALL_VALUES,
        gQueryDots: array(3), gKeyDots: array(3), gCarriedDots: array(3), gStateDots: array(3), gSkipSums: array(2),
        gColumnSums: array(3), gTailQ: ALL_KEYS, gTailK: ALL_KEYS, gTailV: ALL_VALUES, gTailDOut: ALL_VALUES,
        gTailDV: ALL_VALUES, gCuSeqlens: ENDS, length: INT, parts: INT, shares: INT, heads: INT, group: INT, width: INT,
        scale: FLOAT,
    ):  # fmt: skip
        """The chunks of a sequence are divided evenly among the `parts` blocks of each share. A key head's `group` value heads,
        of `width` blocks of columns each, are divided into `shares`; gDQ, gDK have as many heads for each key head. gStates,
        gDStates: S^T and dS^T of each chunk. gQueryDots, gKeyDots: of each token and (head, block of columns); gCarriedDots and
        gStateDots: of each chunk, head and block of columns or (block, warp). gSkipSums: of each (chunk, block of columns) and
        head; gColumnSums: of each head, (chunk, warp) and column. gSums: see gate_sums.py. gTailQ .. gTailDV: see
        packed_tails.py."""
        q, k, v, do, z, s, ds, sums, decayed_dos, weighted_vs, query_dots, key_dots, out, dzs = smem.open()
        grid.follow()
        wg = warpgroup.id()
        score_scale, product_scale = decay.split_scale(scale)
        index, share = divmod(cuda.blockIdx.x, shares)
        index, key_head = divmod(index, heads)
        sequence, part = divmod(index, parts)
        seq = seq_layout.sequence_tokens(gCuSeqlens, sequence, length)
        chunks, _ = divmod(int32(seq.num_chunks() - part + parts - 1), parts)  # of this block
        blocks = group * width
        blocks_per_share, _ = divmod(int32(blocks + shares - 1), shares)
        first = int32(key_head * blocks + blocks_per_share * share)  # of all heads' blocks of columns
        n, out_head = int32(min(blocks_per_share, blocks - blocks_per_share * share)), int32(shares * key_head + share)
        if wg == PRODUCER:
            warpgroup.release_registers(producer_registers)
            warp = warpgroup.rank()
            if warp == LOAD_WARP:
                for i in range(chunks):
                    token = seq.chunk_start(part + parts * i)
                    chunk = seq_layout.chunk_index(token, sequence, length)
                    place = ChunkPlace(chunk, key_head, sequence, token, seq)
                    seq_layout.fill_chunk(k, i, gK, gTailK, place, key_head)
                    seq_layout.fill_chunk(q, i, gQ, gTailQ, place, key_head)
                    for block in range(n):
                        slot = n * i + block
                        head, column = divmod(int32(first + block), width)
                        if decay.gates:
                            sums.fill(slot, gSums, (chunk, head, 0))
                        seq_layout.fill_chunk(v, slot, gV, gTailV, place, head, column)
                        seq_layout.fill_chunk(do, slot, gDOut, gTailDOut, place, head, column)
                        output_gate.fill(z, slot, gZ, (seq.batch, token, head, column))
                        ds.fill(slot, gDStates, (chunk, head, column, 0))
                        s.fill(slot, gStates, (chunk, head, column, 0))
            elif warp == STORE_WARP:
                outputs = gQueryDots, gKeyDots, gCarriedDots, gSkipSums
                for slot in range(n * chunks):
                    i, block = divmod(int32(slot), n)
                    head, column = divmod(int32(first + block), width)
                    token = seq.chunk_start(part + parts * i)
                    chunk, at = seq_layout.chunk_index(token, sequence, length), (seq.batch, token, int32(first + block))
                    place = ChunkPlace(chunk, head, sequence, token, seq)
                    output_gate.send(dzs, slot, gDZ, (seq.batch, token, head, column))
                    seq_layout.store_chunk(gDV, gTailDV, place, out.wait(slot), column)
                    head_rows.send(outputs, query_dots, key_dots, slot, seq, at, chunk, head, column, width)
                    store_wait()  # for the tile, whose fence would have waited for the sums
                    out.release(slot)
            elif decay.with_gates:
                for slot in range(n * chunks):
                    i, block = divmod(int32(slot), n)
                    head, column = divmod(int32(first + block), width)
                    chunk = seq_layout.chunk_index(seq.chunk_start(part + parts * i), sequence, length)
                    dot = head_rows.dot_states(s.wait(slot), ds.wait(slot), warp - 2)
                    s.release(slot)
                    ds.release(slot)
                    gStateDots[chunk, head, int32(STATE_WARPS * column + warp - 2)] = dot
        elif wg == DQ_CONSUMER:
            warpgroup.claim_registers(consumer_registers)
            for i in range(chunks):
                number = int32(part + parts * i)
                token = seq.chunk_start(number)
                chunk = seq_layout.chunk_index(token, sequence, length)
                q_tile, k_tile = q.wait(i), k.wait(i)
                p = INPUT(warpgroup.causal(warpgroup.wait(warpgroup.mm_ABt(q_tile, k_tile)) * score_scale, 0, 0.0))
                dq, dp_sum = zeros(SUMS), zeros(TILE)
                for block in range(n):
                    slot = int32(n * i + block)
                    head, column = divmod(int32(first + block), width)
                    v_tile, do_tile = v.wait(slot), do.wait(slot)
                    b, a, b_last = decay.load(sums, slot)
                    d = output_gate.load_d(gD, head, column)
                    dout, turn = output_gate.load_dout(do_tile, z, slot), decay.dout_turn(i, block, n)
                    decayed_do = INPUT(decay.decay(dout, b))
                    values = head_rows.load_values(v_tile)
                    decay.put_dout(decayed_dos, turn, output_gate.choose(decayed_do, dout, b_last))
                    skip_dots = head_rows.dot_values(dout, values, gColumnSums, head, chunk, column)
                    rows = head_rows.put_skip_dots(query_dots, slot, skip_dots)
                    decay.put_values(weighted_vs, slot, values, a, b_last)
                    decay.hand_over(decayed_dos, turn, weighted_vs, slot)
                    s_tile = s.wait(slot)
                    dq = warpgroup.mma_AB(dq, decayed_do, s_tile)
                    tiles = q_tile, v_tile, output_gate.dout_tile(do_tile, decayed_dos, turn), s_tile
                    scales, gate_args = (scale, product_scale), (v_tile, z, dzs, slot, gD, d)
                    if decay.is_strong(b_last) > 0.0:
                        dp_sum, dots = decay.add_strong_scores(
                            dp_sum, p, decayed_do, tiles, b, sums, slot, scales, output_gate, gate_args
                        )
                        decay.wait(weighted_vs, slot, v_tile)
                        decay.release_sums(sums, slot, True)
                    else:
                        dp_sum, dots = decay.add_scores(
                            dp_sum, p, decayed_do, tiles, b, weighted_vs, slot, scale, output_gate, gate_args
                        )
                        decay.release_sums(sums, slot, False)  # decayed_do's fence is that of loads, too
                    dq = warpgroup.wait(dq)
                    decay.give_back(weighted_vs, slot)
                    output_gate.give_back_own(decayed_dos, turn)
                    v.release(slot)
                    do.release(slot)
                    s.release(slot)
                    head_rows.put_query_dots(query_dots, slot, rows, dots)
                dp = INPUT(warpgroup.causal(dp_sum, 0, 0.0) * scale)
                turn = decay.dout_turn(i, n, n)
                warpgroup.store(decayed_dos.claim(turn), dp)
                decayed_dos.publish(turn)
                output_gate.give_back_own(decayed_dos, turn)
                dq = warpgroup.wait(warpgroup.mma_AB(dq * scale, dp, k_tile))
                k.release(i)
                q.release(i)
                warpgroup.store(truncate(gDQ, 1, seq.end), dq, (seq.batch, token, out_head, 0), 1, 3, aligned=True)
            if seq_layout.varlen and part == 0:
                padding = seq_layout.padding_tokens(gCuSeqlens, sequence, length)
                for j in range(padding.num_chunks()):
                    token = padding.chunk_start(j)
                    warpgroup.store(gDQ, zeros(SUMS), (padding.batch, token, out_head, 0), 1, 3, aligned=True)
                    warpgroup.store(gDK, zeros(SUMS), (padding.batch, token, out_head, 0), 1, 3, aligned=True)
        else:
            warpgroup.claim_registers(consumer_registers)
            for i in range(chunks):
                number = int32(part + parts * i)
                token = seq.chunk_start(number)
                q_tile, k_tile = q.wait(i), k.wait(i)
                p_t = INPUT(warpgroup.triu(warpgroup.wait(warpgroup.mm_ABt(k_tile, q_tile)) * score_scale, 0, 0.0))
                dk = zeros(SUMS)
                for block in range(n):
                    slot = int32(n * i + block)
                    head, column = divmod(int32(first + block), width)
                    d = head_rows.load_d(gD, head, column)
                    v_tile, do_tile = v.wait(slot), do.wait(slot)
                    ds_tile, (b, a, b_last) = ds.wait(slot), decay.load(sums, slot)
                    values, strong = decay.load_rows(v_tile), decay.is_strong(b_last)
                    weighted_v = INPUT(decay.decay(values, a * (strong - 1.0)))
                    carried_dv = warpgroup.mm_ABt(k_tile, ds_tile)
                    dk = warpgroup.mma_AB(dk, INPUT(decay.decay(values, b_last - a)), ds_tile)
                    turn = decay.dout_turn(i, block, n)
                    dout_tile = output_gate.dout_tile(do_tile, decayed_dos, turn)
                    if strong > 0.0:
                        dv = decay.multiply_strong_scores(p_t, dout_tile, b, sums, slot)
                        decay.wait(decayed_dos, turn, do_tile)
                    else:
                        dv = warpgroup.wait(warpgroup.mm_AB(p_t, decay.wait(decayed_dos, turn, do_tile)))
                    dk, carried_dv = warpgroup.wait(dk), warpgroup.wait(carried_dv)
                    output_gate.give_back(decayed_dos, turn, late=False)
                    values, to_end = fp32(weighted_v), b_last - b * strong
                    dv = dv * product_scale + decay.decay(carried_dv, to_end)
                    dots, carried = row_sum(dv * values), decay.decay(row_sum(carried_dv * values), to_end)
                    dv = decay.decay(dv, b * strong - a)
                    head_rows.put_key_dots(key_dots, slot, dots, carried, b, a, strong)
                    dv = head_rows.add_skip(dv, dout_tile, d, b * (1.0 - strong))
                    warpgroup.store(out.claim(slot), dv)
                    out.publish(slot)  # its fence is that of loads, too
                    output_gate.give_back(decayed_dos, turn, late=True)
                    decay.release_sums(sums, slot, False)
                    v.release(slot)
                    do.release(slot)
                    ds.release(slot)
                turn = decay.dout_turn(i, n, n)
                dk = warpgroup.wait(warpgroup.mma_AtB(dk, decayed_dos.wait(turn), q.wait(i)))
                decayed_dos.release(turn)
                k.release(i)
                q.release(i)
                warpgroup.store(truncate(gDK, 1, seq.end), dk, (seq.batch, token, out_head, 0), 1, 3, aligned=True)

    return differentiate_shared_heads, smem
