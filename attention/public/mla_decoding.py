"""attention.mla_decode: from the caller's arrays to the Plan of a call."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from tiles.calls.plan import Fill, Plan, Step
from tiles.calls.program import program
from tiles.calls.schema import Problem, Schema
from tiles.dtypes import fp8e4m3, int8
from tiles.launching.arrays import Operand
from tiles.launching.devices import machine
from tiles.launching.launch import kernel_for

from ..families import AMPERE_FAMILY, HOPPER_FAMILY, choose_family
from ..kernels.decode import decode_combine, mla_ampere, mla_combine, mla_fp8, mla_hopper
from ..names import suggests_argument_names
from ..options import check_flag, check_number
from ..parts.decode import latent_boxes
from ..parts.decode.cache_loaders import DenseLoader
from ..parts.decode.key_window import KeyWindow
from ..parts.decode.latent_products import LatentProducts
from ..parts.decode.latent_shape import COLUMNS, LATENT, ROTARY
from ..parts.decode.outputs import FinalOutput, PartialOutput
from ..parts.decode.splits import MAX_CHOSEN_SPLITS, choose_split_count
from ..parts.online_softmax import SLACK
from ..parts.variant import Variant
from ..plans.decode.decode_launches import allocate_partials, combine_partials, order_by_rows, select_loader
from ..plans.decode.page_checks import plan_page_checks
from ..plans.softmax.forward_launches import DTYPES, LOG2_E
from ..plans.softmax.fp8_checks import is_fp8
from ..plans.softmax.planning import resolve_scale
from .decoding import check_splits

MIN_BOX_ROWS = 32  # of TMA: with boxes of 16 rows it takes 1.3 times as long as gathering rows, with 64 nine tenths

REMEDIES = {"int8": "latents of one byte, (B, Sk, 512), are passed with rotary= and descale="}
MLA_DECODE = Schema(
    "mla_decode",
    """
    q            (batch, seqlen_q, heads, head_dim)    tile
    latent       (batch_cache, seqlen_k, head_dim)     tile
    lengths      (batch)                               key_lengths
    pages        (batch, pages_per_seq)                index        optional
    batch_index  (batch)                               index        optional
    out          (batch, seqlen_q, heads, head_dim_v)  tile         output
    lse          (batch, heads, seqlen_q)              float32      output  return_lse
    """,
    remedies=REMEDIES,
    head_dim_v=LATENT,
)
QUANTISED = Schema(
    "mla_decode_fp8",
    """
    q            (batch, seqlen_q, heads, head_dim)    tile
    latent       (batch_cache, seqlen_k, head_dim_v)   byte
    lengths      (batch)                               key_lengths
    rotary       (batch_cache, seqlen_k, rotary_dim)   tile
    descale      (batch_cache, seqlen_k)               float32
    pages        (batch, pages_per_seq)                index        optional
    batch_index  (batch)                               index        optional
    out          (batch, seqlen_q, heads, head_dim_v)  tile         output
    lse          (batch, heads, seqlen_q)              float32      output  return_lse
    """,
    head_dim_v=LATENT,
)


@suggests_argument_names
def mla_decode(
    q: Any,
    latent: Any,
    *,
    lengths: Any,
    scale: float,
    rotary: Any = None,
    descale: Any = None,
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

    A key is a row of the cache: 512 numbers of the latent, and 64 that are rotated by position. All heads share it, and its
    latent is the value for all of them. The matrices that make keys and values from latents are absorbed: the first one into
    q, before the call; after it, the output is a mean of latents, from which the model's own product makes the output of
    each head.

    q: (B, Sq, H, 576), the 64 rotated columns last; one query token a sequence or several. latent: (B, Sk, 576). Sequence b
    uses the first lengths[b] rows, including those of the new tokens; the others are not read. bfloat16 or float16. Any base
    addresses, and any strides with a contiguous last axis; multiples of 16 bytes are fast.

    scale: scores are scale q . k. There is no default, because it depends on how wide heads were before the absorption: (128
    + 64)**-0.5 in DeepSeek's models, times a factor for longer contexts (YaRN).

    lengths: (B), int32 or int64, on q's device. The host never reads them, so a CUDA graph that holds the call serves
    sequences as they grow.

    rotary, descale: for a cache of float8_e4m3fn or int8, which has latents alone, (B, Sk, 512). The latents are multiplied by
    descale, (B, Sk) in float32, one number a token; the rotated columns are an array of their own, (B, Sk, 64), in q's dtype.
    Queries and weights are rounded to float16. The three may be views of one array of bytes, such as rows of 656 bytes of which
    512, 4 and 128 are in use. fp8 needs Ada, Hopper or later; int8 has no kernel of Hopper's family.

    pages: (B, most pages), int32 or int64. Then latent is a pool, (pages, page size, 576), and key j of sequence b is row j %
    size of page pages[b, j // size]; the same holds for rotary and descale. Any page size. Entries after a sequence's last page
    are not read. batch_index: (B), sequence b is batch batch_index[b] of latent, which may have more.

    To write new latents, call attention.append with the rotated columns as the keys of one head and the others as its values:
    attention.append(latent[:, :, None, 512:], latent[:, :, None, :512], rotated, latents, lengths=before, rotary=(cos, sin)).
    So the pools of a PagedCache may be two such views of one pool of latents. Latents of one byte, with their descales, and
    rotated columns are written by a call each, as keys without values:
    attention.append(latent[:, :, None], None, latents, None, lengths=before, k_descale=descale[..., None]).

    causal: the last token is at the last key, and token t sees keys up to lengths[b] - Sq + t. Otherwise a token sees all keys.
    A token that sees no key gives 0.

    splits, return_lse, stream: as in decode. out: (B, Sq, H, 512), where to write. family: None, "sm_90" (Hopper) or
    "sm_80", the instructions of every GPU since Ampere.

    Returns `out`, or with return_lse=True `(out, lse)`, lse (B, H, Sq) as in forward.

    ValueError, TypeError: an argument is wrong; the message names it and prints the values. Nothing was launched."""
    if scale is None:
        raise TypeError("scale: must be a number, such as (128 + 64)**-0.5: scale=None")
    flag = check_flag("causal", causal)
    options = flag, check_splits(splits), check_number("scale", scale), check_flag("return_lse", return_lse), family
    if (rotary is None) != (descale is None):
        name, other = ("rotary", "descale") if rotary is None else ("descale", "rotary")
        raise TypeError(f"{name}: must be passed together with {other}, with latents of float8_e4m3fn or int8: {name}=None")
    if rotary is None:
        if is_fp8(latent):
            values = f"latent.dtype={latent.dtype}, latent.shape={tuple(latent.shape)}"
            raise TypeError(f"latent: in float8_e4m3fn must have {LATENT} columns; pass rotary= and descale=, too: {values}")
        return _mla_decode(stream, (q, latent, lengths, pages, batch_index, out, None), options)
    return _mla_decode_fp8(stream, (q, latent, lengths, rotary, descale, pages, batch_index, out, None), options)


