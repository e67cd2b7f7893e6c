"""attention/compat/flex.py and captured_arrays.py, compared with torch's formula softmax(score_mod(q k^T)) v where mask_mod is
true."""

import functools
import gc
import importlib.util
import math
import sys
import types
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from eager import arguments, attend

from attention.compat import captured_arrays, flex, rewrite
from attention.compat.flex import NO_MASK_BLOCK_SIZE, flex_attention, listed
from attention.plans.softmax.prepared_lists import BlockLists

ROWS, COLS = 6, 9
I, J = np.arange(ROWS)[:, None], np.arange(COLS)
SLOPES, REACH, THIRDS, LIMIT = np.array([0.5, 2.0]), 2, np.arange(COLS) % 3, np.array(3)


def block_mask(mask_mod, size=NO_MASK_BLOCK_SIZE, **lists):
    """A stand-in for torch's BlockMask with the fields that flex_attention reads."""
    empty = dict.fromkeys(("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"))
    return SimpleNamespace(**empty | lists, BLOCK_SIZE=(size, size), mask_mod=mask_mod)


@pytest.fixture
def qkv(draw):
    return draw((2, 4, ROWS, 8)), draw((2, 2, COLS, 8)), draw((2, 2, COLS, 5))


def close(actual, expected):
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12)


def test_signature():
    expected = "query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False"
    assert arguments(flex_attention) == f"{expected}, kernel_options=None"


def test_plain(calls, qkv):
    actual = flex_attention(*qkv, scale=0.2, enable_gqa=True, return_lse=True, kernel_options={"BLOCK_M": 64})
    close(actual, attend(*qkv, scale=0.2))
    assert isinstance(flex_attention(*qkv), np.ndarray)


def test_functions_that_capture_nothing_are_passed_on(calls, qkv):
    score, mask = lambda s, b, h, i, j: s + (j - i) * (h + 1) / (b + 1), lambda b, h, i, j: j <= i + REACH
    actual = flex_attention(*qkv, score, block_mask(mask), return_lse=True)
    b, h = np.arange(2)[:, None, None, None], np.arange(4)[:, None, None]
    close(actual, attend(*qkv, change=lambda s: s + (J - I) * (h + 1) / (b + 1), see=I + REACH >= J))
    assert calls[0]["score"] is score and calls[0]["mask"] is mask and calls[0]["aux"] == () and calls[0]["blocks"] is None


def test_captured_arrays_become_arguments(calls, qkv):
    """Arrays that are captured from the enclosing function, from globals and from defaults; numbers stay constants."""
    docs, slopes, factor = np.arange(COLS) // 4, np.array([1.0, 2.0, 3.0, 4.0]), 0.5

    def document(b, h, i, j, more=THIRDS):
        """A score with a docstring and a local variable."""
        same = docs[i] == docs[j]
        return same | (more[j] == 0)

    actual = flex_attention(*qkv, lambda s, b, h, i, j: s * SLOPES[b] + slopes[h] * factor * j, block_mask(document))
    b, h = np.arange(2)[:, None, None, None], np.arange(4)[:, None, None]
    see = (docs[I] == docs[J]) | (J % 3 == 0)
    expected, _ = attend(*qkv, change=lambda s: s * SLOPES[b] + slopes[h] * factor * J, see=see)
    close([actual], [expected])
    call_options = calls[0]
    assert len(call_options["aux"]) == 4 and {x.size for x in call_options["aux"]} == {COLS, 2, 4}
    for f in call_options["mask"], call_options["score"]:
        assert f.__closure__ is None and not {"docs", "slopes", "SLOPES", "more"} & {*f.__code__.co_names}


def test_two_arrays_of_one_name(calls, qkv):
    def mask_of(table):
        return lambda b, h, i, j: table[i] >= table[j]

    def score_of(table):
        return lambda s, b, h, i, j: s + table[j]

    one, other = np.arange(COLS) % 4, np.linspace(0, 1, COLS)
    close([flex_attention(*qkv, score_of(other), block_mask(mask_of(one)))], [attend(*qkv, see=one[I] >= one[J], add=other)[0]])


