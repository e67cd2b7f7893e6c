"""tiles/calls/remembered_calls.py: which of torch's calls are served by what was written for their form, and no other is.
(That such a call launches what one that is planned anew does: tests/attention/test_plans_of_lengths.py.)"""

import gc
import warnings
import weakref

import numpy as np
import pytest
from noted_programs import RUNS, STREAM, CountedProgram, Noted, gpu, noted, tensors, warm  # noqa: F401

torch = pytest.importorskip("torch")

import torch.autograd.forward_ad as forward_ad  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from tiles.calls import program as programs  # noqa: E402
from tiles.calls.plan import LruTable, Plan  # noqa: E402
from tiles.launching import frameworks  # noqa: E402
from tiles.launching.lengths import watched_call  # noqa: E402

SUM = """
    x     (seqlen, head_dim)  real
    y     (seqlen, head_dim)  real
    z     (seqlen)            float32  optional
    out   (seqlen, head_dim)  float32  output
    sums  (seqlen)            float32  output  want_sums
"""


@pytest.fixture
def summed():
    def planner(problem, factor: float, want_sums: bool):
        rows, scratch = problem.extents["seqlen"], [((3,), "float32"), ((5,), "float32")]
        names = ["x", "y", "out", *(["sums"] if want_sums else []), *(["z"] if "z" in problem else [])]
        places = tuple(
            [problem[name].source for name in names] + [problem.scratch(n, *what).source for n, what in enumerate(scratch)]
        )
        return Plan([watched_call(noted, places, rows * factor)], scratch)

    return CountedProgram(SUM, planner)


# ---- what is served ---------------------------------------------------------------------------------------------------
def test_calls_of_the_last_form_are_not_read(summed):
    """At any addresses; results are new arrays, scratch memory is one, behind which further ones begin at multiples."""
    warm(summed, *tensors(4, 8), None, None, None)
    results = []
    for n in range(4):
        (x, y), STREAM[0] = tensors(4, 8), 7 + n
        out = summed(x, y, None, None, None)
        assert (out.shape, out.stride(), out.dtype) == ((4, 8), (8, 1), torch.float32)
        stream, number, *at, first, second = RUNS[n]
        assert (stream, number, at) == (7 + n, 8.0, [x.data_ptr(), y.data_ptr(), out.data_ptr()])
        assert second == first + 256
        results.append(out)
    assert summed.read == 0 and len({out.data_ptr() for out in results}) == 4


def test_results_that_are_given_and_several(summed):
    x, y, out, other = tensors(4, 8, n=4)
    z, sums = tensors(4)
    options = dict(options=(2.0, True))
    warm(summed, x, y, z, out, sums, **options)
    assert summed(x, y, z, other, sums, **options)[0] is other and summed(x, y, z, other, sums, **options)[1] is sums
    assert [run[2:7] for run in RUNS] == [(x.data_ptr(), y.data_ptr(), other.data_ptr(), sums.data_ptr(), z.data_ptr())] * 2
    warm(summed, x, y, None, None, None, **options)
    made_out, made_sums = summed(x, y, None, None, None, **options)
    assert (made_out.shape, made_sums.shape) == ((4, 8), (4,)) and summed.read == 0


def test_one_tensor_for_several_arguments(summed):
    """Calls that pass one tensor as x and y are served by one function, and calls of two tensors by another."""
    x, y = tensors(4, 8)
    for arrays in ((x, x), (y, y), (x, y), (y, x), (x, x)):
        for _ in range(3):
            summed(*arrays, None, None, None)
            assert RUNS[-1][2:4] == (arrays[0].data_ptr(), arrays[1].data_ptr())
    summed.read = 0
    for arrays in ((x, x), (y, x), (y, y), (x, y)):
        summed(*arrays, None, None, None)
        assert RUNS[-1][2:4] == (arrays[0].data_ptr(), arrays[1].data_ptr())
    assert summed.read == 0


