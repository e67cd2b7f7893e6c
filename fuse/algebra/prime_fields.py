"""Random prime fields, each with a subgroup of prime order: where identity testing computes (identity.py).

    q a random prime of 61 bits, p the least prime of the form c q + 1, base ** q = 1 modulo p

q is uniform among the primes between 2^60 and 2^61, of which there are more than 2^60 / 70 (Rosser and Schoenfeld). p follows
from q, and p - 1 < 2^90 has one such factor only, so no p is more probable than its q. A number of B bits that is not 0 has at
most B / 60 prime factors beyond 2^60, and is 0 modulo a random q, or p, with a chance below 2 B / 2^60."""

from __future__ import annotations

import math
from random import Random
from typing import NamedTuple

BITS = 60  # q lies between 2 ** BITS and twice that
WITNESSES = 2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41
SMALL = math.prod(n for n in range(3, 200, 2) if all(n % m for m in range(3, 15, 2) if m < n))


def is_prime(n: int) -> bool:
    """Whether n is a prime, by the test of Miller and Rabin. With these witnesses it is deterministic below 3.3 * 10^24, which
    is beyond 2^81 (Sorenson and Webster, 2015)."""
    if n < 2 or any(n % a == 0 for a in WITNESSES):
        return n in WITNESSES
    if n >= 3317044064679887385961981:
        raise ValueError(f"is_prime: is deterministic below 3.3e24, got {n}")
    twos = (n - 1 & 1 - n).bit_length() - 1
    for a in WITNESSES:
        x = pow(a, n - 1 >> twos, n)
        if x in (1, n - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True


class PrimeField(NamedTuple):
    """The integers modulo the prime p, in which base has the prime order q."""

    p: int
    q: int
    base: int


def random_field(random: Random) -> PrimeField:
    """A field with q drawn from the primes of BITS + 1 bits; see the module."""
    while True:
        q = random.randrange(2**BITS + 1, 2 ** (BITS + 1), 2)
        if math.gcd(q, SMALL) == 1 and is_prime(q):
            break
    c = 2
    while math.gcd(p := c * q + 1, SMALL) > 1 or not is_prime(p):
        c += 2
    base = next(base for a in WITNESSES if (base := pow(a, c, p)) != 1)
    return PrimeField(p, q, base)
