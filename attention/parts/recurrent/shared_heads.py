"""What varies in the gradients of linear attention where value heads share queries and keys: how the decays of a head enter its
products, D, and what is stored of a head's rows (shared_heads_gradients_hopper.py, whose symbols these are)."""

from numpy import float32, int32

from ops import (
    col_sum,
    exp2,
    last_element,
    load,
    mma_ABt,
    row_sum,
    sigmoid,
    store,
    subtile,
    tile_sum,
    truncate,
    warpgroup,
    zeros,
)
from tiles import dtype, fp16, fp32, inlined, rt, static

from .gates import COL_VEC, MIN_LOG2_DECAY, ROW_VEC, TILE, load_tokens
from .tokens import CHUNK, COLUMNS, send_tile

STATE_PART = rt(16, 16, fp32)  # of S^T dS, whose blocks on the diagonal a warp of the producer adds up
STATE_WARPS = warpgroup.WARPGROUP - 2  # of the producer, which compute <S, dS>
SKIPS = "", "head", "column"  # does each head, or each column, have a D? "": there is none
GATE_KINDS = "", "token", "step"  # are there gates, and weights of keys?


@static
class HeadDecay:
    """How the decays of a head enter its products. gates: one of GATE_KINDS. dtype: of q, k, v. with_gates: are sums for the
    gates' gradients wanted?"""

    gates: str
    dtype: dtype
    with_gates: bool

    @property
    def weighted(self):
        """Do keys have weights, as Mamba-2's dt are?"""
        return self.gates == "step"

    @property
    def factored(self):
        """Are decays factors, in dO' and V', unless a chunk is strong? Each consumer hands one of these to the other, and its
        fence is that of loads, too. The range of fp16 is too small for factors: all of its chunks are strong."""
        return bool(self.gates) and self.dtype is not fp16

    @inlined
    def split_scale(self, scale):
        """(the factor of scores before they are rounded, that of what is made from scores); Mamba-2's scale is 1."""
        score_scale = scale if self.dtype is fp16 else float32(1)
        product_scale = float32(1) if self.dtype is fp16 or self.weighted else scale
        return score_scale, product_scale

    @inlined
    def load(self, sums, slot):
        """(b and a of this warp's rows, b_last) of a chunk and head, from a ring."""
        if not self.gates:
            return 0.0, 0.0, float32(0)
        b = subtile(sums.wait(slot), CHUNK, 0)
        b_rows, b_last = warpgroup.load(b, COL_VEC), last_element(b)
        a_rows = warpgroup.load(subtile(sums.wait(slot), CHUNK, 1), COL_VEC) if self.weighted else b_rows
        return b_rows, a_rows, b_last

    @inlined
    def load_cols(self, sums, slot, part):
        """b or a, by `part`, of all columns."""
        return load_tokens(sums.wait(slot), part)

    @inlined
    def release_sums(self, sums, slot, fenced):
        """Release b and a of a chunk and head. fenced: as in ring.publish."""
        if self.gates:
            sums.release(slot, None, fenced)

    @inlined
    def load_rows(self, tile, fenced=False):
        """This warp's rows of a tile of values. fenced: as in ops.load."""
        return fp32(warpgroup.load(tile, rt(16, COLUMNS, self.dtype), fenced=fenced))

    @inlined
    def decay(self, x, b):
        """x times exp2(b), if there are gates."""
        return x * exp2(b) if self.gates else x

    @inlined
    def is_strong(self, b_last):
        """1.0 if a chunk is strong, 0.0 if not."""
        if self.factored:
            return float32(1) if b_last < MIN_LOG2_DECAY else float32(0)
        return float32(1) if self.gates else float32(0)

    @inlined
    def dout_turn(self, i, block, n):
        """Which tile of the first consumer is dO' of one of the n blocks of the i-th chunk; dP comes after those of all."""
        return int32((n + 1) * i + block) if self.factored else int32(i)

    @inlined
    def put_dout(self, decayed_dos, turn, decayed_do):
        """The first consumer: store dO', which both consumers read, if it is a factor of scores. decayed_do: see
        HeadOutputGate.choose."""
        if self.factored:
            warpgroup.store(decayed_dos.claim(turn), decayed_do)

    @inlined
    def put_values(self, weighted_vs, slot, values, a, b_last):
        """The first consumer: store V', which it reads alone, so that it waits for nothing that the second one does."""
        if self.factored:
            warpgroup.store(weighted_vs.claim(slot), self.dtype(self.decay(values, a * (self.is_strong(b_last) - 1.0))))

    @inlined
    def hand_over(self, decayed_dos, turn, weighted_vs, slot):
        """The first consumer: dO' and V' are there."""
        if self.factored:
            decayed_dos.publish(turn)
            weighted_vs.publish(slot, fenced=False)

    @inlined
    def wait(self, ring, turn, tile):
        """What the other consumer has handed over; if nothing, the tile itself."""
        return ring.wait(turn) if self.factored else tile

    @inlined
    def give_back(self, ring, turn):
        """Release what the other consumer has handed over."""
        if self.factored:
            ring.release(turn)

    @inlined
    def add_scores(self, dp_sum, p, decayed_do, tiles, b, weighted_vs, slot, scale, output_gate, gate_args):
        """(dp_sum + dO' V'^T of a head, the row sums of q * dq or None). tiles: its (Q, V, dO, S^T). output_gate, gate_args:
        see HeadOutputGate.put_gradient."""
        q_tile, v_tile, _, s_tile = tiles
        if self.with_gates:
            o = warpgroup.mm_ABt(q_tile, s_tile)
            weighted_v = self.wait(weighted_vs, slot, v_tile)
            dp_sum = warpgroup.mma_ABt(dp_sum, decayed_do, weighted_v)
            o = warpgroup.wait(warpgroup.mma_AB(o, p, weighted_v))
            dots = row_sum(o * fp32(decayed_do)) * scale
            output_gate.put_gradient(o, b, gate_args)
        else:
            dp_sum, dots = warpgroup.mma_ABt(dp_sum, decayed_do, self.wait(weighted_vs, slot, v_tile)), None
        return warpgroup.wait(dp_sum), dots

    @inlined
    def add_strong_scores(self, dp_sum, p, decayed_do, tiles, b, sums, slot, scales, output_gate, gate_args):
        """add_scores of a strong chunk. scales: that of q, and the one of what is made from scores."""
        (q_tile, v_tile, do_tile, s_tile), dots = tiles, None
        if self.with_gates:
            o = warpgroup.wait(warpgroup.mm_ABt(q_tile, s_tile))
            dots = row_sum(o * fp32(decayed_do)) * scales[0]
            weighted_p = output_gate.weigh_scores(p, b, sums, slot)
            output_gate.put_strong_gradient(o, b, weighted_p, gate_args)
        dp = warpgroup.wait(warpgroup.mm_ABt(do_tile, v_tile))
        if self.weighted:
            dp = dp * exp2(self.load_cols(sums, slot, 0) - self.load_cols(sums, slot, 1))
        decays = warpgroup.causal(exp2(zeros(TILE) + b - self.load_cols(sums, slot, 0)), 0, 0.0)
        if self.with_gates:
            dots = dots + row_sum(fp32(self.dtype(fp32(p) * decays)) * dp) * scales[1]
        return dp_sum + dp * decays, dots

    @inlined
    def multiply_strong_scores(self, p_t, do_tile, b, sums, slot):
        """(decays * P)^T dO"""
        decays = warpgroup.triu(exp2(zeros(TILE) - b + self.load_cols(sums, slot, 0)), 0, 0.0)
        return warpgroup.wait(warpgroup.mm_AB(self.dtype(fp32(p_t) * decays), do_tile))


