"""attention.append: the same bits as in NumPy, and no byte written elsewhere."""

import ml_dtypes
import numpy as np
import pytest

import attention
from attention.plans.decode.cache_append import RoomCheck

BF16, F16, F32, F8, I8 = ml_dtypes.bfloat16, np.float16, np.float32, ml_dtypes.float8_e4m3fn, np.int8
WORDS = {1: np.uint8, 2: np.uint16}
POISON = {1: 0x7F, 2: 0x7FC5}  # of each size a NaN, in all of the caches' formats that have one


def poisoned(shape, dtype):
    size = np.dtype(dtype).itemsize
    return np.full(shape, POISON[size], WORDS[size]).view(dtype)


def bits(x):
    return np.ascontiguousarray(x).view(WORDS[x.itemsize])


def rotated(x, cos, sin, interleaved):
    """The rows of x (.., D), in float32, not yet rounded."""
    x, pairs = x.astype(F32), cos.shape[-1]
    first = np.s_[..., 0 : 2 * pairs : 2] if interleaved else np.s_[..., :pairs]
    second = np.s_[..., 1 : 2 * pairs : 2] if interleaved else np.s_[..., pairs : 2 * pairs]
    cos, sin, y = cos.astype(F32), sin.astype(F32), x.copy()
    y[first], y[second] = x[first] * cos - x[second] * sin, x[second] * cos + x[first] * sin
    return y


def rounded(x, dtype):
    if dtype == I8:
        return np.clip(np.rint(np.nan_to_num(x)), -128, 127).astype(dtype)
    return np.clip(x, -448, 448).astype(dtype) if dtype == F8 else x.astype(dtype)


def by_hand(
    k, v, k_new, v_new, lengths, pages=None, batch_index=None, cu_seqlens=None, rotary=None, interleaved=False, positions=None,
    k_descale=None, v_descale=None, q=None, causal=True,
):  # fmt: skip
    """What append does, token by token."""
    ends, size = cu_seqlens, k.shape[1]
    out = None if q is None else q.copy()
    for b, length in enumerate(lengths):
        new = [x[0, ends[b] : ends[b + 1]] if ends is not None else x[b] for x in (k_new, v_new)]
        start = int(length if positions is None else positions[b])
        for i, (key, value) in enumerate(zip(*new)):
            page, slot = divmod(int(length) + i, size)
            page = pages[b, page] if pages is not None else b if batch_index is None else batch_index[b]
            if rotary:
                key = rotated(key, *(table[start + i] for table in rotary), interleaved)
            for cache, row, scale in (k, key, k_descale), (v, value, v_descale):
                scale = 1 if scale is None else np.broadcast_to(scale, (len(lengths), cache.shape[2]))[b, :, None]
                cache[page, slot] = rounded(row.astype(F32) / scale, cache.dtype)
        if q is not None:
            mine = np.s_[0, ends[b] : ends[b + 1]] if ends is not None else np.s_[b]
            for i, row in enumerate(q[mine]):
                at = start + i * causal
                out[mine][i] = rotated(row, *(table[at] for table in rotary), interleaved)
    return out


