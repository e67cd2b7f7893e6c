"""attention/recurrent/kernels: what the kernels of chunks are made for is a value, and only what has a meaning can be said."""

import pytest

from attention.recurrent.kernels import chunk_ampere, chunk_hopper
from attention.recurrent.kernels.gates import ByHead, BySteps, ByToken, Gate
from attention.recurrent.kernels.results import Normalizer, Outputs, States
from tiles import bf16


def test_configurations_are_values():
    """The same gates and results, made twice, find the kernel that was made before."""
    one, same, other = (chunk_hopper.Config(64, 1, bf16, ByToken(apart), Outputs(skip=True)) for apart in (False, False, True))
    assert one == same and hash(one) == hash(same) and one != other
    assert chunk_hopper.make(one) is chunk_hopper.make(same) is not chunk_hopper.make(other)


@pytest.mark.parametrize("kind", [States, Normalizer])
@pytest.mark.parametrize("field", ["skip", "divided", "silu"])
def test_only_outputs_have_an_epilogue(kind, field):
    assert getattr(Outputs(**{field: True}), field) and not getattr(kind(), field)
    with pytest.raises(TypeError, match=field):
        kind(**{field: True})


def test_only_decays_can_be_apart_from_the_scale():
    assert ByHead().scales and not ByHead(apart=True).scales and not Gate().scales
    with pytest.raises(TypeError, match="apart"):
        Gate(apart=True)
    with pytest.raises(TypeError, match="softplus"):
        ByToken(softplus=True)


@pytest.mark.parametrize("module, arch", [(chunk_hopper, "sm_90a"), (chunk_ampere, "sm_80")])
def test_spaces(module, arch):
    """Every kind of gates and results is there, and what Ampere's kernel cannot do is not: segments of wide keys."""
    shipped = list(module.space(arch, True))
    kinds = {Gate, ByHead, ByToken, BySteps} if module is chunk_hopper else {Gate, ByToken, BySteps}
    assert {type(config.gate) for config in shipped} == kinds
    assert {type(config.result) for config in shipped} == {States, Normalizer, Outputs}
    assert all(config.segmented for config in shipped if not config.result.outputs)
    assert {config.key_dim for config in shipped} == set(chunk_hopper.KEY_DIMS)
    assert not list(chunk_hopper.space("sm_80", True))
