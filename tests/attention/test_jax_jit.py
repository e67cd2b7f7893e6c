"""Every public function under jax.jit: through the interpreter on the CPU, and on a GPU if JAX has one."""

import sys
from functools import partial

import numpy as np
import pytest

import attention
from attention import reference
from attention.plans.softmax import gradient

jax = pytest.importorskip("jax")
pytest.importorskip("jax.experimental.buffer_callback")
jnp = jax.numpy

TOKENS, HEAD = 16, 64
CPU = jax.devices("cpu")[0]


def tile(n, *shape):
    return jax.random.normal(jax.random.key(n), shape, jnp.float32).astype(jnp.bfloat16)


def rate(n, *shape):
    return -0.1 - jax.random.uniform(jax.random.key(n), shape)


def qkv(tokens=TOKENS, head=HEAD):
    return tile(0, 1, tokens, 2, head), tile(1, 1, tokens, 2, head), tile(2, 1, tokens, 2, HEAD)


def same(b, h, i, j, docs):
    """A mask that reads an array, which is a tracer while the call is traced."""
    return docs[i] == docs[j]


# name: (function of the arrays, arrays, made where JAX's default device is)
CALLS = {
    "forward": (attention.forward, lambda: qkv()),
    "forward, lse": (lambda *x: attention.forward(*x, causal=True, scale=0.5, return_lse=True), lambda: qkv()),
    "forward, bhsd": (lambda *x: attention.forward(*x, layout="bhsd"), lambda: [x.swapaxes(1, 2) for x in qkv()]),
    "forward, variants": (
        lambda *x: attention.forward(
            *x[:3],
            causal=True,
            softcap=4.0,
            alibi=x[3],
            bias=x[4],
            mask=same,
            aux=(x[5],),
            dropout=0.25,
            seed=7,
            return_lse=True,
        ),
        lambda: (*qkv(), -rate(3, 2), rate(4, 1, 1, TOKENS, TOKENS), jnp.arange(TOKENS) // 5),
    ),
    "forward, sequences": (
        lambda *x: attention.forward(*x[:3], window=(4, 0), cu_seqlens=x[3], sink=x[4], q_norm=x[5], k_norm=x[5]),
        lambda: (*qkv(), jnp.array([0, 3, TOKENS], jnp.int32), rate(4, 2), -rate(5, HEAD)),
    ),
    "linear, sums": (lambda *x: attention.linear(*x, normalize=True, return_state=True), lambda: qkv()),
    "linear, sequences": (
        lambda *x: attention.linear(*x[:3], cu_seqlens=x[3], return_state=True),
        lambda: (*qkv(), jnp.array([0, 3, TOKENS], jnp.int32)),
    ),
    "retention": (attention.retention, lambda: qkv()),
    "lightning": (lambda *x: attention.lightning(*x, 1, 3), lambda: qkv()),
    "gla": (attention.gla, lambda: (*qkv(), rate(3, 1, TOKENS, 2, HEAD))),
    "delta_rule": (
        lambda *x: attention.delta_rule(*x[:4], decay=x[4], return_state=True),
        lambda: (*qkv(), -rate(3, 1, TOKENS, 2), rate(4, 1, TOKENS, 2)),
    ),
    "mamba2": (
        lambda *x: attention.mamba2(*x, return_final_states=True),
        lambda: (tile(5, 1, TOKENS, 2, HEAD), -rate(3, 1, TOKENS, 2), rate(4, 2), *qkv()[:2]),
    ),
    "short_conv": (
        lambda *x: attention.short_conv(*x[:3], activation="silu", initial_state=x[3], return_state=True),
        lambda: (tile(6, 1, TOKENS, 32), rate(3, 32, 4), rate(4, 32), tile(7, 1, 32, 3)),
    ),
    "gated_rms_norm": (attention.gated_rms_norm, lambda: (tile(8, 1, TOKENS, 2, 64), rate(5, 64), tile(9, 1, TOKENS, 2, 64))),
    "based": (lambda *x: attention.based(*x, return_state=True), lambda: qkv(head=16)),
    "hedgehog": (
        attention.hedgehog,
        lambda: (*qkv(), tile(3, 2, HEAD, 64), tile(4, 2, HEAD, 64), -rate(5, 2), -rate(6, 2)),
    ),
}
every_call = pytest.mark.parametrize("name", CALLS)


def assert_same(actual, expected):
    actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
    assert len(actual) == len(expected) > 0
    for x, y in zip(actual, expected):
        assert isinstance(x, jax.Array) and (x.shape, x.dtype, x.devices()) == (y.shape, y.dtype, y.devices())
        assert jnp.array_equal(x, y)


@every_call
def test_jit(name):
    function, make = CALLS[name]
    with jax.default_device(CPU):
        arrays = make()
        assert_same(jax.jit(function)(*arrays), function(*arrays))


def test_jit_of_more_than_the_call():
    """It is ordered among XLA's own operations, and is called as often as it runs."""
    with jax.default_device(CPU):
        q, k, v = qkv()
        compiled = jax.jit(lambda q: attention.forward(q * 2, k, attention.forward(q, k, v)) + 1)
        for scale in 1, -1:
            x = q * scale
            assert_same(compiled(x), attention.forward(x * 2, k, attention.forward(x, k, v)) + 1)


def test_lists_of_blocks():
    """Block lists are made before, for the call that is traced."""
    with jax.default_device(CPU):
        arrays, docs = qkv(), jnp.arange(TOKENS) // 5
        lists = attention.block_lists(*arrays, mask=same, aux=(docs,))
        function = lambda *x, **blocks: attention.forward(*x[:3], mask=same, aux=x[3:], **blocks)
        assert_same(jax.jit(lambda *x: function(*x, blocks=lists))(*arrays, docs), function(*arrays, docs))
        with pytest.raises(TypeError, match="^q: call block_lists outside of torch.compile and jax.jit"):
            jax.jit(lambda *x: attention.block_lists(*x, mask=same, aux=(docs,)))(*arrays)


def test_vmap():
    with jax.default_device(CPU):
        q, k, v = qkv()
        many = jnp.stack([q, -q, 2 * q])
        actual = jax.jit(jax.vmap(attention.forward, (0, None, None)))(many, k, v)
        assert_same(actual, jnp.stack([attention.forward(x, k, v) for x in many]))


def test_what_is_wrong_is_said_when_the_call_is_traced():
    with jax.default_device(CPU):
        q, k, v = qkv()
        state = jnp.zeros((1, 2, HEAD, HEAD))
        refused = [
            (lambda q: attention.forward(q, k, v[:, 1:]), ValueError, "^v: sequence must equal k's"),
            (lambda q: attention.forward(q.astype(jnp.float32), k, v), TypeError, "^q: dtype must be one of"),
            (lambda q: attention.forward(q, k, v, out=q), TypeError, "^out: JAX's arrays cannot be written"),
            (lambda q: attention.forward(q, k, v, stream=0), TypeError, "^stream: must be None under jax.jit"),
            (
                lambda q: attention.forward(q, k, v, dropout=0.1, seed=q.sum().astype(int)),
                TypeError,
                r"^seed: must be an integer, or an array of one: .*; seed.reshape\(1\) is one",
            ),
            (
                lambda q: attention.forward(q, k, v, dropout=0.1, seed=jax.random.PRNGKey(0)),
                TypeError,
                "^seed: dtype must be one of .*; of a key of JAX one is jax.random.randint",
            ),
            (lambda q: attention.linear_step(state, q[:, 0], k[:, 0], v[:, 0]), TypeError, "^state: JAX's arrays cannot"),
        ]
        for function, error, words in refused:
            with pytest.raises(error, match=words):
                jax.jit(function)(q)
        with pytest.raises(Exception, match="q: head_dim must be a multiple of 8"):
            jax.block_until_ready(jax.jit(attention.forward)(q[..., :60], k[..., :60], v[..., :60]))


def summed(dout, dlse=None, **options):
    """sum(forward(q, k, v) dout), plus that of lse and dlse, as a function of arrays: q, k, v and a sink if there is a fourth.
    dout may be None."""

    def loss(q, k, v, sink=None):
        out, lse = attention.forward(q, k, v, sink=sink, return_lse=True, **options)
        return sum((x.astype(jnp.float32) * dx).sum() for x, dx in ((out, dout), (lse, dlse)) if dx is not None)

    return loss


@pytest.mark.parametrize(
    ("options", "of"),
    [({}, "out"), ({"causal": True, "window": (9, None), "softcap": 3.0}, "both"), ({"layout": "bhsd"}, "lse")],
    ids=str,
)
def test_gradients(options, of):
    """Gradients of a loss of out, of lse, and of both, compared with float64 by the rule for backward; traced by jit inside,
    outside and not at all, and with checkpoints."""
    with jax.default_device(CPU):
        arrays = tile(0, 1, TOKENS, 4, HEAD), *(tile(n, 1, TOKENS, 2, HEAD) for n in (1, 2))
        dout, sink = tile(3, 1, TOKENS, 4, HEAD), rate(4, 4) if options else None
        if "layout" in options:
            *arrays, dout = (x.swapaxes(1, 2) for x in (*arrays, dout))
        dlse = None if of == "out" else 3 * jax.random.normal(jax.random.key(9), (1, 4, TOKENS))
        loss = summed(None if of == "lse" else dout.astype(jnp.float32), dlse, **options)
        inputs = [*arrays, *[sink] * (sink is not None)]
        places = tuple(range(len(inputs)))
        actual = jax.grad(loss, places)(*inputs)
        for way in jax.jit(jax.grad(loss, places)), jax.grad(jax.jit(loss), places), jax.grad(jax.checkpoint(loss), places):
            assert_same(way(*inputs), actual)
        inputs = [np.asarray(x) for x in (dout * (of != "lse"), *arrays)]
        options |= {} if dlse is None else {"dlse": np.asarray(dlse)}
        options |= {} if sink is None else {"sink": np.asarray(sink)}
        ref, low = (f(*inputs, **options) for f in (reference.backward, reference.backward_low))
        for *three, name in zip(actual, ref, low, ("dq", "dk", "dv", "dsink")):
            reference.assert_close(*map(np.asarray, three), factor=3, name=name)


def test_gradients_of_norms():
    """Gradients have the dtypes of their weights."""
    with jax.default_device(CPU):
        arrays, norms = qkv(), (tile(5, HEAD), -rate(6, 2, HEAD), -rate(7, HEAD))

        def loss(q, a, b, c):
            return attention.forward(q, *arrays[1:], q_norm=(a, b), k_norm=c).astype(jnp.float32).sum()

        actual = jax.grad(loss, (0, 1, 2, 3))(arrays[0], *norms)
        assert_same(jax.jit(jax.grad(loss, (0, 1, 2, 3)))(arrays[0], *norms), actual)
        dout, options = np.ones((1, TOKENS, 2, HEAD), arrays[0].dtype), {"q_norm": norms[:2], "k_norm": norms[2]}
        dq, _, _, (da, db), dc = reference.backward(dout, *arrays, **options)
        for x, y, like in zip(actual, (dq, da, db, dc), (arrays[0], *norms), strict=True):
            assert (x.shape, x.dtype) == (like.shape, like.dtype)
            np.testing.assert_allclose(np.asarray(x, float), y, rtol=2**-5, atol=2**-3)


def test_gradients_of_what_scores_read():
    """Gradients of slopes, a bias and a table under a mask; block lists are supported, too."""
    with jax.default_device(CPU):
        q, k, v = qkv()
        learned, places = (-rate(5, 2), rate(6, 1, 2, 1, TOKENS), rate(7, 2, 8)), jnp.arange(TOKENS) % 8
        score = lambda s, b, h, i, j, table, places: s + s * table[h, places[j]]
        options = dict(mask=lambda b, h, i, j, *aux: i // 8 != j // 8, score=score, causal=True)

        def loss(alibi, bias, table, **more):
            inputs = dict(alibi=alibi, bias=bias, aux=(table, places), **options)
            return attention.forward(q, k, v, **inputs, **more).astype(jnp.float32).sum()

        actual = jax.grad(loss, (0, 1, 2))(*learned)
        alike = dict(alibi=learned[0], bias=learned[1], aux=(learned[2], places))
        lists = attention.block_lists(q, k, v, **alike, **options)
        for way in jax.jit(jax.grad(loss, (0, 1, 2))), jax.grad(partial(loss, blocks=lists), (0, 1, 2)):
            assert_same(way(*learned), actual)
        alibi, bias, table, *others = (np.asarray(x) for x in (*learned, q, k, v, places))
        inputs = dict(alibi=alibi, bias=bias, aux=(table, others[3]), dalibi=True, dbias=True, daux=True, **options)
        *_, dbias, dalibi, dtable = reference.backward(np.ones_like(others[0]), *others[:3], **inputs)
        for x, y in zip(actual, (dalibi, dbias, dtable), strict=True):
            np.testing.assert_allclose(np.asarray(x, float), y, rtol=2**-5, atol=2**-3)


def test_gradients_of_many_and_of_two_results():
    with jax.default_device(CPU):
        q, k, v = qkv()
        both = lambda q: attention.forward(q, k, v, return_lse=True)
        loss, many = lambda q: both(q)[0].astype(jnp.float32).sum(), jnp.stack([q, -q])
        expected = jnp.stack([jax.grad(loss)(x) for x in many])
        assert_same(jax.vmap(jax.grad(loss))(many), expected)
        assert_same(jax.grad(lambda x: jax.vmap(loss)(x).sum())(many), expected)
        out, back = jax.vjp(lambda q: both(q)[0], q)
        assert_same((out, *back(jnp.ones_like(out))), (both(q)[0], expected[0]))


def test_what_has_no_gradient_says_so(monkeypatch):
    with jax.default_device(CPU):
        q, k, v = qkv()
        total = lambda x: x.astype(jnp.float32).sum()
        loss = lambda q: total(attention.forward(q, k, v))
        scales = lambda q: total(attention.quantize(q)[1])
        refused = [
            (lambda q: jax.grad(lambda q: total(jax.grad(loss)(q)))(q), "no second derivatives"),
            (lambda q: jax.jacfwd(jax.grad(loss))(q), "no second derivatives"),
            (jax.grad(scales), "^x: this call computes no gradient"),
            (lambda q: jax.jvp(scales, (q,), (q,)), "^x: this call computes no gradient"),
            (jax.grad(lambda q: total(jax.grad(lambda q: total(attention.linear(q, k, v)))(q))), "linear: has no second"),
        ]
        for way, words in refused:
            for function in way, jax.jit(way):
                with pytest.raises(NotImplementedError, match=words):
                    function(q)
        stopped = lambda q: loss(jax.lax.stop_gradient(q)) + total(q)
        assert jnp.array_equal(jax.grad(stopped)(q), jnp.ones_like(q))
        with pytest.raises(TypeError, match="forward-mode"):
            jax.jvp(loss, (q,), (q,))
        monkeypatch.setattr(gradient, "_parameters", lambda: ("q", "k", "v", "causal"))
        with pytest.raises(NotImplementedError, match="^softcap: there is no backward pass with it yet"):
            jax.grad(lambda q: total(attention.forward(q, k, v, softcap=0.5)))(q)


def test_a_jax_without_callbacks_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax.experimental.buffer_callback", None)
    with jax.default_device(CPU), pytest.raises(NotImplementedError, match="jax.jit: needs jax.experimental.buffer_callback"):
        jax.jit(lambda *x: attention.forward(*x))(*qkv())


@pytest.mark.gpu
@every_call
def test_jit_on_the_card(name):
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX has no GPU")
    function, make = CALLS[name]
    arrays = make()
    compiled, expected = jax.jit(function), function(*arrays)
    for _ in range(3):
        assert_same(compiled(*arrays), expected)


@pytest.mark.gpu
def test_gradients_on_the_card():
    """Results equal torch autograd's, which are tested elsewhere."""
    torch = pytest.importorskip("torch")
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX has no GPU")
    q, k, v, dout = (tile(n, 2, 200, 4, HEAD) for n in range(4))
    dlse = 3 * jax.random.normal(jax.random.key(9), (2, 4, 200))
    loss = summed(dout.astype(jnp.float32), dlse, causal=True)
    theirs = [torch.from_dlpack(x).clone().requires_grad_() for x in (q, k, v)]
    result = attention.forward(*theirs, causal=True, return_lse=True)
    torch.autograd.backward(result, [torch.from_dlpack(x) for x in (dout, dlse)])
    for way in jax.grad(loss, (0, 1, 2)), jax.jit(jax.grad(loss, (0, 1, 2))):
        for x, y in zip(way(q, k, v), theirs):
            torch.testing.assert_close(torch.from_dlpack(x), y.grad, rtol=2**-6, atol=2**-7)
