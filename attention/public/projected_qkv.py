"""Attention with QK norm and rotary embedding, for q, k and v that are columns of one projection: a program, and one for the
gradients. These all go to one array, so that the backward pass of the projection is one matrix product.

    y = rotary(norm(q)), rotary(norm(k))    rotary_rows.py: the heads of queries and then those of keys, in one array
    out = softmax(scale y_q y_k^T) v        the launches of forward_programs.py, on parts of that array

In the backward pass the launches of backward/ write dy and dv to the array of gradients, and dy becomes dq and dk in place."""

from typing import Any, NamedTuple

from tiles.calls.plan import ArrayView, Fill, Plan
from tiles.calls.program import program
from tiles.calls.schema import Problem, Schema
from tiles.launching.arrays import ALIGNMENT, Array, Form, Operand
from tiles.launching.launch import kernel_for

from ..kernels.softmax import rotary_rows
from ..options import ListOptions, RandomOptions, ResultOptions, ScoreOptions
from ..plans.partial_sums import sum_partials
from ..plans.requires_grad import needs_gradient
from ..plans.softmax import forward_programs
from ..plans.softmax.forward_launches import DTYPES
from ..plans.softmax.gradient import NO_SECOND_DERIVATIVES
from . import softmax_backward

INPUTS = """
    q       (batch, seqlen, heads, head_dim)        tile
    k       (batch, seqlen, heads_k, head_dim)      tile
    v       (batch, seqlen, heads_k, head_dim)      tile
    cos     (seqlen, pairs)|(batch, seqlen, pairs)  float32
    sin     (seqlen, pairs)|(batch, seqlen, pairs)  float32
    q_norm  (head_dim)                              float32  optional
    k_norm  (head_dim)                              float32  optional
    sink    (heads)                                 float32  optional
"""
FORWARD = Schema(
    "projected",
    f"""
{INPUTS}
    out   (batch, seqlen, heads, head_dim)     tile     output
    lse   (batch, heads, seqlen)               float32  output
    rows  (batch, seqlen, heads_qk, head_dim)  tile     output
    """,
    heads_qk=lambda extents: extents["heads"] + extents["heads_k"],
)
BACKWARD = Schema(
    "projected_backward",
    f"""
    dout     (batch, seqlen, heads, head_dim)      tile
{INPUTS}
    out      (batch, seqlen, heads, head_dim)      tile
    lse      (batch, heads, seqlen)                float32
    rows     (batch, seqlen, heads_qk, head_dim)   tile
    dx       (batch, seqlen, heads_qkv, head_dim)  tile     output
    dq_norm  =q_norm                               float32  output  normed
    dk_norm  =k_norm                               float32  output  normed
    dsink    (heads)                               float32  output  sunk
    """,
    heads_qkv=lambda extents: extents["heads"] + 2 * extents["heads_k"],
)


class _InnerProblem(Problem):
    """The problem of forward or backward inside one of these programs, with these operands."""

    def __init__(self, outer: Problem, schema: Schema, operands: dict[str, Operand | None], parts: list[ArrayView]):
        self.operands, self.outer, self.parts = {n: x for n, x in operands.items() if x is not None}, outer, parts
        problem = schema.problem({name: x.form for name, x in self.operands.items()})
        super().__init__(schema, problem.forms, problem.extents, problem.bits, problem.layout)

    def __getitem__(self, name: str) -> Any:
        return self.operands.get(name)

    def scratch(self, number: int, shape: tuple[int, ...], dtype: str) -> Operand:
        """Scratch memory of the outer problem; the views of arrays come before it."""
        return self.outer.scratch(len(self.parts) + number, shape, dtype)


def _view_heads(problem: Problem, array: Operand, first: int, count: int, parts: list[ArrayView]) -> Operand:
    """A view of `count` heads of an array (batch, row, head, column), from head `first` on."""
    batch, rows, _, columns = array.form.shape
    form = array.form._replace(shape=(batch, rows, count, columns))
    parts.append(ArrayView(array.source, first * form.strides[2]))
    return Operand(len(problem.schema.places) + len(parts) - 1, form)


