"""Machine code for the host, made by LLVM: a loop over calls of a C function, for what Python would call dozens of times."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir

WORD, STATUS = ir.IntType(64), ir.IntType(32)


def compile_loop(address: int, words: int) -> Callable[[Any, int], int] | None:
    """f(records, count): the C function at this address is called once for each record of so many words of 64 bits, which are
    its arguments, until it returns something else than 0: f returns that, or 0. records: a ctypes.c_void_p. It keeps the GIL.
    None: this process must not make memory executable. It takes 10 to 20 ms, during which other threads run."""
    if not _may_execute():
        return None
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(opt=1)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(str(_loop(address, words))), machine)
    engine.finalize_object()
    function = ctypes.PYFUNCTYPE(ctypes.c_int)(engine.get_function_address("loop"))
    function.engine = engine  # type: ignore[attr-defined]  # which owns the code
    return function


def _loop(address: int, words: int) -> ir.Module:
    """The module of `loop`. Words are passed as 64 bits also where the C function takes fewer: in registers, and on the stack
    of x86-64 and of ARM under Linux, each argument has 8 bytes."""
    module = ir.Module(name="host_code")
    loop = ir.Function(module, ir.FunctionType(STATUS, [WORD.as_pointer(), STATUS]), "loop")
    records, count = loop.args
    before, call, after, end = [loop.append_basic_block() for _ in range(4)]
    builder = ir.IRBuilder(before)
    builder.branch(after)
    builder.position_at_end(after)
    number, status = builder.phi(STATUS), builder.phi(STATUS)
    done = builder.icmp_signed(">=", number, count)
    builder.cbranch(builder.or_(done, builder.icmp_signed("!=", status, STATUS(0))), end, call)
    builder.position_at_end(call)
    first = builder.mul(builder.sext(number, WORD), WORD(words))
    arguments = [builder.load(builder.gep(records, [builder.add(first, WORD(n))])) for n in range(words)]
    function = builder.inttoptr(WORD(address), ir.FunctionType(STATUS, [WORD] * words).as_pointer())
    returned = builder.call(function, arguments)
    next_number = builder.add(number, STATUS(1))
    builder.branch(after)
    for value, start, later in ((number, 0, next_number), (status, 0, returned)):
        value.add_incoming(STATUS(start), before)
        value.add_incoming(later, call)
    builder.position_at_end(end)
    builder.ret(status)
    return module


def _may_execute() -> bool:
    """May this process make memory executable? LLVM would end it if not."""
    try:
        mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()
    except OSError:
        return False
    return True
