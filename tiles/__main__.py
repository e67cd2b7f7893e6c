"""`python -m tiles COMMAND`: see COMMANDS."""

import importlib
import sys

from .pipes import leave

COMMANDS = {  # name: (module, what it does)
    "doctor": ("doctor", "what this machine has, what runs where, and what to do about what is missing"),
    "inspect": ("inspect.command", "what a kernel compiles to, with no GPU: registers, spills, its lines with their SASS"),
    "layout": ("draw", "draw where a tile's elements lie, and the bank conflicts of an access"),
    "profile": ("profile.command", "what a function launches, what it costs, and what its warps wait for"),
}


def main(arguments) -> int:
    """Run a command's module, whose `main` takes the remaining arguments and returns the exit code."""
    if arguments[:1] and arguments[0] in COMMANDS:
        return importlib.import_module(f".{COMMANDS[arguments[0]][0]}", __package__).main(arguments[1:])
    wants_help = arguments[:1] in (["-h"], ["--help"])
    place = sys.stdout if wants_help else sys.stderr
    if arguments and not wants_help:
        print(f"python -m tiles: there is no command {arguments[0]!r}", file=place)
    print("usage: python -m tiles COMMAND", file=place)
    for name, (_, text) in COMMANDS.items():
        print(f"  {name:<10} {text}", file=place)
    return 0 if wants_help else 2


if __name__ == "__main__":
    leave(main, sys.argv[1:])
