"""attention/inspect.py: every shipped kernel compiles for every GPU without spills, local memory or warnings of ptxas."""

import re
from types import SimpleNamespace

import pytest
from numba import cuda

from attention import __main__ as main
from attention import inspect
from attention.kernels.decode import cache_write, decode_ampere, mla_ampere, mla_hopper
from attention.kernels.decode import mla_fp8 as mla_quantised
from attention.kernels.delta import (
    delta_channel_block_gradients_hopper,
    delta_channel_gradients_hopper,
    delta_gradients_hopper,
    delta_segment_gradients_hopper,
    delta_walk_ampere,
)
from attention.kernels.recurrent import (
    based_gradients_hopper,
    channel_gradients_hopper,
    channel_pairs_ampere,
    chunk_ampere,
    chunk_hopper,
    gla_ampere,
    gla_hopper,
    gla_recent_states_hopper,
    gla_states_hopper,
    hedgehog_query_gradients_hopper,
    linear_gradients_hopper,
    linear_token_loop,
)
from attention.kernels.softmax import (
    backward_ampere,
    backward_combine,
    backward_folded_hopper,
    backward_hopper,
    backward_narrow_hopper,
    backward_wide_hopper,
    backward_wide_queries_hopper,
    element_gradients,
    forward_ampere,
    forward_fp8_hopper,
    forward_hopper,
    norm_gradients,
    sink_gradient,
)
from attention.parts.block_masks import BlockSparseMaskMod
from attention.parts.decode import latent_boxes, latent_products
from attention.parts.decode.cache_loaders import DenseLoader, PagedLoader
from attention.parts.decode.key_window import KeyWindow
from attention.parts.decode.norms import MultiHeadRmsNorm, RmsNormedKeys
from attention.parts.decode.outputs import PartialOutput
from attention.parts.decode.products import SameDtypeProducts
from attention.parts.decode.splits import StreamKSplits
from attention.parts.delta.delta_gate_sums import GATE_GRADIENTS
from attention.parts.norms import LayerNorm, QueryNorm
from attention.parts.recurrent.gates import HeadGate, Mamba2Gate, TokenGate
from attention.parts.recurrent.results import ScanNormalizer, ScanOutputs
from attention.parts.variant import CombinedVariant, Variant
from attention.parts.visibility import CAUSAL, FULL, WindowLeft
from attention.parts.weight_dropout import Dropout
from ops import exp2, load, row_max, store
from tiles import bf16, fp16, fp32, rt
from tiles.launching.arguments import array
from tiles.targets import MEDIUM, SMALL, parse_target

