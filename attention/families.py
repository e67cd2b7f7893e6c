"""The kernel family of a call: "sm_90" has kernels for Hopper (wgmma and TMA), "sm_80" kernels for every GPU since Ampere
(mma.sync and cp.async)."""

from __future__ import annotations

from typing import NamedTuple

from tiles.calls.schema import Problem
from tiles.launching.arrays import ALIGNMENT
from tiles.launching.devices import machine
from tiles.launching.tensor_maps import STRIDE_END

FAMILIES = AMPERE_FAMILY, HOPPER_FAMILY = "sm_80", "sm_90"


class FamilyAndBlock(NamedTuple):
    """A family, and the number of keys in a block. attention.parallel passes it in place of a family's name where a call serves
    a part of a sequence: forward then takes blocks of `block_kv` keys, as a call on the whole sequence does, because the block
    size decides the last bits of the result. family: the name, or None."""

    family: str | None
    block_kv: int


def family_name(family: str | FamilyAndBlock | None) -> str | None:
    """The name of the family that a call asks for, None if it asks for none."""
    return family.family if isinstance(family, FamilyAndBlock) else family


def family_block_kv(family: str | FamilyAndBlock | None) -> int | None:
    """The number of keys in a block that a call asks for, None if it asks for none."""
    return family.block_kv if isinstance(family, FamilyAndBlock) else None


def choose_family(problem: Problem, family: str | FamilyAndBlock | None, tma: bool | None = None) -> str:
    """The family that serves a problem. `family` decides if it names one. Otherwise it is "sm_90" on Hopper if TMA can read and
    write the arrays, and "sm_80" elsewhere. tma: can TMA read and write what a kernel would have it copy? None: all arrays that
    are tiles must allow it. The interpreter runs both families.

    ValueError: `family` is no family, or the GPU or the arrays cannot be served by it."""
    family = family_name(family)
    if family is not None and family not in FAMILIES:
        raise ValueError(f"family: must be None or one of {FAMILIES}: {family=}")
    gpu = machine(problem.device)
    if not gpu.target.supported:
        raise ValueError(f"attention.{problem.member}: runs on GPUs since Ampere (sm_80); the arrays lie on {gpu}")
    if family == AMPERE_FAMILY:
        return family
    on_hopper = gpu.target.is_hopper
    if family == HOPPER_FAMILY and not on_hopper:
        raise ValueError(f"family: sm_90 runs on Hopper; the arrays lie on {gpu}: {family=} (the default, None, runs there)")
    by_tma = problem.by_tma if tma is None else tma
    if family == HOPPER_FAMILY and not by_tma:
        raise ValueError(
            f"family: sm_90 takes addresses and positive strides that are multiples of {ALIGNMENT} bytes; {_strides(problem)}: "
            f"{family=} (the default, None, takes them)"
        )
    return HOPPER_FAMILY if on_hopper and by_tma else AMPERE_FAMILY


def uses_hopper_kernels(problem: Problem, family: str | FamilyAndBlock | None, tma: bool | None = None) -> bool:
    """Do kernels for Hopper serve a problem? As choose_family, with its errors."""
    return choose_family(problem, family, tma) == HOPPER_FAMILY


def require_hopper(problem: Problem) -> None:
    """ValueError: the arrays are on no Hopper GPU, or TMA cannot read and write them. Host arrays run in the interpreter."""
    gpu = machine(problem.device)
    if not gpu.target.is_hopper:
        raise ValueError(
            f"attention.{problem.member}: runs on Hopper; the arrays lie on {gpu}: pass arrays in host memory, or set "
            "TILES_INTERPRET=1, and the interpreter runs it, slowly"
        )
    if not problem.by_tma:
        raise ValueError(
            f"attention.{problem.member}: takes addresses and positive strides that are multiples of {ALIGNMENT} bytes: "
            f"{_strides(problem)}; pass a copy of {', '.join(_beyond_tma(problem))}"
        )


def _beyond_tma(problem: Problem) -> list[str]:
    """The names of the tiles that TMA cannot address."""
    bits = {name: problem.bits.get(name, 0) for name in problem.schema.tiles}
    return [name for name, x in bits.items() if not 0 <= x < STRIDE_END or x % ALIGNMENT]


def _strides(problem: Problem) -> str:
    """The strides of all arrays, and the addresses that are not aligned, for an error."""
    past = {name: form.misalignment for name, form in problem.forms.items() if form.misalignment}
    where = f", bytes past a multiple of {ALIGNMENT}: {past}" if past else ""
    return f"strides={ {name: form.strides for name, form in problem.forms.items()} }{where}"
