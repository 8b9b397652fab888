"""The message: one per replica and round, for all tensors together. docs/wire.md specifies it byte by byte.

    header   magic · version · kind · sender · round · steps · length · run · schema · anchor · counters
    body     buffers that changed, then the codec's payload; in a failure message, the reason in words
    seal     CRC-32 of header and body, or their HMAC if the run has a key

The run id is new after every handshake. The schema fingerprint covers names, shapes, method numbers and codec. The
anchor fingerprint is that of the sender's anchor *before* this round, so the next message shows if replicas have
drifted apart. A message that is cut, damaged, or from another round, run or peer is refused before it is decoded.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
import zlib
from dataclasses import dataclass, field
from enum import IntEnum

from overtone.errors import MethodError, WireError, printable

MAGIC = b"OVTN"
VERSION = 3
MOST_REPLICAS = 1 << 16  # a sender's rank has two bytes
KEYED = 0x80  # this bit of the kind's byte means that the message is sealed by HMAC
_HEADER = struct.Struct("<4sBBHIIQ8s8s8s8s")
HEADER_BYTES = _HEADER.size
NOBODY = bytes(8)  # the value of a fingerprint field that is not used


class Kind(IntEnum):
    """The kinds of messages. The numbers are part of the wire format."""

    ROUND = 0
    DRAIN = 1  # one of the last messages, which empty the residuals
    FAILURE = 2  # the sender could not take part; the body says why
    ABSTAIN = 3  # the sender's gradient overflowed under a GradScaler: all replicas skip this step
    FINISH = 4  # the sender has no more payload; the header has the last fingerprint
    DISPUTE = 5  # the ranks have not read the same messages; the body says how the sender read each
    GREETING = 6  # the handshake before the first round
    CONTROL = 7  # the other messages of a run, besides the rounds; its `round` is a counter of its own
    LETTER = 8  # an owner's mean of its part, in the sharded exchange
    # Objects of a run that lives in a store (overtone/swarm):
    JOIN = 9  # the sender asks to become a member
    RUN = 10  # what the run is
    CLAIM = 11  # a process takes a member's number
    COMMIT = 12  # what counts in a round
    SNAPSHOT = 13  # the shared state after some rounds
    PRUNED = 14  # what lay before a round was deleted on purpose


@dataclass(frozen=True)
class Header:
    """The fields of a message's header, except its length."""

    kind: Kind
    sender: int
    round: int
    steps: int  # local steps so far
    run: bytes  # 8 bytes
    schema: bytes  # 8 bytes
    anchor: bytes  # 8 bytes
    counters: bytes  # 8 bytes: fingerprint of the integer buffers

    def pack(self, length: int, seal: Seal) -> bytes:
        """The header of a message with a body of ``length`` bytes."""
        kind = self.kind | (KEYED if seal.key else 0)
        numbers = (MAGIC, VERSION, kind, self.sender, self.round, self.steps, length)
        return _HEADER.pack(*numbers, self.run, self.schema, self.anchor, self.counters)


@dataclass(frozen=True)
class Seal:
    """How messages are sealed: by a checksum against accidents, or with a key by an HMAC, against forgery as well."""

    key: bytes = field(default=b"", repr=False)

    @classmethod
    def with_key(cls, key: str | bytes | None) -> Seal:
        """A seal with this key. None stands for the environment variable ``OVERTONE_KEY``, or no key if it is unset."""
        if key is None:
            return cls(os.fsencode(os.environ.get("OVERTONE_KEY", "")))
        if not isinstance(key, str | bytes) or not key:
            told = "an empty one" if key in ("", b"") else f"a {type(key).__name__}"
            raise MethodError(f"key: {told}; give a str or bytes, the same on every replica, or None for OVERTONE_KEY")
        return cls(key.encode() if isinstance(key, str) else key)

    @property
    def size(self) -> int:
        """The number of bytes of a seal."""
        return 16 if self.key else 4

    def of(self, *parts: bytes) -> bytes:
        """The seal of these parts, taken as one sequence of bytes."""
        if self.key:
            mac = hmac.new(self.key, digestmod=hashlib.sha256)
            for part in parts:
                mac.update(part)
            return mac.digest()[:16]
        checksum = 0
        for part in parts:
            checksum = zlib.crc32(part, checksum)
        return checksum.to_bytes(4, "little")


