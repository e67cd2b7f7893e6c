"""tiles/targets.py: what an architecture has follows from its capability, and nobody compares architectures as text."""

import ast
from pathlib import Path

import pytest

from attention import inspect
from attention.kernels.decode import decode_ampere, decode_combine, mla_ampere
from attention.kernels.decode import mla_fp8 as mla_quantised
from attention.kernels.softmax import forward_ampere
from attention.parts.decode.cache_loaders import DenseLoader, PagedLoader
from attention.parts.decode.key_window import KeyWindow
from attention.parts.decode.outputs import FinalOrPartialOutput, FinalOutput, PartialOutput
from attention.parts.decode.products import QuantizedProducts, SameDtypeProducts
from attention.parts.decode.splits import FixedSplits, StreamKSplits
from attention.parts.variant import Variant
from attention.parts.visibility import FULL
from fuse.planning.cost import card_of
from tiles import bf16, fp8e4m3, int8
from tiles.targets import LARGE, MEDIUM, SMALL, parse_target

ROOT = Path(__file__).parents[2]
HAS = {  # architecture: (wgmma, TMA, early launches, fp8, bytes of shared memory)
    "sm_80": (False, False, False, False, MEDIUM),
    "sm_86": (False, False, False, False, SMALL),
    "sm_87": (False, False, False, False, MEDIUM),
    "sm_89": (False, False, False, True, SMALL),
    "sm_90": (True, True, True, True, LARGE),
    "sm_90a": (True, True, True, True, LARGE),
    "sm_100a": (False, True, True, True, LARGE),
    "sm_103f": (False, True, True, True, LARGE),
    "sm_120a": (False, True, True, True, SMALL),
    "sm_999": (False, True, True, True, SMALL),
}


@pytest.mark.parametrize("arch", HAS)
def test_what_an_architecture_has(arch):
    target = parse_target(arch)
    assert (target.is_hopper, target.has_tma, target.has_early_launch, target.has_fp8, target.shared_bytes) == HAS[arch]
    assert target.supported and str(target) == arch and target.has_wgmma == (arch == "sm_90a")
    assert not parse_target("sm_75").supported


@pytest.mark.parametrize("arch", [arch for arch in HAS if arch != "sm_90"])
def test_what_is_shipped_for_it(arch):
    """Decoding begins while the grid before it ends since Hopper, and reads fp8 since Ada."""
    (_, _, early, fp8, _), target = HAS[arch], parse_target(arch)
    for module in (decode_ampere, decode_combine, mla_ampere):
        configs = list(module.space(target, True))
        assert configs and {config.overlaps_previous for config in configs} == {early}
    assert any(c.product.cache_dtype is fp8e4m3 for c in decode_ampere.space(target, False)) == fp8 == card_of(arch).fp8
    assert {config.latent for config in mla_quantised.space(target, True)} == {int8, *[fp8e4m3] * fp8}
    names = {f"{name} {config}" for name, _, config in inspect.configurations(False, arch, ("append",))}
    assert any("fp8" in name or "e4m3" in name for name in names) == fp8, names


def test_more_shared_memory_than_today_s(monkeypatch):
    """A GPU with more takes what the largest has today; a row for it in the tables of shapes leaves all rules as they are."""
    more = 300 * 1024
    window, result = KeyWindow(False, False, False), FinalOrPartialOutput(FinalOutput(bf16, 16), PartialOutput(bf16, 16))

    def chosen(room):
        yield from (forward_ampere.config_for(dim, bf16, FULL, room) for dim in (64, 128, 192, 256))
        for dim in (64, 96, 128, 192, 256):
            for product in (SameDtypeProducts(bf16), QuantizedProducts(bf16, int8, True)):
                for split in (FixedSplits, StreamKSplits):
                    for tall in (False, True):
                        kind = product, Variant(), window, DenseLoader(16), result, Variant(), split
                        yield decode_ampere.config_for(dim, dim, *kind, tall=tall, shared_limit=room)
        for rows in (1, 128):
            yield mla_ampere.config_for(bf16, window, DenseLoader(16), FinalOutput(bf16, 16), True, rows, room)
            yield mla_quantised.config_for(bf16, window, PagedLoader(16), FinalOutput(bf16, 16), True, rows, room)

    largest = list(chosen(LARGE))
    assert list(chosen(more)) == largest != list(chosen(SMALL))
    for module, names in {
        forward_ampere: ["BY_SHARED_MEMORY"],
        decode_ampere: ["SHAPES_BY_LIMIT", "TALL_SHAPES"],
        mla_ampere: ["SHAPES_BY_LIMIT"],
        mla_quantised: ["SHAPES_BY_LIMIT"],
    }.items():
        for name in names:
            table = getattr(module, name)
            monkeypatch.setitem(table, more, table[LARGE])
    assert list(chosen(more)) == list(chosen(LARGE)) == largest


def compared_as_text(source):
    """Lines that compare something with a text that names an architecture."""
    if '"sm_' not in source:
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
            if any(isinstance(x, ast.Constant) and isinstance(x.value, str) and x.value.startswith("sm_") for x in sides):
                yield node.lineno


def test_nobody_compares_architectures_as_text():
    assert list(compared_as_text('early = (\n  arch\n  >= "sm_90")')) == [2]
    assert list(compared_as_text('if arch == "sm_90a": pass')) == [1]
    files = [file for name in ("tiles", "ops", "attention", "fuse") for file in (ROOT / name).rglob("*.py")]
    assert len(files) > 300
    assert [file.name for file in files for line in compared_as_text(file.read_text())] == []
