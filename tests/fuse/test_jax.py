"""Fused functions under jax.jit and jax.grad."""

import pytest

import fuse
import fuse.operators as operators
from tiles import fp8e4m3

jax = pytest.importorskip("jax")
pytest.importorskip("jax.experimental.buffer_callback")
jnp = jax.numpy


def arrays(*shapes):
    return [(jax.random.normal(jax.random.key(n), s) / s[0] ** 0.25).astype(jnp.bfloat16) for n, s in enumerate(shapes)]


def test_gradients():
    """Kernels compute the gradients that are asked for."""
    x, g = arrays((2, 3, 40), (40,))

    def fused(x, g):
        y, h = operators.residual_rms_norm(x, x, g)
        return (y * h).astype(jnp.float32).sum()

    def by_parts(x, g):
        h = x + x
        return (h * jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-5) * g * h).sum()

    outputs = jax.grad(jax.jit(fused), (0, 1))(x, g)
    want = jax.grad(by_parts, (0, 1))(*[a.astype(jnp.float32) for a in (x, g)])
    for a, b in zip(outputs, want):
        assert a.dtype == jnp.bfloat16 and jnp.abs(a - b).max() <= 2**-6 * jnp.abs(b).max()


def test_what_has_none():
    (x,) = arrays((3, 40))
    with pytest.raises(NotImplementedError, match="x: no kernel computes its gradient; put jax.lax.stop_gradient"):
        jax.grad(lambda x: fuse.kernel(lambda x: fuse.cast(x * 1.0, fp8e4m3) * 2.0)(x).sum())(x)


@pytest.mark.filterwarnings("ignore:.*runs by parts:RuntimeWarning")
def test_what_no_template_computes():
    """An eager call returns a JAX array of the first one's dtype; under jax.jit it is refused when it is traced."""
    (x,) = arrays((3, 40))
    transposed, odd = fuse.kernel(lambda x: fuse.exp(fuse.transpose(x))), fuse.kernel(lambda x, w: (x @ w) * 2.0)
    for function, inputs, want in (
        (transposed, (x,), jnp.exp(x.T.astype(jnp.float32))),
        (odd, (x[:, :30], x[:, :30].T), 2.0 * x[:, :30].astype(jnp.float32) @ x[:, :30].T.astype(jnp.float32)),
    ):
        actual = function(*inputs)
        assert isinstance(actual, jax.Array) and actual.dtype == jnp.bfloat16
        assert jnp.abs(actual - want).max() <= 2**-8 * jnp.abs(want).max()
        with pytest.raises(TypeError, match="under jax.jit it must be one: call it outside, or write it with jax.numpy"):
            jax.jit(function)(*inputs)
