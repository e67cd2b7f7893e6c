"""What options cost attention.backward, in a minute: its speed with each, as a part of the plain kernel's.

    python -m bench.try_backward              D 64 and 128, causal and full, lengths of 512 to 16384
    python -m bench.try_backward 128 4096     one head_dim; one length

A line is a problem: milliseconds of the plain kernel, and for each option plain's time over its own. `in order` is
deterministic=True; a bias by key has one row for all queries. bf16, B * S = 16384, H * D = 2048, rounds in turn (see
measure.py); biases, softcap and ALiBi at lengths of 4096 alone. No result is judged here: the tests do that."""

import argparse
import functools

import torch

import attention
from bench.measure import interleaved, medians

TOKENS, WIDTH = 16384, 2048
LENGTHS, OF_SCORES = (512, 1024, 2048, 4096, 16384), 4096


def options(head_dim: int, length: int) -> dict[str, dict]:
    """{a choice's name: options of attention.backward}"""
    choices = {"plain": {}, "in order": {"deterministic": True}}
    if length == OF_SCORES:
        heads = WIDTH // head_dim
        choices["bias by key"] = {"bias": torch.randn(1, heads, 1, length, device="cuda")}
        choices["bias by score"] = {"bias": torch.randn(1, heads, length, length, device="cuda", dtype=torch.bfloat16)}
        choices["softcap"] = {"softcap": 30.0}
        choices["ALiBi"] = {"alibi": torch.linspace(0.01, 0.5, heads, device="cuda")}
    return choices


class ForwardPerOption:
    """Inputs, and what forward made of them with each option."""

    def __init__(self, head_dim, length, causal, asked):
        shape = TOKENS // length, length, WIDTH // head_dim, head_dim
        self.q, self.k, self.v, self.dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        self.into = {name: torch.empty_like(self.q) for name in ("dq", "dk", "dv")}
        self.made = {
            what: attention.forward(self.q, self.k, self.v, causal=causal, return_lse=True, **given)
            for what, given in asked.items()
        }

    def backward(self, what, causal, given):
        return attention.backward(self.dout, self.q, self.k, self.v, *self.made[what], causal=causal, **self.into, **given)


def measured(head_dim: int, length: int, causal: bool) -> str:
    """A line with the time without options, and each choice's speed beside it."""
    asked = options(head_dim, length)
    sets = [(ForwardPerOption(head_dim, length, causal, asked),) for _ in range(2)]
    calls = {
        what: functools.partial(ForwardPerOption.backward, what=what, causal=causal, given=given)
        for what, given in asked.items()
    }
    times = medians(interleaved(calls, sets, 5))
    parts = [f"{what} {times['plain'] / ms:.3f}" for what, ms in times.items() if what != "plain"]
    return f"D {head_dim:3} {'causal' if causal else 'full  '} {length:5}  {times['plain']:.4f} ms  " + "  ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("head_dim", type=int, nargs="?", help="of heads; default: 64, then 128")
    parser.add_argument("length", type=int, nargs="?", help=f"of sequences; default: {LENGTHS}")
    asked = parser.parse_args()
    for head_dim in [asked.head_dim] if asked.head_dim else [64, 128]:
        for causal in (True, False):
            for length in [asked.length] if asked.length else LENGTHS:
                print(measured(head_dim, length, causal), flush=True)


if __name__ == "__main__":
    main()
