"""Tables from runs of bench/test_forward.py, test_backward.py, test_linear.py or test_raw_gates.py:
`python bench/table.py run.json ...`."""

import math
import sys

from runs import read

ORDER = ("tiles", "cudnn", "flash4", "tiles_sm_80", "flash2")
PEERS = {"tiles": ("cudnn", "flash4"), "tiles_sm_80": ("flash2",)}  # the instructions of Hopper, and those since Ampere


def by_problem(rows):
    """{(head_dim, causal): {length: {provider: tflops}}}"""
    table = {}
    for row in rows:
        place = table.setdefault((row["head_dim"], row["causal"]), {}).setdefault(row["length"], {})
        place[row["provider"]] = row["tflops"]
    return table


def attention(rows):
    """TFLOPS, and below each table the ratios to the better of the peers that use the same instructions."""
    table = by_problem(rows)
    print("TFLOPS, medians of interleaved rounds.\n")
    ratios = {ours: [] for ours in PEERS}
    for (head_dim, causal), lengths in sorted(table.items()):
        print(f"| D {head_dim}{' causal' * causal} | " + " | ".join(f"S {n}" for n in lengths) + " |")
        print("|---|" + "---:|" * len(lengths))
        ran = {provider for cell in lengths.values() for provider in cell}
        for provider in (p for p in ORDER if p in ran):
            cells = [f"{cell[provider]:.0f}" if provider in cell else "" for cell in lengths.values()]
            print(f"| {provider} | " + " | ".join(cells) + " |")
        for ours, peers in {
            ours: [p for p in peers if p in ran] for ours, peers in PEERS.items() if ours in ran and ran & {*peers}
        }.items():
            best = [max(cell.get(p, 0) for p in peers) for cell in lengths.values()]
            row = [cell.get(ours, math.nan) / peer if peer else math.nan for cell, peer in zip(lengths.values(), best)]
            ratios[ours] += row
            print(f"| **{ours} / {' or '.join(peers)}** | " + " | ".join(f"**{x:.2f}**" for x in row) + " |")
        print()
    for ours, row in ratios.items():
        if row := [x for x in row if not math.isnan(x)]:
            print(f"Geometric mean of the ratios of {ours}: {math.exp(sum(map(math.log, row)) / len(row)):.3f}")


def linear(rows):
    """Milliseconds beside the limit that memory sets, and beside the peer."""
    cells = {}
    for row in rows:
        cells.setdefault((row["member"], row["batch"], row["length"], row["heads"]), {})[row["provider"]] = row
    print("Milliseconds, medians of interleaved rounds; of the limit: that of reading and writing all once over ours.\n")
    print("| | B | S | H | tiles | limit | of the limit | peer | peer / tiles | our error / the peer's |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for (member, *sizes), cell in cells.items():
        ours, peer = cell["tiles"], cell.get("peer")
        numbers = [f"{ours['ms']:.3f}", f"{ours['limit']:.3f}", f"**{ours['of_limit']:.2f}**"]
        numbers += [f"{peer['ms']:.3f}", f"**{peer['ms'] / ours['ms']:.2f}**"] if peer else ["", ""]
        numbers.append(f"{ours['error_ratio']:.2f}" if "error_ratio" in ours else "")
        print(f"| {member} | " + " | ".join([*map(str, sizes), *numbers]) + " |")


def raw_gates(rows):
    """Milliseconds with raw inputs, beside inputs that are computed already and those that torch computes first."""
    cells = {}
    for row in rows:
        cells.setdefault((row["member"], row["batch"], row["length"], row["heads"]), {})[row["provider"]] = row
    print("Milliseconds, medians of interleaved rounds.\n")
    print("| | B | S | H | given | raw | raw / given | torch |\n|---|---:|---:|---:|---:|---:|---:|---:|")
    for (member, *sizes), cell in cells.items():
        given, raw, by_torch = (f"{cell[name]['ms']:.3f}" if name in cell else "" for name in ("given", "raw", "torch"))
        cost = f"**{cell['raw']['fused_cost']:.2f}**" if "raw" in cell else ""
        print(f"| {member} | " + " | ".join([*map(str, sizes), given, raw, cost, by_torch]) + " |")


def main(*paths):
    """Print the tables of a run, or of one in several parts, in Markdown."""
    runs = [read(path) for path in paths]
    rows = [row for run in runs for row in run["rows"]]
    print(f"{runs[0]['datetime'][:10]}, {runs[0].get('ran_on', 'on what is not known')}.", end=" ")
    (raw_gates if "fused_cost" in rows[0] else linear if "member" in rows[0] else attention)(rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
