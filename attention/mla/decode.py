"""attention.mla_decode: from a user's arrays to its launches."""

import math
from typing import Any

from tiles.arrays import Operand
from tiles.device import hopper as hopper_gpu
from tiles.device import machine
from tiles.launch import kernel_for
from tiles.program import Fill, Plan, program
from tiles.schema import Problem, Schema

from ..families import choose
from ..options import flag, number
from ..softmax.decode.caches import Dense, Indexed, Paged
from ..softmax.decode.decode import _by_rows, _parts
from ..softmax.decode.reach import Reach
from ..softmax.decode.results import Either, Part, Whole
from ..softmax.decode.splits import Parted, Shares, shares_for
from ..softmax.forward import scale_of
from ..softmax.launches import DTYPES, LOG2_E
from ..softmax.online import SLACK
from . import ampere, boxes, combine, hopper
from .shape import COLUMNS, LATENT

MLA_DECODE = Schema(
    "mla_decode",
    """
    q            BSHD  tile
    latent       CTD   tile
    lengths      B     key_lengths
    pages        BM    index    optional
    batch_index  B     index    optional
    out          BSHV  tile     made
    lse          BHS   float32  made      return_lse
    """,
    V=LATENT,
)


def mla_decode(
    q: Any,
    latent: Any,
    *,
    lengths: Any,
    scale: float,
    pages: Any = None,
    batch_index: Any = None,
    causal: bool = True,
    splits: int | None = None,
    out: Any = None,
    return_lse: bool = False,
    stream: Any = None,
    family: str | None = None,
) -> Any:
    """Multi-head latent attention (DeepSeek's) of a few new tokens, over a cache of latents that is read once.

    A key is a row of the cache: 512 numbers of the latent and 64 that are rotated by place. All heads share it, and its latent
    is the value of them all. What makes keys and values of latents is absorbed: into q before, and what comes out is a mean of
    latents, from which a model's own product makes each head's output.

    q: (B, Sq, H, 576), the 64 rotated columns last; one query token a sequence or several. latent: (B, Sk, 576), of which
    sequence b uses the first lengths[b] rows, the new tokens' among them; what lies behind is not looked at. bfloat16 or
    float16. Any base addresses and strides with a contiguous last axis, fast where they are multiples of 16 bytes.

    scale: of scores, which are scale q . k. There is no default, for it follows from how wide heads were before they absorbed
    anything: (128 + 64)**-0.5 in DeepSeek's models, times what a longer context asks for.

    lengths: (B), int32 or int64, where q lies: they are never read on the host, so that a CUDA graph which holds the call
    serves sequences as they grow.

    pages: (B, most pages), int32 or int64. Then latent is a pool, (pages, page size, 576): key j of sequence b is row j % size
    of page pages[b, j // size]. Any page size; Hopper's kernel takes multiples of 8. Numbers of pages behind a sequence's last
    one are not read. batch_index: (B), sequence b lies in batch batch_index[b] of latent, which may have more.

    causal: the last token stands at the last key, and token t sees keys up to lengths[b] - Sq + t; else all. A token that sees
    no key gives 0.

    splits, return_lse, stream: as in decode. out: (B, Sq, H, 512), where to write. family: None, "sm_90" (Hopper) or "sm_80",
    the instructions of every GPU since Ampere.

    Returns `out`, or with return_lse=True `(out, lse)`, lse (B, H, Sq) as in forward.

    ValueError or TypeError, before anything is launched, names the argument and prints the values."""
    if scale is None:
        raise TypeError("scale: must be a number, such as (128 + 64)**-0.5: scale=None")
    options = flag("causal", causal), _parts(splits), number("scale", scale), flag("return_lse", return_lse), family
    return _mla_decode(stream, (q, latent, lengths, pages, batch_index, out, None), options)


