"""Orthonormal transforms of square or oblong chunks.

A transform is a function from a length n to an orthonormal basis B of shape (n, n), one basis vector per row.
A chunk X of shape (h, w) becomes Y = B_h · X · B_wᵀ, and the inverse is X = B_hᵀ · Y · B_w. Two matrix products with a
cached basis are faster than every FFT-based variant at these sizes. Chunks at an edge use a shorter basis.

Legend: n chunks, h rows, w columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

Basis = Callable[[int], Tensor]


def cosine_basis(n: int) -> Tensor:
    """The orthonormal DCT-II: B[f, t] = s_f · cos(π(2t + 1)f / 2n), s_0 = √(1/n), else √(2/n).

    Equals ``scipy.fft.dct(norm="ortho")``: tests/test_dct.py.
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


TRANSFORMS: dict[str, Basis | None] = {"dct": cosine_basis, "random": random_basis, "none": None}


@lru_cache(maxsize=512)
def cached_basis(make: Basis, n: int, device: torch.device) -> Tensor:
    """``make(n)`` in fp32 on the device, computed once.

    It is computed in fp64, so that it is orthonormal to the last bit of fp32.
    """
    return make(n).to(torch.float32).to(device)


def forward(
    chunks: Tensor,
    make: Basis,
    between: Tensor | None = None,
    out: Tensor | None = None,
    *,
    keep: float = 0.0,
    scale: float = 1.0,
) -> Tensor:
    """Transform (n, h, w) values to coefficients: out ← keep · out + coefficients / scale.

    ``between`` is scratch. Neither it nor ``out`` may be ``chunks``. The second product adds to ``out`` directly, which
    saves a pass over it.
    """
    n, h, w = chunks.shape
    rows, cols = _bases(chunks, make)
    between = torch.empty_like(chunks) if between is None else between
    out = torch.empty_like(chunks) if out is None else out
    with full_precision(chunks.device):
        torch.mm(chunks.view(n * h, w), cols.T, out=between.view(n * h, w))
        return out.baddbmm_(rows.expand(n, h, h), between, beta=keep, alpha=1.0 / scale)


def inverse(coeffs: Tensor, make: Basis, between: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """The inverse of `forward`."""
    n, h, w = coeffs.shape
    rows, cols = _bases(coeffs, make)
    between = torch.empty_like(coeffs) if between is None else between
    out = torch.empty_like(coeffs) if out is None else out
    with full_precision(coeffs.device):
        torch.mm(coeffs.view(n * h, w), cols, out=between.view(n * h, w))
        return torch.bmm(rows.T.expand(n, h, h), between, out=out)


def inverse_strip(coeffs: Tensor, make: Basis, between: Tensor, out: Tensor) -> Tensor:
    """`inverse` for chunks that lie side by side in a matrix: (n, h, w) coefficients to the (h, n · w) strip ``out``.

    The result is written directly into the matrix. The first product treats one row of all chunks at a time, so that
    the second is a single product. Call it within `full_precision`, which is not entered here because there are many
    strips.
    """
    n, h, w = coeffs.shape
    rows, cols = _bases(coeffs, make)
    torch.bmm(coeffs.transpose(0, 1), cols.expand(h, w, w), out=between.view(h, n, w))
    return torch.mm(rows.T, between.view(h, n * w), out=out)


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


def _bases(chunks: Tensor, make: Basis) -> tuple[Tensor, Tensor]:
    _, h, w = chunks.shape
    return cached_basis(make, h, chunks.device), cached_basis(make, w, chunks.device)


@dataclass(frozen=True)
class SlabSignal:
    """The signal of one slab in the domain of the weights.

    It is transformed only when a rule asks for its coefficients, and directly into the rule's own tensor.
    """

    values: Tensor  # (chunks, area)
    shape: tuple[int, int, int]  # (chunks, h, w)
    basis: Basis | None
    between: Tensor  # scratch, as large as the values
    out: Tensor  # a second scratch tensor of this size
    scale: float = 1.0  # the loss scale: the signal is values / scale

    def coefficients(self) -> Tensor:
        """The coefficients, (chunks, area), in a scratch area. The next slab overwrites it."""
        if self.basis is None and self.scale == 1.0:
            return self.values
        return self.into(self.out)

    def into(self, out: Tensor, keep: float = 0.0) -> Tensor:
        """out ← keep · out + coefficients."""
        if self.basis is not None:
            chunks, between = self.values.view(self.shape), self.between.view(self.shape)
            forward(chunks, self.basis, between, out.view(self.shape), keep=keep, scale=self.scale)
            return out
        values = self.values if self.scale == 1.0 else torch.div(self.values, self.scale, out=self.between)
        return out.copy_(values) if keep == 0.0 else out.mul_(keep).add_(values)