def test_written_once_and_anew_when_a_number_changes(calls, qkv):
    def result(docs):
        reach = 1

        def mask(b, h, i, j):
            return docs[i] >= docs[j] - reach

        def move(n):
            nonlocal reach
            reach = n

        return mask, move

    mask, move = result(np.arange(COLS))
    for reach in 1, 1, 3:
        move(reach)
        close([flex_attention(*qkv, block_mask=block_mask(mask))], [attend(*qkv, see=J - reach <= I)[0]])
    assert calls[0]["mask"] is calls[1]["mask"] is not calls[2]["mask"]


MASKS = """
import numpy as np
docs, unread = np.arange(9), np.zeros(3)

def alike(b, h, i, j):
    return docs[i] == docs[j]
"""


def test_what_was_written_keeps_no_module(tmp_path):
    """A function that its module names does not keep alive an array of the module that it does not read."""
    (tmp_path / "masks.py").write_text(MASKS)
    spec = importlib.util.spec_from_file_location("masks", tmp_path / "masks.py")
    masks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(masks)
    captured_arrays.lift_captured_arrays({"mask": masks.alike})
    references = [weakref.ref(x) for x in (masks.alike, masks.unread)]
    del masks
    gc.collect()
    assert [x() for x in references] == [None, None]


def test_a_function_of_a_page_that_is_no_python(tmp_path, calls, qkv):
    """Sources from a documentation page whose blocks are executed, or from a notebook cell with a magic."""
    page = tmp_path / "page.md"
    page.write_text("# A page\n\nSome words.\n\n    late = lambda b, h, i, j: docs[j] > i\n")
    space = {"docs": np.arange(COLS)}
    exec(compile("\n" * 4 + "late = lambda b, h, i, j: docs[j] > i", page, "exec"), space)
    close([flex_attention(*qkv, block_mask=block_mask(space["late"]))], [attend(*qkv, see=J > I)[0]])


