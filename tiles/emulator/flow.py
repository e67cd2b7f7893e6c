"""Where lanes that part at a branch meet again: the branch's immediate postdominator."""

from .text import Program


def meets(program: Program) -> list[int]:
    """For each instruction, the first one that every way from it to the end comes through (the end: their number)."""
    end = len(program.code)
    follow: list[list[int]] = []
    before: list[list[int]] = [[] for _ in range(end + 1)]
    for k, at in enumerate(program.code):
        leaves = at.opcode in ("ret", "exit")
        ways = [end] if leaves else [] if at.target is not None and at.guard is None else [k + 1]
        ways += [at.target] if at.target is not None else [k + 1] if leaves and at.guard is not None else []
        follow.append(ways)
        for way in ways:
            before[way].append(k)
    order: list[int] = []  # each after all from which one comes to it
    rank, todo = [-1] * (end + 1), [(end, iter(before[end]))]
    seen = {end}
    while todo:
        node, rest = todo[-1]
        for k in rest:
            if k not in seen:
                seen.add(k)
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
            found = -1
            for way in follow[k]:
                if rank[way] >= 0 and parent[way] >= 0:
                    found = way if found < 0 else common(found, way)
            if found != parent[k]:
                parent[k], changed = found, True
    return [end if p < 0 else p for p in parent[:end]]
