"""Calls with a new number of rows, on a stand-in device: what is planned, once per class of lengths
(fuse/planning/length_classes.py), and what such a call costs."""

import collections
import itertools
import linecache
import random
import struct
import sys
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from cuda.bindings import driver
from on_no_device import Lent, RecordingAllocator, fresh, noting_driver, torch_on_gpu, usual_calls
from operator_cases import DTYPES, SHAPES, normal, sample
from references import compare

import attention
import fuse
from fuse import inspect, operators
from fuse.language.trace import Shape
from fuse.planning.cost import card
from fuse.planning.generated_module import generate_module
from fuse.planning.length_classes import BATCH, EXACT, KEY_AXIS, ROWS, SPLIT_KEY_AXIS, last_alike_rows, representative
from tiles import bf16
from tiles.calls import program as programs
from tiles.launching import lengths
from tiles.launching.arrays import c_ordered
from tiles.launching.frameworks import KIND_OF

MEMORY, ROOM = 2**44, 2**42
WIDE = {136: 4096, 72: 6144, 16: 64, 40: 2048, 68: 2048}  # columns as models have them
GRADIENTS = ("residual_rms_norm", "gated_mlp", "rms_norm_linear", "layer_norm_linear", "dropout_residual_layer_norm")


class Tensor(Lent):
    """An array on a stand-in device, with what fused functions need of a tensor."""

    dtype = property(lambda self: self.form.dtype)
    shape = property(lambda self: self.form.shape)
    T = property(lambda self: Tensor(self.pointer, self.form.permuted((1, 0))))

    def stride(self, axis=None):
        steps = tuple(n // self.form.itemsize for n in self.form.strides)
        return steps if axis is None else steps[axis]

    def reshape(self, *shape):
        shape = shape[0] if isinstance(shape[0], tuple) else shape
        count = np.prod(self.shape)
        shape = tuple(int(count // -np.prod(shape)) if n == -1 else n for n in shape)
        return Tensor(self.pointer, c_ordered(shape, self.dtype, 0))

    def swapaxes(self, one, other):
        order = list(range(len(self.shape)))
        order[one], order[other] = order[other], order[one]
        return Tensor(self.pointer, self.form.permuted(order))

    def __matmul__(self, other):
        return Tensor(self.pointer, c_ordered((*self.shape[:-1], other.shape[-1]), self.dtype, 0))

    def sum(self, axes, dtype):
        return Tensor(self.pointer, c_ordered(self.shape[-1:], "float32", 0))

    def astype(self, dtype):
        return Tensor(self.pointer, c_ordered(self.shape, np.dtype(dtype).name, 0))


@pytest.fixture
def gpu(monkeypatch):
    """See noting_driver. `.slow` counts the searches and rendered modules of a plan for a new class."""
    with noting_driver(monkeypatch) as noted:
        monkeypatch.setitem(KIND_OF, Tensor, KIND_OF[Lent])
        monkeypatch.setattr(
            RecordingAllocator, "allocator", lambda self, home, *form: lambda: Tensor(2**60, c_ordered(*form, 0))
        )
        monkeypatch.setattr("tiles.launching.frameworks.machine", lambda ordinal: SimpleNamespace(processors=132))
        for user in ("fuse.planning.definition", "fuse.calls.gradient_choice"):
            monkeypatch.setattr(f"{user}.card", lambda ordinal: card(None))
        noted.slow = collections.Counter()

        def count(name, function):
            def counted(*inputs, **options):
                noted.slow[name] += 1
                return function(*inputs, **options)

            monkeypatch.setattr(name, counted)

        for name in (
            "fuse.language.trace._trace_with_rows",
            "fuse.planning.plan_search.PlanSearch",
            "fuse.writing.module_text.assemble",
        ):
            count(name, eval(name, {"fuse": fuse, **sys.modules}))
        count("tiles.calls.program.Program._plan_and_compile", programs.Program._plan_and_compile)
        yield noted


def arrays_of(name, rows, gradient=False, wide=True):
    """Arrays for an operator or its gradient."""
    operator, specs = getattr(operators, name), []
    extents = {"m": rows} | (WIDE if wide and "attention" not in name else {})
    for n, shape in enumerate(SHAPES[name]):
        dtype = np.dtype(DTYPES.get((name, n), bf16.np)).name
        specs.append((tuple(extents.get(one, one) for one in shape), dtype))
    if gradient:
        specs += [((), "float32")] * (len(operator.names) - len(specs))
        specs += [(x.extents, "bfloat16") for x in operator._trace(tuple(Shape(*one) for one in specs)).roots]
    addresses = itertools.count(MEMORY, ROOM)
    return [Tensor(next(addresses), c_ordered(*one, 0)) if one[0] else 0.5 for one in specs]


CASES = [(name, False) for name in SHAPES] + [(name, True) for name in GRADIENTS]


def function_of(name, gradient):
    """The operator, or its gradient, with empty caches."""
    function = fuse.kernel(getattr(operators, name).definition)
    return function.gradient if gradient else function


@pytest.mark.parametrize(("name", "gradient"), CASES)
def test_once_for_each_class(gpu, name, gradient):
    """A new number of rows of a known class is not traced, searched, generated or planned again, and launches what it launches
    with empty caches."""
    function = function_of(name, gradient)
    for rows in (9, 40, 300, 2500):
        function.run(*arrays_of(name, rows, gradient))
        function.run(*arrays_of(name, rows + 2, gradient))  # a plan that holds for others is made of the second
    arrays_by_rows = {rows: arrays_of(name, rows, gradient) for rows in (10, 41, 304, 2520, 2559, 45)}
    gpu.slow.clear()
    for rows, inputs in arrays_by_rows.items():
        gpu.launches.clear()
        function.run(*inputs)
        has_launch = [*gpu.launches]
        assert not gpu.slow, (rows, gpu.slow)
        gpu.launches.clear()
        fresh(function.run, *inputs)
        assert has_launch == gpu.launches
        gpu.slow.clear()


DOCUMENTED = [one for one in SHAPES if inspect.has_documented_shapes(one)]  # CI has every other one


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.release] * (n % 2)) for n, x in enumerate(DOCUMENTED)])
def test_few_kernels_for_all_rows(name):
    """For 1 to 9000 rows at most 10 kernels of each launch are compiled. The key of a plan decides the text."""
    operator, known, first = getattr(operators, name), {}, 1
    kernels = collections.defaultdict(set)
    while first <= 9000:
        rows = last_alike_rows(first)
        for n in {first, rows} if rows <= 1024 else {rows}:
            shapes = [Shape(x.shape, x.dtype) for x in arrays_of(name, n)]
            shapes += [Shape((), "float32")] * (len(operator.names) - len(shapes))
            actual, (best, *_) = operator._rank_plans(tuple(shapes), None)
            key = best.identity, tuple(getattr(kernel, "schedule", None) for kernel in best.plan.kernels)
            if key not in known or n < 1024:
                result = generate_module(operator.name, actual, best)
                assert known.setdefault(key, result.text) == result.text
                for label, code in result.code:
                    kernels[label].add(code)
        first = rows + 1
    assert max(map(len, kernels.values()), default=1) <= 10 + (
        name in ("fp8_linear", "int8_linear")
    )  # one more for a single row


