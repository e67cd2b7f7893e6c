"""Time over the length of the sequences, from bench/test_crossing.py: `python bench/plot.py crossing.json crossing.svg`."""

import json
import sys

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, NullLocator

LINES = {  # provider: label, colour, dashes
    "cudnn": ("softmax: cuDNN", "#9aa0a6", "--"),
    "flash4": ("softmax: FlashAttention-4", "#5f6368", ":"),
    "softmax": ("softmax: attention.forward", "#c5221f", "-"),
    "fla": ("decay by token: flash-linear-attention", "#5f6368", "-."),
    "linear": ("decay by token: attention.linear", "#1a73e8", "-"),
}


def main(source, target):
    """Draw a run's medians."""
    with open(source) as file:
        run = json.load(file)
    times = {}
    for b in run["benchmarks"]:
        info = b["extra_info"]
        times.setdefault(info["provider"], {})[info["length"]] = 1e3 * b["stats"]["median"]
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    for provider, (label, colour, dashes) in LINES.items():
        if provider in times:
            lengths, ms = zip(*sorted(times[provider].items()))
            axes.plot(lengths, ms, dashes, color=colour, label=label, marker="o", markersize=3.5)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(lengths)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1024:g}k" if x >= 1024 else f"{x:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set(xlabel="tokens of a sequence", ylabel="milliseconds")
    axes.set_title("{tokens} tokens, {heads} heads of {head_dim}, bf16, causal".format(**info), fontsize=10)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8.5)
    figure.savefig(target, metadata={"Date": None} if target.endswith(".svg") else None)


if __name__ == "__main__":
    main(*sys.argv[1:])
