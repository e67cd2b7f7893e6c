"""How the queries that see a key block are split among thread blocks that have the same keys: see backward_combine.py."""

from typing import Any, NamedTuple

from tiles.calls.schema import Problem

from ...kernels.softmax import backward_combine
from ...kernels.softmax.backward_combine import ROWS, Config
from ...parts.backward.config import BackwardConfig
from .forward_launches import PreparationSteps

MIN_TILES = 4  # query tiles that a thread block goes through at least, counted over the heads of its group
MAX_DETERMINISTIC = 8  # with deterministic sums, keys are split only as far as there are no more pairs of batch and partial
COLUMN_MULTIPLE = 8  # partial dK and dV have a multiple of these columns, so that rows are multiples of 16 bytes


class QuerySplit(NamedTuple):
    """How the queries that see a block of keys are divided among thread blocks: into how many groups the query heads that share
    a key head, and into how many splits the query tiles of each group."""

    head_groups: int = 1
    splits: int = 1

    @property
    def partials(self) -> int:
        """The number of thread blocks that have the same keys."""
        return self.head_groups * self.splits


def choose_split(
    problem: Problem, blocks: int, tiles: int, deterministic: bool, longest_first: bool, processors: int
) -> QuerySplit:
    """The QuerySplit of a problem with so many key blocks and query tiles. There should be a thread block for each
    multiprocessor; two where some take up to twice as long as others, and the longest begin first. With deterministic sums no
    length decides, because parts of sequences must have the bits of the whole."""
    batch, heads, kv_heads = problem("batch", "heads", "heads_k")
    group, batch_heads = heads // kv_heads, batch * kv_heads
    if deterministic:
        return split_queries(group, batch_heads, 0, MAX_DETERMINISTIC)
    return split_queries(group, batch_heads * blocks, tiles, processors * (2 if longest_first else 1))


def split_queries(group: int, thread_blocks: int, tiles: int, blocks_to_fill: int) -> QuerySplit:
    """The QuerySplit of a problem with `group` query heads to a key head and `tiles` query tiles, which has so many thread
    blocks unsplit: as many partials as give at most `blocks_to_fill` thread blocks."""
    group_counts = [n for n in range(2, group + 1) if group % n == 0 and n * thread_blocks <= blocks_to_fill]
    head_groups, splits = max([1, *group_counts]), 1
    while (
        2 * splits * head_groups * thread_blocks <= blocks_to_fill
        and 2 * splits * max(1, MIN_TILES * head_groups // group) <= tiles
    ):
        splits *= 2
    return QuerySplit(head_groups, splits)


def partial_arguments(
    before_main: PreparationSteps, after_main: PreparationSteps, config: BackwardConfig, split: QuerySplit
) -> dict[str, Any]:
    """The main kernel's arguments that say how its queries are split, and where it stores dK and dV. If there are several
    partials, memory for them is reserved in `before_main`, and the launch that combines them is put in `after_main`."""
    problem = before_main.problem
    (batch, query_heads, heads), dk, dv = problem("batch", "heads", "heads_k"), problem["dk"], problem["dv"]
    partial_heads, group = heads * split.partials, query_heads // (heads * split.head_groups)
    extents = {"heads": partial_heads, "batch_heads": batch * partial_heads, "group": group}
    args = extents | {"partials": split.partials, "splits": split.splits}
    if split.partials == 1:
        return {"gDK": dk, "gDV": dv, **args}
    keys, columns = dk.form.shape[1], [-(-x.form.shape[3] // COLUMN_MULTIPLE) * COLUMN_MULTIPLE for x in (dk, dv)]
    partial_dk, partial_dv = [before_main.allocate((batch, keys, partial_heads, n), problem.dtype) for n in columns]
    combine = Config(
        split.partials, config.head_dim, config.value_dim, config.dtype, config.vector_bytes, config.overlaps_previous
    )
    arrays, tiles = {"gPartialDK": partial_dk, "gPartialDV": partial_dv, "gDK": dk, "gDV": dv}, -(-keys // ROWS)
    after_main.launch(backward_combine, combine, batch * heads * tiles, tiles=tiles, heads=heads, **arrays)
    return {"gDK": partial_dk, "gDV": partial_dv, **args}
