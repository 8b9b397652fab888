"""Orthonormal transforms of square or oblong chunks, as torch computes them on any device.

`dct` and `random` are products with a basis B of shape (n, n), one basis vector per row: a chunk X of shape (h, w)
becomes Y = B_h · X · B_wᵀ, and the inverse is X = B_hᵀ · Y · B_w. Chunks at an edge use a shorter basis. `hadamard`
consists of additions in a fixed order and one multiplication, so its results are the same bits on every machine.

The compiled loops have faster ways for the usual chunk: kernels/numba_transforms.py.

Legend: n chunks, h rows, w columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

Basis = Callable[[int], Tensor]


class Transform(Protocol):
    """A linear orthonormal transform of chunks. ``between`` is scratch of the size of the chunks, in every function."""

    def forward(
        self,
        chunks: Tensor,
        between: Tensor | None = None,
        out: Tensor | None = None,
        *,
        keep: float = 0.0,
        scale: float = 1.0,
    ) -> Tensor:
        """Transform (n, h, w) values to coefficients: out ← keep · out + coefficients / scale.

        Neither ``between`` nor ``out`` may be ``chunks``, which are not changed.
        """
        ...

    def inverse(self, coeffs: Tensor, between: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """The inverse of `forward`."""
        ...

    def inverse_strip(self, coeffs: Tensor, between: Tensor, out: Tensor) -> Tensor:
        """`inverse` for chunks side by side in a matrix: (n, h, w) coefficients to the (h, n · w) strip ``out``.

        Call it within `full_precision`, which is not entered here because there are many strips.
        """
        ...


# -- products with a basis -----------------------------------------------------------------------------------------


def cosine_basis(n: int) -> Tensor:
    """The orthonormal DCT-II: B[f, t] = s_f · cos(π(2t + 1)f / 2n), s_0 = √(1/n), else √(2/n).

    Equals ``scipy.fft.dct(norm="ortho")``: tests/test_transforms.py.
    """
    f = torch.arange(n, dtype=torch.float64).unsqueeze(1)
    t = torch.arange(n, dtype=torch.float64).unsqueeze(0)
    rows = torch.cos(math.pi * (2 * t + 1) * f / (2 * n)) * math.sqrt(2 / n)
    rows[0] = math.sqrt(1 / n)
    return rows


def random_basis(n: int) -> Tensor:
    """A fixed random rotation. This control shows if cosines matter, or if any rotation works as well."""
    noise = torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    q, r = torch.linalg.qr(noise)
    rotation: Tensor = q * r.diagonal().sign()  # QR is unique only up to signs, which libraries choose differently
    return rotation


@lru_cache(maxsize=512)
def cached_basis(make: Basis, n: int, device: torch.device) -> Tensor:
    """``make(n)`` in fp32 on the device, computed once.

    It is computed in fp64, so that it is orthonormal to the last bit of fp32.
    """
    return make(n).to(torch.float32).to(device)


@dataclass(frozen=True)
class Product:
    """The transform by two matrix products. In torch they are faster than every variant that is based on an FFT."""

    basis: Basis

    def forward(
        self,
        chunks: Tensor,
        between: Tensor | None = None,
        out: Tensor | None = None,
        *,
        keep: float = 0.0,
        scale: float = 1.0,
    ) -> Tensor:
        n, h, w = chunks.shape
        rows, cols = self._bases(chunks)
        between = torch.empty_like(chunks) if between is None else between
        out = torch.empty_like(chunks) if out is None else out
        with full_precision(chunks.device):
            torch.mm(chunks.view(n * h, w), cols.T, out=between.view(n * h, w))
            # The second product adds to `out` directly, which saves a pass over it.
            return out.baddbmm_(rows.expand(n, h, h), between, beta=keep, alpha=1.0 / scale)

    def inverse(self, coeffs: Tensor, between: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        n, h, w = coeffs.shape
        rows, cols = self._bases(coeffs)
        between = torch.empty_like(coeffs) if between is None else between
        out = torch.empty_like(coeffs) if out is None else out
        with full_precision(coeffs.device):
            torch.mm(coeffs.view(n * h, w), cols, out=between.view(n * h, w))
            return torch.bmm(rows.T.expand(n, h, h), between, out=out)

    def inverse_strip(self, coeffs: Tensor, between: Tensor, out: Tensor) -> Tensor:
        # The first product treats one row of all chunks at a time, so that the second is a single product that writes
        # directly into the matrix.
        n, h, w = coeffs.shape
        rows, cols = self._bases(coeffs)
        between = between.view(-1)[: coeffs.numel()]
        torch.bmm(coeffs.transpose(0, 1), cols.expand(h, w, w), out=between.view(h, n, w))
        return torch.mm(rows.T, between.view(h, n * w), out=out)

    def _bases(self, chunks: Tensor) -> tuple[Tensor, Tensor]:
        _, h, w = chunks.shape
        return cached_basis(self.basis, h, chunks.device), cached_basis(self.basis, w, chunks.device)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute matrix products in full fp32, even if the caller uses autocast or allows TF32.

    The products become weights, so they must not lose precision.
    """
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32


