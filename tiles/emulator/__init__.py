"""The emulator runs a kernel *as compiled*, its PTX, on the CPU.

The interpreter runs a kernel's Python; the emulator runs the PTX that it is compiled to: lanes, addresses, parities,
descriptors, fences. It finds faults of a lowering, which the interpreter cannot see. It raises the interpreter's Hazards
(interpreter/hazard.py), which name the line of PTX and the line of Python. docs/emulator.md says how it works, and how an
instruction is added.

text.py parses PTX; table.py looks up an instruction among those of arithmetic.py, moves.py, barriers.py, copies.py and
matrices.py; warp.py executes them, memory.py checks accesses to memory.
"""

import contextlib
import functools
import math
import weakref
from collections import Counter
from typing import NamedTuple

import numpy as np

from ..compiling.compiler import Lowered
from ..interpreter import clusters
from ..interpreter.block import Block
from ..interpreter.cluster import Cluster, ClusterBarrier, random_order
from ..interpreter.progress import Progress
from ..interpreter.shadow import Agents
from ..launching.arguments import parameters, types_of
from ..layout import LANES
from . import arithmetic, barriers, copies, matrices, moves  # noqa: F401  # they fill the table
from .flow import reconvergence_points
from .memory import BASE, EmulatedSharedMemory, GlobalMemory
from .table import meaning
from .text import PtxProgram, read
from .warp import EmulatedWarp

__all__ = ["ExecutionCounts", "emulate", "forget", "program"]

PARAMETERS = 1 << 40  # the address of a launch's parameter block; no array lies there
ALIGN = 1024  # bytes: the most alignment that a variable in shared memory asks for
MBARRIERS = 128  # how many mbarriers a block may initialise besides those of its shared storage


class EmulatedCluster(Cluster):
    """The blocks of a cluster, which execute a program. memory: the launch's arrays, a GlobalMemory. parameters: the launch's
    parameter block. maps: its tensor maps, by their addresses."""

    block_address = PARAMETERS

    def __init__(self, indices, grid, warps, smem, rng, program, memory, parameters, maps, ctas_per_sm, counts):
        self.grid, self.size, self.warps, self.rng = grid, len(indices), warps, rng
        self.program, self.memory, self.parameters, self.maps, self.counts = program, memory, parameters, maps, counts
        other_agents, lanes = 2 * warps + 1 + MBARRIERS + (smem.barriers if smem else 0), len(indices) * warps * LANES
        self.smem, self.agents = None, Agents(lanes, len(indices) * (other_agents + warps) + lanes)
        first = self.agents.new()  # the first of the agents as which lanes write to a peer's memory (memory.py)
        self.peer_writers, self.agents.next = slice(first, first + lanes), first + lanes
        self.in_flight, self.barrier = [], ClusterBarrier(self)
        self.blocks = [_Block(self, rank, index, ctas_per_sm, smem) for rank, index in enumerate(indices)]

    def warp(self, block, index, program, _):
        """Make one of a block's warps, which has not begun to run."""
        warp = EmulatedWarp(block, index, program)
        agent, time = block.ready
        warp.clocks[:, agent] = time
        return warp


