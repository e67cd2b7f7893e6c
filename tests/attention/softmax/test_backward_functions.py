"""attention.backward with masks and scores in Python, block masks, and gradients of the arrays that scores read."""

import itertools

import numpy as np
import pytest
from block_masks import block_mask, drawn
from forward_checks import inputs, there
from gradient_checks import NOISE, agree, gradient_of_lse
from hypothesis import given, settings
from hypothesis import strategies as st
from places import OnCard, OnInterpreter, random_on_the_card
from poison import FAR_LSE, Packing, as_on_a_device, unseen
from test_backward import call

import attention
from attention import reference
from attention.parts.backward.query_tiling import QueryTiling
from attention.parts.tiling import Tiling
from attention.parts.variant import CombinedVariant
from attention.parts.visibility import CAUSAL, MaskMod, WindowLeft, WindowRight
from attention.plans.softmax import backward_launches as module
from ops import rsqrt, sigmoid, tanh, where

F32 = np.float32
DOCS = np.arange(170) // 25
SCALES, TABLE = np.array([2, 0.3], F32), np.random.default_rng(4).standard_normal((2, 220)).astype(F32)
FUNCTIONS = {
    "mask": dict(mask=lambda b, h, i, j: (i // 30 == j // 40) & (i != 50)),
    "mask of each head and sequence": dict(mask=lambda b, h, i, j: (j + 40 * h) % 70 > 30 * b, causal=True),
    "documents": dict(mask=lambda b, h, i, j, docs: docs[i] == docs[j], aux=(DOCS,), window=(None, 20)),
    "score": dict(score=lambda s, b, h, i, j: where(j <= i, s * 1.5, tanh(s)) - sigmoid(s), window=(60, None)),
    "scales": dict(score=lambda s, b, h, i, j, scales: s * scales[h], aux=(SCALES,), causal=True, alibi=SCALES),
    "poles at masked scores": dict(
        score=lambda s, b, h, i, j: rsqrt(s * s + (i % 5) * (80 - i)), softcap=3.0, mask=lambda b, h, i, j: i % 5 > 0
    ),
    "distances": dict(score=lambda s, b, h, i, j, t: s + t[h, j - i + 80], aux=(TABLE,), sink=SCALES),
}
BLOCKS = {
    "blocks": dict(blocks=block_mask(drawn(2, 2, 3, 4), (30, 50)), mask=lambda b, h, i, j: (i + j) % 2 == 1),
    "wide blocks": dict(blocks=block_mask(np.array([[[[0, 2], [2, 0], [2, 2]]]]), (32, 128))),
    "large blocks": dict(
        blocks=block_mask(np.array([[[[2, 1]], [[1, 2]]]]), 128), mask=lambda b, h, i, j: i % 3 == j % 2, causal=True
    ),
}


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize(("name", "family"), [*zip([*FUNCTIONS, *BLOCKS], itertools.cycle(["sm_90", "sm_80"]))])
def test_functions_and_blocks(place, name, family):
    batch = 2 if "sequence" in name or name == "blocks" else 1
    head_dim = 128 if family == "sm_90" else 64
    agree(place, *inputs(batch, 80, 140, 2, 1, head_dim), family, with_dlse=True, **(FUNCTIONS | BLOCKS)[name])


def test_prepared_lists(family="sm_80"):
    """Lists that attention.block_lists prepared also serve backward, which lists query tiles for key blocks."""
    q, k, v = inputs(1, 40, 70, 2, 1, 64)
    for options in (FUNCTIONS["documents"], {"blocks": block_mask(drawn(1, 2, 3, 4), (16, 20))}):
        options = options | {"family": family}
        out, lse = attention.forward(q, k, v, return_lse=True, **options)
        prepared = options | {"blocks": attention.block_lists(q, k, v, **options)}
        for x, y in zip(*(attention.backward(out, q, k, v, out, lse, **args) for args in (options, prepared)), strict=True):
            np.testing.assert_allclose(x.astype(F32), y.astype(F32), atol=1e-2)
        with pytest.raises(ValueError, match="blocks: these lists were made for queries=40, and this call has queries=39"):
            attention.backward(out[:, :39], q[:, :39], k, v, out[:, :39], lse[..., :39], **prepared)


def test_unlisted_query_tiles_are_skipped(monkeypatch):
    """The lists are built by a classify of the mask, and by nothing else."""
    launches = []
    original = module.PreparationSteps.launch

    def launch(self, kernel, config, grid, **arguments):
        launches.append(type(kernel).__name__)
        original(self, kernel, config, grid, **arguments)

    monkeypatch.setattr(module.PreparationSteps, "launch", launch)
    q, k, v = inputs(1, 64, 64, 1, 1, 64)
    attention.backward(q, q, k, v, q, np.zeros((1, 1, 64), F32), mask=lambda b, h, i, j: (j <= i) | (j < 3), family="sm_80")
    assert launches == ["ClassifyBlocks", "BuildQueryLists"]


VARIANTS = CAUSAL, WindowRight(), WindowLeft(), CombinedVariant(WindowRight(), WindowLeft()), MaskMod(lambda b, h, i, j: j < i)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_query_tiling_agrees_with_tiling(variant):
    """A query tile that sees a key block according to QueryTiling has this block among its key blocks, where the classify
    looks."""
    from types import SimpleNamespace

    for queries, keys in ((300, 300), (100, 270), (270, 100)):
        params = SimpleNamespace(left=40, right=30)
        ctx = SimpleNamespace(shift=keys - queries, seqlen_q=queries, seqlen_k=keys, params=params, head=0)
        tiling, query_tiling = Tiling(64, 32, variant), QueryTiling(64, 32, variant)
        blocks, tiles = range(-(-keys // 32)), range(-(-queries // 64))
        kv_blocks = [tiling.key_blocks(64 * tile, ctx) for tile in tiles]
        for block in blocks:
            q_tiles = query_tiling.query_tiles(32 * block, ctx, 1)
            for tile in range(q_tiles.first, q_tiles.first + q_tiles.n):
                assert kv_blocks[tile].first <= block < kv_blocks[tile].first + kv_blocks[tile].n


@pytest.mark.parametrize(("options", "what"), [
    (dict(score=lambda s, b, h, i, j: s if h else -s), "score: has no derivative: <lambda> converts a value to bool"),
    (dict(score=lambda s, b, h, i, j, t: s + t[(s > 0) * 1], aux=(SCALES,)), "indexes an array by s"),
    (dict(mask=lambda b, h, i, j: j), "mask: must return booleans"),
    (dict(aux=SCALES), "aux: must be a tuple of arrays"),
    (dict(mask=3), "mask: must be a Python function"),
])  # fmt: skip
def test_errors_before_any_launch(options, what):
    with pytest.raises(TypeError, match=what):
        call(**options)


# ---- gradients of arrays that scores read --------------------------------------------------------------------------------
def normal(*shape):
    """Normal random numbers in float32."""
    return np.random.default_rng(5).standard_normal(shape).astype(F32)


def relative(s, b, h, i, j, table, buckets, scales):
    return s * scales[h] + tanh(s) * table[h, buckets[j - i + 80]] + 0.1 * table[b, 3]


ARRAYS = {
    "a bias": dict(bias=normal(1, 2, 40, 70)),
    "a bias of each sequence, for all heads and queries": dict(
        bias=normal(2, 1, 1, 70), causal=True, score=lambda s, b, h, i, j: s * tanh(s)
    ),
    "slopes": dict(alibi=np.array([0.2, 0.05], F32), causal=True),
    "slopes of each sequence": dict(
        alibi=normal(2, 2), softcap=2.0, score=lambda s, b, h, i, j: s * sigmoid(s), window=(20, None)
    ),
    "tables and scales": dict(score=relative, aux=(normal(2, 10), np.arange(160) // 16, SCALES), softcap=3.0, sink=SCALES),
    "positions, masked": dict(
        score=lambda s, b, h, i, j, t, d: s + t[j % 7, i], mask=lambda b, h, i, j, t, d: d[i] == d[j], aux=(normal(7, 40), DOCS)
    ),
}  # fmt: skip


def judge(options, dout, q, k, v, out, lse, actual, place):
    """Judge all gradients. The reference computes delta from the rounded output: a sum of many rounding errors says nothing."""
    expected = {f"d{name}": True for name in ("bias", "alibi", "aux") if name in options}
    ref = reference.backward(dout, q, k, v, out=place.get(out), **options, **expected)
    for n, (x, y) in enumerate(zip(map(place.get, actual), ref, strict=True)):
        assert x.shape == y.shape
        np.testing.assert_allclose(x.astype(F32), y, atol=(2e-2 if n < 3 else 4e-3) * np.abs(y).max() + NOISE)


def add_dlse(place, lse, options, args):
    """The options of the reference and the arguments of backward, with a gradient of lse."""
    dlse = gradient_of_lse(place.get(lse))
    return options | {"dlse": dlse}, args | {"dlse": place.put(dlse)}


@pytest.mark.parametrize(("name", "family"), [*zip(ARRAYS, itertools.cycle(["sm_90", "sm_80"]))])
def test_gradients_of_what_scores_read(place, name, family):
    options = ARRAYS[name]
    batch = 2 if "sequence" in name or "tables" in name else 1
    q, k, v = inputs(batch, 40, 70, 2, 1, 64)
    dout = inputs(batch, 40, 70, 2, 1, 64)[0]
    arrays, args = [place.put(x) for x in (dout, q, k, v)], there(place, options | {"family": family})
    out, lse = attention.forward(*arrays[1:], return_lse=True, **args)
    options, args = add_dlse(place, lse, options, args)
    expected = {f"d{name}": True for name in ("bias", "alibi", "aux") if name in options}
    actual, again = (attention.backward(*arrays, out, lse, **args, **expected) for _ in range(2))
    judge(options, dout, q, k, v, out, lse, actual, place)
    for x, y in zip(actual[3:], again[3:], strict=True):
        assert (place.get(x) == place.get(y)).all()  # the same bits


@pytest.mark.parametrize("rows", [1, 20])
def test_accumulate(place, rows):
    """accumulate=True adds in float32 to arrays of any strides; of aux only to those that are given."""
    score, q_k_v = lambda s, b, h, i, j, t, scales, x: s * scales[h] + t[j - i + 20], inputs(1, 20, 30, 2, 1, 64)
    aux = normal(50), np.array([1, 0.5], F32), normal(3)  # the score does not read the last one
    arrays = dict(bias=normal(1, 1, rows, 30), alibi=np.array([0.5, 0.1], F32), sink=SCALES, aux=aux)
    arrays, args = [place.put(x) for x in (q_k_v[0], *q_k_v)], there(place, arrays | dict(score=score))
    out, lse = attention.forward(*arrays[1:], return_lse=True, **args)
    expected = dict(dbias=True, dalibi=True, daux=[None, True, True])
    expected = [place.get(x) for x in attention.backward(*arrays, out, lse, **args, **expected)]
    shapes = [x.shape for x in expected]
    before = [normal(*shape[:-1], 2 * shape[-1])[..., ::2] for shape in shapes[:4]] + [normal(*shape) for shape in shapes[4:]]
    outputs = [place.put(x.copy()) for x in before]
    args |= dict(zip(("dq", "dk", "dv", "dbias", "dalibi", "dsink"), outputs)) | {"daux": [None, *outputs[6:]]}
    actual = attention.backward(*arrays, out, lse, accumulate=True, **args)
    assert len(actual) == len(outputs) and all(x is y for x, y in zip(actual, outputs))
    for x, y, want in zip(outputs, before, expected):
        np.testing.assert_allclose(
            place.get(x) - y, want.astype(F32), rtol=0.01, atol=0.01 * np.abs(want.astype(F32)).max() + NOISE
        )


ENDS, ENDS_K = np.array([0, 17, 17, 90], np.int32), np.array([0, 30, 40, 120], np.int32)  # the second has no queries
PACKED = {"cu_seqlens": ENDS, "cu_seqlens_k": ENDS_K}
OF_SEQUENCES = {
    "slopes, a bias of keys": PACKED | dict(alibi=normal(3, 2) ** 2, bias=normal(3, 1, 1, 120), causal=True),
    "a table, a bias of all positions, few keys in use": PACKED | dict(
        score=lambda s, b, h, i, j, t: s + t[b, j - i + 80], aux=(normal(3, 170),), bias=normal(1, 2, 90, 120),
        lengths_k=np.array([30, 7, 70], np.int32), softcap=2.0,
    ),
    "slopes, a table and a bias, keys in use": dict(
        score=lambda s, b, h, i, j, t: s * t[h, i % 3], aux=(normal(2, 3),), alibi=np.array([0.2, 0.05], F32), window=(50, 9),
        bias=normal(3, 1, 30, 120), lengths_k=np.array([50, 0, 100], np.int32),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "family"), [*zip(OF_SEQUENCES, ["sm_90", "sm_80", "sm_90"])])
def test_gradients_of_what_scores_of_sequences_read(place, name, family):
    """Packed sequences, and keys in use: other keys are not read, and neither are rows of other sequences."""
    options = OF_SEQUENCES[name]
    batch, queries = (1, 90) if "cu_seqlens" in options else (3, 30)
    q, k, v = inputs(batch, queries, 120, 2, 1, 64)
    dout = inputs(batch, queries, 120, 2, 1, 64)[0]
    arrays, args = [place.put(x) for x in (dout, *unseen(q, k, v, **options))], there(place, options | {"family": family})
    out, lse = attention.forward(*arrays[1:], return_lse=True, **args)
    options, args = add_dlse(place, lse, options, args)
    expected = {f"d{name}": True for name in ("bias", "alibi", "aux") if name in options}
    judge(options, dout, q, k, v, out, lse, attention.backward(*arrays, out, lse, **args, **expected), place)


def test_learned_gradients_of_sequences_between_neighbours_of_poison(place, monkeypatch):
    """The gradients of each sequence's bias and slopes are as if its neighbours were not there."""
    as_on_a_device(monkeypatch)
    packing = Packing((17, 40), nobodys=20)
    (q, k, v), bias, slopes, ours = inputs(1, 57, 57, 2, 1, 64), normal(4, 1, 1, 79), normal(4, 2) ** 2, packing.which
    options = dict(cu_seqlens=packing.ends, bias=bias, alibi=slopes)
    packed_options = dict(cu_seqlens=packing.cu_seqlens, bias=bias[ours][..., :57], alibi=slopes[ours])
    out, lse = reference.forward_low(q, k, v, **packed_options)
    put = [place.put(packing.spread(x)) for x in (q, q, k, v, out)]
    lse = place.put(packing.spread(lse, 2, FAR_LSE))
    actual = attention.backward(*put, lse, **there(place, options), dbias=True, dalibi=True)
    want = reference.backward(q, q, k, v, out=out, **packed_options, dbias=True, dalibi=True)
    for x, y in zip(map(place.get, actual[3:]), want[3:], strict=True):
        np.testing.assert_allclose(x[ours][..., : y.shape[-1]], y, atol=4e-3 * np.abs(y).max() + NOISE)


@pytest.mark.parametrize(("family", "options"), [("sm_90", {}), ("sm_80", dict(window=(50, 0), sink=SCALES))])
def test_shared_slopes_of_packed_sequences(place, family, options):
    """The main kernel computes the gradient of these slopes, without a kernel that computes scores once more. There are two key
    blocks, and a second call has the same bits."""
    ends, ends_k = np.array([0, 17, 17, 90], np.int32), np.array([0, 30, 40, 180], np.int32)
    options = dict(cu_seqlens=ends, cu_seqlens_k=ends_k, alibi=np.array([0.2, 0.05], F32), causal=True) | options
    (q, k, v), dout = inputs(1, 90, 180, 2, 1, 128), inputs(1, 90, 180, 2, 1, 128)[0]
    arrays, args = [place.put(x) for x in (dout, q, k, v)], there(place, options | {"family": family})
    out, lse = attention.forward(*arrays[1:], return_lse=True, **args)
    options, args = add_dlse(place, lse, options, args)
    actual, again = (attention.backward(*arrays, out, lse, **args, dalibi=True) for _ in range(2))
    judge(options, dout, q, k, v, out, lse, actual, place)
    assert (place.get(actual[3]) == place.get(again[3])).all()


SCORE = st.sampled_from([None, lambda s, b, h, i, j: s * sigmoid(s), lambda s, b, h, i, j: s + 0.1 * (j - i) * (h + b)])
MASK = st.sampled_from([None, lambda b, h, i, j: (i + j + h) % 3 > 0, lambda b, h, i, j: (i // 5 == j // 7) & (j != b)])


def combination(place, lengths, heads, score, mask, softcap, window, shape, slopes, family):
    """Judge all gradients of one random problem."""
    (queries, keys), (kv_heads, group), batch = lengths, heads, 2
    rows, heads = (1 if one else n for one, n in zip(shape, (queries, kv_heads * group)))
    options = dict(score=score, mask=mask, softcap=softcap, window=window, bias=normal(1 + (not shape[2]), heads, rows, keys))
    options |= {"alibi": np.abs(normal(kv_heads * group))} if slopes else {}
    q, k, v = inputs(batch, queries, keys, kv_heads * group, kv_heads, 64)
    arrays, args = [place.put(x) for x in (q, q, k, v)], there(place, options | {"family": family})
    out, lse = attention.forward(*arrays[1:], return_lse=True, **args)
    options, args = add_dlse(place, lse, options, args)
    actual = attention.backward(*arrays, out, lse, **args, dbias=True, **({"dalibi": True} if slopes else {}))
    judge(options, q, q, k, v, out, lse, actual, place)


COMBINATIONS = st.tuples(
    st.tuples(st.integers(1, 70), st.integers(1, 70)), st.tuples(st.integers(1, 2), st.integers(1, 2)), SCORE, MASK,
    st.sampled_from([None, 2.0]), st.sampled_from([None, (9, 0), (None, 4), (20, 3)]), st.tuples(*[st.booleans()] * 3),
    st.booleans(), st.sampled_from(["sm_90", "sm_80"]),
)  # fmt: skip


@settings(max_examples=3, deadline=None, derandomize=True)
@given(COMBINATIONS)
def test_random_combinations(drawn):
    combination(OnInterpreter(), *drawn)


@random_on_the_card
@given(COMBINATIONS)
def test_random_combinations_on_the_card(drawn):
    pytest.importorskip("torch")
    combination(OnCard(), *drawn)


@pytest.mark.release
def test_as_compiled(as_compiled):
    """Compiled kernels in the emulator: two key blocks add to one query tile, in the order that lists say."""
    q, k, v = inputs(1, 10, 70, 1, 1, 64)
    score = lambda s, b, h, i, j, t: tanh(s) + s * t[h, (j - i + 16) // 20]
    options = dict(score=score, mask=lambda b, h, i, j, t: (i < 6) | (j < 64), aux=(normal(1, 5),))
    out, lse = attention.forward(q, k, v, return_lse=True, **options)
    as_compiled("sm_80")
    options, _ = add_dlse(OnInterpreter(), lse, options, {})
    actual = attention.backward(q, q, k, v, out, lse, family="sm_80", daux=True, deterministic=True, **options)
    judge(options, q, q, k, v, out, lse, actual, OnInterpreter())


@pytest.mark.release  # for sm_90a: test_backward.py
def test_packed_sequences_as_compiled(as_compiled):
    """Compiled kernels in the emulator: deterministic, and not all keys in use."""
    q, k, v = inputs(1, 20, 20, 1, 1, 64)
    options = dict(cu_seqlens=np.array([0, 9, 20], np.int32), lengths_k=np.array([9, 7], np.int32), alibi=normal(2, 1) ** 2)
    out, lse = attention.forward(q, k, v, return_lse=True, **options)
    as_compiled("sm_80")
    actual = attention.backward(q, q, k, v, out, lse, family="sm_80", dalibi=True, deterministic=True, **options)
    judge(options, q, q, k, v, out, lse, actual, OnInterpreter())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_torch_tensors_that_require_grad(device):
    """Autograd and torch.compile give the gradients of attention.backward, of all arrays that scores read."""
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x.astype(F32)).to(device).bfloat16().requires_grad_() for x in inputs(1, 20, 24, 2, 1, 64))
    arrays = normal(1, 2, 1, 24), SCALES, normal(2, 10)
    bias, alibi, table = (torch.from_numpy(x).to(device).requires_grad_() for x in arrays)
    buckets, sink = torch.arange(160, device=device) // 16, torch.tensor([0.5, 1.0], device=device, requires_grad=True)
    leaves = q, k, v, sink, alibi, bias, table
    score = lambda s, b, h, i, j, table, buckets: s + tanh(s) * table[h, buckets[j - i + 80]]
    options = dict(mask=lambda b, h, i, j, *aux: j < i + 9, score=score, softcap=9.0)

    def loss(q, k, v, sink, alibi, bias, table):
        out = attention.forward(q, k, v, sink=sink, alibi=alibi, bias=bias.bfloat16(), aux=(table, buckets), **options)
        return out.float().square().sum()

    actual = torch.autograd.grad(loss(*leaves), leaves)
    with torch.no_grad():
        args = options | dict(sink=sink, alibi=alibi, bias=bias.bfloat16(), aux=(table, buckets))
        out, lse = attention.forward(q, k, v, return_lse=True, **args)
        expected = dict(dbias=True, dalibi=True, daux=True)
        dq, dk, dv, dbias, dalibi, dsink, daux = attention.backward(
            (2 * out.float()).bfloat16(), q, k, v, out, lse, **args, **expected
        )
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for one in (actual, torch.autograd.grad(compiled(*leaves), leaves)):
        for x, y in zip(one, (dq, dk, dv, dsink, dalibi, dbias, daux), strict=True):
            torch.testing.assert_close(x, y, rtol=2**-6, atol=2**-6, check_dtype=False)
    (only,) = torch.autograd.grad(loss(*[x.detach() for x in leaves[:-1]], table), table)
    torch.testing.assert_close(only, daux, rtol=2**-8, atol=2**-8)


def test_gradients_of_arrays_that_flex_attention_captures():
    """They agree with the formula in torch."""
    torch = pytest.importorskip("torch")
    from attention.compat.flex import flex_attention

    q, k, v = (torch.from_numpy(x.astype(F32)).bfloat16().requires_grad_() for x in inputs(1, 20, 20, 2, 2, 64, layout="bhsd"))
    table, scales = (torch.from_numpy(x).requires_grad_() for x in (normal(2, 50), SCALES))
    leaves, places = (q, k, v, table, scales), torch.arange(20) - torch.arange(20)[:, None] + 30
    actual = flex_attention(q, k, v, lambda s, b, h, i, j: s * scales[h] + table[h, j - i + 30], return_lse=True)
    s = q.float() @ k.float().mT / 8 * scales[:, None, None] + table[:, places]
    expected = torch.softmax(s, -1) @ v.float(), torch.logsumexp(s, -1)
    losses = [out.float().square().sum() + lse.square().sum() for out, lse in (actual, expected)]
    for x, y in zip(*(torch.autograd.grad(loss, leaves) for loss in losses), strict=True):
        torch.testing.assert_close(x.float(), y.float(), rtol=0.02, atol=0.02 * float(y.abs().max()))