def test_who_watches_launches_sees_them(summed, monkeypatch):
    """As tiles.profile does: what steps do is looked up in each call."""
    warm(summed, *tensors(4, 8), None, None, None)
    seen, run = [], Noted.run
    monkeypatch.setattr(Noted, "run", lambda step, *args: seen.append(step) or run(step, *args))
    summed(*tensors(4, 8), None, None, None)
    assert len(seen) == len(RUNS) == 1 and summed.read == 0


def test_options_have_a_form_each(summed):
    x, y = tensors(4, 8)
    for factor in (2.0, 3.0):
        warm(summed, x, y, None, None, None, options=(factor, False))
    for factor in (2.0, 3.0, 2.0, 3.0):
        summed(x, y, None, None, None, options=(factor, False))
    assert [run[1] for run in RUNS] == [8.0, 12.0, 8.0, 12.0] and summed.read == 0


# ---- what is not ------------------------------------------------------------------------------------------------------
def odd(x):
    return torch.zeros(x.numel() + 1)[1:].view(x.shape)


def without_memory(x):
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def set_to(other):
    def change(x):
        x.data = other
        return x

    return change


def resized(*shape):
    return lambda x: x.resize_(*shape)


def subclass(x):
    class Own(torch.Tensor):
        pass

    return x.as_subclass(Own)


SAME = {  # other tensors, which are what they were: the full way, and the same launch
    "a row further": lambda x: torch.zeros(5, 8)[1:],
    "at an odd address": odd,
    "of other numbers": lambda x: x.half(),
    "the other way round": lambda x: torch.zeros(8, 4).t(),
    "a class of its own": subclass,
    "a parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "of inference mode": lambda x: torch.inference_mode()(torch.zeros_like)(x),
}


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("change", SAME)
def test_what_is_read_again(summed, change, place):
    inputs = tensors(4, 8)
    warm(summed, *inputs, None, None, None)
    inputs[place] = SAME[change](inputs[place])
    out = summed(*inputs, None, None, None)
    assert RUNS[0][:5] == (7, 8.0, *[x.data_ptr() for x in inputs], out.data_ptr())
    assert summed.read == (change != "a row further")