def _rotary_arguments(problem: Problem) -> tuple[rotary_rows.RotaryConfig, dict[str, Any], int]:
    """(the RotaryConfig, the arguments of both kernels, the number of tiles of rows). ValueError: the arrays contradict each
    other."""
    batch, rows, heads, columns, kv_heads, pairs = problem("batch", "seqlen", "heads", "head_dim", "heads_k", "pairs")
    if columns not in rotary_rows.HEAD_DIMS:
        raise problem.error("q", f"head_dim must be one of {rotary_rows.HEAD_DIMS}", "q")
    if pairs * 2 != columns:
        raise problem.error("cos", "must have a column for each pair of q's", "cos", "q")
    if ("q_norm" in problem) != ("k_norm" in problem):
        raise ValueError("q_norm: must be passed with k_norm, and only with it")
    if problem.bytes_at_once("q", "k", "v", "cos", "sin") != ALIGNMENT:
        raise problem.error(
            "q", f"addresses and strides, as those of k, v, cos and sin, must be multiples of {ALIGNMENT} bytes", "q"
        )
    tables = {name: problem[name] for name in ("cos", "sin")}
    tables = {name: x if len(x.form.shape) == 3 else x.spread(0, batch) for name, x in tables.items()}
    for name, x in tables.items():
        if x.form.strides[-1] != x.form.itemsize and 0 not in x.form.shape:
            raise ValueError(f"{name}: last axis must be contiguous: {name}.strides={problem.forms[name].strides}")
    norms = {name: x.spread(0, 1) for name in ("q_norm", "k_norm") if (x := problem[name]) is not None}
    args = {"gQ": problem["q"], "gK": problem["k"], "gCos": tables["cos"], "gSin": tables["sin"]}
    args |= {"gQNorm": norms.get("q_norm"), "gKNorm": norms.get("k_norm")}
    args |= {"heads": heads, "kv_heads": kv_heads, "head_blocks": -(-(heads + kv_heads) // rotary_rows.WARPS)}
    return rotary_rows.RotaryConfig(columns, DTYPES[problem.dtype], "q_norm" in problem), args, -(-rows // rotary_rows.ROWS)


def _prepare_backward(arrays: dict[str, Array], results: dict[str, Form], options: dict[str, Any], layout: str) -> None:
    """Compile the kernels of a call's backward pass, without a deterministic order, while those of the call are compiled
    (`meanwhile` of tiles.calls.program)."""
    if not needs_gradient(*arrays.values()):
        return
    forms = {name: arrays[name].form for name in FORWARD.names[:-3] if name in arrays}
    flags = False, "q_norm" in forms, "sink" in forms
    *planned, family = options.values()
    projected_backward.prepare({"dout": results["out"], **forms, **results}, (*planned, *flags, family), layout)


class ProjectedOptions(NamedTuple):
    """The options of both programs: the epsilon of norms, and those of attention.forward."""

    norm_eps: float
    causal: bool
    left: int | None
    right: int | None
    softcap: float | None
    scale: float | None

    @property
    def scores(self) -> ScoreOptions:
        """What these options ask of scores."""
        return ScoreOptions(causal=self.causal, left=self.left, right=self.right, softcap=self.softcap)


@program(FORWARD, no_gradient=NO_SECOND_DERIVATIVES, prepare_next=_prepare_backward)
def projected(problem: Problem, options: ProjectedOptions, family: str | None) -> Plan:
    """The Plan of the rotated rows, and of out and lse."""
    parts: list[ArrayView] = []
    config, args, tiles = _rotary_arguments(problem)
    batch, heads, kv_heads = problem("batch", "heads", "heads_k")
    q, k = (_view_heads(problem, problem["rows"], *of_heads, parts) for of_heads in ((0, heads), (heads, kv_heads)))
    operands = {"q": q, "k": k} | {name: problem[name] for name in ("v", "sink", "out", "lse")}
    inner = _InnerProblem(problem, forward_programs.VARIANTS, operands, parts)
    lists, random, result = ListOptions(), RandomOptions(), ResultOptions(options.scale, True, family)
    plan = forward_programs._variant.planner(inner, options.scores, lists, options.norm_eps, random, result)
    if not tiles * batch:
        return plan._replace(scratch=[*parts, *plan.scratch])
    turn = kernel_for(rotary_rows, rotary_rows.RotateConfig(*config.fields), problem.device)
    first = turn.bind(batch * tiles * args["head_blocks"], gOut=problem["rows"], tiles=tiles, eps=options.norm_eps, **args)
    return plan._replace(steps=[first, *plan.steps], scratch=[*parts, *plan.scratch])


@program(BACKWARD, no_gradient=NO_SECOND_DERIVATIVES)
def projected_backward(
    problem: Problem, options: ProjectedOptions, deterministic: bool, normed: bool, sunk: bool, family: str | None
) -> Plan:
    """The Plan of dx, the gradients of q, k and v in one array, and of the gradients of norms and sinks. normed, sunk: are
    there norms? sinks?"""
    parts: list[ArrayView] = []
    config, args, tiles = _rotary_arguments(problem)
    batch, heads, kv_heads, all_rows, columns = problem("batch", "heads", "heads_k", "heads_qk", "head_dim")
    if all_rows != heads + kv_heads:
        raise problem.error("rows", "must have the heads of q and k", "rows", "q", "k")
    if (normed, sunk) != ("q_norm" in problem, "sink" in problem):
        raise ValueError(f"normed, sunk: must say whether there are norms, and sinks: {normed=}, {sunk=}")
    rows, dx = problem["rows"], problem["dx"]
    operands = {name: problem[name] for name in ("dout", "v", "sink", "out", "lse")}
    for array, names in ((rows, ("q", "k")), (dx, ("dq", "dk", "dv"))):
        first = 0
        for name, count in zip(names, (heads, kv_heads, kv_heads)):
            operands[name] = _view_heads(problem, array, first, count, parts)
            first += count
    operands |= {"dsink": problem["dsink"]} if sunk else {}
    inner = _InnerProblem(problem, softmax_backward.VARIANTS, operands, parts)
    rest = ListOptions(), RandomOptions(), options.scale, deterministic, "dsink" if sunk else "", family
    plan = softmax_backward._variant.planner(inner, options.scores, *rest)
    norm_grads = {name: problem[name].spread(0, 1) for name in (("dq_norm", "dk_norm") if normed else ())}
    scratch: list[Any] = [*parts, *plan.scratch]
    if not tiles * batch:
        return plan._replace(steps=[*plan.steps, *[Fill(x, 0.0) for x in norm_grads.values()]], scratch=scratch)
    config = rotary_rows.RotateBackwardConfig(*config.fields)
    row_parts = -(-tiles // config.steps)
    counts = {"dq_norm": batch * row_parts * heads, "dk_norm": batch * row_parts * kv_heads}
    sums = {}
    for name in norm_grads:
        shape = 1, counts[name], columns
        sums[name] = problem.scratch(len(scratch), shape, "float32")
        scratch.append((shape, "float32"))
    steps = [
        *plan.steps,
        kernel_for(rotary_rows, config, problem.device).bind(
            batch * row_parts * args["head_blocks"],
            gDX=dx,
            gQParts=sums.get("dq_norm"),
            gKParts=sums.get("dk_norm"),
            tiles=tiles,
            row_parts=row_parts,
            eps=options.norm_eps,
            **args,
        ),
    ]
    steps += [sum_partials(problem, sums[name], target) for name, target in norm_grads.items()]
    return plan._replace(steps=steps, scratch=scratch)
