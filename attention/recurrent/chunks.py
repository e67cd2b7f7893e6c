"""From a problem of linear attention to launches of the kernels of chunks (chunk_hopper.py, chunk_ampere.py, gla_hopper.py).

There is one, or two where few long sequences are cut into segments, and one before it where a normalizer is wanted.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

from tiles import launch, tensor
from tiles.arrays import FORMS, Form, at, c_ordered, form
from tiles.device import processors
from tiles.dtypes import bf16, fp16, fp32
from tiles.launch import Bound, Interpreted

from ..softmax.forward import choose
from ..softmax.problem import piece
from .kernels import chunk_ampere, chunk_hopper, gla_hopper
from .problem import Problem

DTYPES = {"bfloat16": bf16, "float16": fp16, "float32": fp32}
KEY_DIMS = 64, 128, 256
TWICE = 1.6  # what two passes cost: one reads everything, the other keys and values
STATE = 1.5  # chunks that could be walked while the state of one segment is added up
LEAST = 8  # chunks of a segment
ARRAYS = "q k v z gates rate bias skip divisor out start local state total ends".split()  # of the kernel, in order
TILED = "q", "k", "v", "z"
FACTORS = 2**-6, 1  # scales that scores in fp16 may be multiplied with: neither too small nor too large for them
NAMES = {  # what the caller gives calls some of them
    "linear": {"gates": "decay", "start": "initial_state", "ends": "cu_seqlens"},
    "mamba2": dict(
        q="C", k="B", v="x", gates="dt", rate="A", bias="dt_bias", skip="D", start="initial_states", ends="cu_seqlens"
    ),
}


class Passes(NamedTuple):
    """What solves problems of one form. scratch: {name: (shape, dtype)}, memory in which a pass leaves something for the next.
    launches: each with the names of the arrays whose addresses it takes."""

    scratch: dict[str, tuple[tuple[int, ...], str]]
    launches: list[tuple[Bound | Interpreted, list[str]]]

    def prepare(self, stream: int, where: dict[str, int]) -> Callable[[], None]:
        """A function that launches them. where: addresses by name, 0 or nothing for what is absent."""
        ready = [bound.prepare(stream, *(where.get(name, 0) for name in names)) for bound, names in self.launches]
        if len(ready) == 1:
            return ready[0]

        def run():
            for one in ready:
                one()

        return run


def segments(items: int, chunks: int, places: int) -> int:
    """Into how many parts to cut each sequence, if there are `items` pieces of work of so many chunks, and `places` for blocks
    at once: what ends soonest."""

    def time(parts):
        walked = chunks / parts * (1 if parts == 1 else TWICE) + (parts - 1) * STATE
        return math.ceil(items * parts / places) * walked

    return min(range(1, max(1, min(chunks // LEAST, places)) + 1), key=time)


def copied(problem: Problem, family: str | None, *pointers: int) -> int:
    """The bytes that cp.async copies at once of arrays at these addresses: chunk_ampere.py's way. 0 where
    TMA brings whole tiles: on Hopper and in the interpreter, if everything is aligned to 16 bytes. family: see forward.choose,
    which raises ValueError."""
    aligned = piece(problem, *pointers)
    return 0 if choose(problem, aligned, family, problem.member) == "sm_90" else aligned


@functools.lru_cache(FORMS)
def passes(problem: Problem, softplus: bool = False, keep: bool = True, parts: int | None = None, by_copies: int = 0) -> Passes:
    """The launches for a problem; softplus: of dt; keep: store the last states. parts: segments of each sequence, chosen by
    default. by_copies: see `copied`; 0 for decays of channels."""
    decay = problem.forms.get("decay")
    if decay is not None and len(decay.shape) == 4:
        return _by_channel(problem, keep)
    forms, width = _forms(problem, keep, by_copies), math.ceil(problem.value_dim / chunk_hopper.COLUMNS)
    config = functools.partial(_config, problem, softplus=softplus, by_copies=by_copies)
    main, place = config(width), problem.device
    if parts is None:
        parts = _parts(problem, main, width)
    names = {name: NAMES[problem.member].get(name, name) for name in ARRAYS}
    names |= {} if main.gated else {"z": names["v"]}
    scratch: dict[str, tuple[tuple[int, ...], str]] = {}
    launches: list[tuple[Bound | Interpreted, list[str]]] = []
    if parts > 1:
        pairs = problem.sequences, problem.heads, parts - 1
        scratch |= {"local": ((*pairs, problem.value_dim, problem.key_dim), "float32"), "total": ((*pairs, 1), "float32")}
        forms |= {name: c_ordered(*what, place) for name, what in scratch.items()}
        states = config(width, states=True)
        anew = {"start": c_ordered((*pairs[:2], 0, 0), "float32", place), "out": forms["v"]}
        launches.append((_bind(states, problem, forms | anew, width, parts, parts - 1), [*names.values()]))
    if problem.normalize:
        forms["divisor"] = c_ordered(forms["v"].shape[:3], "float32", place)
        scratch["divisor"] = forms["divisor"].shape, "float32"
        z_shape, start = problem.z_shape if keep else (*problem.z_shape[:2], 0), problem.forms.get("initial_z")
        rows = {
            "start": _spread(start, 2, chunk_hopper.COLUMNS) if start else forms["start"],
            "state": _spread(c_ordered(z_shape, "float32", place), 2, 1),
            "out": forms["divisor"],
        }
        ones, called = config(1, ones=True), {"start": "initial_z", "state": "final_z", "out": "divisor"}
        launches.append((_bind(ones, problem, forms | rows, 1, 1, 1), [*(names | called).values()]))
    launches.append((_bind(main, problem, forms, width, parts, parts), [*names.values()]))
    return Passes(scratch, launches)


def _forms(problem: Problem, keep: bool, by_copies: int = 0) -> dict[str, Form]:
    """The kernel's arrays. What was not given is empty: loads from it are 0, and stores to it left out."""
    batch, heads, pairs = problem.batch, problem.heads, (problem.sequences, problem.heads)
    empty: dict[str, tuple[int, ...]] = {name: (heads, 0) for name in ("rate", "bias", "skip")} | {
        name: (batch, 0, heads) for name in ("gates", "divisor")
    }
    empty |= {"start": (*pairs, 0, 0), "local": (*pairs, 0, 0, 0), "total": (*pairs, 0, 0)}
    forms = {name: c_ordered(shape, "float32", problem.device) for name, shape in empty.items()}
    forms["ends"] = c_ordered((0,), "int32", problem.device)
    forms["state"] = c_ordered(problem.state_shape if keep else (*pairs, 0, 0), "float32", problem.device)
    called = {NAMES[problem.member].get(name, name): name for name in ARRAYS}
    forms |= {called[name]: x for name, x in problem.forms.items() if name in called}
    forms.setdefault("z", forms["v"])
    if by_copies and len(forms["gates"].shape) == 1:  # each token's is the head's
        forms["gates"] = _spread(_spread(forms["gates"], 0, problem.seqlen), 0, batch)
    for name, extent in (
        ("gates", chunk_hopper.CHUNK),
        ("rate", chunk_hopper.CHUNK),
        ("bias", chunk_hopper.CHUNK),
        ("skip", problem.value_dim),
    ):
        if len(forms[name].shape) == 1:  # one number a head, as if there were one for each token or column
            forms[name] = _spread(forms[name], 1, extent)
    if problem.member == "linear":  # whose states are not transposed, as the kernel's and Mamba-2's are
        forms |= {name: _swapped(forms[name]) for name in ("start", "state")}
    return forms