def test_classes_in_turns(gpu, monkeypatch):
    """More classes than the cache tries at once: the function compiled for each is used again in its turn."""
    function, compiled, real = function_of("rms_norm_linear", False), [], lengths._function
    monkeypatch.setattr(lengths, "_function", lambda *inputs: compiled.append(inputs) or real(*inputs))
    classes = 2, 17, 33, 129, 257, 513
    for turn in range(8):
        for rows in classes:
            function.run(*arrays_of("rms_norm_linear", rows + turn))
    assert len(compiled) == 2 * len(classes)  # for any lengths, and for any number of rows


def test_late_at_new_rows(gpu, monkeypatch):
    """A launch whose weights the previous one wrote is not early, also by a plan for other lengths."""
    product, attributes, launch = fuse.kernel(lambda x, w: x @ w), [], driver.cuLaunchKernelEx
    monkeypatch.setattr(driver, "cuLaunchKernelEx", lambda *inputs: attributes.append(inputs[0].numAttrs) or launch(*inputs))
    w, square, other = (Tensor(MEMORY + n * ROOM, c_ordered((256, 256), "bfloat16", 0)) for n in range(3))
    for rows in range(17, 33):
        x = Tensor(MEMORY + 4 * ROOM, c_ordered((rows, 256), "bfloat16", 0))
        product.run(square, w, out=other)
        launched = [product.run(x, weights) and attributes[-1] for weights in (square, other)]
        attributes.clear()
        product.run(square, w, out=other)
        product.run(x, other)
        assert launched[0] == launched[1] == attributes[-1] + 1, rows


