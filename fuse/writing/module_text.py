"""Generated modules: source that can be read, kept and run, and that is what a call runs.

`assemble` makes a module of several kernels (kernel_text.py); `load` executes it."""

from __future__ import annotations

import functools
import hashlib
import linecache
import re
import symtable
from collections.abc import Iterable, Sequence
from types import ModuleType

import ops
import tiles
from tiles.calls.plan import LruTable

from ..language.names import unused
from .kernel_text import KernelText
from .lines import WIDTH, break_imports, break_lines, cut_at_commas, format_assignments
from .module_names import free_names, global_names

MODULE_OF = {name: "tiles" for name in tiles.__all__} | {name: "ops" for name in ops.__all__}
MODULE_OF |= {"cuda": "numba", "float32": "numpy", "int32": "numpy", "repeated": "tiles.launching.frameworks"}
MODULE_OF |= {"drop_threshold": "attention.dropout"}
MODULE_OF |= {name: "ops.cluster_sum" for name in ("ClusterSum", "RowSums", "max_over_cluster", "sum_over_cluster")}
MODULES = 1024  # modules that are remembered
KERNELS = LruTable(MODULES)  # compiled kernels, by their names and code


def rename_globals(name: str, kernels: Sequence[tuple[str, KernelText]]) -> list[tuple[str, KernelText]]:
    """The kernels of a module, (name, KernelText) of each, with new names for the globals and helpers of all but the last one.
    name: that of the function, with which the kernels' names begin."""
    last = next((text for _, text in kernels[::-1] if text.kernel), None)
    renamed = [{} if text is last else _make_marks(kernel.removeprefix(f"{name}_"), text) for kernel, text in kernels]
    return [
        (kernel, text.with_names(functools.partial(_apply_marks, marks=marks)))
        for (kernel, text), marks in zip(kernels, renamed)
    ]


def outline(kernels: Sequence[tuple[str, KernelText]], parameters: Sequence[str], views: Sequence[str]) -> str:
    """All code of a module as Python parses it, whatever its line breaks."""
    bodies, launches = list[str](), [*views]
    for kernel, text in kernels:
        bodies += [*text.globals, *text.helpers]
        launches += [*text.before, *(f"{name} = {value}" for name, value in text.counts)]
        if text.kernel:
            bodies += [
                f"@cuda.jit(launch_bounds=({text.bounds}))",
                f"def {kernel}({', '.join(one for one, _ in text.arguments)}):",
            ]
            bodies += [f"    {line}" for line in text.kernel]
            launches.append(f"tiles.launch({kernel}, {text.launch})({', '.join(value for _, value in text.arguments)})")
    return "\n".join([*bodies, f"def launch({', '.join(parameters)}):", *(f"    {line}" for line in launches)])


def assemble(
    title: str, name: str, kernels: Sequence[tuple[str, KernelText]], parameters: Sequence[str], views: Sequence[str] = ()
) -> str:
    """The text of a module. title: its docstring. name: the name of the function. kernels: (name, KernelText) of each kernel,
    in the order of their launches. parameters: those of the module's `launch`; arrays that are written come last. views: lines
    `name = expression` that make views of them; a view that is used once is written where it is used."""
    constants, bodies, launches = list[str](), list[str](), list[str]()
    used_names = {*parameters, *(kernel for kernel, _ in kernels)}
    for kernel, text in kernels:
        constants += text.globals
        launches += [f"    {line}" for line in [*text.before, *format_assignments(text.counts)]]
        if not text.kernel:
            continue
        bodies += ["", "", *text.helpers] if text.helpers else []
        bodies += ["", "", f"@cuda.jit(launch_bounds=({text.bounds}))"]
        bodies += [f"def {kernel}({', '.join(one for one, _ in text.arguments)}):"]
        bodies += [f"    {line}" for line in text.kernel]
        arguments = ", ".join(value for _, value in text.arguments)
        launches += [f"    {line}" for line in _call(kernel, text.launch, arguments, used_names)]
    named = dict(view.split(" = ", 1) for view in views)
    for view_name, value in reversed(named.items()):  # a view before its base
        inside = [re.sub(rf"\b{view_name}\b", lambda _: value, one) for one in launches]
        users = re.findall(rf"\b{view_name}\b", "\n".join([*named.values(), *launches]))
        if len(users) <= 1 and all(len(one) <= WIDTH or one in launches for one in inside):
            named = {
                x: re.sub(rf"\b{view_name}\b", lambda _: value, expression) for x, expression in named.items() if x != view_name
            }
            launches = inside
    docstring = f'    """{name}, on arrays of any framework; the last arrays are written."""'
    ahead = [f"    {line}" for line in format_assignments(named.items())]
    launches = ["", "", f"def launch({', '.join(parameters)}):", docstring, *ahead, *launches]
    body = list(break_lines([*constants, *bodies, *launches]))
    body = body if constants else body[1:]
    end = "\n" if "\n" in title else ""
    return "\n".join([*f'"""{title}{end}"""'.splitlines(), "", *_imports("\n".join(body)), "", *body]) + "\n"


