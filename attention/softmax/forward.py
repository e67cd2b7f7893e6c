"""attention.forward: from a user's arrays to a launch."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from tiles.arrays import Operand
from tiles.device import machine, persistent
from tiles.dtypes import bf16, fp16
from tiles.launch import kernel_for
from tiles.program import Fill, Plan, Step, program
from tiles.schema import Problem, Schema
from tiles.torch_op import compiling

from ..families import choose
from ..options import SCALES, flag, number
from . import ampere, hopper
from . import blocks as lists
from .online import SLACK
from .python import evaluated, known, named, reads
from .sequences import Batched, InUse, Packed, PackedInUse
from .tiling import band_of
from .variants import Assembled, assembled

AUX = 8  # arrays that functions in Python may read
INDICES = 2**24  # tiles of indices are of float32: whole numbers below this
FORWARD = Schema(
    "forward",
    """
    q    BSHD  tile
    k    BTGD  tile
    v    BTGV  tile
    out  BSHV  tile     in_place
    lse  BHS   float32  made      return_lse
    """,
)
VARIANTS = Schema(
    "forward_variant",
    """
    q             BSHD  tile
    k             BTGD  tile
    v             BTGV  tile
    alibi         H|UH  float32  optional
    sink          H     float32  optional
    bias          WXYT  real     optional
    cu_seqlens    E     ends     optional
    cu_seqlens_k  E     key_ends  optional
    lengths_k     N     key_lengths  optional
    aux0          *     any      optional
    aux1          *     any      optional
    aux2          *     any      optional
    aux3          *     any      optional
    aux4          *     any      optional
    aux5          *     any      optional
    aux6          *     any      optional
    aux7          *     any      optional
    out           BSHV  tile     in_place
    lse           BHS   float32  made      return_lse
    """,
)
DTYPES = {"bfloat16": bf16, "float16": fp16}
LOG2_E = math.log2(math.e)


def forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi: Any = None,
    sink: Any = None,
    bias: Any = None,
    mask: Callable | None = None,
    score: Callable | None = None,
    aux: Sequence[Any] = (),
    cu_seqlens: Any = None,
    cu_seqlens_k: Any = None,
    lengths_k: Any = None,
    scale: float | None = None,
    layout: str = "bshd",
    out: Any = None,
    return_lse: bool = False,
    stream: Any = None,
    family: str | None = None,
) -> Any:
    """Attention: out = softmax(scale * q k^T) v, per batch and head.

    q: (B, Sq, H, D); k: (B, Sk, Hkv, D); v: (B, Sk, Hkv, Dv) for layout="bshd"; (B, H, S, D) for "bhsd". bfloat16 or float16;
    D and Dv multiples of 8 up to 256; H a multiple of Hkv (GQA, MQA: query head h reads key head h // (H // Hkv)). Any
    lengths; any base addresses and strides with a contiguous last axis, fast where they are multiples of 16 bytes; nothing is
    ever copied.

    Which keys a query sees. causal: query i sees key j where j <= i + Sk - Sq (aligned bottom-right). window: (left, right),
    the keys from i + Sk - Sq - left to i + Sk - Sq + right; None is open. mask: mask(b, h, i, j, *aux) says it in Python. A key
    is seen where all of these let it be; a query that sees no key gives 0.

    What becomes of a score s = scale q_i . k_j, in this order. softcap: softcap tanh(s / softcap). alibi: slopes (H) or (B, H),
    s - slope |i + Sk - Sq - j|. bias: s + bias, (B or 1, H or 1, Sq or 1, Sk) of float32, bfloat16 or float16. score:
    score(s, b, h, i, j, *aux) says it in Python. sink: (H) logits, exp(sink) joins the sum of weights.

    mask and score are functions as FlexAttention has them, b, h, i, j counting from 0. In kernels they get tiles: s is one of
    scores, i a vector of queries, j one of keys, whole numbers below 2**24; elsewhere NumPy's arrays. Comparisons, & | ~,
    + - * / // %, abs, `where` and the maps of `ops` work on both, and so do elements of aux, up to 8 arrays of numbers, at i,
    j, b and h: `docs[i] == docs[j]`. Key blocks in which a mask holds nowhere are passed by, but for packed sequences.

    cu_seqlens: (N + 1) ascending from 0 to Sq, in a batch of 1: sequence n has the queries from cu_seqlens[n] to
    cu_seqlens[n + 1]; cu_seqlens_k the same of keys, by default cu_seqlens. lengths_k: (B) or (N) keys in use of each sequence.
    All above is then about each sequence by itself, and b is its number.

    scale: of the scores, 1 / sqrt(D) by default. out: written in place of a new array. stream: the CUDA stream, by
    default the current one of q's framework. family: the instructions to use, "sm_90" (wgmma and TMA: Hopper, and
    multiples of 16 bytes) or "sm_80" (mma.sync and cp.async: any GPU since Ampere); by default the first where it can run.

    Returns `out`, the same kind of array as q, or with return_lse=True `(out, lse)`, where lse (B, H, Sq) is the float32
    natural logarithm of the sum of exp(score), -inf for a query that sees no key.

    Arrays are torch's, CuPy's, JAX's, Numba's or anything with `__dlpack__` or `__cuda_array_interface__`. NumPy arrays
    and others in host memory run in the interpreter, slowly and under supervision. ValueError or TypeError, before
    anything is launched, names the argument and prints the values."""
    common = number("scale", scale), flag("return_lse", return_lse), family
    arrays = alibi, sink, bias, cu_seqlens, cu_seqlens_k, lengths_k
    if isinstance(aux, tuple) and not aux and all([option is None for option in (window, softcap, mask, score, *arrays)]):
        return _forward(stream, (q, k, v, out, None), (flag("causal", causal), *common), layout)
    left, right = _ends(window)
    functions = [None if f is None else named(n, f, compiling()) for n, f in (("mask", mask), ("score", score))]
    given = q, k, v, *arrays, *_eight(aux), out, None
    return _variant(stream, given, (flag("causal", causal), left, right, _cap(softcap), *functions, *common), layout)


@program(FORWARD)
def _forward(problem: Problem, causal: bool, scale: float | None, return_lse: bool, family: str | None) -> Plan:
    """How forward does calls of this form; lse is never given."""
    _check(problem)
    return _planned(problem, assembled(_scale(problem, scale), causal), return_lse, family)


@program(VARIANTS)
def _variant(
    problem: Problem,
    causal: bool,
    left: int | None,
    right: int | None,
    softcap: float | None,
    mask: str | None,
    score: str | None,
    scale: float | None,
    return_lse: bool,
    family: str | None,
) -> Plan:
    """The same with variants; mask and score are the names that python.py knows functions by."""
    _check(problem)
    q_len, kv_len = problem("ST")
    if (mask or score) and max(q_len, kv_len) >= INDICES:
        name = "mask" if mask else "score"
        raise problem.error(name, "counts queries and keys in float32, so there must be fewer than 2**24 of each", "q", "k")
    aux = [x for x in (problem[f"aux{n}"] for n in range(AUX)) if x is not None]
    functions = known(mask), known(score)
    for name, function in zip(("mask", "score"), functions):
        if function is not None:
            evaluated(name, function, [x.form for x in aux])
    made = assembled(
        _scale(problem, scale),
        causal,
        (left, right),
        softcap,
        "alibi" in problem,
        "bias" in problem,
        "sink" in problem,
        *functions,
    )
    return _planned(problem, made, return_lse, family, aux, functions[0])


def _planned(
    problem: Problem,
    made: Assembled,
    return_lse: bool,
    family: str | None,
    aux: Sequence[Operand] = (),
    mask: Callable | None = None,
) -> Plan:
    """The launch of an assembled variant; where a function masks, and each sequence lies in a batch of its own, after that
    which lists its key blocks."""
    batch, q_len, heads, head_dim, kv_len, kv_heads, value_dim = problem("BSHDTGV")
    out, lse = problem["out"], problem["lse"] if return_lse else None
    if 0 in out.form.shape or kv_len == 0:  # no query sees a key
        if "sink" in problem and 0 not in out.form.shape:
            raise problem.error("k", "must have at least one key where there is a sink", "k")
        return Plan([Fill(x, value) for x, value in ((out, 0), (lse, -math.inf)) if x])
    lie, where = _sequences(problem)
    tma, dtype, gpu = choose(problem, family) == "sm_90", DTYPES[problem.dtype], machine(problem.device)
    variant, axes = made.variant, tuple(len(x.form.shape) for x in aux)
    config: hopper.Config | ampere.Config
    by_list = mask is not None and lie is Batched
    kind = {} if lie is Batched and not axes and not by_list else {"lie": lie, "axes": axes, "by_list": by_list}
    if tma:
        config = hopper.config_for(head_dim, dtype, variant, min(kv_len, made.reach), value_dim, **kind)
    else:
        room, piece = gpu.shared_bytes, problem.bytes_at_once()
        config = ampere.config_for(head_dim, dtype, variant, room, piece, value_dim, **kind)
    blocks, pairs = -(-q_len // config.rows), batch * heads
    if issubclass(lie, Packed):
        (ends,) = problem("E")
        blocks, pairs = q_len // config.rows + ends - 1, heads
    group, at_once = heads // kv_heads, gpu.processors
    grid = pairs * blocks
    if config.persistent:
        grid = persistent(gpu, grid)
    nbytes = kv_len * (head_dim + value_dim) * dtype.itemsize / group
    uneven = variant.rising or (config.persistent and q_len % config.rows > 0)
    arrays = {
        name: x
        for name, x in (
            ("slopes", _over(problem, "alibi", "BH")),
            ("sinks", problem["sink"]),
            ("bias", _over(problem, "bias", "BHST")),
        )
        if x is not None
    }
    read = {f"aux{n}": x for n, x in enumerate(aux)}
    steps: list[Step] = []
    scratch: list[tuple[tuple[int, ...], str]] = []
    if mask is not None and by_list:
        many = batch if reads(mask, 0) else 1, heads if reads(mask, 1) else 1
        keys = -(-kv_len // config.kv)
        scratch = [((*many, blocks, lists.HEAD + keys), "int32"), ((*many, blocks, keys), "int8")]
        found, classes = (problem.scratch(n, *memory) for n, memory in enumerate(scratch))
        asked = {name: x for name, x in (made.numbers | arrays).items() if name in variant.given}
        asked |= where | {"classes": classes, "blocks": blocks, "heads": many[1]}
        tiles, groups = many[0] * many[1] * blocks, -(-keys // lists.WARPS)
        survey = lists.Survey(variant, config.rows, config.kv, axes)
        compaction = lists.Compaction(variant, config.rows, config.kv)
        steps = [
            kernel_for(survey, survey, problem.device).bind(tiles * groups, groups=groups, **asked, **read),
            kernel_for(compaction, compaction, problem.device).bind(tiles, lists=found, **asked),
        ]
        arrays["lists"] = _spread(found, (batch, heads, *found.form.shape[2:]))
    launch = kernel_for(hopper if tma else ampere, config, problem.device).bind(
        grid,
        gQ=problem["q"],
        gK=problem["k"],
        gV=problem["v"],
        gO=out,
        gLse=lse,
        blocks=blocks,
        heads=heads,
        pairs=pairs,
        band=band_of(grid, at_once, nbytes, gpu.cache_bytes, uneven),
        group=group,
        scale=made.unit * LOG2_E,
        slack=SLACK / (made.unit * LOG2_E),
        **where,
        **made.numbers,
        **arrays,
        **read,
    )
    return Plan([*steps, launch], scratch)


def _scale(problem: Problem, scale: float | None) -> float:
    """The scale of scores; ValueError."""
    (head_dim,) = problem("D")
    scale = head_dim**-0.5 if scale is None else scale
    if not SCALES[0] <= scale <= SCALES[1]:  # a masked score is -inf, and must be -inf when scaled
        raise ValueError(f"scale: must be positive, and finite in float32: {scale=}")
    return scale


def _ends(window: Any) -> tuple[int | None, int | None]:
    """The two ends of a window; TypeError, ValueError."""
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window: must be (left, right), each an integer or None: {window=}")
    for end in window:
        if isinstance(end, bool) or not (end is None or isinstance(end, int) or hasattr(end, "__index__")):
            raise TypeError(f"window: its ends must be integers or None: {window=}")
        if end is not None and not 0 <= end < 2**30:
            raise ValueError(f"window: its ends must not be negative, and below 2**30; None is open: {window=}")
    left, right = (None if end is None else int(end) for end in window)
    return left, right


def _eight(aux: Any) -> tuple:
    """The arrays that functions read, and None for those that could be; TypeError."""
    if not isinstance(aux, (tuple, list)):
        raise TypeError(f"aux: must be a tuple of arrays, (array,) of one: it is of {type(aux).__name__}")
    if len(aux) > AUX or any([x is None for x in aux]):
        what = [type(x).__name__ for x in aux]
        raise TypeError(f"aux: must be up to {AUX} arrays: {len(aux)} of {what}")
    return *aux, *(None,) * (AUX - len(aux))


def _cap(softcap: Any) -> float | None:
    """A softcap; TypeError, ValueError."""
    cap = number("softcap", softcap)
    if cap is not None and not SCALES[0] <= cap <= SCALES[1]:
        raise ValueError(f"softcap: must be positive, and finite in float32: {softcap=}")
    return cap


def _sequences(problem: Problem) -> tuple[type[Batched], dict[str, Any]]:
    """How a problem's sequences lie, and what its kernels are told of that; ValueError."""
    q_len, kv_len = problem("ST")
    if "cu_seqlens_k" in problem and "cu_seqlens" not in problem:
        raise ValueError("cu_seqlens_k: takes cu_seqlens, too, which is None")
    if "cu_seqlens" in problem:
        if "cu_seqlens_k" not in problem and q_len != kv_len:
            raise problem.error("cu_seqlens_k", "must be given where keys are more or fewer than queries", "q", "k")
        ends = problem["cu_seqlens"]
        where = {"ends": ends, "ends_k": problem["cu_seqlens_k"] or ends}
        if "lengths_k" in problem:
            return PackedInUse, where | {"lengths": problem["lengths_k"]}
        return Packed, where
    if "lengths_k" in problem:
        return InUse, {"q_len": q_len, "lengths": problem["lengths_k"]}
    return Batched, {"q_len": q_len, "kv_len": kv_len}