def test_blocks_are_passed_on(calls, qkv):
    """Blocks that are not listed are not visible, and in full blocks the mask is not evaluated."""
    counts, ones = np.ones((1, 1, 2), np.int32), np.zeros((1, 1, 2, 3), np.int32)
    lists = block_mask(lambda b, h, i, j: j > i, 3, kv_num_blocks=counts, kv_indices=ones,
                       full_kv_num_blocks=counts, full_kv_indices=ones + 1)  # fmt: skip
    close([flex_attention(*qkv, block_mask=lists)], [attend(*qkv, see=((J < 3) & (J > I)) | (J // 3 == 1))[0]])
    assert calls[0]["blocks"] is lists


@pytest.mark.parametrize("size", [NO_MASK_BLOCK_SIZE, 16])
def test_blocks_that_are_listed_once(size):
    """Listed block masks give the same bits as blocks that are listed in each call."""
    docs, ones = np.arange(COLS) // 4, np.ones((1, 1, 1), np.int32)
    q, k, v = (np.random.default_rng(0).standard_normal((1, 2, n, 16)).astype(np.float16) for n in (ROWS, COLS, COLS))
    lists = block_mask(lambda b, h, i, j: docs[i] == docs[j], size, kv_num_blocks=ones, kv_indices=0 * ones[..., None])
    score = lambda s, b, h, i, j: s * 0.5
    result = listed(q, k, v, lists, score)
    assert isinstance(result.lists, BlockLists) and result.block_mask is lists
    assert (flex_attention(q, k, v, score, result) == flex_attention(q, k, v, score, lists)).all()


def test_torch_in_a_function_becomes_ops(calls, qkv, monkeypatch):
    torch, table = types.ModuleType("torch"), SLOPES
    torch.tanh = None
    monkeypatch.setattr(rewrite, "_ops", lambda: SimpleNamespace(tanh=np.tanh))
    close(
        [flex_attention(*qkv, lambda s, b, h, i, j: 2 * torch.tanh(s / 2))],
        [attend(*qkv, change=lambda s: 2 * np.tanh(s / 2))[0]],
    )
    with pytest.raises(NotImplementedError, match="score: calls torch.erf, which ops does not have"):
        flex_attention(*qkv, lambda s, b, h, i, j: torch.erf(s))


class MaskLayer:
    """Functions whose arrays and numbers are attributes of the caller's objects."""

    def __init__(self, reach=2):
        self.inner, self.reach = SimpleNamespace(docs=np.arange(COLS) // 4), reach

    def near(self, b, h, i, j):
        return (j - i <= self.reach) & (self.inner.docs[i] == self.inner.docs[j])

    def forward(self, s, b, h, i, j):
        return s * self.reach + self.inner.docs[j]


def alike(docs, b, h, i, j):
    return docs[i] == docs[j]


def calling(limit=LIMIT, docs=THIRDS):
    """A function that calls another, each with captured arrays; and an array of one number."""
    inner = lambda b, h, i, j: docs[i] == docs[j]
    return lambda b, h, i, j: inner(b, h, i, j) | (j <= limit)


def joined(symbol, *mask_mods):
    """The functions that torch's and_masks and or_masks make, without torch."""
    result = lambda b, h, i, j: mask_mods
    result.__module__, result.__qualname__ = "torch.nn.attention.flex_attention", f"{symbol}_masks.<locals>.{symbol}_mask"
    return result


CLOSE = lambda reach: lambda b, h, i, j: j - i <= reach
SERVED = {
    "a bound method": (MaskLayer().near, (J - I <= 2) & (I // 4 == J // 4)),
    "a partial": (functools.partial(alike, THIRDS), I % 3 == J % 3),
    "a partial by name": (functools.partial(lambda b, h, i, j, *, docs: docs[i] > docs[j], docs=THIRDS), I % 3 > J % 3),
    "one that calls": (calling(), (I % 3 == J % 3) | (J <= 3)),
    "both of two": (joined("and", CLOSE(1), calling()), (J - I <= 1) & ((I % 3 == J % 3) | (J <= 3))),
    "one of three": (
        joined("or", CLOSE(-2), joined("and", CLOSE(3), calling()), functools.partial(alike, THIRDS)),
        (J - I <= -2) | ((J - I <= 3) & ((I % 3 == J % 3) | (J <= 3))) | (I % 3 == J % 3),
    ),
    "methods": (lambda b, h, i, j: ((i - j).abs() < 3) & (j.clamp(2, max=4) >= i.clamp(min=3)),
                (abs(I - J) < 3) & (np.clip(J, 2, 4) >= np.clip(I, 3, None))),
    "functions": (lambda b, h, i, j: TORCH.logical_and(TORCH.div(i, 2, rounding_mode="floor") == j // 2, TORCH.ge(j, 1)),
                  (I // 2 == J // 2) & (J >= 1)),
}  # fmt: skip
TORCH = types.ModuleType("torch")


@pytest.mark.parametrize("case", SERVED)
def test_what_is_written_anew(case, calls, qkv):
    """Each function is passed twice, and rewritten once."""
    mask, see = SERVED[case]
    for _ in range(2):
        close([flex_attention(*qkv, block_mask=block_mask(mask))], [attend(*qkv, see=np.broadcast_to(see, (ROWS, COLS)))[0]])
    assert calls[0]["mask"] is calls[1]["mask"]


def test_attributes_and_powers_in_a_score(calls, qkv):
    """A torch module is called by its `forward`; a number that changes gives another function."""
    layer = MaskLayer(reach=2)
    for layer.reach in 2, 3:
        expected = attend(*qkv, change=lambda s: s * layer.reach + J // 4)[0]
        close([flex_attention(*qkv, layer.forward)], [expected])
        close([flex_attention(*qkv, SimpleNamespace(forward=layer.forward))], [expected])
    close([flex_attention(*qkv, lambda s, b, h, i, j: s**3 + j)], [attend(*qkv, change=lambda s: s * s * s + J)[0]])


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no columns")
def test_two_of_one_line(calls, qkv):
    for mask, table in [(lambda b, h, i, j: THIRDS[j] <= i, J % 3 <= I), (lambda b, h, i, j: THIRDS[j] > i, J % 3 > I)]:
        close([flex_attention(*qkv, block_mask=block_mask(mask))], [attend(*qkv, see=table)[0]])


def test_an_array_that_two_functions_read_is_one_argument(calls, qkv):
    flex_attention(*qkv, lambda s, b, h, i, j: s + THIRDS[j], block_mask(lambda b, h, i, j: THIRDS[j] <= i))
    assert len(calls[0]["aux"]) == 1


def test_in_kernels():
    """The rewritten functions compile as kernel code: with the functions that they call, and with arrays of one number."""
    q, k, v = (np.random.default_rng(0).standard_normal((1, 2, n, 16)).astype(np.float16) for n in (ROWS, COLS, COLS))
    for mask, see in SERVED.values():
        actual = flex_attention(q, k, v, block_mask=block_mask(mask))
        np.testing.assert_allclose(actual, attend(q, k, v, see=np.broadcast_to(see, (ROWS, COLS)))[0], atol=4e-3)


def test_compiled():
    """torch.compile(flex_attention) is one graph, which is reused for another array, and recompiled for another number."""
    torch = pytest.importorskip("torch")
    from torch.nn.attention.flex_attention import and_masks, create_block_mask

    q, k, v = (torch.from_numpy(np.random.default_rng(0).standard_normal((1, 2, 16, 16))).bfloat16() for _ in range(3))
    reach, docs, slopes = 3, torch.arange(16) // 5, torch.tensor([0.5, 0.25])

    def near(b, h, i, j):
        return (i - j).abs() <= reach

    def score(s, b, h, i, j):
        return 4 * torch.tanh(s / 4) + slopes[h] * j

    compiled = torch.compile(flex_attention, fullgraph=True, backend="aot_eager")
    i, j = torch.arange(16)[:, None], torch.arange(16)
    for reach, slopes in [(3, slopes), (3, 2 * slopes), (5, slopes)]:  # noqa: B020
        mask = create_block_mask(and_masks(near, lambda b, h, i, j: docs[i] == docs[j]), None, None, 16, 16, device="cpu")
        actual = compiled(q, k, v, score, mask)
        s = 4 * torch.tanh(q.double() @ k.double().mT / 16) + slopes[:, None, None] * j
        see = ((i - j).abs() <= reach) & (docs[i] == docs[j])
        expected = torch.where(see, s, -torch.inf).softmax(-1) @ v.double()
        torch.testing.assert_close(actual.double(), expected, atol=0.03, rtol=0.02)


def test_what_torch_passes_for_nothing(calls, qkv):
    noop, identity = (lambda *args: 1 / 0), (lambda *args: 1 / 0)
    noop.__name__, identity.__name__ = "noop_mask", "_identity"
    noop.__module__ = identity.__module__ = "torch.nn.attention.flex_attention"
    close([flex_attention(*qkv, identity, block_mask(noop))], [attend(*qkv)[0]])


def of_torch():
    torch = types.ModuleType("torch")
    return lambda b, h, i, j: torch.sin(i) < j


REFUSED = {
    "no function": (math.prod, "mask: is not supported; pass a Python function"),
    "what ops has not": (of_torch(), "mask: calls torch.sin, which ops does not have"),
    "no source": (
        eval("lambda b, h, i, j: SLOPES[b] > 0"),
        "mask: captures arrays or calls torch, and its source was not found",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case, calls, qkv):
    mask, words = REFUSED[case]
    with pytest.raises(NotImplementedError, match=words):
        flex_attention(*qkv, block_mask=block_mask(mask))
    with pytest.raises(NotImplementedError, match="return_aux: .* return_lse=True"):
        flex_attention(*qkv, return_aux=object())
    with pytest.raises(TypeError, match="block_mask: must be a BlockMask; .*create_block_mask"):
        flex_attention(*qkv, block_mask=mask)
    assert not calls


def test_what_else_is_imported_is_torchs():
    with pytest.raises(AttributeError, match="has no attribute 'listen'"):
        _ = flex.listen
    pytest.importorskip("torch")
    from torch.nn.attention.flex_attention import create_block_mask

    assert flex.create_block_mask is create_block_mask


@pytest.mark.gpu
def test_on_the_card(card):
    """torch's own BlockMask, and its eager formula in float64."""
    torch = pytest.importorskip("torch")
    from torch.nn.attention.flex_attention import create_block_mask, create_mask

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    docs = torch.arange(300, device="cuda", dtype=torch.int32) // 70

    def mask(b, h, i, j):
        return (docs[i] == docs[j]) & (j <= i)

    lists, see = create_block_mask(mask, None, None, 300, 300), create_mask(mask, 1, 1, 300, 300)
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), see)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=lists).double(), expected, rtol=2**-6, atol=2**-7)
