"""attention.forward's options of variants: every invalid one is refused before any launch, by its name."""

import functools
import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from forward_checks import inputs
from numpy import minimum

import attention
from attention.kernels.softmax import backward_folded_hopper
from attention.options import AttentionArguments, ScoreOptions
from attention.parts.score_mods import BuiltinScoreMod, Softcap
from attention.parts.scores import Sink
from attention.parts.variant import CombinedVariant, Variant
from attention.parts.visibility import CAUSAL
from attention.plans.softmax import call_options, forward_launches, forward_programs, gradient
from attention.scoring import python_functions
from attention.scoring.python_functions import register_function
from ops import where
from tiles.launching.frameworks import describe

ROWS, HEADS = 7, 2
T, V = TypeError, ValueError
f16, f32 = np.float16, np.float32
zeros = lambda *shape, dtype=f32: np.zeros(shape, dtype)
ends = lambda *at: np.array(at, np.int32)
AROUND = np.arange(ROWS)
HOLDER = SimpleNamespace(inner=SimpleNamespace(at=AROUND))
sees = lambda b, h, i, j, at: at[j] <= i


def call(batch=1, cols=ROWS, **options):
    q, k = zeros(batch, ROWS, HEADS, 16, dtype=f16), zeros(batch, cols, HEADS, 16, dtype=f16)
    return attention.forward(q, k, k, **options)


