"""From a kernel in Python to machine code, by Numba and NVVM, and where that is kept. Only here and in
tiles/numba_names.py is more of Numba imported than `cuda`, and only here LLVM."""
