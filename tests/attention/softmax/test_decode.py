"""attention.decode against float64, by one test body for the interpreter and the card."""

import itertools

import numpy as np
import pytest
from decode_checks import FP8, agree, case, known
from forward_checks import draw
from hypothesis import given, settings
from hypothesis import strategies as st
from places import BF16, OnCard, OnInterpreter, random_on_the_card
from poison import Packing, as_on_a_device, edges, poisoned

import attention
from attention import reference
from attention.kernels.decode import decode_ampere, decode_hopper
from attention.parts.decode import splits
from attention.plans.decode import decode_launches
from attention.public import decoding
from tiles.targets import LARGE, parse_target

FP16 = np.dtype(np.float16)
EDGES = [(0, 1, 63), (64, 65, 127), (128, 129, 200)]


@pytest.mark.smoke
@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize("lengths", EDGES)
def test_lengths_around_every_edge(place, lengths, splits):
    """Edges of tiles and of splits, some of which have no keys; a sequence may have none."""
    agree(place, *case(lengths, head_dim=128, room=210), lengths, splits=splits)


@pytest.mark.parametrize(("batch", "tokens", "options"), [(1, 1, {}), (3, 3, {"window": (70, 0), "leftpad": (0, 9, 90)})])
def test_whole_caches(place, batch, tokens, options):
    """lengths=None gives the same bits as lengths that fill the caches."""
    arrays = [place.put(x) for x in case((100,) * batch, tokens, 2, 1)]
    kwargs = {name: place.put(np.array(x)) if name == "leftpad" else x for name, x in options.items()} | {"return_lse": True}
    found = attention.decode(*arrays, lengths=None, splits=2, **kwargs)
    wanted = attention.decode(*arrays, lengths=place.put(np.full(batch, 100)), splits=2, **kwargs)
    for x, y in zip(found, wanted):
        np.testing.assert_array_equal(place.get(x), place.get(y))
    found, wanted = (place.get(x).astype(np.float32) for x in (attention.decode(*arrays, lengths=None, **kwargs)[0], wanted[0]))
    np.testing.assert_allclose(found, wanted, atol=2**-6)


@pytest.mark.parametrize("name", ["pages", "batch_index"])
def test_whole_caches_by_tables(name):
    """lengths=None with pages or batch_index: all entries are in use, and must exist."""
    q, k, v = case((32, 32), 1, 2, 1, room=16)
    numbers = np.array([[1, 0], [0, 1]] if name == "pages" else [1, 0], np.int32)
    wanted = np.full(2, 32 if name == "pages" else 16)
    found = [attention.decode(q, k, v, lengths=lengths, splits=2, **{name: numbers}) for lengths in (None, wanted)]
    np.testing.assert_array_equal(*found)
    numbers.flat[-1] = 2
    with pytest.raises(ValueError, match=rf"{name}: must be from 0 to 1 where keys are in use: {name}\[.*\]=2, lengths=None"):
        attention.decode(q, k, v, lengths=None, **{name: numbers})


def test_many_sequences_of_very_different_lengths(place):
    """More sequences than a warp's lanes, and than stream-K has shares."""
    lengths = (1, 700, *[1, 0, 130, 64, 3] * 7, 65)
    agree(place, *case(lengths, 1, 2, 1), lengths)
    agree(place, *case((1, 1000, 2), 3, 2, 2), (1, 1000, 2), window=(300, 0), leftpad=(0, 600, 1))


@pytest.mark.parametrize("tokens", [2, 4])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (5, 1), (12, 2), (18, 1)])
def test_heads_and_tokens_are_rows(place, heads, kv_heads, tokens):
    """One to five tiles of 16 or 32 rows; tokens before the first key see none."""
    agree(place, *case((2, 70), tokens, heads, kv_heads), (2, 70), splits=tokens - 1, family="sm_80")


