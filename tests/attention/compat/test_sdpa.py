"""attention/compat/sdpa.py, compared with the formula in torch's documentation, and on a GPU with torch itself."""

import ml_dtypes
import numpy as np
import pytest
from eager import attend

from attention.compat.flex import flex_attention
from attention.compat.sdpa import scaled_dot_product_attention


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("rows", "cols"), [(5, 5), (3, 7), (7, 3), (1, 4), (4, 1)])
def test_causal_is_aligned_at_the_top_left(rows, cols, calls, draw):
    q, k, v = draw((2, 4, rows, 8)), draw((2, 2, cols, 8)), draw((2, 2, cols, 6))
    actual = scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5, enable_gqa=True)
    see = np.tril(np.ones((rows, cols), bool))
    close(actual, attend(q, k, v, see=see, scale=0.5)[0])
    assert calls[0]["mask"] is None, "a window does"


MASKS = {
    "rows and keys": (4, 6),
    "keys": (1, 6),
    "heads": (2, 4, 6),
    "batch": (2, 1, 4, 6),
    "all": (2, 2, 4, 6),
    "rows": (4, 1),
}


@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
def test_masks(shape, calls, draw):
    """Masks of booleans, true where a key is visible, and of floats, which are added; they broadcast as in torch."""
    q, k, v = draw((2, 2, 4, 8)), draw((2, 2, 6, 8)), draw((2, 2, 6, 8))
    see, add = draw(shape) > -0.5, draw(shape).astype(np.float32)
    close(scaled_dot_product_attention(q, k, v, see), attend(q, k, v, see=see)[0])
    close(scaled_dot_product_attention(q, k, v, attn_mask=add), attend(q, k, v, add=add)[0])
    for call_options in calls:
        bias = call_options["bias"]
        assert bias.dtype == np.float32 and bias.ndim == 4 and bias.shape[-1] == 6


@pytest.mark.parametrize("shape", [None, (4, 6), (2, 4, 6), (2, 1, 6)])
def test_three_axes(shape, calls, draw):
    """(N, S, D): N sequences of one head."""
    q, k, v = draw((2, 4, 8)), draw((2, 6, 8)), draw((2, 6, 8))
    add = None if shape is None else draw(shape)
    expected, _ = attend(q[:, None], k[:, None], v[:, None], add=0 if add is None else np.broadcast_to(add, (2, 4, 6))[:, None])
    close(scaled_dot_product_attention(q, k, v, add), expected[:, 0])


def test_dropout(calls, draw):
    q = draw((1, 2, 4, 8))
    scaled_dot_product_attention(q, q, q, dropout_p=0.3)
    assert calls[0]["dropout"] == 0.3 and calls[0]["seed"] >= 0


def test_what_is_refused(calls, draw):
    q = draw((4, 8))
    with pytest.raises(NotImplementedError, match="query: .* reshape"):
        scaled_dot_product_attention(q, q, q)
    with pytest.raises(ValueError, match="attn_mask: must be None with is_causal=True"):
        scaled_dot_product_attention(q, q, q, np.ones((4, 4), bool), is_causal=True)
    with pytest.raises(TypeError, match="attn_mask: must hold booleans, .* or floats to add: attn_mask.dtype=int64"):
        scaled_dot_product_attention(*[q[None, None]] * 3, np.ones((4, 4), int))
    with pytest.raises(ValueError, match=r"attn_mask: must broadcast to .*, Sk=4: attn_mask.shape=\(4, 3\)"):
        scaled_dot_product_attention(*[q[None, None]] * 3, np.ones((4, 3), bool))
    assert not calls


def test_torch_on_the_cpu(calls):
    """Compare torch's formula and the reference with the function, on torch tensors."""
    torch = pytest.importorskip("torch")
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8)
    for options in {}, {"is_causal": True}, {"attn_mask": torch.rand(5, 7) > 0.3}, {"attn_mask": torch.randn(2, 1, 5, 7)}:
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, **options)
        np.testing.assert_allclose(scaled_dot_product_attention(q, k, k, **options), expected.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("axes", [3, 4])
def test_causal_biases(axes, calls):
    """torch's CausalBias tensors, whose elements are undefined."""
    torch = pytest.importorskip("torch")
    from torch.nn.attention import bias

    q, k = torch.randn(2, 4, 5, 8)[(0,) * (4 - axes)], torch.randn(2, 4, 7, 8)[(0,) * (4 - axes)]
    for result, diagonal in (bias.causal_upper_left, 0), (bias.causal_lower_right, 2):
        see = torch.ones(5, 7, dtype=torch.bool).tril(diagonal)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, see)
        actual = scaled_dot_product_attention(q, k, k, result(5, 7))
        np.testing.assert_allclose(actual, expected.numpy(), rtol=1e-4, atol=1e-5)
        with pytest.raises(ValueError, match=r"^attn_mask: must be a CausalBias of .*, \(5, 7\): it is of \(5, 8\)"):
            scaled_dot_product_attention(q, k, k, result(5, 8))


