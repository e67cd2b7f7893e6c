"""Leading axes, batches and heads, and attention on them."""

import inspect
import warnings

import numpy as np
import pytest
from references import compare

import fuse
from fuse import operators
from fuse.algebra import rules
from fuse.algebra.rules import Rule
from fuse.language import terms
from fuse.language.trace import Shape, trace_definition
from fuse.planning.proof import identity
from tiles import bf16


def sample(*shapes, seed=0):
    """Arrays of normal numbers in bf16, one for each shape."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(bf16.np) for shape in shapes]


GRAM = fuse.kernel(lambda x: x @ fuse.transpose(x))
MEANS = fuse.kernel(lambda x, y: x + y * 2.0)


@pytest.mark.parametrize("run", [GRAM, GRAM.run])
def test_leading_axes_that_are_no_rows(run):
    """If they were rows, all queries would be multiplied with all keys."""
    (x,) = sample((2, 6, 40))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        outputs = run(x)
    wide = x.astype(np.float64)
    assert outputs.shape == (2, 6, 6) and np.allclose(outputs.astype(np.float64), wide @ wide.swapaxes(1, 2), atol=0.5)


PLAIN = fuse.kernel(lambda q, k, v: fuse.attention(q, k, v, 0.125))


def test_few_queries_take_keys_in_parts():
    """Few query blocks and many keys split the keys: with one head of keys for all, and columns that fill no tile."""
    arrays = sample((2, 20, 40), (1, 1024, 40), (1, 1024, 24))
    text = PLAIN.source(*arrays)
    assert "return_lse=True" in text and len(text.splitlines()) <= 80 and "2 splits of the keys" in PLAIN.explain(*arrays)
    compare(PLAIN, arrays, PLAIN.run(*arrays))
    assert PLAIN.proof(*arrays).holds
    for keys, heads in ((1000, 2), (1023, 2), (1024, 80)):
        shapes = ((heads, 20, 40), (heads, keys, 40), (heads, keys, 40))
        (one, *_) = PLAIN.candidates(*[np.zeros(s, bf16.np) for s in shapes])
        assert "parts" not in one.describe()


def test_what_has_no_kernel_says_why():
    (x,) = sample((2, 6, 40))
    with pytest.warns(RuntimeWarning, match=r"no template computes .*\(2, 6, 40\)"):
        GRAM.run(x)


def test_leading_axes_that_do_not_fit():
    """(12, 40) is not (2, 6, 40), though both have as many rows."""
    with pytest.raises(ValueError, match="do not broadcast"):
        MEANS(*sample((2, 6, 40), (12, 40)))
    with pytest.raises(TypeError, match=r"fuse.transpose swaps the last two"):
        fuse.kernel(lambda x: x @ x.T)(*sample((2, 6, 40)))


def test_some_of_the_leading_axes():
    """(6, 40) broadcasts along the batch."""
    x, y = sample((2, 6, 40), (6, 40))
    assert np.allclose(MEANS(x, y).astype(np.float32), (x + y * 2).astype(np.float32), atol=0.1)


# ---- attention -------------------------------------------------------------------------------------------------------
def rms(x, g, eps=1e-5):
    return x * fuse.rsqrt(fuse.mean(x * x) + eps) * g


@fuse.kernel
def attend(q, k, v, scale=0.25):
    return fuse.attention(q, k, v, scale)


@fuse.kernel
def causal(q, k, v):
    return fuse.softmax(fuse.causal(q * 0.25 @ fuse.transpose(k))) @ v


@fuse.kernel
def normed(q, k, v, gq, gk, eps=1e-5):
    return fuse.attention(rms(q, gq, eps), rms(k, gk, eps), v, q.shape[-1] ** -0.5)


@fuse.kernel
def normed_keys(q, k, v, gk):
    return fuse.attention(q, rms(k, gk), v, 0.25)


@fuse.kernel
def shared_keys(q, k, v):
    return fuse.attention(q, k, v, 0.25)


@fuse.kernel
def grouped_heads(q, k, v):
    return fuse.attention(q, k, v, 0.25)


@fuse.kernel
def one_query(q, k, v):
    return fuse.attention(q, k * 0.5, v, 0.5)


@fuse.kernel
def rotated(q, k, v, cos, sin):
    return fuse.attention(*(operators.rotary.definition(x, cos, sin) for x in (q, k)), v, 0.25)


@fuse.kernel
def block_of_heads(x, wq, wk, wv, wo):
    q, k, v = (fuse.split_heads(x @ w, 2) for w in (wq, wk, wv))
    return fuse.merge_heads(fuse.attention(q, k, v, 0.25)) @ wo


@fuse.kernel
def without_its_root(q, k, v):
    return fuse.attention(q / (1.0 + fuse.mean(q * q)), k, v, 0.25)


# kernels ahead of attention's
AHEAD = {operators.mla_attention: 1, rotated: 2, without_its_root: 1, block_of_heads: 2, operators.qk_norm_rotary_attention: 2}
CASES = {
    operators.mla_attention: [(2, 5, 16), (9, 40), (2, 16, 40), (2, 24, 40)],
    attend: [(2, 2, 5, 16), (2, 2, 9, 16), (2, 2, 9, 24)],
    shared_keys: [(2, 4, 5, 16), (2, 1, 9, 16), (2, 1, 9, 24)],
    grouped_heads: [(2, 3, 2, 5, 16), (2, 3, 1, 9, 16), (2, 3, 1, 9, 24)],
    one_query: [(2, 1, 16), (2, 9, 16), (2, 9, 16)],
    rotated: [(2, 5, 16), (2, 5, 16), (2, 5, 16), (5, 8), (5, 8)],
    block_of_heads: [(5, 72), (72, 32), (72, 32), (72, 48), (48, 40)],
    without_its_root: [(2, 3, 5, 16), (2, 3, 9, 16), (2, 3, 9, 24)],
    operators.qk_norm_rotary_attention: [(2, 3, 5, 16), (2, 3, 5, 16), (2, 3, 5, 24), (16,), (16,), (5, 8), (5, 8)],
    causal: [(3, 5, 16), (3, 9, 16), (3, 9, 24)],
    normed: [(1, 2, 5, 16), (1, 2, 5, 16), (1, 2, 5, 16), (16,), (16,)],
    normed_keys: [(5, 16), (9, 16), (9, 16), (16,)],
}


@pytest.mark.parametrize("kernel", CASES, ids=lambda kernel: kernel.name)
def test_attention(kernel):
    """A definition becomes one call of attention.forward, or of decode where few queries meet keys that are to be
    normalised."""
    arrays = sample(*CASES[kernel])
    text = kernel.source(*arrays)
    name = "decode" if kernel in (normed, normed_keys) else "forward"
    assert f"attention.{name}(" in text and text.count("@cuda.jit") == AHEAD.get(kernel, 0)
    outputs = kernel.run(*arrays)
    compare(kernel, arrays, outputs)
    said, outputs = kernel(*arrays).astype(np.float32), outputs.astype(np.float32)
    assert np.abs(said - outputs).max() <= 0.02 * np.abs(said).max()


@pytest.mark.parametrize("kernel", [causal, normed_keys, rotated, block_of_heads], ids=lambda kernel: kernel.name)
def test_proof(kernel, monkeypatch):
    """Proofs of the cases that test_operators.py does not have."""
    monkeypatch.setenv("TILES_CHECK", "0")  # Numba has seen them above
    proof = kernel.proof(*sample(*CASES[kernel]))
    assert proof.holds, proof


NOT_ATTENTION = {
    "columns of 12": (lambda q, k, v: fuse.attention(q, k, v), [(2, 5, 12), (2, 9, 12), (2, 9, 16)]),
    "a batch of keys for two": (lambda q, k, v: fuse.attention(q, k, v), [(2, 2, 5, 16), (1, 2, 9, 16), (1, 2, 9, 16)]),
    "a negative scale": (lambda q, k, v: fuse.attention(q, k, v, -0.5), [(2, 5, 16)] * 3),
    "a bias": (lambda q, k, v, b: fuse.softmax(q @ fuse.transpose(k) + b) @ v, [(2, 5, 16)] * 3 + [(2, 5, 5)]),
}


@pytest.mark.parametrize("name", NOT_ATTENTION)
def test_what_attention_does_not_take(name):
    """Such attention runs by parts, and is right: TMA cannot address rows so short, as products of a batch would."""
    definition, shapes = NOT_ATTENTION[name]
    kernel, arrays = fuse.kernel(definition), sample(*shapes)
    with pytest.warns(RuntimeWarning, match="no template computes|multiples of 16 bytes"):
        outputs = kernel.run(*arrays)
    assert np.abs((outputs - kernel(*arrays)).astype(np.float32)).max() <= 0.1


HEADS = next(rule for rule in rules.RULES if "heads" in rule.name)


def _columns(x):
    """A wrong rule: a scale of keys is taken for one of queries."""
    if x.operation == "matmul" and x.args[1].operation == "transpose" and x.args[1].args[0].operation == "mul":
        k, g = x.args[1].args[0].args
        if g.ndim > 1 and g.extents[-1] == 1 and g.extents == (*x.args[0].extents[:-1], 1):
            yield x.args[0] @ fuse.transpose(k) * g


def _heads(x):
    """A wrong rule: heads and rows are exchanged."""
    if x.operation == "heads":
        yield terms.transpose(terms.transpose(x)) * 2.0


@pytest.mark.parametrize("wrong", [_columns, _heads])
def test_a_wrong_rule_is_caught(wrong):
    rule, caught = Rule(wrong.__name__, "", wrong), 0

    def scaled(q, k, v):
        return fuse.softmax(q @ fuse.transpose(k * fuse.mean(k))) @ v

    for definition, shapes in ((scaled, [(2, 6, 8)] * 3), (operators.mla_attention.definition, CASES[operators.mla_attention])):
        names = tuple(inspect.signature(definition).parameters)
        actual = trace_definition(definition, names, tuple(Shape(s, "bfloat16") for s in shapes))
        forms = [form for form in rules.equivalent_forms(actual.roots, actual.table, [HEADS, rule]) if rule in form.rules]
        caught += sum(not identity(actual.roots, form.roots, points=1).equal for form in forms[:2])
    assert caught


@pytest.mark.gpu
@pytest.mark.parametrize("shapes", [((16, 256, 64), (16, 4096, 64)), ((2, 20, 40), (1, 1024, 40))])
def test_keys_in_parts_on_the_card(shapes):
    pytest.importorskip("torch")
    from tiles.testing.backends import to_numpy, to_torch

    q, k = shapes
    arrays = sample(q, k, k)
    assert "splits" in PLAIN.explain(*arrays)
    compare(PLAIN, arrays, to_numpy(PLAIN(*map(to_torch, arrays))))


GQA = [((1, 4, 8, 64), (1, 2, 40, 64), 64), ((2, 4, 5, 64), (2, 2, 17, 64), 24), ((6, 5, 16), (3, 17, 16), 16)]


@pytest.mark.parametrize(("q", "k", "value_dim"), GQA)
def test_query_heads_that_share_key_heads(q, k, value_dim):
    """As torch's enable_gqa: the bits of a call in which they have an axis of their own."""
    operator, kv_heads = operators.qk_norm_attention, k[-3]
    arrays = sample(q, k, (*k[:-1], value_dim), q[-1:], q[-1:])
    own_axis = [arrays[0].reshape(*q[:-3], kv_heads, -1, *q[-2:]), *(x[..., None, :, :] for x in arrays[1:3]), *arrays[3:]]
    out = operator.run(*arrays)
    grouped = operator.run(*own_axis)
    assert out.shape == (*q[:-1], value_dim) and (out == grouped.reshape(out.shape)).all()
    compare(operator, own_axis, grouped)
    given = np.zeros_like(out)
    assert operator.run(*arrays, out=given) is not None and (given == out).all()
    assert (operator(*arrays) == operator(*own_axis).reshape(out.shape)).all()
    assert "attention.decode" in operator.explain(*arrays) and operator.proof(*arrays).holds
    dy, *_ = sample(out.shape, seed=1)
    gradients = operator.gradient(*arrays, dy)
    assert [x.shape for x in gradients] == [x.shape for x in arrays]
    for x, y in zip(gradients, operator.gradient(*own_axis, dy.reshape(grouped.shape))):
        assert (x == y.reshape(x.shape)).all()


