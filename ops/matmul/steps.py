"""A product along k whose operands come through two rings, tile by tile.

    acc = warpgroup.mm_AB(subtile(x.wait(j), 64, wg), w.wait(j))      the first step
    for i in range(j + 1, j + steps):
        acc = warpgroup.step_AB(acc, x, w, i, wg)                     the others
    acc = warpgroup.finish(acc, x, w, j + steps - 1)

Consumers lie one below the other: warpgroup wg has 64 rows of x's tiles. A product is in flight while the next one's tiles are
waited for; so a ring has two slots or more."""

from tiles.op import inlined

from .. import cluster
from ..shape.subtile import subtile
from .wgmma import ROWS, mma_AB, mma_ABt, wait


@inlined
def step_AB(acc, x, w, i, wg):
    """acc + x_part @ w[i], in flight, for the i-th tiles of the rings x and w; `x_part`: the 64 rows of x[i] that belong to
    warpgroup wg. The tiles of the step before, whose product is done by then, are given back."""
    return give_back(issue_AB(acc, x, w, i, wg), x, w, i - 1)


@inlined
def step_ABt(acc, x, w, i, wg):
    """acc + x_part @ w[i].T: as step_AB, for w's tiles (n, k)."""
    return give_back(issue_ABt(acc, x, w, i, wg), x, w, i - 1)


@inlined
def issue_AB(acc, x, w, i, wg):
    """step_AB without waiting: two products are in flight while you do something else. Continue with
    steps_AB(acc, x, w, i + 1, wg), or with give_back(acc, x, w, i - 1)."""
    return mma_AB(acc, subtile(x.wait(i), ROWS, wg), cluster.unmap(w.wait(i)))


@inlined
def issue_ABt(acc, x, w, i, wg):
    """acc + x_part @ w[i].T: as issue_AB, for w's tiles (n, k)."""
    return mma_ABt(acc, subtile(x.wait(i), ROWS, wg), w.wait(i))


@inlined
def steps_AB(acc, x, w, i, wg):
    """Steps i and i + 1, after an issue_AB: the two products before are done then, and these two are in flight."""
    return issue_AB(step_AB(give_back(acc, x, w, i - 2), x, w, i, wg), x, w, i + 1, wg)


@inlined
def steps_ABt(acc, x, w, i, wg):
    """Steps i and i + 1 of acc + x_part @ w.T, as of steps_AB."""
    return issue_ABt(step_ABt(give_back(acc, x, w, i - 2), x, w, i, wg), x, w, i + 1, wg)


@inlined
def give_back(acc, x, w, i):
    """acc, in flight. All products before it are done, so their operands, the i-th tiles, are given back."""
    wait(newer=1)
    x.release(i)
    w.release(i)
    return acc


@inlined
def finish(acc, x, w, i):
    """acc, whose last step is done, so its tiles, the i-th ones, are given back."""
    acc = wait(acc)
    x.release(i)
    w.release(i)
    return acc