TALL = [  # lengths, tokens, heads, options: more than 32 rows a key head
    ((130, 0, 65), 8, 16, {}),
    ((2, 200), 9, 16, {"splits": 2}),
    ((200, 3, 64), 8, 10, {"window": (70, 0), "leftpad": (0, 1, 9), "causal": False}),
]


@pytest.mark.parametrize(("size", "window"), [(None, None), (64, None), (24, None), (None, (70, 0))])
def test_lengths_around_every_edge_of_tiles_of_64(place, size, window):
    """NaN after each length, and before windows."""
    lengths = edges(decode_hopper.KV, 2 * decode_hopper.KV)
    agree(place, *case(lengths, 3, 2, 1), lengths, size=size, window=window, splits=2 - (size is None), family="sm_90")


@pytest.mark.parametrize(("problem", "size"), [*zip(itertools.cycle(TALL), [None, 1, 16, 64, 16, 64])])
def test_many_rows_go_to_tiles_of_64(place, problem, size):
    """Two consumers take every other tile of keys, which TMA loads, or cp.async if a tile has several pages or begins within
    one."""
    lengths, tokens, heads, options = problem
    agree(place, *case(lengths, tokens, heads, first=options.get("leftpad")), lengths, size=size, **options)


def test_score_options_in_tiles_of_64():
    """Rows of a tile belong to different heads, each with its own slope and sink. And a batch_index."""
    slopes, sink = draw((2, 10), np.float32) ** 2, draw((10,), np.float32)
    kwargs = {"alibi": slopes, "sink": sink, "softcap": 5.0, "scale": 0.3}
    agree(OnInterpreter(), *case((100, 5), 8, 10, value_dim=128), (100, 5), **kwargs)
    q, k, v = case((100, 5), 8, 10)
    caches = [poisoned((3, *x.shape[1:]), x.dtype) for x in (k, v)]
    for cache, x in zip(caches, (k, v)):
        cache[[2, 0]] = x
    actual = attention.decode(q, *caches, lengths=np.array([100, 5]), batch_index=np.array([2, 0]), family="sm_90")
    np.testing.assert_array_equal(actual, agree(OnInterpreter(), q, k, v, (100, 5))[0])


@pytest.mark.parametrize(("head_dim", "value_dim", "size"), [(96, 128, 40), (192, 192, None), (256, 256, None)])
def test_every_head_dim_in_tiles_of_64(place, head_dim, value_dim, size):
    """Also in pages the last of which is full, where the table ends: no entry is looked up after it."""
    lengths = (70, 120)
    agree(place, *case(lengths, 2, head_dim=head_dim, value_dim=value_dim, dtype=FP16), lengths, size=size, family="sm_90")


@pytest.mark.parametrize(
    ("head_dim", "size"), [(64, None), (96, None), (128, None), (128, 64), (128, 16), (192, None), (256, None)]
)
def test_rings_wrap_around(head_dim, size):
    """One block's keys fill each ring more than twice: no consumer confuses two phases of the same parity, in whatever order
    TMA's tiles arrive."""
    keys = decode_hopper.KV * (2 * max(decode_hopper.STAGES.values()) + 1)
    agree(OnInterpreter(), *case((keys,), 2, 2, 1, head_dim=head_dim), (keys,), size=size, splits=1, family="sm_90")


@pytest.mark.parametrize("head_dim", [8, 72, 96, 192, 256])
def test_every_head_dim(place, head_dim):
    agree(place, *case((50,), 2, head_dim=head_dim), (50,), splits=2)


def test_values_of_another_width_and_fp16(place):
    agree(place, *case((90, 3), 1, head_dim=64, value_dim=136, dtype=FP16), (90, 3), splits=2)


@pytest.mark.parametrize("size", [1, 16, 40, 64, 128])
def test_pages(place, size):
    """Pages in any order, NaN in unused rows: the same bits as without pages."""
    lengths = (130, 0, 65)
    q, k, v = case(lengths, 2, head_dim=64)
    np.testing.assert_array_equal(
        agree(place, q, k, v, lengths, size=size, splits=2)[0], agree(place, q, k, v, lengths, splits=2)[0]
    )


