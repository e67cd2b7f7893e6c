"""attention.linear and its named members: retention, lightning, gla. What differs is where the decays come from.

| here                          | flash-linear-attention          | S_t =                             |
| ----------------------------- | ------------------------------- | --------------------------------- |
| linear(q, k, v)               | chunk_linear_attn               | S + k v^T                         |
| linear(.., decay=(H,))        | chunk_simple_gla(.., g_gamma=)  | exp(decay[h]) S + k v^T           |
| retention(q, k, v)            | chunk_retention                 | (1 - 2^(-5 - h)) S + k v^T        |
| lightning(q, k, v, i, n)      | chunk_lightning_attn            | exp(-8 h / H (1 - i / n)) S + k v^T |
| linear(.., decay=(B, S, H))   | chunk_simple_gla(.., g=)        | exp(decay[b, t, h]) S + k v^T     |
| gla(q, k, v, decay)           | chunk_gla(q, k, v, g)           | diag(exp(decay[b, t, h])) S + k v^T |

| here                             | flash-linear-attention                                              |
| -------------------------------- | ------------------------------------------------------------------- |
| scale: Dk^-1/2 by default        | the same                                                            |
| initial_state, return_state=True | initial_state, output_final_state=True: (N, H, Dk, Dv) float32, too |
| with normalize: pairs (S, z)     | the same, z being (N, 1, H, Dk) there and (N, H, Dk) here           |
| normalize=False by default       | normalize=True by default                                           |
| layout="bshd" or "bhsd"          | (B, T, H, D)                                                        |
"""

import functools
import math
from collections.abc import Callable
from numbers import Integral
from typing import Any

import numpy as np
from cuda.bindings import driver

from tiles.arrays import Array, Kind, describe
from tiles.device import check as checked
from tiles.device import device, uncaptured
from tiles.plans import Plan, planned

from ..softmax.problem import PIECES, options, piece
from .chunks import copied, passes
from .kernels.token_loop import ARRAYS, walk
from .problem import Problem, check, nothing, paired

NEEDED, OTHERS = "q k v", "decay initial_state initial_z cu_seqlens out state final_z local total divisor"


def linear(
    q: Any,
    k: Any,
    v: Any,
    *,
    decay: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    return_state: bool = False,
    normalize: bool = False,
    cu_seqlens: Any = None,
    layout: str = "bshd",
    out: Any = None,
    stream: Any = None,
    family: str | None = None,
) -> Any:
    """Causal linear attention with decay. For every sequence and head, over its tokens t,

        S_t = exp(decay_t) S_(t-1) + k_t v_t^T        o_t = scale S_t^T q_t

    q, k: (B, S, Hk, Dk); v, out: (B, S, H, Dv) for layout="bshd"; sequence and head swapped for "bhsd", in decay, too. bfloat16
    or float16; Dk and Dv multiples of 16 up to 256, 64 and 128 being fast; Hk divides H, and value head h reads key head
    h // (H // Hk). Any lengths.

    decay: logarithms, finite and never positive, in float32, bfloat16 or float16: None; (H,), the same for all tokens;
    (B, S, H), of each token; or (B, S, H, Dk), of each token and channel of the keys. scale: Dk^-1/2 by default.
    initial_state: (B, H, Dk, Dv) float32, with 0 as default. out: written in place of a new array. stream: the CUDA stream, by
    default the current one of q's framework.

    normalize: o_t is divided by scale z_t . q_t + 1e-10, z_t being the sum of the keys so far, decayed as S_t is. Then
    initial_state is a pair (S, z), and so is the state given back; z: (B, H, Dk).

    cu_seqlens: (N + 1,) int32 or int64, on q's device: N sequences lie one behind the other in a batch of 1, sequence n from
    cu_seqlens[n] to cu_seqlens[n + 1]; states are (N, H, Dk, Dv). That it ascends from 0 to S is not checked, for reading it
    would wait for the device.

    Returns `out`, the same kind of array as q, or with return_state=True `(out, state)`, state being a new float32 array
    (B, H, Dk, Dv), C-ordered, that of each sequence after its last token.

    Sequences are cut into chunks of 64 tokens, which the tensor cores multiply: Hopper's with tiles that TMA brings; on other
    GPUs since Ampere, and where addresses and strides are not multiples of 16 bytes, with copies by cp.async. Decays of
    channels ask for the former, and for normalize=False; else they are served token by token: right, and slow. Arrays,
    `stream`, `family` ("sm_80" is cp.async, or token by token) and errors are those of attention.forward;
    flash-linear-attention's names stand beside these at the head of this file."""
    _, scale = options(False, scale)
    arrays = q, k, v, decay, *paired(initial_state, normalize), cu_seqlens, out, *(None,) * 5
    found = _solve(stream, arrays, (scale, normalize, return_state, layout, family))
    return (found[0], found[1:]) if return_state and normalize else found


