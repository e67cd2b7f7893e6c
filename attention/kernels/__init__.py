"""The kernels of attention, in folders by family. A module's name says what it computes, and for which generation of GPUs
if it is for one.

Most modules have Config, space(target, everything) and make(config); docs/house.md says more."""
