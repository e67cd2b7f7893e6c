"""Train a small language model on the standard library's own sources, byte by byte, with layers of attention.nn.

    python examples/train.py --baseline         beside the same model on torch's scaled_dot_product_attention
    python examples/train.py --mixer gated_delta --baseline        with recurrent layers, beside the recurrence in float32
    python examples/train.py --mixer gated_delta --baseline fla        beside the same layers on flash-linear-attention
    torchrun --nproc-per-node 2 examples/train.py        each sequence on several GPUs, or on as many processes without one
    python examples/train.py --help

Needs torch, tqdm and matplotlib: `pip install -e '.[train]'`. On a GPU the model has 25 million parameters and reads
sequences of 4096 bytes; without one it is tiny, and attention runs in the interpreter. --mixer: what mixes tokens: softmax
attention, gated delta rules, Kimi delta attention, Mamba-2, or in a hybrid three gated delta rules before each softmax. With
--baseline both models start with the same weights, read the same bytes and take turns, so that their losses and times can be
compared. The curves of the losses go to train.png. With --csv they are also added to a table, and all that it holds is drawn.
Under torchrun every rank has a share of each sequence's tokens (attention.parallel), for softmax attention from both ends of
the sequence and for recurrent layers one behind the other. The gradients of weights are summed, so the model learns the same.
"""

import argparse
import csv
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
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from attention import gates, parallel, short_conv
from attention.nn import Attention, GatedDeltaNet, GatedRMSNorm, KimiDeltaAttention, Mamba2, angles

ROTARY = 10_000  # the base of the angles
BYTES, WARMUP, TOGETHER = 256, 20, 10  # what there is to predict; steps until the full rate; steps that a model takes in a turn


@dataclass(frozen=True)
class TrainingSize:
    """The sizes of a model and of its batches, and how long it is trained."""

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
    """Attention without us, and with tables of angles that are made once."""

    tables: tuple[torch.Tensor, torch.Tensor]

    def angles(self, x, positions):
        """cos and sin of all positions."""
        return self.tables

    def attend(self, q, k, v, *, causal, **none_of_these):
        """softmax(q k^T / sqrt(D)) v by torch."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = q.shape[1] != k.shape[1]  # said of others it costs some a kernel
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped).transpose(1, 2)


class NormOnTorch(GatedRMSNorm):
    """The norm and the gate behind a recurrence, without us."""

    def forward(self, x, gate=None):
        return self.by_torch(x, gate)


class RecurrenceOnTorch:
    """A recurrent layer without us: its convolution and norm are torch's, and its recurrence torch's in float32."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.norm.__class__ = NormOnTorch

    def convolve(self, x, cu_seqlens, cache):
        """silu(conv(x)) of (B, S, channels)."""
        weight, bias = self.conv1d.weight, self.conv1d.bias
        x = functional.pad(x.mT, (weight.shape[1] - 1, 0))
        return functional.silu(functional.conv1d(x, weight[:, None], bias, groups=len(weight)).mT)

    def recur(self, member, q, k, v, cu_seqlens, cache, *, beta, decay, qk_l2norm):
        """The gated delta rule, by PyTorch's operations."""
        q, k = (gates.normalize(x.float()) for x in (q, k))
        arrays = q, k, v, gates.evaluate(decay), gates.evaluate(beta)
        return checkpoint(recurrence, *arrays, q.shape[-1] ** -0.5, use_reentrant=False).to(v.dtype)

    def scan(self, x, dt, B, C, cu_seqlens, cache):
        """Mamba-2's scan, by PyTorch's operations."""
        dt = functional.softplus(dt.float() + self.dt_bias)
        arrays = C, B, dt[..., None] * x, -dt * self.A_log.exp(), None
        return (checkpoint(recurrence, *arrays, 1.0, use_reentrant=False) + self.D[:, None] * x).to(x.dtype)


class NormOnFla(GatedRMSNorm):
    """The norm and the gate by flash-linear-attention."""

    def forward(self, x, gate=None):
        from fla.modules.norm.fused_norm_gate import rms_norm_gated

        return rms_norm_gated(
            x, gate, self.weight, None, "swish" if self.activation == "silu" else self.activation, eps=self.eps
        )


