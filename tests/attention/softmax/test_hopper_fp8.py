"""attention.forward of float8_e4m3fn against float64: what it may lose is 4 times what the formula loses whose weights are
rounded to e4m3 (2^8 times what they are) and whose sums are float32's, and a rounding of the output."""

import ml_dtypes
import numpy as np
import pytest
from forward_checks import ULP, draw, there
from places import BF16, OnCard, OnInterpreter
from poison import poisoned, unseen

import attention
from attention import reference
from attention.kernels.softmax import forward_fp8_hopper
from attention.plans.softmax import forward_programs
from ops import where
from tiles.launching.frameworks import describe

E4M3, FP16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.float16)
UNITS = "q_descale", "k_descale", "v_descale"
LOW_ROWS = lambda s, b, h, i, j: where(i % 3 == 0, s, where(i % 3 == 1, -1.1e8, -1e31))  # all the scores of a row


def inputs(batch, seq_q, seq_kv, heads, heads_kv, head_dim, value_dim=None):
    """The result is q, k and v in e4m3."""
    keys = batch, seq_kv, heads_kv
    shapes = (batch, seq_q, heads, head_dim), (*keys, head_dim), (*keys, value_dim or head_dim)
    return tuple(draw(shape, E4M3, seed) for seed, shape in enumerate(shapes))


def units(sequences, heads, *names):
    """Descales of each sequence and head, or of these names."""
    drawn = np.random.default_rng(7)
    return {name: drawn.uniform(0.5, 2, (sequences, heads)).astype(np.float32) for name in names or UNITS}


def _cut_off(q, k, options):
    """What Hopper's products of fp8 may be off, whose sums keep some 11 bits (bench/notes/fp8.md)."""
    with np.errstate(invalid="ignore"):
        longest = [np.nanmax(np.linalg.norm(x.astype(np.float32), axis=-1)) for x in (q, k)]
    units = [np.max(options.get(name, 1.0)) for name in ("q_descale", "k_descale")]
    return 2.0**-11 * np.prod(longest) * np.prod(units) * options.get("scale", q.shape[-1] ** -0.5)


def agree(place, q, k, v, *, out_dtype=BF16, **options):
    """Run and judge: out and lse, no NaN, every element written. What no query sees is poison."""
    out = place.put(poisoned((*q.shape[:-1], v.shape[-1]), out_dtype))
    put = {name: place.put(options[name]) for name in UNITS if isinstance(options.get(name), np.ndarray)}
    args = there(place, options) | put
    outputs, lse = attention.forward(*map(place.put, unseen(q, k, v, **options)), out=out, return_lse=True, **args)
    assert outputs is out
    ref, ref_lse = reference.forward(q, k, v, **options)
    low, _ = reference.forward_low(q, k, v, **options)
    reference.assert_close(place.get(out), ref, low, factor=4)
    near = 2e-3 if options.get("softcap") else 2e-5
    near = max(near, _cut_off(q, k, options)) if isinstance(place, OnCard) else near
    np.testing.assert_allclose(place.get(lse), ref_lse, rtol=8 * ULP, atol=near)
    return place.get(out)


@pytest.mark.parametrize(
    ("seq_q", "seq_kv", "head_dim", "causal"),
    [(1, 1, 128, False), (129, 257, 128, True), (70, 520, 128, False), (64, 200, 64, True), (200, 130, 64, False)]
    + [(130, 100, 256, True), (66, 210, 256, False), (40, 70, 96, True), (5, 65, 16, False)],
)
def test_lengths_around_tile_edges(seq_q, seq_kv, head_dim, causal):
    agree(OnInterpreter(), *inputs(1, seq_q, seq_kv, 1, 1, head_dim), causal=causal)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_on_the_card(card, head_dim):
    """A kernel each: four query heads share two of keys; units of each sequence and head."""
    for seq_q, seq_kv in ((1, 1), (200, 700), (333, 129)):
        agree(card, *inputs(2, seq_q, seq_kv, 4, 2, head_dim), causal=True, **units(2, 2))


