"""Numbers to bits and back: flags and fixed-width fields, as whole-tensor operations, and the `Reader` of a payload.

Bits are packed least significant first. Nothing here trusts its input: `Reader` raises `WireError` instead of reading
past the end, and every count it needs comes from the layout that both sides already share, never from the bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from overtone.errors import WireError

_POWERS = 2 ** torch.arange(8, dtype=torch.int32)


def pack_flags(flags: Tensor) -> Tensor:
    """(n,) bool to ⌈n/8⌉ bytes."""
    padded = torch.zeros(-(-flags.numel() // 8) * 8, dtype=torch.int32)
    padded[: flags.numel()] = flags
    return (padded.view(-1, 8) * _POWERS).sum(dim=1).to(torch.uint8)


def unpack_flags(packed: Tensor, count: int) -> Tensor:
    """⌈n/8⌉ bytes to (n,) bool."""
    return (packed.unsqueeze(1).to(torch.int32) & _POWERS).ne(0).view(-1)[:count]


def pack_fields(values: Tensor, width: int) -> Tensor:
    """(n,) integers below 2**width to ⌈n·width/8⌉ bytes."""
    if width == 0:
        return torch.empty(0, dtype=torch.uint8)
    shifts = torch.arange(width, dtype=torch.int64)
    return pack_flags(((values.reshape(-1, 1) >> shifts) & 1).view(-1).bool())


def unpack_fields(packed: Tensor, count: int, width: int) -> Tensor:
    """⌈n·width/8⌉ bytes to (n,) int64."""
    if width == 0:
        return torch.zeros(count, dtype=torch.int64)
    shifts = torch.arange(width, dtype=torch.int64)
    flags = unpack_flags(packed, count * width).view(count, width)
    return (flags.to(torch.int64) << shifts).sum(dim=1)


def field_bytes(count: int, width: int) -> int:
    return -(-count * width // 8)


class Reader:
    """Takes a payload apart from the front; never reads past its end."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int, what: str) -> bytes:
        if count > len(self.data) - self.at:
            raise WireError(f"{what}: needs {count} bytes, {len(self.data) - self.at} are left; the message was cut")
        self.at += count
        return self.data[self.at - count : self.at]

    def tensor(self, count: int, dtype: torch.dtype, what: str) -> Tensor:
        return bytes_tensor(self.take(count * dtype.itemsize, what), dtype)

    def number(self, size: int, what: str) -> int:
        """A little-endian whole number of ``size`` bytes."""
        return int.from_bytes(self.take(size, what), "little")

    def fields(self, count: int, width: int, what: str) -> Tensor:
        return unpack_fields(self.tensor(field_bytes(count, width), torch.uint8, what), count, width)

    def end(self) -> None:
        if self.at != len(self.data):
            raise WireError(f"payload: {len(self.data) - self.at} bytes too many; the message is corrupt")


def tensor_bytes(tensor: Tensor) -> bytes:
    """The raw little-endian bytes of a tensor (by way of a buffer both sides see, so numpy is not needed)."""
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if raw.numel() == 0:
        return b""
    buffer = bytearray(raw.numel())
    torch.frombuffer(buffer, dtype=torch.uint8).copy_(raw)
    return bytes(buffer)


def bytes_tensor(data: bytes, dtype: torch.dtype) -> Tensor:
    """The tensor whose raw bytes these are."""
    if not data:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype)
