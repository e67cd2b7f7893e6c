"""attention.delta_rule: the delta rule, with decays or without. What differs is where the decays come from.

| delta_rule(q, k, v, beta, ..) | flash-linear-attention              | S_t =                                                |
| ----------------------------- | ----------------------------------- | ---------------------------------------------------- |
|                               | chunk_delta_rule(q, k, v, beta)     | S + k (beta (v - S^T k))^T                           |
| decay=(H,) or (B, S, H)       | chunk_gated_delta_rule(.., g, beta) | the same of exp(decay) S: gated delta networks       |
| decay=(B, S, H, Dk)           | chunk_kda(.., g, beta)              | the same of diag(exp(decay)) S: Kimi delta attention |

Default scale (Dk^-1/2) and the states' layout, (N, H, Dk, Dv) float32, are the same there; so are shared q and k heads, which
chunk_delta_rule has not. g is (B, T, H) or (B, T, H, Dk) there, of each token; decays are logarithms in both. Keys are taken as
they are: use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True and the like are the caller's work here.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from tiles import launch, tensor
from tiles.arrays import FORMS, Array, Form, at, c_ordered, form
from tiles.device import processors
from tiles.dtypes import bf16, fp16, fp32
from tiles.launch import Bound, Interpreted
from tiles.plans import Plan, planned

from ..softmax.forward import choose
from ..softmax.problem import options, piece
from .kernels import delta_hopper, kda_hopper
from .kernels.token_loop import ARRAYS, walk
from .problem import Problem, check, nothing

DTYPES = {"bfloat16": bf16, "float16": fp16, "float32": fp32}
NEEDED, OTHERS = "q k v beta", "decay initial_state cu_seqlens out state"


def delta_rule(
    q: Any,
    k: Any,
    v: Any,
    beta: Any,
    *,
    decay: Any = None,
    scale: float | None = None,
    initial_state: Any = None,
    return_state: bool = False,
    cu_seqlens: Any = None,
    layout: str = "bshd",
    out: Any = None,
    stream: Any = None,
    family: str | None = None,
) -> Any:
    """The delta rule: a state learns of every key what it does not say yet. For every sequence and head, over its tokens t,

        S = exp(decay_t) S;  u_t = beta_t (v_t - S^T k_t);  S = S + k_t u_t^T;  o_t = scale S^T q_t

    q, k: (B, S, Hk, Dk); v, out: (B, S, H, Dv); beta: (B, S, H), for layout="bshd"; sequence and head swapped for "bhsd".
    bfloat16 or float16, beta and decay float32, too; Dk and Dv multiples of 16 up to 256, Dk up to 128 fast; Hk divides H, and
    value head h reads key head h // (H // Hk). Any lengths. It is stable where beta |k|^2 is between 0 and 2.

    decay: logarithms, never positive: None; (H,), the same for all tokens; (B, S, H), of each token; or (B, S, H, Dk), of each
    token and channel of the keys. scale: Dk^-1/2 by default. initial_state: (B, H, Dk, Dv) float32, with 0 as default. out:
    written in place of a new array. stream: the CUDA stream, by default the current one of q's framework.

    cu_seqlens: (N + 1,) int32 or int64, on q's device: N sequences lie one behind the other in a batch of 1, sequence n from
    cu_seqlens[n] to cu_seqlens[n + 1]; states are (N, H, Dk, Dv). That it ascends from 0 to S is not checked, for reading it
    would wait for the device.

    Returns `out`, the same kind of array as q, or with return_state=True `(out, state)`, state being a new float32 array
    (B, H, Dk, Dv), C-ordered, that of each sequence after its last token.

    On Hopper sequences are cut into chunks of 64 tokens, which the tensor cores multiply. Other GPUs, addresses and strides
    that are not multiples of 16 bytes and Dk above 128 are served token by token: right, and slow. With decays of channels,
    chunks by whose end a channel has decayed by more than exp(-119), or exp(-15) for float16, are slow, too. Arrays, `stream`,
    `family` ("sm_80" is token by token) and errors are those of attention.forward; flash-linear-attention's names stand beside
    these at the head of this file."""
    _, scale = options(False, scale)
    arrays = q, k, v, beta, decay, initial_state, cu_seqlens, out, None
    return _solve(stream, arrays, (scale, return_state, layout, family))


@planned(NEEDED, OTHERS)
def _solve(q, k, v, beta, decay, initial_state, cu_seqlens, out, state, scale, return_state, layout, family) -> Plan:
    """How delta_rule does calls of this form at these addresses; state is never given."""
    arrays = {"q": q, "k": k, "v": v, "out": out, "decay": decay, "beta": beta}
    problem = check("linear", arrays | {"initial_state": initial_state, "cu_seqlens": cu_seqlens}, scale=scale, layout=layout)
    make = {} if out else {"out": (problem.out_shape, problem.dtype)}
    if return_state:
        make["state"] = problem.state_shape, "float32"
    give = ("out", "state") if return_state else ("out",)
    if 0 in problem.out_shape and (0 in problem.state_shape or not return_state):
        return Plan(nothing, make, give)
    in_chunks = _in_chunks(problem, decay, family, *(array.pointer for array in (q, k, v, out) if array))
    bound, names = (_chunks(problem, return_state), delta_hopper.ARRAYS) if in_chunks else (walk(problem, return_state), ARRAYS)
    return Plan(_named(bound, names), make, give)


def _named(bound: Bound | Interpreted, names: Sequence[str]) -> Callable[..., Callable[[], None]]:
    """Plan.prepare of a launch that takes the arrays of these names."""
    ours = f"{NEEDED} {OTHERS}".split()
    return lambda stream, *places: bound.prepare(stream, *(dict(zip(ours, places, strict=True)).get(n, 0) for n in names))


def _by_channel(problem: Problem) -> bool:
    """Does every channel decay by itself?"""
    decay = problem.forms.get("decay")
    return decay is not None and len(decay.shape) == 4


def _in_chunks(problem: Problem, decay: Array | None, family: str | None, *pointers: int) -> bool:
    """Is there a kernel of chunks for it? With decays of channels if TMA can read them and all else."""
    widest = max(delta_hopper.STAGES)
    if decay is not None and _by_channel(problem):
        pointers = *pointers, decay.pointer, *problem.forms["decay"].strides[:-1]
    on_hopper = choose(problem, piece(problem, *pointers), family, "delta_rule") == "sm_90"
    if problem.key_dim > widest and family == "sm_90":
        raise ValueError(f"family: sm_90 takes keys of at most {widest} columns: {family=}, q has {problem.key_dim}")
    return on_hopper and problem.key_dim <= widest and not problem.trivial


@functools.lru_cache(FORMS)
def _chunks(problem: Problem, keep: bool) -> Bound | Interpreted:
    """The launch for a problem; its addresses are delta_hopper.ARRAYS, kda's, too. keep: store the last states."""
    given, pairs, width = problem.forms, (problem.sequences, problem.heads), math.ceil(problem.value_dim / delta_hopper.COLUMNS)
    apart = math.prod(pairs) * width <= processors(problem.device)  # then there is a multiprocessor for each 64 columns
    sizes = min(n for n in delta_hopper.STAGES if n >= problem.key_dim), 1 if apart else min(width, 2)
    dtype, varlen = DTYPES[problem.dtype], "cu_seqlens" in given
    empty: dict[str, tuple[int, ...]] = {
        "decay": (problem.batch, 0, problem.heads),
        "initial_state": (*pairs, 0, 0),
        "state": problem.state_shape if keep else (*pairs, 0, 0),
    }
    forms = {name: c_ordered(shape, "float32", problem.device) for name, shape in empty.items()}
    forms |= {"cu_seqlens": c_ordered((0,), "int32", problem.device)} | dict(given)
    config: delta_hopper.Config | kda_hopper.Config
    if _by_channel(problem):
        config = kda_hopper.Config(*sizes, DTYPES[forms["decay"].dtype], dtype, varlen)
        (kernel, smem), tiles = kda_hopper.make(config), {"decay": config.gate}
    else:
        config = delta_hopper.Config(*sizes, dtype, "decay" in given, varlen)
        (kernel, smem), tiles = delta_hopper.make(config), {}
        forms["decay"] = _of_tokens(forms["decay"], problem)
    tiles |= dict(q=config.key, k=config.key, v=config.value) | ({} if varlen else {"out": config.value})

    def array(name):
        return tensor(at(0, forms[name]), tiles[name], 1, 3, unit=1) if name in tiles else at(0, forms[name])

    blocks = math.ceil(width / config.consumers)
    return launch(kernel, math.prod(pairs) * blocks, config.threads, shared=smem).bind(
        *map(array, delta_hopper.ARRAYS), problem.seqlen, blocks, problem.key_heads, problem.group, problem.scale
    )


def _of_tokens(decay: Form, problem: Problem) -> Form:
    """A decay of heads as one of each token, 0 bytes apart."""
    if len(decay.shape) == 3:
        return decay
    shape = problem.batch, problem.seqlen, problem.heads
    return form(shape, (0, 0, *decay.strides), decay.dtype, decay.device, decay.itemsize)