CHANGED = {  # the same Python object, mostly; what its rows are then
    "rows": (resized(3, 8), 3),
    "rows by its data": (set_to(torch.zeros(6, 8)), 6),
    "strides": (lambda x: x.resize_(8, 4).t_(), 4),
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_tensor_that_was_changed_in_place(summed, change):
    x, y = tensors(4, 8)
    warm(summed, x, y, None, None, None)
    mutate, rows = CHANGED[change]
    x, y = mutate(x), mutate(y)
    out = summed(x, y, None, None, None)
    assert summed.read == 1 and out.shape == (rows, 8) and RUNS[0][1:5] == (
        2.0 * rows, x.data_ptr(), y.data_ptr(), out.data_ptr(),
    )  # fmt: skip


REFUSED = {  # TypeError or ValueError of one argument, as at the first call
    "another extent": lambda x: torch.zeros(5, 8),
    "another rank": lambda x: torch.zeros(4),
    "a dtype that is none": lambda x: torch.zeros(4, 8, dtype=torch.complex64),
    "no memory": without_memory,
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "a number": lambda x: 3.0,
    "a list": lambda x: [1.0],
    "nothing": lambda x: None,
    "fake": lambda x: FakeTensorMode().from_tensor(x),
    "one that requires grad": lambda x: x.clone().requires_grad_(),
}


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("change", REFUSED)
def test_what_is_refused_still_is(summed, change, place):
    inputs = tensors(4, 8)
    warm(summed, *inputs, None, None, None)
    inputs[place] = REFUSED[change](inputs[place])
    with pytest.raises((TypeError, ValueError, NotImplementedError, AttributeError, RuntimeError)) as refused:
        summed(*inputs, None, None, None)
    fresh = CountedProgram(SUM, summed.program.planner)
    with pytest.raises(refused.type) as expected:
        fresh(*inputs, None, None, None)
    assert str(refused.value) == str(expected.value) and not RUNS


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("place", [0, 1])
def test_a_nested_tensor_does_not_end_the_process(summed, place):
    """What compares forms in torch would: it has no strides."""
    inputs = tensors(4, 8)
    warm(summed, *inputs, None, None, None)
    inputs[place] = torch.nested.nested_tensor([torch.zeros(4, 8), torch.zeros(2, 8)])
    with pytest.raises(TypeError, match=f"^{'xy'[place]}: .*NestedTensor"):
        summed(*inputs, None, None, None)


def test_arrays_of_another_framework(summed):
    warm(summed, *tensors(4, 8), None, None, None)
    x, y = (np.zeros((4, 8), np.float32) for _ in range(2))
    out = summed(x, y, None, None, None)
    assert isinstance(out, np.ndarray) and RUNS[0][:3] == (0, 8.0, x.__array_interface__["data"][0])
    with pytest.raises(ValueError, match="^y: must lie where x does"):
        summed(torch.zeros(4, 8), y, None, None, None)


def test_an_array_that_was_absent_is_not_overlooked(summed):
    x, y, out = tensors(4, 8, n=3)
    z, sums = tensors(4)
    warm(summed, x, y, None, None, None)
    summed(x, y, z, None, None)
    assert RUNS[-1][5] == z.data_ptr() and summed.planned == 1
    assert summed(x, y, None, out, None) is out
    warm(summed, x, y, z, None, None)
    summed(x, y, None, None, None)
    assert z.data_ptr() not in RUNS[-1] and len(RUNS[-1]) == 7


@pytest.mark.parametrize("shared", ["x", "y"])
def test_arrays_that_share_memory_are_refused_by_name(summed, shared):
    x, y, out = tensors(4, 8, n=3)
    warm(summed, x, y, None, out, None)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"^out: must not overlap {shared}: "):
            summed(x, y, None, {"x": x, "y": y}[shared], None)
    assert not RUNS and summed(x, y, None, out, None) is out


def test_a_stream_of_the_caller_s(summed):
    """It is used, and every such call read."""
    x, y, out = tensors(4, 8, n=3)
    warm(summed, x, y, None, out, None)
    for stream in (7, 7, 9):
        if stream == 9:
            with pytest.raises((AssertionError, RuntimeError, AttributeError)):  # memory for it is CUDA's to give
                summed(x, y, None, out, None, stream=stream)
        else:
            summed(x, y, None, out, None, stream=stream)
    assert [run[0] for run in RUNS] == [7, 7]


def test_modes_of_the_thread(summed):
    """Where torch watches, transforms or casts the calls that it sees, they are not made behind its back; inference mode is
    another form. Afterwards all is as it was."""
    x, y = tensors(4, 8)
    warm(summed, x, y, None, None, None)

    def through(*arrays):
        summed.read = 0
        try:
            return summed(*arrays, None, None, None)
        except Exception as error:
            return error

    with FlopCounterMode(display=False):
        through(x, y)
    assert len(RUNS) == summed.read == 1
    RUNS.clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        through(x, y)
        assert not RUNS or summed.read
    torch.vmap(lambda a: through(a, y) is None or a)(torch.zeros(2, 4, 8))
    assert not RUNS or summed.read
    RUNS.clear()
    with torch.inference_mode():
        out = through(x, y)
        assert out.is_inference() and summed.read
        warm(summed, x, y, None, None, None)
        assert summed(x, y, None, None, None).is_inference()
    assert not through(x, y).is_inference()


