"""Fingerprints of 64 bits, which show if two replicas hold the same numbers.

A fingerprint is made of integer sums of the raw bits. Such sums are exact in any order, so they are the same on every
CPU and GPU, with any number of threads. A fingerprint detects accidents (a weight that differs, a lost update, blocks
in the wrong order), not forgery.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from overtone.coding.kernels import Kernels, kernels_for

_LANES = 1024  # 64-bit words of a row
_ROW_BYTES = 8 * _LANES
_ROW = 0x5851F42D4C957F2D  # odd constants: a product with one loses no bit modulo 2**64
_MIX = 0xD6E8FEB86659FD93
_MASK = (1 << 64) - 1
_GROUP_BYTES = 1 << 22  # small tensors are hashed in groups of at most so many bytes
_scratch_areas = threading.local()


def _signed(word: int) -> int:
    # torch computes with signed words. Their products and sums have the same bits modulo 2**64.
    return word - (1 << 64) if word >> 63 else word


_SIGNED_MIX = _signed(_MIX)


@lru_cache(maxsize=16)
def _weights(device: torch.device) -> Tensor:
    """Odd 64-bit multipliers, one per lane. With them, two lanes that exchange their values change the fingerprint."""
    words = [
        int.from_bytes(hashlib.blake2b(i.to_bytes(4, "little"), digest_size=8).digest(), "little")
        for i in range(_LANES)
    ]
    return torch.tensor([_signed(word | 1) for word in words], dtype=torch.int64, device=device)


def _of_each(raws: Sequence[Tensor], kernels: Kernels | None) -> list[int]:
    """The fingerprints of several tensors of bytes: Σ over rows of 1024 words of mix(hash of the row + number of the
    row), modulo 2**64, mixed with the length.

    Within a row, every lane has an odd weight of its own. The upper half of a word also counts in the lower half:
    otherwise two flipped signs would cancel each other. Rows are mixed before they are summed, so that two rows that
    exchange their values change the sum. The rows of all tensors are hashed in one call: for small tensors, one call
    each would take longer than the hashing. A row that a tensor does not fill is padded with zeros.
    """
    device = raws[0].device
    counts = [-(-raw.numel() // _ROW_BYTES) for raw in raws]
    number = torch.cat([torch.arange(1, count + 1, device=device) for count in counts])
    owner = torch.repeat_interleave(torch.tensor(counts, device=device))
    z = number * _signed(_ROW) + _row_hashes(raws, counts, kernels)
    # Two xor-shifts around a product: every bit of a hash affects every other. The mask makes the signed shift a
    # logical one.
    z = (z ^ ((z >> 32) & 0xFFFFFFFF)) * _SIGNED_MIX
    mixed = z ^ ((z >> 32) & 0xFFFFFFFF)
    totals = torch.zeros(len(raws), dtype=torch.int64, device=device).index_add_(0, owner, mixed)
    return [
        ((total & _MASK) ^ (raw.numel() * 0x9E3779B97F4A7C15)) & _MASK
        for total, raw in zip(totals.tolist(), raws, strict=True)
    ]


def _row_hashes(raws: Sequence[Tensor], counts: Sequence[int], kernels: Kernels | None) -> Tensor:
    """The hash of every row, in order."""
    device = raws[0].device
    kernels = kernels or kernels_for(sum(raw.numel() for raw in raws) // 4, device)
    if len(raws) == 1 and (whole := raws[0].numel() // _ROW_BYTES * _ROW_BYTES):
        # One tensor, perhaps a large one: its full rows are hashed in place, without a copy.
        rest = raws[0][whole:]
        tail = [_row_hashes([rest], [1], kernels)] if rest.numel() else []
        head = kernels.row_hashes(raws[0][:whole].view(torch.int64).view(-1, _LANES), _weights(device))
        return torch.cat([head, *tail])
    rows = _scratch(sum(counts) * _ROW_BYTES, device)
    first = 0
    for raw, count in zip(raws, counts, strict=True):
        end = first + raw.numel()
        rows[first:end] = raw
        first += count * _ROW_BYTES
        rows[end:first] = 0
    return kernels.row_hashes(rows.view(torch.int64).view(-1, _LANES), _weights(device))


def _scratch(size: int, device: torch.device) -> Tensor:
    """A scratch area of this thread, which is used again: to allocate new memory would take longer than the hashing."""
    kept: dict[str, Tensor] = _scratch_areas.__dict__
    where = str(device)
    if where not in kept or kept[where].numel() < size:
        kept[where] = torch.empty(size, dtype=torch.uint8, device=device)
    return kept[where][:size]


def _raw(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def of_tensors(tensors: Iterable[Tensor], kernels: Kernels | None = None) -> bytes:
    """The fingerprint of a sequence of tensors, including their order and lengths. It is the same for all kernels."""
    digest = hashlib.blake2b(digest_size=8)
    for group in _groups(tensors):
        for value in _of_each(group, kernels):
            digest.update(value.to_bytes(8, "little"))
    return digest.digest()


def _groups(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Group neighbouring small tensors on one device, up to a few megabytes, to hash them together."""
    group: list[Tensor] = []
    size = 0
    for tensor in tensors:
        raw = _raw(tensor)
        if group and (size + raw.numel() > _GROUP_BYTES or raw.device != group[0].device):
            yield group
            group, size = [], 0
        group.append(raw)
        size += raw.numel()
    if group:
        yield group


def of_bytes(data: bytes) -> bytes:
    """The fingerprint of bytes."""
    return hashlib.blake2b(data, digest_size=8).digest()


def of_text(text: str) -> bytes:
    """The fingerprint of a text."""
    return of_bytes(text.encode())