def _call(kernel: str, launch: str, arguments: str, used_names: Iterable[str]) -> list[str]:
    """The lines of a launch: one line if it fits. Otherwise the launch and the call get a line each, and so do the number of
    blocks and some arguments if they must. used_names: names that these may not have."""
    line = f"tiles.launch({kernel}, {launch})({arguments})"
    if len(line) <= WIDTH - 4:
        return [line]
    run, arguments_name, count = (unused(one, used_names) for one in ("run", "given", "blocks"))
    if len(f"{run} = tiles.launch({kernel}, {launch})") > WIDTH - 4 and not re.search(rf"\b{count}\b", launch):
        blocks, *others = cut_at_commas(launch)
        return [f"{count} = {blocks}", *_call(kernel, ", ".join([count, *others]), arguments, used_names)]
    arrays = cut_at_commas(arguments)
    for n in range(len(arrays) - 1, 1, -1):
        first, rest = f"{arguments_name} = {', '.join(arrays[:n])}", f"{run}(*{arguments_name}, {', '.join(arrays[n:])})"
        if len(arguments) > WIDTH - 8 and "(" in arrays[n - 1] and max(len(first), len(rest)) <= WIDTH - 4:
            return [f"{run} = tiles.launch({kernel}, {launch})", first, rest]
    return [f"{run} = tiles.launch({kernel}, {launch})", f"{run}({arguments})"]


def _imports(text: str) -> list[str]:
    """The lines that import the names that the text uses."""
    names = free_names(symtable.symtable(text, "", "exec"))
    imports_of: dict[str, list[str]] = {}
    for name in sorted(names & MODULE_OF.keys()):
        imports_of.setdefault(MODULE_OF[name], []).append(name)
    others, own_packages = list[str](), [f"import {one}" for one in ("attention", "tiles") if one in names]
    for module, imported in sorted(imports_of.items()):
        (own_packages if module.split(".")[0] in ("attention", "ops", "tiles") else others).append(
            f"from {module} import {', '.join(imported)}"
        )
    parts = [["import math"] if "math" in names else [], others, list(break_imports(own_packages))]
    return [line for part in parts if part for line in ("", *part)][1:]


def _make_marks(label: str, text: KernelText) -> dict[str, str]:
    """{name: new name} for the globals and helpers of a kernel that is not the module's last one, so that no two kernels use
    one name."""
    defined = global_names([*text.globals, *text.helpers])
    return {name: f"{label.upper() if name.isupper() else label}_{name}" for name in defined}


def _apply_marks(line: str, marks: dict[str, str]) -> str:
    return re.sub(r"(?<![\w.])[^\W\d]\w*(?!\w*=[^=])", lambda match: marks.get(match[0], match[0]), line) if marks else line


@functools.lru_cache(MODULES)
def load(text: str, name: str, kernels: tuple[tuple[str, str], ...] = ()) -> ModuleType:
    """The module of this text, executed once. Errors and the interpreter look its lines up in linecache. kernels: (name, code)
    of kernels: one that another module has, too, is the same object, which is compiled once."""
    file = f"<fuse {name} {hashlib.sha256(text.encode()).hexdigest()[:12]}>"
    module = ModuleType(name)
    module.__file__ = file
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    exec(compile(text, file, "exec"), vars(module))
    for kernel in kernels:
        vars(module)[kernel[0]] = KERNELS.get(kernel) or vars(module)[kernel[0]]
        KERNELS.put(kernel, vars(module)[kernel[0]])
    return module