def _config(
    problem: Problem, width: int, softplus: bool, by_copies: int, states: bool = False, ones: bool = False
) -> chunk_hopper.Config:
    """The kernel for values of `width` blocks of columns."""
    key_dim, given = min(n for n in KEY_DIMS if n >= problem.key_dim), problem.forms
    decay = given.get("decay")
    make = functools.partial(chunk_ampere.Config, piece=by_copies) if by_copies else chunk_hopper.Config
    return make(
        key_dim,
        consumers=2 if problem.group * width % 2 == 0 and key_dim <= chunk_hopper.WIDE and not by_copies else 1,
        dtype=DTYPES[problem.dtype],
        gate="step" if "dt" in given else None if decay is None else "token" if by_copies or len(decay.shape) > 1 else "head",
        softplus=softplus,
        skip="D" in given and not states,
        gated="z" in given and not states,
        states=states,
        varlen="cu_seqlens" in given,
        ones=ones,
        divided=problem.normalize and not (states or ones),
        apart=not FACTORS[0] <= problem.scale <= FACTORS[1],
    )


def _parts(problem: Problem, config: chunk_hopper.Config, width: int) -> int:
    """How many segments each sequence is cut into."""
    if isinstance(config, chunk_ampere.Config) and config.key_dim > chunk_hopper.WIDE:
        return 1
    items = problem.sequences * problem.heads * width // config.consumers
    chunks = problem.seqlen * problem.batch // problem.sequences // chunk_hopper.CHUNK
    return segments(items, chunks, config.resident * processors(problem.device))


