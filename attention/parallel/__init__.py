"""Attention of sequences that are spread over several GPUs, by torch.distributed: `from attention import parallel`. Importing
it imports torch.

    q, k, v = (parallel.shard(x) for x in (q, k, v))            # each rank's shard of the tokens
    out = parallel.unshard(parallel.forward(q, k, v, causal=True))

docs/parallel.md says which scheme to use when."""

from .orders import Contiguous, Zigzag
from .recurrent import delta_rule, linear, mamba2
from .shards import reorder, shard, unshard
from .softmax import forward
from .symmetric_memory import mapped

__all__ = ["Contiguous", "Zigzag", "delta_rule", "forward", "linear", "mamba2", "mapped", "reorder", "shard", "unshard"]
