"""The gradients of softmax attention: three launches, bound as one program.

`prepare` computes lse in powers of 2 and delta = rowsum(dout out) for every query. `hopper` (or `ampere`, or another module of
this package: see `choice`) computes all scores once more and from them dK and dV, and adds up dQ in float32. `finish` rounds
dQ. `norms` has programs of their own for norms of queries and keys, before and after.

On Hopper each kernel uses programmatic dependent launch (ops/grid.py): its thread blocks are scheduled while the launch before
it ends, and wait for that before they read or write memory. All but the last then allow the next launch to be scheduled. No two
of them work at once: a thread block that passes its wait knows that the launch before is complete, which had itself waited, and
so on. The same holds for the next call, which uses the same scratch memory, for calls on one stream and in a CUDA graph. The
last kernel allows nothing, so whatever follows, with PDL or without, begins when all is complete."""
