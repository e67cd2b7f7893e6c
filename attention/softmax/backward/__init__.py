"""The gradients of softmax attention: three launches, bound as one program.

`prepare` sums what the softmax subtracts from every row, `hopper` goes through all scores once more and gives dK and dV, and dQ
as sums in float32; `finish` rounds these. `norms` has programs of their own, for norms of queries and keys around it."""
