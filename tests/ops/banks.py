"""Counts of shared memory bank conflicts."""


def ways(counts, prefix=""):
    """The most different words of one bank in a pass, over all instructions whose opcodes begin with this text."""
    return {times for opcode, times in counts.ways.items() if opcode.startswith(prefix)}