class _Block(Block):
    """A block of an EmulatedCluster, whose shared memory is accessed by address."""

    def __init__(self, cluster, rank, index, ctas_per_sm, smem):
        super().__init__(cluster, rank, index, ctas_per_sm)
        declared, self.dynamic = cluster.program.shared_bytes, smem.nbytes if smem else 0  # bytes: the kernel's, the launch's
        self.declared = -(-(BASE + self.dynamic) // ALIGN) * ALIGN  # the address of what the kernel declares
        self.shadow = EmulatedSharedMemory(self.declared - BASE + declared if declared else self.dynamic, self.agents)
        self.mma_agents = [self.agents.new() for _ in range(self.size)]  # one a warp: its waits cover no other warp's wgmmas
        self.ready = self.agents.new(), 1  # (agent, time) of the block's set-up, which its warps know from their beginning on
        self.barriers_at, self.votes = {}, {}


_programs: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()  # kernel: {(types, arch): Program}


def program(kernel, types, arch, lowered=None) -> PtxProgram:
    """The PtxProgram that a kernel is compiled to for these types of arguments, compiled and parsed once."""
    known = _programs.setdefault(kernel, {})
    ptx_program = known.get((types, arch))
    if ptx_program is None:
        lowered = lowered or Lowered(kernel, types, arch)
        ptx_program = read(lowered.ptx())
        if not getattr(lowered, "lines", True):
            ptx_program.with_lines = functools.partial(_with_lines, weakref.ref(kernel), types, arch)
        ptx_program.reconvergence_points = reconvergence_points(ptx_program)
        ptx_program.runs = [
            None if instr.target is not None or instr.opcode in ("ret", "exit") else meaning(instr)
            for instr in ptx_program.code
        ]
        ptx_program.unguarded = [
            None if instr.guard is not None else run for instr, run in zip(ptx_program.code, ptx_program.runs, strict=True)
        ]
        known[types, arch] = ptx_program
    return ptx_program


def forget(kernel) -> None:
    """Drop the programs that a kernel was compiled to. The next garbage collection frees them: many thousand objects."""
    _programs.pop(kernel, None)


def _with_lines(kernel, types, arch):
    """Compile a kernel once more, with a table of lines, and return its instructions."""
    return read(Lowered(kernel(), types, arch, lines=True).ptx()).code


class ExecutionCounts(NamedTuple):
    """What a run counted. executed: how often warps executed each opcode. ways: for each opcode the worst bank conflict, as the
    number of different words that one access to shared memory read or wrote in one bank."""

    executed: Counter
    ways: dict


def emulate(
    kernel, grid, threads, args, shared=None, seed=None, cluster=(1, 1, 1), arch="sm_90a", lowered=None
) -> ExecutionCounts:
    """Run kernel[grid, threads](*args) as compiled for `arch`, cluster by cluster; arguments as for interpreter.interpret.
    lowered: the kernel as tiles.compiling.compiler.Lowered, if the caller has it already.

    Hazard: a fault, with its instruction and line. NotImplementedError: an instruction that is not in the table."""
    if threads % LANES or not 0 < threads <= 1024:
        raise ValueError(f"threads: a multiple of {LANES} up to 1024, got {threads}")
    params = parameters(kernel, args)
    ptx_program = program(kernel, types_of(kernel, params), arch, lowered)
    block, maps, places = bytearray(), {}, iter(ptx_program.parameters.values())
    for p in params:
        for slot in p.slots:
            offset, size = next(places)
            block.extend(bytes(offset + size - len(block)))
            if p.encoding and p.array:
                maps[PARAMETERS + offset] = copies.TensorMap(p.encoding, p.array.pointer)
            else:
                block[offset : offset + size] = (slot & 2 ** (8 * size) - 1).to_bytes(size, "little")
    flat = [part for a in args for part in (a if isinstance(a, tuple) else (a,))]
    arrays = [getattr(a, "array", a) for a in flat]
    byte_ranges = [np.lib.array_utils.byte_bounds(a) for a in arrays if isinstance(a, np.ndarray) and a.size]
    bounds = kernel.targetoptions.get("launch_bounds")
    ctas_per_sm = bounds[1] if isinstance(bounds, tuple) and len(bounds) > 1 else 1
    rng, memory, counts = random_order(seed), GlobalMemory(byte_ranges), ExecutionCounts(Counter(), {})
    cluster_indices = list(clusters(grid, cluster))
    progress = Progress(kernel.py_func.__name__, len(cluster_indices), math.prod(cluster))
    with contextlib.closing(progress), np.errstate(all="ignore"):
        for n, indices in enumerate(cluster_indices):
            machine = EmulatedCluster(
                indices, grid, threads // LANES, shared, rng, ptx_program, memory, block, maps, ctas_per_sm, counts
            )
            machine.tick = progress.tick
            machine.run(ptx_program, None)
            machine.end()
            progress.done(n + 1)
    return counts
