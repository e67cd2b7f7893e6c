"""The gaps of many_rows.jinja: a kernel's arrays and products, by their names, and the lines of code that store tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ...language.expression_text import ExpressionWriter
from ...language.graph import has_columns, is_matrix
from ...language.names import array
from ...language.term_views import view_base
from ...language.terms import Term
from ...writing.kernel_text import DTYPES
from .product_text import (
    AdjacentProduct,
    KernelArray,
    SoftmaxPartials,
    extent,
    index,
    lead,
    name_lengths,
    read_expression,
    write_selection,
)

STEP = 64  # extent of a tile along k
RASTER_GROUP = 16  # rows of tiles that are computed together, and share weights in L2
NAMES = "batch tall more last rank row col part n m me y width selected column".split()  # variables of the kernel
NAMES += "following state initial greatest higher total picked scores is_picked chosen end".split()


class StoredResult(NamedTuple):
    """A result of the epilogue. slot: the shared tile that it is stored from. array: the parameter that it goes to. made: its
    expression."""

    slot: str
    array: str
    expression: str


class PrefetchedTile(NamedTuple):
    """A tile that the epilogue reads. One part of it is used while the next one is loaded. spec: the type of a part in
    registers. first, next_part: the expressions that load a tile's first part, and the part after the n-th."""

    name: str
    spec: str
    first: str
    next_part: str

    @classmethod
    def from_term(cls, y: Term, name: str, dtype: str) -> PrefetchedTile:
        spec = f"rt(16, PART, {DTYPES.get(view_base(y).stored_dtype(dtype), 'fp32')})"
        first, next_part = (
            f"warpgroup.load({array(name)}, {spec}, {index(y, 'ROWS * row', f'PART * {col}')})"
            for col in ("col", "(col + following)")
        )
        return cls(name, spec, first, next_part)