def retention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    initial_state: Any = None,
    return_state: bool = False,
    normalize: bool = False,
    cu_seqlens: Any = None,
    layout: str = "bshd",
    out: Any = None,
    stream: Any = None,
    family: str | None = None,
) -> Any:
    """Retention (Sun et al. 2023): `linear` with a decay of log(1 - 2^(-5 - h)) for head h, and all its other arguments.

    flash-linear-attention's chunk_retention(q, k, v, scale, initial_state, output_final_state, cu_seqlens) has the same decays,
    default scale and state layout; its output_final_state is return_state here. The decays are copied to a GPU once: call
    it once before a CUDA graph is captured."""
    decay = _of_heads(q, v, layout, lambda h, heads: math.log1p(-(2.0 ** (-5 - h))))
    return linear(
        q, k, v, decay=decay, scale=scale, initial_state=initial_state, return_state=return_state, normalize=normalize,
        cu_seqlens=cu_seqlens, layout=layout, out=out, stream=stream, family=family,
    )  # fmt: skip


def lightning(
    q: Any,
    k: Any,
    v: Any,
    layer: int,
    layers: int,
    *,
    scale: float | None = None,
    initial_state: Any = None,
    return_state: bool = False,
    normalize: bool = False,
    cu_seqlens: Any = None,
    layout: str = "bshd",
    out: Any = None,
    stream: Any = None,
    family: str | None = None,
) -> Any:
    """Lightning attention (Qin et al. 2024): `linear` with a decay of -8 h / H (1 - layer / layers) for head h of H, and all
    its other arguments.

    flash-linear-attention's chunk_lightning_attn(q, k, v, layer_idx, num_layers, scale, ...) has the same decays, default scale
    and state layout; its layer_idx, num_layers and output_final_state are layer, layers and return_state here. The decays are
    copied to a GPU once: call it once before a CUDA graph is captured."""
    if not (isinstance(layer, Integral) and isinstance(layers, Integral) and 0 <= layer <= layers > 0):
        raise ValueError(f"layer: must be an integer from 0 to layers, of which there is one or more: {layer=}, {layers=}")
    slope = 8 * (1 - layer / layers)
    decay = _of_heads(q, v, layout, lambda h, heads: -slope * h / heads)
    return linear(
        q, k, v, decay=decay, scale=scale, initial_state=initial_state, return_state=return_state, normalize=normalize,
        cu_seqlens=cu_seqlens, layout=layout, out=out, stream=stream, family=family,
    )  # fmt: skip


def gla(
    q: Any,
    k: Any,
    v: Any,
    decay: Any,
    *,
    scale: float | None = None,
    initial_state: Any = None,
    return_state: bool = False,
    normalize: bool = False,
    cu_seqlens: Any = None,
    layout: str = "bshd",
    out: Any = None,
    stream: Any = None,
    family: str | None = None,
) -> Any:
    """Gated linear attention (Yang et al. 2024): `linear` with a decay (B, S, H, Dk) for each token and channel, and all its
    other arguments.

    flash-linear-attention's chunk_gla(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens) has the same default
    scale and state layout; its g and output_final_state are decay and return_state here."""
    shape = describe(decay, "decay").shape
    if len(shape) != 4:
        raise ValueError(f"decay: must have an axis of channels (linear takes those that have none): decay.shape={shape}")
    return linear(
        q, k, v, decay=decay, scale=scale, initial_state=initial_state, return_state=return_state, normalize=normalize,
        cu_seqlens=cu_seqlens, layout=layout, out=out, stream=stream, family=family,
    )  # fmt: skip


