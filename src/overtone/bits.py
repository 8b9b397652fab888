"""Numbers to bits and back: fixed-width fields and Rice-coded gaps, as whole-tensor operations.

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


def rice_width(gaps: Tensor, guess: int) -> int:
    """How many low bits to send verbatim so that the whole code is shortest; searched around ``guess``."""
    costs = {w: gaps.numel() * w + int((gaps >> w).sum()) for w in range(max(0, guess - 2), guess + 3)}
    return min(costs, key=lambda w: (costs[w], w))


def pack_gaps(gaps: Tensor, guess: int) -> bytes:
    """Rice code of (n,) non-negative integers: one byte of width, the low bits verbatim, the high parts in unary.

    For gaps between the k strongest of n coefficients this stays within 5 % of log2 C(n, k): tests/test_wire.py.
    """
    width = rice_width(gaps, guess)
    ends = ((gaps >> width) + 1).cumsum(0) - 1  # where each unary number puts its closing one
    unary = torch.zeros(int(ends[-1]) + 1, dtype=torch.bool)
    unary[ends] = True
    high = tensor_bytes(pack_flags(unary))
    low = tensor_bytes(pack_fields(gaps & ((1 << width) - 1), width))
    return bytes([width]) + low + len(high).to_bytes(4, "little") + high


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

    def fields(self, count: int, width: int, what: str) -> Tensor:
        return unpack_fields(self.tensor(field_bytes(count, width), torch.uint8, what), count, width)

    def gaps(self, count: int, most: int, what: str) -> Tensor:
        """``count`` Rice-coded gaps, none above ``most``."""
        width = self.take(1, what)[0]
        if width > most.bit_length():
            raise WireError(f"{what}: Rice width {width} for gaps of at most {most}; the message is corrupt")
        low = self.fields(count, width, what)
        length = int.from_bytes(self.take(4, what), "little")
        unary = unpack_flags(self.tensor(length, torch.uint8, what), length * 8)
        ends = unary.nonzero().view(-1)
        if ends.numel() != count:
            raise WireError(f"{what}: {ends.numel()} indices where {count} are due; the message is corrupt")
        high = torch.diff(ends, prepend=torch.tensor([-1])) - 1
        return (high << width) + low

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
