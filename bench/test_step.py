"""attention.linear_step beside a copy of the state by torch and one step of flash-linear-attention, where it is installed.

bf16 tokens, fp32 state; a step reads and writes the state once, and so does the copy: `copy_ratio` is the copy's time over the
provider's. flash-linear-attention writes the new state to new memory. See measure.py for the protocol.
`pytest bench/test_step.py --benchmark-json=step.json`
"""

import functools

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("the benchmarks need a GPU", allow_module_level=True)

import attention  # noqa: E402
from bench import peers  # noqa: E402
from bench.measure import interleaved, medians, report, rotated  # noqa: E402

SHAPES = [(64, 32, 128), (128, 32, 128), (256, 32, 128), (64, 32, 64), (256, 32, 64), (64, 32, 256), (8, 32, 128)]  # B, H, D
MEMBERS = {  # decays, beta, flash-linear-attention's module and its name for the decays
    "linear": (None, False, "simple_gla", "g"),
    "simple GLA": ("token", False, "simple_gla", "g"),
    "GLA": ("channel", False, "gla", "gk"),
    "delta rule": (None, True, "delta_rule", "g"),
    "gated delta rule": ("token", True, "gated_delta_rule", "g"),
    "KDA": ("channel", True, "kda", "g"),
}
PROVIDERS = "tiles", "copy", "fla"
ROUNDS = 7


def _step(state, new, q, k, v, decay, beta):
    return attention.linear_step(state, q, k, v, decay=decay, beta=beta)


def _copy(state, new, *_):
    return new.copy_(state)


def _fla(member):
    *_, module, gates = MEMBERS[member]
    step = peers.fla(module, f"fused_recurrent_{module}", output_final_state=True)

    def call(state, new, q, k, v, decay, beta):
        gates_and_beta = {name: x[:, None] for name, x in {gates: decay, "beta": beta}.items() if x is not None}
        return step(*(x[:, None] for x in (q, k, v)), initial_state=state, **gates_and_beta)[:, 0]

    return call


def _inputs(batch, heads, dim, member):
    """(state, room for another, q, k, v, decay, beta)"""
    decay, delta, *_ = MEMBERS[member]
    state = torch.randn(batch, heads, dim, dim, device="cuda")
    q, k, v = torch.randn(3, batch, heads, dim, device="cuda", dtype=torch.bfloat16)
    k = torch.nn.functional.normalize(k, dim=-1)
    gates = None if decay is None else -torch.rand(state.shape[: 2 + (decay == "channel")], device="cuda")
    return state, torch.empty_like(state), q, k, v, gates, torch.rand(batch, heads, device="cuda") if delta else None


def _check(call, state, new, q, k, v, decay, beta):
    """The call's output is compared with the step's formula in float64."""
    S, (q64, k64, v64) = state.double(), (x.double() for x in (q, k, v))
    if decay is not None:
        S = S * decay.double().reshape(*decay.shape, *(1,) * (4 - decay.ndim)).exp()
    if beta is not None:
        v64 = beta.double()[..., None] * (v64 - torch.einsum("bhkv,bhk->bhv", S, k64))
    ref = torch.einsum("bhkv,bhk->bhv", S + k64[..., None] * v64[:, :, None], q64) * q.shape[-1] ** -0.5
    out = call(state.clone(), new, q, k, v, decay, beta)
    assert (out - ref).abs().max() <= 2**-7 * ref.abs().max()


@functools.cache
def _times(shape, member):
    """{provider: milliseconds of every round}, or the reason why it cannot run."""
    batch, heads, dim = shape
    sets = rotated(lambda: _inputs(*shape, member), 2 * 4 * batch * heads * dim * dim)
    theirs, missing = peers.present({"fla": _fla(member)}, sets[0])
    for call in (calls := {"tiles": _step} | theirs).values():
        _check(call, *sets[0])
    return interleaved(calls | {"copy": _copy}, sets, ROUNDS) | missing


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"B{s[0]}-H{s[1]}-D{s[2]}")
def test_step(benchmark, shape, member, provider):
    """Rows of a group are what one reads: the same problem, one provider each."""
    times = _times(shape, member)
    if isinstance(times[provider], str):
        pytest.skip(f"{provider}: {times[provider]}")
    batch, heads, dim = shape
    benchmark.group = f"step B {batch} H {heads} D {dim} {member}"
    benchmark.extra_info |= {"provider": provider, "batch": batch, "heads": heads, "dim": dim, "member": member}
    report(benchmark, times[provider])
    middle = medians({name: x for name, x in times.items() if not isinstance(x, str)})
    benchmark.extra_info["copy_ratio"] = round(middle["copy"] / middle[provider], 3)
    benchmark.extra_info["tb_per_s"] = round(2 * 4 * batch * heads * dim * dim / middle[provider] / 1e9, 2)