def test_gradients_of_query_heads_that_share_key_heads():
    """Through torch, against torch's enable_gqa in float64."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    shapes = (2, 6, 5, 64), (2, 3, 17, 64), (2, 3, 17, 32), (64,), (64,)
    inputs = [torch.randn(shape, dtype=torch.bfloat16).requires_grad_() for shape in shapes]
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    norm = lambda x, g: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * g

    def formula(q, k, v, gq, gk):
        return torch.nn.functional.scaled_dot_product_attention(norm(q, gq), norm(k, gk), v, enable_gqa=True)

    dout = torch.randn(2, 6, 5, 32, dtype=torch.bfloat16)
    out, expected, low = operators.qk_norm_attention(*inputs), formula(*doubles), formula(*inputs)
    assert (out - expected).abs().max() <= 2 * (low - expected).abs().max() + 2**-8 * expected.abs().max()
    actual, exact, rounded = (torch.autograd.grad(y, xs, dout) for y, xs in ((out, inputs), (expected, doubles), (low, inputs)))
    for x, y, z in zip(actual, exact, rounded):
        assert (x - y).abs().max() <= 3 * (z - y).abs().max() + 2**-8 * y.abs().max()


def test_rotated_query_heads_that_share_key_heads():
    """The numbers of a call whose key heads are repeated. Its gradient is refused with a remedy."""
    operator = operators.qk_norm_rotary_attention
    q, k, v, *rest = sample((2, 4, 5, 16), (2, 2, 5, 16), (2, 2, 5, 24), (16,), (16,), (5, 8), (5, 8))
    repeated = [np.repeat(x, 2, axis=1) for x in (k, v)]
    out = operator.run(q, k, v, *rest)
    compare(operator, [q, *repeated, *rest], out)
    assert (operator(q, k, v, *rest) == operator(q, *repeated, *rest)).all()
    with pytest.raises(TypeError, match="^causal: has no gradient yet: of torch's tensors that require grad, loss.backward"):
        operator.gradient(q, k, v, *rest, out)


def test_heads_that_cannot_be_shared():
    """The error has the remedy, and an axis of their own is one."""
    arrays = sample((1, 4, 8, 64), (1, 2, 8, 64), (1, 2, 8, 64))
    with pytest.raises(
        ValueError, match=r"^attention: the leading axes .* say enable_gqa=True, or reshape q to \(B, Hk, H / Hk, S, D\)"
    ):
        PLAIN.run(*arrays)
    gain = np.ones(64, bf16.np)
    with pytest.raises(ValueError, match=r"^attention: .* or the heads of q a multiple of k's, got \(1, 5, 8, 64\)"):
        operators.qk_norm_attention.run(*sample((1, 5, 8, 64)), *arrays[1:], gain, gain)
    merged = fuse.kernel(lambda q, k, v: fuse.merge_heads(fuse.attention(q, k, v, 0.125, enable_gqa=True)))
    with pytest.raises(ValueError, match="^attention: the leading axes"):  # it would merge the heads of a group
        merged.run(*arrays)
    shared = fuse.kernel(lambda q, k, v: fuse.attention(q, k, v, 0.125, enable_gqa=True))
    assert shared.run(*arrays).shape == (1, 4, 8, 64)
