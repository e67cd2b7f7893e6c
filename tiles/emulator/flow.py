"""Analyses of control flow: where lanes that diverge at a branch reconverge (its immediate postdominator), and how many
registers are live at once."""

from .text import Address, PtxProgram, Reg

READS = ("st.", "red.", "bar", "cp.", "wgmma.", "nanosleep", "setmaxnreg")  # opcodes whose first operand is read, too


def _successors(program):
    """For each instruction, the indices of those that may come next; the end is the number of instructions."""
    end, successors_of = len(program.code), []
    for k, instr in enumerate(program.code):
        leaves = instr.opcode in ("ret", "exit")
        successors = [end] if leaves else [] if instr.target is not None and instr.guard is None else [k + 1]
        successors += [instr.target] if instr.target is not None else [k + 1] if leaves and instr.guard is not None else []
        successors_of.append(successors)
    return successors_of


def reconvergence_points(program: PtxProgram) -> list[int]:
    """For each instruction, its immediate postdominator: the next instruction that is on every path to the end."""
    end, successors_of = len(program.code), _successors(program)
    before: list[list[int]] = [[] for _ in range(end + 1)]
    for k, successors in enumerate(successors_of):
        for successor in successors:
            before[successor].append(k)
    order: list[int] = []  # each instruction stands after those that lead to it
    rank, todo = [-1] * (end + 1), [(end, iter(before[end]))]
    visited = {end}
    while todo:
        node, rest = todo[-1]
        for k in rest:
            if k not in visited:
                visited.add(k)
                todo.append((k, iter(before[k])))
                break
        else:
            todo.pop()
            rank[node] = len(order)
            order.append(node)
    parent = [-1] * end + [end]

    def common(a, b):
        while a != b:
            if rank[a] > rank[b]:
                a, b = b, a
            a = parent[a]
        return a

    changed = True
    while changed:  # Cooper, Harvey and Kennedy, "A simple, fast dominance algorithm"
        changed = False
        for k in order[-2::-1]:
            dominator = -1
            for successor in successors_of[k]:
                if rank[successor] >= 0 and parent[successor] >= 0:
                    dominator = successor if dominator < 0 else common(dominator, successor)
            if dominator != parent[k]:
                parent[k], changed = dominator, True
    return [end if p < 0 else p for p in parent[:end]]


def pressure(program: PtxProgram) -> int:
    """The most registers of four bytes that are live at once, if instructions stay in the order of the text.

    ptxas reorders instructions and needs some more registers. It does not spill where this number is far below the limit."""
    successors_of, used, defined = _successors(program), [], []
    for instr in program.code:
        wide = _bits(instr.operands[1:] if instr.operands else [])
        first = _bits(instr.operands[:1])
        reads = instr.opcode.startswith(READS) or (instr.operands and isinstance(instr.operands[0], Address))
        used.append(wide | (first if reads else 0) | (1 << instr.guard.slot if instr.guard else 0))
        defined.append(0 if reads or instr.guard else first)
    narrow_registers = sum(1 << slot for slot, width in enumerate(program.widths) if width > 1)
    wide_registers = sum(1 << slot for slot, width in enumerate(program.widths) if width > 4)
    live = [0] * (len(program.code) + 1)
    changed = True
    while changed:
        changed = False
        for k in range(len(program.code) - 1, -1, -1):
            after = 0
            for successor in successors_of[k]:
                after |= live[successor]
            now = after & ~defined[k] | used[k]
            if now != live[k]:
                live[k], changed = now, True
    return max((now & narrow_registers).bit_count() + (now & wide_registers).bit_count() for now in live)


def _bits(operands):
    """The registers among the operands, as an integer with a bit for each register's slot."""
    bits = 0
    for one in operands:
        if isinstance(one, Reg):
            bits |= 1 << one.slot
        elif isinstance(one, list):
            bits |= _bits(one)
        elif isinstance(one, Address):
            bits |= _bits([one.base, *one.coordinates])
    return bits
