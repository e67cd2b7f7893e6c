"""The configurations of the chunk kernels: they compare by value, and combinations without a meaning cannot be constructed."""

import pytest

from attention.kernels.recurrent import chunk_ampere, chunk_hopper
from attention.parts.recurrent.gates import FormulaGate, Gate, HeadGate, Mamba2Gate, SummedGate, TokenGate
from attention.parts.recurrent.gradients import GroupedStates, KeyGradients, QueryGradients, ReversedGate, UnroundedOutputs
from attention.parts.recurrent.results import ChunkStates, ScanNormalizer, ScanOutputs, ScanStates
from tiles import bf16
from tiles.targets import parse_target


def test_configurations_are_values():
    """Equal gates and results find the kernel that was made before."""
    one, same, other = (
        chunk_hopper.Config(64, 1, bf16, TokenGate(scale_at_end), ScanOutputs(skip=True))
        for scale_at_end in (False, False, True)
    )
    assert one == same and hash(one) == hash(same) and one != other
    assert chunk_hopper.make(one) is chunk_hopper.make(same) is not chunk_hopper.make(other)


@pytest.mark.parametrize("kind", [ScanStates, ScanNormalizer])
@pytest.mark.parametrize("field", ["skip", "normalized", "silu"])
def test_only_outputs_have_an_epilogue(kind, field):
    assert getattr(ScanOutputs(**{field: True}), field) and not getattr(kind(), field)
    with pytest.raises(TypeError, match=field):
        kind(**{field: True})


def test_only_decays_have_a_scale_at_the_end():
    assert HeadGate().folds_scale and not HeadGate(scale_at_end=True).folds_scale and not Gate().folds_scale
    with pytest.raises(TypeError, match="scale_at_end"):
        Gate(scale_at_end=True)
    with pytest.raises(TypeError, match="softplus"):
        TokenGate(softplus=True)


@pytest.mark.parametrize("module, arch", [(chunk_hopper, "sm_90a"), (chunk_ampere, "sm_80")])
def test_spaces(module, arch):
    """All kinds of gates and results are there, but for segments of wide keys in Ampere's kernel."""
    shipped = list(module.space(parse_target(arch), True))
    kinds = {Gate, HeadGate, TokenGate, Mamba2Gate} if module is chunk_hopper else {Gate, TokenGate, Mamba2Gate}
    of_chunks, sums = ({ChunkStates}, {SummedGate}) if module is chunk_hopper else (set(), set())
    assert {type(config.gate) for config in shipped} == {*kinds, *sums, FormulaGate, ReversedGate}
    assert {type(config.gate.gate) for config in shipped if config.gate.reversed} == kinds - {Mamba2Gate} | sums
    results = {ScanStates, ScanNormalizer, ScanOutputs, QueryGradients, KeyGradients, GroupedStates, UnroundedOutputs}
    assert {type(config.result) for config in shipped} == results | of_chunks
    assert all(config.supports_result for config in shipped)
    assert all(config.supports_segments for config in shipped if not config.result.has_outputs)
    assert {config.key_dim for config in shipped} == set(chunk_hopper.KEY_DIMS)
    assert not list(chunk_hopper.space(parse_target("sm_80"), True))
