"""Packing of numbers into bits: flags, fixed-width fields and Rice-coded positions, as whole-tensor operations; and the
`Reader` of a payload.

Bits are packed least significant first. No function here trusts its input. `Reader` raises `WireError` instead of
reading past the end. The counts of values come from the layout, which both sides know; they are never read from the
bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """The number of bytes of ``count`` fields of ``width`` bits."""
    return -(-count * width // 8)


@dataclass
class Reader:
    """Reads a payload from the front, and never past its end."""

    data: bytes
    at: int = 0

    def take(self, count: int, what: str) -> bytes:
        """The next ``count`` bytes. ``what`` names them in an error."""
        if count > len(self.data) - self.at:
            raise WireError(f"{what}: needs {count} bytes, {len(self.data) - self.at} are left; the message was cut")
        self.at += count
        return self.data[self.at - count : self.at]

    def tensor(self, count: int, dtype: torch.dtype, what: str) -> Tensor:
        """The next ``count`` numbers of this type."""
        return bytes_tensor(self.take(count * dtype.itemsize, what), dtype)

    def finite(self, count: int, dtype: torch.dtype, what: str) -> Tensor:
        """The next ``count`` numbers. They are refused unless all of them are finite."""
        values = self.tensor(count, dtype, what)
        if not bool(torch.isfinite(values).all()):
            raise WireError(f"{what}: not finite; the message is corrupt")
        return values

    def number(self, size: int, what: str) -> int:
        """A little-endian whole number of ``size`` bytes."""
        return int.from_bytes(self.take(size, what), "little")

    def fields(self, count: int, width: int, what: str) -> Tensor:
        """The next ``count`` numbers of ``width`` bits."""
        return unpack_fields(self.tensor(field_bytes(count, width), torch.uint8, what), count, width)

    def end(self) -> None:
        """Refuse a payload with bytes left over."""
        if self.at != len(self.data):
            raise WireError(f"payload: {len(self.data) - self.at} bytes too many; the message is corrupt")


def tensor_bytes(tensor: Tensor) -> bytes:
    """The raw little-endian bytes of a tensor."""
    # Copied through a buffer that torch and Python share: `tensor.numpy()` would need numpy.
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if raw.numel() == 0:
        return b""
    buffer = bytearray(raw.numel())
    torch.frombuffer(buffer, dtype=torch.uint8).copy_(raw)
    return bytes(buffer)


def bytes_tensor(data: bytes, dtype: torch.dtype) -> Tensor:
    """The tensor with these raw bytes."""
    if not data:  # `frombuffer` refuses an empty buffer
        return torch.empty(0, dtype=dtype)
    # A copy: a tensor on immutable bytes could be written to, and torch warns about it.
    return torch.frombuffer(bytearray(data), dtype=dtype)


def pack_codes(codes: Tensor, bits: int) -> bytes:
    """(c, k) codes below 2**bits to bytes."""
    return tensor_bytes(pack_fields(codes.view(-1).cpu(), bits))


# -- positions: Rice-coded gaps ------------------------------------------------------------------------------------


def widths(area: int, k: int) -> range:
    """The Rice widths that are tried: around the best width for k positions spread evenly over ``area``."""
    guess = (area // k).bit_length() - 1
    return range(max(0, guess - 2), guess + 3)


def longest_unary(shape: tuple[int, int], area: int, width: int) -> int:
    """The most bytes of the unary part: a one per position, and gaps that add up to at most the area of each chunk."""
    c, k = shape
    return field_bytes(c * k + c * (area >> width), 1)


def pack_positions(index: Tensor, area: int) -> bytes:
    """The Rice code of (c, k) ascending positions below ``area``.

    It consists of one byte with the width, the low bits of the gaps as they are, and the high parts of the gaps in
    unary. For the k strongest of 4096, the size stays within 5 % of log2 C(4096, k): tests/test_kernels.py.
    """
    gaps = (torch.diff(index.cpu(), dim=1, prepend=torch.tensor(-1).expand(len(index), 1)) - 1).view(-1)
    costs = {w: gaps.numel() * w + int((gaps >> w).sum()) for w in widths(area, index.shape[1])}
    width = min(costs, key=lambda w: (costs[w], w))  # on a tie the smaller, so that all kernels make the same bytes
    ends = ((gaps >> width) + 1).cumsum(0) - 1  # the position of the one that closes each unary number
    unary = torch.zeros(int(ends[-1]) + 1, dtype=torch.bool)
    unary[ends] = True
    high = tensor_bytes(pack_flags(unary))
    low = tensor_bytes(pack_fields(gaps & ((1 << width) - 1), width))
    return bytes([width]) + low + len(high).to_bytes(4, "little") + high


def unpack_positions(reader: Reader, shape: tuple[int, int], area: int, what: str) -> Tensor:
    """Read (c, k) ascending positions. All are below ``area``."""
    return decode_positions(open_positions(reader, shape, area, what), shape, area, what)


def decode_positions(coded: tuple[int, bytes, bytes], shape: tuple[int, int], area: int, what: str) -> Tensor:
    """(c, k) positions from what `open_positions` has read."""
    width, low_bytes, high_bytes = coded
    c, k = shape
    low = Reader(low_bytes).fields(c * k, width, what)
    ends = unpack_flags(Reader(high_bytes).tensor(len(high_bytes), torch.uint8, what), len(high_bytes) * 8).nonzero()
    if ends.numel() != c * k:
        raise miscounted(what, c * k)
    high = torch.diff(ends.view(-1), prepend=torch.tensor([-1])) - 1
    index = ((high << width) + low + 1).view(shape).cumsum(1) - 1
    if int(index[:, -1].max()) >= area:
        raise beyond(what, area)
    return index


def open_positions(reader: Reader, shape: tuple[int, int], area: int, what: str) -> tuple[int, bytes, bytes]:
    """Read the Rice width, the low parts and the unary parts, and check their lengths."""
    c, k = shape
    width = reader.number(1, what)
    allowed = widths(area, k)
    if width not in allowed:
        raise WireError(f"{what}: Rice width {width}, not in {allowed[0]} to {allowed[-1]}; the message is corrupt")
    low = reader.take(field_bytes(c * k, width), what)
    length = reader.number(4, what)
    most = longest_unary(shape, area, width)
    if length > most:
        raise WireError(f"{what}: {length} bytes of unary numbers, at most {most} are possible; the message is corrupt")
    high = reader.take(length, what)
    # A sender never writes a trailing zero byte: its last byte contains the one that closes the last number.
    if high[-1:] == b"\0":
        raise WireError(f"{what}: unary numbers end with a zero byte; the message is corrupt")
    return width, low, high


def miscounted(what: str, due: int) -> WireError:
    """The error for a wrong number of positions."""
    return WireError(f"{what}: more or fewer than the {due} positions that are due; the message is corrupt")


def beyond(what: str, area: int) -> WireError:
    """The error for a position outside its chunk."""
    return WireError(f"{what}: a position beyond the {area} there are; the message is corrupt")