@pytest.mark.parametrize("window", [(20, None), (0, 0), (70, 1), (None, 2)])
@pytest.mark.parametrize("causal", [True, False])
def test_windows(place, window, causal):
    agree(place, *case((150, 7), 3), (150, 7), window=window, causal=causal, splits=2)
    agree(place, *case((150,)), (150,), window=window, causal=causal)


@pytest.mark.parametrize(("tokens", "size"), [(64, None), (70, 16), (100, 5), (130, 64), (4, 16)])
def test_windows_of_many_tokens(place, tokens, size):
    """By forward's kernels: keys before all windows are not multiplied, and their pages are not read."""
    agree(place, *case((131, 304), tokens), (131, 304), window=(20, 0), size=size)


def test_nan_reaches_the_output_from_every_split(place):
    """A NaN in a key, in a value, in a sink."""
    q, k, v = case((200, 200, 200), head_dim=64)
    k[0, 150], v[1, 150] = np.nan, np.nan
    kwargs = {"lengths": place.put(np.array([200, 200, 200], np.int32)), "splits": 3}
    out = place.get(attention.decode(*map(place.put, (q, k, v)), **kwargs)).astype(np.float32)
    assert np.isnan(out[:2]).all() and not np.isnan(out[2]).any()
    sink = place.put(np.array([np.nan, 0, 0, 0], np.float32))
    out = place.get(attention.decode(*map(place.put, (q, k, v)), sink=sink, **kwargs)).astype(np.float32)
    assert np.isnan(out[2, :, 0]).all() and not np.isnan(out[2, :, 1:]).any()


def test_tokens_that_see_later_ones(place):
    agree(place, *case((66, 2), 3), (66, 2), causal=False)


@pytest.mark.parametrize("splits", [1, 2])
def test_score_options(place, splits):
    """Rows of a tile belong to different heads, each with its own slope and sink."""
    slopes = np.array([[0.5, 0.1, 0.02, 0.3], [0.4, 0.0, 0.01, 0.2]], np.float32)
    sink = np.array([0.5, -3.0, 20.0, 1.0], np.float32)
    agree(place, *case((100, 0), 2), (100, 0), softcap=5.0, alibi=slopes, sink=sink, scale=0.3, splits=splits)
    agree(place, *case((100, 30), 1), (100, 30), alibi=slopes[0], splits=splits)


@pytest.mark.parametrize("size", [None, 16])
def test_padding_on_the_left(place, size):
    lengths, leftpad = (100, 70, 5), (37, 0, 5)
    agree(place, *case(lengths, 2, first=leftpad), lengths, leftpad=leftpad, size=size, splits=2)


def test_batch_index(place):
    """Sequences are any batches of a larger cache; the others hold NaN."""
    lengths = (70, 20)
    q, k, v = case(lengths)
    caches = [poisoned((5, *x.shape[1:]), x.dtype) for x in (k, v)]
    for cache, x in zip(caches, (k, v)):
        cache[[3, 1]] = x
    given = [place.put(x) for x in (q, *caches)]
    kwargs = {"lengths": place.put(np.array(lengths)), "batch_index": place.put(np.array([3, 1], np.int32))}
    actual = attention.decode(*given, **kwargs)
    np.testing.assert_array_equal(place.get(actual), agree(place, q, k, v, lengths)[0])


