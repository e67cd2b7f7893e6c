"""One attention.parallel.forward over as long a sequence as all GPUs hold together, one group of heads after the other.

    torchrun --nproc-per-node gpu examples/long.py
    torchrun --nproc-per-node 2 examples/long.py --tokens 600         on the CPU, in the interpreter
    python examples/long.py --help

Needs torch and tqdm. Each rank makes its own share of the sequence; nobody has the whole. Prints the number of tokens, the
time, and the share of perfect scaling: the time of a group of heads on one GPU, divided by the number of GPUs and by its
time on all of them.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from tqdm import tqdm

import attention
from attention import parallel

ROOM = 0.7  # of a GPU's memory that may be taken
BLOCK = 2048  # tokens that lengths are multiples of, for each rank


def begin():
    """(rank, how many, device), by what torchrun says."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if on_gpu else "gloo")
        return dist.get_rank(), dist.get_world_size(), "cuda" if on_gpu else "cpu"
    return 0, 1, "cuda" if on_gpu else "cpu"


def longest(world, heads, kv_heads, dim):
    """Tokens that fit: shares of q, k, v and out, and one key head's whole keys and values, its queries and their output."""
    of_token = 2 * dim * ((2 * heads + 2 * kv_heads) / world + 4 + 4 * heads // kv_heads)
    memory = torch.cuda.get_device_properties(0).total_memory * ROOM
    return int(memory / of_token) // (BLOCK * world) * BLOCK * world


def timed(function):
    """(what it gives, seconds), when all ranks have it."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    together = dist.barrier if dist.is_initialized() else lambda: None
    wait(), together()
    begin = time.perf_counter()
    result = function()
    wait(), together()
    return result, time.perf_counter() - begin


def main(argv=None):
    """The command; gives (tokens, seconds, share of perfect scaling)."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, help="by default as many as fit, on the CPU 512")
    parser.add_argument("--heads", type=int, help="of queries; 8 times as many as there are of keys")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--scheme", default="auto")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args(argv)
    rank, world, device = begin()
    heads = args.heads or (32 if device == "cuda" else 2)
    kv_heads = max(1, heads // 8)
    tokens = args.tokens or (longest(world, heads, kv_heads, args.dim) if device == "cuda" else 512)
    mine = sum(len(span) for span in parallel.Zigzag().spans(tokens, world)[rank])
    torch.manual_seed(rank)
    shapes = [(1, mine, n, args.dim) for n in (heads, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    out, group = torch.empty_like(q), heads // kv_heads

    def attend(n):
        """The queries that read key head n."""
        rows = slice(group * n, group * (n + 1))
        group_arrays = q[:, :, rows], k[:, :, n : n + 1], v[:, :, n : n + 1]
        options = dict(causal=True, length=tokens, scheme=args.scheme)
        out[:, :, rows] = parallel.forward(*group_arrays, **options)

    attend(0)  # compiles
    seconds = [timed(lambda: attend(n))[1] for n in tqdm(range(kv_heads), unit="head", disable=args.quiet or rank > 0)]
    whole = [torch.randn(1, tokens, n, args.dim, device=device, dtype=torch.bfloat16) for n in (group, 1, 1)]
    attention.forward(*[x[:, :BLOCK] for x in whole], causal=True)
    _, single_seconds = timed(lambda: attention.forward(*whole, causal=True))
    share = single_seconds / world / min(seconds)
    if rank == 0:
        print(f"{tokens} tokens, {heads} heads of {kv_heads} of keys, on {world} x {device}: {sum(seconds):.4g} s", end="")
        print(f", {share:.2f} of perfect scaling" if world > 1 else "")
    if dist.is_initialized():
        dist.destroy_process_group()
    return tokens, sum(seconds), share


if __name__ == "__main__":
    main()