@program(MLA_DECODE, no_gradient="attention.mla_decode has no gradient: attention.forward has")
def _mla_decode(problem: Problem, causal: bool, splits: int | None, scale: float, return_lse: bool, family: str | None) -> Plan:
    """How mla_decode does calls of this form; lse is never given."""
    batch, tokens, heads, columns = problem("BSHD")
    if columns != COLUMNS:
        raise problem.error("q", f"must have {COLUMNS} columns, {LATENT} of latents and the others rotated", "q", "latent")
    if heads == 0:
        raise problem.error("q", "must have at least one head", "q")
    cache, most_keys, of_cache = _cache(problem)
    out, lse = problem["out"], problem["lse"] if return_lse else None
    if 0 in (batch, tokens) or most_keys == 0:
        return Plan([Fill(x, value) for x, value in ((out, 0), (lse, -math.inf)) if x])
    dtype, gpu, rows, piece = DTYPES[problem.dtype], machine(problem.device), tokens * heads, problem.bytes_at_once()
    reach, unit = Reach(False, causal and tokens > 1, False), scale_of(problem, scale)
    of_keys = {"lengths": problem["lengths"]} | ({"right": 0} if reach.right else {})

    box = _box(problem, cache)
    if family == "sm_90" and box is None:
        raise ValueError(f"family: sm_90 takes pages of a multiple of 8 rows: latent.shape={problem.shape('latent')}")
    on_hopper = choose(problem, family, problem.by_tma and box is not None) == "sm_90"
    early = on_hopper or hopper_gpu(gpu.capability)

    def shape(split, result):
        if on_hopper:
            return hopper.Config(dtype, reach, box, result, split)
        return ampere.config_for(dtype, reach, cache, result, split, early, rows, gpu.shared_bytes)

    whole, part = Whole(dtype, piece), Part(dtype, piece)
    config = shape(Shares, Either(whole, part)) if splits is None else shape(Parted, part)
    bands = -(-rows // config.band)
    number = shares_for(bands, gpu.processors) if splits is None else splits
    told = {"group": heads, "scale": unit * LOG2_E, "sequences": batch, "tokens": tokens, "splits": number}
    to = {"out": _one_head(out, 2), "lse": lse and _one_head(lse, 1)}
    steps, scratch, grid = [], [], number if splits is None else number * batch
    if number == 1:
        config, grid = shape(Parted, whole), batch
    else:
        places, ends = ((number, batch), batch) if splits else ((number + batch, 1), batch if batch <= number else number - 1)
        scratch = [((*places, 1, rows, LATENT), "float32"), ((*places, 1, rows), "float32")]
        parts, sums = [problem.scratch(n, *each) for n, each in enumerate(scratch)]
        split = Parted() if splits else Shares(reach, config.kv)
        of_parts = {"parts": parts, "sums_": sums} | told | to | ({} if splits else of_keys)
        last, last_bands = combine.Config(whole, split, early), -(-rows // combine.ROWS)
        blocks = ends * last_bands * combine.SLABS
        steps.append(kernel_for(combine, last, problem.device).bind(blocks, bands=last_bands, **of_parts))
        to = ({} if splits else to) | {"parts": parts, "sums": sums}
    latent = _one_head(problem["latent"], 2)
    if on_hopper:
        q = _one_head(problem["q"], 2)
        to |= {"gRotary": latent} | ({"page_size": problem("T")[0]} if "pages" in problem else {})
    else:
        q = _by_rows(problem["q"], heads)
    first = kernel_for(hopper if on_hopper else ampere, config, problem.device).bind(
        grid * bands, gQ=q, gLatent=latent, bands=bands, slack=SLACK / (unit * LOG2_E), **told, **of_cache, **of_keys, **to
    )
    return Plan([first, *steps], scratch)


def _cache(problem: Problem) -> tuple[Dense, int, dict[str, Operand]]:
    """How latents lie, how many a sequence can have at most, and what kernels are told of that. ValueError."""
    batch, batches, rows = problem("BCT")
    piece = problem.bytes_at_once()
    if "pages" in problem:
        if "batch_index" in problem:
            raise ValueError("batch_index: must be None where there are pages, whose table says where a sequence lies")
        return Paged(piece), rows * problem("M")[0] if batches else 0, {"pages": problem["pages"]}
    if "batch_index" in problem:
        return Indexed(piece), rows if batches else 0, {"batch_index": problem["batch_index"]}
    if batches != batch:
        raise problem.error("latent", "batch must equal q's where there are neither pages nor batch_index", "latent", "q")
    return Dense(piece), rows, {}


def _box(problem: Problem, cache: Dense) -> boxes.Dense | None:
    """The same for TMA; None: it would take too small boxes."""
    if isinstance(cache, Indexed):
        return boxes.Indexed()
    if not isinstance(cache, Paged):
        return boxes.Dense()
    rows = math.gcd(problem("T")[0], hopper.KV)
    return boxes.Paged(hopper.KV // rows) if rows % 8 == 0 else None


def _one_head(operand: Operand, axis: int) -> Operand:
    """With an axis of key heads, of which there is one, before `axis`."""
    form = operand.form
    shape, strides = form.shape, form.strides
    shape, strides = (*shape[:axis], 1, *shape[axis:]), (*strides[:axis], strides[axis - 1], *strides[axis:])
    return operand._replace(form=form._replace(shape=shape, strides=strides))
