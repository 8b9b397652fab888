"""Orthonormal transforms of square or oblong chunks.

A transform is a function from a length n to an orthonormal basis B of shape (n, n), one basis vector per row.
A chunk X of shape (h, w) becomes B_h · X · B_wᵀ, and comes back as B_hᵀ · Y · B_w. Two matrix products with a cached
basis beat every FFT-based variant at these sizes, and the edge chunks just use a shorter basis.

Legend: n chunks, h rows, w columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

Basis = Callable[[int], Tensor]
Transform = Callable[[Tensor, Basis, Tensor, Tensor], Tensor]


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
    """A fixed random rotation: the control that tells whether cosines matter or any mixing would do."""
    noise = torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    q, r = torch.linalg.qr(noise)
    rotation: Tensor = q * r.diagonal().sign()  # the sign makes it unique
    return rotation


TRANSFORMS: dict[str, Basis | None] = {"dct": cosine_basis, "random": random_basis, "none": None}


@lru_cache(maxsize=512)
def cached_basis(make: Basis, n: int, device: torch.device) -> Tensor:
    """``make(n)`` in fp32 on the device, computed once (in fp64, so that it is orthonormal to the last bit of fp32)."""
    return make(n).to(torch.float32).to(device)


def forward(chunks: Tensor, make: Basis, between: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """(n, h, w) values to coefficients, by way of ``between`` (scratch) into ``out``; neither may be ``chunks``."""
    rows, cols = _bases(chunks, make)
    return _turn(rows, chunks, cols.T, between, out)


def inverse(coeffs: Tensor, make: Basis, between: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """The inverse of `forward`."""
    rows, cols = _bases(coeffs, make)
    return _turn(rows.T, coeffs, cols, between, out)


def _turn(left: Tensor, chunks: Tensor, right: Tensor, between: Tensor | None, out: Tensor | None) -> Tensor:
    """left · chunk · right for every chunk: one tall product, then one small product per chunk."""
    n, h, w = chunks.shape
    between = torch.empty_like(chunks) if between is None else between
    out = torch.empty_like(chunks) if out is None else out
    with full_precision(chunks.device):
        torch.mm(chunks.view(n * h, w), right, out=between.view(n * h, w))
        return torch.bmm(left.expand(n, h, h), between, out=out)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Products in fp32 whatever the caller's autocast, or leave to use TF32, says: weights are at stake."""
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
