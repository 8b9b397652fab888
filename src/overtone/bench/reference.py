"""The round of the published code, transcribed plainly. `bench.codec` measures overtone's rounds against it.

Each tensor is cut into chunks whose sides are the largest divisors up to 64. A DCT of each chunk, `topk` of the
magnitudes, and a message of 64-bit positions and fp32 values follow. A scatter averages each coefficient over its
senders. The sender decodes its own message and takes the result out of its residual. Vectors have chunks of one axis.

The transform can be chosen: one `einsum` of three operands as published, or one of two that are based on an FFT.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.fft
import torch
from torch import Tensor

from overtone.coding import transforms

Cut = tuple[int, int, int, int]  # rows of chunks, columns of chunks, height, width
Transform = Callable[[Tensor, bool], Tensor]  # (down, across, h, w); True is the inverse


def cut_of(shape: Sequence[int], most: int = 64) -> Cut:
    """How a tensor of this shape is cut into chunks of equal size."""
    rows, cols = shape if len(shape) == 2 else (1, shape[0])
    h, w = (max(d for d in range(1, min(n, most) + 1) if n % d == 0) for n in (rows, cols))
    return rows // h, cols // w, h, w


def by_einsum(chunks: Tensor, back: bool) -> Tensor:
    """The DCT as a product with the cosine basis, as published."""
    bases = [transforms.cached_basis(transforms.cosine_basis, n, chunks.device) for n in chunks.shape[-2:]]
    rows, cols = (basis.T if back else basis for basis in bases)
    return torch.einsum("yxhw,fh,gw->yxfg", chunks, rows, cols)


def by_scipy(chunks: Tensor, back: bool) -> Tensor:
    """The DCT of scipy."""
    turn = scipy.fft.idctn if back else scipy.fft.dctn
    return torch.from_numpy(np.ascontiguousarray(turn(chunks.numpy(), axes=(2, 3), norm="ortho", workers=1)))


def by_torch_fft(chunks: Tensor, back: bool) -> Tensor:
    """Makhoul's way: a DCT is the real part of a rotated FFT of the even values followed by the odd ones backwards."""
    turn = _idct_last if back else _dct_last
    for _ in range(2):  # the last axis, then the other
        chunks = turn(chunks).transpose(-1, -2)
    return chunks


def _turns(n: int) -> Tensor:
    angle = -torch.pi * torch.arange(n) / (2 * n)
    return torch.polar(torch.ones(n), angle)


def _dct_last(x: Tensor) -> Tensor:
    n = x.shape[-1]
    mixed = torch.cat([x[..., ::2], x[..., 1::2].flip(-1)], dim=-1)
    out: Tensor = (torch.fft.fft(mixed) * _turns(n)).real * (2 / n) ** 0.5
    out[..., 0] /= 2**0.5
    return out


def _idct_last(y: Tensor) -> Tensor:
    n = y.shape[-1]
    scaled = y * (n / 2) ** 0.5
    scaled[..., 0] *= 2**0.5
    shifted = torch.cat([torch.zeros_like(y[..., :1]), -scaled[..., 1:].flip(-1)], dim=-1)
    mixed = torch.fft.ifft(torch.complex(scaled, shifted) * _turns(n).conj()).real
    out = torch.empty_like(y)
    out[..., ::2] = mixed[..., : (n + 1) // 2]
    out[..., 1::2] = mixed[..., (n + 1) // 2 :].flip(-1)
    return out


TRANSFORMS: dict[str, Transform] = {"einsum": by_einsum, "scipy.fft": by_scipy, "torch.fft": by_torch_fft}


@dataclass(frozen=True)
class Reference:
    """Per-tensor messages of (positions, values)."""

    keep: int
    transform: Transform = by_einsum

    def encode(self, store: Tensor, drift: Tensor) -> tuple[Tensor, Tensor]:
        """store ← store + drift − what is sent, in the domain of the weights as published; the message."""
        store.add_(drift)
        cut = cut_of(store.shape)
        coeffs = self.transform(_chunks(store, cut), False).flatten(2)
        k = min(self.keep, coeffs.shape[-1])
        index = coeffs.abs().topk(k, dim=-1, sorted=False).indices
        values = coeffs.gather(-1, index)
        store.sub_(self.decode([(index, values)], store.shape))
        return index, values

    def decode(self, messages: Sequence[tuple[Tensor, Tensor]], shape: Sequence[int]) -> Tensor:
        """The mean of the messages, each coefficient over its senders, back in the domain of the weights."""
        down, across, h, w = cut_of(shape)
        index = torch.cat([message[0] for message in messages], dim=-1)
        values = torch.cat([message[1] for message in messages], dim=-1)
        coeffs = torch.zeros(down, across, h * w)
        coeffs.scatter_reduce_(-1, index, values, reduce="mean", include_self=False)
        chunks = self.transform(coeffs.view(down, across, h, w), True)
        return chunks.transpose(1, 2).reshape(tuple(shape))


def outer_step(anchor: Tensor, store: Tensor, drift: Tensor, mean: Tensor, lr: float = 0.7, decay: float = 0.9) -> None:
    """M ← M + u;  Θ ← Θ − η·(G + d·M), in the domain of the weights, as published. The store is M."""
    store.add_(mean)
    anchor.sub_(lr * (drift + decay * store))


def _chunks(tensor: Tensor, cut: Cut) -> Tensor:
    down, across, h, w = cut
    return tensor.view(down, h, across, w).transpose(1, 2)