@inlined
def silu_derivative(y, s):
    """silu'(z) = s + y (1 - s). y, s: silu(z), sigmoid(z)."""
    return y * (1.0 - s) + s


@static
class HeadOutputGate:
    """Mamba-2's gate silu(z) of outputs, where decays are factors: with y the outputs before it, dy = dO silu(z) stands for dO
    in all other equations, and dz = dO y silu'(z). gated: is there a z? skip: one of SKIPS."""

    decay: HeadDecay
    skip: str
    gated: bool

    @inlined
    def fill(self, z, slot, gZ, at):
        """Have TMA load the slot-th tile of z."""
        if self.gated:
            z.fill(slot, gZ, at)

    @inlined
    def load_dout(self, do_tile, z, slot):
        """The first consumer's rows of dy, or of dO. With z it leaves dO silu'(z) in place of z."""
        dout = self.decay.load_rows(do_tile, fenced=not self.decay.factored)
        if self.gated:
            rows = self.decay.load_rows(z.wait(slot))
            s = sigmoid(rows)
            y = rows * s
            warpgroup.store(z.wait(slot), dout * silu_derivative(y, s))
            dout = dout * y
        return dout

    @inlined
    def choose(self, decayed_do, dout, b_last):
        """What the first consumer hands over: dO'; with z dy of a strong chunk, of which there is no other tile."""
        if self.gated and self.decay.is_strong(b_last) > 0.0:
            decayed_do = self.decay.dtype(dout)
        return decayed_do

    @inlined
    def dout_tile(self, do_tile, decayed_dos, turn):
        """The tile of dO, or what the first consumer has handed over in its place."""
        return decayed_dos.wait(turn) if self.gated else do_tile

    @inlined
    def load_d(self, gD, head, column):
        """D of a head for each row of the first consumer; of columns their place, as `put_gradient` loads those when registers
        are free."""
        at = head, int32(COLUMNS * column)
        if self.gated and self.skip == "head":
            return load(gD, COL_VEC, at)
        else:
            return at

    @inlined
    def put_gradient(self, o, b, gate_args):
        """The first consumer: dz of a head's rows, if there is a z. o: exp(-b) times what the states and the chunk give y.
        gate_args: (V, the ring of z, that of dz, the head's slot in both, the array D, what `load_d` returned)."""
        if self.gated:
            v_tile, z, dzs, slot, gD, d = gate_args
            y = self.decay.decay(o, b)
            if self.skip == "head":
                y = y + self.decay.load_rows(v_tile) * d
            elif self.skip:
                y = y + self.decay.load_rows(v_tile) * load(gD, ROW_VEC, d)
            warpgroup.store(dzs.claim(slot), y * self.decay.load_rows(z.wait(slot)))
            dzs.publish(slot)  # its fence is that of loads, too
            z.release(slot)

    @inlined
    def weigh_scores(self, p, b, sums, slot):
        """tril(exp(b - a^T)) * P of a strong chunk, rounded, if there is a z."""
        if self.gated:
            weights = warpgroup.causal(exp2(zeros(TILE) + b - self.decay.load_cols(sums, slot, 1)), 0, 0.0)
            return self.decay.dtype(fp32(p) * weights)

    @inlined
    def put_strong_gradient(self, o, b, weighted_p, gate_args):
        """put_gradient of a strong chunk. o: Q S; weighted_p: see weigh_scores."""
        if self.gated:
            o = warpgroup.wait(warpgroup.mma_AB(self.decay.decay(o, b), weighted_p, gate_args[0]))
            self.put_gradient(o, 0.0, gate_args)

    @inlined
    def give_back(self, ring, turn, late):
        """Release what the first consumer has handed over: after the last product, or `late`, after dO's last load."""
        if self.gated == late:
            self.decay.give_back(ring, turn)

    @inlined
    def give_back_own(self, ring, turn):
        """The first consumer: release what it has handed over itself."""
        if self.gated:
            ring.wait(turn)
            ring.release(turn)

    @inlined
    def send(self, dzs, slot, gDZ, at):
        """Store dz of a head by one warp."""
        if self.gated:
            send_tile(dzs, slot, gDZ, at)