class RecurrenceOnFla:
    """A delta rule's layer whose convolution, recurrence and norm are flash-linear-attention's."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.norm.__class__ = NormOnFla

    def convolve(self, x, cu_seqlens, cache):
        """silu(conv(x)) of (B, S, channels)."""
        from fla.modules.causal_conv1d import causal_conv1d

        return causal_conv1d(x, self.conv1d.weight.to(x.dtype), self.conv1d.bias, activation="silu")[0]

    def recur(self, member, q, k, v, cu_seqlens, cache, *, beta, decay, qk_l2norm):
        """The delta rule, which computes its gates."""
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.kda import chunk_kda

        rule, options = (
            (chunk_gated_delta_rule, {}) if decay.x.ndim == 3 else (chunk_kda, {"safe_gate": decay.formula == "sigmoid"})
        )
        if decay.formula == "sigmoid":
            options["lower_bound"] = decay.number
        options |= dict(A_log=decay.A_log, dt_bias=decay.dt_bias.flatten(), allow_neg_eigval=beta.scale == 2)
        options |= dict(use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=qk_l2norm)
        return rule(q, k, v, decay.x, beta.x, **options)[0]


def recurrence(q, k, v, decay, beta, scale):
    """o_t = scale S_t^T q_t, (B, S, H, Dv), in float32, where S_t = S + k_t u_t^T for S = exp(decay_t) S_(t-1), and u_t = v_t,
    or beta_t (v_t - S^T k_t) with beta. decay (B, S, H) or (B, S, H, Dk).

    Tokens go in chunks. With the decay G_t from a chunk's first token to token t, and P_ij = exp(G_i - G_j) for i >= j, the u
    of a chunk solve (I + beta P k k^T below the diagonal) u = beta (v - exp(G) k S)."""
    with torch.autocast(q.device.type, enabled=False):
        tokens, rows = q.shape[1], 64 if decay.ndim == 3 else 16  # P has elements for channels, too
        padding = -tokens % rows

        def in_chunks(x):
            x = functional.pad(x.float(), (0, 0) * (x.ndim - 2) + (0, padding)).transpose(1, 2)
            return x.unflatten(2, (-1, rows))

        q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
        q, k, v, G = map(in_chunks, (q * scale, k, v, decay if decay.ndim == 4 else decay[..., None]))
        G = G.cumsum(-2)
        ahead = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)[..., None]
        P = (G.unsqueeze(-2) - G.unsqueeze(-3)).masked_fill(ahead, -torch.inf).exp()
        scores = lambda x, y: (x @ y.mT) * P[..., 0] if P.shape[-1] == 1 else torch.einsum("...id,...jd,...ijd->...ij", x, y, P)
        of_state, weights = k.new_zeros(1), scores(q, k)
        if beta is not None:
            beta = in_chunks(beta[..., None])
            system, targets = beta * scores(k, k), torch.cat([beta * v, beta * G.exp() * k], -1)
            solved = torch.linalg.solve_triangular(system, targets, upper=False, unitriangular=True)
            v, of_state = solved.split([v.shape[-1], k.shape[-1]], -1)
        last = G[..., -1:, :]
        q, k, keep = q * G.exp(), k * (last - G).exp(), last.exp().mT
        state, out = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1]), []
        for n in range(q.shape[2]):
            u = v[:, :, n] if beta is None else v[:, :, n] - of_state[:, :, n] @ state
            out.append(q[:, :, n] @ state + weights[:, :, n] @ u)
            state = keep[:, :, n] * state + k[:, :, n].mT @ u
        return torch.cat(out, 2)[:, :, :tokens].transpose(1, 2)


class OnRanks(Attention):
    """Attention where this rank has a shard of the tokens."""

    def attend(self, q, k, v, **options):
        return parallel.forward(q, k, v, **options)


class RecurrenceOnRanks:
    """A recurrent layer where this rank has a share of the tokens, which are put in order for it and back."""

    def forward(self, x, *, length, positions):
        """The layer's output for this rank's tokens."""
        self.length = length
        x = parallel.reorder(x, to="contiguous", length=length)
        return parallel.reorder(super().forward(x), order="contiguous", to="zigzag", length=length)

    def convolve(self, x, cu_seqlens, cache):
        """silu(conv(x)), behind the last tokens of the rank before."""
        weight, rank = self.conv1d.weight, dist.get_rank()
        windows = parallel.unshard(x[:, 1 - weight.shape[1] :], order="contiguous").chunk(dist.get_world_size(), 1)
        before = windows[rank - 1].mT * (rank > 0)  # 0 has a gradient, too: all ranks must call unshard's
        return short_conv(x, weight, self.conv1d.bias, activation="silu", initial_state=before)

    def recur(self, member, q, k, v, cu_seqlens, cache, **options):
        """The gated delta rule of a sequence that the ranks share."""
        return parallel.delta_rule(q, k, v, length=self.length, **options)

    def scan(self, x, dt, B, C, cu_seqlens, cache):
        """Mamba-2's scan of a sequence that the ranks share."""
        options = {"D": self.D, "dt_bias": self.dt_bias, "dt_softplus": True}
        return parallel.mamba2(x, dt, -self.A_log.exp(), B, C, length=self.length, **options)


