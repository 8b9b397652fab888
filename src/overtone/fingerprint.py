"""Sixty-four bits that tell whether two replicas hold the same numbers.

Built from integer sums of the raw bits, which are exact in any order: the same on every CPU and GPU, at any number of
threads. It guards against accidents (a drifted weight, a lost update), not against forgery, and
not against blocks of 1024 words that change places.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

_LANES = 1024
_MASK = (1 << 64) - 1


@lru_cache(maxsize=16)
def _weights(device: torch.device) -> Tensor:
    """Odd 64-bit multipliers, one per lane, so that lanes cannot trade values."""
    words = [
        int.from_bytes(hashlib.blake2b(i.to_bytes(4, "little"), digest_size=8).digest(), "little")
        for i in range(_LANES)
    ]
    signed = [(w | 1) - (1 << 64) if w >> 63 else w | 1 for w in words]
    return torch.tensor(signed, dtype=torch.int64, device=device)


def of_tensor(tensor: Tensor) -> int:
    """Σ over lanes of weight · Σ of the lane's 32-bit words, modulo 2**64; then the length is mixed in."""
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    # Narrow types are widened rather than padded.
    words = raw.view(torch.int32) if tensor.element_size() % 4 == 0 else raw.to(torch.int32)
    weights = _weights(raw.device)
    whole = words.numel() // _LANES * _LANES
    lanes = words[:whole].view(-1, _LANES).sum(dim=0, dtype=torch.int64)
    lanes[: words.numel() - whole] += words[whole:]
    total = int((lanes * weights).sum()) & _MASK  # int64 wraps, as modulo 2**64 must
    return (total ^ (words.numel() * 0x9E3779B97F4A7C15)) & _MASK


def of_tensors(tensors: Iterable[Tensor]) -> bytes:
    """Eight bytes for a sequence of tensors, order and lengths included."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(of_tensor(tensor).to_bytes(8, "little"))
    return digest.digest()


def of_text(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