def test_layouts_and_strides(place):
    """layout="bhsd", and rows that begin at any even byte."""
    lengths = (70, 20)
    q, k, v = case(lengths, 2)
    kwargs = {"lengths": place.put(np.array(lengths, np.int32)), "splits": 2}
    wanted, _ = agree(place, q, k, v, lengths, splits=2)
    transposed = [place.put(np.ascontiguousarray(x.transpose(0, 2, 1, 3))) for x in (q, k, v)]
    np.testing.assert_array_equal(
        place.get(attention.decode(*transposed, layout="bhsd", **kwargs)).transpose(0, 2, 1, 3), wanted
    )
    for past in (1, 2, 4):
        wide = [np.full((*x.shape[:-1], x.shape[-1] + 8 + past), np.nan, x.dtype) for x in (q, k, v)]
        for x, root in zip((q, k, v), wide):
            root[..., past : past + 64] = x
        cut = [place.put(root)[..., past : past + 64] for root in wide]
        np.testing.assert_array_equal(place.get(attention.decode(*cut, **kwargs)), wanted)


def test_a_given_split_has_the_same_bits_always(place):
    """Alone, and among other sequences in a larger cache; other numbers of splits differ by rounding alone."""
    q, k, v = case((384, 200))
    several = agree(place, q, k, v, (384, 200), splits=3)
    single_sequence = agree(place, q[:1], k[:1, :384], v[:1, :384], (384,), splits=3)
    for x, y in zip(several, single_sequence):
        np.testing.assert_array_equal(x[:1], y)
    for parts in (1, 2, 7):
        agree(place, q, k, v, (384, 200), splits=parts)


def test_a_given_split_has_the_same_kernel_always(monkeypatch):
    """Whatever other sequences there are, and however large the cache is: planned for many GPUs, without a device."""
    torch = pytest.importorskip("torch")
    from planned_launches import GPUS, made, noted

    def kernels(gpu, batch, room, tokens, heads, dim, parts):
        q, k = (made((batch, n, h, dim), "bfloat16") for n, h in zip((tokens, room), heads))
        with noted(monkeypatch, gpu) as found:
            attention.decode(q, k, k, lengths=torch.full((batch,), room), splits=parts)
        return [(type(x.config), x.config.kv, x.kernel_args.get("splits")) for x in found if hasattr(x.config, "kv")]

    heads, dims = ((8, 1), (8, 2), (4, 4)), (64, 128, 256)
    for gpu, tokens, h, dim, parts in itertools.product(GPUS, (1, 4, 40, 200), heads, dims, (1, 3)):
        one, *others = [kernels(gpu, *of, tokens, h, dim, parts) for of in ((1, 5000), (64, 5000), (2, 300))]
        assert all([other == one for other in others]), f"{tokens} tokens, {h} heads of {dim}, splits={parts}: {one} {others}"


def test_splits_without_keys():
    """Splits of short sequences may have no keys: uninitialised scratch memory must not reach the sum."""
    agree(OnInterpreter(), *case((3, 67), head_dim=88, room=210), (3, 67), splits=3)


def test_the_output_in_place_of_the_queries(place):
    q, k, v = case((70,), 2)
    wanted, _ = agree(place, q, k, v, (70,), splits=2)
    cache = place.put(q.copy())
    kwargs = {"lengths": place.put(np.array([70])), "splits": 2}
    assert attention.decode(cache, place.put(k), place.put(v), out=cache, **kwargs) is cache
    np.testing.assert_array_equal(place.get(cache), wanted)


@pytest.mark.parametrize("tokens", [0, 1])
def test_empty(tokens):
    q, k = np.zeros((2, tokens, 4, 64), BF16), np.zeros((2, 0, 2, 64), BF16)
    out, lse = attention.decode(q, k, k, lengths=np.zeros(2, np.int32), return_lse=True)
    assert (out == 0).all() and (lse == -np.inf).all()


