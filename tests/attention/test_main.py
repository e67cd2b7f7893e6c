"""`python -m attention`: its demonstration runs where attention.forward does."""

from types import SimpleNamespace

import pytest

from attention import __main__ as main
from attention import families
from attention.plans.softmax.forward_programs import FORWARD
from tiles import doctor
from tiles.launching.arrays import c_ordered
from tiles.targets import Target


@pytest.fixture
def on(monkeypatch):
    """on(capability): GPU 0 is replaced by one of that compute capability."""

    def put(capability):
        for module, name in (main, "device"), (families, "machine"):
            monkeypatch.setattr(module, name, lambda ordinal: SimpleNamespace(target=Target(*capability)))

    return put


@pytest.mark.parametrize(
    ("capability", "runs"), [((7, 5), False), ((8, 0), True), ((8, 9), True), ((9, 0), True), ((12, 0), True)]
)
def test_main_forward_and_doctor_agree(capability, runs, on):
    on(capability)
    form = c_ordered((1, 8, 1, 64), "bfloat16", 0)
    problem = FORWARD.problem(dict.fromkeys("qkv", form))
    try:
        served = families.choose_family(problem, None) == ("sm_90" if capability[0] == 9 else "sm_80")
    except ValueError:
        served = False
    assert (main.has_gpu(), served, "too old" not in doctor.runs_on(Target(*capability))) == (runs, runs, runs)


def test_no_gpu(monkeypatch):
    def none(ordinal):
        raise RuntimeError("CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected")

    monkeypatch.setattr(main, "device", none)
    assert not main.has_gpu()


@pytest.mark.parametrize(("gpu", "place"), [(True, "on the card"), (False, "interpreted")])
def test_where_the_demonstration_runs(gpu, place, on, monkeypatch):
    """On an A100 it runs on the GPU."""
    on((8, 0) if gpu else (7, 5))
    ran = []
    monkeypatch.setattr(doctor, "main", lambda: 0)
    for name, where in (("on_torch", "on the card"), ("on_numba", "on the card"), ("on_interpreter", "interpreted")):
        monkeypatch.setattr(main, name, lambda where=where: ran.append(where))
    main.show()
    assert ran == [place]
