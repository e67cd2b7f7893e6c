"""What becomes of the sums that the gradients of gates are made of in the walks of the delta rule's gradients on Hopper
(delta_gradient_sums.py), as objects with the same methods: nothing; they are stored, for gate_gradient.py; or a warp of the
producer computes the gradients, as it has all sums of a chunk, and no launch follows."""

from numpy import int32

from ops import cumsum, last_element, less, load, store, subtile, tile_sum, truncate, warpgroup, where, zeros
from tiles import inlined, static
from tiles.launching.arguments import array, record

from ..recurrent.gates import CHUNK_LINE, COL_VEC, FLOOR, load_line
from ..recurrent.tokens import CHUNK
from .delta_chunks import DECAY

WARPS = warpgroup.WARPGROUP  # that share the rows of a chunk
STATE_WARPS = 2 * WARPS  # that multiply S by dS: those of both consumers
QUERY_DOTS, KEY_DOTS, CARRIED_DOTS = range(3)  # key sums: q . dq, k . (dk_write - dk_read), what of k . dk comes from dS
FIRST_STATE_DOTS = 1  # of the two parts of value sums, 64 numbers each, that add up to <S, dS>


@static
class NoGateSums:
    """Gradients of gates are not wanted. wanted: are there sums for them? readers: how many warps read a chunk's vectors and
    value sums for them, besides the one that stores dbeta."""

    wanted, readers = False, 0

    def __str__(self):
        return ""

    def params(self):
        """The further parameters of a kernel, as a record."""
        return record()

    @inlined
    def store_state_dots(self, params, chunk, head, parts):
        """The warp that stores dbeta has a chunk's value sums, `parts`."""

    @inlined
    def send_key_sums(self, params, vectors, value_sums, key_sums, walk):
        """One warp goes along the chunks of a HeadWalk with what is left to be done. vectors, value_sums, key_sums: rings."""

    @inlined
    def clear_padding(self, params, head, padding):
        """That warp stores gradients of 0 of a head's gates in the TokenRange `padding`."""


class GateDots(NoGateSums):
    """The sums are stored: where gates are those of heads."""

    wanted = True

    def __str__(self):
        return "gates' sums"

    def params(self):
        """gDots: q . dq + k . dk_read - k . dk_write of each token. The others: see gate_gradient.py."""
        return record(gDots=array(3), gCarriedDots=array(3), gStateDots=array(3))

    @inlined
    def store_state_dots(self, params, chunk, head, parts):
        params.gStateDots[chunk, head, 0] = tile_sum(_add_up(parts, WARPS, STATE_WARPS))

    @inlined
    def send_key_sums(self, params, vectors, value_sums, key_sums, walk):
        for j in range(walk.n):
            (chunk, head, _, token, seq), parts = walk.place(j), key_sums.wait(j)
            for i in range(WARPS):
                at = seq.batch, int32(token + 16 * i), head
                dots = load(subtile(parts, 16, i), COL_VEC) - load(subtile(parts, 16, int32(WARPS + i)), COL_VEC)
                store(truncate(params.gDots, 1, seq.end), dots, at, cols=1)
            params.gCarriedDots[chunk, head, 0] = tile_sum(_add_up(parts, CARRIED_DOTS * WARPS, WARPS))
            key_sums.release(j)


class GateGradients(NoGateSums):
    """The gradients of gates are computed, one for each token, by the equation of delta_chunks.py: 0 of a gate that forward
    takes for FLOOR, as -inf."""

    wanted, readers = True, 1

    def __str__(self):
        return "gates' gradients"

    def params(self):
        """gGates, gDGates: gates and their gradients, (batch, token, head)."""
        return record(gGates=array(3), gDGates=array(3))

    @inlined
    def send_key_sums(self, params, vectors, value_sums, key_sums, walk):
        for j in range(walk.n):
            _, head, _, token, seq = walk.place(j)
            at = seq.batch, token, head
            gates = load_line(params.gGates, seq.end, at)
            states = value_sums.wait(j)
            later = _line(states, FIRST_STATE_DOTS) + _line(states, int32(FIRST_STATE_DOTS + 1))
            later = later * last_element(subtile(vectors.wait(j), CHUNK, DECAY))
            vectors.release(j)
            value_sums.release(j)  # key sums may come late: nobody is to wait for this warp
            dots = key_sums.wait(j)
            r = _line(dots, QUERY_DOTS) - _line(dots, KEY_DOTS)
            later = tile_sum(later + _line(dots, CARRIED_DOTS) + r)
            key_sums.release(j)
            gradient = where(less(gates, FLOOR), 0.0, r - cumsum(r) + later)
            store(truncate(params.gDGates, 1, seq.end), gradient, at, rows=0, cols=1)

    @inlined
    def clear_padding(self, params, head, padding):
        for j in range(padding.num_chunks()):
            store(params.gDGates, zeros(CHUNK_LINE), (padding.batch, padding.chunk_start(j), head), rows=0, cols=1)


@inlined
def _line(numbers, part):
    """The part-th 64 numbers of a shared vector."""
    return load(subtile(numbers, CHUNK, part), CHUNK_LINE)


@inlined
def _add_up(parts, first, count):
    """The sum of `count` parts of 16 numbers of a shared vector, from the part `first` on."""
    total = zeros(COL_VEC)
    for part in range(count):
        total = total + load(subtile(parts, 16, int32(first + part)), COL_VEC)
    return total


NO_GATE_SUMS, GATE_DOTS, GATE_GRADIENTS = NoGateSums(), GateDots(), GateGradients()
# (are there decays, what becomes of the sums) of the walks' configurations
GATE_FIELDS = (False, NO_GATE_SUMS), (True, NO_GATE_SUMS), (True, GATE_GRADIENTS)
DOT_FIELDS = True, GATE_DOTS
