"""Mutation testing: which small faults in the library would the tests without a GPU let pass?

    python -m tests.mutate tiles/ring.py              all faults of a file
    python -m tests.mutate ring.wait parity           those whose names have both words
    python -m tests.mutate --sample 50 --seed 3       some of all
    python -m tests.mutate --list decode/hopper       their names

Faults are made by rules (tests/mutation/rules.py) from the syntax of the sources, and some by hand: docs/mutations.md.
"""

import sys

from tests.mutation.run import main

if __name__ == "__main__":
    sys.exit(main())
