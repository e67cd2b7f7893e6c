"""Long convolutions by Fourier transforms that are matrix products (FlashFFTConv, Fu et al. 2023): y = ifft(fft(u) fft(k)).

With j = c j1 + j2 and f = f1 + c f2, a transform of c^2 numbers (c = 64 or 32, w = exp(-2 pi i / c^2)) is two products with
the c x c Fourier matrix F, with a twiddle t[f1, j2] = w^(f1 j2) between them:

    fft(u)[f1, f2] = sum over j2 of t[f1, j2] (F u)[f1, j2] F[j2, f2],    or ((F u) * t) F

The inverse has the conjugates, in the opposite order. A left product mixes rows, which a warpgroup shares. A right product
mixes a row's columns, so its left operand stays in registers. So one block takes a channel's sequences from memory and back
with only one exchange through shared memory in between. Two real sequences are computed as one complex one, because the
filter is real. For 1024 numbers two matrices lie one below the other, and F stands twice on the diagonal of a left factor.
Each transform is divided by c, so that numbers keep their size.
"""

import functools
from typing import NamedTuple

import numpy as np
from machine import to_device, to_host
from numba import cuda

import tiles
from ops import complex, store, subtile, warpgroup
from ops.complex import Complex
from tiles import bf16, fp32, inlined, ring, rt, shared, st

ROWS, SIZES, READERS = 64, (1024, 4096), warpgroup.WARPGROUP


class Roots(NamedTuple):
    """re + i im, a matrix in shared memory, and what -im is: products only add."""

    re: st
    im: st
    minus: st


@inlined
def conj(f):
    return Roots(f.re, f.minus, f.im)


@inlined
def left(f, x):
    """f @ x, x in shared memory."""
    re = warpgroup.mma_AB(warpgroup.mm_AB(f.re, x.re), f.minus, x.im)
    im = warpgroup.mma_AB(warpgroup.mm_AB(f.re, x.im), f.im, x.re)
    return Complex(warpgroup.wait(re), warpgroup.wait(im))


@inlined
def right(x, f):
    """x @ f, x in registers."""
    re = warpgroup.mma_AB(warpgroup.mm_AB(x.re, f.re), x.im, f.minus)
    im = warpgroup.mma_AB(warpgroup.mm_AB(x.re, f.im), x.im, f.re)
    return Complex(warpgroup.wait(re), warpgroup.wait(im))


@functools.cache
def kernel(size, dtype):
    """The kernel for sequences of so many numbers, with its shared memory, and the tile of one of them."""
    c = round(size**0.5)
    sequences = ROWS // c  # that lie one below the other
    F, Z, X, ONE = st(ROWS, ROWS, dtype, width=2 * c), st(ROWS, c, dtype), rt(16, c, dtype), st(c, c, dtype)
    smem = shared(
        roots=ring(F, 3), twiddles=ring(Z, 2), filters=ring(Z, 2), u=ring(Z, 4, READERS), mixed=ring(Z, 2, READERS, READERS)
    )

    @inlined
    def factor(shared):
        """A warp's rows of a complex tile in shared memory."""
        return Complex(fp32(warpgroup.load(shared.re, X)), fp32(warpgroup.load(shared.im, X)))

    @inlined
    def times(x, y):
        """x * y, element by element, as an operand."""
        z = complex.mul(x, y)
        return Complex(dtype(z.re), dtype(z.im))

    @inlined
    def fetch(u, i, gU, channels):
        """The i-th tile is on its way: a real part, an imaginary part, the next real part, ..."""
        for part in range(sequences):
            u.fill(i, gU, ((sequences * i + part) * channels + cuda.blockIdx.x, 0), part, sequences)

    @cuda.jit(launch_bounds=(warpgroup.THREADS, 2))
    def convolve(gU, gRoots, gTwiddles, gFilters, gY, channels, pairs):
        """All sequences of a channel: the rows of gU and gY are those of (batch, channel, c) numbers."""
        roots, twiddles, filters, u, mixed = smem.open()
        channel = cuda.blockIdx.x
        for i in range(2):
            fetch(u, i, gU, channels)
        for i in range(3):
            roots.fill(i, gRoots, (i, 0))
        for i in range(2):
            for part in range(sequences):
                twiddles.fill(i, gTwiddles, (i, 0), part, sequences)
                filters.fill(i, gFilters, (2 * channel + i, 0), part, sequences)
        whole = Roots(roots.wait(0), roots.wait(1), roots.wait(2))
        f = Roots(subtile(whole.re, c, 0, c, 0), subtile(whole.im, c, 0, c, 0), subtile(whole.minus, c, 0, c, 0))
        t = Complex(twiddles.wait(0), twiddles.wait(1))
        k = Complex(filters.wait(0), filters.wait(1))
        part, row = 16 * warpgroup.rank() // c, 16 * warpgroup.rank() % c
        for i in range(0, 2 * pairs, 2):
            if i + 2 < 2 * pairs:
                fetch(u, i + 2, gU, channels)
                fetch(u, i + 3, gU, channels)
            z = left(whole, Complex(u.wait(i), u.wait(i + 1)))
            u.release(i)
            u.release(i + 1)
            z = right(times(z, factor(t)), f)
            z = right(times(z, factor(k)), conj(f))
            z = times(z, complex.conj(factor(t)))
            warpgroup.store(mixed.claim(i), z.re)
            warpgroup.store(mixed.claim(i + 1), z.im)
            mixed.publish(i)
            mixed.publish(i + 1)
            z = left(conj(whole), Complex(mixed.wait(i), mixed.wait(i + 1)))
            mixed.release(i)
            mixed.release(i + 1)
            store(gY, dtype(z.re), (((sequences * i + part) * channels + channel) * c + row, 0))
            store(gY, dtype(z.im), (((sequences * (i + 1) + part) * channels + channel) * c + row, 0))

    return convolve, smem, F, ONE


