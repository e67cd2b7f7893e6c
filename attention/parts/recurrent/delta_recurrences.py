"""Which of the delta rule's recurrences delta_chains_hopper.py runs, as objects with the same methods: that of the states and
that of their gradients side by side, for gradients of a call that stored nothing; in training's forward pass that of the
states, with the outputs O = scale exp(b) Q S + P (beta E); in its backward pass that of the gradients."""

from numba import cuda
from numpy import int32

from ops import divmod, warpgroup
from tiles import dtype, fp32, inlined, ring, rt, static
from tiles.launching.arguments import SEMAPHORES, array, record, tiled

from .chunk_order import HeadMajor
from .delta_chunks import BETA, DECAY, ChunkVectors
from .grid_overlap import GRIDS_FROM_MIDDLE, OVERLAPPING_GRIDS, SEPARATE_GRIDS, SeparateGrids
from .tokens import CHUNK, send_tile

# The recurrences; the reverse one, whose blocks come first because it takes longer, is of gradients
REVERSE, FORWARD = range(2)
CONSUMER, PRODUCER, OUTPUTS = range(3)  # warpgroups; the third one only where outputs are computed


@static
class BothRecurrences:
    """The recurrences of S and dS side by side. count: how many recurrences a head has. query_stages: chunks in flight of Q and
    P. output_warps: how many warps compute outputs."""

    count, query_stages, output_warps = 2, 3, 0

    @property
    def overlaps(self) -> bool:
        """Does the kernel run beside the end of the grid before it?"""
        return False

    def __str__(self):
        return ""

    def params(self, values):
        """The further parameters of a kernel, as a record. values: the tile of a block's columns of values."""
        return record()

    def rings(self, values):
        """The further members of shared memory."""
        return {}

    @inlined
    def locate(self, index, sequences):
        """(the recurrence of a thread block, its sequence). index: of both."""
        return divmod(index, sequences)

    @inlined
    def wait_for_chunk(self, params, j, head_sequence):
        """The loader waits until the j-th chunk's inverse and P are there. head_sequence: sequence * heads + head."""

    @inlined
    def wait_for_grid(self):
        """The loader has no more to load, and waits for the end of the grid before, if that may still run."""

    @inlined
    def load_queries(self, memory, j, gQ, gScores, at, chunk, head):
        """The loader fills the queries and P of the j-th chunk for outputs. at: (batch, token, head of keys)."""

    @inlined
    def compute_outputs(self, memory, n, scale):
        """The warpgroup for outputs computes those of n chunks."""

    @inlined
    def send_outputs(self, memory, j, params, at):
        """A warp stores O of the j-th chunk. at: (batch, token, head, block of columns)."""

    @inlined
    def store_last_state(self, params, s_t, at):
        """The consumer stores the state after the last token."""

    @inlined
    def begin(self, params):
        """The warp that stores E or dV, before the first chunk."""

    @inlined
    def finish_chunk(self, params, direction, chunk, number, n, segments, key_head, member, block):
        """That warp has stored a chunk in one of the directions. chunk: its index. number, n: its place in its sequence, which
        has n chunks in so many `segments`."""


@static
class CountedRecurrences(BothRecurrences):
    """Both, whose segments are counted. grids: how the walk follows."""

    grids: SeparateGrids

    def __str__(self):
        return str(self.grids)

    def params(self, values):
        return self.grids.recurrence_params()

    @inlined
    def begin(self, params):
        self.grids.begin(params, cuda.blockIdx.x)

    @inlined
    def finish_chunk(self, params, direction, chunk, number, n, segments, key_head, member, block):
        boundary = number if direction == REVERSE else int32(number + 1)
        self.grids.count_chunk(params, cuda.blockIdx.x, boundary, n, segments)