def test_gradients_are_not_lost(summed):
    """A form that is known of tensors that require grad, without grad mode, is not served with it."""
    x, y = tensors(4, 8)
    with torch.no_grad():
        warm(summed, x.requires_grad_(), y, None, None, None)
        summed(x, y, None, None, None)
        assert summed.read == 0
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="^x: requires grad"):
            summed(x, y, None, None, None)
    with torch.no_grad():
        summed(x, y, None, None, None)


def test_tangents_are_not_lost(summed):
    """Nor where forward-mode derivatives are computed, though a dual tensor looks like any other."""
    x, y = tensors(4, 8)
    warm(summed, x, y, None, None, None)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(y, y.clone())
        for _ in range(2):
            with pytest.raises(NotImplementedError, match="^y: has a tangent"):
                summed(x, dual, None, None, None)
    summed(x, y, None, None, None)
    assert summed.read == 0


def test_options_that_cannot_be_looked_up(summed):
    warm(summed, *tensors(4, 8), None, None, None)
    for _ in range(2):
        summed(*tensors(4, 8), None, None, None, options=([2.0], False))
    assert [run[1] for run in RUNS] == [[2.0] * 4] * 2 and summed.planned == 2
    with pytest.raises((TypeError, ValueError), match="layout"):
        summed(*tensors(4, 8), None, None, None, layout=["bshd"])


# ---- what is remembered -----------------------------------------------------------------------------------------------
def test_no_tensor_is_kept(summed):
    inputs = tensors(4, 8)
    inputs.append(warm(summed, *inputs, None, None, None))
    alive = [weakref.ref(x) for x in inputs]
    inputs.clear()
    gc.collect()
    assert not any(x() is not None for x in alive)


def test_what_is_remembered_is_limited(summed, monkeypatch):
    for table in ("GUARDED_CALLS", "REMEMBERED"):
        monkeypatch.setattr(programs, table, LruTable(8))
    for n in range(1, 40):
        for _ in range(3):
            summed(*tensors(n, 8), None, None, None, options=(float(n), False))
            assert len(programs.REMEMBERED) <= 8
    assert [run[1] for run in RUNS] == [float(n * n) for n in range(1, 40) for _ in range(3)]


def test_where_torch_cannot_be_asked_every_call_is_read(summed, monkeypatch):
    monkeypatch.setattr(frameworks.kind_of(torch.zeros(1), "x"), "guards", None)
    for _ in range(5):
        summed(*tensors(4, 8), None, None, None)
    assert summed.read == 5 and summed.planned == 1


@pytest.mark.parametrize("columns", [False, True])
def test_forms_that_take_turns(summed, columns):
    """A few are expected; what more there are is looked up, and nothing is written anew."""
    for count, read in (programs.EXPECTED, False), (programs.EXPECTED + 1, columns):
        forms = [tensors(4, n) if columns else tensors(n, 8) for n in range(1, count + 1)]
        for inputs in forms * 6:
            summed(*inputs, None, None, None)
        summed.read = summed.planned = 0
        RUNS.clear()
        for inputs in forms * 2:
            summed(*inputs, None, None, None)
        assert summed.planned == 0 and [run[1:3] for run in RUNS] == [(2.0 * len(x), x.data_ptr()) for x, _ in forms * 2]
        assert (summed.read > 0) == read


# ---- torch.compile ----------------------------------------------------------------------------------------------------
def test_dynamo_does_not_look_inside(summed):
    """A graph that was made before such calls stays, and one that is made after them has the op."""
    x, y = tensors(4, 8)
    frames = []

    def backend(module, _):
        frames.append([node.target for node in module.graph.nodes if node.op == "call_function"])
        return module.forward

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, y: summed.program(None, (x, y, None, None, None), (2.0, False), "bshd"), backend=backend, fullgraph=True
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled(x, y)
        warm(summed, x, y, None, None, None)
        compiled(x, y)
        torch._dynamo.reset()
        compiled(x, y)
    assert len(frames) == 2 and all("noted" in str(target) for target, *_ in frames)
