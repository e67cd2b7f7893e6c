"""What must work where numba-tiles was installed from a wheel, in a folder without its sources and without a GPU: .ci/release
runs this."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

import attention
import fuse
import ops
import tiles
from attention import reference
from tiles import bf16

HERE = Path.cwd()
KERNEL = "attention.kernels.softmax.forward_hopper:make(next(space(Target(9, 0, 'a'), False)))"


def command(*words, **variables) -> str:
    """What `python -m WORDS` prints. CalledProcessError if it fails."""
    return subprocess.run(
        [sys.executable, "-m", *words], env={**os.environ, **variables}, check=True, capture_output=True, text=True
    ).stdout


def main() -> None:
    version = importlib.metadata.version("numba-tiles")
    for package in (attention, fuse, ops, tiles):
        assert package.__version__ == version
        assert HERE not in Path(package.__file__).parents, "the sources are tried, not the wheel"

    draw = np.random.default_rng(0)
    q, k, v = draw.standard_normal((3, 1, 80, 2, 64), np.float32).astype(bf16.np)
    out = attention.forward(q, k, v, causal=True).astype(np.float32)
    np.testing.assert_allclose(out, reference.forward(q, k, v, causal=True)[0], atol=0.03)
    decay = -draw.random((1, 80, 2), np.float32)
    assert np.isfinite(attention.linear(q, k, v, decay=decay).astype(np.float32)).all()

    @fuse.kernel
    def norm_linear(x, w):
        return (x * fuse.rsqrt(fuse.mean(x * x) + 1e-5)) @ w

    x, w = q[0, :, 0], k[0, :64, 0]
    got, wanted = (np.asarray(y, np.float32) for y in (norm_linear.run(x, w), norm_linear(x, w)))
    np.testing.assert_allclose(got, wanted, rtol=0.02, atol=0.1)
    assert norm_linear.proof(x, w).holds

    assert f"numba-tiles        {version}" in command("tiles", "doctor")
    assert " 0 bytes spilled" in command("tiles", "inspect", KERNEL)  # Numba, NVVM and nvJitLink
    assert "largest error" in command("attention", TILES_INTERPRET="ptx")
    print(f"attention, fuse, ops and tiles {version} work")


if __name__ == "__main__":
    main()
