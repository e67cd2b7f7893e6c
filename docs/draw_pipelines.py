"""Draws docs/pipeline_1.svg and docs/pipeline_3.svg, docs/pipelines.md's pictures of a kernel's time: `python
docs/draw_pipelines.py`. They come out the same on any machine."""

from pathlib import Path

import numpy as np
from numba import cuda

import tiles
from ops import exp2, warpgroup, zeros
from tiles import bf16, fp32, ring, rt, shared, st, tensor

A, C = st(64, 64, bf16), rt(16, 64, fp32)


def make_weigh(stages):
    """(kernel, shared memory): y = the sum of 2^(q xᵀ) x over n tiles x; attention without its normalisation."""
    smem = shared(k=ring(A, stages, readers=4))

    @cuda.jit
    def weigh(q, x, y, n):
        (k,) = smem.open()
        if warpgroup.id() == 1:
            for j in range(n):
                k.fill(j, x, (j, 0))
        else:
            queries = warpgroup.load(q, rt(16, 64, bf16), (0, 0))
            acc = zeros(C)
            for j in range(n):
                tile = k.wait(j)
                weights = exp2(warpgroup.wait(warpgroup.mm_ABt(queries, tile)))
                acc = warpgroup.wait(warpgroup.mma_AB(acc, bf16(weights), tile))
                k.release(j)
            warpgroup.store(y, acc, (0, 0))

    return weigh, smem


TILES = 6
PICTURES = {stages: Path(__file__).with_name(f"pipeline_{stages}.svg") for stages in (1, 3)}


def timeline(stages):
    """Of weigh with a ring of so many slots."""
    weigh, smem = make_weigh(stages)
    x, y = np.zeros((TILES * 64, 64), bf16.np), np.zeros((64, 64), np.float32)
    launch = tiles.launch(weigh, grid=1, block=2 * warpgroup.THREADS, shared=smem)
    found = tiles.profile(launch, x[:64], tensor(x, A), y, TILES).timeline
    found.title = f"weigh, a ring of {stages} {'slot' if stages == 1 else 'slots'}"
    return found


def pictures():
    """{stages: SVG}, on one scale."""
    found = {stages: timeline(stages) for stages in PICTURES}
    longest = max(one.cycles for one in found.values())
    return {stages: one.svg(0, longest) for stages, one in found.items()}


if __name__ == "__main__":
    for stages, picture in pictures().items():
        PICTURES[stages].write_text(picture)
