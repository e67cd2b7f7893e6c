"""attention.decode on caches of fp8 and int8, with descales of heads and of each token, against float64."""

from types import SimpleNamespace

import numpy as np
import pytest
from decode_checks import FP8, case, known
from forward_checks import draw
from places import OnInterpreter
from poison import in_pages, poisoned

import attention
from attention import reference
from attention.plans.decode import decode_launches
from tiles import int8
from tiles.targets import MEDIUM

INT8 = int8.np


def quantised(x, dtype):
    """x as a cache holds it, in which it has some 8 or 32 units; what is NaN has any value in int8."""
    x = x.astype(np.float32) * (8 if dtype == FP8 else 32)
    return np.clip(x, -448, 448).astype(FP8) if dtype == FP8 else int8.round(np.nan_to_num(x, nan=-128))


def agrees(place, lengths, head_dim, tokens, size, per, splits, dtype=FP8, family=None):
    """Against float64 of the numbers that a cache holds, by 4 times what the formula in q's dtype loses. NaN stands behind
    them. per: the axes of descales, "" for none; of each token they differ by factors of 1000, and are tiny."""
    rng = np.random.default_rng(5)
    q, k, v = case(lengths, tokens, head_dim=head_dim)
    eight = [quantised(x, dtype) for x in (k, v)]
    shape = {"B": len(lengths), "G": 2, "T": k.shape[1]}
    descales = [rng.uniform(0.05, 0.3, [shape[axis] for axis in per]).astype(np.float32) for _ in "kv"]
    if "T" in per:
        descales = [descales[0], (1e-12 * 10 ** rng.uniform(0, 3, descales[1].shape)).astype(np.float32)]
        for b, n in enumerate(lengths):
            descales[0][b, n:] = descales[1][b, n:] = np.nan
        caches = [x.astype(np.float32) * d[..., None] for x, d in zip(eight, descales)]
    else:
        caches = [x.astype(np.float32) * (d[..., None, :, None] if per else 1) for x, d in zip(eight, descales)]
    kwargs = {"lengths": np.array(lengths, np.int32)}
    if per:
        kwargs |= {"k_descale": descales[0], "v_descale": descales[1]}
    if size:
        eight, kwargs["pages"] = in_pages(eight, lengths, size)
    if size and "T" in per:
        (kwargs["k_descale"], kwargs["v_descale"]), _ = in_pages(descales, lengths, size)
    kwargs, scale = {name: place.put(x) for name, x in kwargs.items()}, None if per else 0.01 if dtype == FP8 else 0.001
    actual = attention.decode(place.put(q), *[place.put(x) for x in eight], scale=scale, splits=splits, family=family, **kwargs)
    (ref, _), (low, _) = known(q, *caches, lengths, causal=True, scale=scale)
    reference.assert_close(place.get(actual), ref, low, factor=4)


@pytest.mark.parametrize(
    ("head_dim", "tokens", "size", "dtype"),
    [(128, 9, 16, FP8), (128, 9, 16, INT8), (64, 1, None, FP8), (64, 1, None, INT8)],
    ids=str,
)
def test_caches(place, head_dim, tokens, size, dtype):
    agrees(place, (150, 0, 70), head_dim, tokens, size, "BG", None, dtype)


@pytest.mark.parametrize(
    ("head_dim", "tokens", "size", "per", "splits", "dtype"),
    [
        (96, 5, 1, "", None, FP8), (256, 1, None, "G", 2, FP8), (192, 1, 16, "BG", 1, FP8),
        (96, 1, None, "G", 1, INT8), (256, 5, 16, "", 2, INT8), (192, 9, 1, "BG", None, INT8),
    ],
    ids=str,
)  # fmt: skip
def test_other_caches(head_dim, tokens, size, per, splits, dtype):
    agrees(OnInterpreter(), (150, 0, 70), head_dim, tokens, size, per, splits, dtype)


@pytest.mark.parametrize(
    ("head_dim", "tokens", "size", "splits", "dtype"),
    [
        (128, 9, 16, None, FP8), (64, 1, None, 2, FP8), (64, 9, 1, 1, FP8), (256, 1, 40, None, FP8),
        (128, 1, 16, None, INT8), (64, 9, None, 2, INT8),
    ],
    ids=str,
)  # fmt: skip
def test_descales_of_each_token(place, head_dim, tokens, size, splits, dtype):
    """Descales after a length are NaN."""
    agrees(place, (150, 0, 70), head_dim, tokens, size, "BTG", splits, dtype)