def _over(problem: Problem, name: str, axes: str) -> Operand | None:
    """An argument spread over axes where it has an extent of 1, and over the first if it lacks that; of packed sequences the
    first axis is their number. ValueError."""
    operand = problem[name]
    if operand is None:
        return None
    form = operand.form
    shape, strides, lettered = form.shape, form.strides, problem.axes(name)
    if len(shape) < len(axes):
        shape, strides, lettered = (1, *shape), (0, *strides), f"U{lettered}"
    extents = problem(axes)
    if "cu_seqlens" in problem:
        extents = (problem("N")[0], *extents[1:])
    if any(have not in (1, want) for have, want in zip(shape, extents)):
        wanted = ", ".join(f"{want} or 1" if want > 1 and a in "UWXY" else f"{want}" for a, want in zip(lettered, extents))
        raise ValueError(f"{name}: must have the shape ({wanted}): {name}.shape={form.shape}")
    return _spread(operand._replace(form=form._replace(shape=shape, strides=strides)), extents)


def _spread(operand: Operand, extents: tuple[int, ...]) -> Operand:
    """With these extents, all elements being one along axes that have an extent of 1."""
    form = operand.form
    strides = tuple(0 if have == 1 else stride for have, stride in zip(form.shape, form.strides))
    return operand._replace(form=form._replace(shape=extents, strides=strides))


def _check(problem: Problem) -> None:
    """ValueError: extents that the formula or the kernels do not take."""
    q_len, heads, head_dim, kv_len, kv_heads, value_dim = problem("SHDTGV")
    for name, dim, which in (("q", head_dim, "head_dim"), ("v", value_dim, "value_dim")):
        if dim % 8 or not 8 <= dim <= 256:
            raise problem.error(name, f"head_dim must be a multiple of 8, from 8 to 256: {which}={dim}", name)
    if kv_heads == 0:
        raise problem.error("k", "must have at least one head", "k")
    if heads % kv_heads:
        raise problem.error("q", f"heads must be a multiple of k's: {heads=}, {kv_heads=}", "q", "k")
    if q_len >= 2**31 or kv_len >= 2**31:
        raise problem.error("q" if q_len >= 2**31 else "k", "sequence must be shorter than 2**31", "q", "k")
