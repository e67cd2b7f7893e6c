"""`python -m attention inspect`: what every shipped kernel compiles to, without a GPU.

A row is {kernel, config, lines} and the fields of tiles.inspect.Figures. `lines` counts the kernel and its helpers without
blanks, comments and docstrings; `instructions` counts SASS mnemonics; `digest` is a digest of the SASS: no two rows have the
same. A row whose source has not changed since it was last compiled is read from disk (tiles.inspect.figures).

The configurations are listed by each kernel's module, `space(target, everything)`, which decides whether they are legal; by
those that run before or after the main kernels of backward for these kernels' configurations, `space_around`."""

import ast
import functools
import importlib
import inspect
import itertools
import json
import multiprocessing
import sys
import textwrap
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType

from tiles.inspect import figures
from tiles.launching.arguments import signature
from tiles.targets import parse_target

from .parts.backward.config import BackwardConfig

KERNELS = {  # modules of the folders of kernels/, and of parts/
    "forward": "forward_ampere forward_hopper forward_fp8_hopper transpose_values key_norms parts.block_masks",
    "backward": """backward_preprocess backward_ampere backward_hopper backward_narrow_hopper backward_folded_hopper
        backward_wide_hopper backward_wide_queries_hopper backward_convert_dq backward_combine sink_gradient norm_gradients
        bias_gradient bias_gradient_hopper element_gradients""",
    "decode": "decode_ampere decode_hopper decode_combine",
    "projected": "rotary_rows",
    "mla_decode": "mla_ampere mla_hopper mla_fp8 mla_combine",
    "append": "cache_write",
    "quantize": "cache_quantize",
    "linear": """chunk_ampere chunk_hopper gla_ampere gla_hopper gla_states_hopper gla_recent_states_hopper
        channel_decayed_keys_ampere channel_states_ampere channel_gradients_ampere channel_gradients_hopper
        channel_pairs_ampere mamba2_shared_heads_hopper chunk_cluster_hopper chunk_decays compose_final_state
        compose_segment_states linear_gradients_hopper shared_heads_gradients_hopper gate_gradient gate_sums sum_head_groups
        mamba2_gradients channel_gate_values""",
    "delta": """delta_hopper delta_states_hopper kda_hopper kda_states_hopper delta_compose_states_hopper
        delta_transform_hopper delta_walk_hopper delta_walk_states_hopper kda_transform_hopper kda_walk_hopper
        delta_chunk_states_hopper delta_gradients_hopper delta_inverse_hopper delta_chains_hopper
        delta_segment_gradients_hopper packed_tails delta_inverse_ampere delta_walk_ampere delta_state_gradients_ampere
        delta_gradients_ampere delta_channel_inverse_ampere delta_channel_gradients_ampere delta_channel_inverse_hopper
        delta_channel_cuts_hopper delta_channel_chains_hopper delta_channel_outputs_hopper
        delta_channel_state_gradients_hopper
        delta_channel_block_gradients_hopper delta_channel_gradients_hopper""",
    "short_conv": "short_conv short_conv_backward",
    "gated_norm": "gated_norm gated_norm_gradients",
    "based": "based_hopper based_states_hopper based_gradients based_gradients_hopper",
    "hedgehog": """hedgehog_hopper hedgehog_feature_gradients hedgehog_states hedgehog_gradients
        hedgehog_query_gradients_hopper hedgehog_key_gradients_hopper hedgehog_feature_sums""",
    "tokens": "linear_token_loop normalizer_gradients gate_gradient_token_loop delta_gradient_token_loop copy_rows",
}

FOLDERS = {file.stem: file.parent.name for file in (Path(__file__).parent / "kernels").glob("*/*.py")}  # {module: folder}


def _module(name: str) -> ModuleType:
    return importlib.import_module(f".{name}" if "." in name else f".kernels.{FOLDERS[name]}.{name}", __package__)


MODULES = {family: tuple(map(_module, names.split())) for family, names in KERNELS.items()}
SHOWN_MNEMONICS = ("HGMMA", "HMMA", "UTMALDG", "LDGSTS", "LDSM", "MUFU", "FFMA", "LDL", "STL")  # in the table; --json has all
KERNEL_DECORATORS = "inlined", "cuda.jit"  # decorators of device functions and kernels


def configurations(everything=False, arch="sm_90a", only=()):
    """(kernel name, module, config) of each configuration that is shipped for an architecture, from the modules' `space`. only:
    texts that must all occur in the kernel's, its module's or the configuration's name."""
    target = parse_target(arch)
    for family, modules in MODULES.items():
        shipped = {module: list(module.space(target, everything)) for module in modules if hasattr(module, "space")}
        mains = [config for configs in shipped.values() for config in configs if isinstance(config, BackwardConfig)]
        for module in modules:
            for config in shipped[module] if module in shipped else module.space_around(mains, everything):
                if all(text in f"{family} {module.__name__} {config}" for text in only):
                    yield family, module, config