INVALID = [
    # what functions give
    (dict(mask=lambda b, h, i, j: 1.0 * (j <= i)), T, "mask: must return booleans, such as j <= i; mask(b, h, i, j) returns f"),
    (dict(mask=lambda b, h, i, j: j), T, "mask: must return booleans, such as j <= i; mask(b, h, i, j) returns int64"),
    (dict(score=lambda s, b, h, i, j: j <= i), T, "score: must return numbers; score(s, b, h, i, j) returns bool"),
    (dict(score=lambda s, b, h, i, j: 0.0), T, "score: must return a number for each query and key, as s + j does; score(s"),
    (dict(score=lambda s, b, h, i, j: j), T, "score: must return a number for each query and key, as s + j does; score(s, b,"),
    (dict(score=lambda s, b, h, i, j: "s"), T, "score: must return numbers; score(s, b, h, i, j) returns <U1"),
    (dict(mask=lambda b, h, i, j: i < 3 and j < 3), T, "mask: mask(b, h, i, j) fails on NumPy arrays: ValueError: The truth"),
    (dict(mask=lambda b, h, i, j: 0 <= i - j < 3), T, "mask: mask(b, h, i, j) fails on NumPy arrays: ValueError: The truth "
     "value of an array with more than one element is ambiguous. Use a.any() or a.all(); it has no `if`, `and`, `or`, `not"),
    (dict(score=lambda s, b, h, i, j: (s, j)), T, "score: score(s, b, h, i, j) fails on NumPy arrays: TypeError: it returns a"),
    (dict(mask=lambda b, h, i, j: None), T, "mask: mask(b, h, i, j) fails on NumPy arrays: TypeError: it returns None"),
    (dict(mask=lambda b, h, i, j: (i < 3)[0, 0, 0]), T, "mask: mask(b, h, i, j) fails on NumPy arrays: IndexError: "),
    (dict(score=lambda s, b, h, i, j, at: s + at[i / 2], aux=(AROUND,)), T, "score: score(s, b, h, i, j, aux0) fails on NumPy "
     "arrays: IndexError: arrays used as indices must be of integer (or boolean) type; index by whole numbers: i, j, b"),
    # how they are called
    (dict(mask=lambda b, h, i: b), T, "mask: mask(b, h, i, j) fails on NumPy arrays: TypeError: <lambda>() takes 3 positional"),
    (dict(score=lambda b, h, i, j: j), T, "score: score(s, b, h, i, j) fails on NumPy arrays: TypeError: <lambda>() takes 4"),
    (dict(mask=sees), T, "mask: mask(b, h, i, j) fails on NumPy arrays: TypeError: <lambda>() missing 1 required"),
    (dict(mask=sees, aux=(AROUND, AROUND)), T, "mask: mask(b, h, i, j, aux0, aux1) fails on NumPy arrays: TypeError: <lambda>"),
    (dict(mask=lambda b, h, i, j: HOLDER.inner.at[i] == j), T, "mask: reads the array HOLDER.inner.at from outside: pass it"),
    (dict(mask=lambda b, h, i, j: AROUND[i] == j), T, "mask: reads the array AROUND from outside: pass it in aux, and take"),
    # what they call
    (dict(mask=lambda b, h, i, j: np.where(i < 3, j < 2, j <= i)), T, "mask: calls np.where, which kernels do not have; use "),
    (dict(score=lambda s, b, h, i, j: minimum(s, 0.0) + j), T, "score: calls minimum, which kernels do not have; use ops."),
    (dict(score=lambda s, b, h, i, j: math.exp(s)), T, "score: score(s, b, h, i, j) fails on NumPy arrays: TypeError: only"),
    (dict(mask=lambda b, h, i, j: np.linalg.norm(i - j) < 3), T, "mask: calls np.linalg.norm, which kernels do not have; "),
    # what they are
    (dict(mask=functools.partial(sees, at=AROUND)), T, "mask: must be a Python function, such as lambda b, h, i, j: j <= i: m"),
    (dict(mask=max), T, "mask: must be a Python function, such as lambda b, h, i, j: j <= i: mask=<built-in function max>"),
    (dict(score=np.add), T, "score: must be a Python function, such as lambda s, b, h, i, j: s + j - i: score=<ufunc 'add'>"),
    (dict(mask=np.ones((7, 7), bool)), T, "mask: must be a Python function, such as lambda b, h, i, j: j <= i, not an array "
     "of shape (7, 7); a mask that is an array goes in aux: mask=lambda b, h, i, j, allowed: allowed[i, j], aux=(allowed,)"),
    (dict(mask=True), T, "mask: must be a Python function, such as lambda b, h, i, j: j <= i: mask=True"),
    (dict(score="s"), T, "score: must be a Python function, such as lambda s, b, h, i, j: s + j - i: score='s'"),
    # what they read
    (dict(mask=sees, aux=5), T, "aux: must be a tuple of arrays, (array,) for a single one, and not int"),
    (dict(mask=sees, aux=AROUND), T, "aux: must be a tuple of arrays, (array,) for a single one, and not ndarray"),
    (dict(aux=AROUND), T, "aux: must be a tuple of arrays, (array,) for a single one, and not ndarray"),
    (dict(aux=(AROUND,)), T, "aux: is what mask= or score= reads, and this call has neither; its arrays have the shapes (7,)"),
    (dict(mask=sees, aux=(None,)), T, "aux: must be up to 8 arrays: 1 of ['NoneType']"),
    (dict(mask=lambda b, h, i, j, *aux: j <= i, aux=(AROUND,) * 9), T, "aux: must be up to 8 arrays: 9 of ['ndarray', "),
    (dict(mask=sees, aux=([5],)), T, "aux0: must be an array, not a list: aux0=[5]; make an array of it: torch.tensor(..)"),
    (dict(dropout=0.1, seed=7.5), T, "seed: must be an integer, or an array of one: seed=7.5"),
    (dict(dropout=0.1, seed="7"), T, "seed: must be an integer, or an array of one: seed='7'"),
    (dict(mask=sees, aux=(1.0 * AROUND,)), T, "aux0: dtype must be one of ('bool', 'int8', "),
    (dict(mask=sees, aux=(AROUND[::-1],)), V, "aux0: strides must not be negative: "),
    # windows and caps
    (dict(window=(-1, 0)), V, "window: its ends must not be negative, and below 2**30; None is open: window=(-1, 0)"),
    (dict(window=(None, -1)), V, "window: its ends must not be negative, and below 2**30; None is open: window=(None, -1)"),
    (dict(window=(2**30, 0)), V, "window: its ends must not be negative, and below 2**30; None is open: window=(1073741824, 0"),
    (dict(window=5), T, "window: must be (left, right), each an integer or None: window=5"),
    (dict(window=(1, 2, 3)), T, "window: must be (left, right), each an integer or None: window=(1, 2, 3)"),
    (dict(window="ab"), T, "window: must be (left, right), each an integer or None: window='ab'"),
    (dict(window=(1.0, 0)), T, "window: its ends must be integers or None: window=(1.0, 0)"),
    (dict(window=(0, True)), T, "window: its ends must be integers or None: window=(0, True)"),
    (dict(softcap=0), V, "softcap: must be positive, and finite in float32: softcap=0"),
    (dict(softcap=-1.0), V, "softcap: must be positive, and finite in float32: softcap=-1.0"),
    (dict(softcap=float("nan")), V, "softcap: must be positive, and finite in float32: softcap=nan"),
    (dict(softcap=float("inf")), V, "softcap: must be positive, and finite in float32: softcap=inf"),
    (dict(softcap="1"), T, "softcap: must be a number or None: softcap='1'"),
    (dict(softcap=True), T, "softcap: must be a number or None: softcap=True"),
    # arrays of numbers
    (dict(alibi=0.5), T, "alibi: must be an array, got alibi=0.5; of a number make one: np.full((H,), 0.5, np.float32)"),
    (dict(alibi=True), T, "alibi: must be an array of the axes H; or B or 1, H: alibi=True"),
    (dict(alibi=zeros(3)), V, "alibi: heads must equal q's: alibi.shape=(3,), q.shape=(1, 7, 2, 16)"),
    (dict(alibi=zeros(2, 2)), V, "alibi: must have the shape (1, 2): alibi.shape=(2, 2)"),
    (dict(alibi=zeros(1, 1, 2)), V, "alibi: must have the axes H; or B or 1, H: alibi.shape=(1, 1, 2)"),
    (dict(alibi=zeros(2, dtype=float)), T, "alibi: dtype must be one of ('float32',): alibi.dtype='float64'"),
    (dict(sink=zeros(1, 2)), V, "sink: must have the axes H: sink.shape=(1, 2); sink[0] has them"),
    (dict(sink=zeros(3)), V, "sink: heads must equal q's: sink.shape=(3,), q.shape=(1, 7, 2, 16)"),
    (dict(sink=zeros(2), cols=0), V, "k: must have at least one key where there is a sink: k.shape=(1, 0, 2, 16)"),
    (
        dict(bias=zeros(7, 7)),
        V,
        "bias: must have the axes B or 1, H or 1, S or 1, S: bias.shape=(7, 7); bias[None, None] has them",
    ),
    (dict(bias=zeros(1, 2, 7, 8)), V, "bias: sequence must equal k's: bias.shape=(1, 2, 7, 8), k.shape=(1, 7, 2, 16)"),
    (dict(bias=zeros(1, 2, 3, 7)), V, "bias: must have the shape (1, 2 or 1, 7 or 1, 7): bias.shape=(1, 2, 3, 7)"),
    (dict(bias=zeros(3, 1, 1, 7), batch=2), V, "bias: must have the shape (2 or 1, 2 or 1, 7 or 1, 7): bias.shape=(3, 1, 1, 7"),
    (dict(bias=zeros(1, 1, 1, 7) > 0), T, "bias: dtype must be one of ('float32', 'bfloat16', 'float16'): bias.dtype='bool'"),
    # sequences
    (dict(cu_seqlens=ends(0, 3, 7), batch=2), V, "cu_seqlens: batch must be 1, all sequences one after the other: cu_seqlens"),
    (dict(cu_seqlens_k=ends(0, 3, 7)), V, "cu_seqlens_k: needs cu_seqlens, which is None"),
    (dict(cu_seqlens=ends(0, 3, 7), cols=9), V, "cu_seqlens_k: is required if q and k have different numbers of rows: q.sha"),
    (dict(cu_seqlens=ends(0, 3, 7), cu_seqlens_k=ends(0, 7)), V, "cu_seqlens_k: length must equal cu_seqlens's: cu_seqlens_k."),
    (dict(cu_seqlens=ends(0)), V, "cu_seqlens: must have two elements or more: cu_seqlens.shape=(1,)"),
    (dict(cu_seqlens=zeros(3)), T, "cu_seqlens: dtype must be one of ('int32', 'int64'): cu_seqlens.dtype='float32'"),
    (dict(cu_seqlens=ends(0, 3, 7), alibi=zeros(3, 2)), V, "alibi: must have the shape (2 or 1, 2): alibi.shape=(3, 2)"),
    (dict(lengths_k=ends(3, 4)), V, "lengths_k: sequences must equal q's: lengths_k.shape=(2,), q.shape=(1, 7, 2, 16)"),
    (dict(lengths_k=ends(3), cu_seqlens=ends(0, 3, 7)), V, "lengths_k: sequences must equal cu_seqlens's: lengths_k.shape=(1,"),
]  # fmt: skip