STEPS, MAMBA2, OUTPUTS = Mamba2Gate(softplus=True), ScanOutputs(skip=True, silu=True), ScanOutputs()
PLAIN = Variant(), KeyWindow(False, True, False)
PART = PartialOutput(bf16, 16)
SHARED = *PLAIN, PagedLoader(16), decode_ampere.final_or_partial(bf16, 16), Variant(), StreamKSplits
NORMED = (
    QueryNorm(MultiHeadRmsNorm(True)),
    PLAIN[1],
    DenseLoader(16),
    decode_ampere.final_or_partial(bf16, 16),
    Variant(),
    StreamKSplits,
)
SAMPLE = [  # of the kernels with the most registers, or whose tiles are the largest, one of each family
    ("sm_90a", mla_hopper, mla_hopper.gather_config(bf16, True, PLAIN[1], PagedLoader(16), PART)),
    ("sm_90a", backward_wide_hopper, backward_wide_hopper.config_for(256, bf16, CAUSAL)),
    ("sm_90a", delta_gradients_hopper, delta_gradients_hopper.Config(128, bf16, True, GATE_GRADIENTS)),
    ("sm_90a", chunk_hopper, chunk_hopper.Config(256, 1, bf16, STEPS, MAMBA2, varlen=True)),
    ("sm_120a", forward_ampere, forward_ampere.config_for(256, bf16, FULL, SMALL, 4)),
]
REST = [  # each GPU with several kernels, and each form with some GPU; `inspect --all --check` takes all of them
    ("sm_90a", forward_fp8_hopper, forward_fp8_hopper.config_for(256, FULL, keys=8192, transposes_first=True)),
    ("sm_80", backward_ampere, backward_ampere.config_for(256, bf16, CAUSAL)),
    ("sm_90a", channel_gradients_hopper, channel_gradients_hopper.Config(bf16)),
    ("sm_80", chunk_ampere, chunk_ampere.Config(256, 1, bf16, STEPS, MAMBA2, vector_bytes=4)),
    (
        "sm_80",
        decode_ampere,
        decode_ampere.config_for(128, 128, SameDtypeProducts(bf16), *SHARED, tall=True, shared_limit=MEDIUM),
    ),
    ("sm_90a", backward_hopper, backward_hopper.config_for(64, bf16, CAUSAL)),
    ("sm_90a", delta_channel_block_gradients_hopper, delta_channel_block_gradients_hopper.Config(fp32, bf16)),
    ("sm_90a", linear_gradients_hopper, linear_gradients_hopper.Config(128, bf16, TokenGate(True))),
    ("sm_80", linear_token_loop, linear_token_loop.Config(64, "token", normalize=True)),
    ("sm_90a", cache_write, cache_write.Config(bf16, bf16)),
    (
        "sm_90a",
        decode_ampere,
        decode_ampere.config_for(128, 128, SameDtypeProducts(bf16), *NORMED, pdl=True, keys_norm=RmsNormedKeys()),
    ),
    ("sm_90a", mla_quantised, mla_quantised.config_for(bf16, PLAIN[1], PagedLoader(16), PART, True, 128)),
    (
        "sm_90a",
        mla_hopper,
        mla_hopper.Config(latent_products.LatentProducts(bf16), PLAIN[1], latent_boxes.TmaPagedLatents(1), PART),
    ),
    ("sm_89", forward_ampere, forward_ampere.config_for(128, fp16, FULL, SMALL)),
    ("sm_90a", backward_narrow_hopper, backward_narrow_hopper.config_for(64, bf16, CAUSAL)),
    ("sm_90a", backward_folded_hopper, backward_folded_hopper.config_for(128, bf16, CAUSAL)),
    ("sm_90a", backward_wide_queries_hopper, backward_wide_queries_hopper.config_for(256, bf16, CAUSAL)),
    ("sm_120a", backward_ampere, backward_ampere.config_for(128, fp16, FULL)),
    ("sm_80", delta_walk_ampere, delta_walk_ampere.Config(128, bf16, False, outputs=True)),
    ("sm_80", norm_gradients, norm_gradients.NormRowGradients(LayerNorm(), 256, bf16, False)),
    ("sm_90a", channel_pairs_ampere, channel_pairs_ampere.Config(bf16, varlen=True)),
    ("sm_100a", chunk_ampere, chunk_ampere.Config(256, 1, bf16, TokenGate(), ScanNormalizer())),
    ("sm_80", mla_ampere, mla_ampere.config_for(bf16, PLAIN[1], PagedLoader(16), PART, False, 128, MEDIUM)),
    ("sm_90a", delta_channel_gradients_hopper, delta_channel_gradients_hopper.Config(128, 128, fp32, bf16)),
    ("sm_90a", delta_segment_gradients_hopper, delta_segment_gradients_hopper.Config(128, bf16, True, GATE_GRADIENTS, True)),
    ("sm_90a", based_gradients_hopper, based_gradients_hopper.BasedKeyGradients(bf16)),
    ("sm_90a", hedgehog_query_gradients_hopper, hedgehog_query_gradients_hopper.Config(bf16)),
    ("sm_120a", linear_token_loop, linear_token_loop.Config(128, "channel", True, single=True)),
]


IN_RELEASE = [pytest.param(*kernel, marks=pytest.mark.release) for kernel in REST]


@pytest.mark.parametrize("arch, module, config", SAMPLE + IN_RELEASE, ids=lambda x: getattr(x, "__name__", str(x)))
def test_nothing_spills(arch, module, config):
    name = next(name for name, *what in inspect.configurations(True, arch) if what == [module, config])  # it is shipped
    actual = inspect.row(name, module, config, arch)
    assert not inspect.has_faults(actual)
    assert actual["shared_bytes"] <= parse_target(arch).shared_bytes
    assert module is not forward_ampere or actual["lines"] <= 95  # with the methods of ScoreContext, which parts call


LISTED = BlockSparseMaskMod(128, 128, 32, lambda b, h, i, j: j <= i)
SPILLED = [  # until their tiles were chosen for them, their indices made cheaper, or descriptors not held over a loop
    ("sm_90a", backward_folded_hopper, backward_folded_hopper.config_for(128, bf16, CombinedVariant(CAUSAL, WindowLeft()))),
    ("sm_80", forward_ampere, forward_ampere.config_for(64, bf16, Dropout(), MEDIUM)),
]
SPILLED = [pytest.param(*kernel, marks=pytest.mark.release) for kernel in SPILLED]
SPILLED += [("sm_90a", forward_hopper, forward_hopper.config_for(128, bf16, LISTED, 2**20, by_list=True))]


@pytest.mark.parametrize("arch, module, config", SPILLED, ids=lambda x: getattr(x, "__name__", str(x)))
def test_variants_that_take_registers(arch, module, config):
    assert not inspect.has_faults(inspect.row("", module, config, arch))


ADDS = {"RED", "REDG", "ATOM", "ATOMG", "UTMAREDG", "UBLKRED"}  # to memory, in the order in which blocks come