def flat(x):
    """(B, S, H D) as a view of x."""
    return x.transpose(1, 2).view(x.shape[0], x.shape[2], -1)


@pytest.mark.parametrize("attend", [scaled_dot_product_attention, flex_attention])
def test_results_lie_as_queries_do(attend):
    """A compiled graph expects these strides too, for the output and for gradients, also if keys have other strides."""
    torch = pytest.importorskip("torch")
    x = torch.randn(2, 5, 3, 16, dtype=torch.bfloat16)
    q, k = x.requires_grad_().transpose(1, 2), torch.randn(2, 1, 7, 16, dtype=torch.bfloat16, requires_grad=True)
    out = attend(q, k, k)
    same = attend(q.contiguous(), k, k)
    assert out.stride() == q.stride() and same.is_contiguous() and torch.equal(out, same)
    of_q, of_k = torch.autograd.grad(flat(out).sum(), (q, k))
    assert of_q.stride() == q.stride() and torch.equal(of_k, torch.autograd.grad(same.sum(), k)[0])
    graph = torch.compile(lambda *qkv: flat(attend(*qkv)), fullgraph=True, backend="aot_eager")
    assert torch.equal(graph(q, k, k), flat(out))
    with torch.no_grad():
        assert torch.equal(graph(q, k, k), flat(out))
    q, k = q.detach(), k.detach()
    with torch._subclasses.FakeTensorMode() as mode:
        q, k = map(mode.from_tensor, (q, k))
        assert attend(q, k, k).stride() == q.stride() and attend(q.contiguous(), k, k).is_contiguous()


def test_results_of_views_of_arrays(calls, draw):
    """NumPy arrays, also with one element, or none, along an axis; JAX arrays are always in the order of their axes."""
    for shape in (2, 5, 3, 8), (2, 1, 3, 8), (2, 5, 1, 8):
        q = draw(shape).swapaxes(1, 2)
        out = scaled_dot_product_attention(q, q, q)
        assert out.swapaxes(1, 2).flags.c_contiguous and out.shape == q.shape
        close(out, attend(q, q, q)[0])
    out, lse = flex_attention(q, q, q, return_lse=True)
    assert out.shape == q.shape and lse.shape == q.shape[:3]
    jnp = pytest.importorskip("jax.numpy")
    q = jnp.ones((1, 2, 3, 8)).swapaxes(1, 2)
    assert scaled_dot_product_attention(q, q, q).shape == (1, 3, 2, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["sm_90", "sm_80"])
@pytest.mark.parametrize(("rows", "cols"), [(200, 200), (130, 300), (300, 130)])
def test_on_the_card(rows, cols, family, monkeypatch):
    """Compared with torch in bfloat16 by the error rule, with torch in float64 as the reference."""
    torch = pytest.importorskip("torch")
    import attention
    from attention.reference import tolerance

    plain = attention.forward
    monkeypatch.setattr(attention, "forward", lambda *args, **options: plain(*args, **options, family=family))
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, s, 64, device="cuda", dtype=torch.bfloat16) for h, s in ((4, rows), (2, cols), (2, cols)))
    theirs = torch.nn.functional.scaled_dot_product_attention
    see = torch.rand(2, 1, rows, cols, device="cuda") > 0.2
    add = torch.randn(1, 4, rows, cols, device="cuda", dtype=torch.bfloat16)
    for options in {}, {"is_causal": True}, {"attn_mask": see}, {"attn_mask": add}:
        view = q.transpose(1, 2).contiguous().transpose(1, 2)
        for _ in range(4):  # calls that are repeated are served by a function made for their form
            one, other = (scaled_dot_product_attention(x, k, v, **options, enable_gqa=True) for x in (q, view))
            assert one.is_contiguous() and other.stride() == view.stride() and torch.equal(one, other)
        exact = {name: x.double() if name == "attn_mask" and x.dtype != torch.bool else x for name, x in options.items()}
        ref = theirs(q.double(), k.double(), v.double(), **exact, enable_gqa=True)
        low = theirs(q, k, v, **options, enable_gqa=True).float()
        out = scaled_dot_product_attention(q, k, v, **options, enable_gqa=True)
        limit = tolerance(ref.cpu().numpy(), low.cpu().numpy(), ml_dtypes.bfloat16)
        assert (out.double() - ref).abs().max().item() <= limit
