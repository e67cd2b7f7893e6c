"""attention.mla_decode against float64, in both families, by one test body for the interpreter and the card."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from places import BF16, OnInterpreter
from poison import in_pages, poisoned, spoiled, unaligned

import attention
from attention import reference
from attention.cache import PagedCache
from attention.kernels.decode import mla_ampere, mla_combine, mla_fp8, mla_hopper
from attention.parts.decode.latent_shape import COLUMNS, LATENT, ROTARY
from attention.public import mla_decoding
from tiles import fp8e4m3, int8
from tiles.targets import parse_target

FP16, SCALE = np.dtype(np.float16), 192**-0.5
FAMILIES = "sm_80", "sm_90", "fp8", "fp8 sm_80"
ULP = 2.0**-23  # of float32


def draw(shape, dtype=BF16, seed=7):
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def case(lengths, tokens=1, heads=16, room=None, dtype=BF16):
    """(q, latent) of sequences of these lengths; NaN after each length."""
    batch, room = len(lengths), room or max(*lengths, 1)
    latent = draw((batch, room, COLUMNS), dtype)
    unused = np.arange(room) >= np.array(lengths)[:, None]
    return draw((batch, tokens, heads, COLUMNS), dtype, seed=8), spoiled(latent, unused)  # other numbers than keys


def quantise(latent, stored=fp8e4m3):
    """((the latents in fp8 or int8, their descales, the rotated columns), the same dequantised in float32)"""
    latents = latent[..., :LATENT].astype(np.float32)
    descale = np.abs(latents).max(-1) / stored.ends[1]
    latent_fp8 = stored.round(latents / descale[..., None]).astype(stored.np)
    meant = np.concatenate([latent_fp8.astype(np.float32) * descale[..., None], latent[..., LATENT:].astype(np.float32)], -1)
    return (latent_fp8, descale, np.ascontiguousarray(latent[..., LATENT:])), meant


def known(q, latent, lengths, causal):
    """[(out, lse)] of the reference in float64, and of the one that rounds as q's dtype does, a sequence at a time."""
    found = []
    for formula in (reference.forward, reference.forward_low):
        keys = [latent[b : b + 1, :n, None] for b, n in enumerate(lengths)]
        keys = keys if formula is reference.forward else [k.astype(q.dtype) for k in keys]
        outs = [formula(q[b : b + 1], k, k[..., :LATENT], causal=causal, scale=SCALE) for b, k in enumerate(keys)]
        found.append([np.concatenate(x) for x in zip(*outs)])
    return found


def agree(place, q, latent, lengths, *, size=None, splits=None, causal=True, family=None):
    """Run and judge by the rule: out and lse against float64, no NaN, every element written. family: "fp8" is Hopper's kernel
    of a quantised cache, "fp8 sm_80" and "int8 sm_80" the other one."""
    cache, kwargs = (latent,), {"lengths": np.array(lengths, np.int32)}
    narrow = family is not None and ("fp8" in family or "int8" in family)
    if narrow:
        cache, latent = quantise(latent, int8 if "int8" in family else fp8e4m3)
    if size is not None:
        cache, kwargs["pages"] = in_pages(cache, lengths, size)
    if narrow:
        family, (kwargs["descale"], kwargs["rotary"]) = "sm_80" if "sm_80" in family else "sm_90", cache[1:]
    kwargs = {name: place.put(x) for name, x in kwargs.items()}
    out = place.put(poisoned((*q.shape[:-1], LATENT), q.dtype))
    kwargs |= {"scale": SCALE, "splits": splits, "causal": causal, "family": family}
    actual, lse = attention.mla_decode(place.put(q), place.put(cache[0]), out=out, return_lse=True, **kwargs)
    assert actual is out
    (ref, ref_lse), (low, low_lse) = known(q, latent, lengths, causal)
    reference.assert_close(place.get(out), ref, low)
    with np.errstate(invalid="ignore"):
        lost = np.nanmax(np.abs(low_lse - ref_lse), initial=0)
    # Tensor cores cut off what is too small, in each of 36 steps of 16 columns.
    np.testing.assert_allclose(place.get(lse), ref_lse, rtol=32 * ULP, atol=3 * lost + 8 * ULP)
    return place.get(out), place.get(lse)