ADDING = [norm_gradients, backward_narrow_hopper]
ADDING += [pytest.param(module, marks=pytest.mark.release) for module in (element_gradients, backward_combine, sink_gradient)]


@pytest.mark.parametrize("module", ADDING)
def test_sums_that_have_the_same_bits_always(module):
    """Kernels add atomically only to dQ, and only without deterministic=True."""
    actual = inspect.row("", module, next(module.space(parse_target("sm_90a"), False)), "sm_90a")
    assert bool(ADDS & set(actual["instructions"])) == (module is backward_narrow_hopper)


@pytest.mark.release
def test_processes_share_the_work():
    """Rows are in the order of the configurations, whatever the number of processes."""
    only = ("backward_convert_dq",)
    args = [str(config) for *_, config in inspect.configurations(False, "sm_80", only)]
    assert [row["config"] for row in inspect.rows(False, "sm_80", 2, only)] == args and len(args) == 3


ALIKE = [  # (arch, module, configurations that differ in one field)
    ("sm_80", linear_token_loop, [linear_token_loop.Config(64, decay) for decay in ("", "token")]),
    pytest.param(
        "sm_90a",
        chunk_hopper,
        [chunk_hopper.Config(64, 1, bf16, HeadGate(scale_at_end), OUTPUTS) for scale_at_end in (False, True)],
        marks=pytest.mark.release,
    ),
]


@pytest.mark.parametrize(("arch", "module", "configs"), ALIKE, ids=["token loop", "chunks"])
def test_no_two_rows_compile_to_the_same_code(arch, module, configs):
    """A sample of rows, each with its neighbour; `python -m attention inspect --all --check` checks all of them."""
    shipped = {config for _, _, config in inspect.configurations(True, arch)}
    assert shipped.issuperset(configs) or module is linear_token_loop
    digests = [inspect.row("", module, config, arch)["digest"] for config in configs]
    assert len(set(digests)) == len(digests)


def one_tile(config):
    """A kernel that keeps a tile of 4096 numbers in a warp's registers."""
    T = rt(64, 64, fp32)

    @cuda.jit(launch_bounds=(config.threads, 1))
    def kernel(gX: array(2)):
        x = load(gX, T, (0, 0))
        store(gX, exp2(x - row_max(x)), (0, 0))

    return kernel, None


@pytest.mark.parametrize(("threads", "code"), [(256, 0), (1024, 1)])
def test_check_finds_a_spill(threads, code, monkeypatch, capsys):
    """A kernel that fits in 255 registers a thread and not in 64."""
    config = SimpleNamespace(threads=threads)
    rows = [("one", SimpleNamespace(make=one_tile), config)]
    monkeypatch.setattr(inspect, "configurations", lambda *_: iter(rows))
    assert inspect.main("sm_80", check=True, jobs=1) == code
    assert ("   0 spilled" in capsys.readouterr().out) == (threads == 256)
    assert inspect.main("sm_80", jobs=1) == 0


def test_check_finds_two_rows_of_the_same_code(monkeypatch, capsys):
    """One configuration under two names."""
    config = linear_token_loop.Config(64, "token")
    twice = [("one", linear_token_loop, config), ("other", linear_token_loop, config)]
    monkeypatch.setattr(inspect, "configurations", lambda *_: iter(twice))
    assert inspect.main("sm_80", check=True, jobs=1) == 1
    assert "the same code as one" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--only nothing",
            "--only: no row for sm_90a has 'nothing' in its .* name; kernels are forward, backward, decode, .*tokens",
        ),
        (
            "--only forward --only nothing --json --arch sm_80",
            "no row for sm_80 has 'forward' and 'nothing' in its .*; kernels are",
        ),
        ("--only fp16 --only forward", "'fp16' and 'forward' in its .* name; with --all there are [0-9]+$"),
        ("--arch hopper", "--arch: arch must be one of|arch must look like sm_80 or sm_90a, got 'hopper'"),
        ("--arch sm_75", "--arch: arch must be one of sm_80, sm_86, .*sm_90.*, got 'sm_75'"),
        ("--arch sm_999a", "--arch: arch must be one of .*, got 'sm_999a'"),
    ],
)
def test_what_there_is_nothing_of(words, message, capsys):
    """An error message, without a traceback, before any process is started."""
    try:
        code = main.main(["inspect", *words.split()])
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    assert code == 2 and not said.out and re.search(message, said.err.splitlines()[-1]), said.err
    assert said.err.splitlines()[-1].startswith("python -m attention inspect: error: ")


def test_only_what_is_asked_for():
    actual = list(inspect.configurations(True, "sm_90a", ("linear", "gla", "Dk 128", "varlen")))
    assert {module for _, module, _ in actual} == {gla_ampere, gla_hopper, gla_recent_states_hopper, gla_states_hopper}
    assert all(x.varlen and x.key_dim == 128 for *_, x in actual) and len(actual) == 27
