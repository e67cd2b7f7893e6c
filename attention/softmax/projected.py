"""Attention of queries, keys and values that are columns of one projection, with norms and rotary positions: one program, and
one for the gradients, all of which go to one array, so that what is differentiated behind it is one product of matrices.

    y = turned(norm(q)), turned(norm(k))    rotary.py: heads of queries and keys, one behind the other, in one array
    out = softmax(scale y_q y_k^T) v        the launches of forward_programs.py, on parts of that array

Backwards the launches of backward/ write dy and dv to the one array of gradients, and dy becomes dq and dk where it lies."""

from typing import Any

from tiles.arrays import ALIGNMENT, Operand, c_ordered
from tiles.launch import kernel_for
from tiles.plan import ArrayView, Fill, Plan
from tiles.program import program
from tiles.schema import Problem, Schema

from . import forward_programs, rotary
from .backward import backward
from .backward.norms import PART, SumNormPartials
from .gradient import NO_SECOND_DERIVATIVES
from .launches import DTYPES

INPUTS = """
    q       BSHD    tile
    k       BSGD    tile
    v       BSGD    tile
    cos     SR|BSR  float32
    sin     SR|BSR  float32
    q_norm  D       float32  optional
    k_norm  D       float32  optional
    sink    H       float32  optional
"""
FORWARD = Schema(
    "projected",
    f"""{INPUTS.rstrip()}
    out   BSHD  tile     made
    lse   BHS   float32  made
    rows  BSrD  tile     made
    """,
    r=lambda extents: extents["H"] + extents["G"],
)
BACKWARD = Schema(
    "projected_backward",
    f"""
    dout  BSHD  tile{INPUTS.rstrip()}
    out   BSHD  tile
    lse   BHS   float32
    rows  BSrD  tile
    dx       BSpD     tile     made
    dq_norm  =q_norm  float32  made  normed
    dk_norm  =k_norm  float32  made  normed
    dsink    H        float32  made  sunk
    """,
    p=lambda extents: extents["H"] + 2 * extents["G"],
)


class _InnerProblem(Problem):
    """The problem of forward or of backward as a part of one of ours, with these operands."""

    def __init__(self, outer: Problem, schema: Schema, operands: dict[str, Operand | None], parts: list[ArrayView]):
        self.operands, self.outer, self.parts = {n: x for n, x in operands.items() if x is not None}, outer, parts
        problem = schema.problem({name: x.form for name, x in self.operands.items()})
        super().__init__(schema, problem.forms, problem.extents, problem.bits, problem.layout)

    def __getitem__(self, name: str) -> Any:
        return self.operands.get(name)

    def scratch(self, number: int, shape: tuple[int, ...], dtype: str) -> Operand:
        """See Problem. The parts of arrays come before it."""
        return self.outer.scratch(len(self.parts) + number, shape, dtype)


def _view_heads(problem: Problem, whole: Operand, first: int, count: int, parts: list[ArrayView]) -> Operand:
    """`count` heads of an array (batch, row, head, column), from number `first` on."""
    batch, rows, _, columns = whole.form.shape
    form = whole.form._replace(shape=(batch, rows, count, columns))
    parts.append(ArrayView(whole.source, first * form.strides[2]))
    return Operand(len(problem.schema.places) + len(parts) - 1, form)