class SingleRank:
    """One process, which has all tokens."""

    rank, where = 0, {}  # where: what attention is told of tokens' places

    def __init__(self, tokens):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def share(self, x):
        """This process's share of tokens (B, S)."""
        return x

    def sum(self, tensors):
        """The tensors are summed in place over all processes; of one process they stay as they are."""


class RankGroup(SingleRank):
    """Several, each with a share of every sequence, by torchrun."""

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


MODULES = {"softmax": Attention, "gated_delta": GatedDeltaNet, "kda": KimiDeltaAttention, "mamba2": Mamba2}
ON_TORCH, ON_FLA, ON_RANKS = (
    {kind: type(mixin.__name__, (mixin, module), {}) for kind, module in MODULES.items()} | {"softmax": attention}
    for mixin, attention in ((RecurrenceOnTorch, OnTorch), (RecurrenceOnFla, OnTorch), (RecurrenceOnRanks, OnRanks))
)
BASELINES = {"torch": ON_TORCH, "fla": ON_FLA}
MIXERS = *MODULES, "hybrid"
HYBRID_PERIOD = 4  # of so many layers of a hybrid the last is softmax attention


def arguments(kind, size):
    """The arguments of the module of this kind that mixes tokens."""
    head = size.dim // size.heads
    return {
        "softmax": dict(heads=size.heads, kv_heads=size.kv_heads, causal=True, rotary=ROTARY, qk_norm=True),
        "gated_delta": dict(num_heads=size.heads, head_dim=head),
        "kda": dict(num_heads=size.heads, head_dim=head),
        "mamba2": dict(headdim=head, d_state=2 * head),
    }[kind]


def kinds(mixer, depth):
    """What mixes tokens in each block."""
    hybrid = ["gated_delta" if (depth - 1 - i) % HYBRID_PERIOD else "softmax" for i in range(depth)]
    return hybrid if mixer == "hybrid" else [mixer] * depth


class TransformerBlock(nn.Module):
    """x + mixer(norm(x)), and the same of a perceptron."""

    def __init__(self, size, mixer):
        super().__init__()
        self.mixer = mixer
        self.perceptron = nn.Sequential(
            nn.Linear(size.dim, 4 * size.dim, bias=False), nn.GELU(), nn.Linear(4 * size.dim, size.dim, bias=False)
        )
        self.norms = nn.ModuleList(nn.RMSNorm(size.dim) for _ in range(2))

    def forward(self, x, **where):
        x = x + self.mixer(self.norms[0](x), **where)
        return x + self.perceptron(self.norms[1](x))


class Transformer(nn.Module):
    """Logits of each next byte. modules: by what mixes tokens."""

    def __init__(self, size, mixer, modules):
        super().__init__()
        self.embed = nn.Embedding(BYTES, size.dim)
        mixers = (modules[kind](size.dim, **arguments(kind, size)) for kind in kinds(mixer, size.depth))
        self.blocks = nn.ModuleList(TransformerBlock(size, x) for x in mixers)
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
    ranks: SingleRank
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


