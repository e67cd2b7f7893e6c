"""The fields that configurations of forward kernels share besides those of base_config.py: where keys come from, and what
becomes of the output."""

from dataclasses import dataclass, field
from typing import Any

from tiles.launching.arguments import Record, record

from .base_config import BaseConfig
from .key_sources import OneBuffer, PagedKeys
from .sequences import KvCacheLayout


def in_pages(parts: int = 1) -> dict[str, Any]:
    """The fields of a ForwardConfig for keys and values in a paged cache."""
    return {"seq_layout": KvCacheLayout, "kv_source": PagedKeys(parts)}


@dataclass(frozen=True)
class ForwardConfig(BaseConfig):
    """kv_source: where keys and values come from. float32_out: is the output float32? accumulates: is the output combined with
    the one for other keys that is already there?"""

    kv_source: OneBuffer = field(default=OneBuffer(), kw_only=True)
    float32_out: bool = field(default=False, kw_only=True)
    accumulates: bool = field(default=False, kw_only=True)

    @property
    def params(self) -> Record:
        """The record of the kernel's arguments that the parts of BaseConfig and the source of keys read."""
        return record(**super().params.fields, **self.kv_source.params)

    def __str__(self):
        output = " accumulates" if self.accumulates else " float32 out" * self.float32_out
        return f"{super().__str__()}{self.kv_source}{output}"