@pytest.mark.parametrize(("tokens", "heads", "splits"), [((0, 1, 15, 16, 17), 2, 2), ((4, 0), 4, 1), ((70, 3, 64), 4, None)])
def test_packed_tokens_around_every_tile_edge(place, tokens, heads, splits, monkeypatch):
    """Each sequence is as if alone, whatever its neighbours hold; 0 and -inf after the last one. With many tokens by forward's
    kernels."""
    as_on_a_device(monkeypatch)
    packing = Packing(tokens, nobodys=40)
    lengths = [x for n in tokens for x in (1, n + 40)]
    q = draw((1, int(packing.cu_seqlens[-1]), heads, 64), BF16)
    _, k, v = case(lengths)
    for x in (k, v):
        x[::2] = poisoned((), x.dtype)  # of the neighbours
    kwargs = {"cu_seqlens": packing.ends, "lengths": np.array(lengths, np.int32)}
    put = [place.put(x) for x in (packing.spread(q), k, v)]
    kwargs = {name: place.put(x) for name, x in kwargs.items()} | {"splits": splits}
    out, lse = map(place.get, attention.decode(*put, return_lse=True, **kwargs))
    assert (out[:, packing.nobodys].astype(float) == 0).all() and (lse[:, :, packing.nobodys] == -np.inf).all()
    for n, (first, end) in enumerate(itertools.pairwise(packing.cu_seqlens)):
        of = q[:, first:end], *(x[2 * n + 1 :, : lengths[2 * n + 1]][:1] for x in (k, v))
        (ref, ref_lse), (low, _) = (f(*of, causal=True) for f in (reference.forward, reference.forward_low))
        reference.assert_close(packing.gather(out)[:, first:end], ref, low)
        np.testing.assert_allclose(packing.gather(lse, 2)[:, :, first:end], ref_lse, atol=1e-4)


@settings(max_examples=6, deadline=None)
@given(
    st.lists(st.integers(0, 150), min_size=1, max_size=2), st.integers(1, 3), st.integers(1, 2), st.integers(1, 7),
    st.integers(1, 4), st.integers(1, 16), st.sampled_from([None, 1, 16, 24]), st.booleans(), st.sampled_from([BF16, FP16]),
)  # fmt: skip
def test_random_problems(lengths, tokens, kv_heads, group, splits, eighths, size, causal, dtype):
    inputs = case(lengths, tokens, group * kv_heads, kv_heads, 8 * eighths, dtype=dtype)
    agree(OnInterpreter(), *inputs, lengths, size=size, splits=splits, causal=causal)


@random_on_the_card
@given(
    st.lists(st.integers(0, 3000), min_size=1, max_size=5), st.integers(1, 12), st.integers(1, 3), st.integers(1, 8),
    st.sampled_from([None, 1, 2, 9]), st.integers(1, 32), st.sampled_from([None, 1, 16, 24, 256]), st.booleans(),
    st.sampled_from([BF16, FP16]),
)  # fmt: skip
def test_random_problems_on_the_card(lengths, tokens, kv_heads, group, splits, eighths, size, causal, dtype):
    pytest.importorskip("torch")
    inputs = case(lengths, tokens, group * kv_heads, kv_heads, 8 * eighths, dtype=dtype)
    agree(OnCard(), *inputs, lengths, size=size, splits=splits, causal=causal)


AS_COMPILED = [
    ("sm_90a", 16, None, None),
    pytest.param("sm_90a", None, None, "sm_90", marks=pytest.mark.release),  # packed: test_decode_appends.py
    pytest.param("sm_80", None, 1, None, marks=pytest.mark.release),
    pytest.param("sm_90a", 5, 1, "sm_90", marks=pytest.mark.release),
]


@pytest.mark.parametrize(("arch", "size", "splits", "family"), AS_COMPILED)
def test_as_compiled(as_compiled, arch, size, splits, family):
    """The compiled PTX, run by the emulator."""
    as_compiled(arch)
    lengths = (70,) if splits else (70, 3)
    agree(OnInterpreter(), *case(lengths, 2, 3, 1), lengths, size=size, splits=splits, family=family)