def train(size, ranks, mixer="softmax", baseline=None, eager=False, quiet=False):
    """{name: TrainingRun} of our model, and of a baseline, one of BASELINES, if there is to be one. eager: without
    torch.compile."""
    device = ranks.device
    text, chance, runs = sources().to(device), torch.Generator().manual_seed(1), {}
    ours = ON_RANKS if isinstance(ranks, RankGroup) else MODULES
    for name, modules in {"attention": ours, **({baseline: BASELINES[baseline]} if baseline else {})}.items():
        torch.manual_seed(0)
        model = Transformer(size, mixer, modules).to(device)
        tables = angles(torch.arange(size.tokens, device=device), size.dim // size.heads, ROTARY)
        for block in model.blocks:
            if isinstance(block.mixer, OnTorch):
                block.mixer.tables = tables
            if not eager and not isinstance(block.mixer, RecurrenceOnTorch):  # whose graph has too many nodes
                whole = not isinstance(block.mixer, RecurrenceOnFla)  # which Dynamo must not trace
                block.compile(fullgraph=whole)  # the first one; others of its kind are like it
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


def rows_of(mixer, runs):
    """The rows of the table: of each step its loss, and the milliseconds of all."""
    return [
        {"mixer": mixer, "model": name, "step": i, "loss": round(loss, 5), "ms": round(1e3 * run.step, 4)}
        for name, run in runs.items()
        for i, loss in enumerate(torch.stack(run.losses).tolist(), 1)
    ]


def add_to(path, rows):
    """All rows of the table, with these at its end."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def draw(rows, path):
    """The losses over the steps, ours wide, a baseline's dashed on top; a PNG, an SVG or a PDF, as the path ends."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    colours = {mixer: f"C{i}" for i, mixer in enumerate(MIXERS)}
    for mixer, name in dict.fromkeys((row["mixer"], row["model"]) for row in rows):
        mine = [row for row in rows if (row["mixer"], row["model"]) == (mixer, name)]
        label = f"{mixer}, {name}: {float(mine[-1]['ms']):.4g} ms a step"
        style = {"color": colours[mixer], "linewidth": 2}
        if name in BASELINES:
            style = {"color": "black", "linewidth": 0.7, "linestyle": "--"}
        axes.plot([int(row["step"]) for row in mine], [float(row["loss"]) for row in mine], label=label, **style)
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
    parser.add_argument("--mixer", choices=MIXERS, default="softmax", help="what mixes tokens")
    beside = "train the same model on torch's operations, too, or its delta rules on flash-linear-attention's"
    parser.add_argument("--baseline", nargs="?", choices=[*BASELINES], const="torch", help=beside)
    parser.add_argument("--eager", action="store_true", help="without torch.compile, as it always is without a GPU")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--png", type=Path, default="train.png", help="where the curves go; also .svg")
    parser.add_argument("--csv", type=Path, help="a table that the losses are added to; the curves are all that it holds")
    args = parser.parse_args(argv)
    size = replace(size, **{one.name: getattr(args, one.name) for one in fields(size)})
    ranks = (RankGroup if "RANK" in os.environ else SingleRank)(size.tokens)
    if args.baseline and isinstance(ranks, RankGroup):
        parser.error("--baseline: has all tokens: run it without torchrun")
    if args.baseline == "fla" and args.mixer not in ("gated_delta", "kda", "hybrid"):
        parser.error(f"--baseline fla: has the mixers gated_delta, kda and hybrid, not {args.mixer}")
    eager = args.eager or device == "cpu" or isinstance(ranks, RankGroup)
    runs = train(size, ranks, args.mixer, args.baseline, eager, args.quiet or ranks.rank > 0)
    if ranks.rank > 0:
        dist.destroy_process_group()
        return runs
    count = sum(x.numel() for x in runs["attention"].model.parameters())
    print(f"{count / 1e6:.3g} million parameters, {size.batch} x {size.tokens} bytes a step, {size.steps} steps on {device}")
    for name, run in runs.items():
        speed = f"{1e3 * run.step:.4g} ms a step, {size.batch * size.tokens / run.step:.4g} tokens a second"
        print(f"{name:9}  loss {run.losses[0].item():.3f} -> {run.losses[-1].item():.3f}, {speed}")
    if args.baseline:
        ours, theirs = (runs[name] for name in ("attention", args.baseline))
        difference = max(abs(x.item() - y.item()) for x, y in zip(ours.losses, theirs.losses))
        ratio = theirs.step / ours.step
        print(f"losses at most {difference:.3f} apart; {ratio:.2f} times as many steps a second as on {args.baseline}")
    rows = rows_of(args.mixer, runs)
    draw(rows if args.csv is None else add_to(args.csv, rows), args.png)
    if isinstance(ranks, RankGroup):
        dist.destroy_process_group()
    return runs


if __name__ == "__main__":
    main()
