"""What the model of attention.parallel predicts, without a GPU: shares of perfect scaling, for GPUs that all reach one another
by the same links, and for hosts of eight that are joined by a network.

    python -m bench.ranks_model [--link 320 --network 45 --latency 35 --network-latency 35]

Links are in GB/s that a GPU receives, latencies in microseconds for each other rank. docs/parallel.md has the tables, and what
was measured beside them."""

import argparse

from attention.parallel import Zigzag
from attention.parallel.choice import PAIRS, SCHEMES, MachineSpeeds, estimate, estimate_pair
from attention.parallel.redistribution import all_heads
from attention.parallel.subcalls import ForwardCall

SHAPES = (  # tokens, heads, key heads, window
    (2**14, 32, 8, None),
    (2**16, 32, 8, None),
    (2**16, 16, 16, None),
    (2**17, 32, 8, (4096, 0)),
    (2**18, 32, 8, None),
    (2**20, 32, 8, None),
)
HOST = 8  # GPUs of a host


def call_of(length, heads, kv_heads, window):
    """A causal call, or one with a window, of heads of 128."""
    options = {"causal": True} if window is None else {"window": window}
    return ForwardCall(options, length, length, all_heads(heads), all_heads(kv_heads), (128, 128), "cuda", True)


def shares(shape, ranks, machines, pairs):
    """{scheme or pair: share of perfect scaling} on so many ranks; machines: speeds between hosts and inside one."""
    call, spans = call_of(*shape), Zigzag().spans(shape[0], ranks)
    (whole,) = (estimate("gather", call, 1, one, one, machines[1]) for one in [Zigzag().spans(shape[0], 1)])
    if pairs:
        estimates = [estimate_pair(pair, call, 1, spans, spans, HOST, machines) for pair in PAIRS]
    else:
        estimates = [estimate(scheme, call, 1, spans, spans, machines[1]) for scheme in SCHEMES]
    return {one.name: 0.0 if one.why else whole.seconds / ranks / one.seconds for one in estimates}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in ("link", 320.0), ("network", 45.0), ("latency", 35.0), ("network_latency", 35.0):
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=default)
    asked = parser.parse_args()
    network = MachineSpeeds(link_bandwidth=1e9 * asked.network, message_latency=1e-6 * asked.network_latency)
    inside = MachineSpeeds(link_bandwidth=1e9 * asked.link, message_latency=1e-6 * asked.latency)
    for ranks, pairs in (2, False), (4, False), (8, False), (64, True):
        names = [", ".join(pair) for pair in PAIRS] if pairs else SCHEMES
        print(f"\n| {ranks} GPUs | {' | '.join(names)} |\n|---|{'---:|' * len(names)}")
        for shape in SHAPES:
            length, heads, kv_heads, window = shape
            found = shares(shape, ranks, (network, inside), pairs)
            said = f"{length // 1024}k, {heads}/{kv_heads} heads" + (f", window {window[0]}" if window else "")
            print(f"| {said} | {' | '.join([f'{found[name]:.2f}' if found[name] else '-' for name in names])} |")


if __name__ == "__main__":
    main()