@pytest.mark.smoke
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [(0, 1, 63), (64, 65, 129)])
def test_lengths_around_every_edge(place, lengths, family):
    """Edges of tiles and splits, some of which have no keys; a sequence may have none, and a token see none."""
    splits = 1 + (0 in lengths)
    agree(place, *case(lengths, 2, 16 // splits, 140), lengths, splits=splits, family=family)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("heads", "tokens"), [(1, 1), (5, 4), (128, 1)])
def test_heads_and_tokens_are_rows(heads, tokens, family):
    """One to eight tiles of rows; tokens before the first key see none."""
    agree(OnInterpreter(), *case((2, 67), tokens, heads), (2, 67), splits=tokens, family=family)


@pytest.mark.parametrize(
    ("family", "size"),
    [("sm_80", 1), ("sm_90", 128), ("sm_90", 1), ("sm_90", 20), ("fp8", 1), ("fp8", 64), ("fp8 sm_80", 24), ("int8 sm_80", 24)],
)
def test_pages(place, family, size):
    """Pages in any order, NaN in unused rows: the same bits as without pages if tiles are the same, as with 18 rows."""
    q, latent = case((130, 0), 2, 9)
    paged, _ = agree(place, q, latent, (130, 0), size=size, splits=2, family=family)
    np.testing.assert_array_equal(paged, agree(place, q, latent, (130, 0), splits=2, family=family)[0])


@pytest.mark.parametrize(("family", "size"), [("sm_80", 24), ("sm_90", 32), ("sm_90", 40), ("sm_90", 7), ("fp8", 100)])
def test_pages_of_any_size(family, size):
    agree(OnInterpreter(), *case((160, 0), 2, 9), (160, 0), size=size, splits=2, family=family)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_that_see_later_ones_and_fp16(family):
    agree(OnInterpreter(), *case((66, 2), 3, dtype=FP16), (66, 2), causal=False, family=family)


def test_many_splits(place):
    """More than mla_combine.MAX_PARTS: decode_combine.py merges them."""
    agree(place, *case((200, 5), 2, 3), (200, 5), splits=mla_combine.MAX_PARTS + 1, family="sm_80")


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_batch_index(family):
    """Sequences are any batches of a larger cache; the others hold NaN. Rows of the cache may have any stride."""
    place = OnInterpreter()
    q, latent = case((70, 20))
    latent_fp8 = poisoned((5, 70, COLUMNS + 8), BF16)
    latent_fp8[[3, 1], :, :COLUMNS] = latent
    kwargs = {"lengths": place.put(np.array([70, 20])), "batch_index": place.put(np.array([3, 1], np.int32))}
    actual = attention.mla_decode(place.put(q), place.put(latent_fp8)[..., :COLUMNS], scale=SCALE, family=family, **kwargs)
    np.testing.assert_array_equal(place.get(actual), agree(place, q, latent, (70, 20), family=family)[0])


def test_rows_that_begin_anywhere():
    """Rows at any even byte: what TMA cannot address, mla_ampere.py's kernel reads."""
    place = OnInterpreter()
    q, latent = case((40,))
    wide = unaligned(latent, 1, 8).base
    actual = attention.mla_decode(
        place.put(q), place.put(wide)[..., 1 : 1 + COLUMNS], lengths=place.put(np.array([40])), scale=SCALE
    )
    np.testing.assert_array_equal(place.get(actual), agree(place, q, latent, (40,), family="sm_80")[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_given_split_has_the_same_bits_always(place, family):
    """Alone, and among other sequences in a larger cache: splits have several tiles, the last one fewer or none."""
    q, latent = case((400, 200))
    several = agree(place, q, latent, (400, 200), splits=3, family=family)
    for n, length in enumerate((400, 200)):
        single_sequence = agree(place, q[n : n + 1], latent[n : n + 1, :length], (length,), splits=3, family=family)
        for x, y in zip(several, single_sequence):
            np.testing.assert_array_equal(x[n : n + 1], y)


def test_a_given_split_has_the_same_kernel_always(monkeypatch):
    """Whatever other sequences there are, and however large the cache is: planned for many GPUs, without a device."""
    torch = pytest.importorskip("torch")
    from planned_launches import GPUS, made, noted

    def kernels(gpu, batch, room, tokens, heads, narrow, parts):
        q, latent = made((batch, tokens, heads, COLUMNS), "bfloat16"), made((batch, room, COLUMNS), "bfloat16")
        kwargs = {"lengths": torch.full((batch,), room), "scale": SCALE, "splits": parts}
        if narrow:
            kwargs |= {"rotary": latent[..., LATENT:].contiguous(), "descale": made((batch, room), "float32")}
            latent = made((batch, room, LATENT), "float8_e4m3fn")
        with noted(monkeypatch, gpu) as found:
            attention.mla_decode(q, latent, **kwargs)
        return [(x.config, x.kernel_args["splits"]) for x in found]

    for gpu, tokens, heads, narrow, parts in itertools.product(GPUS, (1, 2), (1, 16, 128), (False, True), (1, 3, 70)):
        if narrow and not GPUS[gpu]["target"].has_fp8:
            continue
        one, *others = [kernels(gpu, *of, tokens, heads, narrow, parts) for of in ((1, 5000), (64, 5000), (2, 300))]
        assert one and all(other == one for other in others), f"{gpu}, {tokens} tokens, {heads} heads, splits={parts}"


@pytest.mark.parametrize("family", FAMILIES)
def test_splits_without_keys(family):
    """Splits of short sequences may have no keys: uninitialised scratch memory must not reach the sum."""
    agree(OnInterpreter(), *case((3,), heads=2, room=140), (3,), splits=3, family=family)


def test_empty():
    q, latent = np.zeros((2, 1, 4, COLUMNS), BF16), np.zeros((2, 0, COLUMNS), BF16)
    out, lse = attention.mla_decode(q, latent, lengths=np.zeros(2, np.int32), scale=1.0, return_lse=True)
    assert (out == 0).all() and (lse == -np.inf).all()


@settings(max_examples=4, deadline=None)
@given(
    st.integers(0, 150), st.integers(1, 3), st.integers(1, 40), st.integers(1, 3), st.sampled_from([None, 1, 8, 16, 24]),
    st.booleans(), st.sampled_from(FAMILIES),
)  # fmt: skip
def test_random_problems(length, tokens, heads, splits, size, causal, family):
    agree(OnInterpreter(), *case((length,), tokens, heads), (length,), size=size, splits=splits, causal=causal, family=family)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=5), st.integers(1, 8), st.integers(2, 8), st.booleans())
def test_random_problems_on_the_card(card, family, lengths, heads, splits, paged):
    """Random lengths, heads and splits, for kernels that other tests compile as well."""
    size = {"sm_80": 1, "sm_90": 128, "fp8": 1, "fp8 sm_80": 24}[family] if paged else None
    agree(card, *case(lengths, 2, heads), lengths, size=size, splits=splits, family=family)


@pytest.mark.parametrize(
    ("arch", "family", "size"),
    [
        pytest.param("sm_89", "fp8 sm_80", 16, marks=pytest.mark.release),
        pytest.param("sm_90a", "sm_90", 32, marks=pytest.mark.release),
        ("sm_90a", "sm_90", 1),
        ("sm_90a", "fp8", 1),
    ],
)
def test_as_compiled(as_compiled, arch, family, size):
    """The compiled PTX, run by the emulator."""
    as_compiled(arch)
    agree(OnInterpreter(), *case((70,), 2, 3), (70,), size=size, splits=1, family=family)


@pytest.mark.gpu
def test_a_graph_serves_sequences_as_they_grow(card):
    """A CUDA graph is captured once and replayed as lengths grow."""
    torch = pytest.importorskip("torch")
    q, latent = case((300, 300), 2)
    lengths, inputs = torch.zeros(2, dtype=torch.int32, device="cuda"), [card.put(x) for x in (q, latent)]
    attention.mla_decode(*inputs, lengths=lengths, scale=SCALE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.mla_decode(*inputs, lengths=lengths, scale=SCALE)
    for now in ((1, 5), (64, 200), (300, 299)):
        lengths.copy_(torch.tensor(now))
        graph.replay()
        (ref, _), (low, _) = known(q, latent, now, causal=True)
        reference.assert_close(card.get(out), ref, low)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_every_shape_fits(arch):
    """A block's shared memory is large enough for each shape."""
    for module in mla_ampere, mla_hopper, mla_fp8:
        for config in module.space(parse_target(arch), False):
            _, smem = module.make(config)
            assert smem.nbytes <= parse_target(arch).shared_bytes


# ---- refused ---------------------------------------------------------------------------------------------------------
def refused(error, words, /, lengths=(5,), scale=1.0, **more):
    q, latent = case((5,))
    with pytest.raises(error, match=words):
        attention.mla_decode(**{"q": q, "latent": latent, "lengths": np.array(lengths), "scale": scale} | more)


def test_mistakes_name_the_argument():
    table = np.zeros((1, 1), np.int32)
    refused(ValueError, "^lengths: must be from 0 to 5", lengths=(6,))
    refused(ValueError, "^lengths: batch must equal q's", lengths=(5, 5))
    refused(ValueError, "^latent: batch must equal q's unless pages or batch_index is passed", latent=draw((2, 5, COLUMNS)))
    refused(ValueError, "^latent: head_dim must equal q's", latent=draw((1, 5, 512)))
    refused(ValueError, "^q: must have 576 columns", q=draw((1, 1, 2, 64)), latent=draw((1, 5, 64)))
    refused(ValueError, "^q: must have at least one head", q=draw((1, 1, 0, COLUMNS)))
    refused(ValueError, "^out: must have 512 columns: out.shape=", out=draw((1, 1, 16, COLUMNS)))
    refused(TypeError, "^lengths: dtype must be one of", lengths=(5.0,))
    refused(ValueError, "^batch_index: must be None where pages is passed", pages=table, batch_index=np.zeros(1, np.int32))
    refused(ValueError, "^lengths: must be from 0 to 5", pages=table, lengths=(6,))
    refused(ValueError, "^splits: must be from 1 to 1024", splits=0)
    refused(TypeError, "^scale: must be a number", scale=None)
    refused(ValueError, "^scale: must be positive", scale=0.0)


def test_mistakes_about_a_quantised_cache_name_the_argument():
    (latent_fp8, descale, rotary), _ = quantise(case((5,))[1])
    fp8 = {"latent": latent_fp8, "descale": descale, "rotary": rotary}
    refused(TypeError, "^rotary: must be passed together with descale", latent=latent_fp8, descale=descale)
    refused(TypeError, "^descale: must be passed together with rotary", latent=latent_fp8, rotary=rotary)
    refused(TypeError, "^latent: dtype must be one of", **fp8 | {"latent": draw((1, 5, LATENT))})
    latent_int8 = np.zeros((1, 5, LATENT), np.int8)
    refused(TypeError, "^latent: .* latents of one byte, .* are passed with rotary= and descale=", latent=latent_int8)
    refused(ValueError, "^family: must be None or 'sm_80'", family="sm_90", **fp8 | {"latent": latent_int8})
    whole = np.concatenate([latent_fp8, latent_fp8[..., :ROTARY]], -1)
    refused(
        TypeError,
        "^latent: in float8_e4m3fn must have 512 columns; pass rotary= and descale=, too: .*576",
        latent=whole,
    )
    refused(ValueError, "^latent: q must have 576 columns", **fp8 | {"rotary": draw((1, 5, 2 * ROTARY))})
    refused(ValueError, "^descale: sequence must equal latent's", **fp8 | {"descale": descale[:, :4]})
    refused(
        ValueError,
        "^latent: last axis must be contiguous",
        **fp8 | {"latent": np.zeros((1, 5, 1024), latent_fp8.dtype)[..., ::2]},
    )
    apart = {"rotary": np.zeros((1, 5, ROTARY + 2), BF16)[..., :ROTARY]}
    refused(ValueError, "^family: sm_90 takes addresses and positive strides", family="sm_90", **fp8 | apart)


def test_parts_of_one_array_of_bytes():
    """Rows of 656 bytes: 512 of latents, 4 of the descale, 12 unused, 128 of rotated columns."""
    q, latent = case((40,))
    (latent_fp8, descale, rotary), _ = quantise(latent)
    rows = np.full((1, 40, 656), 0x7F, np.uint8)
    rows[..., :512], rows[..., 512:516], rows[..., 528:] = (
        latent_fp8.view(np.uint8),
        descale[..., None].view(np.uint8),
        rotary.view(np.uint8),
    )
    cut = (
        rows[..., :512].view(latent_fp8.dtype),
        rows[..., 512:516].view(np.float32)[..., 0],
        rows[..., 528:].view(rotary.dtype),
    )
    lengths = np.array([40])
    actual = attention.mla_decode(q, cut[0], descale=cut[1], rotary=cut[2], lengths=lengths, scale=SCALE)
    np.testing.assert_array_equal(actual, agree(OnInterpreter(), q, latent, (40,), family="fp8 sm_80")[0])


def test_arguments_are_documented():
    for name in mla_decoding.MLA_DECODE.names + mla_decoding.QUANTISED.names:
        assert name in attention.mla_decode.__doc__


def test_latents_are_appended_as_keys_and_values_of_one_head():
    """Into a cache, and into a pool by a PagedCache: the same rows, rotated, and the same output."""
    angles = np.arange(64)[:, None] * 10_000.0 ** (-np.arange(32) / 32)
    rotary = np.cos(angles, dtype=np.float32), np.sin(angles, dtype=np.float32)
    new, q = draw((1, 21, 1, COLUMNS)), draw((1, 1, 16, COLUMNS))
    views = lambda latent: (latent[:, :, None, LATENT:], latent[:, :, None, :LATENT])
    latent, pool = np.zeros((1, 40, COLUMNS), BF16), np.zeros((5, 16, COLUMNS), BF16)
    start = np.array([3], np.int32)
    attention.append(*views(latent), new[..., LATENT:], new[..., :LATENT], lengths=start, rotary=rotary)
    assert (latent[0, 3:24, :LATENT] == new[0, :, 0, :LATENT]).all() and not latent[0, :3].any() and not latent[0, 24:].any()

    cache = PagedCache([views(pool)], sequences=2, tokens=40)
    sequence = cache.add()
    cache.append([sequence], np.zeros((1, 3, 1, ROTARY), BF16), np.zeros((1, 3, 1, LATENT), BF16))
    cache.append([sequence], new[..., LATENT:], new[..., :LATENT], rotary=rotary)
    pages, lengths, _ = cache.tables([sequence])
    paged = attention.mla_decode(q, pool, lengths=lengths, pages=pages, scale=SCALE)
    assert lengths[0] == 24 and (paged == attention.mla_decode(q, latent, lengths=lengths, scale=SCALE)).all()