class MlaOptions(NamedTuple):
    """The options of a call."""

    causal: bool
    splits: int | None
    scale: float
    return_lse: bool
    family: str | None


@program(MLA_DECODE, no_gradient="attention.mla_decode has no gradient: attention.forward has")
def _mla_decode(problem: Problem, options: MlaOptions) -> Plan:
    """The Plan of a call of mla_decode on a cache of 16 bits. The schema's `lse` is always a result: callers have no argument
    for it."""
    if problem.extents["head_dim"] != COLUMNS:
        raise problem.error("q", f"must have {COLUMNS} columns: {LATENT} of latents, then {ROTARY} rotated", "q", "latent")
    if problem.extents["head_dim_v"] != LATENT:  # of out, if it is given
        raise problem.error("out", f"must have {LATENT} columns", "out")
    _check_heads(problem)
    vector_bytes, tma, heads = problem.bytes_at_once(), _select_tma(problem), problem.extents["heads"]
    cache, latent = select_loader(problem, vector_bytes, "latent"), problem["latent"]
    dtype, gpu = DTYPES[problem.dtype], machine(problem.device)
    rows = problem.extents["seqlen_q"] * heads
    chosen = choose_family(problem, options.family)
    arrays: dict[str, Any] = {"gLatent": _one_head(latent, 2)}
    few_rows = rows <= mla_ampere.TILE_ROWS  # most of mla_hopper.py's 64 rows would be empty
    if chosen == AMPERE_FAMILY or (options.family is None and few_rows):
        pdl, arrays["gQ"] = gpu.target.has_early_launch, order_by_rows(problem["q"], heads)

        def config_for(window, result):
            return mla_ampere.config_for(dtype, window, cache[0], result, pdl, rows, gpu.shared_bytes)

        return _plan(problem, mla_ampere, config_for, cache, arrays, vector_bytes, options)
    arrays |= {"gQ": _one_head(problem["q"], 2), "gRotary": _one_head(latent, 2), "gDescale": None}
    arrays |= {"page_size": problem.extents["seqlen_k"]} if "pages" in problem and tma is not None else {}

    def hopper_config_for(window, result):
        if tma is None:
            return mla_hopper.gather_config(dtype, False, window, cache[0], result)
        return mla_hopper.Config(LatentProducts(dtype), window, tma, result)

    return _plan(problem, mla_hopper, hopper_config_for, cache, arrays, vector_bytes, options)


