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

from overtone.kernels import kernels_for

_LANES = 1024
_ROW_BYTES = 8 * _LANES
_ROW = 0x5851F42D4C957F2D
_MIX = 0xD6E8FEB86659FD93
_MASK = (1 << 64) - 1


@lru_cache(maxsize=16)
def _weights(device: torch.device) -> Tensor:
    """Odd 64-bit multipliers, one per lane, so that lanes cannot trade values."""
    words = [
        int.from_bytes(hashlib.blake2b(i.to_bytes(4, "little"), digest_size=8).digest(), "little")
        for i in range(_LANES)
    ]
    return torch.tensor([_signed(word | 1) for word in words], dtype=torch.int64, device=device)


def of_tensor(tensor: Tensor) -> int:
    """Σ over rows of 1024 words of mix(hash of the row + number of the row), modulo 2**64, mixed with the length.

    Within a row every lane has an odd weight of its own, and the upper half of a word counts in the lower too: else
    two signs that flip would cancel each other. Rows are mixed before they are summed, so none can trade with another.
    """
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    loops = kernels_for(tensor.numel(), raw.device)
    whole = raw.numel() // _ROW_BYTES * _ROW_BYTES
    rows = [raw[:whole], _filled(raw[whole:])] if raw.numel() > whole else [raw[:whole]]
    hashes = torch.cat([loops.row_hashes(r.view(torch.int64).view(-1, _LANES), _weights(r.device)) for r in rows])
    hashes += torch.arange(1, len(hashes) + 1, device=hashes.device) * _signed(_ROW)
    total = int(_mixed(hashes).sum())
    return ((total & _MASK) ^ (raw.numel() * 0x9E3779B97F4A7C15)) & _MASK


def _filled(rest: Tensor) -> Tensor:
    row = torch.zeros(_ROW_BYTES, dtype=torch.uint8, device=rest.device)
    row[: rest.numel()] = rest
    return row


def _mixed(z: Tensor) -> Tensor:
    """Two xor-shifts around a product: every bit of a hash reaches every other."""
    z = (z ^ ((z >> 32) & 0xFFFFFFFF)) * _signed(_MIX)
    return z ^ ((z >> 32) & 0xFFFFFFFF)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


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