def _rotary_arguments(problem: Problem) -> tuple[rotary.RotaryConfig, dict[str, Any], int]:
    """(the Rows that are rotated, the arguments of both kernels, the number of tiles of rows). ValueError: the arrays do not
    fit each other."""
    batch, rows, heads, columns, kv_heads, pairs = problem("BSHDGR")
    if columns not in rotary.HEAD_DIMS:
        raise problem.error("q", f"head_dim must be one of {rotary.SERVED}", "q")
    if pairs * 2 != columns:
        raise problem.error("cos", "must have a column for each pair of q's", "cos", "q")
    if ("q_norm" in problem) != ("k_norm" in problem):
        raise ValueError("q_norm: must be given where k_norm is, and nowhere else")
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
    told = {"gQ": problem["q"], "gK": problem["k"], "gCos": tables["cos"], "gSin": tables["sin"]}
    told |= {"gQNorm": norms.get("q_norm"), "gKNorm": norms.get("k_norm")}
    told |= {"heads": heads, "kv_heads": kv_heads, "cuts": -(-(heads + kv_heads) // rotary.WARPS)}
    return rotary.RotaryConfig(columns, DTYPES[problem.dtype], "q_norm" in problem), told, -(-rows // rotary.ROWS)


def _prepare_backward(arrays: list, options: tuple, layout: str) -> None:
    """See `meanwhile` of tiles.program: while the kernels of a call are compiled, compile those of its backward pass, with
    sums in any order."""
    if not any([x is not None and getattr(x.owner, "requires_grad", False) for x in arrays]):
        return
    names = FORWARD.names[:-3]
    forms = {name: x.form for name, x in zip(names, arrays) if x is not None}
    problem = FORWARD.problem(forms, layout)
    made = {name: c_ordered(*problem.made(name), problem.device) for name in ("out", "lse", "rows")}
    asked = False, "q_norm" in forms, "sink" in forms
    projected_backward.prepare({"dout": made["out"], **forms, **made}, (*options[:-1], *asked, options[-1]), layout)


@program(FORWARD, no_gradient=NO_SECOND_DERIVATIVES, meanwhile=_prepare_backward)
def projected(
    problem: Problem,
    norm_eps: float,
    causal: bool,
    left: int | None,
    right: int | None,
    softcap: float | None,
    scale: float | None,
    family: str | None,
) -> Plan:
    """The Plan for out, lse and the rotated rows."""
    parts: list[ArrayView] = []
    of, told, tiles = _rotary_arguments(problem)
    batch, heads, kv_heads = problem("BHG")
    q, k = (_view_heads(problem, problem["rows"], *of_heads, parts) for of_heads in ((0, heads), (heads, kv_heads)))
    operands = {"q": q, "k": k} | {name: problem[name] for name in ("v", "sink", "out", "lse")}
    inner = _InnerProblem(problem, forward_programs.VARIANTS, operands, parts)
    ends = left, right
    plan = forward_programs._variant.planner(
        inner, causal, *ends, softcap, None, None, None, None, None, norm_eps, None, None, scale, True, family
    )
    if not tiles * batch:
        return plan._replace(scratch=[*parts, *plan.scratch])
    turn = kernel_for(rotary, rotary.RotateConfig(*of.of), problem.device)
    first = turn.bind(batch * tiles * told["cuts"], gOut=problem["rows"], tiles=tiles, eps=norm_eps, **told)
    return plan._replace(steps=[first, *plan.steps], scratch=[*parts, *plan.scratch])


@program(BACKWARD, no_gradient=NO_SECOND_DERIVATIVES)
def projected_backward(
    problem: Problem,
    norm_eps: float,
    causal: bool,
    left: int | None,
    right: int | None,
    softcap: float | None,
    scale: float | None,
    deterministic: bool,
    normed: bool,
    sunk: bool,
    family: str | None,
) -> Plan:
    """The Plan for dx, the gradients of q, k and v one behind the other, and for the gradients of norms and sinks. normed,
    sunk: are there norms? sinks?"""
    parts: list[ArrayView] = []
    of, told, tiles = _rotary_arguments(problem)
    batch, heads, kv_heads, all_rows, columns = problem("BHGrD")
    if all_rows != heads + kv_heads:
        raise problem.error("rows", "must have the heads of q and k", "rows", "q", "k")
    if (normed, sunk) != ("q_norm" in problem, "sink" in problem):
        raise ValueError(f"normed, sunk: must say whether there are norms, and sinks: {normed=}, {sunk=}")
    rows, dx = problem["rows"], problem["dx"]
    operands = {name: problem[name] for name in ("dout", "v", "sink", "out", "lse")}
    for whole, names in ((rows, ("q", "k")), (dx, ("dq", "dk", "dv"))):
        at = 0
        for name, count in zip(names, (heads, kv_heads, kv_heads)):
            operands[name] = _view_heads(problem, whole, at, count, parts)
            at += count
    operands |= {"dsink": problem["dsink"]} if sunk else {}
    inner = _InnerProblem(problem, backward.VARIANTS, operands, parts)
    also = "dsink" if sunk else ""
    plan = backward._variant.planner(
        inner, causal, left, right, softcap, None, None, None, None, None, None, None, scale, deterministic, also, family
    )
    made = {name: problem[name].spread(0, 1) for name in (("dq_norm", "dk_norm") if normed else ())}
    scratch: list[Any] = [*parts, *plan.scratch]
    if not tiles * batch:
        return plan._replace(steps=[*plan.steps, *[Fill(x, 0.0) for x in made.values()]], scratch=scratch)
    config = rotary.RotateBackwardConfig(*of.of)
    shares = -(-tiles // config.steps)
    counts = {"dq_norm": batch * shares * heads, "dk_norm": batch * shares * kv_heads}
    sums = {}
    for name in made:
        shape = 1, counts[name], columns
        sums[name] = problem.scratch(len(scratch), shape, "float32")
        scratch.append((shape, "float32"))
    steps = [
        *plan.steps,
        kernel_for(rotary, config, problem.device).bind(
            batch * shares * told["cuts"],
            gDX=dx,
            gQParts=sums.get("dq_norm"),
            gKParts=sums.get("dk_norm"),
            tiles=tiles,
            shares=shares,
            eps=norm_eps,
            **told,
        ),
    ]
    cuts, total = -(-columns // PART.cols), SumNormPartials()
    for name, target in made.items():
        adding = kernel_for(total, total, problem.device)
        steps.append(adding.bind(cuts, gParts=sums[name], gSum=target, cuts=cuts, parts=counts[name]))
    return plan._replace(steps=steps, scratch=scratch)
