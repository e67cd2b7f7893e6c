"""Random numbers that depend on a position and a seed alone: Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random
numbers: as easy as 1, 2, 3", 2011), a block cipher whose counter is a place and whose key is a seed. No state, no order.

A call gives four words. They are laid over places (row, column) as an accumulator of a matrix product lies in a lane's
registers, so that a lane uses all that it makes: of each 16 x 16 elements, those in rows r and r + 8 and columns 2c, 2c + 1,
2c + 8, 2c + 9 share a call, two of a row in each word."""

import numpy as np

MULTIPLIERS, STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)  # of the rounds; from one round's key to the next's
ROUNDS, WORD = 10, 0xFFFFFFFF
TILE, HALF, LEVELS = 16, 8, 2**16  # rows and columns that go together; from one row to the other; of half a word


def philox4x32(counter, key):
    """The four words, as uint64 below 2**32, of counters (four integers or arrays of them) under a key (two integers)."""
    a, b, c, d = (np.asarray(x).astype(np.uint64) & np.uint64(WORD) for x in counter)
    word, bits = np.uint64(WORD), np.uint64(32)
    for n in range(ROUNDS):
        first, second = (np.uint64((k + n * step) & WORD) for k, step in zip(key, STEPS))
        x, y = np.uint64(MULTIPLIERS[0]) * a, np.uint64(MULTIPLIERS[1]) * c
        a, b, c, d = (y >> bits) ^ b ^ first, y & word, (x >> bits) ^ d ^ second, x & word
    return a, b, c, d


def halves(seed, batch, head, i, j):
    """Whole numbers from 0 to 65535, all alike likely and independent, for rows i and columns j (integers or arrays, which
    broadcast) of a head of a batch. seed: an integer of up to 64 bits."""
    i, j = np.asarray(i), np.asarray(j)
    counter = i // TILE * HALF + i % HALF, j // TILE * (HALF // 2) + j % HALF // 2, head, batch
    words = np.broadcast_arrays(*philox4x32(counter, (seed & WORD, seed >> 32 & WORD)))
    word = np.choose(i % TILE // HALF + j % TILE // HALF * 2, words)
    return (word >> (16 * (j % 2)).astype(np.uint64)) & np.uint64(LEVELS - 1)
