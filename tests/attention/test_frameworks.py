"""attention.forward on the arrays of every framework, with streams, graphs, threads and devices; compared with NumPy's
result."""

import threading

import ml_dtypes
import numpy as np
import pytest

import attention
from attention import reference

BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPE = (2, 130, 2, 64)


def host_inputs(dtype=BF16, shape=SHAPE):
    rng = np.random.default_rng()
    return [rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(3)]


def judge(actual, inputs, **options):
    reference.assert_close(actual, reference.forward(*inputs, **options)[0], reference.forward_low(*inputs, **options)[0])


def to_torch(x, device="cuda"):
    torch = pytest.importorskip("torch")
    bits = torch.from_numpy(x.view(np.int16)).to(device)
    return bits.view(torch.bfloat16 if x.dtype == BF16 else torch.float16)


def from_torch(x):
    import torch

    x = x.detach().contiguous().view(torch.int16).cpu().numpy()
    return x.view(BF16)


# ---- host memory ---------------------------------------------------------------------------------------------------
def test_torch_on_the_host_runs_in_the_interpreter():
    torch = pytest.importorskip("torch")
    inputs = host_inputs()
    out = attention.forward(*(to_torch(x, "cpu") for x in inputs), causal=True)
    assert isinstance(out, torch.Tensor) and out.dtype == torch.bfloat16
    judge(from_torch(out), inputs, causal=True)


def test_a_tensor_that_requires_grad_is_refused_not_detached():
    torch = pytest.importorskip("torch")
    x = to_torch(host_inputs()[0], "cpu").requires_grad_()
    with pytest.raises(NotImplementedError, match=r"x: requires grad.*torch\.no_grad\(\)"):
        attention.quantize(x)
    with torch.no_grad():
        attention.quantize(x)


def test_jax_on_the_host():
    jax = pytest.importorskip("jax")
    inputs = host_inputs()
    cpu = jax.devices("cpu")[0]
    out = attention.forward(*(jax.device_put(x, cpu) for x in inputs))
    assert isinstance(out, jax.Array)
    judge(np.asarray(out), inputs)


REFUSED = {
    "out over k": (lambda at: {"out": at(1, 128)}, ValueError, "out: must not overlap k"),
    "out over q": (lambda at: {"out": at(0, 128)}, ValueError, "out: must not overlap q"),
    "address": (lambda at: {"k": at(1, 4), "family": "sm_90"}, ValueError, "family: sm_90 takes addresses .*past .*'k': 8"),
    "shape": (lambda at: {"v": at(2, 0)[:, 1:]}, ValueError, "v: sequence must equal k's"),
    "causal": (lambda at: {"causal": 0}, TypeError, "causal: must be a bool"),
    "scale": (lambda at: {"scale": True}, TypeError, "scale: must be a number or None"),
    "layout": (lambda at: {"layout": ["bshd"]}, TypeError, "layout: must be one of"),
    "family": (lambda at: {"family": "sm_70"}, ValueError, "family: must be None or one of"),
    "stream": (lambda at: {"stream": -1}, TypeError, "stream: must be a handle"),
}


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_a_call_is_refused_also_if_one_like_it_was_made(framework):
    """A cached call is never used for another call that differs in one detail."""
    memory = np.zeros((4, 8192), BF16)
    room = memory if framework == "numpy" else to_torch(memory, "cpu")
    at = lambda row, start: room[row, start : start + 1024].reshape(1, 8, 2, 64)
    good = dict(q=at(0, 0), k=at(1, 0), v=at(2, 0), out=at(3, 0), scale=1.0)
    for _ in range(2):
        assert attention.forward(**good) is good["out"]
        for change, error, words in REFUSED.values():
            with pytest.raises(error, match="^" + words):
                attention.forward(**{**good, **change(at)})


# ---- on the card ---------------------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.smoke
def test_torch():
    inputs = host_inputs()
    out = attention.forward(*map(to_torch, inputs), causal=True)
    assert out.is_cuda
    judge(from_torch(out), inputs, causal=True)


@pytest.mark.gpu
def test_cupy():
    cupy = pytest.importorskip("cupy")
    inputs = host_inputs(np.float16)
    out = attention.forward(*map(cupy.asarray, inputs))
    assert isinstance(out, cupy.ndarray)
    judge(cupy.asnumpy(out), inputs)


