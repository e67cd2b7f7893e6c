"""Which instructions serve a call: Hopper's (wgmma and TMA), or those of every GPU since Ampere (mma.sync and cp.async)."""

from __future__ import annotations

from typing import NamedTuple

from tiles.arrays import ALIGNMENT
from tiles.device import machine
from tiles.schema import Problem
from tiles.targets import is_hopper, supported

FAMILIES = "sm_80", "sm_90"


class PartOf(NamedTuple):
    """What stands in place of a family's name in calls on a part of a sequence: forward then takes blocks of `kv` keys, as the
    call on the whole does, for the keys of a block decide the last bits. family: the name, or None."""

    family: str | None
    kv: int


def name_of(family: str | PartOf | None) -> str | None:
    """The name of the family that a call asks for, None if it asks for none."""
    return family.family if isinstance(family, PartOf) else family


def kv_of(family: str | PartOf | None) -> int | None:
    """The keys of a block that a call asks for, None if it asks for none."""
    return family.kv if isinstance(family, PartOf) else None


def choose(problem: Problem, family: str | PartOf | None, addressable: bool | None = None) -> str:
    """The family that serves a problem: the one asked for; by default Hopper's, on Hopper if TMA can address the arrays (all
    tiles, unless the caller knows better), and else sm_80's. In the interpreter both run. ValueError: this GPU or these arrays
    are not for it."""
    family = name_of(family)
    if family is not None and family not in FAMILIES:
        raise ValueError(f"family: must be None or one of {FAMILIES}: {family=}")
    gpu = machine(problem.device)
    if not supported(gpu.capability):
        raise ValueError(f"attention.{problem.member}: runs on GPUs since Ampere (sm_80); the arrays lie on {gpu}")
    if family == "sm_80":
        return family
    on_hopper = is_hopper(gpu.capability)
    if family == "sm_90" and not on_hopper:
        raise ValueError(f"family: sm_90 runs on Hopper; the arrays lie on {gpu}: {family=} (the default, None, runs there)")
    by_tma = problem.by_tma if addressable is None else addressable
    if family == "sm_90" and not by_tma:
        raise ValueError(
            f"family: sm_90 takes addresses and positive strides that are multiples of {ALIGNMENT} bytes; {_strides(problem)}: "
            f"{family=} (the default, None, takes them)"
        )
    return "sm_90" if on_hopper and by_tma else "sm_80"


def needs_hopper(problem: Problem) -> None:
    """ValueError if wgmma and TMA cannot solve the problem. In the interpreter they can."""
    gpu = machine(problem.device)
    if not is_hopper(gpu.capability):
        raise ValueError(f"attention.{problem.member}: runs on Hopper; the arrays lie on {gpu}")
    if not problem.by_tma:
        raise ValueError(
            f"attention.{problem.member}: takes addresses and positive strides that are multiples of {ALIGNMENT} bytes: "
            f"{_strides(problem)}"
        )


def _strides(problem):
    past = {name: form.past for name, form in problem.forms.items() if form.past}
    where = f", bytes past a multiple of {ALIGNMENT}: {past}" if past else ""
    return f"strides={ {name: form.strides for name, form in problem.forms.items()} }{where}"
