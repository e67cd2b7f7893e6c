"""Every public function under torch.vmap."""

import contextlib

import pytest

import attention

torch = pytest.importorskip("torch")
from torch_calls import HEAD, TOKENS, Inputs, OpRecorder, assert_same, leaves, near, prepared  # noqa: E402


def mapped(function, in_dims, arrays, **options):
    """The expected result of torch.vmap: a call for each element, stacked."""
    count = next(x.shape[d] for x, d in zip(arrays, in_dims) if d is not None)
    each = [
        leaves(function(*(x if d is None else x.select(d, n) for x, d in zip(arrays, in_dims)), **options))
        for n in range(count)
    ]
    return [torch.stack(of) for of in zip(*each)]


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 0, 1), (2, 1, 4), (-1, 0, None)])
def test_vmap_of_forward(in_dims):
    arrays = [x if d is None else torch.stack([x, x * 2, -x], d) for x, d in zip(Inputs(batch=2).qkv(), in_dims)]
    function = lambda q, k, v: attention.forward(q, k, v, return_lse=True)
    arrays = [x.contiguous() for x in arrays]
    with contextlib.suppress(ValueError):  # the last axis is not contiguous in the element itself
        expected = mapped(lambda *x: function(*(y.contiguous() for y in x)), in_dims, arrays)
    assert_same(torch.vmap(function, in_dims)(*arrays), expected)


def test_vmap_is_one_call():
    q, k, v = (torch.stack([x, x]) for x in Inputs().qkv())
    with OpRecorder() as seen:
        torch.vmap(attention.forward, in_dims=(0, 0, None))(q, k, v[0])
    [(_, (folded, _, shared, *_))] = seen.calls
    assert folded.shape == shared.shape == (2, TOKENS, 1, HEAD)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 0, 1)])
@pytest.mark.parametrize("options", [{}, {"window": (3, 3)}, {"return_lse": True}], ids=str)
def test_gradients_through_vmap(in_dims, options):
    """Tensors that require grad outside of vmap, as stacked parameters of several models do."""
    arrays = [x if d is None else torch.stack([x, x * 2, -x], d) for x, d in zip(Inputs(batch=2).qkv(), in_dims)]
    arrays = [x.contiguous().requires_grad_() for x in arrays]
    function = lambda q, k, v: leaves(attention.forward(q, k, v, **options))[0]
    gradients = []
    for result in torch.vmap(function, in_dims)(*arrays), mapped(function, in_dims, arrays)[0]:
        gradients.append(torch.autograd.grad(result.float().square().sum(), arrays))
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, atol=0.05, rtol=0.02)
    with torch.no_grad():
        assert not torch.vmap(function, in_dims)(*arrays).requires_grad


def test_vmap_where_a_mask_counts_batches():
    """b is the number of a sequence in each element's batch, not in the flattened batch."""
    x = Inputs(batch=2, heads=2)
    (q, k, v), docs = x.qkv(), x.documents()
    docs[1] += torch.arange(TOKENS) // 3
    arrays, dims = (torch.stack([q, -q, 2 * q]), k, v, torch.stack([docs, docs * 2, docs // 2])), (0, None, None, 0)
    function = lambda q, k, v, docs: attention.forward(q, k, v, mask=near, aux=(docs,), alibi=torch.ones(2, 2))
    assert_same(torch.vmap(function, dims)(*arrays), mapped(function, dims, arrays)[0])


def test_vmap_in_vmap():
    q, k, v = Inputs().qkv()
    q, k = torch.stack([q, 2 * q]), torch.stack([k, -k, k / 2])
    actual = torch.vmap(lambda q: torch.vmap(lambda k: attention.forward(q, k, v))(k))(q)
    assert_same(actual, torch.stack([torch.stack([attention.forward(a, b, v) for b in k]) for a in q]))


@pytest.mark.parametrize("name", ["linear, state", "mamba2", "hedgehog", "delta_rule", "linear, sequences", "linear, sums"])
@pytest.mark.parametrize("rates", [False, True])
def test_vmap_of_the_others(name, rates):
    """All arguments are mapped over; or all but those without a batch axis (decays of heads, maps and ends), which need a call
    each."""
    function, args, options = prepared(name)
    flat, spec = torch.utils._pytree.tree_flatten((args, options))
    tensor = lambda x: isinstance(x, torch.Tensor)
    has_batch = lambda x: tensor(x) and x.dim() >= 3 and not (name == "hedgehog" and x.dim() == 3)
    dims = [0 if has_batch(x) or (rates and tensor(x)) else None for x in flat]
    stacked = [x if d is None else torch.stack([x, x]) for x, d in zip(flat, dims)]
    places = [n for n, x in enumerate(flat) if tensor(x)]

    def call(*tensors):
        inputs = dict(zip(places, tensors))
        args, options = torch.utils._pytree.tree_unflatten([inputs.get(n, x) for n, x in enumerate(flat)], spec)
        return function(*args, **options)

    pick = lambda values: [values[n] for n in places]
    assert_same(torch.vmap(call, tuple(pick(dims)))(*pick(stacked)), mapped(call, pick(dims), pick(stacked)))


SHARED = {  # (function of shared weights and mapped tokens, weights, shapes of the tokens); 2 elements would divide the weights
    "short_conv": (lambda w, x: attention.short_conv(x, w), (8, 4), [(1, 9, 8)]),
    "gated_rms_norm": (lambda w, *x: attention.gated_rms_norm(x[0], w, x[1]), (32,), [(1, 9, 2, 32)] * 2),
    "linear": (lambda g, *qkv: attention.linear(*qkv, decay=-g.exp()), (2,), [(1, 9, 2, 16)] * 3),
    "forward": (lambda w, *qkv: attention.forward(*qkv, q_norm=w), (16,), [(1, 9, 2, 16)] * 3),
}


@pytest.mark.parametrize("name", SHARED)
def test_gradients_of_weights_for_each_element(name):
    """Gradients of weights, which have no batch, are sums over it: of the tokens of one element, and not of all."""
    function, weights, shapes = SHARED[name]
    weights, tokens = torch.rand(weights), [torch.randn(2, *shape).bfloat16() for shape in shapes]
    gradient = torch.func.grad(lambda *arrays: function(*arrays).float().square().sum())
    actual = torch.vmap(gradient, (None, *[0] * len(tokens)))(weights, *tokens)
    assert_same(actual, torch.stack([gradient(weights, *[x[n] for x in tokens]) for n in range(2)]))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_vmap_writes_a_state_in_place(dim):
    (q, k, v), state = (x[:, 0] for x in Inputs(batch=2).qkv()), torch.randn(2, 1, HEAD, HEAD)
    states = torch.stack([state, -state], dim)
    again = states.clone()
    expected = mapped(attention.linear_step, (dim, None, None, None), (states, q, k, v))
    actual = torch.vmap(attention.linear_step, (dim, None, None, None))(again, q, k, v)
    assert_same([actual, again], [*expected, states])
    with pytest.raises(ValueError, match="state: is written in place, so it must be mapped over"):
        torch.vmap(attention.linear_step, (None, 0, None, None))(state, torch.stack([q, q]), k, v)


@pytest.mark.gpu
def test_vmap_on_the_card():
    q, k, v = Inputs("cuda", batch=2, heads=4, tokens=200).qkv()
    q, v = torch.stack([q, -q, 2 * q]), torch.stack([v, -v, 2 * v], 2)
    actual = torch.vmap(attention.forward, (0, None, 2))(q, k, v)
    assert_same(actual, mapped(attention.forward, (0, None, 2), (q, k, v))[0])
