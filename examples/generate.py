"""Generate with a Llama of transformers on our attention, and on torch's scaled_dot_product_attention.

    python examples/generate.py --batch 32 --prompt 8192
    python examples/generate.py --help

Needs torch and transformers, and shows a progress bar if tqdm is installed: `pip install -e '.[generate]'`. Weights and
prompts are random. On a GPU the layers have the shape of Llama 3.1 8B's, and a step of generation is one CUDA graph,
captured once, over a static cache. Without a GPU the model is tiny, and attention runs in the interpreter. The same weights
generate with each attention in turn, and with none at all: the time that a step then saves is attention's share of it.
"""

import argparse
import contextlib
import statistics
import time
from dataclasses import dataclass, fields, replace

import torch
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM, StaticCache

from attention.compat import huggingface

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None

TURN, WARM = 8, 3  # steps between two looks at the clock; steps before a graph is captured


@dataclass(frozen=True)
class GenerationSize:
    """The sizes of a model, and of the prompt and the text that it generates."""

    dim: int = 4096
    hidden: int = 14336
    depth: int = 8
    heads: int = 32
    kv_heads: int = 8
    vocabulary: int = 128256
    batch: int = 1
    prompt: int = 8192
    tokens: int = 128


TINY = GenerationSize(dim=64, hidden=64, depth=2, heads=4, kv_heads=2, vocabulary=97, batch=2, prompt=24, tokens=8)


@dataclass
class Generated:
    """What was generated, (B, tokens), and how long it took: the prompt, and a step in each turn but for the first steps, where
    kernels are compiled."""

    tokens: torch.Tensor
    prompt: float
    seconds: list

    @property
    def step(self):
        """The median of the seconds that a step takes."""
        return statistics.median(self.seconds)


def nothing(module, query, key, value, *masks, **options):
    """Attention that takes no time, for comparison."""
    return query[..., : value.shape[-1]].transpose(1, 2), None


def model_of(size, device):
    """A Llama of this size."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocabulary, hidden_size=size.dim, intermediate_size=size.hidden, num_hidden_layers=size.depth,
        num_attention_heads=size.heads, num_key_value_heads=size.kv_heads, max_position_embeddings=size.prompt + size.tokens,
        bos_token_id=None, eos_token_id=None, dtype=torch.bfloat16, initializer_range=size.dim**-0.5,
    )  # fmt: skip
    with torch.device(device):
        return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


@torch.inference_mode()
def generate(model, prompt, count, quiet=False):
    """Generate `count` tokens after prompts (B, S), each the likeliest."""
    cache = StaticCache(config=model.config, max_cache_len=prompt.shape[1] + count)
    synchronize = torch.cuda.synchronize if prompt.is_cuda else lambda: None
    token, made = prompt[:, :1].clone(), []

    def step(read=token):
        token.copy_(model(read, past_key_values=cache, logits_to_keep=1).logits.argmax(-1))

    def timed(run, turn=1):
        synchronize()
        begun = time.perf_counter()
        for _ in range(turn):
            run()
            made.append(token.clone())
        synchronize()
        bar.update(turn)
        return (time.perf_counter() - begun) / turn

    with tqdm(total=count, unit="token", disable=quiet) if tqdm else NoBar() as bar:
        of_prompt, seconds = timed(lambda: step(prompt)), []
        for _ in range(WARM):
            timed(step)
        run = captured(step) if prompt.is_cuda else step
        while len(made) < count:
            seconds.append(timed(run, min(TURN, count - len(made))))
    return Generated(torch.cat(made, 1), of_prompt, seconds)


def captured(step):
    """A CUDA graph of a step: what replays it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may allocate meanwhile
        step()
    return graph.replay


class NoBar(contextlib.nullcontext):
    """Stands in for a progress bar where none is shown."""

    def __enter__(self):
        return self

    def update(self, tokens):
        """So many more were made."""


def main(argv=None):
    """The command line is run; the result is {name: Generated}."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = GenerationSize() if device == "cuda" else TINY
    for one in fields(size):
        parser.add_argument(f"--{one.name.replace('_', '-')}", type=one.type, default=getattr(size, one.name))
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args(argv)
    size = replace(size, **{one.name: getattr(args, one.name) for one in fields(size)})
    if size.tokens <= 1 + WARM:
        parser.error(f"--tokens: must be more than {1 + WARM}, which are not timed: {size.tokens}")
    huggingface.register("tiles")
    AttentionInterface.register("nothing", nothing)
    AttentionMaskInterface.register("nothing", lambda *sizes, **options: None)
    model, runs = model_of(size, device), {}
    prompt = torch.randint(size.vocabulary, (size.batch, size.prompt), device=device)
    for name in "nothing", "sdpa", "tiles":
        model.set_attn_implementation(name)
        generate(model, prompt[:1], 2 + WARM, quiet=True)  # kernels are compiled
        runs[name] = generate(model, prompt, size.tokens, args.quiet)
    count = sum(x.numel() for x in model.parameters())
    print(f"{count / 1e9:.3g} billion parameters, {size.batch} x {size.prompt} tokens of prompts, on {device}")
    for name in "tiles", "sdpa":
        run, share = runs[name], 1 - runs["nothing"].step / runs[name].step
        speed = f"{size.batch / run.step:.4g} tokens a second, {1e3 * run.step:.4g} ms a step"
        print(f"{name:5}  {speed}, {share:.0%} of it attention; the prompts {run.prompt:.3g} s")
    alike = (runs["tiles"].tokens == runs["sdpa"].tokens).long().cumprod(1).sum(1).float().mean().item()
    print(f"the first {alike:.3g} of {size.tokens} tokens are the same, in the mean")
    return runs


if __name__ == "__main__":
    main()