def test_what_a_number_of_rows_takes(monkeypatch):
    """Its arguments are not read one by one: with known rows a call takes few more function calls than attention.forward's with
    a known length, with new rows than forward's with a new one, for each launch."""
    torch = pytest.importorskip("torch")

    def forward(rows):
        attention.forward(*[torch.empty(1, rows, 8, 128, dtype=torch.bfloat16) for _ in range(3)], causal=True)

    with torch_on_gpu(monkeypatch):
        monkeypatch.setattr("fuse.planning.definition.card", lambda ordinal: card(None))
        known, new = usual_calls(forward, [5000] * 40), usual_calls(forward, range(5000, 5060))
        for name, launches in (("residual_rms_norm", 1), ("gated_mlp", 1), ("rms_norm_linear", 2), ("mixture_of_experts", 4)):
            arrays = [torch.empty(x.shape, dtype=getattr(torch, x.dtype)) for x in arrays_of(name, 5200)]
            function = fuse.kernel(getattr(operators, name).definition)

            def call(rows, function=function, arrays=arrays):
                function(*[x[:rows] if len(x) == 5200 else x for x in arrays])

            of_known, of_new = usual_calls(call, [5121] * 40), usual_calls(call, range(5121, 5181))
            assert of_known <= known + 3 * launches, (name, of_known, known)
            assert of_new <= new + 7 * launches, (name, of_new, new)


def test_what_is_not_like_the_last_call(monkeypatch):
    """A call whose arguments differ from the last one's in more than rows is read: by a number, by a transpose, by a tensor
    that requires a gradient, by what is no tensor."""
    torch = pytest.importorskip("torch")
    with torch_on_gpu(monkeypatch) as noted:
        monkeypatch.setattr("fuse.planning.definition.card", lambda ordinal: card(None))
        x, g, w = [torch.empty(x.shape, dtype=getattr(torch, x.dtype)) for x in arrays_of("rms_norm_linear", 2000)]
        function, turned = fuse.kernel(operators.rms_norm_linear.definition), w.T.contiguous().T

        def passes(number, *inputs):
            noted.launches.clear()
            function(*inputs)
            return any(slot[:4] == struct.pack("<f", number) for launch in noted.launches for slot in launch[-1])

        for inputs in ((x, g, w, 0.5), (x, g, turned), *[(x, g, w)] * 4):
            function(*inputs)
        ran, run = [], programs.Program.run
        monkeypatch.setattr(programs.Program, "run", lambda self, *inputs: ran.append(self) or run(self, *inputs))
        assert not function(x, g, w).requires_grad and not ran
        assert passes(0.5, x, g, w, 0.5) and passes(1e-5, x, g, w) and not passes(0.5, x, g, w)
        assert len(function(x, g, turned)) == 2000 and function.last.arrays[2] == (2, True)
        function(x, g, w)
        assert function(x, g, w.clone().requires_grad_()).requires_grad
        for inputs in ((x, g), (x, g, w, torch.ones(3)), (x, "g", w)):
            with pytest.raises((AttributeError, TypeError, ValueError)):
                function(*inputs)


def test_memory_stays(gpu, monkeypatch):
    """Memory stays bounded over thousands of numbers of rows, linecache included."""
    for table in ("GUARDED_CALLS", "REMEMBERED"):
        monkeypatch.setattr(programs, table, programs.LruTable(64))
    monkeypatch.setattr(programs, "WATCHED_PLANS", programs.LruTable(64))
    function, numbers = function_of("rms_norm_linear", False), [*range(1, 9001)]
    random.Random(0).shuffle(numbers)
    for rows in numbers[:3000]:
        function.run(*arrays_of("rms_norm_linear", rows))
        gpu.launches.clear()
    texts, classes = len(linecache.cache), function.best.cache_info().currsize
    tracemalloc.start()
    try:
        for part in (numbers[3000:3250], numbers[3250:4500]):
            before, _ = tracemalloc.get_traced_memory()
            for rows in part:
                function.run(*arrays_of("rms_norm_linear", rows))
                gpu.launches.clear()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 300_000
    assert len(linecache.cache) == texts and function.best.cache_info().currsize == classes <= 16


# ---- classes ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", [ROWS, BATCH, KEY_AXIS, SPLIT_KEY_AXIS, EXACT])
def test_what_stands_for_a_length(how):
    for n in [*range(3000), 4096, 9000, 2**31 - 1]:
        stands = representative(n, how)
        assert stands >= n and representative(stands, how) == stands
        assert (n < 2 or how == EXACT) <= (stands == n)
        if how == SPLIT_KEY_AXIS and n > 512:
            assert all((stands % parts == 0) == (n % parts == 0) for parts in (2, 4, 8, 16, 32, 64, 128))
        elif how != EXACT:
            assert stands < 2 * n or stands <= 16
    assert len({representative(n, ROWS) for n in range(1, 9001)}) == 12


