"""The launches that make lists of query tiles for attention.backward."""

from typing import Any

from tiles.launching.arrays import Operand

from ...kernels.softmax.key_block_lists import WARPS, ClassifyBlocks
from ...kernels.softmax.query_tile_lists import BuildQueryLists, RankKeyBlocks
from ...parts.tiling import COUNTS, LIST_HEADER
from .forward_launches import PreparationSteps
from .variant_spec import VariantSpec


def launch_query_lists(before: PreparationSteps, spec: VariantSpec, config: Any, args: dict[str, Any]) -> dict[str, Operand]:
    """Adds launches to `before` that build the lists of query tiles of all key blocks. Returns the lists, the classes that they
    were built from, and with deterministic sums the ranks. args: of the variant and of sequences."""
    batch, heads, kv_heads, q_len, kv_len = before.problem("batch", "heads", "heads_k", "seqlen_q", "seqlen_k")
    by_batch, by_head = spec.lists_vary
    batches = batch if by_batch else 1
    tiles, blocks = -(-q_len // config.rows), -(-kv_len // config.kv)
    class_heads, list_heads = (heads, kv_heads) if by_head else (1, 1)
    classes = before.allocate((batches, class_heads, tiles, blocks), "int8")
    shape = spec.variant, config.rows, config.kv
    unseen = before.allocate((batches, class_heads, tiles, COUNTS * blocks), "int8")
    results = {"lists": before.allocate((batches, list_heads, blocks, LIST_HEADER + tiles), "int32"), "classes": classes}
    classify, build, rank = ClassifyBlocks(*shape, config.axes), BuildQueryLists(*shape), RankKeyBlocks(*shape)
    groups = -(-blocks // WARPS)
    survey_args = {"classes": classes, "unseen": unseen, "groups": groups, "blocks": tiles, "heads": class_heads}
    before.launch(classify, classify, batches * class_heads * tiles * groups, **survey_args, **args, **spec.aux_args)
    extents = {"blocks": blocks, "heads": list_heads, "group": class_heads // list_heads}
    before.launch(build, build, batches * list_heads * blocks, unseen=unseen, **results, **extents, **args)
    if config.deterministic:
        results["ranks"] = before.allocate((batches, list_heads, tiles, blocks), "int32")
        rank_args = {"classes": classes, "ranks": results["ranks"], "tiles": tiles}
        before.launch(rank, rank, batches * list_heads * tiles, **rank_args, **extents, **args)
    return results