@pytest.mark.gpu
def test_a_graph_serves_sequences_as_they_grow(card):
    """A CUDA graph is captured once and replayed as lengths grow."""
    torch = pytest.importorskip("torch")
    q, k, v = case((300, 300), head_dim=128)
    lengths, given = torch.zeros(2, dtype=torch.int32, device="cuda"), [card.put(x) for x in (q, k, v)]
    attention.decode(*given, lengths=lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.decode(*given, lengths=lengths)
    for now in ((1, 5), (64, 200), (300, 299)):
        lengths.copy_(torch.tensor(now))
        graph.replay()
        (ref, _), (low, _) = known(q, k, v, now, causal=True)
        reference.assert_close(card.get(out), ref, low)


@pytest.mark.parametrize(
    ("head_dim", "size", "more"), [(128, None, {}), (64, 16, {"window": (20, 0)}), (192, None, {"tokens": 3})]
)
def test_many_short_caches(place, head_dim, size, more, monkeypatch, nothing_known):
    """A block has all keys of a sequence: neither stream-K nor splits, and no combining launch."""
    lengths = (5, 130, 1, 0, 70, 64, 90, 33, 127, 128, 129, 2, 99) * (1 if isinstance(place, OnInterpreter) else 50)
    q, k, v = case(lengths, head_dim=head_dim, tokens=more.get("tokens", 1))
    monkeypatch.setattr(decode_launches, "choose_share_count", None)
    monkeypatch.setattr(decode_launches, "choose_split_count", None)
    agree(place, q, k, v, lengths, size=size, **{name: x for name, x in more.items() if name != "tokens"})


# ---- plans -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("blocks", "tiles", "wanted"), [(8, 512, 16), (128, 128, 1), (512, 128, 1), (4096, 64, 1), (1, 1, 1), (4, 0, 1)]
)
def test_splits_fill_the_multiprocessors(blocks, tiles, wanted):
    assert splits.choose_split_count(blocks, tiles, 132) == wanted


@pytest.mark.parametrize(("blocks", "tiles", "wanted"), [(1, 512, 47), (1, 64, 16), (2, 64, 16)])
def test_many_splits_take_time_to_combine(blocks, tiles, wanted):
    assert splits.choose_split_count(blocks, tiles, 132) == wanted


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_every_shape_fits(arch):
    """Shared memory holds `ctas_per_sm` blocks a multiprocessor, each with 1 KB that CUDA reserves."""
    most = parse_target(arch).shared_bytes
    for config in decode_ampere.space(parse_target(arch), False):
        _, smem = decode_ampere.make(config)
        assert smem.nbytes <= most and config.ctas_per_sm * (smem.nbytes + 1024) <= most + 1024
    for config in decode_hopper.space(parse_target(arch), True):
        assert decode_hopper.make(config)[1].nbytes <= LARGE


# ---- refused ---------------------------------------------------------------------------------------------------------
def refused(error, words, /, lengths=(5,), **more):
    q, k, v = case((5,))
    arrays = {"q": q, "k": k, "v": v, "lengths": np.array(lengths)} | more
    with pytest.raises(error, match=words):
        attention.decode(**arrays)