@pytest.mark.gpu
def test_jax():
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX has no GPU")
    inputs = host_inputs()
    out, lse = attention.forward(*map(jax.numpy.asarray, inputs), return_lse=True)
    assert isinstance(out, jax.Array) and isinstance(lse, jax.Array)
    judge(np.asarray(out), inputs)


@pytest.mark.gpu
def test_numba():
    from numba import cuda

    inputs = host_inputs(np.float16)
    judge(attention.forward(*map(cuda.to_device, inputs)).copy_to_host(), inputs)


@pytest.mark.gpu
def test_a_stream_of_ones_own():
    """Inputs are made on a stream, attention runs on it (as the current stream, then by argument), and the result is read on
    it."""
    torch = pytest.importorskip("torch")
    inputs, stream = host_inputs(), torch.cuda.Stream()
    sources = list(map(to_torch, inputs))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        tensors = [x + 0 for x in sources]
        out = attention.forward(*tensors)
        copy = out.clone()
    call_inputs = attention.forward(*tensors, stream=stream)
    stream.synchronize()
    judge(from_torch(copy), inputs)
    judge(from_torch(call_inputs), inputs)


@pytest.mark.gpu
def test_a_graph_captured_from_the_first_call_on():
    """TMA descriptors and lse of a new signature are made during capture; replays read new contents."""
    torch = pytest.importorskip("torch")
    shape = (1, 333, 3, 64)
    tensors = [to_torch(x) for x in host_inputs(shape=shape)]
    attention.forward(*(x[:, :64].contiguous() for x in tensors))  # compiled; the form below is new
    out = torch.empty_like(tensors[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.forward(*tensors, out=out)
    for _ in range(3):
        inputs = host_inputs(shape=shape)
        for x, new in zip(tensors, inputs, strict=True):
            x.copy_(to_torch(new))
        out.fill_(float("nan"))
        graph.replay()
        judge(from_torch(out), inputs)


@pytest.mark.gpu
def test_threads():
    pytest.importorskip("torch")
    failures = []

    def work(seed):
        import torch

        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for n in range(5):
                    inputs = host_inputs(shape=(1, 64 + 32 * ((seed + n) % 4), 2, 64))
                    judge(from_torch(attention.forward(*map(to_torch, inputs), causal=True)), inputs, causal=True)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures, failures[0]


@pytest.mark.gpu
def test_every_device():
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for n in reversed(range(torch.cuda.device_count())):
        inputs = host_inputs()
        out = attention.forward(*(to_torch(x, f"cuda:{n}") for x in inputs))
        assert out.device.index == n
        judge(from_torch(out), inputs)


@pytest.mark.gpu
def test_offsets_past_two_to_the_31_elements():
    """The last batch begins 2.3e9 elements into q, k, v and out."""
    torch = pytest.importorskip("torch")
    batch, length, heads, dim = 70_000, 128, 2, 128
    if torch.cuda.mem_get_info()[0] < 5 * batch * length * heads * dim * 2:
        pytest.skip("needs 23 GB")
    q, k, v = (torch.zeros(batch, length, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    inputs = host_inputs(shape=(1, length, heads, dim))
    for x, new in zip((q, k, v), inputs, strict=True):
        x[-1:] = to_torch(new)
    out = torch.full_like(q, float("nan"))
    attention.forward(q, k, v, out=out, causal=True)
    judge(from_torch(out[-1:]), inputs, causal=True)
    assert (out[:-1] == 0).all()


@pytest.mark.gpu
def test_many_addresses_use_many_maps():
    """Addresses are freed and reused, and views begin at odd offsets: each TMA descriptor belongs to its array."""
    torch = pytest.importorskip("torch")
    room = torch.randn(3, 400_000, device="cuda").bfloat16()
    for start in range(0, 8 * 400, 8 * 37):
        q, k, v = (x[start : start + 64 * 2 * 64].view(1, 64, 2, 64) for x in room)
        inputs = [from_torch(x) for x in (q, k, v)]
        judge(from_torch(attention.forward(q, k, v)), inputs)
