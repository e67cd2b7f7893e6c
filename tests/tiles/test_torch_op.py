"""tiles/calls/torch_op.py: what an op is made of, for programs of any schema. (tests/attention/test_torch_*.py: ours, in
use.)"""

import pytest

from tiles.calls.plan import Plan
from tiles.calls.program import Program, program
from tiles.calls.schema import Schema

torch = pytest.importorskip("torch")

TABLE = """
    x      (seqlen, head_dim)  real
    scale  (seqlen)            float32  optional
    sums   (seqlen)            float32  updated
    out    (seqlen, head_dim)  float32  output
"""


def planner(problem, twice: bool, factor: float | None, name: str | None) -> Plan:
    return Plan([])


def test_the_signature():
    result = program(Schema("test_signature", TABLE))(planner)
    result.op()
    said = str(torch.ops.tiles.test_signature.default._schema)
    assert said.partition("(")[2] == (
        "Tensor x, Tensor? scale, Tensor(a!) sums, bool twice, float? factor, str? name, str layout) -> Tensor"
    )
    assert result.op() == ("test_signature", [0, 1, 2], [3])  # registered once


def test_several_results_are_a_list_of_those_that_were_asked_for():
    table = """
        x     (seqlen, head_dim)  real
        out   (seqlen, head_dim)  float32  output
        sums  (seqlen)            float32  output  twice
        both  (seqlen)            index    output  twice  name
    """
    result = Program(Schema("test_results", table), planner)
    result.op()
    assert str(torch.ops.tiles.test_results.default._schema).endswith("-> Tensor[]")
    x = torch.zeros(3, 4, device="meta", dtype=torch.float16)
    call = lambda *options: [(y.shape, y.dtype) for y in torch.ops.tiles.test_results(x, *options, "bshd")]
    expected = [((3, 4), torch.float32), ((3,), torch.float32), ((3,), torch.int32)]
    assert call(False, None, None) == expected[:1]
    assert call(True, None, None) == expected[:2]
    assert call(True, 2.0, "both") == expected


def test_what_cannot_be_an_op_is_said():
    def bare(problem, factor):
        return Plan([])

    with pytest.raises(TypeError, match="factor: an option of a torch op must be one of.*bare's annotation is None"):
        Program(Schema("test_bare", TABLE), bare).op()
    with pytest.raises(TypeError, match="test_both: torch makes no functional op"):
        Program(Schema("test_both", TABLE + "more (seqlen) float32 output"), planner).op()


def test_versions_say_what_was_written():
    """Autograd finds out that what it saved has changed."""
    result = program(Schema("test_versions", TABLE))(planner)
    x, sums = torch.zeros(3, 4), torch.zeros(3)
    result.op()
    before = sums._version, x._version
    torch.ops.tiles.test_versions(x, None, sums, False, None, None, "bshd")
    assert (sums._version, x._version) == (before[0] + 1, before[1])
