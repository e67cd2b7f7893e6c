"""The gradients of softmax attention: three launches, bound as one program.

`prepare` sums what the softmax subtracts from every row, `hopper` goes through all scores once more and gives dK and dV, and dQ
as sums in float32; `finish` rounds these. `norms` has programs of their own, for norms of queries and keys around it.

On Hopper each of these is launched early (ops/grid.py): its blocks come as those of the launch before go, and wait before they
read or write memory. All but the last then say that the next one may come. So no two of them are at work at once: whoever
passes its wait knows that the launch before is done, which had passed its own, and so on. That holds for the next call, too,
which uses the same scratch memory, for calls on one stream and for those of a CUDA graph; and as the last launch says nothing,
what follows, early or not, begins when all is done."""
