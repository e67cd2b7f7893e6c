"""Which family of kernels serves a call of attention.forward: by the GPU, and by where arrays lie."""

import types

import numpy as np
import pytest
from forward_checks import agree, inputs
from places import BF16
from poison import poisoned

import attention
from attention import families, reference
from attention.kernels.softmax import forward_ampere
from attention.parts.visibility import CAUSAL, FULL
from attention.plans.softmax import forward_launches, forward_programs
from tiles import bf16
from tiles.launching.arrays import c_ordered
from tiles.launching.devices import Interpreter
from tiles.targets import HOPPER, Target

pytestmark = pytest.mark.usefixtures("family")
SKIPPED = [(4, 64), (2, 128), (6, 72), (1, 64), (3, 72)]


@pytest.mark.parametrize(("skip", "head_dim"), SKIPPED)
def test_arrays_that_tma_cannot_address(place, family, skip, head_dim):
    """Bases and strides of 8, 4 or 2 bytes: sm_80's family takes them, asked or not; Hopper's, if asked, says why not."""
    room = [place.put(x) for x in inputs(1, 130, 70, 2, 1, head_dim + skip)]
    target = place.put(poisoned((1, 130, 2, head_dim + skip), BF16))
    q, k, v, out = (x[..., skip:] for x in (*room, target))
    if family == "sm_90":
        words = r"sm_90 takes addresses and positive strides that are multiples of 16 bytes.*'sm_90'"
        with pytest.raises(ValueError, match=words):
            attention.forward(q, k, v, out=out)
    attention.forward(q, k, v, out=out, causal=True, family=None if family == "sm_90" else family)
    host = [np.ascontiguousarray(place.get(x)[..., skip:]) for x in room]
    ref, _ = reference.forward(*host, causal=True)
    low, _ = reference.forward_low(*host, causal=True)
    reference.assert_close(place.get(target)[..., skip:], ref, low)
    assert np.isnan(place.get(target)[..., :skip].astype(np.float32)).all(), "columns beside out were written"


@pytest.mark.parametrize("family", ["sm_80"], indirect=True)
@pytest.mark.parametrize(("room", "head_dim"), [(99 * 1024, 96), (99 * 1024, 128), (99 * 1024, 192), (163 * 1024, 192)])
def test_kernels_for_gpus_with_less_shared_memory(place, room, head_dim, monkeypatch, nothing_known):
    """A smaller shared memory asks for other tiles, which run on any GPU and here."""
    configs, config_for_problem = [], forward_launches.config_for_problem
    monkeypatch.setattr(forward_launches, "machine", lambda _: Interpreter(shared_bytes=room))
    monkeypatch.setattr(
        forward_launches, "config_for_problem", lambda *args: configs.append(config_for_problem(*args)) or configs[-1]
    )
    for causal in (False, True):
        agree(place, *inputs(1, 147, 171, 1, 1, head_dim), causal=causal)
    assert set(configs) == {forward_ampere.config_for(head_dim, bf16, seen, room) for seen in (FULL, CAUSAL)}
    assert forward_ampere.config_for(head_dim, bf16, FULL) not in configs


VIEWS = {  # of arrays (1, 130, 2, 64), by sequence and head
    "sequence backwards": lambda x: x[:, ::-1],
    "heads backwards": lambda x: x[:, :, ::-1],
    "both": lambda x: x[:, ::-1, ::-1],
    "every other row, backwards": lambda x: x[:, ::-2],
    "one row for all": lambda x: np.broadcast_to(x[:, :1], x.shape),
    "one head for all": lambda x: np.broadcast_to(x[:, :, :1], x.shape),
}


@pytest.mark.parametrize("family", ["sm_80"], indirect=True)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("view", VIEWS)
def test_any_strides_at_odd_places(family, view, layout):
    """Keys and values 2 bytes past a multiple of 4, whose strides are such, too; and `out` backwards."""
    q, *keys = inputs(1, 130, 130, 2, 2, 64)
    room = poisoned((2, 1, 130, 2, 67), BF16)
    room[..., 1:65] = keys
    k, v = (VIEWS[view](x) for x in room[..., 1:65])
    out = poisoned((1, 130, 2, 65), BF16)[:, ::-1, :, 1:]
    plain = [np.ascontiguousarray(x) for x in (q, k, v)]
    call_inputs = [x.swapaxes(1, 2) if layout == "bhsd" else x for x in (q, k, v, out)]
    attention.forward(*call_inputs[:3], out=call_inputs[3], layout=layout)
    reference.assert_close(out, reference.forward(*plain)[0], reference.forward_low(*plain)[0])
    assert np.isnan(out.base[..., 0].astype(np.float32)).all(), "memory around out was written"


