"""From a kernel in Python to machine code, by Numba and NVVM, and where that is kept. Only here are Numba and LLVM named."""
