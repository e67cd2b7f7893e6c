"""Linear attention for Hopper, chunk by chunk, where a decay is one number for a token and head.

    S_t = exp(g_t) S_(t-1) + w_t k_t^T v_t        o_t = scale q_t S_t

A block walks a sequence (or a segment of one) for some columns of the values, 64 a consumer, and keeps their part of the state
in registers, transposed: S^T is 64 x Dk. Keys of more than 128 channels are shared out to two warpgroups: each does all of
this with its half of them, and their outputs are added up. Of a chunk of 64 tokens, b being the running sum of its gates g,

    O   = exp(b) Q S + tril(exp(b - b^T) w^T * Q K^T) V          two products from shared memory, one from registers
    S^T = exp(b_last) S^T + (exp(b_last - b) w V)^T K            V^T comes from shared memory transposed by ldmatrix

Every exponent that counts is a sum of gates and so never positive: nothing overflows, however strong the decay. Gates of single
tokens are loaded and summed up by warps of the producer, chunks ahead of their use.

Few long sequences are cut into segments, in two passes: one finds the state that each segment by itself ends with, the other
starts each segment from what those before it add up to. If they are few, it adds them up itself; else starts.py does.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from numba import cuda
from numpy import float32, int32

from ops import divmod, load, log2, store, subtile, tile_min, warpgroup, zeros
from tiles import bf16, dtype, fp16, fp32, inlined, ring, rt, shared, st, sv
from tiles.arguments import ENDS, FLOAT, INT, array, tiled
from tiles.targets import LARGE

from .block_exponent import BlockExponent
from .gates import ALONG, ROWS, TILE, ByHead, BySteps, ByToken, Gate
from .results import Outputs, Result, forms
from .tokens import CHUNK, COLUMNS, Sequences, assigned

WIDE = 128  # key dim, beyond which a state would take half of a consumer's registers: two have half of the keys each
REGISTERS = {(1, 2): (48, 208), (2, 1): (72, 216), (1, 1): (88, 256)}  # (warpgroups, resident) -> those of producer, consumer
SUMMING = warpgroup.WARPGROUP - 1  # warps of the producer that sum up gates, a chunk each in turn
SMALL = 4 * 1024  # bytes of what else is in shared memory: gates and barriers
STAGES = 3  # chunks in flight, if shared memory has room for so many


@dataclass(frozen=True)
class Config:
    """A kernel's configuration. key_dim: the channels of keys, rounded up to one of KEY_DIMS. consumers: each has 64 value
    columns, and is one warpgroup, or two if keys are wide (`parts`). gate: the kind of gates. result: what a pass computes.
    varlen: do the sequences follow one another in a single batch?"""

    key_dim: int
    consumers: int
    dtype: dtype
    gate: Gate
    result: Result
    varlen: bool = False

    @property
    def parts(self):
        """The warpgroups of a consumer, which share out the channels of the keys."""
        return 2 if self.key_dim > WIDE else 1

    @property
    def segmented(self):
        """May sequences be cut into segments?"""
        return True

    @property
    def resident(self):
        """Blocks that share a multiprocessor's registers."""
        return 2 if self.consumers == 1 and self.key_dim < WIDE and not self.gate.weighted else 1

    @property
    def threads(self):
        """Threads of a block: the consumers and one producer warpgroup."""
        return warpgroup.THREADS * (self.consumers * self.parts + 1)

    @property
    def key(self):
        """The tile of Q or K for a chunk, as wide as a part of the channels."""
        return st(CHUNK, self.key_dim // self.parts, self.dtype)

    @property
    def value(self):
        """A consumer's tile of V, Z or the output for a chunk."""
        return st(CHUNK, COLUMNS, self.dtype)

    @property
    def handed(self):
        """The tile by which the second warpgroup of a consumer hands its output to the first."""
        return st(CHUNK, COLUMNS, fp32) if self.parts > 1 else st(16, 16, fp32)

    @property
    def stages(self):
        """Chunks in flight."""
        keys, values = self.parts * self.key.nbytes, self.consumers * self.value.nbytes
        chunk = (1 + self.result.outputs) * keys + (1 + self.result.silu) * values
        kept = self.consumers * keys + values + self.handed.nbytes + SMALL
        return min(STAGES, (LARGE - kept) // chunk)

    def __str__(self):
        size = f"Dk {self.key_dim} {self.dtype}", f"{COLUMNS * self.consumers} columns"
        return ", ".join(filter(None, (*size, str(self.gate), str(self.result), "varlen" * self.varlen)))


KEY_DIMS = 64, 128, 256  # as padded
SIZES = (64, 1), (64, 2), (128, 1), (128, 2), (256, 1)  # padded key dim, consumers
KINDS: tuple[type[Gate], ...] = Gate, ByHead, ByToken, BySteps


def space(arch: str, everything: bool) -> Iterator[Config]:
    """The configurations: all gates at all sizes, the other forms at one size. everything: all forms at all sizes, and fp16,
    whose code takes as many registers as bf16's."""
    if arch == "sm_90a":
        for of, size, kind in itertools.product((bf16, fp16) if everything else (bf16,), SIZES, KINDS):
            all_forms = (everything and of is bf16) or (size[0] == WIDE and kind in (ByToken, BySteps))
            for gate, result, varlen in forms(kind, all_forms):
                yield Config(*size, of, gate, result, varlen)
            if all_forms and kind in (ByHead, ByToken):  # Mamba-2's scale is 1
                yield Config(*size, of, kind(apart=True), Outputs())


@functools.cache
def make(config: Config):
    """(kernel, shared memory) of a configuration."""
    CONSUMERS, PARTS, INPUT, gate, result = config.consumers, config.parts, config.dtype, config.gate, config.result
    PRODUCER, KEYS = CONSUMERS * PARTS, config.key.cols  # the warpgroup after those that consume
    (keep, claim), STATE = REGISTERS[CONSUMERS * PARTS, config.resident], rt(16, KEYS, fp32)
    TRANSPOSED, sequences = rt(16, CHUNK, INPUT), Sequences(config.varlen)
    common = BlockExponent(gate.weighted and INPUT is fp16)
    KEYS_OF_TMA, VALUES_OF_TMA = tiled(config.key, unit=1), tiled(config.value, unit=1)
    OUTPUT = sequences.output(config.value) if result.values and result.outputs else array(3 if result.outputs else 4)

    def of_keys(used=True):
        """A ring of tiles each of which belongs to one part of the keys and is read by all consumers."""
        return ring(config.key, config.stages * PARTS if used else 1, CONSUMERS * warpgroup.WARPGROUP)

    def of_values(used=True, parts=PARTS):
        """A ring of tiles each of which belongs to one consumer. used: are there such tiles? parts: how many of its warpgroups
        read them."""
        return ring(config.value, config.stages * CONSUMERS if used else 1, parts * warpgroup.WARPGROUP)

    vectors = ring(sv(CHUNK, fp32), CONSUMERS * SUMMING if gate.loaded else 1, PARTS * warpgroup.WARPGROUP, writers=1)
    smem = shared(
        q=of_keys(result.outputs),
        k=of_keys(),
        v=of_values(result.values),
        z=of_values(result.silu, 1),
        b=vectors,
        a=vectors,
        state=st(COLUMNS * CONSUMERS * PARTS, KEYS, INPUT),
        out=st(COLUMNS * CONSUMERS, COLUMNS, INPUT),
        handed=ring(config.handed, 1, warpgroup.WARPGROUP, writers=warpgroup.WARPGROUP),
    )

    @inlined
    def sum_of_parts(o, handed, j, part):
        """The sum of what the warpgroups of a consumer have computed. It is complete in the first of them."""
        if PARTS > 1:
            if part > 0:
                warpgroup.store(handed.claim(j), o)
                handed.publish(j)
                warpgroup.sync()  # who stores no output meets here: all have read the state that the next one replaces
            else:
                o = o + warpgroup.load(handed.wait(j), TILE)
                handed.release(j)
        return o

    @cuda.jit(launch_bounds=(config.threads, config.resident), fastmath=True)
    def scan(
        gQ: KEYS_OF_TMA, gK: KEYS_OF_TMA, gV: VALUES_OF_TMA, gZ: VALUES_OF_TMA, gGates: array(gate.rank), gRate: array(2),
        gBias: array(2), gSkip: array(2), gDivisor: array(3), gO: OUTPUT, gStart: array(4), gLocal: array(5), gState: array(4),
        gTotal: array(4), gEnds: ENDS, length: INT, blocks: INT, segments: INT, walked: INT, begun: INT, heads: INT, group: INT,
        width: INT, scale: FLOAT,
    ):  # fmt: skip
        """The outputs of a segment, or its last state and the sum of its gates. `group` value heads share a key head, and each
        is `width` blocks of 64 columns wide. There are thread blocks for `walked` of the `segments`. gStart: the state before
        each of `begun` segments; if begun is 1, the state before the sequence, to which what earlier segments leave is added
        here."""
        q, k, v, z, b, a, state, staged, handed = smem.open()
        me = warpgroup.id()
        block, segment, key_head, sequence = assigned(cuda.blockIdx.x, blocks, walked, heads)
        span = sequences.segment(gEnds, sequence, length, segment, segments)
        n = span.chunks()
        if me == PRODUCER:
            warpgroup.release_registers(keep)
            warp = cuda.threadIdx.x // 32 - 4 * PRODUCER
            if warp == 0:
                for j in range(n):
                    token = span.token(j)
                    for part in range(PARTS):
                        k.fill(PARTS * j + part, gK, (span.batch, token, key_head, part))
                        if result.outputs:
                            q.fill(PARTS * j + part, gQ, (span.batch, token, key_head, part))
                    for c in range(CONSUMERS):
                        shared_by, column = divmod(CONSUMERS * block + c, width)
                        at = span.batch, token, key_head * group + shared_by, column
                        result.fill(v, z, CONSUMERS * j + c, gV, gZ, at)
            elif gate.loaded:
                for mine in range(warp - 1, CONSUMERS * n, SUMMING):
                    j, c = divmod(mine, CONSUMERS)
                    shared_by, _ = divmod(CONSUMERS * block + c, width)
                    head = key_head * group + shared_by
                    gate.sum_up(b, a, mine, gGates, gRate, gBias, span.batch, span.token(j), span.end, head)
            if result.outputs and result.values and segment == segments - 1:
                for c in range(CONSUMERS):
                    shared_by, column = divmod(CONSUMERS * block + c, width)
                    sequences.store_nobodys(gO, gEnds, sequence, length, int32(key_head * group + shared_by), column)
        else:
            warpgroup.claim_registers(claim)
            c, part = (me, int32(0)) if PARTS == 1 else (int32(0), me)
            shared_by, column = divmod(CONSUMERS * block + c, width)
            head, row, col = int32(key_head * group + shared_by), int32(COLUMNS * column), int32(KEYS * part)  # of S^T
            rounded, out = subtile(state, COLUMNS, me), subtile(staged, COLUMNS, c)
            number = int32(sequence * begun + min(segment, begun - 1))
            s_t = warpgroup.load(gStart, STATE, (number, head, row, col), aligned=False)
            for i in range(segment if result.outputs and begun == 1 else 0):
                total = tile_min(load(gTotal, ROWS, (sequence, head, i, 0)))
                s_t = gate.decayed(s_t, total) + warpgroup.load(gLocal, STATE, (sequence, head, i, row, col), aligned=False)
            exponent = common.begin(s_t)
            s_t = common.scaled(s_t, -exponent)
            g, so_far, growth = gate.of_head(gGates, head), float32(0), log2(zeros(ROWS) + scale)
            d = load(gSkip, ALONG, (head, row))
            if not result.values:
                if part == 0:
                    warpgroup.store(out, zeros(TILE) + 1.0)
                warpgroup.sync_several(PARTS)
            for j in range(n):
                mine, ours, left = int32(CONSUMERS * j + c), int32(PARTS * j + part), span.left(j)
                keys, values = k.wait(ours), result.wait(v, out, mine)
                sequences.clear(keys, left, CONSUMERS)
                if result.values:
                    sequences.clear(values, left, PARTS)
                if result.outputs:
                    queries = q.wait(ours)
                    warpgroup.store(rounded, s_t)
                    warpgroup.store_wait()
                    s = warpgroup.mm_ABt(queries, keys)
                    warpgroup.sync()
                    o = warpgroup.mm_ABt(queries, rounded)
                before, exponent = exponent, common.after(exponent, common.wait(b, mine), common.wait(a, mine))
                rows, along, total = gate.sums(b, a, mine, g, left)
                if gate.scales:
                    rows = rows + growth
                if result.outputs:
                    p = INPUT(gate.scores(warpgroup.wait(s, newer=1), common.of_keys(rows, exponent), along))
                    o = gate.decayed(warpgroup.wait(o), common.of_state(rows, before, exponent))
                    o = warpgroup.mma_AB(o, p, values)
                    q.release(ours)
                v_t = fp32(warpgroup.load_transposed(values, TRANSPOSED))
                v_t = INPUT(gate.remaining(v_t, along, common.of_keys(total, exponent)))
                s_t = gate.decayed(s_t, common.of_state(total, before, exponent))
                s_t, so_far = warpgroup.mma_AB(s_t, v_t, keys), so_far + total
                token = span.token(j)
                if result.outputs:
                    o = common.scaled(warpgroup.wait(o, newer=1), exponent) * (1.0 if gate.scales else scale)
                    if PARTS == 1 or part > 0:
                        o = result.skipped(o, values, d, TRANSPOSED)
                    o = sum_of_parts(o, handed, j, part)
                    if PARTS == 1 or part == 0:
                        o = result.finish(o, z, mine, gDivisor, (span.batch, token, head), TRANSPOSED)
                        result.store(sequences, gO, out, o, span, token, head, column)
                s_t = warpgroup.wait(s_t)
                k.release(ours)
                result.release(v, mine)
            s_t = common.scaled(s_t, exponent)
            if result.outputs:
                warpgroup.store_wait()
                if segment == segments - 1:
                    warpgroup.store(gState, s_t, (sequence, head, row, col), aligned=False)
            else:
                warpgroup.store(gLocal, s_t, (sequence, head, segment, row, col))
                store(gTotal, zeros(ROWS) + so_far, (sequence, head, segment, 0))

    return scan, smem
