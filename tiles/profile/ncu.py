"""What Nsight Compute counts of a function's kernels, in our words: `ncu` runs `python -m tiles profile FILE.py:FUNCTION
--once` and writes a table, of which this reads what a kernel's author asks first."""

import csv
import io
import re
import shutil
import subprocess
import sys
from typing import NamedTuple

SECTIONS = "SpeedOfLight", "MemoryWorkloadAnalysis", "ComputeWorkloadAnalysis", "WarpStateStats", "LaunchStats", "Occupancy"
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
STALLS = {  # why a warp could not issue: ncu's name, ours
    "barrier": "other warps, at a barrier",
    "branch_resolving": "a branch's target",
    "dispatch_stall": "the dispatcher",
    "drain": "stores to leave, at its end",
    "gmma": "a matrix product (wgmma)",
    "imc_miss": "constants, not in their cache",
    "lg_throttle": "room in the queue to global memory",
    "long_scoreboard": "global or local memory",
    "math_pipe_throttle": "a busy arithmetic unit",
    "membar": "a memory fence",
    "mio_throttle": "room in the queue to shared memory and special functions",
    "misc": "something else",
    "no_instruction": "its next instruction",
    "not_selected": "another warp that was as ready",
    "selected": "nothing: it issued",
    "short_scoreboard": "shared memory or a special function",
    "sleeping": "its sleep to end",
    "tex_throttle": "room in the texture queue",
    "wait": "the instruction before it, whose time is fixed",
    "warpgroup_arrive": "the other warps of its warpgroup",
}
TIMES = {"nsecond": 1e-9, "ns": 1e-9, "usecond": 1e-6, "us": 1e-6, "msecond": 1e-3, "ms": 1e-3, "second": 1.0, "s": 1.0}
SIZES = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12}


class Counted(NamedTuple):
    """What the hardware counted of a kernel. seconds: at whatever clock. memory: bytes/s to and from the card's memory. tensor,
    bandwidth, occupancy: fractions of the most there could be; None: ncu did not say. stalls: for what warps waited, the most
    frequent first, and what fraction of their time it took."""

    kernel: str
    seconds: float | None
    memory: float | None
    bandwidth: float | None
    tensor: float | None
    registers: int | None
    occupancy: float | None
    stalls: list[tuple[str, float]]

    def __str__(self):
        facts = [
            None if self.seconds is None else f"{self.seconds * 1e6:.1f} us",
            None if self.tensor is None else f"tensor cores busy {self.tensor:.0%}",
            None if self.bandwidth is None else f"memory busy {self.bandwidth:.0%}",
            None if self.memory is None else f"{self.memory / 1e12:.2f} TB/s",
            None if self.registers is None else f"{self.registers} registers",
            None if self.occupancy is None else f"warps there {self.occupancy:.0%} of the most",
        ]
        stalls = [f"    {fraction:>4.0%} of a warp's time: waits for {words}" for words, fraction in self.stalls[:4]]
        return "\n".join([f"  {self.kernel}: {', '.join(filter(None, facts))}", *stalls])


def available() -> str | None:
    """The path of ncu, or None."""
    return shutil.which("ncu")


def run(target: str, program: str) -> list[Counted]:
    """What ncu, at `program`, counts of the kernels of one call of `file.py:function`. RuntimeError: ncu's own words."""
    sections = [word for section in SECTIONS for word in ("--section", section)]
    options = ["--csv", "--page", "raw", "--clock-control", "none", "--profile-from-start", "off", "--target-processes", "all"]
    command = [program, *options, *sections, sys.executable, "-m", "tiles", "profile", target, "--once"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = read(done.stdout)
    if done.returncode or not report:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("==")]
        raise RuntimeError("ncu counted nothing:\n  " + "\n  ".join(said[-4:] or ["it said nothing"]))
    return report


def read(text: str) -> list[Counted]:
    """The kernels of ncu's raw page in CSV: names, units below them, then a line a kernel."""
    lines = text.splitlines()
    start = next((k for k, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    names, units, *rows = csv.reader(io.StringIO("\n".join(lines[start:])))
    unit = dict(zip(names, units))
    return [_counted(dict(zip(names, row)), unit) for row in rows if len(row) == len(names)]


def _counted(row, unit):
    def number(name):
        try:
            return float(row[name].replace(",", ""))
        except (KeyError, ValueError):
            return None

    def scaled(name, scales):
        value = number(name)
        return None if value is None else value * scales.get(unit[name].split("/")[0], 1.0)

    def fraction(name):
        value = number(name)
        return None if value is None else value / 100

    stalls = {m[1]: number(name) or 0.0 for name in row if (m := STALL.fullmatch(name))}
    total = sum(stalls.values())
    ranked = sorted(((v / total, k) for k, v in stalls.items() if total), reverse=True)
    tensor = [fraction(name) for name in row if re.fullmatch(r"sm__pipe_tensor\w*\.avg\.pct_of_peak_sustained_elapsed", name)]
    registers = number("launch__registers_per_thread")
    memory = [scaled(name, SIZES) for name in row if re.fullmatch(r"dram__bytes(_read|_write)?\.sum\.per_second", name)]
    seconds = scaled("gpu__time_duration.sum", TIMES)
    return Counted(
        re.split(r"[\[(<]", row.get("Kernel Name", "?"))[0],
        seconds,
        max((m for m in memory if m is not None), default=None),
        fraction("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"),
        max((t for t in tensor if t is not None), default=None),
        None if registers is None else int(registers),
        fraction("sm__warps_active.avg.pct_of_peak_sustained_active"),
        [(STALLS.get(name, name), part) for part, name in ranked if name != "selected"],
    )
