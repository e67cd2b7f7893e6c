"""Programs of projections: rows that are normalised and turned against float64, attention on them against attention itself."""

import numpy as np
import pytest
from forward_checks import draw
from places import BF16

import attention
from attention.public.projected_qkv import projected, projected_backward
from tiles.dtypes import fp16

FP16, F32 = fp16.np, np.float32
# (batch, rows, heads, heads of keys, columns), options
CASES = {
    "plain": ((1, 40, 2, 2, 64), {}),
    "all": ((2, 21, 6, 3, 64), dict(normed=True, sunk=True, causal=True, left=9, softcap=3.0, scale=0.2, eps=1e-2)),
    "wide": ((2, 300, 1, 1, 128), dict(normed=True, causal=True, dtype=FP16)),
    "many heads": ((1, 17, 9, 1, 128), dict(positions=True)),
}
every_case = pytest.mark.parametrize("case", CASES)


class Made:
    """What a case is given, as NumPy's arrays, and what is said of it in float64."""

    def __init__(self, case):
        (self.batch, self.rows, self.heads, self.kv_heads, self.columns), options = CASES[case]
        settings = dict(normed=False, sunk=False, causal=False, left=None, softcap=None, scale=None, eps=1e-6, dtype=BF16)
        self.settings = settings | {"positions": False} | options
        self.x = draw((self.batch, self.rows, self.heads + 2 * self.kv_heads, self.columns), self.settings["dtype"])
        angles = draw((*[self.batch] * self.settings["positions"], self.rows, self.columns // 2), F32) * F32(9)
        self.cos, self.sin = np.cos(angles), np.sin(angles)
        self.weights = [1 + draw((self.columns,), F32) for _ in range(2)] if self.settings["normed"] else [None, None]
        self.sink = draw((self.heads,), F32) if self.settings["sunk"] else None
        self.dout = draw((self.batch, self.rows, self.heads, self.columns), self.settings["dtype"])

    @property
    def all_weights(self):
        """(heads of queries and keys, columns)"""
        each = [np.ones(self.columns) if x is None else x for x in self.weights]
        return np.concatenate([np.tile(x, (n, 1)) for x, n in zip(each, (self.heads, self.kv_heads))]).astype(float)

    def split(self, x):
        """Parts for queries, keys and, if there are, values."""
        return np.split(x, [self.heads, self.heads + self.kv_heads], 2)

    def z(self):
        """(rows as they are normalised but for weights, 1 / deviation)"""
        x = self.x[:, :, : self.heads + self.kv_heads].astype(float)
        scale = (
            1 / np.sqrt((x * x).mean(-1, keepdims=True) + self.settings["eps"])
            if self.settings["normed"]
            else np.ones((1,) * 4)
        )
        return x * scale, scale

    def turn(self, x, back=False):
        cos, sin = (a[..., None, :].astype(float) for a in (self.cos, -self.sin if back else self.sin))
        first, second = np.split(x, 2, -1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def options(self):
        settings = self.settings
        return settings["eps"], settings["causal"], settings["left"], None, settings["softcap"], settings["scale"]

    def call(self, place, x=None):
        """(what goes before the gradient's own arguments, what the program gives)"""
        q, k, v = (place.put(a) for a in self.split(self.x)) if x is None else x
        inputs = [q, k, v, *[None if a is None else place.put(a) for a in (self.cos, self.sin, *self.weights, self.sink)]]
        return inputs, projected(None, (*inputs, None, None, None), (*self.options(), None))

    def variant(self):
        """The same for attention.forward and backward."""
        settings, window = self.settings, None if self.settings["left"] is None else (self.settings["left"], None)
        actual = dict(causal=settings["causal"], window=window, softcap=settings["softcap"], scale=settings["scale"])
        return actual | ({"sink": self.sink} if settings["sunk"] else {})


def close(outputs, expected, dtype):
    """But for a rounding, and what float32 loses of sums."""
    bits = {BF16: 8, FP16: 11}.get(dtype, 18)
    atol = 2.0 ** -(bits + 2) * np.abs(expected).max()
    np.testing.assert_allclose(outputs.astype(float), expected, rtol=2.0**-bits, atol=atol)


@every_case
def test_rows_are_turned_and_attended_to(place, case):
    """Rows as the formula has them; the output, and lse, to the bit what attention.forward makes of such rows."""
    result = Made(case)
    _, (out, lse, rows) = result.call(place)
    z, _ = result.z()
    close(place.get(rows), result.turn(z * result.all_weights), result.settings["dtype"])
    put = [place.put(np.ascontiguousarray(a)) for a in result.split(place.get(rows))[:2]]
    options = {n: place.put(x) if n == "sink" else x for n, x in result.variant().items()}
    v = place.put(np.ascontiguousarray(result.split(result.x)[2]))
    expected = attention.forward(*put, v, return_lse=True, **options)
    for x, y in zip((out, lse), expected):
        np.testing.assert_array_equal(place.get(x), place.get(y))


@every_case
def test_gradients_are_those_of_all_that(place, case):
    """Values' and sinks' are to the bit attention.backward's; queries' and keys' what the formula makes of its others."""
    result = Made(case)
    inputs, (out, lse, rows) = result.call(place)
    settings, dtype = result.settings, result.settings["dtype"]
    dout = place.put(result.dout)
    options = *result.options(), True, settings["normed"], settings["sunk"], None
    actual = projected_backward(None, (dout, *inputs, out, lse, rows, *(None,) * 4), options)
    dx, *more = actual if isinstance(actual, tuple) else (actual,)
    turned = [place.put(np.ascontiguousarray(a)) for a in result.split(place.get(rows))[:2]]
    variant = {n: place.put(x) if n == "sink" else x for n, x in result.variant().items()}
    v = place.put(np.ascontiguousarray(result.split(result.x)[2]))
    dq, dk, dv, *dsink = map(place.get, attention.backward(dout, *turned, v, out, lse, deterministic=True, **variant))
    outputs = place.get(dx)
    np.testing.assert_array_equal(outputs[:, :, result.heads + result.kv_heads :], dv)
    z, scale = result.z()
    dn = result.turn(np.concatenate([dq, dk], 2).astype(float), back=True)
    dz = dn * result.all_weights
    if settings["normed"]:
        wanted_weights = [(a * b).sum((0, 1, 2)) for a, b in zip(result.split(dn)[:2], result.split(z)[:2])]
        for x, expected in zip(more, wanted_weights):
            close(place.get(x), expected, F32)
        dz = (dz - z * (dz * z).mean(-1, keepdims=True)) * scale
    close(outputs[:, :, : result.heads + result.kv_heads], dz, dtype)
    if settings["sunk"]:
        np.testing.assert_array_equal(place.get(more[-1]), dsink[0])


def test_nothing_at_all(place):
    """No row, no batch: no gradient, and norms' that are 0."""
    for batch, rows in ((0, 8), (2, 0)):
        x = [place.put(np.zeros((batch, rows, 1, 64), BF16)) for _ in range(3)]
        tables = [place.put(np.zeros((rows, 32), F32)) for _ in range(2)]
        norms = [place.put(np.ones(64, F32)) for _ in range(2)]
        inputs = *x, *tables, *norms, None
        out, lse, turned = projected(None, (*inputs, None, None, None), (1e-6, False, None, None, None, None, None))
        options = 1e-6, False, None, None, None, None, False, True, False, None
        dx, *of_norms = projected_backward(None, (x[0], *inputs, out, lse, turned, *(None,) * 4), options)
        assert tuple(dx.shape) == (batch, rows, 3, 64)
        assert all((place.get(a) == 0).all() for a in of_norms)


@pytest.mark.parametrize(("changes", "words"), [
    (dict(q=(1, 8, 2, 32), k=(1, 8, 1, 32), v=(1, 8, 1, 32), cos=(8, 16), sin=(8, 16)), "q: head_dim must be one of"),
    (dict(cos=(8, 16), sin=(8, 16)), "cos: must have a column for each pair of q's: cos.shape=.8, 16., q.shape="),
    (dict(q_norm=(64,)), "q_norm: must be passed with k_norm"),
    (dict(cos=(9, 32)), "cos: sequence must equal q's"),
])  # fmt: skip
def test_what_is_refused(changes, words):
    shapes = dict(q=(1, 8, 2, 64), k=(1, 8, 1, 64), v=(1, 8, 1, 64), cos=(8, 32), sin=(8, 32)) | changes
    names = "q", "k", "v", "cos", "sin", "q_norm", "k_norm", "sink"
    dtypes = dict.fromkeys("qkv", BF16)
    inputs = [np.zeros(shapes[n], dtypes.get(n, F32)) if n in shapes else None for n in names]
    with pytest.raises(ValueError, match=words):
        projected(None, (*inputs, None, None, None), (1e-6, False, None, None, None, None, None))
