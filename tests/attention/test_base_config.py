"""attention/parts/base_config.py: what follows from a configuration's fields."""

from dataclasses import dataclass
from typing import ClassVar

import pytest

from attention.parts.base_config import BaseConfig
from attention.parts.bias_tiles import BiasTiles, NoTiles
from attention.parts.sequences import BatchedLayout, PackedLayout
from attention.parts.tiling import ListedTiling, Tiling
from attention.parts.variant import Variant
from tiles import bf16, fp16, static


@static
class BiasByTma(Variant):
    """A variant with a bias that TMA loads."""

    tma_bias = fp16


@dataclass(frozen=True)
class Rows192Config(BaseConfig):
    """The configuration of a family with tiles of 192 queries."""

    rows: ClassVar[int] = 192


PLAIN = Rows192Config(64, 32, bf16, Variant(), 128)


def test_tiles():
    assert [(x.rows, x.cols, x.dtype) for x in (PLAIN.query, PLAIN.key, PLAIN.value)] == [
        (192, 64, bf16), (128, 64, bf16), (128, 32, bf16),
    ]  # fmt: skip


@pytest.mark.parametrize("by_list", [False, True])
def test_tiling(by_list):
    config = Rows192Config(64, 64, bf16, Variant(), 128, by_list=by_list)
    assert type(config.tiling) is (ListedTiling if by_list else Tiling) and ("lists" in config.params.fields) == by_list
    assert (config.tiling.rows, config.tiling.kv, config.tiling.variant) == (192, 128, Variant())
    assert str(config).startswith("D 64 bf16") and ("by list" in str(config)) == by_list and str(config).endswith("192 x 128")


def test_bias_tiles():
    config = Rows192Config(64, 64, bf16, BiasByTma(), 128)
    assert isinstance(PLAIN.bias_tiles, NoTiles) and isinstance(config.bias_tiles, BiasTiles)
    assert (config.bias_tiles.queries, config.bias_tiles.keys, config.bias_tiles.dtype) == (192, 128, fp16)
    assert {*config.params.fields} - {*PLAIN.params.fields} == {*config.bias_tiles.params}


def test_defaults():
    """Batches, no arrays of aux, no lists; further fields are passed by name."""
    assert (PLAIN.seq_layout, PLAIN.axes, PLAIN.by_list) == (BatchedLayout, (), False) and not PLAIN.aux.fields
    assert (
        str(PLAIN).startswith("D 64/32 bf16") and len(Rows192Config(64, 64, bf16, Variant(), 128, axes=(2, 1)).aux.fields) == 2
    )
    packed = Rows192Config(64, 64, bf16, Variant(), 128, seq_layout=PackedLayout)
    assert isinstance(packed.sequences, PackedLayout) and packed.sequences.rows == 192
    with pytest.raises(TypeError):
        Rows192Config(64, 64, bf16, Variant(), 128, PackedLayout)