@functools.cache
def lines(make) -> int:
    """How many lines the kernel that `make` writes and its helpers in any module have, without blanks, comments and
    docstrings."""
    helpers, pending = set(), [make]
    while pending:
        item = inspect.unwrap(pending.pop())
        if item not in helpers:
            helpers.add(item)
            if inspect.isfunction(item):  # a class's own helpers are its methods
                named = [inspect.getmodule(item).__dict__.get(name) for name in _names(item.__code__)]
                pending += [x for x in named if callable(x) and getattr(x, "__module__", "").startswith(__package__)]
    return sum(_kernel_lines(textwrap.dedent(inspect.getsource(x))) for x in helpers)


def _names(code: CodeType) -> Iterator[str]:
    """The globals and attributes that a function's code and its inner functions read."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _kernel_lines(source: str) -> int:
    """How many lines of kernel code a function's or class's source has."""
    used: set[int] = set()
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef) and any(
            ast.unparse(x).startswith(KERNEL_DECORATORS) for x in function.decorator_list
        ):
            body = function.body[1:] if ast.get_docstring(function) else function.body
            for node in [*function.decorator_list, function.args, *body]:
                used.update(n.lineno for n in ast.walk(node) if hasattr(n, "lineno"))
            used.add(function.lineno)
    return len(used)


def row(name, module, config, arch) -> dict:
    """Compile one configuration, unless its figures are cached, and describe the result."""
    kernel, smem = module.make(config)
    measured = figures(kernel, signature(kernel), arch, smem, config.threads)
    described = {"kernel": name, "config": str(config), "lines": lines(getattr(type(config), "make", module.make))}
    return {**vars(measured), **described}


def has_faults(one: dict) -> bool:
    """Does the row's kernel have spills, local memory or warnings?"""
    return bool(one["spill_bytes"] or one["local_bytes"] or one["warnings"])


def _nth_row(selection, n) -> dict:
    """The row of the n-th of these configurations."""
    name, module, config = next(itertools.islice(configurations(*selection), n, None))
    return row(name, module, config, selection[1])


def rows(everything=False, arch="sm_90a", jobs: int | None = 1, only: tuple[str, ...] = ()) -> Iterator[dict]:
    """A row for each configuration, in order, compiled by `jobs` processes, by default one for each core."""
    selection = everything, arch, only
    count = sum(1 for _ in configurations(*selection))
    if jobs == 1:
        yield from map(partial(_nth_row, selection), range(count))
    else:
        with multiprocessing.get_context("spawn").Pool(jobs) as pool:
            yield from pool.imap(partial(_nth_row, selection), range(count))


def no_rows_message(everything: bool, arch: str, only: Sequence[str]) -> str:
    """The error message if no configuration of an architecture has all of these texts in its name; "" if one has."""
    if next(configurations(everything, arch, only), None):
        return ""
    texts = " and ".join(map(repr, only))
    count = sum(1 for _ in configurations(True, arch, only))
    names = dict.fromkeys(name for name, *_ in configurations(True, arch))
    advice = f"with --all there are {count}" if count else f"kernels are {', '.join(names)}; without --only all rows are listed"
    return f"--only: no row for {arch} has {texts} in its kernel's, its module's or its configuration's name; {advice}"


def main(arch="sm_90a", everything=False, check=False, as_json=False, jobs: int | None = None, only=()) -> int:
    """Print the rows. The exit code is 1 if `check` finds a spill, local memory, a warning, or two rows with the same code; 2
    if there are no such rows."""
    if none := no_rows_message(everything, arch, only):
        print(f"python -m attention inspect: error: {none}", file=sys.stderr)
        return 2
    printed: list[dict] = []
    first: dict[str, str] = {}  # digest: the first row that has it
    for one in rows(everything, arch, jobs, tuple(only)):
        printed.append(one)
        title = f"{one['kernel']:8} {arch:7} {one['config']:36}"
        if (other := first.setdefault(one["digest"], title)) != title:
            one["warnings"].append(f"the same code as {other}")
        if not as_json:
            counts = " ".join(f"{m} {one['instructions'].get(m, 0)}" for m in SHOWN_MNEMONICS)
            print(
                f"{title} {one['registers']:4} registers {one['spill_bytes']:4} spilled "
                f"{one['local_bytes']:4} local {one['shared_bytes']:7} shared {one['lines']:4} lines   {counts}",
                *one["warnings"],
                sep="\n    ",
                flush=True,
            )
    if as_json:
        print(json.dumps(printed, indent=1))
    return int(check and any(map(has_faults, printed)))
