"""Raw gates and beta: what a layer projects, and the formula that makes a gate or beta of it.

    out = attention.delta_rule(
        q, k, v, attention.gates.beta(b), decay=attention.gates.softplus(a, A_log, dt_bias), qk_l2norm=True
    )

| gates.                                 | a gate g, the log decay, is             | models                               |
| -------------------------------------- | --------------------------------------- | ------------------------------------ |
| softplus(a, A_log, dt_bias)            | -exp(A_log) softplus(a + dt_bias)       | Qwen3-Next, gated delta, Kimi Linear |
| sigmoid(a, A_log, dt_bias, lower=-5.0) | lower sigmoid(exp(A_log) (a + dt_bias)) | KDA with a bounded ("safe") gate     |
| logsigmoid(a, dt_bias, divisor=16)     | log(sigmoid(a + dt_bias)) / divisor     | GLA                                  |
| beta(b), beta(b, doubled=True)         | sigmoid(b), 2 sigmoid(b)                | the delta rule                       |

attention.linear, gla, delta_rule and linear_step take such a gate as `decay`, the delta rule such a beta as `beta`. Their
kernels compute it where they read it: no pass over memory comes before. `evaluate` returns it as an array. It is called for you
where a tensor requires grad, and by jax.jit and jax.grad: the gradients of a, A_log, dt_bias and b are then those of the
formula in torch or JAX, or by kernels those of torch's 16-bit gates of channels, and the gate lies in memory once. Tokens after
cu_seqlens[-1] are then read, and must not be NaN.

a, b: as a decay or beta of the function, (B, S, H) or (B, S, H, Dk), in float32, bfloat16 or float16: a projection's
(B, S, H Dk) is a.unflatten(-1, (H, Dk)). A_log: (H,), None for 0. dt_bias: (H,), or (H, Dk) for gates of channels, None for
0; checkpoints may have H Dk in one axis. All on one device."""

from __future__ import annotations

from typing import Any, NamedTuple

from tiles.calls.torch_op import imported_module

from .options import check_flag, check_number
from .parts.recurrent.gate_formulas import (
    GATE_FORMULAS,
    LogSigmoidFormula,
    SigmoidFormula,
    SoftplusFormula,
    list_gates,
    sigmoid_of,
)
from .parts.recurrent.l2norm import L2NORM_EPSILON

__all__ = ["RawBeta", "RawGate", "beta", "evaluate", "logsigmoid", "normalize", "sigmoid", "softplus"]