@planned(NEEDED, OTHERS)
def _solve(q, k, v, decay, initial_state, initial_z, cu_seqlens, out, *made_and_options) -> Plan:
    """How linear does calls of this form at these addresses."""
    *_, scale, normalize, return_state, layout, family = made_and_options
    arrays = {"q": q, "k": k, "v": v, "out": out, "decay": decay, "cu_seqlens": cu_seqlens}
    arrays |= {"initial_state": initial_state, "initial_z": initial_z}
    problem = check("linear", arrays, scale=scale, normalize=normalize, layout=layout)
    make = {} if out else {"out": (problem.out_shape, problem.dtype)}
    give = ["out"]
    if return_state:
        give += ["state", "final_z"] if normalize else ["state"]
    if 0 in problem.out_shape and (0 in problem.state_shape or not return_state):
        prepare = nothing
    elif _in_chunks(
        problem, decay, by_copies := copied(problem, family, *(array.pointer for array in (q, k, v, out) if array))
    ):
        found = passes(problem, keep=return_state, by_copies=by_copies)
        make |= found.scratch
        prepare = _named(found.prepare)
    else:
        if family == "sm_90" and not problem.trivial:
            raise ValueError(
                f"family: sm_90 takes decays of channels whose address and strides are multiples of {PIECES[0]} bytes, and no "
                f"normalize=True: {family=}, {normalize=}, decay at {decay.pointer:#x}, decay.strides={decay.strides}"
            )
        bound = walk(problem, return_state)
        prepare = _named(lambda stream, where: bound.prepare(stream, *(where.get(name, 0) for name in ARRAYS)))
    shapes = {"state": problem.state_shape, "final_z": problem.z_shape}
    return Plan(prepare, make | {name: (shapes[name], "float32") for name in give[1:]}, tuple(give))


def _named(prepare: Callable[[int, dict[str, int]], Callable[[], None]]) -> Callable[..., Callable[[], None]]:
    """Plan.prepare of what takes addresses by name."""
    names = f"{NEEDED} {OTHERS}".split()
    return lambda stream, *addresses: prepare(stream, dict(zip(names, addresses, strict=True)))


def _in_chunks(problem: Problem, decay: Array | None, by_copies: int) -> bool:
    """Is there a kernel of chunks for it? With decays of channels if TMA can read them and all else, and for no normalizer."""
    if problem.trivial:
        return False
    if decay is None or len(decay.shape) < 4:
        return True
    aligned = piece(problem, decay.pointer, *problem.forms["decay"].strides[:-1]) == PIECES[0]
    return aligned and not (by_copies or problem.normalize)


# ---- decays that follow from the number of a head ------------------------------------------------------------------
def _of_heads(q: Any, v: Any, layout: str, decay: Callable[[int, int], float]) -> Any:
    """The decays of v's heads, as an array of q's kind: decay(h, heads)."""
    queries, values = describe(q, "q"), describe(v, "v")
    axis = -3 if layout == "bhsd" else -2
    heads = values.shape[axis] if len(values.shape) == 4 else 0
    return _constant(queries.kind, queries.kind.home(queries), queries.device, tuple(decay(h, heads) for h in range(heads)))


@functools.lru_cache
def _constant(kind: Kind, home: Any, ordinal: int | None, numbers: tuple[float, ...]) -> Any:
    """A float32 array of these numbers in this place, of this kind, or NumPy's in host memory; made once and kept."""
    host = np.array(numbers, np.float32)
    if ordinal is None:
        return host
    with uncaptured(), device(ordinal).current():
        new = kind.maker(home, host.shape, "float32")()
        checked(driver.cuMemcpyHtoD(kind.address(new), host.ctypes.data, host.nbytes))
        return new