def inputs(heads=2, head=32, value=None, dtype=BF16, cache=None, lengths=(3, 0, 6), new=2, size=9, paged=0, rotary=0,
           tables=F32, queries=0, packed=None, index=np.int32, scales=None, seed=0):  # fmt: skip
    """Arguments by name. paged: keys of a page, or 0; rotary: columns; scales: the axes of descales."""
    rng, count = np.random.default_rng(seed), len(lengths)
    value, cache = value or head, cache or dtype
    batch, tokens = (1, packed[-1]) if packed else (count, new)
    draw = lambda *shape, to=dtype: rng.standard_normal(shape).astype(to)
    arguments = dict(k_new=draw(batch, tokens, heads, head), v_new=draw(batch, tokens, heads, value))
    caches = (count, size)
    if packed:
        arguments["cu_seqlens"] = np.array(packed, index)
    if paged:
        most = [-(-(length + n) // paged) for length, n in zip(lengths, np.diff(packed) if packed else [new] * count)]
        pool = rng.permutation(sum(most) + 3)
        arguments["pages"] = np.full((count, max(most) + 1), -77, index)  # behind the pages in use
        for b, n in enumerate(most):
            arguments["pages"][b, :n], pool = pool[:n], pool[n:]
        caches = (sum(most) + 3, paged)
    arguments["k"], arguments["v"] = poisoned((*caches, heads, head), cache), poisoned((*caches, heads, value), cache)
    arguments["lengths"] = np.array(lengths, index)
    if rotary:
        arguments["rotary"] = draw(12, rotary // 2, to=tables), draw(12, rotary // 2, to=tables)
    if queries:
        arguments["q"] = draw(batch, tokens, queries, head)
    if scales:
        shape = (count, heads)[2 - scales :]
        arguments |= {name: 2.0 ** rng.integers(-6, 2, shape).astype(F32) for name in ("k_descale", "v_descale")}
    return arguments


def check(arguments, put=lambda x: x, get=lambda x: x, **options):
    """Compare every bit of both caches, and of the result."""
    expected = {**arguments, "k": arguments["k"].copy(), "v": arguments["v"].copy()}
    out = by_hand(**expected, **options)
    ours = {name: tuple(map(put, x)) if name == "rotary" else put(x) for name, x in arguments.items()}
    actual = attention.append(**ours, **options)
    assert (actual is None) == (out is None)
    for name, x, y in ("k", ours["k"], expected["k"]), ("v", ours["v"], expected["v"]), ("q", actual, out):
        if y is not None:
            np.testing.assert_array_equal(bits(get(x)), bits(y), name)


CASES = {
    "as it is": dict(head=48, value=16),
    "half of the columns": dict(rotary=16, tables=BF16),
    "all columns, two parts": dict(rotary=64, head=64, heads=17, lengths=(3,)),
    "two tiles of columns": dict(rotary=160, head=192, heads=1, lengths=(0, 5), dtype=F16),
    "odd columns": dict(rotary=6, head=10, heads=1),
    "pages of 1": dict(paged=1, rotary=32),
    "pages of 3": dict(paged=3, rotary=32, new=5, tables=F16, index=np.int64),
    "pages of 16": dict(paged=16, lengths=(15, 16, 17, 0)),
    "queries": dict(rotary=32, queries=4, new=1),
    "queries of more heads": dict(rotary=24, queries=34, heads=1, paged=4),
    "packed": dict(rotary=32, packed=(0, 3, 3, 4), paged=2, queries=2),
    "fp8": dict(cache=F8, rotary=32, head=64),
    "fp8, a scale a head": dict(cache=F8, rotary=32, head=64, heads=3, scales=1, paged=2),
    "fp8, of each sequence": dict(cache=F8, scales=2, dtype=F16),
    "int8, a scale a head": dict(cache=I8, rotary=32, head=64, heads=3, scales=1, paged=2),
    "int8, of each sequence": dict(cache=I8, scales=2, dtype=F16),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_same_bits_as_by_hand(place, case, interleaved):
    if interleaved and "rotary" not in CASES[case]:
        pytest.skip("nothing is rotated")
    check(inputs(**CASES[case]), place.put, place.get, interleaved=interleaved)


@pytest.mark.parametrize("arch, case, interleaved", [
    ("sm_90a", "fp8, a scale a head", True),
    pytest.param("sm_80", "int8, a scale a head", True, marks=pytest.mark.release),
    ("sm_80", "half of the columns", True),
])  # fmt: skip
def test_as_compiled(arch, case, interleaved, as_compiled):
    """The compiled PTX, run by the emulator."""
    as_compiled(arch)
    check(inputs(**CASES[case]), interleaved=interleaved)


def cancelling(interleaved):
    """Rows whose rotated columns are 0 if both products are rounded, for cos = sin, and the columns of a pair are alike or
    opposite; an fma leaves what a product lost."""
    arguments = inputs(heads=2, head=32, rotary=32, queries=2, dtype=F16, lengths=(3, 0))
    arguments["rotary"] = (arguments["rotary"][0],) * 2
    for x in arguments["k_new"], arguments["q"]:
        first, second = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :16], x[..., 16:])
        second[...] = first * np.tile([1, -1], 8).astype(F16)
    return arguments


def test_products_that_cancel(place):
    check(cancelling(False), place.put, place.get)


def test_products_that_cancel_as_compiled(as_compiled):
    """The compiled PTX contracts no product and sum to an fma."""
    as_compiled("sm_90a")
    check(cancelling(True), interleaved=True)


def check_found(arguments, put=lambda x: x, get=lambda x: x, heads_first=False, **options):
    """A cache of one byte whose descales are computed, max(abs(row)) / 448 or 127, and nothing else is written."""
    dtype = arguments["k"].dtype
    end = 127 if dtype == I8 else 448
    rows = {name: np.full(arguments[name].shape, np.nan, F32) for name in "kv"}
    expected = by_hand(**arguments | rows, **options)
    ours = {name: tuple(map(put, x)) if name == "rotary" else put(x) for name, x in arguments.items()}
    for name in "kv":
        room = poisoned((arguments[name].size // arguments[name].shape[-1], 2), BF16).view(F32)  # NaN
        shape = arguments[name].shape[:3]
        ours[f"{name}_descale"] = put(room.reshape(shape[0], shape[2], shape[1])).swapaxes(1, 2) if heads_first else put(
            room.reshape(shape))  # fmt: skip
    out = attention.append(**ours, **options)
    assert (out is None) == (expected is None)
    if out is not None:
        np.testing.assert_array_equal(bits(get(out)), bits(expected))
    for name, row in rows.items():
        actual, storage = get(ours[f"{name}_descale"]), get(ours[name])
        greatest = np.abs(row).max(-1)
        np.testing.assert_allclose(actual, np.maximum(greatest / end, 2.0**-120), rtol=2.0**-22)  # NaN where nothing is written
        new = ~np.isnan(greatest)
        assert new.any() and (bits(storage)[~new] == POISON[1]).all()
        quotient = (row / actual[..., None])[new]
        low, high = (rounded(quotient * (1 + sign * 2.0**-21), dtype) for sign in (-1, 1))
        assert ((storage[new] == low) | (storage[new] == high)).all()
        assert (np.abs(storage[new].astype(F32)).max(-1) == end)[greatest[new] > 0].all()
    return ours


FOUND = {
    "as it is": dict(head=48, value=16, heads=17, lengths=(3,)),
    "rotated in part": dict(rotary=16, head=40, paged=3, new=5, index=np.int64),
    "two tiles of columns": dict(rotary=160, head=192, heads=1, lengths=(0, 5), dtype=F16),
    "packed, queries": dict(rotary=32, packed=(0, 3, 3, 4), paged=2, queries=2),
}


@pytest.mark.parametrize(("case", "dtype"), [*((case, F8) for case in FOUND), ("rotated in part", I8), ("packed, queries", I8)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_computed_descales(place, case, dtype, interleaved):
    """The descale is of the rotated row, whose numbers may be larger by 2 ** 0.5."""
    if interleaved and "rotary" not in FOUND[case]:
        pytest.skip("nothing is rotated")
    check_found(inputs(cache=dtype, **FOUND[case]), place.put, place.get, heads_first=interleaved, interleaved=interleaved)


@pytest.mark.parametrize("bias", [False, True])
def test_descales_of_normalised_rows(bias):
    """Norm, rotation, then descale: those of the rows that the same call writes to a cache of 16 bits."""
    arguments = inputs(rotary=16, heads=3)
    weights = np.random.default_rng(4).standard_normal((2, 3, 32)).astype(F32)
    norm = (weights[0], weights[1]) if bias else weights[0]
    attention.append(**arguments, k_new_norm=norm)
    small = arguments | {name: poisoned(arguments[name].shape, F8) for name in "kv"}
    descales = {f"{name}_descale": np.full(arguments[name].shape[:3], np.nan, F32) for name in "kv"}
    attention.append(**small, **descales, k_new_norm=norm)
    greatest = np.abs(arguments["k"].astype(F32)).max(-1)
    assert (np.isnan(greatest) == np.isnan(descales["k_descale"])).all() and not np.isnan(greatest).all()
    np.testing.assert_allclose(descales["k_descale"], greatest / 448, rtol=2.0**-8)
    wide = small["k"].astype(F32) * descales["k_descale"][..., None]
    np.testing.assert_allclose(wide, arguments["k"].astype(F32), rtol=2.0**-3.9, atol=2.0**-9 * np.nanmax(greatest) / 448)


def test_rows_of_zeros_and_of_nan_have_a_descale():
    """Rows that are not finite stay so: one with an infinity is NaN or infinite when it is read."""
    arguments = inputs(cache=F8, heads=1, lengths=(0,), new=3)
    arguments["v_new"][0, 0] = 0
    arguments["k_new"][0, 1, 0, 3] = np.nan
    arguments["k_new"][0, 2, 0, 3] = np.inf
    descales = {f"{name}_descale": np.zeros((1, 9, 1), F32) for name in "kv"}
    attention.append(**arguments, **descales)
    wide = {name: arguments[name].astype(F32) * descales[f"{name}_descale"][..., None] for name in "kv"}
    assert (wide["v"][0, 0] == 0).all() and np.isfinite(wide["v"][0, :3]).all()
    assert np.isnan(wide["k"][0, 1, 0, 3]) and np.isnan(wide["k"][0, 1]).sum() == 1
    assert not np.isfinite(wide["k"][0, 2, 0, 3])


def test_a_nan_is_0_in_int8():
    """There is none; an infinity makes the descale, and so the row that is read, infinite or NaN."""
    arguments = inputs(cache=I8, heads=1, lengths=(0,), new=2)
    arguments["k_new"][0, 0, 0, 3], arguments["v_new"][0, 1, 0, 3] = np.nan, np.inf
    descales = {f"{name}_descale": np.zeros((1, 9, 1), F32) for name in "kv"}
    attention.append(**arguments, **descales)
    assert (
        arguments["k"][0, 0, 0, 3] == 0
        and (arguments["k"][0, 0, 0, 4:] != 0).any()
        and np.isfinite(descales["k_descale"]).all()
    )
    assert np.isinf(descales["v_descale"][0, 1, 0]) and (arguments["v"][0, 1] == 0).all()


def test_computed_descales_as_compiled(as_compiled):
    as_compiled("sm_90a")
    check_found(inputs(cache=F8, rotary=16, head=40, heads=1, lengths=(3,), new=1), interleaved=True)


@pytest.mark.parametrize("case", ["packed", "fp8, a scale a head", "computed"])
def test_keys_alone(case, place):
    """The bits of a call with values: of keys, of queries and of computed descales."""
    arguments = inputs(cache=I8) if case == "computed" else inputs(**CASES[case])
    if case == "computed":
        arguments |= {f"{name}_descale": np.zeros(arguments["k"].shape[:3], F32) for name in "kv"}
    there = lambda x: tuple(map(place.put, x)) if isinstance(x, tuple) else place.put(x.copy())
    paired, alone = ({name: there(x) for name, x in arguments.items()} for _ in range(2))
    out = attention.append(**paired)
    actual = attention.append(**alone | dict.fromkeys(name for name in alone if name.startswith("v")))
    for name in {"k", "k_descale"} & {*alone}:
        np.testing.assert_array_equal(*(place.get(x[name]).view(np.uint8) for x in (alone, paired)), name)
    assert out is actual is None or np.array_equal(bits(place.get(actual)), bits(place.get(out)))


def test_queries_at_one_position(place):
    check(inputs(rotary=32, queries=2, new=3), place.put, place.get, causal=False)


def test_queries_of_another_number_and_in_place():
    arguments = inputs(rotary=32, queries=2, new=3)
    for tokens in (1, 2, 3):
        few = arguments | {name: arguments[name][:, :tokens].copy() for name in ("k_new", "v_new")}
        check(few | {"k": arguments["k"].copy(), "v": arguments["v"].copy()})
    expected = by_hand(**arguments)
    assert attention.append(**arguments, out=arguments["q"]) is arguments["q"]
    assert (bits(arguments["q"]) == bits(expected)).all()


@pytest.mark.parametrize("bias", [False, True])
def test_queries_in_place_are_normalised(bias):
    """Rows of several tiles of columns: none is written before all are read."""
    arguments = inputs(head=96, rotary=16, queries=2)
    weights = np.random.default_rng(4).standard_normal((2, 96)).astype(F32)
    norm = tuple(weights) if bias else weights[0]
    expected = attention.append(**arguments, q_norm=norm)
    assert attention.append(**arguments, q_norm=norm, out=arguments["q"]) is arguments["q"]
    np.testing.assert_array_equal(bits(arguments["q"]), bits(expected))


def test_positions_are_not_lengths(place):
    check(inputs(rotary=32, queries=2) | {"positions": np.array([0, 9, 4], np.int32)}, place.put, place.get)


def test_batch_index(place):
    """Three of five caches, in another order."""
    arguments = inputs(rotary=16)
    for name in "kv":
        arguments[name] = poisoned((5, *arguments[name].shape[1:]), BF16)
    check(arguments | {"batch_index": np.array([4, 0, 3], np.int32)}, place.put, place.get)


@pytest.mark.parametrize("past", [0, 1, 4])
def test_anywhere_in_memory(past):
    """K and V of a token are neighbours in memory; new ones are views of a linear layer's output."""
    arguments = inputs(rotary=16, heads=3, paged=4)
    pool = poisoned((*arguments["k"].shape[:2], 2, 3, 32 + past), BF16)
    new = np.concatenate([arguments["k_new"], arguments["v_new"]], axis=2)
    room = poisoned((*new.shape[:3], 32 + past), BF16)
    room[..., past:] = new
    expected = pool.copy()
    by_hand(**arguments | {"k": expected[:, :, 0, :, past:], "v": expected[:, :, 1, :, past:]})
    caches = {"k": pool[:, :, 0, :, past:], "v": pool[:, :, 1, :, past:]}
    attention.append(**arguments | caches | {"k_new": room[:, :, :3, past:], "v_new": room[:, :, 3:, past:]})
    np.testing.assert_array_equal(bits(pool), bits(expected))


def test_the_same_bits_as_torch():
    """Against rotary embedding as models write it, in float32."""
    torch = pytest.importorskip("torch")
    put = lambda x: torch.from_numpy(bits(x)).view(torch.bfloat16) if x.dtype == BF16 else torch.from_numpy(x)
    arguments = inputs(rotary=32, new=4, size=10, queries=2)
    arguments = {name: tuple(map(put, x)) if name == "rotary" else put(x) for name, x in arguments.items()}
    cos, sin = arguments["rotary"]
    at = arguments["lengths"][:, None] + torch.arange(4)

    def embedded(x):
        x1, x2 = x.float().chunk(2, -1)
        c, s = cos[at.long()][:, :, None], sin[at.long()][:, :, None]
        return torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], -1).to(x.dtype)

    out = attention.append(**arguments)
    assert torch.equal(out, embedded(arguments["q"]))
    keys = embedded(arguments["k_new"])
    for b, start in enumerate(arguments["lengths"].tolist()):
        assert torch.equal(arguments["k"][b, start : start + 4], keys[b])
        assert torch.equal(arguments["v"][b, start : start + 4], arguments["v_new"][b])


def test_nan_and_infinity_go_through():
    """Rows are copied bit by bit; in fp8 what is beyond 448 becomes 448."""
    arguments = inputs(heads=1, lengths=(0,), new=1)
    arguments["v_new"][0, 0, 0, :3] = np.inf, np.nan, 1e30
    attention.append(**arguments)
    assert np.isposinf(arguments["v"][0, 0, 0, 0]) and np.isnan(arguments["v"][0, 0, 0, 1])
    small = arguments | {name: poisoned((1, 9, 1, 32), F8) for name in "kv"}
    attention.append(**small)
    assert small["v"][0, 0, 0, 0] == small["v"][0, 0, 0, 2] == 448 and np.isnan(small["v"][0, 0, 0, 1].astype(F32))


# ---- no room ---------------------------------------------------------------------------------------------------------
FULL = {
    "lengths: sequence 2 has room for 9 keys: lengths[2]=8, 2 new tokens": dict(lengths=(3, 0, 8)),
    "lengths: must not be negative: lengths[0]=-1, 2 new tokens": dict(lengths=(-1, 0, 8)),
    "rotary: has 12 positions: sequence 0 begins at 11": dict(lengths=(11,), rotary=16, size=20),
}


@pytest.mark.parametrize("message", FULL)
def test_a_full_cache_is_refused(message):
    arguments = inputs(**FULL[message])
    with pytest.raises(ValueError, match=message.replace("[", r"\[").replace("]", r"\]")):
        attention.append(**arguments)
    assert (bits(arguments["k"]) == POISON[2]).all()


def test_unused_rows_of_a_paged_cache_are_not_written():
    """In PagedCache.starts and pages an unused row has start -1 and pages -1."""
    arguments = inputs(paged=4, lengths=(6, 3))
    arguments["lengths"][0], arguments["pages"][0] = -1, -1
    before = bits(arguments["k"]).copy()
    attention.append(**arguments)
    rows = (bits(arguments["k"]) != before).any((2, 3)).sum()
    assert rows == arguments["k_new"].shape[1]
    arguments["pages"][0, 0] = 0  # a page to write to
    with pytest.raises(ValueError, match="lengths: must not be negative"):
        attention.append(**arguments)


@pytest.mark.parametrize("entry", [-1, 9])
def test_pages_outside_the_pool_are_refused(entry):
    arguments = inputs(paged=4, lengths=(6, 3))
    arguments["pages"][0, 1] = entry + (entry > 0) * len(arguments["k"])
    with pytest.raises(ValueError, match=r"pages: must be from 0 to \d: pages\[0, 1\]="):
        attention.append(**arguments)
    arguments["pages"][0, 1], arguments["pages"][0, 0] = 0, entry  # in use, but not written
    attention.append(**arguments)


def test_tokens_beyond_the_cache_are_not_written(monkeypatch):
    """Without the check, as on a device: all other tokens are written, and queries beyond the tables are NaN."""
    monkeypatch.setattr(RoomCheck, "run", lambda *_: None)
    arguments = inputs(rotary=16, lengths=(8, -1, 6, 0), new=3, queries=1)
    expected = arguments["k"].copy()
    some = [(0, 8, 0), *((2, 6 + i, i) for i in range(3)), *((3, i, i) for i in range(3))]
    for b, at, i in some:
        expected[b, at] = rotated(arguments["k_new"][b, i], *(table[at] for table in arguments["rotary"]), False)
    out = attention.append(**arguments)
    np.testing.assert_array_equal(bits(arguments["k"]), bits(expected))
    assert np.isnan(out[1, 0].astype(F32)).all() and not np.isnan(out[1, 1:].astype(F32)).any()
    paged = inputs(paged=4, lengths=(6, 3), new=3, index=np.int64)
    paged["pages"][0] = [0, -1, 2, 10**6]
    paged["pages"][1] = [1, 2**32, 3, 3]  # of 64 bits: not page 0
    attention.append(**paged)
    written = np.argwhere((bits(paged["k"]) != POISON[2]).any((2, 3)))
    assert written.tolist() == [[1, 3], [2, 0]]  # page 2 begins at key 8


def test_tables_that_end_early(monkeypatch):
    monkeypatch.setattr(RoomCheck, "run", lambda *_: None)
    arguments = inputs(rotary=16, lengths=(10,), new=4, size=20, queries=1)
    out = attention.append(**arguments)
    assert (bits(arguments["k"])[0, 10:12] != POISON[2]).any((1, 2)).all() and (bits(arguments["k"])[0, 12:] == POISON[2]).all()
    assert np.isnan(out[0, 2:].astype(F32)).all() and not np.isnan(out[0, :2].astype(F32)).any()


# ---- arguments -------------------------------------------------------------------------------------------------------
REFUSED = {
    "k: dtype must be k_new's": dict(k=lambda x: x.astype(F16), v=lambda x: x.astype(F16)),
    "v: dtype must be k_new's, float8_e4m3fn or int8, as k's": dict(v=lambda x: x.astype(F8)),
    "k: last axis must be contiguous": dict(k=lambda x: np.zeros((3, 9, 2, 64), BF16)[..., ::2]),
    "k: batch must equal the number of sequences, 3, unless pages or batch_index": dict(k=lambda x: x[:2], v=lambda x: x[:2]),
    "v: value_dim must equal v_new.s": dict(v_new=lambda x: x[..., :16]),
    "lengths: ": dict(lengths=lambda x: x[:2]),
    "k: must be writable": dict(k=lambda x: np.frombuffer(x.tobytes(), BF16).reshape(x.shape)),
    "cos: must have a column for each pair of rotated columns, from 1 to 16": dict(
        rotary=lambda x: (np.ones((9, 17), F32),) * 2
    ),
    r"cos: must have a column .*transformers' tables repeat each column: pass cos\[:, :16\]\)": dict(
        rotary=lambda x: (np.ones((9, 32), F32),) * 2
    ),
    "rotary: must be a pair": dict(rotary=lambda x: np.ones((9, 16))),
    "q: is passed to be rotated, and needs rotary": dict(q=lambda x: np.ones((3, 2, 2, 32), BF16)),
    "out: is where the rotated q goes": dict(out=lambda x: np.ones((3, 2, 2, 32), BF16)),
    "positions: are rows of rotary's tables": dict(positions=lambda x: np.zeros(3, np.int32)),
    "v_descale: must be passed together with k_descale": dict(k_descale=lambda x: np.ones(2, F32)),
    "k_descale: must be None unless the cache is float8": dict.fromkeys(["k_descale", "v_descale"], lambda x: np.ones(2, F32)),
    "v: must be passed together with v_new: v=None": dict(v=lambda x: None),
    "v_new: must be passed together with v: v_new=None": dict(v_new=lambda x: None),
    "v: must be passed together with v_descale": dict(
        v=lambda x: None, v_new=lambda x: None, v_descale=lambda x: np.ones(2, F32)
    ),
    "v_descale: must have the axes": dict(k_descale=lambda x: np.ones((3, 9, 2), F32), v_descale=lambda x: np.ones(2, F32)),
    "batch_index: must be None where pages is passed": dict(
        pages=lambda x: np.zeros((3, 1), np.int32), batch_index=lambda x: np.zeros(3, np.int32)
    ),
    "interleaved: must be a bool": dict(interleaved=lambda x: 1),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refused(message):
    arguments = inputs()
    arguments |= {name: change(arguments.get(name)) for name, change in REFUSED[message].items()}
    with pytest.raises((TypeError, ValueError), match=f"^({message})"):
        attention.append(**arguments)


def test_nothing_to_append():
    arguments = inputs(new=0)
    assert attention.append(**arguments) is None
    assert (bits(arguments["k"]) == POISON[2]).all()


def across(x):
    """(B, S, H, ..) as (B, H, S, ..)."""
    return np.ascontiguousarray(x.swapaxes(1, 2))


@pytest.mark.parametrize(("dtype", "paged"), [(BF16, False), (BF16, True), (F8, False), (F8, True), (I8, True)])
def test_heads_before_tokens(dtype, paged):
    """layout="bhsd": the same bits in caches, pools, descales of each token, and rotated queries."""
    rng = np.random.default_rng(7)
    k_new, v_new, q = (rng.standard_normal((2, 3, heads, 64)).astype(BF16) for heads in (2, 2, 4))
    k, v = (poisoned((6, 16, 2, 64) if paged else (2, 32, 2, 64), dtype) for _ in range(2))
    arguments = dict(lengths=np.array([5, 14], np.int32), rotary=tuple(rng.standard_normal((2, 40, 16)).astype(F32)))
    if paged:
        arguments["pages"] = np.array([[0, 3], [4, 1]], np.int32)
    scales = {name: np.ones(k.shape[:3], F32) for name in ("k_descale", "v_descale")} if dtype in (F8, I8) else {}
    turned = {name: across(x) for name, x in scales.items()}
    caches = across(k), across(v)
    out = attention.append(k, v, k_new, v_new, q=q, **scales, **arguments)
    q_out = attention.append(*caches, *map(across, (k_new, v_new)), q=across(q), layout="bhsd", **turned, **arguments)
    assert (bits(across(q_out)) == bits(out)).all()
    for ours, theirs in (*zip((k, v), caches), *zip(scales.values(), turned.values())):
        assert (across(theirs).view(np.uint8) == ours.view(np.uint8)).all()