@pytest.mark.parametrize("dtype", [FP8, INT8], ids=str)
def test_descales_of_each_token_that_grow(place, dtype):
    """A warp's O changes its unit when a later tile has a larger descale."""
    agrees(place, (900,), 64, 1, None, "BTG", 1, dtype)


@pytest.mark.parametrize(("bias", "dtype"), [(False, FP8), (True, INT8)], ids=str)
def test_descales_of_each_token_and_norms_of_keys(bias, dtype):
    """norm_eps is in units of the keys, not of the stored numbers."""
    lengths = (70, 5)
    q, k, v = case(lengths, 2)
    eight = [quantised(np.nan_to_num(x.astype(np.float32)), dtype) for x in (k, v)]
    units = [np.exp2(draw((2, 70, 2), np.float32, seed) - 6) for seed in (8, 9)]
    weights = draw((2, 2, 64), np.float32, 10)
    norm = (weights[0], weights[1]) if bias else weights[0]
    kwargs = {"k_descale": units[0], "v_descale": units[1], "lengths": np.int32(lengths)}
    actual = attention.decode(q, *eight, **kwargs, k_norm=norm, norm_eps=0.01, splits=2)
    caches = [x.astype(np.float32) * d[..., None] for x, d in zip(eight, units)]
    (ref, _), (low, _) = known(q, *caches, lengths, causal=True, k_norm=norm, norm_eps=0.01)
    reference.assert_close(actual, ref, low, factor=4)


def test_descales_of_each_token_anywhere(place):
    """Strided descales with batch_index and leftpad, in both layouts."""
    lengths, leftpad, index = (70, 20), (3, 0), [3, 1]
    q, k, v = case(lengths, 2)
    eight = [np.nan_to_num(x.astype(np.float32)).astype(FP8) for x in (k, v)]
    units = [np.exp2(draw((2, 70, 2), np.float32, seed) - 6) for seed in (8, 9)]
    caches, descales = [poisoned((5, *x.shape[1:]), FP8) for x in eight], [poisoned((5, 2, 70), np.float32) for _ in units]
    for b, n in enumerate(lengths):
        for i in range(2):
            caches[i][index[b], leftpad[b] : n] = eight[i][b, leftpad[b] : n]
            descales[i][index[b], :, leftpad[b] : n] = units[i][b, leftpad[b] : n].T
    kwargs = {"lengths": np.int32(lengths), "leftpad": np.int32(leftpad), "batch_index": np.int32(index)}
    kwargs = {name: place.put(x) for name, x in kwargs.items()} | {"splits": 2}
    inputs, descales = [place.put(x) for x in (q, *caches)], [place.put(x).swapaxes(1, 2) for x in descales]
    actual = attention.decode(*inputs, k_descale=descales[0], v_descale=descales[1], **kwargs)
    wide = [x.astype(np.float32) * d[..., None] for x, d in zip(eight, units)]
    (ref, _), (low, _) = known(q, *wide, lengths, leftpad, causal=True)
    reference.assert_close(place.get(actual), ref, low, factor=4)
    transposed = [x.swapaxes(1, 2) for x in (*inputs, *descales)]
    again = attention.decode(*transposed[:3], k_descale=transposed[3], v_descale=transposed[4], layout="bhsd", **kwargs)
    np.testing.assert_array_equal(place.get(again).swapaxes(1, 2), place.get(actual))


# ---- as compiled ------------------------------------------------------------------------------------------------------
AS_COMPILED = [("sm_80", INT8), pytest.param("sm_90a", FP8, marks=pytest.mark.release)]


@pytest.mark.parametrize(("arch", "dtype"), AS_COMPILED, ids=str)
def test_as_compiled(as_compiled, arch, dtype):
    as_compiled(arch)
    agrees(OnInterpreter(), (70,), 64, 1, None, "BG", 1, dtype)


def test_shared_memory_of_an_a100(place, monkeypatch, nothing_known):
    """Eight warps' O of 32 rows are merged in four parts there."""
    machine = decode_launches.machine

    def limited(device):
        gpu = machine(device)
        return SimpleNamespace(processors=gpu.processors, shared_bytes=MEDIUM, target=gpu.target)

    monkeypatch.setattr(decode_launches, "machine", limited)
    agrees(place, (150, 0, 70), 128, 16, None, "BG", None, INT8, family="sm_80")


@pytest.mark.release
def test_descales_of_each_token_as_compiled(as_compiled):
    as_compiled("sm_90a")
    agrees(OnInterpreter(), (70,), 64, 1, 16, "BTG", 1)
