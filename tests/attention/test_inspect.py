"""attention/inspect.py: what is shipped compiles for every GPU, with no spill, no local memory and no complaint of ptxas."""

import itertools

import pytest

from attention import inspect
from attention.inspect import ALL
from attention.recurrent.kernels import chunk_ampere, chunk_hopper, token_loop
from attention.softmax import ampere
from tiles import bf16, fp16

SAMPLE = [  # each GPU with each kernel, and each form with some GPU; `inspect --all --check` takes all of them
    ("sm_80", chunk_ampere, chunk_ampere.Config(256, 1, bf16, "step", piece=4, **ALL)),
    ("sm_80", ampere, ampere.config_for(192, bf16, True, inspect.ROOMS["sm_80"], 4)),
    ("sm_80", token_loop, token_loop.Config(64, "token", normalize=True)),
    ("sm_89", chunk_ampere, chunk_ampere.Config(128, 1, fp16, "token", divided=True)),
    ("sm_89", ampere, ampere.config_for(128, fp16, False, ampere.SHARED_BYTES)),
    ("sm_89", token_loop, token_loop.Config(128, "channel", True, varlen=True)),
    ("sm_90a", chunk_ampere, chunk_ampere.Config(128, 1, bf16, "token", states=True, varlen=True, piece=4)),
    ("sm_90a", chunk_hopper, chunk_hopper.Config(256, 1, bf16, "step", varlen=True, **ALL)),
    ("sm_90a", chunk_hopper, chunk_hopper.Config(128, 2, bf16, "step", varlen=True, **ALL)),
    ("sm_90a", chunk_ampere, chunk_ampere.Config(256, 1, bf16, "token", ones=True, piece=4)),
    ("sm_90a", ampere, ampere.config_for(64, bf16, True, ampere.LARGE, 8)),
    ("sm_90a", token_loop, token_loop.Config(128, "channel", normalize=True)),
    ("sm_100a", chunk_ampere, chunk_ampere.Config(256, 1, bf16, "token", ones=True)),
    ("sm_100a", chunk_ampere, chunk_ampere.Config(256, 1, bf16, "step", varlen=True, piece=4, **ALL)),
    ("sm_100a", ampere, ampere.config_for(128, bf16, True, ampere.LARGE, 4)),
    ("sm_100a", ampere, ampere.config_for(128, fp16, False, ampere.LARGE)),
    ("sm_100a", token_loop, token_loop.Config(64, "channel", True, single=True)),
    ("sm_120a", chunk_ampere, chunk_ampere.Config(256, 1, bf16, "token", ones=True, piece=4)),
    ("sm_120a", chunk_ampere, chunk_ampere.Config(128, 1, bf16, "step", varlen=True, **ALL)),
    ("sm_120a", chunk_ampere, chunk_ampere.Config(128, 1, bf16, "step", piece=8)),
    ("sm_120a", ampere, ampere.config_for(256, bf16, False, ampere.SHARED_BYTES, 4)),
    ("sm_120a", token_loop, token_loop.Config(256, "channel", normalize=True)),
    ("sm_120a", token_loop, token_loop.Config(128, "channel", True, single=True)),
]


@pytest.mark.parametrize("arch, module, config", SAMPLE, ids=lambda x: getattr(x, "__name__", str(x)))
def test_nothing_spills(arch, module, config):
    name = next(name for name, *what in inspect.configurations(True, arch) if what == [module, config])  # it is shipped
    found = inspect.row(name, module, config, arch)
    assert not any(found[key] for key in inspect.BAD)
    assert found["shared_bytes"] <= inspect.ROOMS.get(arch, ampere.SHARED_BYTES)


def test_processes_share_the_work():
    """Rows come in the order of the configurations, whoever compiles them."""
    alone, together = (itertools.islice(inspect.rows(False, "sm_80", jobs), 2) for jobs in (1, 2))
    assert list(alone) == list(together)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_no_configuration_comes_twice(arch):
    everything, some = (list(inspect.configurations(flag, arch)) for flag in (True, False))
    assert len(set(everything)) == len(everything) and set(some) <= set(everything)