@pytest.mark.parametrize("arguments, error, message", INVALID, ids=[message[:70] for *_, message in INVALID])
def test_invalid(arguments, error, message, monkeypatch):
    monkeypatch.setattr(forward_launches, "kernel_for", lambda *what: pytest.fail("makes a kernel"))
    for _ in range(2):  # a refusal is never remembered as a success
        with pytest.raises(error) as raised:
            call(**arguments)
        assert str(raised.value).startswith(message)


def problem(**forms):
    """A call with forms that nobody has the memory for, or on devices that are not there."""
    plain = describe(zeros(1, ROWS, HEADS, 16, dtype=f16), "q").form
    return forward_programs.VARIANTS.problem({name: plain for name in "qkv"} | forms)


@pytest.mark.parametrize("name", ["aux0", "aux7", "alibi", "sink", "bias", "cu_seqlens", "lengths_k"])
def test_devices(name):
    shape = {"bias": (1, 1, 1, ROWS), "cu_seqlens": (2,), "lengths_k": (1,)}.get(name, (HEADS,))
    dtype = np.int32 if name in ("cu_seqlens", "lengths_k") else f32
    form = describe(np.zeros(shape, dtype), name).form
    problem(**{name: form})
    with pytest.raises(ValueError, match=rf"^{name}: must lie where q does .*{name}\.device=1, q\.device=None"):
        problem(**{name: form._replace(device=1)})


