"""attention.backward with its options beside itself without them, and beside peers that have the same.

`tiles` is the call that a case names, `plain` what it is held against: the same heads, full or causal, with no option. Peers:
FlashAttention-4 (`flash4`), FlashAttention-2 through torch (`flash2`), FlexAttention (`flex`), asked through
torch.autograd.grad. bf16, B * S = 16384, H * D = 2048, S 4096, unless a case says otherwise; packed: eight sequences of 17 to
8192, causal; T5: a table of 32 buckets a head, B 2, S 4096, H 16, D 64, whose gradient is asked for, too. Window, softcap,
ALiBi, bias, documents (of 1024, a mask, through lists): D 128, causal, B 2, S 8192. Packed ALiBi: with the slopes' gradient.
See measure.py for the protocol. `pytest bench/test_training.py -s`.
"""

import functools
import itertools
import math

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("the benchmarks need a GPU", allow_module_level=True)

import attention  # noqa: E402
from bench import peers  # noqa: E402
from bench.measure import interleaved, medians, report, rotated  # noqa: E402

TOKENS, WIDTH, LENGTH, ROUNDS = 16384, 2048, 4096, 7
PACKED = 17, 100, 519, 1024, 1500, 2000, 3032, 8192
BUCKETS, FAR = 32, 128  # of T5's relative positions: how many, and from where on they are one
PROVIDERS = "tiles", "plain", "flash4", "flash2", "flex"


def buckets(length):
    """The bucket of each distance i - j from -length + 1 to length - 1: T5's, both ways."""
    n = torch.arange(-length + 1, length, device="cuda")
    half, exact = BUCKETS // 2, BUCKETS // 4
    far = exact + (n.abs().clamp(min=1) / exact).log() / math.log(FAR / exact) * (half - exact)
    return ((n < 0) * half + torch.where(n.abs() < exact, n.abs(), far.long().clamp(max=half - 1))).int()


def _documents(b, h, i, j):
    return i // 1024 == j // 1024


