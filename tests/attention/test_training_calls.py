"""What a step of training costs the host, counted on a simulated GPU for torch's tensors, with autograd."""

import builtins
import functools
import random

import pytest

torch = pytest.importorskip("torch")

from on_no_device import torch_on_gpu, usual_calls  # noqa: E402

import attention  # noqa: E402
from tiles.calls import program  # noqa: E402
from tiles.calls.program import Program  # noqa: E402
from tiles.launching import loaded_code  # noqa: E402
from tiles.launching.loaded_code import title  # noqa: E402


@pytest.fixture
def gpu(monkeypatch):
    with torch_on_gpu(monkeypatch) as noted:
        yield noted


def tiles(length, count, heads=2):
    """Tensors (1, length, heads, 64) that require grad."""
    return [torch.zeros(1, length, heads, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(count)]


def gates(length, count, heads=2):
    return [-torch.rand(1, length, heads).requires_grad_() for _ in range(count)]


STEPS = {  # name: (the function, its arguments of a length)
    "forward": (lambda *x: attention.forward(*x, causal=True), lambda n: tiles(n, 3)),
    "forward, window": (lambda *x: attention.forward(*x, causal=True, window=(100, 0)), lambda n: tiles(n, 3)),
    "linear": (lambda *x: attention.linear(*x[:3], decay=x[3]), lambda n: [*tiles(n, 3), *gates(n, 1)]),
    "delta_rule": (lambda *x: attention.delta_rule(*x[:4], decay=x[4]), lambda n: [*tiles(n, 3), *gates(n, 2)]),
}


def a_step(name, length):
    """The loss of one forward call and its gradients."""
    function, arguments = STEPS[name]
    out = function(*arguments(length))
    out.backward(torch.zeros_like(out))


@pytest.mark.parametrize("name", STEPS)
def test_no_import_statement_in_a_step(gpu, monkeypatch, name):
    """An import statement costs two microseconds, ten between other work."""
    for _ in range(4):
        a_step(name, 1024)
    imported, real = [], builtins.__import__

    def watched(name, space=None, *rest):
        if space and space.get("__name__", "").partition(".")[0] in ("attention", "tiles", "ops"):
            imported.append((space["__name__"], name))
        return real(name, space, *rest)

    monkeypatch.setattr(builtins, "__import__", watched)
    a_step(name, 1024)
    assert imported == []


@pytest.mark.parametrize("name", ["forward", "linear", "delta_rule"])
def test_gradients_are_prepared_while_forward_is_compiled(gpu, monkeypatch, name):
    """All that the backward pass launches. The errors of `meanwhile` are not heard of in a call, so that it is called here,
    with what the call gives it."""
    prepared, inputs = [], []
    monkeypatch.setattr(program, "_call_ignoring_errors", lambda *call: inputs.append(call))
    function, arguments = STEPS[name]
    out = function(*arguments(1024))
    ((meanwhile, *rest),) = inputs
    result = loaded_code.machine_code
    monkeypatch.setattr(loaded_code, "machine_code", lambda kernel, *of: prepared.append(title(kernel)) or result(kernel, *of))
    meanwhile(*rest)
    assert prepared
    before = [*prepared]
    out.backward(torch.zeros_like(out))
    assert prepared == before


@pytest.mark.parametrize("name", STEPS)
def test_what_a_step_takes(gpu, monkeypatch, name):
    """With a known length, or some that take turns, forward and backward run at most five times the functions of the library
    that forward alone does. With a new length there is what follows from it for each launch, and nothing is read or planned,
    also after calls without gradients."""
    function, arguments = STEPS[name]
    forward = usual_calls(lambda n: function(*[x.detach() for x in arguments(n)]), [2048] * 25)
    step = functools.partial(a_step, name)
    assert usual_calls(step, [2048] * 25) <= 5 * forward
    assert usual_calls(step, [2048 + 64 * (n % 5) for n in range(50)]) <= 5 * forward
    gpu.launches.clear()
    step(2048)
    launches, known = len(gpu.launches), usual_calls(step, [2048] * 25)
    lengths = random.Random(0).sample(range(3001, 4000, 2), 40)
    assert usual_calls(step, lengths) <= known + 6 * launches
    ran, run = [], Program.run
    monkeypatch.setattr(Program, "run", lambda self, *inputs: ran.append(self.schema.name) or run(self, *inputs))
    for length in lengths:
        step(length + 1)
    assert len(ran) <= 4, ran