def constants(size, dtype):
    """The Fourier matrix over c, (3 * 64, 64): re, im and -im, one below the other, on the diagonal as often as there is room;
    the twiddles, (2 c, c)."""
    c = round(size**0.5)
    n = np.arange(c)
    f = np.kron(np.eye(ROWS // c), np.exp(-2j * np.pi * np.outer(n, n) / c) / c**0.5)
    t = np.exp(-2j * np.pi * np.outer(n, n) / size)
    return np.concatenate([f.real, f.imag, -f.imag]).astype(dtype.np), np.concatenate([t.real, t.imag]).astype(dtype.np)


def spectrum(k, size, dtype):
    """The filters (channels, up to `size` numbers) as the kernel multiplies by them: (channels * 2 c, c)."""
    c = round(size**0.5)
    f = np.fft.fft(np.asarray(k, np.float64), size).reshape(-1, c, c).swapaxes(1, 2)
    return np.stack([f.real, f.imag], 1).reshape(-1, c).astype(dtype.np)


def fftconv(u, roots, twiddles, filters, y, dtype=bf16):
    """y[b, h] = the circular convolution of u[b, h] and filter h. u, y (batch, channels, size) of dtype, C-ordered; roots,
    twiddles, filters: of `constants` and `spectrum`, where u lies."""
    batch, channels, size = u.shape
    if size not in SIZES:
        raise ValueError(f"u: sequences must have one of {SIZES} numbers: {tuple(u.shape)=}")
    convolve, smem, F, ONE = kernel(size, dtype)
    rows, pairs = (batch * channels * ONE.rows, ONE.cols), -(-batch // (2 * ROWS // ONE.rows))
    arguments = [tiles.tensor(x, tile) for x, tile in ((u.reshape(*rows), ONE), (roots, F), (twiddles, ONE), (filters, ONE))]
    tiles.launch(convolve, channels, warpgroup.THREADS, shared=smem)(*arguments, y.reshape(*rows), channels, pairs)


def by_steps(u, k, dtype):
    """The convolution in NumPy, each step rounded as the kernel rounds it."""
    size = u.shape[-1]
    c = round(size**0.5)

    def rounded(z):
        return z.real.astype(dtype.np).astype(np.float64) + 1j * z.imag.astype(dtype.np).astype(np.float64)

    n = np.arange(c)
    f, t = rounded(np.exp(-2j * np.pi * np.outer(n, n) / c) / c**0.5), rounded(np.exp(-2j * np.pi * np.outer(n, n) / size))
    filters = rounded(np.fft.fft(k.astype(np.float64), size).reshape(-1, c, c).swapaxes(1, 2))
    z = rounded((f @ u.astype(np.float64).reshape(*u.shape[:2], c, c)) * t) @ f
    z = rounded(rounded(rounded(z * filters) @ f.conj() * t.conj()))
    return (f.conj() @ z).real.astype(dtype.np).reshape(u.shape)


def main(to_device=to_device, batch=3, channels=2, size=1024, dtype=bf16):
    """Convolve, and compare with NumPy's transforms in float64."""
    rng = np.random.default_rng(0)
    u = rng.standard_normal((batch, channels, size), np.float32).astype(dtype.np)
    k = (rng.standard_normal((channels, size), np.float32) / size**0.5).astype(dtype.np)
    y = to_device(np.full_like(u, np.nan))
    arguments = u, *constants(size, dtype), spectrum(k, size, dtype)
    fftconv(*map(to_device, arguments), y, dtype)

    exact = np.fft.ifft(np.fft.fft(u.astype(np.float64)) * np.fft.fft(k.astype(np.float64))).real
    error, expected = (np.abs(x.astype(np.float64) - exact).max() for x in (to_host(y), by_steps(u, k, dtype)))
    assert error <= 2 * expected, f"{error=}, where roundings alone give {expected}"
    print(f"{batch} x {channels} convolutions of {size} numbers: agrees with NumPy to {error:.3f} of {np.abs(exact).max():.1f}")


if __name__ == "__main__":
    main()