@program(QUANTISED, no_gradient="attention.mla_decode has no gradient: attention.forward has")
def _mla_decode_fp8(problem: Problem, options: MlaOptions) -> Plan:
    """The Plan of a call of mla_decode on a cache of float8_e4m3fn or int8."""
    if problem("head_dim", "head_dim_v", "rotary_dim") != (COLUMNS, LATENT, ROTARY):
        rule = f"q must have {COLUMNS} columns, latents of one byte {LATENT}, and rotary {ROTARY}"
        raise problem.error("latent", rule, "q", "latent", "rotary")
    _check_heads(problem)
    vector_bytes = problem.bytes_at_once(*(name for name in ("q", "latent", "rotary", "out") if name in problem))
    chosen = choose_family(problem, options.family, vector_bytes == mla_hopper.VECTOR_BYTES)
    gpu, form = machine(problem.device), problem["latent"].form
    stored = DTYPES[form.dtype]
    if stored is fp8e4m3 and not gpu.target.has_fp8:
        raise ValueError(f"latent: float8_e4m3fn needs a GPU of compute capability 8.9 or later; latent is on {gpu}")
    if form.strides[-1] != 1 and form.extent:
        raise problem.error("latent", f"last axis must be contiguous: latent.strides={form.strides} bytes", "latent")
    if vector_bytes not in mla_fp8.VECTOR_SIZES:
        raise problem.error(
            "latent", "addresses and strides of latent, rotary, q and out must be multiples of 4 bytes", "latent"
        )
    dtype, rows, pdl = DTYPES[problem.dtype], math.prod(problem("seqlen_q", "heads")), gpu.target.has_early_launch
    arrays = {f"g{name.title()}": _one_head(problem[name], 2) for name in ("latent", "rotary")}
    arrays |= {"gQ": _one_head(problem["q"], 2), "gDescale": problem["descale"]}
    cache = select_loader(problem, vector_bytes, "latent")
    if stored is int8 and options.family == HOPPER_FAMILY:
        raise ValueError(f"family: must be None or 'sm_80' for latents of int8: family={options.family!r}")
    if stored is fp8e4m3 and chosen == HOPPER_FAMILY and (options.family is not None or rows > 2 * mla_fp8.TILE_ROWS):

        def hopper_config_for(window, result):
            return mla_hopper.gather_config(dtype, True, window, cache[0], result)

        return _plan(problem, mla_hopper, hopper_config_for, cache, arrays, vector_bytes, options)

    def config_for(window, result):
        return mla_fp8.config_for(dtype, window, cache[0], result, pdl, rows, gpu.shared_bytes, stored)

    return _plan(problem, mla_fp8, config_for, cache, arrays, vector_bytes, options)