def _bind(
    config: chunk_hopper.Config, problem: Problem, forms: dict[str, Form], width: int, parts: int, walked: int
) -> Bound | Interpreted:
    """The launch of a kernel."""
    tma = not isinstance(config, chunk_ampere.Config)
    kernel, smem = (chunk_hopper if tma else chunk_ampere).make(config)

    def argument(name: str):
        array = at(0, forms[name])
        if not tma:
            return array
        if name in TILED or (name == "out" and not (config.states or config.ones or config.varlen)):
            return tensor(array, config.key if name in "qk" else config.value, rows=1, cols=3, unit=1)
        return array

    blocks = problem.group * width // config.consumers
    grid = problem.sequences * problem.key_heads * walked * blocks
    sizes = problem.seqlen, blocks, parts, walked, problem.key_heads, problem.group, width, problem.scale
    return launch(kernel, grid, config.threads, shared=smem).bind(*map(argument, ARRAYS), *sizes)


def _by_channel(problem: Problem, keep: bool) -> Passes:
    """The launch for decays of channels."""
    forms, width = _forms(problem, keep), math.ceil(problem.value_dim / chunk_hopper.COLUMNS)
    key_dim, gates = min(n for n in KEY_DIMS if n >= problem.key_dim), DTYPES[forms["gates"].dtype]
    consumers = 2 if width % 2 == 0 and key_dim <= gla_hopper.WIDE else 1
    config = gla_hopper.Config(key_dim, consumers, gates, DTYPES[problem.dtype], "cu_seqlens" in problem.forms)
    kernel, smem = gla_hopper.make(config)
    tiled = {"q": config.key, "k": config.key, "v": config.value, "gates": config.gate}
    if not config.varlen:
        tiled["out"] = config.value

    def argument(name: str):
        array = at(0, forms[name])
        return tensor(array, tiled[name], rows=1, cols=3, unit=1) if name in tiled else array

    names, blocks = "q k v gates out start state ends".split(), width // consumers
    sizes = problem.seqlen, blocks, problem.heads, problem.group, problem.scale
    launched = launch(kernel, problem.sequences * problem.heads * blocks, config.threads, shared=smem)
    called = [NAMES["linear"].get(name, name) for name in names]
    return Passes({}, [(launched.bind(*map(argument, names), *sizes), called)])


def _swapped(x: Form) -> Form:
    """The form with its last two axes swapped."""
    *shape, m, n = x.shape
    *strides, down, across = x.strides
    return form((*shape, n, m), (*strides, across, down), x.dtype, x.device, x.itemsize)


def _spread(x: Form, axis: int, extent: int) -> Form:
    """The form with one more axis, along which all elements are one."""
    shape, strides = (*x.shape[:axis], extent, *x.shape[axis:]), (*x.strides[:axis], 0, *x.strides[axis:])
    return form(shape, strides, x.dtype, x.device, x.itemsize)
