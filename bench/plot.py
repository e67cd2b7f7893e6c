"""Pictures of runs.

`python bench/plot.py crossing.json crossing.svg`: time over the length of the sequences, from bench/test_crossing.py.
`python bench/plot.py forward.json backward.json speed.svg`: TFLOPS of causal attention, from bench/test_forward.py and
bench/test_backward.py.
"""

import statistics
import sys

import matplotlib.pyplot as plt
from matplotlib.ticker import FuncFormatter, NullLocator
from runs import read

OURS, LINEAR, PEER, OTHER = "#c5221f", "#1a73e8", "#9aa0a6", "#5f6368"
LINES = {  # provider of bench/test_crossing.py: label, colour, dashes
    "cudnn": ("softmax: cuDNN", PEER, "--"),
    "flash4": ("softmax: FlashAttention-4", OTHER, ":"),
    "softmax": ("softmax: attention.forward", OURS, "-"),
    "fla": ("decay by token: flash-linear-attention", OTHER, "-."),
    "linear": ("decay by token: attention.linear", LINEAR, "-"),
}
RIVALS = {  # the same of bench/test_forward.py and bench/test_backward.py
    "flash2": ("FlashAttention-2", PEER, ":"),
    "cudnn": ("cuDNN", OTHER, "--"),
    "flash4": ("FlashAttention-4", LINEAR, "--"),
    "tiles": ("this library", OURS, "-"),
}
STYLE = {"marker": "o", "markersize": 3.5}


def lengths_along(axes, lengths):
    """An axis of sequence lengths."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(lengths))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1024:g}k" if x >= 1024 else f"{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.25)


def crossing(run):
    """Milliseconds of softmax and linear attention over the length."""
    times = {}
    for row in run["rows"]:
        times.setdefault(row["provider"], {})[row["length"]] = statistics.median(row["milliseconds"])
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    for provider, (label, colour, dashes) in LINES.items():
        if provider in times:
            axes.plot(*zip(*sorted(times[provider].items())), dashes, color=colour, label=label, **STYLE)
    lengths_along(axes, times["linear"])
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set(xlabel="tokens of a sequence", ylabel="milliseconds")
    axes.set_title("{tokens} tokens, {heads} heads of {head_dim}, bf16, causal".format(**run["rows"][0]), fontsize=10)
    axes.legend(frameon=False, fontsize=8.5)
    return figure


def speed(*runs):
    """TFLOPS of causal attention over the length: a row for each run, a column for each head_dim."""
    columns = sorted({row["head_dim"] for row in runs[0]["rows"]})
    size = 9, 2.4 * len(runs) + 0.5
    figure, grid = plt.subplots(len(runs), len(columns), figsize=size, sharex=True, sharey="row", layout="constrained")
    for run, line in zip(runs, grid):
        speeds = {}
        for row in run["rows"]:
            if row["causal"]:
                speeds.setdefault((row["head_dim"], row["provider"]), {})[row["length"]] = row["tflops"]
        name = run["command"].partition("test_")[2].partition(".")[0]
        for head_dim, axes in zip(columns, line):
            for provider, (label, colour, dashes) in RIVALS.items():
                if (head_dim, provider) in speeds:
                    axes.plot(*zip(*sorted(speeds[head_dim, provider].items())), dashes, color=colour, label=label, **STYLE)
            lengths_along(axes, speeds[head_dim, "tiles"])
            axes.set_title(f"{name}, causal, head_dim {head_dim}", fontsize=9)
        line[0].set(ylabel="TFLOPS", ylim=(0, 1.08 * max(max(lengths.values()) for lengths in speeds.values())))
    for axes in grid[-1]:
        axes.set_xlabel("tokens of a sequence")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside upper center", ncols=len(labels), frameon=False, fontsize=9)
    return figure


def main(*paths):
    """Draw runs; the last path is the picture's."""
    *sources, target = paths
    runs = [read(source) for source in sources]
    figure = speed(*runs) if "tflops" in runs[0]["rows"][0] else crossing(*runs)
    figure.savefig(target, metadata={"Date": None} if target.endswith(".svg") else None)


if __name__ == "__main__":
    main(*sys.argv[1:])
