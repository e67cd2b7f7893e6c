"""Lists of blocks that a caller has, as FlexAttention's BlockMask."""

from types import SimpleNamespace

import numpy as np
import pytest
from block_masks import block_mask, drawn
from forward_checks import agree, inputs, there
from places import OnInterpreter
from poison import poisoned

import attention
from attention.plans.softmax.forward_launches import PreparationSteps

odd = lambda b, h, i, j: (i + j) % 2 == 1


@pytest.fixture(params=["sm_90", "sm_80"])
def family(request):
    return request.param


CASES = {  # sizes of blocks around those of tiles and across them; a batch or head for all, lists that differ; options besides
    "odd": (block_mask(drawn(2, 2, 3, 5), (30, 50)), dict(mask=odd)),
    "one for all": (block_mask(drawn(1, 1, 2, 2), 128), dict(mask=lambda b, h, i, j: (j + h + b) % 3 > 0)),
    "large, across tiles": (block_mask(drawn(1, 2, 2, 2), (96, 160)), dict(mask=odd, causal=True)),
    "large, across warps": (block_mask(drawn(1, 1, 2, 2), (40, 128)), {}),
    "wide, across tiles": (block_mask(drawn(1, 1, 3, 6), (32, 40)), {}),
    "no mask": (block_mask(drawn(2, 1, 5, 15), 16), {}),
    "no whole ones": (block_mask(drawn(1, 2, 3, 4), (32, 64), whole=False), dict(causal=True)),
    "aux": (block_mask(drawn(1, 1, 2, 4), 64), dict(
        mask=lambda b, h, i, j, docs: docs[i] == docs[j], aux=(np.arange(240) // 50,), softcap=2.0)),
    "lengths": (block_mask(drawn(2, 1, 2, 4), 64), dict(mask=odd, lengths_k=np.array([130, 210], np.int32))),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_blocks(place, family, case):
    blocks, options = CASES[case]
    agree(place, *inputs(2, 80, 230, 2, 1, 64), family=family, blocks=blocks, **options)


def test_packed_sequences(place, family):
    """Each from its own start."""
    ends, ends_k = np.array([0, 5, 20, 90], np.int32), np.array([0, 7, 27, 120], np.int32)
    options = {"cu_seqlens": ends, "cu_seqlens_k": ends_k, "mask": odd}
    agree(place, *inputs(1, 90, 120, 2, 1, 64), family=family, blocks=block_mask(drawn(3, 1, 5, 6), 16), **options)


def test_lists_that_say_what_a_mask_says(family):
    """Give the same, but for a last bit: the block after the last key is a part for one, whole for the other, and so comes
    sooner or later."""
    q, k, v = inputs(1, 150, 300, 1, 1, 64)
    i, j = np.arange(160)[:, None], np.arange(320)
    seen = (j <= i + 100) & (j // 40 != 2)
    blocks = seen.reshape(5, 32, 5, 64).transpose(0, 2, 1, 3)
    classes = np.where(blocks.all((2, 3)), 2, blocks.any((2, 3)).astype(int))[None, None]
    mask = lambda b, h, i, j: (j <= i + 100) & (j // 40 != 2)
    plain = attention.forward(q, k, v, mask=mask, family=family)
    listed = attention.forward(q, k, v, mask=mask, blocks=block_mask(classes, (32, 64)), family=family)
    np.testing.assert_allclose(listed.astype(np.float32), plain.astype(np.float32), rtol=2.0**-7)
    assert (listed != plain).mean() < 1e-3


@pytest.mark.release
def test_as_compiled(as_compiled):
    as_compiled("sm_80")
    agree(OnInterpreter(), *inputs(1, 20, 80, 1, 1, 64), family="sm_80", blocks=block_mask(drawn(1, 1, 2, 3), 32), mask=odd)


@pytest.mark.parametrize("options", [dict(causal=True), dict(window=(250, 0))], ids=str)
def test_lists_have_the_order_of_what_is_computed(place, family, options):
    """The same bits: blocks that the mask cuts from the last one on, and then the others."""
    q, k, v = (place.put(x) for x in inputs(1, 500, 500, 1, 1, 128))
    far = options.get("window", (10**6, 0))[0]
    mask = lambda b, h, i, j, zero: (j <= i + zero[j]) & (j >= i - far)  # that it is a window nobody can know
    expected = attention.forward(q, k, v, family=family, return_lse=True, **options)
    listed = attention.forward(q, k, v, family=family, return_lse=True, mask=mask, aux=(place.put(np.zeros(500, np.int32)),))
    for x, y in zip(listed, expected):
        np.testing.assert_array_equal(place.get(x), place.get(y))


READY = {  # what lists are made of, which need not be read again: shared by batches and heads, or not; of blocks, or not
    "shared": dict(mask=lambda b, h, i, j, docs: docs[i] == docs[j], aux=(np.arange(240) // 50,), window=(None, 30)),
    "each its own": dict(mask=lambda b, h, i, j: (j + 40 * h) % 70 > 30 * b, causal=True, softcap=2.0),
    "blocks": dict(blocks=block_mask(drawn(1, 2, 3, 4), (32, 64))),
    "a mask in blocks": dict(blocks=block_mask(drawn(2, 1, 3, 5), (30, 50)), mask=lambda b, h, i, j: (i + j + h) % 2 == 1),
}


@pytest.mark.parametrize("case", READY)
def test_lists_that_are_ready(place, family, case, monkeypatch):
    """Give the same bits, and nothing is listed anew."""
    q, k, v = (place.put(x) for x in inputs(2, 80, 230, 2, 1, 64))
    options = there(place, READY[case] | {"family": family})
    expected = place.get(attention.forward(q, k, v, **options))
    lists = attention.block_lists(q, k, v, **options)
    for what in "list_key_blocks", "classify_blocks":
        monkeypatch.setattr(PreparationSteps, what, lambda *_: pytest.fail("lists blocks anew"))
    assert (place.get(attention.forward(q, k, v, **options | {"blocks": lists})) == expected).all()


def test_ready_lists_serve_other_batches_and_heads():
    """Where the mask does not read them; and what aux holds is what it was when they were made."""
    docs = np.arange(64) // 20
    options = dict(mask=lambda b, h, i, j, docs: docs[i] == docs[j], aux=(docs,), family="sm_80")
    lists = attention.block_lists(*inputs(1, 64, 64, 1, 1, 64), **options)
    q, k, v = inputs(2, 64, 64, 2, 1, 64)
    expected = attention.forward(q, k, v, **options)
    assert (attention.forward(q, k, v, blocks=lists, **options) == expected).all()


def of_heads(b, h, i, j):
    return j <= i + h


@pytest.mark.parametrize(("shape", "options", "what"), [
    ((1, 79, 64, 2, 1, 64), {}, "queries=80, and this call has queries=79:"),
    ((1, 80, 65, 2, 1, 64), {}, "keys=64, and this call has keys=65:"),
    ((1, 80, 64, 3, 1, 64), {}, "heads=2, and this call has heads=3:"),
    ((1, 80, 64, 2, 1, 128), {"family": "sm_90"}, "tiles=192 x 128, and this call has tiles=128 x 128:"),
    ((1, 80, 64, 2, 1, 64), {"causal": True}, r"window=\(None, None\), and this call has window=\(None, 0\):"),
    ((1, 80, 64, 2, 1, 64), {"mask": odd}, "mask=of_heads .*, and this call has heads=any, mask=<lambda> "),
    ((1, 80, 64, 2, 1, 64), {"mask": None}, "mask=of_heads .*, and this call has heads=any, mask=None:"),
])  # fmt: skip
def test_ready_lists_of_another_call(shape, options, what):
    lists = attention.block_lists(*inputs(1, 80, 64, 2, 1, 64), mask=of_heads)
    q, k, v = inputs(*shape)
    out = poisoned(q.shape, q.dtype)
    with pytest.raises(ValueError, match=f"^blocks: these lists were made for .*{what}"):
        attention.forward(q, k, v, out=out, **{"mask": of_heads, "blocks": lists} | options)
    assert np.isnan(out.astype(np.float32)).all()


@pytest.mark.parametrize(("options", "what"), [
    (dict(causal=True), "mask: lists of key blocks need a mask or blocks"),
    (dict(mask=odd, lengths_k=np.array([3], np.int32)), "lengths_k: must be None with lists of key blocks"),
    (dict(mask=odd, cu_seqlens=np.array([0, 8], np.int32)), "cu_seqlens: must be None with lists of key blocks"),
    (dict(mask=odd, out=np.zeros(1)), "out: is an argument of forward; block_lists has no output"),
    (dict(mask=odd, masks=odd), "unexpected keyword argument 'masks'"),
    (dict(mask=lambda b, h, i, j: j), "mask: must return booleans"),
])  # fmt: skip
def test_lists_that_are_not_made(options, what):
    with pytest.raises((TypeError, ValueError), match=what):
        attention.block_lists(*inputs(1, 8, 8, 2, 1, 64), **options)
    q, k, v = inputs(1, 0, 8, 2, 1, 64)
    with pytest.raises(ValueError, match="q: must not be empty where lists of its blocks are made"):
        attention.block_lists(q, k, v, mask=odd)


GOOD = block_mask(drawn(1, 1, 2, 2), 4)


@pytest.mark.parametrize(("blocks", "what"), [
    (object(), "blocks: must have the fields of a BlockMask: object has no BLOCK_SIZE, kv_num_blocks"),
    (SimpleNamespace(**vars(GOOD) | {"BLOCK_SIZE": (0, 4)}), "blocks: BLOCK_SIZE must be a positive integer"),
    (SimpleNamespace(**vars(GOOD) | {"kv_indices": None}), r"\['kv_indices'\] are None"),
    (SimpleNamespace(**vars(GOOD) | {"full_kv_indices": None}), r"\['full_kv_indices'\] are None"),
    (SimpleNamespace(**vars(GOOD) | {"kv_indices": GOOD.kv_indices[:, :, :1]}), "kv_indices: "),
    (SimpleNamespace(**vars(GOOD) | {"kv_indices": GOOD.kv_indices.astype(float)}), "kv_indices: dtype"),
    (block_mask(drawn(1, 1, 2, 2), 3), "kv_num_blocks: must have all rows of blocks of 3 queries"),
    (block_mask(drawn(3, 1, 2, 2), 4), "kv_num_blocks: must have a batch of 1 or 1, and 2 or 1 heads"),
])  # fmt: skip
def test_what_is_refused(blocks, what):
    q, k, v = inputs(1, 8, 8, 2, 1, 64)
    out = poisoned(q.shape, q.dtype)
    with pytest.raises((TypeError, ValueError), match=what):
        attention.forward(q, k, v, out=out, blocks=blocks)
    assert np.isnan(out.astype(np.float32)).all()