# -- butterflies ---------------------------------------------------------------------------------------------------


def is_power_of_two(n: int) -> bool:
    """True for 1, 2, 4, 8 …"""
    return n & (n - 1) == 0


def hadamard_gain(h: int, w: int) -> float:
    """1/√(product of the sides that are transformed). For 64 × 64 it is 1/64: a scaling by it is exact."""
    return 1.0 / math.sqrt(math.prod(n for n in (h, w) if is_power_of_two(n)))


def butterflies(values: Tensor, spare: Tensor) -> tuple[Tensor, Tensor]:
    """Hadamard sums down the columns of (n, h, w), without a scale. Both tensors are overwritten; the first one
    returned has the sums.

    In the stage of stride s = 1, 2, 4 …, each pair (x_t, x_{t+s}) with t & s = 0 becomes x_t + x_{t+s} and
    x_t − x_{t+s}. Each sum is one rounded operation, so this order of stages fixes every bit of the result. Columns
    whose length is no power of two stay as they are.
    """
    n, h, w = values.shape
    stride = 1
    while stride < h and is_power_of_two(h):
        first, second = values.view(n, h // (2 * stride), 2, stride, w).unbind(2)
        total, difference = spare.view(n, h // (2 * stride), 2, stride, w).unbind(2)
        torch.add(first, second, out=total)
        torch.sub(first, second, out=difference)
        values, spare = spare, values
        stride *= 2
    return values, spare


@dataclass(frozen=True)
class Hadamard:
    """Sums and differences down each column, then along each row, then one multiplication by `hadamard_gain`.

    It is its own inverse. The compiled loops give the same bits: tests/test_transforms.py.
    """

    def forward(
        self,
        chunks: Tensor,
        between: Tensor | None = None,
        out: Tensor | None = None,
        *,
        keep: float = 0.0,
        scale: float = 1.0,
    ) -> Tensor:
        sums = self._sums(chunks, between).mul_(hadamard_gain(*chunks.shape[1:]) / scale)
        if out is None:
            return sums
        return out.copy_(sums) if keep == 0.0 else out.mul_(keep).add_(sums)

    def inverse(self, coeffs: Tensor, between: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        return self.forward(coeffs, between, out)

    def inverse_strip(self, coeffs: Tensor, between: Tensor, out: Tensor) -> Tensor:
        n, h, w = coeffs.shape
        values = self.inverse(coeffs, between.view(-1)[: coeffs.numel()].view(coeffs.shape))
        out.view(h, n, w).copy_(values.transpose(0, 1))
        return out

    def _sums(self, chunks: Tensor, between: Tensor | None) -> Tensor:
        values = chunks.clone() if between is None else between.copy_(chunks)
        values, spare = butterflies(values, torch.empty_like(values))
        if not is_power_of_two(chunks.shape[2]):
            return values
        # Along the rows: of the transposed chunks, because torch is slow with neighbours in memory.
        n, h, w = chunks.shape
        turned = spare.view(n, w, h).copy_(values.transpose(1, 2))
        turned, spare = butterflies(turned, values.view(n, w, h))
        return spare.view(n, h, w).copy_(turned.transpose(1, 2))


DCT, RANDOM, HADAMARD = Product(cosine_basis), Product(random_basis), Hadamard()
# The transform that a layout applies once. A basis that turns is another in each round: turns.py.
TURNING = "turning"
TRANSFORMS: dict[str, Transform | None] = {
    "dct": DCT, "hadamard": HADAMARD, "random": RANDOM, TURNING: None, "none": None,
}  # fmt: skip
