"""The message: one per replica and round, for all tensors together.

    header   magic · version · kind · sender · round · steps · schema · anchor · counters · length · checksum
    body     buffers that changed, then the codec's payload

The schema fingerprint covers names, shapes, method numbers and codec; the anchor fingerprint is that of the sender's
anchor *before* this round, so replicas that drifted apart find out in the very next message. A message that is cut,
flipped, from another round, run or peer is refused before anything is decoded.

Codecs whose payload is summed on the way (all-reduce) have no message to put a header on: there each replica writes its
header into a slot of its own at the end of the summed vector, as 16-bit numbers that fp32 adds exactly.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from overtone.bits import bytes_tensor
from overtone.errors import WireError

MAGIC = b"OVTN"
VERSION = 1
_HEADER = struct.Struct("<4sBBHII8s8s8sQI")
HEADER_BYTES = _HEADER.size


class Kind(IntEnum):
    ROUND = 0
    DRAIN = 1  # a last message that empties the residuals
    FAILURE = 2  # the sender could not propose; the body says why
    ABSTAIN = 3  # the sender's gradient overflowed under a GradScaler: everybody skips this step


@dataclass(frozen=True)
class Header:
    kind: Kind
    sender: int
    round: int
    steps: int  # local steps so far
    schema: bytes  # 8 bytes
    anchor: bytes  # 8 bytes
    counters: bytes  # 8 bytes: fingerprint of the integer buffers

    def pack(self, length: int, checksum: int) -> bytes:
        return _HEADER.pack(
            MAGIC,
            VERSION,
            self.kind,
            self.sender,
            self.round,
            self.steps,
            self.schema,
            self.anchor,
            self.counters,
            length,
            checksum,
        )


@dataclass(frozen=True)
class Expected:
    """What a receiver knows before it opens a message."""

    round: int
    schema: bytes


def seal(header: Header, body: bytes) -> bytes:
    """Header and body as one message; the checksum covers both."""
    start = header.pack(len(body), 0)
    return header.pack(len(body), zlib.crc32(body, zlib.crc32(start))) + body


def unseal(message: bytes, expected: Expected, sender: int | None = None) -> tuple[Header, bytes]:
    """Header and body, verified. Bytes after the body are padding that a transport may add; they must be zero."""
    if len(message) < HEADER_BYTES:
        raise WireError(f"message: {len(message)} bytes, shorter than the header's {HEADER_BYTES}")
    header, length, checksum = _parse(message[:HEADER_BYTES])
    if length > len(message) - HEADER_BYTES:
        raise WireError(f"length: {length} bytes announced, {len(message) - HEADER_BYTES} came; the message was cut")
    body = message[HEADER_BYTES : HEADER_BYTES + length]
    if any(message[HEADER_BYTES + length :]):
        raise WireError(f"length: {length} bytes announced, more came")
    if zlib.crc32(body, zlib.crc32(header.pack(length, 0))) != checksum:
        raise WireError("checksum: does not match the message; it was damaged on the way")
    _check(header, expected, sender)
    return header, body


def _parse(raw: bytes) -> tuple[Header, int, int]:
    magic, version, kind, sender, index, steps, schema, anchor, counters, length, checksum = _HEADER.unpack(raw)
    if magic != MAGIC:
        raise WireError(f"magic: {magic!r} is not {MAGIC!r}; this is not an overtone message")
    if version != VERSION:
        raise WireError(
            f"version: {version}, this replica speaks {VERSION}; install one version of overtone everywhere"
        )
    if kind not in list(Kind):
        raise WireError(f"kind: {kind} is unknown")
    return Header(Kind(kind), sender, index, steps, schema, anchor, counters), length, checksum


def _check(header: Header, expected: Expected, sender: int | None) -> None:
    if sender is not None and header.sender != sender:
        raise WireError(f"sender: says {header.sender}, came from rank {sender}")
    if header.round != expected.round:
        raise WireError(f"round: {header.round}, this is round {expected.round}; a stale or replayed message")
    if header.schema != expected.schema:
        raise WireError(f"schema: {header.schema.hex()} is not {expected.schema.hex()}; another model, method or run")


# -- summed payloads ---------------------------------------------------------------------------------------------

SLOT = HEADER_BYTES // 2 + 1  # one number that says «present», then the header as 16-bit words


def slots(header: Header, rank: int, size: int) -> Tensor:
    """(size · SLOT,) float32: zeros except for this rank's slot."""
    out = torch.zeros(size, SLOT)
    words = bytes_tensor(header.pack(0, 0), torch.uint8).view(-1, 2).to(torch.float32)
    out[rank, 0] = 1.0
    out[rank, 1:] = words[:, 0] + 256.0 * words[:, 1]
    return out.view(-1)


def read_slots(summed: Tensor, expected: Expected) -> list[Header]:
    """The headers of all replicas that took part, in rank order."""
    return [
        _read_slot(row, rank, expected) for rank, row in enumerate(summed.view(-1, SLOT).cpu()) if float(row[0]) != 0.0
    ]


def _read_slot(row: Tensor, rank: int, expected: Expected) -> Header:
    if not bool(((row >= 0) & (row < 65536) & (row == row.floor())).all()):  # also refuses NaN
        raise WireError(f"slot of rank {rank}: not 16-bit words; the sum was damaged on the way")
    words: Sequence[int] = row[1:].to(torch.int64).tolist()
    header, _, _ = _parse(b"".join(word.to_bytes(2, "little") for word in words))
    _check(header, expected, rank)
    return header