def template_gaps(kernel: Any, parameters: dict[Term, str], local_names: dict[Term, str]) -> dict[str, Any]:
    """The values of the gaps of many_rows.jinja, by name."""
    dtype, s = DTYPES[kernel.dtype], kernel.schedule
    several = len(kernel.products) > 1
    products = []
    for w in kernel.products.values():
        parameter = parameters[w.array]
        products.append(KernelArray(f"acc_{parameter}" if several else "acc", array(parameter), parameter, lead(w.array)))
    writer = ExpressionWriter({x: parameters[x] for x in kernel.leaves}, local_names)
    writer.names |= {x: p.name for x, p in zip(kernel.products, products)}
    selection = write_selection(writer, kernel, parameters)
    tile_rows = "warpgroup.row_index(rt(16, PART, fp32).col_vec) + ROWS * row"
    tile_columns = "col_index(rt(16, PART, fp32).row_vec) + PART * (col + n)"
    lengths = name_lengths(writer, kernel, parameters)
    if kernel.extension:
        writer.names[kernel.extension.joint] = products[0].name
    computes = any(x not in writer.names for x in kernel.results)
    loads_ahead = not kernel.softmax_partials and kernel.batch is None  # a batch leaves no registers for prefetching
    ahead = [y for y in kernel.epilogue_inputs if loads_ahead and y.operation != "repeat_columns" and is_matrix(y)]
    prefetched = [PrefetchedTile.from_term(y, parameters[y], kernel.dtype) for y in ahead]
    others = [
        KernelArray(parameters[y], array(parameters[y]), _read_operand(y, array(parameters[y]))) for y in kernel.epilogue_inputs
    ]
    used_names = {*parameters.values(), *NAMES}
    epilogue = selection.lines(tile_rows, tile_columns) if selection else []
    epilogue += [
        f"{one.name} = fp32({one.name})" if one.name in [c.name for c in prefetched] else f"{one.name} = {one.loaded}"
        for one in others
    ]
    epilogue += writer.assignments(kernel.results, used_names)
    x = KernelArray(parameters[kernel.x], array(parameters[kernel.x]), lead=lead(kernel.x))
    numbers = dict(lengths)
    numbers |= {"each": f"{parameters[kernel.expert_stack]}.shape[1]"} if kernel.expert_stack is not None else {}
    numbers |= {parameters[y]: parameters[y] for y in kernel.numbers}
    transposed = kernel.weights[0].transposed
    axis = "rows" if transposed else "cols"
    tile = "W_PART" if several else "W"
    extension = kernel.extension
    has_extension = bool(extension and not extension.narrow)
    names = [parameters[kernel.x], *([parameters[extension.left]] if extension else [])]
    operands = [(array(name), f"tensor({name}, X)") for name in names]
    parts = AdjacentProduct.from_kernel(kernel, parameters)
    weights = [p.loaded for p in products] + [part.weight for part in parts[1:]]
    weights += [parameters[extension.weight.array]] if extension else []
    fill_columns, fill_depth = s.columns // len(products), STEP  # columns, and rows along k, of one fill
    if not several:
        fill_columns, fill_depth = (fill_columns // s.blocks, STEP) if transposed else (fill_columns, STEP // s.blocks)
    tile_shapes = [(s.columns, STEP), *[(fill_columns, fill_depth)] * (several or s.blocks > 1)]
    tile_types = [f"st({', '.join(map(str, one if transposed else one[::-1]))}, {dtype})" for one in tile_shapes]
    operand_tiles = (
        f"X, W{', W_PART' * (len(tile_shapes) > 1)} = st(CONSUMERS * ROWS, {STEP}, {dtype}), {', '.join(tile_types)}"
    )
    weight_tile = "W_PART" if s.blocks > 1 else tile
    operands += [(array(name), f"tensor({name}, {weight_tile})") for name in weights]
    result, inner = parameters[kernel.roots[0]], f"-(-{extent(kernel.x, x.name, -1)} // X.cols)"
    folds = SoftmaxPartials.from_kernel(kernel, parameters)
    high, wide = extent(kernel.root, result, -2), folds.end if folds else extent(kernel.root, result, -1)
    batch = kernel.batch is not None
    tall = "(BLOCKS * X.rows)" if s.blocks > 1 else "X.rows"
    counted = [("tall" if batch else "rows", f"-(-{high} // {tall})")]
    counted += [(part.end, f"{part.before and part.before + ' + '}-(-{part.result}.shape[1] // W.{axis})") for part in parts]
    counted += [("cols", f"-(-{wide} // {tile}.{axis})")] if not parts else []
    counted += [("rows", f"tall * {result}.shape[0]")] if batch else []
    counted += [("more", f"-(-{names[1]}.shape[1] // X.cols)")] if has_extension else []
    counted += [
        (
            "steps",
            f"max({2 * s.parts - (not prefetched)}, {inner}{' + more' if has_extension else ' + 1' if extension else ''})",
        )
    ]
    arrays = {o.array: o.name for o in others} | dict(selection.arguments if selection else [])
    ends = [part.end for part in parts[:-1]]
    extra_arguments = "".join(f", {one}" for one in (*arrays, *numbers, *ends, *(one.name for one in prefetched)))
    counts = ["rows", *["tall"] * batch, *ends, "cols", "steps", *["more"] * has_extension]
    outs = folds.arguments if folds else [(array(parameters[y]), f"tensor({parameters[y]}, Y_PART)") for y in kernel.roots]
    results = [StoredResult("" if folds else f"y_{n}" if n > 1 else "y", output, writer.expression(y))
               for n, ((output, _), y) in enumerate(zip(outs, kernel.results), 1)]  # fmt: skip
    plain = not (folds or computes or parts)
    slots = [] if folds else [one.slot for one in results]
    output = ", ".join([*(name for name, _ in outs), *slots])
    blocks = f"tiles.persistent_blocks(rows * cols, {result}{', cluster=BLOCKS' * (s.blocks > 1)})"
    leaves = (
        _write_partials(folds, s.parts, extra_arguments)
        if folds
        else _write_sends(s.parts, several, extra_arguments, "batch, " * batch, output, plain, prefetched)
    )
    arguments = [*operands, *outs, *arrays.items()]
    return {
        "schedule": s, "raster_group": RASTER_GROUP, "operands": operand_tiles, "dtype": dtype, "y": result,
        "products": products, "transposed": transposed, "form": "ABt" if transposed else "AB",
        "x": x, "arrays": list(arrays), "numbers": list(numbers), "batch": batch, "lead": lead(kernel.root), "partials": folds,
        "plain": plain, "store_lines": leaves, "adjacent_products": parts, "targets": output, "ends": ends,
        "slots": slots, "results": results,
        "extension": extension and {"x": operands[1][0], "w": operands[-1][0], "narrow": extension.narrow},
        "computes": computes, "epilogue": epilogue, "prefetched": prefetched,
        "arguments": [*arguments, *((n, n) for n in counts), *numbers.items()],
        "counts": counted,
        "clusters": s.blocks > 1, "row": "BLOCKS * row + rank" if s.blocks > 1 else "row",
        "turn": "persistent_tile(r, BLOCKS)" if s.blocks > 1 else "persistent_tile(r)",
        "launch": f"{blocks}, THREADS, shared=smem, {'cluster=BLOCKS, ' * (s.blocks > 1)}overlaps_previous=True",
        "bounds": "THREADS, 1",
    }  # fmt: skip


def _write_sends(
    parts: int, several: bool, extra_arguments: str, lead: str, outputs: str, plain: bool, prefetched: Sequence[PrefetchedTile]
) -> list[list[str]]:
    """For each part of a tile, the lines that store it. several: is a part of each product needed? plain: is the product stored
    without an epilogue? prefetched: the tiles that the epilogue loads ahead."""
    if plain:
        y, slot = outputs.split(", ")
        at = [f"({lead}row, {_nth('col', n)})" for n in range(parts)]
        return [[f"warpgroup.send({y}, {one}, {slot}, columns(last, PART, {n}))"] for n, one in enumerate(at)]
    targets = "".join(f"{one.name}, " for one in prefetched)[:-2]
    indices = [f"{n}, {parts + n}" if several else f"{n}" for n in range(parts)]
    return [
        [f"{targets}{' = ' * bool(targets)}send({outputs}, {lead}row, col, last, {one}{extra_arguments})"] for one in indices
    ]


def _write_partials(folds: SoftmaxPartials, parts: int, extra_arguments: str) -> list[list[str]]:
    """For each part of a tile, the lines that fold it into the softmax statistics of its rows, which are written after every
    two parts."""
    lines, call_arguments = list[list[str]](), f"{'chosen, ' * bool(folds.index_parameter)}end{extra_arguments}"
    for n in range(parts):
        lines.append([f"state = update({'state' if n % 2 else 'initial'}, row, col, last, {n}, {call_arguments})"])
        if n % 2:
            lines[-1].append(f"store_partials({', '.join(folds.arrays)}, state, row, {_nth('col // 2', n // 2)})")
    return lines


def _nth(first: str, n: int) -> str:
    return f"{first} + {n}" if n else first


def _read_operand(y: Term, name: str) -> str:
    """The expression that reads another operand of the epilogue, for the part of a tile that is being stored."""
    row, col = "ROWS * row", "PART * (col + n)"
    if y.operation == "repeat_columns":
        return f"warpgroup.load({name}, rt(16, PART, fp32).col_vec, ({row}, divmod({col}, each)[0]), cols=0)"
    if not any(y.axes[-2:]):
        return read_expression(y, name, "", row, col)
    if is_matrix(y):
        return f"warpgroup.load({name}, rt(16, PART, fp32), {index(y, row, col)})"
    if has_columns(y):
        return f"load({name}, rt(16, PART, fp32).row_vec, {index(y, '0', col)})"
    return f"warpgroup.load({name}, rt(16, PART, fp32).col_vec, {index(y, row, '0')}, cols={y.ndim - 2})"