def test_a_definition_that_asks_for_its_rows():
    """A definition that reads its number of rows is planned for that number alone; one that reads columns has classes of
    rows."""
    by_rows = fuse.kernel(lambda x: x * (1.0 / x.shape[0]))
    by_columns = fuse.kernel(lambda x: x * (1.0 / x.shape[-1]))
    for rows in (3, 5):
        x = normal(rows, 64)
        compare(by_rows, [x], by_rows.run(x))
        assert np.abs(by_rows.run(x).astype(float) - x.astype(float) / rows).max() < 0.01
    shapes = (Shape((3, 64), "bfloat16"),)
    assert by_rows._axis_roles(shapes)[0] == ((EXACT, EXACT),) and by_columns._axis_roles(shapes)[0] == ((ROWS, EXACT),)


ASKING = {
    "one": lambda x: 1.0 / x.shape[0],
    "of few columns": lambda x: 1.0 / x.shape[0] if x.shape[1] < 100 else 0.5,
    "all": lambda x: 1.0 / np.prod(x.shape) * x.shape[1],
    "unpacked": lambda x: 1.0 / next(n for n, _ in [x.shape]),
    "sliced": lambda x: 1.0 / x.shape[:1][0],
    "compared": lambda x: 1.0 if x.shape == (16, 64) else 0.5,
    "contained": lambda x: 1.0 if 16 in x.shape else 0.5,
    "joined": lambda x: 1.0 / (x.shape + (1,))[0],
}


@pytest.mark.parametrize("case", ASKING)
def test_what_asks_for_rows(case):
    """Any way of reading an extent counts, also of lengths that are not tried first."""
    kernel, factor = fuse.kernel(lambda x: x * ASKING[case](x)), ASKING[case]
    for rows in (3, 5, 16):
        x = normal(rows, 64)
        assert np.abs(kernel.run(x).astype(float) - x.astype(float) * factor(x)).max() < 0.02
        result, _ = kernel.gradient.run(x, x), kernel.source(x)
        assert np.abs(result[0].astype(float) - x.astype(float) * factor(x)).max() < 0.02


def test_what_is_no_length():
    """Experts, which an index chooses among; keys, where no kernel of attention's serves."""
    shapes = [Shape(x.shape, x.dtype) for x in arrays_of("lora_linear_by_index", 5)]
    roles, _ = operators.lora_linear_by_index._axis_roles((*shapes, Shape((), "float32")))
    assert roles[2][0] == EXACT and roles[4] == (ROWS,)
    scores = fuse.kernel(lambda q, k, v: fuse.softmax(q @ fuse.transpose(k)) @ v + 1.0)
    for keys in (40, 48):
        arrays = [normal(20, 64), normal(keys, 64), normal(keys, 64)]
        compare(scores, arrays, scores.run(*arrays))


def test_the_table():
    """explain's table has each number of rows once, with the kernels that serve it."""
    arrays = sample("rms_norm_linear", 5, bf16)
    table = operators.rms_norm_linear.table(arrays, 700)
    ranges = sorted(one for some in table.values() for one in some)
    assert ranges[0][0] == 1 and ranges[-1][1] == 700
    assert all(last + 1 == first for (_, last), (first, _) in itertools.pairwise(ranges))
    for rows in (1, 16, 17, 64, 65, 700):
        (best, *_) = operators.rms_norm_linear.candidates(*sample("rms_norm_linear", rows, bf16))
        assert any(first <= rows <= last for first, last in table[best.summary])
    said = operators.rms_norm_linear.explain(*arrays, rows=700)
    assert "1 to 64 rows: a product of few rows" in said and "rows: a product" not in operators.rms_norm_linear.explain(*arrays)
    exact = fuse.kernel(lambda x: x * (1.0 / x.shape[0]))
    assert exact.table([normal(5, 64)], 700) == {}


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_many_rows_on_the_card(name):
    """Calls with new numbers of rows, in a random order, give what each gives with empty caches."""
    torch = pytest.importorskip("torch")
    from tiles.testing.backends import to_numpy, to_torch

    function, numbers = function_of(name, False), [1, 2, 9, 16, 17, 40, 64, 65, 100, 128, 129, 200, 300, 301, 600, 1100]
    random.Random(0).shuffle(numbers)
    for rows in (*numbers, *numbers[::-1]):
        inputs = [*map(to_torch, sample(name, rows, bf16))]
        actual, fresh_result = function(*inputs), function_of(name, False)(*inputs)
        for mine, its in zip(*(x if isinstance(x, tuple) else (x,) for x in (actual, fresh_result)), strict=True):
            assert to_numpy(mine).tobytes() == to_numpy(its).tobytes()
        torch.cuda.synchronize()
