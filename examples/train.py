"""Train a small language model on the standard library's own sources, byte by byte, with attention.nn.Attention.

    python examples/train.py --baseline         beside the same model on torch's scaled_dot_product_attention
    torchrun --nproc-per-node 2 examples/train.py        each sequence on several GPUs, or on as many processes without one
    python examples/train.py --help

Needs torch, tqdm and matplotlib: `pip install -e '.[train]'`. On a GPU the model has 25 million parameters and reads
sequences of 4096 bytes; without one it is tiny, and attention runs in the interpreter. With --baseline both models start
with the same weights, read the same bytes and take turns, so that their losses and times can be compared. The curves of the
losses go to train.png. Under torchrun every rank has a share of each sequence's tokens (attention.parallel), and the
gradients of weights are summed, so the model learns the same.
"""

import argparse
import os
import statistics
import time
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from tqdm import tqdm

from attention import parallel
from attention.nn import Attention, angles

ROTARY = 10_000  # the base of the angles
BYTES, WARMUP, TOGETHER = 256, 20, 10  # what there is to predict; steps until the full rate; steps that a model takes in a turn


@dataclass(frozen=True)
class TrainingSize:
    """Of a model, its batches, and how long it is trained."""

    dim: int = 512
    depth: int = 8
    heads: int = 8
    kv_heads: int = 8
    tokens: int = 4096
    batch: int = 8
    steps: int = 300
    rate: float = 1e-3


TINY = TrainingSize(dim=32, depth=1, heads=2, kv_heads=1, tokens=32, batch=2, steps=4)


class OnTorch(Attention):
    """The same module without us, and with tables of angles that are made once."""

    tables: tuple[torch.Tensor, torch.Tensor]

    def angles(self, x, positions):
        """cos and sin of all positions."""
        return self.tables

    def attend(self, q, k, v, *, causal, **none_of_these):
        """softmax(q k^T / sqrt(D)) v by torch."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = q.shape[1] != k.shape[1]  # said of others it costs some a kernel
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped).transpose(1, 2)


class OnRanks(Attention):
    """The same module where this rank has a share of the tokens."""

    def attend(self, q, k, v, **options):
        return parallel.forward(q, k, v, **options)


class Alone:
    """One process, which has all tokens."""

    attention, rank, where = Attention, 0, {}  # where: what attention is told of tokens' places

    def __init__(self, tokens):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def share(self, x):
        """This process's share of tokens (B, S)."""
        return x

    def sum(self, tensors):
        """The tensors are summed in place over all processes; of one process they stay as they are."""


class Together(Alone):
    """Several, each with a share of every sequence, by torchrun."""

    attention = OnRanks

    def __init__(self, tokens):
        super().__init__(tokens)
        if self.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if self.device == "cuda" else "gloo")
        self.rank = dist.get_rank()
        positions = parallel.shard(torch.arange(tokens, device=self.device), dim=0)
        self.where = {"positions": positions, "length": tokens}

    def share(self, x):
        return parallel.shard(x)

    def sum(self, tensors):
        for x in tensors:
            dist.all_reduce(x)


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), and the same of a perceptron."""

    def __init__(self, size, attention):
        super().__init__()
        self.attention = attention(size.dim, size.heads, size.kv_heads, causal=True, rotary=ROTARY, qk_norm=True)
        self.perceptron = nn.Sequential(
            nn.Linear(size.dim, 4 * size.dim, bias=False), nn.GELU(), nn.Linear(4 * size.dim, size.dim, bias=False)
        )
        self.norms = nn.ModuleList(nn.RMSNorm(size.dim) for _ in range(2))

    def forward(self, x, **where):
        x = x + self.attention(self.norms[0](x), **where)
        return x + self.perceptron(self.norms[1](x))


class Transformer(nn.Module):
    """Logits of each next byte."""

    def __init__(self, size, attention):
        super().__init__()
        self.embed = nn.Embedding(BYTES, size.dim)
        self.blocks = nn.ModuleList(TransformerBlock(size, attention) for _ in range(size.depth))
        self.norm, self.head = nn.RMSNorm(size.dim), nn.Linear(size.dim, BYTES, bias=False)

    def forward(self, read, **where):
        x = self.embed(read)
        for block in self.blocks:
            x = block(x, **where)
        return self.head(self.norm(x))


@dataclass
class TrainingRun:
    """A model that is trained, by these processes. losses: a scalar tensor of each step; seconds: of a step, in each turn."""

    model: nn.Module
    rate: float
    ranks: Alone
    losses: list = field(default_factory=list)
    seconds: list = field(default_factory=list)

    def __post_init__(self):
        fused = next(self.model.parameters()).is_cuda
        self.optimiser = torch.optim.AdamW(self.model.parameters(), self.rate, betas=(0.9, 0.95), fused=fused)

    def turn(self, batches):
        """A step for each batch (B, S + 1) of bytes."""
        synchronise = torch.cuda.synchronize if batches[0].is_cuda else lambda: None
        synchronise()
        begun = time.perf_counter()
        for batch in batches:
            for group in self.optimiser.param_groups:
                group["lr"] = self.rate * min(1, (len(self.losses) + 1) / WARMUP)
            read, following = self.ranks.share(batch[:, :-1]), self.ranks.share(batch[:, 1:])
            with torch.autocast(batch.device.type, torch.bfloat16):
                logits = self.model(read, **self.ranks.where)
            losses = functional.cross_entropy(logits.flatten(0, 1).float(), following.flatten(), reduction="sum")
            loss = losses / batch[:, 1:].numel()
            self.optimiser.zero_grad()
            loss.backward()
            self.ranks.sum([x.grad for x in self.model.parameters()])
            self.optimiser.step()
            self.ranks.sum([loss.detach()])
            self.losses.append(loss.detach())
        synchronise()
        self.seconds.append((time.perf_counter() - begun) / len(batches))

    @property
    def step(self):
        """Seconds of a step: the median but for the first turn, where kernels are compiled."""
        return statistics.median(self.seconds[1:] or self.seconds)


def sources():
    """The bytes of the standard library's modules, one behind the other."""
    paths = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8).long()