@static
class HeadRows:
    """D, and the sums of rows for the gradients of D and of gates. skip: one of SKIPS. gated: see HeadOutputGate."""

    decay: HeadDecay
    skip: str
    gated: bool = False

    @property
    def has_query_dots(self):
        """Does the first consumer put sums of rows?"""
        return self.decay.with_gates or bool(self.skip)

    @inlined
    def load_d(self, gD, head, column):
        """D of a block of columns, or that of a head for each row."""
        if self.skip:
            return load(gD, ROW_VEC if self.skip == "column" else COL_VEC, (head, int32(COLUMNS * column)))

    @inlined
    def add_skip(self, dv, do_tile, d, b):
        """dv + D dO. b: with z the tile is exp(b) dO."""
        if self.skip:
            dout = fp32(warpgroup.load(do_tile, rt(16, COLUMNS, self.decay.dtype), fenced=False))
            if self.gated and self.skip == "column":
                dout = self.decay.decay(dout, 0.0 - b)
            elif self.gated:
                d = self.decay.decay(d, 0.0 - b)
            dv = dv + dout * d
        return dv

    @inlined
    def load_values(self, v_tile):
        """The first consumer's rows of V, if it computes V' or rowsum(dO * V)."""
        if self.decay.factored or self.skip:
            return self.decay.load_rows(v_tile, fenced=not self.decay.factored)

    @inlined
    def dot_values(self, dout, values, gColumnSums, head, chunk, column):
        """rowsum(dO * V), or None. With a D of columns the sums of columns are stored, too."""
        if self.skip:
            products = dout * values
            dots = row_sum(products)
            if self.skip == "column":
                row = int32(warpgroup.WARPGROUP * chunk + warpgroup.rank())
                store(gColumnSums, col_sum(products), (head, row, int32(COLUMNS * column)))
            return dots

    @inlined
    def put_skip_dots(self, ring, slot, skip_dots):
        """The first consumer: dO . V of each row, if it is wanted. The rest of the slot-th tile of the ring, which is returned,
        is for `put_query_dots`."""
        if self.has_query_dots:
            rows = ring.claim(slot)
            if self.skip:
                warpgroup.store(subtile(rows, CHUNK, 1), skip_dots)
            return rows

    @inlined
    def put_query_dots(self, ring, slot, rows, dots):
        """The first consumer: q . dq of each row, if it is wanted."""
        if self.has_query_dots:
            if self.decay.with_gates:
                warpgroup.store(subtile(rows, CHUNK, 0), dots)
            ring.publish(slot)

    @inlined
    def put_key_dots(self, ring, slot, dots, carried, b, a, strong):
        """The second consumer: v . dv / w of each row and what comes from dS of v . dv, if they are wanted. dots, carried:
        those of w V, or of V if the chunk is strong."""
        if self.decay.with_gates:
            rows = ring.claim(slot)
            if self.decay.weighted:
                carried = self.decay.decay(carried, (b - a) * strong)
                dots = self.decay.decay(dots, (a - b) * (1.0 - strong))
            warpgroup.store(subtile(rows, CHUNK, 0), dots)
            warpgroup.store(subtile(rows, CHUNK, 1), carried)
            ring.publish(slot)

    @inlined
    def send(self, outputs, query_dots, key_dots, slot, seq, at, chunk, head, column, width):
        """Store by one warp what consumers put of a block of a head's columns. at: the coordinates of its rows."""
        gQueryDots, gKeyDots, gCarriedDots, gSkipSums = outputs
        if self.has_query_dots:
            rows = query_dots.wait(slot)
            if self.decay.with_gates:
                store(truncate(gQueryDots, 1, seq.end), load_tokens(rows, 0), at, cols=1)
            if self.skip == "head":
                gSkipSums[chunk * width + column, head] = tile_sum(load_tokens(rows, 1))
            query_dots.release(slot)
        if self.decay.with_gates:
            rows = key_dots.wait(slot)
            store(truncate(gKeyDots, 1, seq.end), load_tokens(rows, 0), at, cols=1)
            gCarriedDots[chunk, head, column] = tile_sum(load_tokens(rows, 1))
            key_dots.release(slot)

    @inlined
    def dot_states(self, s_tile, ds_tile, part):
        """<S, dS>, by one of STATE_WARPS warps, which has as many parts of the rows: the sum of the diagonal of S^T dS, whose
        16 x 16 blocks on the diagonal add up in the tensor cores."""
        total, parts, ROWS = zeros(STATE_PART), COLUMNS // STATE_PART.rows // STATE_WARPS, rt(16, COLUMNS, self.decay.dtype)
        for i in range(parts):
            for panel in range(s_tile.cols // COLUMNS):
                row = int32(parts * part + i)
                states = load(subtile(s_tile, STATE_PART.rows, row, COLUMNS, panel), ROWS, fenced=False)
                gradients = load(subtile(ds_tile, STATE_PART.rows, row, COLUMNS, panel), ROWS)
                total = mma_ABt(total, states, gradients)
        return tile_sum(warpgroup.diagonal(total))