@static
class StatesWithOutputs(BothRecurrences):
    """The recurrence of S alone, and O. A warpgroup of its own computes O from S and E in shared memory, where they lie for the
    warps that store them, as the chain of a step must not be longer. key_dim: the channels of keys, padded. dtype: of inputs.
    chunk_vectors: of a chunk's tokens. order: of the chunks in the grid before."""

    key_dim: int
    dtype: dtype
    chunk_vectors: ChunkVectors
    order: HeadMajor
    count, query_stages, output_warps = 1, 2, warpgroup.WARPGROUP

    @property
    def overlaps(self) -> bool:
        return self.order.overlaps

    def __str__(self):
        return ", ".join(filter(None, ("states, with outputs", str(self.order))))

    def params(self, values):
        """gO: outputs, of tokens. gFinalState: transposed, if it is wanted."""
        return record(gO=tiled(values, unit=1), gFinalState=array(4), **self.order.walk_params().fields)

    def rings(self, values):
        return {"outputs": ring(values, 1, 1, writers=warpgroup.WARPGROUP)}

    @inlined
    def locate(self, index, sequences):
        return FORWARD, index

    @inlined
    def wait_for_chunk(self, params, j, head_sequence):
        self.order.wait_for_chunk(params, head_sequence, j)

    @inlined
    def wait_for_grid(self):
        self.order.wait_for_grid()

    @inlined
    def load_queries(self, memory, j, gQ, gScores, at, chunk, head):
        memory.q.fill(j, gQ, at)
        memory.p.fill(j, gScores, (chunk, head))

    @inlined
    def compute_outputs(self, memory, n, scale):
        for j in range(n):
            # to registers, as nobody fences what the chain stores for wgmma
            states = warpgroup.load(memory.states.wait(j), rt(16, self.key_dim, self.dtype), fenced=False)
            o = warpgroup.mm_ABt(states, memory.q.wait(j))
            cuda.syncwarp()  # all lanes have read the state
            memory.states.release(j)
            vector_tile = memory.vectors.wait(j)
            o = warpgroup.wait(o)
            memory.q.release(j)
            o = self.chunk_vectors.decay_cols(o * scale, vector_tile, DECAY)
            errors = fp32(warpgroup.load_transposed(memory.out.wait(j), rt(16, CHUNK, self.dtype), fenced=False))
            weighted = self.dtype(errors * self.chunk_vectors.cols(vector_tile, BETA))
            memory.vectors.release(j)  # its fence is that of all loads of this chunk
            memory.out.release(j)
            o = warpgroup.wait(warpgroup.mma_ABt(o, weighted, memory.p.wait(j)))
            memory.p.release(j)
            warpgroup.store_transposed(memory.outputs.claim(j), o)
            memory.outputs.publish(j)

    @inlined
    def send_outputs(self, memory, j, params, at):
        send_tile(memory.outputs, j, params.gO, at)

    @inlined
    def store_last_state(self, params, s_t, at):
        warpgroup.store(params.gFinalState, s_t, at, aligned=False)


@static
class GradientsAlone(BothRecurrences):
    """The recurrence of dS alone. There is no launch before it that sets the counts of delta_segment_gradients_hopper.py to 0:
    it does so, once for all value heads and columns. grids: how that kernel follows this one."""

    grids: SeparateGrids
    count = 1

    def __str__(self):
        return ", ".join(filter(None, ("gradients", str(self.grids))))

    def params(self, values):
        """gTurns: for each chunk two of each head of keys."""
        return record(gTurns=SEMAPHORES, **self.grids.recurrence_params().fields)

    @inlined
    def locate(self, index, sequences):
        return REVERSE, index

    @inlined
    def begin(self, params):
        self.grids.begin(params, cuda.blockIdx.x)

    @inlined
    def finish_chunk(self, params, direction, chunk, number, n, segments, key_head, member, block):
        if member == 0 and block == 0:
            params.gTurns[chunk, int32(2 * key_head)] = int32(0)
            params.gTurns[chunk, int32(2 * key_head + 1)] = int32(0)
        self.grids.count_chunk(params, cuda.blockIdx.x, number, n, segments)


BOTH, BOTH_BESIDE = BothRecurrences(), CountedRecurrences(GRIDS_FROM_MIDDLE)
GRADIENTS_ALONE, GRADIENTS_BESIDE = GradientsAlone(SEPARATE_GRIDS), GradientsAlone(OVERLAPPING_GRIDS)
