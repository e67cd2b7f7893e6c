"""The plan of Based: one launch of based_hopper.py. If few long sequences are cut into segments, others before it compute what
each segment adds to the state (based_states_hopper.py), and the states before segments."""

from typing import NamedTuple

from ops.for_attention.taylor_features import FEATURES
from tiles.calls.plan import Plan, Step
from tiles.calls.schema import Problem
from tiles.launching.arrays import Operand
from tiles.launching.devices import machine
from tiles.launching.launch import kernel_for

from ...kernels.recurrent import based_hopper, based_states_hopper
from ...parts.recurrent.based_walk import CTAS_PER_SM
from ...parts.recurrent.tokens import CHUNK, COLUMNS
from . import recurrent_chunks
from .recurrent_checks import DTYPES, is_varlen
from .recurrent_chunks import SWAP_STATE_AXES, Arrays, Costs, ScratchAllocator, compose_segments, intern_value

COSTS = Costs(two_consumers=1, first_pass=0.5, compose=0.35, extra_launches=4)


class BasedSegments(NamedTuple):
    """The segments into which each sequence is cut."""

    problem: Problem
    normalize: bool
    segments: int
    scratch: ScratchAllocator

    def find_states(
        self, state: Operand | None, z: Operand | None, reverse: bool, scale: float, **arrays: Operand | None
    ) -> tuple[list[Step], Operand | None, Operand | None]:
        """(the launches that compute the state and the sum of features before each segment, both of these). state, z: before
        each sequence. reverse: are they gradients, from the last token to the first? arrays: those of based_states_hopper.py's
        kernel."""
        if self.segments == 1:
            return [], state, z
        heads, key_heads, value_dim, sequences = self.problem("heads", "heads_k", "value_dim", "sequences")
        length, columns, scanned = self.problem.extents["seqlen"], -(-value_dim // COLUMNS), self.segments - 1
        config = intern_value(
            based_states_hopper.Config, DTYPES[self.problem.dtype], self.normalize, reverse, is_varlen(self.problem)
        )
        local_states = self.scratch(sequences, heads, scanned, value_dim, FEATURES)
        local_z = self.scratch(sequences, heads, scanned, 1, FEATURES) if self.normalize else None
        scan = kernel_for(based_states_hopper, config, self.problem.device).bind(
            sequences * heads * columns * scanned,
            gLocalStates=_merge_heads(local_states),
            gLocalZ=local_z and _drop_axis(_merge_heads(local_z)),
            gCuSeqlens=self.problem["cu_seqlens"],
            length=length,
            segments=self.segments,
            scanned_segments=scanned,
            heads=heads,
            columns=columns,
            group=heads // key_heads,
            scale=scale,
            **{"gVectors": None} | arrays,
        )
        compose, states = self.compose(local_states, state and state.permuted(SWAP_STATE_AXES))
        steps = [scan, compose]
        if local_z:
            compose, z_states = self.compose(local_z, z and z.spread(2, 1))
            steps.append(compose)
            z = _drop_axis(z_states)
        return steps, states.permuted(SWAP_STATE_AXES), z

    def compose(self, local_states: Operand, initial: Operand | None) -> tuple[Step, Operand]:
        """(the launch that adds up local states, the result)."""
        without_decays: Arrays = {"gLocalStates": local_states, "gTotalDecays": None}
        return compose_segments(self.problem, self.segments, without_decays, initial, self.scratch)


def _merge_heads(x: Operand) -> Operand:
    """Local states with heads and segments as one axis."""
    sequences, heads, segments, *shape = x.form.shape
    first, _, *strides = x.form.strides
    return x._replace(form=x.form._replace(shape=(sequences, heads * segments, *shape), strides=(first, *strides)))


def _drop_axis(x: Operand, axis: int = 2) -> Operand:
    """The operand without an axis of one element."""
    form = x.form
    shape, strides = (y[:axis] + y[axis + 1 :] for y in (form.shape, form.strides))
    return x._replace(form=form._replace(shape=shape, strides=strides))


def count_segments(problem: Problem, columns: int, costs: Costs) -> int:
    """The number of segments into which each sequence is cut. columns: the number of blocks of columns of a head."""
    batch, length, heads, sequences = problem("batch", "seqlen", "heads", "sequences")
    chunks, resident_ctas = length * batch // sequences // CHUNK, CTAS_PER_SM * machine(problem.device).processors
    return recurrent_chunks.choose_segments(sequences * heads * columns, 1, 1, chunks, resident_ctas, costs)


def plan_based(problem: Problem, scale: float, normalize: bool, return_state: bool) -> Plan:
    """The Plan of a call of based that has tokens."""
    length, heads, key_heads, value_dim, sequences = problem("seqlen", "heads", "heads_k", "value_dim", "sequences")
    columns, scratch = -(-value_dim // COLUMNS), ScratchAllocator(problem)
    segments = count_segments(problem, columns, COSTS)
    states = BasedSegments(problem, normalize, segments, scratch)
    ends = problem["initial_state"], problem["initial_z"]
    steps, initial_state, initial_z = states.find_states(*ends, reverse=False, scale=1.0, gX=problem["k"], gV=problem["v"])
    config = intern_value(based_hopper.Config, DTYPES[problem.dtype], normalize, is_varlen(problem))
    launch = kernel_for(based_hopper, config, problem.device).bind(
        sequences * heads * columns * segments,
        gQ=problem["q"],
        gK=problem["k"],
        gV=problem["v"],
        gO=problem["out"],
        gInitialState=initial_state,
        gInitialZ=initial_z,
        gFinalState=problem["state"] if return_state else None,
        gFinalZ=problem["z"] if return_state and normalize else None,
        gCuSeqlens=problem["cu_seqlens"],
        length=length,
        segments=segments,
        heads=heads,
        columns=columns,
        group=heads // key_heads,
        scale=scale,
    )
    return Plan([*steps, launch], scratch.shapes)
