"""Sixty-four bits that tell whether two replicas hold the same numbers.

Built from integer sums of the raw bits, which are exact in any order: the same on every CPU and GPU, at any number of
threads. It guards against accidents (a drifted weight, a lost update, blocks that changed places), not against forgery.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

_LANES = 1024
_ROW = 0x5851F42D4C957F2C  # even
_MASK = (1 << 64) - 1


@lru_cache(maxsize=16)
def _lane_weights(device: torch.device) -> Tensor:
    """Odd 64-bit multipliers, one per lane, so that lanes cannot trade values."""
    words = [
        int.from_bytes(hashlib.blake2b(i.to_bytes(4, "little"), digest_size=8).digest(), "little")
        for i in range(_LANES)
    ]
    signed = [(w | 1) - (1 << 64) if w >> 63 else w | 1 for w in words]
    return torch.tensor(signed, dtype=torch.int64, device=device)


def of_tensor(tensor: Tensor) -> int:
    """Σ over 64-bit words of (weight of its lane + weight of its row) · word, modulo 2**64, mixed with the length.

    Weights of lanes are odd and of rows even, so the change of any one word shows.
    """
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    lanes = torch.zeros(_LANES, dtype=torch.int64, device=raw.device)
    total = 0
    whole = raw.numel() // (8 * _LANES) * (8 * _LANES)
    if whole:
        words = raw[:whole].view(torch.int64).view(-1, _LANES)
        lanes += words.sum(dim=0)  # int64 wraps, as modulo 2**64 must
        rows = torch.arange(1, len(words) + 1, device=raw.device) * _ROW
        total += int((words.sum(dim=1) * rows).sum())
    rest = raw[whole:].cpu()
    if rest.numel():
        last = torch.zeros(8 * _LANES, dtype=torch.uint8)
        last[: rest.numel()] = rest
        lanes += last.view(torch.int64).to(raw.device)
    total += int((lanes * _lane_weights(raw.device)).sum())
    return ((total & _MASK) ^ (raw.numel() * 0x9E3779B97F4A7C15)) & _MASK


def of_tensors(tensors: Iterable[Tensor]) -> bytes:
    """Eight bytes for a sequence of tensors, order and lengths included."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(of_tensor(tensor).to_bytes(8, "little"))
    return digest.digest()


def of_bytes(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


def of_text(text: str) -> bytes:
    return of_bytes(text.encode())
