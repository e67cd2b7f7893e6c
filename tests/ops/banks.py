"""How shared memory's banks are met."""


def ways(counts, prefix=""):
    """How often at most one bank was asked for different words in a pass, by instructions whose opcodes begin so."""
    return {times for opcode, times in counts.ways.items() if opcode.startswith(prefix)}