@pytest.mark.parametrize("family", ["sm_80"], indirect=True)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", "qkv")
def test_any_strides(family, name, view):
    """Negative ones and 0, of each argument: NumPy's, for torch has none that are negative."""
    call_inputs = dict(zip("qkv", inputs(1, 130, 130, 2, 2, 64), strict=True))
    call_inputs[name] = VIEWS[view](call_inputs[name])
    plain = [np.ascontiguousarray(x) for x in call_inputs.values()]
    lengths = {x.shape[1] for x in plain}
    if len(lengths) > 1 and name != "q":
        plain, call_inputs = [x[:, :65] for x in plain], {key: x[:, :65] for key, x in call_inputs.items()}
    for out in poisoned(plain[0].shape, BF16), poisoned(plain[0].shape, BF16)[:, ::-1, ::-1]:
        assert attention.forward(*call_inputs.values(), out=out, causal=True) is out
        ref, low = reference.forward(*plain, causal=True)[0], reference.forward_low(*plain, causal=True)[0]
        reference.assert_close(out, ref, low)


@pytest.mark.parametrize("view", ["one row for all", "one head for all"])
def test_strides_of_0_are_for_every_family(family, view):
    """TMA reads what has one, such as keys that heads share by torch's expand."""
    q, k, v = inputs(1, 70, 70, 2, 2, 64)
    k, v = VIEWS[view](k), VIEWS[view](v)
    plain = [np.ascontiguousarray(x) for x in (q, k, v)]
    out = attention.forward(q, k, v)
    reference.assert_close(out, reference.forward(*plain)[0], reference.forward_low(*plain)[0])


def problem_on(capability, monkeypatch, vector_bytes=16):
    """A problem whose arrays lie on a GPU of this capability, past a multiple of 16 by `vector_bytes` bytes; None: in host
    memory."""
    form = c_ordered((1, 8, 1, 64), "bfloat16", None if capability is None else 0)
    if capability is not None:
        monkeypatch.setattr(families, "machine", lambda ordinal: types.SimpleNamespace(target=Target(*capability)))
    return forward_programs.FORWARD.problem({"q": form, "k": form._replace(misalignment=vector_bytes % 16), "v": form})


@pytest.mark.parametrize(
    ("capability", "vector_bytes", "chosen"),
    [
        ((9, 0), 16, "sm_90"), ((9, 0), 8, "sm_80"), ((9, 0), 4, "sm_80"), ((9, 0), 2, "sm_80"), ((8, 0), 16, "sm_80"),
        ((8, 9), 4, "sm_80"), ((10, 0), 16, "sm_80"), ((12, 0), 16, "sm_80"), (None, 16, "sm_90"), (None, 4, "sm_80"),
    ],
)  # fmt: skip
def test_the_family_by_default(capability, vector_bytes, chosen, monkeypatch):
    """Hopper's where it runs, sm_80's for all other GPUs and arrays."""
    assert families.choose_family(problem_on(capability, monkeypatch, vector_bytes), None) == chosen
    by_caller = families.choose_family(problem_on(capability, monkeypatch), None, vector_bytes == 16)
    assert by_caller == chosen, "the caller says whether TMA can be used"


@pytest.mark.parametrize("name", "qkv")
def test_one_array_decides_the_family(name, monkeypatch):
    """All of them must be for TMA."""
    monkeypatch.setattr(families, "machine", lambda ordinal: types.SimpleNamespace(target=HOPPER))
    form = c_ordered((1, 8, 1, 64), "bfloat16", 0)
    for other in form._replace(misalignment=8), form._replace(strides=(1032, 136, 136, 2), shape=(1, 2, 1, 64)):
        forms = {one: other if one == name else form._replace(shape=other.shape) for one in "qkv"}
        assert families.choose_family(forward_programs.FORWARD.problem(forms), None) == "sm_80"


@pytest.mark.parametrize(
    ("capability", "family", "words"),
    [((8, 9), "sm_90", "sm_90 runs on Hopper"), ((7, 5), "sm_80", "since Ampere"), ((7, 5), None, "since Ampere")],
    indirect=["family"],
)
def test_a_family_that_does_not_run_there(capability, family, words, monkeypatch):
    with pytest.raises(ValueError, match=words):
        families.choose_family(problem_on(capability, monkeypatch), family)


@pytest.mark.parametrize(
    ("capability", "vector_bytes", "words"),
    [((8, 9), 16, "^attention.forward: runs on Hopper; the arrays lie on .*: pass arrays in host memory, or"),
     ((9, 0), 8, "^attention.forward: takes addresses .* 8"),
     (None, 8, "^attention.forward: takes addresses and positive strides.*{'k': 8}; pass a copy of k$"),
     ((9, 0), 16, None), (None, 16, None)],
)  # fmt: skip
def test_what_is_for_hopper_only(capability, vector_bytes, words, monkeypatch):
    problem = problem_on(capability, monkeypatch, vector_bytes)
    if words is None:
        families.require_hopper(problem)
    else:
        with pytest.raises(ValueError, match=words):
            families.require_hopper(problem)


def test_a_family_that_does_not_exist():
    with pytest.raises(ValueError, match=r"family: must be None or one of \('sm_80', 'sm_90'\): family='sm_70'"):
        attention.forward(*inputs(1, 8, 8, 1, 1, 64), family="sm_70")
    with pytest.raises(ValueError, match=r"family: must be None or one of \('sm_80', 'sm_90'\): family='sm_70'"):
        attention.forward(*inputs(1, 0, 8, 1, 1, 64), family="sm_70")  # where there is nothing to do