def test_no_option_of_scores_is_left_out():
    """Each argument that forward and backward share has one place: the arrays, what comes with an array, or a field of
    ScoreOptions, which plans read. What no gradient knows, JAX's gradient refuses."""
    of_scores = {*call_options.SCORE_CHECKS, "window", "blocks"}
    arrays = gradient.ARRAYS - {*"qkv"}
    assert {*AttentionArguments.__annotations__} == arrays | gradient.PARTLY_ARRAYS | of_scores
    assert arrays.isdisjoint(of_scores | gradient.PARTLY_ARRAYS) and of_scores.isdisjoint(gradient.PARTLY_ARRAYS)
    assert ScoreOptions._fields[:4] == ("causal", "left", "right", "softcap")  # decode fills these by their places
    for program in forward_programs._forward, forward_programs._variant:
        known = dict.fromkeys(program.option_types)
        assert gradient._forward_arguments({}, known) == {}
        with pytest.raises(TypeError, match="tilt: is an option of forward that no gradient knows"):
            gradient._forward_arguments({}, known | {"tilt": 1.0})


def test_facts_of_a_variant_follow_from_its_methods():
    """A flag that a class forgets would drop its derivative, or its descales; a function without one is refused."""

    class Doubled(Variant):
        def score(self, s, ctx, key):
            return 2.0 * s

        def score_and_grad(self, s, ctx, key):
            return 2.0 * s, 2.0

    assert Doubled().changes_scores and Doubled().needs_raw_scores and Doubled().nonlinear and Doubled().sees_all_keys
    assert CombinedVariant(CAUSAL, Doubled()).nonlinear and not CombinedVariant(CAUSAL, Sink()).nonlinear
    assert backward_folded_hopper.serves(128, CAUSAL) and not backward_folded_hopper.serves(128, Doubled())
    with pytest.raises(TypeError, match="abstract methods? score_and_grad"):
        type("Forgetful", (Softcap,), {"score_and_grad": BuiltinScoreMod.score_and_grad})()


@pytest.mark.parametrize("option", ["mask", "score"])
def test_indices_of_long_sequences_are_not_whole_numbers_in_float32(option):
    q = zeros(1, 1, 1, 16, dtype=f16)
    long = np.broadcast_to(q, (1, 2**24, 1, 16))
    function = {"mask": lambda b, h, i, j: j <= i, "score": lambda s, b, h, i, j: s + j}[option]
    words = rf"^{option}: has float32 indices of queries and keys: there must be fewer than 2\*\*24 .*1, 16777216, 1, 16"
    for args in (q, long, long), (long, q, q):
        with pytest.raises(ValueError, match=words):
            attention.forward(*args, **{option: function})
    attention.forward(q, q, q, **{option: function})


def test_functions_that_read_the_same_go_by_one_name():
    """Written twice, or with numbers of their own."""
    result = lambda reach: lambda b, h, i, j: j <= i + reach
    assert register_function("mask", result(3)) == register_function("mask", result(3)) != register_function("mask", result(4))


def test_functions_of_objects_that_cannot_be_told_apart():
    """They have a name each, though the memory of one that is gone is another's: no layer gets another layer's mask."""
    for n in range(200):
        layer = SimpleNamespace(reach=n, lock=threading.Lock())
        mask = lambda b, h, i, j, layer=layer: j <= i + layer.reach
        name = register_function("mask", mask)
        assert python_functions.find_function(name) is mask
    q, k, v = inputs(1, 5, 9, 1, 1, 16)
    for reach in 0, 3:
        layer = SimpleNamespace(reach=reach, lock=threading.Lock())
        expected = attention.forward(q, k, v, window=(None, reach))
        assert (attention.forward(q, k, v, mask=lambda b, h, i, j: j <= i + 4 + layer.reach) == expected).all()