@pytest.mark.parametrize(
    "options",
    [
        dict(causal=True, **units(2, 1)),
        dict(window=(20, 0)),
        dict(softcap=2.0, causal=True, **units(2, 1)),
        dict(sink=np.float32([1, -2]), **units(2, 1)),
        dict(alibi=np.float32([0.1, 0.4]), causal=True, **units(2, 1, "k_descale")),
        dict(lengths_k=np.int32([70, 3]), v_descale=0.5, q_descale=2.0),
        dict(score=lambda s, b, h, i, j: s * 0.5 + h, mask=lambda b, h, i, j: (i + j) % 3 < 2, k_descale=np.float32([0.5])),
        dict(score=LOW_ROWS, causal=True),
    ],
    ids=lambda options: " ".join(options),
)
def test_variants(options):
    """By the same objects as of 16 bits. Two query heads share one of keys; units are a number, a head's, a sequence's."""
    agree(OnInterpreter(), *inputs(2, 70, 140, 2, 1, 64), **options)


def block_units(q, k, v, *names):
    """Descales of each block of 128 rows and head, or of these names; they differ by factors of 100."""
    drawn = np.random.default_rng(8)
    actual = {}
    for name, x in zip(UNITS, (q, k, v)):
        batch, rows, heads, _ = x.shape
        if name in (names or UNITS):
            actual[name] = (0.1 * 10 ** drawn.uniform(-1, 1, (batch, -(-rows // 128), heads))).astype(np.float32)
    return actual


@pytest.mark.parametrize(
    ("seq_q", "seq_kv", "head_dim", "options"),
    [(200, 400, 128, dict(causal=True)), (129, 130, 64, {}), (1, 257, 96, {}), (130, 300, 64, dict(window=(150, 0)))]
    + [(70, 200, 64, dict(softcap=2.0, alibi=np.float32([0.02, 0.1]), sink=np.float32([1, -2])))]
    + [(70, 200, 64, dict(score=lambda s, b, h, i, j: s * 0.5 + h, mask=lambda b, h, i, j: (i + j) % 3 < 2))]
    + [(70, 200, 64, dict(score=LOW_ROWS))]
    + [(140, 200, 64, dict(lengths_k=np.int32([131, 0]), q_descale=0.25))],
    ids=lambda x: "+".join(x) if isinstance(x, dict) else str(x),
)
def test_descales_of_blocks(seq_q, seq_kv, head_dim, options):
    """Two query heads, each with descales of its own, share one of keys."""
    q, k, v = inputs(2 if "lengths_k" in options else 1, seq_q, seq_kv, 2, 1, head_dim)
    agree(OnInterpreter(), q, k, v, **block_units(q, k, v) | options)


def test_two_blocks_a_tile(monkeypatch):
    """What many keys are served with; the diagonal goes through both."""
    monkeypatch.setattr(forward_fp8_hopper, "SHORT", 0)
    q, k, v = inputs(1, 210, 410, 2, 1, 128)
    for names in (), UNITS[:2]:
        agree(OnInterpreter(), q, k, v, causal=True, **block_units(q, k, v, *names))


@pytest.mark.parametrize("by_block", UNITS)
def test_descales_of_blocks_beside_others(by_block):
    """Of one array alone; the others have one a head of keys, which query heads share, or a number."""
    q, k, v = inputs(1, 140, 140, 2, 1, 64)
    others = units(1, 1, *UNITS) | ({} if by_block == "v_descale" else {"v_descale": 0.5})
    agree(OnInterpreter(), q, k, v, **others | block_units(q, k, v, by_block))


def test_a_block_of_zeros_counts_in_the_sum_of_weights():
    """Its descale may be anything: attention.quantize makes it as small as can be."""
    q, k, v = inputs(1, 40, 300, 1, 1, 128)
    v[:, 128:256] = 0
    _, units = attention.quantize(v.astype(BF16), block=128)
    assert 0 < units[0, 1, 0] < 2.0**-100
    agree(OnInterpreter(), q, k, v, v_descale=units, k_descale=np.float32([[[1], [2], [0.5]]]))


def test_descales_of_blocks_of_many_columns_are_refused():
    q, k, v = inputs(1, 8, 8, 1, 1, 144)
    with pytest.raises(NotImplementedError, match="q_descale: of blocks is supported for up to 128 columns"):
        attention.forward(q, k, v, **block_units(q, k, v))


@pytest.mark.gpu
@pytest.mark.parametrize("by_block", [False, True])
def test_rows_of_low_scores_on_the_card(card, by_block):
    q, k, v = inputs(2, 200, 700, 4, 2, 128)
    agree(card, q, k, v, score=LOW_ROWS, **(block_units(q, k, v) if by_block else units(2, 2)))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_descales_of_blocks_on_the_card(card, head_dim):
    for seq_q, seq_kv in ((1, 1), (200, 700), (333, 129), (130, 2300)):
        q, k, v = inputs(2, seq_q, seq_kv, 4, 2, head_dim)
        agree(card, q, k, v, causal=True, **block_units(q, k, v))


def test_descales_of_blocks_as_compiled(as_compiled):
    """Of tiles that have two blocks."""
    as_compiled("sm_90a")
    q, k, v = inputs(1, 5, 140, 1, 1, 128)
    agree(OnInterpreter(), q, k, v, **block_units(q, k, v))


@pytest.mark.parametrize("blocks", [dict(q=(), k=(), v=()), dict(q=(1,), k=(2,), v=(2,))], ids=["of heads", "of blocks"])
@pytest.mark.parametrize(
    "on",
    ["interpreter", pytest.param("sm_90a", marks=pytest.mark.release), pytest.param("card", marks=pytest.mark.gpu)],
)
def test_nan_descales(request, on, blocks):
    """Each reaches the outputs of its head, and of no other head."""
    if on == "sm_90a":
        request.getfixturevalue("as_compiled")(on)
    place = request.getfixturevalue("card") if on == "card" else OnInterpreter()
    descales = {name: np.ones((1, *blocks[name[0]], 4), np.float32) for name in UNITS}
    for head, x in enumerate(descales.values()):
        x[..., head] = np.nan
    arrays = [place.put(x) for x in inputs(1, 3, 140, 4, 4, 64)]
    out = place.get(attention.forward(*arrays, **{name: place.put(x) for name, x in descales.items()})).astype(np.float32)
    assert np.isnan(out[:, :, :3]).all() and np.isfinite(out[:, :, 3]).all()


@pytest.mark.parametrize("by_block", [True, False], ids=["of blocks", "of heads"])
def test_descales_without_keys(by_block):
    """Descales of blocks after the last key in use, and of a sequence without keys, may be NaN."""
    q, k, v = inputs(2, 5, 300, 1, 1, 128)
    descales, actual = block_units(q, k, v) if by_block else units(2, 1), []
    for _ in range(2):
        actual.append(attention.forward(q, k, v, lengths_k=np.int32([128, 0]), return_lse=True, **descales))
        descales = {name: x.copy() for name, x in descales.items()}
        for x in descales.values():
            x[1], x[:, 1:] = np.nan, np.nan
    for x, y in zip(*actual):
        np.testing.assert_array_equal(x.astype(float), y.astype(float))


def test_descales_of_blocks_in_another_layout():
    q, k, v = inputs(1, 70, 140, 2, 1, 64)
    descales = block_units(q, k, v)
    expected = attention.forward(q, k, v, **descales)
    turned = {name: x.swapaxes(1, 2) for name, x in descales.items()}
    out = attention.forward(*(x.swapaxes(1, 2) for x in (q, k, v)), layout="bhsd", **turned)
    np.testing.assert_array_equal(out.swapaxes(1, 2).astype(float), expected.astype(float))


def test_packed_sequences(place):
    """What lies after a sequence's last key is NaN, or a neighbour's."""
    ends, lengths = np.int32([0, 40, 40, 150]), np.int32([33, 0, 100])
    agree(place, *inputs(1, 150, 150, 2, 1, 128), cu_seqlens=ends, lengths_k=lengths, causal=True, **units(3, 1))


def test_values_with_a_mean(place):
    """The tensor cores cut off each sum of fp8 products, towards 0: of many keys' values with a mean that is all one loses."""
    keys = 600 if isinstance(place, OnInterpreter) else 20_000
    q, k, v = inputs(1, 40, keys, 1, 1, 128)
    agree(place, q, k, (v.astype(np.float32) + 1).astype(E4M3))


def test_maxima_that_grow(place):
    """All the time, so that O is rescaled."""
    q, k, v = inputs(1, 40, 700, 1, 1, 128)
    agree(place, q, (k.astype(np.float32) * np.linspace(2, 0.1, 700)[None, :, None, None]).astype(E4M3), v)


@pytest.fixture
def turned_before(monkeypatch):
    """V is turned by a kernel before, wherever there is one for it, and read as for so many keys."""

    def of(keys=0):
        shape = forward_fp8_hopper.transposed_shape
        monkeypatch.setattr(forward_fp8_hopper, "transposed_shape", lambda padded, _: shape(padded, keys))
        monkeypatch.setattr(forward_fp8_hopper, "pays_to_transpose", lambda padded, *_: shape(padded, keys) is not None)

    of()
    return of


FORMS = [(dim, keys) for dim, shapes in forward_fp8_hopper.TRANSPOSED.items() for keys in shapes]


@pytest.mark.parametrize(
    ("seq_q", "seq_kv", "head_dim", "causal"),
    [(1, 1, 128, False), (2, 127, 128, True), (193, 257, 128, True), (70, 515, 128, False), (200, 390, 96, True)],
)
def test_values_turned_before(turned_before, seq_q, seq_kv, head_dim, causal):
    """Around the edges of tiles, and of what the kernel before makes: keys by 128, columns as they are."""
    agree(OnInterpreter(), *inputs(2, seq_q, seq_kv, 4, 2, head_dim), causal=causal, **units(2, 2))


@pytest.mark.parametrize(("head_dim", "keys"), FORMS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_values_turned_before_in_every_form(turned_before, place, head_dim, keys, causal):
    """Also where the last tile reaches beyond what the kernel before has made."""
    turned_before(keys)
    agree(place, *inputs(1, 193, 391, 2, 1, head_dim), causal=causal, **units(1, 1))


def test_values_turned_before_on_either(turned_before, place):
    agree(place, *inputs(2, 211, 531, 2, 1, 128), causal=True, **units(2, 1))
    agree(place, *inputs(1, 65, 301, 1, 1, 128), v_descale=0.5)


def test_values_turned_before_with_a_mean(turned_before, place):
    keys = 601 if isinstance(place, OnInterpreter) else 20_001
    q, k, v = inputs(1, 41, keys, 1, 1, 128)
    agree(place, q, k, (v.astype(np.float32) + 1).astype(E4M3))


@pytest.mark.release
def test_values_turned_before_as_compiled(turned_before, as_compiled):
    as_compiled("sm_90a")
    agree(OnInterpreter(), *inputs(1, 6, 140, 1, 1, 128), causal=True, **units(1, 1))


def test_what_lies_behind_the_last_key_is_not_turned(turned_before):
    """V is a part of a longer array, whose next rows are NaN."""
    q, k, v = inputs(1, 70, 150, 1, 1, 128)
    longer = poisoned((1, 160, 1, 128), E4M3)
    longer[:, :150] = v
    agree(OnInterpreter(), q, k, longer[:, :150])


def test_variants_have_their_values_turned_by_the_producer(turned_before):
    """Windows begin anywhere, packed sequences, too; a kernel before would turn more than they need."""
    q, k, v = inputs(1, 141, 141, 1, 1, 128)
    agree(OnInterpreter(), q, k, v, window=(20, 0))
    agree(OnInterpreter(), q, k, v, cu_seqlens=np.int32([0, 40, 141]))


@pytest.mark.parametrize("values", [True, False], ids=["of values, too", "of keys"])
def test_values_turned_before_with_descales_of_blocks(turned_before, place, monkeypatch, values):
    monkeypatch.setattr(forward_fp8_hopper, "SHORT", 0)  # of few keys it gains nothing
    q, k, v = inputs(1, 211, 301, 2, 1, 128)
    agree(place, q, k, v, causal=True, **block_units(q, k, v, *(UNITS if values else UNITS[:2])))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("keys", "key_heads", "head_dim", "options"),
    [
        (700, 3, 128, units(1, 3)),
        (2300, 3, 128, dict(causal=True)),
        (8200, 3, 128, {}),
        (8200, 3, 64, dict(causal=True)),
        (2300, 3, 256, dict(causal=True)),
    ],
    ids=str,
)
def test_values_turned_before_on_the_card(card, keys, key_heads, head_dim, options):
    """Where nobody asks for it: many queries read them."""
    assert forward_fp8_hopper.pays_to_transpose(128, 2100, 700, 12, 4, 132)
    agree(card, *inputs(1, 2100, keys, 12, key_heads, head_dim), **options)


@pytest.mark.parametrize(
    ("problem", "pays"),
    [
        ((128, 16384, 16384, 16, 1, 132), True),
        ((128, 2048, 2048, 128, 1, 132), True),
        ((128, 1536, 2048, 132, 1, 132), False),  # each number is read by too few queries
        ((128, 576, 2048, 256, 4, 132), True),  # ... unless heads share it
        ((128, 2048, 2048, 16, 1, 132), False),  # 192 rows a tile are two rounds of 192, as 128 are two of 128
        ((64, 16384, 16384, 32, 1, 132), True),
        ((64, 16384, 4096, 32, 1, 132), False),  # of few keys it gains nothing
        ((256, 16384, 16384, 8, 1, 132), True),
    ],
)
def test_when_it_pays_to_transpose_values_before(problem, pays):
    assert forward_fp8_hopper.pays_to_transpose(*problem) is pays


def test_what_turns_values_is_launched_before():
    """By lengths alone: two launches where there was one."""

    def steps(queries, keys=130, heads=2):
        shapes = {"q": (1, queries, heads, 128), "k": (1, keys, 1, 128), "v": (1, keys, 1, 128)}
        args = {name: describe(np.zeros(shape, E4M3), name).form for name, shape in shapes.items()}
        options = (False, None, None, None, None, None, None, None, None, 1.0, 1.0, 1.0, None, False, None)
        _, plan, _ = forward_programs._forward_fp8.steps(args, None, options, "bshd")
        return [step.launch.title for step in plan.steps]

    assert steps(576) == ["attend_fp8"]
    assert steps(3000) == ["transpose", "attend_fp8"]


def test_weights_that_are_small_each_and_together_count():
    """2^-11 of the greatest, which e4m3 has only of weights that are lifted."""
    q, k, v = (np.zeros((1, n, 1, 64), E4M3) for n in (3, 300, 300))
    q[..., 0], k[:, 7, :, 0], v[...] = 1, 7.5, 1
    v[:, 7] = 0
    out = agree(OnInterpreter(), q, k, v, scale=1.0)
    assert (np.abs(out.astype(float) - 0.142) < 0.01).all()


def test_fp16_output_and_columns_of_values():
    agree(OnInterpreter(), *inputs(1, 70, 100, 1, 1, 64, 128), out_dtype=FP16)


def test_the_default_output_is_bf16():
    out = attention.forward(*inputs(1, 5, 5, 1, 1, 64), causal=True)
    assert out.dtype == BF16 and out.shape == (1, 5, 1, 64)


@pytest.mark.release  # other forms of the kernel: the two tests before whose names end so
def test_as_compiled(as_compiled):
    as_compiled("sm_90a")
    agree(OnInterpreter(), *inputs(1, 5, 140, 1, 1, 64), causal=True, alibi=np.float32([0.2]), **units(1, 1))


REFUSED = {
    "bias: is not supported with k and v of float8_e4m3fn": dict(bias=np.zeros((1, 1, 8, 8), np.float32)),
    "dropout: is not supported": dict(dropout=0.5, seed=1),
    "q_norm: is not supported": dict(q_norm=np.ones(64, np.float32)),
    "k_norm: is not supported": dict(k_norm=np.ones(64, np.float32)),
    "family: must be sm_90 for q of float8_e4m3fn: family='sm_80'": dict(family="sm_80"),
    "q_descale: must be from 2\\*\\*-60 to 2\\*\\*60": dict(q_descale=-1.0),
    "k_descale: heads must equal k's": dict(k_descale=np.ones((1, 2), np.float32)),
    "k_descale: must have a number for each block of 128 rows of k": dict(k_descale=np.ones((1, 2, 1), np.float32)),
    "k_descale: of blocks is not supported with sequences that share": dict(
        k_descale=np.ones((2, 1, 1), np.float32), cu_seqlens=np.int32([0, 3, 8])
    ),
    "out: dtype must be one of": dict(out=np.zeros((1, 8, 1, 64), np.float32)),
    "out: must have contiguous columns": dict(out=np.zeros((1, 8, 1, 128), BF16)[..., ::2]),
}


@pytest.mark.parametrize(("message", "options"), REFUSED.items(), ids=lambda x: str(x)[:20])
def test_what_is_refused(message, options):
    """Before anything is launched, by name."""
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        attention.forward(*inputs(1, 8, 8, 1, 1, 64), **options)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("q: dtype must be one of", lambda q, k, v: (q.astype(np.float32), k, v)),
        ("v: dtype must be one of", lambda q, k, v: (q, k, v.astype(BF16))),
        ("q: head_dim must be a multiple of 16, from 16 to 256", lambda q, k, v: (q[..., :24], k[..., :24], v)),
    ],
)
def test_arrays_that_are_refused(message, change):
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        attention.forward(*change(*inputs(1, 8, 8, 1, 1, 64)))


def test_descales_are_for_fp8():
    q, k, v = (x.astype(BF16) for x in inputs(1, 8, 8, 1, 1, 64))
    with pytest.raises(ValueError, match="q_descale: needs k and v of float8_e4m3fn"):
        attention.forward(q, k, v, q_descale=1.0)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("sm_90", dict(causal=True, **units(2, 1, "k_descale"), v_descale=0.5)),
        ("sm_80", dict(k_norm=np.ones(64, np.float32), **units(2, 1, "v_descale"))),
        ("sm_80", dict(bias=draw((1, 1, 40, 70), np.float32, 1), k_descale=2.0)),
    ],
    ids=str,
)
def test_queries_of_16_bits(family, options):
    """Keys and values of fp8 are widened before: what is lost besides is a rounding to q's dtype."""
    q, k, v = inputs(2, 40, 70, 2, 1, 64)
    q, wide = q.astype(BF16), []
    for x, name in ((k, "k_descale"), (v, "v_descale")):
        unit = np.asarray(options.get(name, 1.0), np.float32)
        wide.append((x.astype(np.float32) * (unit[:, None, :, None] if unit.ndim else unit)).astype(BF16))
    out = attention.forward(q, k, v, family=family, **options)
    plain = {name: x for name, x in options.items() if name not in UNITS}
    ref, _ = reference.forward(q, *wide, **plain)
    low, _ = reference.forward_low(q, *wide, **plain)
    assert out.dtype == BF16
    reference.assert_close(out, ref, low)


def test_queries_of_16_bits_have_no_descale():
    q, k, v = inputs(1, 8, 8, 1, 1, 64)
    with pytest.raises(NotImplementedError, match="q_descale: is not supported with"):
        attention.forward(q.astype(BF16), k, v, q_descale=2.0)
