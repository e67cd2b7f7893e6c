"""Generate with layers of attention.nn and their caches: a prompt in one call, then token after token.

    python examples/generate_hybrid.py
    python examples/generate_hybrid.py --help

The model is a hybrid, three gated delta rules before each softmax attention, with random weights. Both kinds of layer have
new_cache, and take the cache in a call. On a GPU a step is one CUDA graph, captured once, because caches are updated in place;
without one the model is tiny, and attention runs in the interpreter. At the end one call without caches reads all tokens, and
says how far its logits are from those of the steps.
"""

import argparse
import time

import torch
from torch import nn

from attention.nn import Attention, GatedDeltaNet

VOCABULARY = 256


class Hybrid(nn.Module):
    """A language model whose layers mix tokens, each followed by an MLP."""

    def __init__(self, dim, depth, heads, kv_heads, **factory):
        super().__init__()
        softmax = dict(heads=heads, kv_heads=kv_heads, causal=True, qk_norm=True, rotary=10_000)
        delta = dict(num_heads=kv_heads, num_v_heads=heads, head_dim=dim // heads)
        norm = lambda: nn.RMSNorm(dim, **factory)
        self.embedding = nn.Embedding(VOCABULARY, dim, **factory)
        self.mixers = nn.ModuleList(
            Attention(dim, **softmax, **factory) if n % 4 == 3 else GatedDeltaNet(dim, **delta, **factory) for n in range(depth)
        )
        self.mlps = nn.ModuleList(
            nn.Sequential(
                nn.RMSNorm(dim, **factory), nn.Linear(dim, 4 * dim, **factory), nn.SiLU(), nn.Linear(4 * dim, dim, **factory)
            )
            for _ in range(depth)
        )
        self.norms = nn.ModuleList(norm() for _ in range(depth))
        self.head = nn.Linear(dim, VOCABULARY, bias=False, **factory)

    def new_caches(self, batch, max_length):
        """A cache for each layer. Those of recurrent layers are as large however many tokens there are."""
        return [mixer.new_cache(batch, max_length) for mixer in self.mixers]

    def forward(self, tokens, caches=None):
        """Logits (B, S, VOCABULARY) of tokens (B, S), which follow those in the caches."""
        x = self.embedding(tokens)
        for n, (norm, mixer, mlp) in enumerate(zip(self.norms, self.mixers, self.mlps)):
            x = x + mixer(norm(x), cache=caches and caches[n])
            x = x + mlp(x)
        return self.head(x)


def step_of(model, token, caches):
    """A function that reads `token` (B, 1) and returns its logits, always in the same array: on a GPU a CUDA graph. The first
    steps, of any token, compile kernels."""
    if not token.is_cuda:
        return lambda: model(token, caches)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            model(token, caches)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may allocate meanwhile
        logits = model(token, caches)
    return lambda: graph.replay() or logits


@torch.no_grad()
def generate(model, prompt, count):
    """(The `count` most likely tokens after the prompt (B, S), the logits of all steps, seconds a step)."""
    batch, length = prompt.shape
    caches, token = model.new_caches(batch, length + count), prompt[:, :1].clone()
    step = step_of(model, token, caches)
    for cache in caches:
        cache.reset()
    logits, tokens, logits_of_steps = model(prompt, caches), [], []
    begin = time.perf_counter()
    for _ in range(count):
        logits_of_steps.append(logits[:, -1:].clone())
        token.copy_(logits_of_steps[-1].argmax(-1))
        tokens.append(token.clone())
        logits = step()
    if token.is_cuda:
        torch.cuda.synchronize()
    return torch.cat(tokens, 1), torch.cat(logits_of_steps, 1), (time.perf_counter() - begin) / count


def main(arguments=None):
    on_gpu = torch.cuda.is_available()
    sizes = dict(dim=2048, depth=8, heads=16, kv_heads=4, batch=8, prompt=4096, tokens=128)
    tiny = dict(dim=64, depth=4, heads=2, kv_heads=1, batch=2, prompt=20, tokens=3)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (sizes if on_gpu else tiny).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    size = parser.parse_args(arguments)
    torch.manual_seed(0)
    device = "cuda" if on_gpu else "cpu"
    model = Hybrid(size.dim, size.depth, size.heads, size.kv_heads, dtype=torch.bfloat16, device=device)
    prompt = torch.randint(VOCABULARY, (size.batch, size.prompt), device=device)
    tokens, logits, seconds = generate(model, prompt, size.tokens)
    with torch.no_grad():
        whole = model(torch.cat([prompt, tokens[:, :-1]], 1))[:, size.prompt - 1 :]
    difference = float((logits - whole).float().norm() / whole.float().norm())
    print(
        f"{size.tokens} tokens of {size.batch} sequences, {1e3 * seconds:.2f} ms a step; logits differ by {difference:.1e} from"
        " one call's"
    )
    return difference


if __name__ == "__main__":
    main()