def test_mistakes_name_the_argument():
    table, two = np.zeros((1, 1), np.int32), draw((2, 5, 2, 64), BF16)
    refused(ValueError, "^lengths: must be from 0 to 5", lengths=(6,))
    refused(ValueError, "^lengths: sequences must equal q's", lengths=(5, 5))
    refused(ValueError, "^k: batch must equal q's unless pages or batch_index is passed", k=two, v=two)
    refused(ValueError, "^v: sequence must equal k's", v=draw((1, 4, 2, 64), BF16))
    refused(ValueError, "^q: heads must be a multiple", q=draw((1, 1, 3, 64), BF16))
    refused(TypeError, "^lengths: dtype must be one of", lengths=(5.0,))
    refused(ValueError, "^batch_index: must be None where pages is passed", pages=table, batch_index=np.zeros(1, np.int32))
    refused(ValueError, "^lengths: must be from 0 to 5", pages=table, lengths=(6,))
    for wrong in (-1, 6):
        refused(ValueError, "^leftpad: must be from 0 to 5: ", leftpad=np.array([wrong], np.int32))
    eight, one = draw((1, 5, 2, 64), FP8), np.ones(2, np.float32)
    refused(TypeError, "^v: dtype must be q's, float8_e4m3fn or int8, as k's", k=eight)
    refused(TypeError, "^k: dtype must be q's, float8_e4m3fn or int8:", k=draw((1, 5, 2, 64), FP16))
    refused(ValueError, "^k_descale: must be None unless the cache is float8_e4m3fn or int8", k_descale=one, v_descale=one)
    refused(ValueError, "^k_descale: must be passed together with v_descale", k=eight, v=eight, v_descale=one)
    refused(ValueError, "^k_descale: heads must equal k's", k=eight, v=eight, k_descale=one[:1], v_descale=one)
    each = np.ones((1, 5, 2), np.float32)
    refused(ValueError, "^v_descale: must have as many axes as k_descale", k=eight, v=eight, k_descale=each, v_descale=one)
    refused(ValueError, "^k_descale: sequence must equal k's", k=eight, v=eight, k_descale=each[:, :4], v_descale=each)
    refused(ValueError, "^k_descale: must be passed together with v_descale", k=eight, v=eight, v_descale=each)
    refused(
        TypeError,
        r"^k_descale: must be an array, .* of a number make one: np.full\(\(Hk,\), 0.5, np.float32\)",
        k=eight,
        v=eight,
        k_descale=0.5,
        v_descale=one,
    )
    refused(ValueError, "^k: must have the axes B or pages, S, Hk, D: ", k=draw((5, 2, 64), BF16), pages=table)
    refused(ValueError, "^pages: must have the axes sequences, pages of each: ", pages=table[0])
    refused(ValueError, "^splits: must be from 1 to 1024", splits=0)
    refused(TypeError, "^splits: must be an integer", splits=2.5)
    refused(
        ValueError, "^family: 'sm_90' serves few query tokens only with a cache of q's dtype", family="sm_90", k=eight, v=eight
    )
    refused(TypeError, "^causal: must be a bool", causal=1)
    refused(ValueError, "^window", window=(-1, 0))


def test_a_page_beyond_the_pool_is_refused():
    """If values are checked; without a check on a GPU. Entries for pages without keys in use may be anything."""
    q, k, v = case((5,))
    given, table = {"lengths": np.array([5])}, np.array([[3, -1]], np.int32)
    with pytest.raises(ValueError, match=r"pages: must be from 0 to 0 where keys are in use: pages\[0, 0\]=3, lengths\[0\]=5"):
        attention.decode(q, k, v, **given, pages=table)
    with pytest.raises(Exception, match="row 0 lies in page 3, which is out of range for a pool of 1 pages"):
        attention.decode(q, k, v, **given, pages=table, mask=lambda b, h, i, j: j >= 0)
    with pytest.raises(ValueError, match=r"batch_index: must be from 0 to 0 where keys are in use: batch_index\[0\]=1"):
        attention.decode(q, k, v, **given, batch_index=np.array([1]))
    k, v = (np.concatenate([np.zeros_like(x), x])[:, :4] for x in (k, v))
    whole = attention.decode(q, k, v, lengths=np.array([8]), pages=np.array([[0, 1, 5]]), window=(2, 0))
    there = attention.decode(q, k, v, lengths=np.array([8]), pages=np.array([[-1, 1, -1]]), window=(2, 0))
    assert (whole == there).all()
    attention.decode(q, k, v, lengths=np.array([0]), batch_index=np.array([-1]))


def test_arguments_are_documented():
    assert decoding.DECODE.names[:4] == ("q", "k", "v", "lengths")
    for name in decoding.DECODE.names:
        assert name in attention.decode.__doc__