def test_names_of_one_call_are_forgotten_in_time(monkeypatch):
    python_functions._SINGLE_USE.clear()
    monkeypatch.setattr(python_functions, "MAX_SINGLE_USE", 2)
    result = lambda layer: lambda b, h, i, j: j <= i + layer.reach
    with monkeypatch.context() as graph:
        graph.setattr(python_functions, "is_compiling", lambda: True)
        graph.setattr(python_functions, "_captured_values", lambda option, function: ())
        in_graph = register_function("mask", result(SimpleNamespace(reach=9, lock=threading.Lock())))
    first, *others = [register_function("mask", result(SimpleNamespace(reach=n, lock=threading.Lock()))) for n in range(3)]
    assert callable(python_functions.find_function(in_graph))
    assert all(callable(python_functions.find_function(name)) for name in others)
    with pytest.raises(ValueError, match="no function is registered under this name"):
        python_functions.find_function(first)


def test_the_cure_for_functions_of_math():
    with pytest.raises(TypeError, match=r"the functions of math take numbers: use those of ops, exp, log, sqrt, tanh"):
        call(score=lambda s, b, h, i, j: math.exp(s))


@pytest.mark.filterwarnings("error")
def test_a_score_is_tried_without_a_word():
    """On zeros, by which this one divides."""
    q, k, v = inputs(1, 5, 9, 1, 1, 16)
    out = attention.forward(q, k, v, score=lambda s, b, h, i, j, caps: s / caps[h], aux=(np.full(1, 3.0, np.float32),))
    assert np.isfinite(out.astype(float)).all()


def test_what_a_function_holds_would_go_stale_in_a_graph(monkeypatch):
    """Dynamo guards a function's code, and those numbers that are written out for it."""
    reach, table = 3, [3]
    names = [register_function("mask", function) for function in (sees, lambda b, h, i, j: j <= i + reach)]
    monkeypatch.setattr(python_functions, "is_compiling", lambda: True)
    assert names == [register_function("mask", function) for function in (sees, lambda b, h, i, j: j <= i + reach)]
    for hashes, half in (True, hash(0.5)), (False, "0.5"):  # since torch 2.13, and before
        monkeypatch.setattr(python_functions, "_dynamo_hashes_floats", lambda hashes=hashes: hashes)
        assert python_functions._captured_values("mask", lambda b, h, i, j, more=0.5, *, less=True: j <= i + reach) == (
            3,
            half,
            True,
        )
    with pytest.raises(TypeError, match=r"^mask: captures \('table',\), whose first value torch.compile would keep"):
        register_function("mask", lambda b, h, i, j: j <= i + table[0])
    with pytest.raises(TypeError, match="^mask: must be a Python function"):
        register_function("mask", 5)


def test_numpys_types_and_numbers_are_no_functions():
    q, k, v = inputs(1, 5, 9, 1, 1, 16)
    mask = lambda b, h, i, j: where(j <= i + np.int32(4), 1.0, 0.0) > np.pi - 3
    assert (attention.forward(q, k, v, mask=mask) == attention.forward(q, k, v, mask=lambda b, h, i, j: j <= i + 4)).all()


def test_a_number_around_a_function_that_changes():
    """Is what the next call reads."""
    q, k, v = inputs(1, 5, 9, 1, 1, 16)
    for reach in 0, 3, 0:
        expected = attention.forward(q, k, v, window=(None, reach))
        assert (attention.forward(q, k, v, mask=lambda b, h, i, j: j <= i + 4 + reach) == expected).all()


def test_options_of_no_effect():
    """Lists in place of tuples, NumPy's integers, windows that are open on both sides, no aux."""
    q, k, v = inputs(1, 5, 9, 1, 1, 16)
    plain = attention.forward(q, k, v)
    for options in dict(window=(None, None)), dict(window=[np.int64(9), np.int32(9)]), dict(aux=[]):
        assert (attention.forward(q, k, v, **options) == plain).all()


def test_no_queries_and_no_keys():
    for rows, cols in (0, 4), (4, 0):
        q, k = zeros(1, rows, 1, 16, dtype=f16), zeros(1, cols, 1, 16, dtype=f16)
        out, lse = attention.forward(q, k, k, mask=lambda b, h, i, j: j <= i, window=(3, 0), return_lse=True)
        assert out.shape == q.shape and not out.any() and lse.shape == (1, 1, rows) and (lse == -np.inf).all()
