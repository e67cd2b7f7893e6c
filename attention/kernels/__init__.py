"""The kernels of attention: one a file, whose name says what it computes and for which GPU.

Each module has Config, space(arch, everything) and make(config); docs/house.md says more."""