@dataclass(frozen=True)
class Expected:
    """The header fields that a receiver knows before it opens a message."""

    round: int
    run: bytes
    schema: bytes


@dataclass(frozen=True)
class Message:
    """An opened and verified message."""

    header: Header
    body: bytes
    seal: bytes

    def text(self) -> str:
        """The body as text, for a message that gives a reason."""
        return printable(self.body.decode(errors="replace"))


def seal_message(header: Header, body: bytes, seal: Seal) -> bytes:
    """Header, body and seal as one message."""
    start = header.pack(len(body), seal)
    return b"".join((start, body, seal.of(start, body)))


def unseal_message(message: bytes, expected: Expected, sender: int, seal: Seal) -> Message:
    """Verify a message of a known sender, round, run and schema, and split it into its parts."""
    opened = open_message(message, seal)
    # Only now: the fields of a damaged message would give a misleading reason.
    _check(opened.header, expected, sender)
    return opened


def open_message(message: bytes, seal: Seal) -> Message:
    """Verify the seal of a message, and split it into its parts. The header says whose it is.

    Bytes after the seal are padding that a transport may add. They must be zero.
    """
    if len(message) < HEADER_BYTES:
        raise WireError(f"message: {len(message)} bytes, shorter than the header's {HEADER_BYTES}; it was cut")
    header, length = _parse(message[:HEADER_BYTES], seal)
    end = HEADER_BYTES + length
    room = len(message) - HEADER_BYTES - seal.size
    if length > room:
        raise WireError(f"length: {length} bytes announced, {max(0, room)} came; the message was cut")
    body, mark, rest = message[HEADER_BYTES:end], message[end : end + seal.size], message[end + seal.size :]
    # The seal does not cover the padding, so anything but zeros there would pass unnoticed.
    if rest.count(0) != len(rest):
        raise WireError(f"length: {length} bytes announced, more came")
    if not hmac.compare_digest(seal.of(message[:HEADER_BYTES], body), mark):
        why = "forged, of another key or damaged" if seal.key else "damaged on the way"
        raise WireError(f"{'HMAC' if seal.key else 'checksum'}: does not match the message; it was {why}")
    return Message(header, body, mark)


def _parse(raw: bytes, seal: Seal) -> tuple[Header, int]:
    magic, version, kind, sender, index, steps, length, run, schema, anchor, counters = _HEADER.unpack(raw)
    if magic != MAGIC:
        raise WireError(f"magic: {magic!r} is not {MAGIC!r}; this is not an overtone message")
    if version != VERSION:
        raise WireError(
            f"version: {version}, this replica speaks {VERSION}; install one version of overtone everywhere"
        )
    if bool(kind & KEYED) != bool(seal.key):
        has, lacks = ("the sender", "this replica") if kind & KEYED else ("this replica", "the sender")
        raise WireError(f"seal: {has} has a key, {lacks} has none; set OVERTONE_KEY to the same on every replica")
    kind &= ~KEYED
    if kind not in list(Kind):
        raise WireError(f"kind: {kind} is unknown")
    return Header(Kind(kind), sender, index, steps, run, schema, anchor, counters), length


def _check(header: Header, expected: Expected, sender: int) -> None:
    if header.sender != sender:
        raise WireError(f"sender: says {header.sender}, came from rank {sender}")
    if header.run != expected.run:
        raise WireError(f"run: {header.run.hex()} is not {expected.run.hex()}; a message of another run")
    if header.schema != expected.schema:
        raise WireError(f"schema: {header.schema.hex()} is not {expected.schema.hex()}; another model or method")
    if header.round != expected.round:
        raise WireError(f"round: {header.round}, this is round {expected.round}; a stale or replayed message")