def train(size, ranks, baseline=False, eager=False, quiet=False):
    """{name: TrainingRun} of our model, and of torch's if there is to be a baseline. eager: without torch.compile."""
    device = ranks.device
    text, chance, runs = sources().to(device), torch.Generator().manual_seed(1), {}
    for name, module in {"attention": ranks.attention, **({"torch": OnTorch} if baseline else {})}.items():
        torch.manual_seed(0)
        model = Transformer(size, module).to(device)
        if module is OnTorch:
            tables = angles(torch.arange(size.tokens, device=device), size.dim // size.heads, ROTARY)
            for block in model.blocks:
                block.attention.tables = tables
        for block in [] if eager else model.blocks:
            block.compile(fullgraph=True)  # the first one; the others are like it
        runs[name] = TrainingRun(model, size.rate, ranks)
    with tqdm(total=size.steps, unit="step", disable=quiet) as bar:
        for first in range(0, size.steps, TOGETHER):
            turn = min(TOGETHER, size.steps - first)
            places = torch.randint(len(text) - size.tokens, (turn, size.batch), generator=chance).to(device)
            batches = text[places[..., None] + torch.arange(size.tokens + 1, device=device)]
            for run in runs.values():
                run.turn(batches)
            bar.set_postfix({name: f"{run.losses[-1].item():.3f}" for name, run in runs.items()}, refresh=False)
            bar.update(turn)
    return runs


def draw(runs, path):
    """The losses over the steps, as a PNG."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for (name, run), dashes in zip(runs.items(), ("-", "--")):
        losses = torch.stack(run.losses).tolist()
        axes.plot(range(1, 1 + len(losses)), losses, dashes, label=f"{name}: {1e3 * run.step:.4g} ms a step", linewidth=1)
    axes.set(xlabel="step", ylabel="cross-entropy of the next byte, nats")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = TrainingSize() if device == "cuda" else TINY
    for one in fields(size):
        parser.add_argument(f"--{one.name.replace('_', '-')}", type=one.type, default=getattr(size, one.name))
    parser.add_argument("--baseline", action="store_true", help="train the same model on torch's attention, too")
    parser.add_argument("--eager", action="store_true", help="without torch.compile, as it always is without a GPU")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--png", type=Path, default="train.png", help="where the curves go")
    asked = parser.parse_args(argv)
    size = replace(size, **{one.name: getattr(asked, one.name) for one in fields(size)})
    ranks = (Together if "RANK" in os.environ else Alone)(size.tokens)
    if asked.baseline and isinstance(ranks, Together):
        parser.error("--baseline: torch's attention has all tokens: run it without torchrun")
    eager = asked.eager or device == "cpu" or isinstance(ranks, Together)
    runs = train(size, ranks, asked.baseline, eager, asked.quiet or ranks.rank > 0)
    if ranks.rank > 0:
        dist.destroy_process_group()
        return runs
    count = sum(x.numel() for x in runs["attention"].model.parameters())
    print(f"{count / 1e6:.3g} million parameters, {size.batch} x {size.tokens} bytes a step, {size.steps} steps on {device}")
    for name, run in runs.items():
        print(f"{name:9}  loss {run.losses[0].item():.3f} -> {run.losses[-1].item():.3f}, {1e3 * run.step:.4g} ms a step")
    if asked.baseline:
        ours, theirs = (runs[name] for name in ("attention", "torch"))
        apart = max(abs(x.item() - y.item()) for x, y in zip(ours.losses, theirs.losses))
        print(f"losses at most {apart:.3f} apart; {theirs.step / ours.step:.2f} times as many steps a second as on torch")
    draw(runs, asked.png)
    if isinstance(ranks, Together):
        dist.destroy_process_group()
    return runs


if __name__ == "__main__":
    main()