def _t5(s, b, h, i, j, table, places):
    return s + table[h, places[i - j + (places.shape[0] // 2)]]


class TrainedForward:
    """Inputs, what each forward pass made of them, and the gradient of that. options: of ours; more: further leaves."""

    def __init__(self, shape, options, theirs, more=()):
        self.q, self.k, self.v, self.dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        passed_options = {name: options[name] for name in options.keys() - {"deterministic", "daux", "dbias", "dalibi"}}
        self.made = attention.forward(self.q, self.k, self.v, return_lse=True, **passed_options)
        self.plain = attention.forward(self.q, self.k, self.v, return_lse=True, causal=options.get("causal", False))
        self.gradients = {name: torch.empty_like(x) for name, x in (("dq", self.q), ("dk", self.k), ("dv", self.v))}
        self.leaves = [x.detach().requires_grad_() for x in (self.q, self.k, self.v, *more)]
        self.outs = {name: call(*self.leaves) for name, call in theirs.items()}

    def ours(self, made, options):
        """Gradients by attention.backward, of what forward made."""
        return attention.backward(self.dout, self.q, self.k, self.v, *made, **self.gradients, **options)


def _tiles(passed, options):
    return passed.ours(passed.made, options)


def _plain(passed, options):
    return passed.ours(passed.plain, {"causal": options.get("causal", False)})


def _peer(passed, name):
    out = passed.outs[name]
    return torch.autograd.grad(out, passed.leaves, passed.dout.view_as(out), retain_graph=True)


def _flash4(**options):
    return peers.library("flash_attn.cute.interface", "flash_attn_func", **options)


def _packed(ends):
    varlen = peers.library("flash_attn.cute.interface", "flash_attn_varlen_func", causal=True)
    of = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": max(PACKED), "max_seqlen_k": max(PACKED)}
    return lambda q, k, v: varlen(q[0], k[0], v[0], **of)


def _flex(places, length):
    from torch.nn.attention.flex_attention import flex_attention

    compiled = torch.compile(flex_attention)

    def call(q, k, v, table):
        def score(s, b, h, i, j):
            return s + table[h, places[i - j + length - 1]]

        return compiled(*(x.transpose(1, 2) for x in (q, k, v)), score_mod=score).transpose(1, 2)

    return call


@functools.cache
def _cases():
    """{case: (shape, options of ours, {peer: forward}, further leaves)}"""

    def shape(head_dim, length=LENGTH, tokens=TOKENS):
        return tokens // length, length, WIDTH // head_dim, head_dim

    cases = {}
    for head_dim, causal in itertools.product((64, 128, 256), (False, True)):
        name = f"D {head_dim} {'causal' if causal else 'full'}"
        theirs = {"flash4": _flash4(causal=causal, deterministic=True)}
        cases[f"{name} in order"] = shape(head_dim), {"causal": causal, "deterministic": True}, theirs
        if head_dim < 256:
            since_ampere = {"causal": causal, "family": "sm_80"}
            cases[f"{name} since Ampere"] = shape(head_dim), since_ampere, {"flash2": peers.softmax(causal)["flash2"]}
    ends = torch.tensor([0, *itertools.accumulate(PACKED)], device="cuda", dtype=torch.int32)
    one = 1, sum(PACKED), WIDTH // 128, 128
    cases["packed"] = one, {"causal": True, "cu_seqlens": ends}, {"flash4": _packed(ends)}
    heads = WIDTH // 128
    slopes = torch.tensor([2.0 ** (-8 * (h + 1) / heads) for h in range(heads)], device="cuda")
    bias = torch.randn(1, heads, 1, 8192, device="cuda", dtype=torch.bfloat16)
    window = _flash4(causal=True, window_size=(1024, 0))
    for name, options, theirs in (
        ("window 1024", {"window": (1024, None)}, {"flash4": window}),
        ("softcap 30", {"softcap": 30.0}, {"flash4": _flash4(causal=True, softcap=30.0)}),
        ("ALiBi", {"alibi": slopes}, {}),
        ("bias", {"bias": bias}, {}),
        ("documents", {"mask": _documents}, {}),
        ("documents in order", {"mask": _documents, "deterministic": True}, {}),
    ):
        cases[name] = shape(128, 8192), {"causal": True} | options, theirs
    cases["packed ALiBi"] = one, {"causal": True, "cu_seqlens": ends, "alibi": slopes, "dalibi": True}, {}
    table, places = torch.randn(16, BUCKETS, device="cuda"), buckets(LENGTH)
    leaf = table.clone().requires_grad_()
    t5 = {"score": _t5, "aux": (table, places), "daux": (True, None)}
    cases["T5"] = shape(64, tokens=8192)[:2] + (16, 64), t5, {"flex": _flex(places, LENGTH)}, (leaf,)
    return cases


CASES = (
    *(f"D {d} {c} {o}" for o in ("in order", "since Ampere") for d in (64, 128, 256) for c in ("full", "causal")
      if d < 256 or o == "in order"),
    "packed", "packed ALiBi", "window 1024", "softcap 30", "ALiBi", "bias", "documents", "documents in order", "T5",
)  # fmt: skip


@functools.cache
def _times(case):
    """{provider: milliseconds of every round}, or the reason why it cannot run."""
    shape, options, theirs, *more = _cases()[case]
    more = more[0] if more else ()
    if "T5" in case:
        options = options | {"aux": (more[0].detach(), options["aux"][1])}
    leaves = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    theirs, missing = peers.present(theirs, [*leaves, *more])
    sets = [(x,) for x in rotated(lambda: TrainedForward(shape, options, theirs, more), 7 * math.prod(shape) * 2)]
    calls = {"tiles": functools.partial(_tiles, options=options), "plain": functools.partial(_plain, options=options)}
    backwards, stopped = peers.present({name: functools.partial(_peer, name=name) for name in theirs}, sets[0])
    calls, missing = calls | backwards, missing | stopped
    results = {name: [x.float() for x in call(*sets[0])] for name, call in calls.items()}
    for name in backwards:  # against float64 is the tests' business; here all must mean the same
        for mine, its in zip(results["tiles"], results[name]):
            assert (mine - its.view_as(mine)).abs().max() <= 0.05 * its.abs().max(), (case, name)
    return interleaved(calls, sets, ROUNDS) | missing


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("case", CASES)
def test_training(benchmark, case, provider):
    """Rows of a group are what one reads: the same problem, one provider each."""
    times = _times(case).get(provider, "has none")
    if isinstance(times, str):
        pytest.skip(f"{provider}: {times}")
    benchmark.group = case
    benchmark.extra_info |= {"provider": provider, "case": case, "ms": medians({provider: times})[provider]}
    report(benchmark, times)
    print(f"\n{case:26} {provider:8} {benchmark.extra_info['ms']:.4f} ms")