def _plan(
    problem: Problem, kernels: Any, config_for: Callable, cache: tuple[DenseLoader, int, dict[str, Operand]],
    arrays: dict[str, Any], vector_bytes: int, options: MlaOptions,
) -> Plan:  # fmt: skip
    """The Plan of a call: the launch of attention and, if there are several splits, the one that merges their outputs. kernels:
    the kernel's module. config_for(window, result): its configuration. cache: see `select_loader`. arrays: its other
    arguments."""
    batch, tokens, heads = problem("batch", "seqlen_q", "heads")
    (_, max_keys, cache_args), (causal, splits, scale, return_lse, _) = cache, options
    out, lse = problem["out"], problem["lse"] if return_lse else None
    if 0 in (batch, tokens) or max_keys == 0:
        return Plan([Fill(x, value) for x, value in ((out, 0), (lse, -math.inf)) if x])
    dtype, gpu, rows, unit = DTYPES[problem.dtype], machine(problem.device), tokens * heads, resolve_scale(problem, scale)
    window, final = KeyWindow(False, causal and tokens > 1, False), FinalOutput(dtype, vector_bytes)
    key_args = {"lengths": problem["lengths"], "added": 0} | ({"right": 0} if window.right else {})
    config = config_for(window, PartialOutput(dtype, vector_bytes))
    row_tiles = -(-rows // config.tile_rows)
    tiles, places = -(-max_keys // config.kv), gpu.processors * config.ctas_per_sm
    split_count = choose_split_count(batch * row_tiles, tiles, places, MAX_CHOSEN_SPLITS) if splits is None else splits
    args = {"splits": split_count, "tokens": tokens, "group": heads, "scale": unit * LOG2_E}
    out_args: dict[str, Any] = {"out": _one_head(out, 2), "lse": lse and _one_head(lse, 1)}
    steps: list[Step] = []
    scratch: list[Any] = []
    if split_count == 1:
        config = config_for(window, final)
    else:
        partial_args, scratch = allocate_partials(problem, (split_count, batch, 1, rows), LATENT, False)
        combine_args, pdl = partial_args | args | out_args, config.overlaps_previous
        if split_count <= mla_combine.MAX_PARTS:
            combine_tiles, last = -(-rows // mla_combine.ROWS), mla_combine.Config(final, pdl)
            grid = batch * combine_tiles * mla_combine.SLABS
            steps.append(kernel_for(mla_combine, last, problem.device).bind(grid, row_tiles=combine_tiles, **combine_args))
        else:
            combine_args |= {"heads": 1, "sequences": batch}
            any_split = decode_combine.Config(dtype, Variant(), overlaps_previous=pdl)
            steps.append(combine_partials(problem, any_split, batch, rows, LATENT, combine_args))
        out_args = partial_args
    numbers = {"row_tiles": row_tiles, "sequences": batch, "slack": SLACK / (unit * LOG2_E)}
    first = kernel_for(kernels, config, problem.device)
    args |= arrays | numbers | cache_args | key_args | out_args
    return Plan([*plan_page_checks(problem), first.bind(batch * split_count * row_tiles, **args), *steps], scratch)


def _check_heads(problem: Problem) -> None:
    """ValueError: q has no heads."""
    if problem.extents["heads"] == 0:
        raise problem.error("q", "must have at least one head", "q")


def _select_tma(problem: Problem) -> latent_boxes.TmaLatents | None:
    """How latents are loaded by TMA; None if its boxes would be so small that gathering rows is faster."""
    if "pages" not in problem:
        return latent_boxes.TmaIndexedLatents() if "batch_index" in problem else latent_boxes.TmaLatents()
    rows = math.gcd(problem.extents["seqlen_k"], mla_hopper.KV)
    return latent_boxes.TmaPagedLatents(mla_hopper.KV // rows) if rows >= MIN_BOX_ROWS else None


def _one_head(operand: Operand, axis: int) -> Operand:
    """The operand with an axis of one key head inserted before `axis`."""
    form = operand.form
    shape, strides = form.shape, form.strides
    shape, strides = (*shape[:axis], 1, *shape[axis:]), (*strides[:axis], strides[axis - 1], *strides[axis:])
    return operand._replace(form=form._replace(shape=shape, strides=strides))