class RawGate(NamedTuple):
    """A gate before its formula: see the functions of this module. x: (B, S, H), or (B, S, H, Dk). formula: its name. number:
    the formula's constant, if it has one."""

    x: Any
    A_log: Any
    dt_bias: Any
    formula: str
    number: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the gate that the formula makes: that of x."""
        return tuple(self.x.shape)

    @property
    def arrays(self) -> tuple[Any, Any, Any]:
        """The arrays of the formula: x, A_log and dt_bias, of which the last two may be None."""
        return self.x, self.A_log, self.dt_bias


class RawBeta(NamedTuple):
    """scale sigmoid(x), x: (B, S, H)."""

    x: Any
    scale: float = 1.0


def softplus(a: Any, A_log: Any = None, dt_bias: Any = None) -> RawGate:
    """g = -exp(A_log) softplus(a + dt_bias)."""
    _check_array("a", a)
    return RawGate(a, A_log, dt_bias, SoftplusFormula.name)


def sigmoid(a: Any, A_log: Any = None, dt_bias: Any = None, *, lower: float = -5.0) -> RawGate:
    """g = lower sigmoid(exp(A_log) (a + dt_bias)), from lower to 0. ValueError: lower is not negative."""
    _check_array("a", a)
    if check_number("lower", lower) is None or not -1e30 < lower < 0:
        raise ValueError(f"lower: must be negative and finite, because gates are never positive: {lower=}")
    return RawGate(a, A_log, dt_bias, SigmoidFormula.name, float(lower))


def logsigmoid(a: Any, dt_bias: Any = None, *, divisor: float = 16.0) -> RawGate:
    """g = log(sigmoid(a + dt_bias)) / divisor. ValueError: divisor is not positive."""
    _check_array("a", a)
    if check_number("divisor", divisor) is None or not 0 < divisor < 1e30:
        raise ValueError(f"divisor: must be positive and finite, because gates are never positive: {divisor=}")
    return RawGate(a, None, dt_bias, LogSigmoidFormula.name, float(divisor))


def beta(b: Any, *, doubled: bool = False) -> RawBeta:
    """beta = sigmoid(b), or with doubled=True 2 sigmoid(b), with which a state may have negative eigenvalues."""
    _check_array("b", b, "beta")
    return RawBeta(b, 2.0 if check_flag("doubled", doubled) else 1.0)


def evaluate(raw: RawGate | RawBeta, layout: str = "bshd") -> Any:
    """The gate or beta itself, an array of x's framework: of torch and JAX in float32, where it may be differentiated; of
    anything else as NumPy in float64. layout: "bshd", or "bhsd" where heads come second, as in the function that takes it, and
    in linear_step. TypeError: it is neither a raw gate nor a raw beta. ValueError: A_log or dt_bias does not fit."""
    if not isinstance(raw, (RawGate, RawBeta)):
        raise TypeError(f"raw: must be made by {list_gates('beta')}, and is a {type(raw).__name__}")
    if layout not in ("bshd", "bhsd"):
        raise ValueError(f'layout: must be "bshd" or "bhsd": {layout=}')
    library, real = _library(*raw)
    x = real(raw.x)
    if isinstance(raw, RawBeta):
        return raw.scale * sigmoid_of(library, x)
    head_axis = 2 if layout == "bshd" else 1
    check_parameters(raw, head_axis)

    def spread(a):
        """A_log or dt_bias with the axes of x."""
        a = real(a)
        axes_between = x.ndim - head_axis - a.ndim
        return a.reshape(a.shape[:1] + (1,) * axes_between + a.shape[1:])

    if raw.dt_bias is not None:
        x = x + spread(raw.dt_bias)
    rate = 1.0 if raw.A_log is None else library.exp(spread(raw.A_log))
    return GATE_FORMULAS[raw.formula].evaluate(library, x, rate, raw.number)


def check_parameters(raw: RawGate, head_axis: int) -> None:
    """ValueError: A_log or dt_bias has another number of heads or channels than x, or x has no heads. (Frameworks would repeat
    it along whatever axes are last.)"""
    shape = raw.shape
    if len(shape) <= head_axis:
        raise ValueError(f"gate: must have an axis of heads, and may have one of channels behind it: gate.shape={shape}")
    heads, channels = shape[head_axis], shape[head_axis + 1 :][-1:]
    for name, x, shapes in ("A_log", raw.A_log, [(heads,)]), ("dt_bias", raw.dt_bias, [(heads,), (heads, *channels)]):
        if x is not None and (parameter_shape := tuple(getattr(x, "shape", ()))) not in shapes:
            expected = " or ".join(dict.fromkeys(map(str, shapes)))
            raise ValueError(f"{name}: must be {expected}, as the gate: {name}.shape={parameter_shape}, gate.shape={shape}")


def normalize(x: Any) -> Any:
    """Queries or keys divided by their L2 norms, x / sqrt(sum(x^2) + 1e-6), in x's dtype: what qk_l2norm=True does, of x's
    framework."""
    library, real = _library(x)
    y = real(x)
    y = y / library.sqrt((y * y).sum(-1, keepdims=True) + L2NORM_EPSILON)
    return y.to(x.dtype) if library.__name__ == "torch" else y.astype(x.dtype)


def _check_array(name: str, x: Any, products: str = "gates") -> None:
    """TypeError: x is None, which would be no gate at all, or a number."""
    if x is None or isinstance(x, (int, float)):
        raise TypeError(f"{name}: must be an array, which a formula makes {products} of: {name}={x}")


def _library(*arrays: Any) -> tuple[Any, Any]:
    """(the module of these arrays' framework, a function to its floating-point numbers)"""
    torch, jax = imported_module("torch"), imported_module("jax")
    if torch is not None and any([isinstance(x, torch.Tensor) for x in arrays]):
        return torch, lambda x: torch.as_tensor(x).float()
    if jax is not None and any([isinstance(x, jax.Array) for x in arrays]):
        return jax.numpy, lambda x: jax.numpy.asarray(x).astype("float32")
    import numpy as np

    from tiles.testing.compare import host

    return np, lambda x: host(x).astype(np.float64)
