"""How the messages of one round meet: gathered one by one, or summed on the way.

A pattern is a talk (see exchange.py) that ends in `Heard`: what counts in this round, the same on every replica. Nobody
moves before everybody has read the same: a message that one rank cannot read is refused by all, naming its sender.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from overtone.codec import Block, Codec, check_payload, mean
from overtone.coding.bits import Reader, field_bytes, pack_flags, tensor_bytes, unpack_flags
from overtone.coding.kernels import Kernels
from overtone.coding.layout import Layout, Slab
from overtone.errors import MethodError, PeerError, WireError, printable
from overtone.exchange.buffers import Buffers
from overtone.exchange.message import Expected, Header, Kind, Letter, Seal, seal_message, unseal_message
from overtone.exchange.steps import Gather, Sum, Talk

T = TypeVar("T")

WITH_PAYLOAD = (Kind.ROUND, Kind.DRAIN)
WORDS = 1 << 20  # bytes that a reason, a dispute or a greeting may take
POLICIES = ("raise", "leave out")  # for a rank whose message is refused


@dataclass(frozen=True)
class Say:
    """A replica's contribution to one exchange: blocks and buffers, or a reason why there are none."""

    header: Header
    codec: Codec
    blocks: Sequence[Block] = ()
    why: str = ""
    present: Sequence[bool] = ()  # which parameters have a signal, where that must be told


class Heard(ABC):
    """What counts in this round. ``headers`` are those of the messages that do, in rank order."""

    def __init__(self, headers: list[Header]) -> None:
        self.headers = headers
        self.left_out: dict[int, str] = {}
        self.seconds = 0.0  # spent on opening and checking
        self.not_finite: int | None = None  # where in a sum the first value is that is not finite

    @abstractmethod
    def reason(self, rank: int) -> str:
        """What a rank said instead of a payload."""

    @abstractmethod
    def present(self) -> list[bool]:
        """Which parameters had a signal on any replica. To be asked first."""

    @abstractmethod
    def buffers(self) -> list[Tensor]:
        """The mean of the floating buffers. To be asked before `mean`."""

    @abstractmethod
    def mean(self, slab: Slab, out: Tensor, *, over_senders: bool) -> Tensor:
        """The mean of all payloads for one slab; slabs come in the layout's order."""


class Pattern(Protocol):
    def converse(self, say: Say, expected: Expected, peers: Sequence[int]) -> Talk[Heard]: ...


@dataclass(frozen=True)
class Setting:
    """What both patterns need to know of their replica."""

    layout: Layout
    kernels: Kernels
    buffers: Buffers
    seal: Seal
    device: torch.device
    refused: str = "raise"
    flags: int = 0  # parameters of which a message tells whether they have a signal

    def __post_init__(self) -> None:
        if self.refused not in POLICIES:
            raise MethodError(f"refused={self.refused!r}: choose one of {', '.join(map(repr, POLICIES))}")

    @property
    def longest(self) -> int:
        """Bytes that no message of a round exceeds, whatever it says: twice the values in fp32, and some more."""
        numbers = self.layout.size + sum(shared.numel() for shared in self.buffers.shared)
        return 8 * numbers + self.flag_bytes + 64 * len(self.layout.slabs) + WORDS

    @property
    def flag_bytes(self) -> int:
        return field_bytes(self.flags, 1)

    def pack(self, present: Sequence[bool]) -> bytes:
        """One bit for each of those parameters."""
        return tensor_bytes(pack_flags(torch.tensor(present, dtype=torch.bool))) if present else b""

    def unpack(self, reader: Reader) -> Tensor:
        """The bits that come next, as (flags,) bool."""
        packed = reader.tensor(self.flag_bytes, torch.uint8, "flags of parameters with a signal")
        return unpack_flags(packed, self.flags)


# -- gathered ------------------------------------------------------------------------------------------------------


class HeardAll(Heard):
    """Everybody's message by itself. ``members`` is how many take part in the round, heard or left out."""

    def __init__(self, letters: Mapping[int, Letter], setting: Setting, codec: Codec, members: int) -> None:
        super().__init__([letter.header for letter in letters.values()])
        self._letters = letters
        self._members = members
        self._setting = setting
        self._codec = codec
        self._readers = [Reader(letter.body) for letter in letters.values()]

    def reason(self, rank: int) -> str:
        return self._letters[rank].words()

    def present(self) -> list[bool]:
        return _any([self._setting.unpack(reader) for reader in self._readers])

    def buffers(self) -> list[Tensor]:
        buffers = self._setting.buffers
        return buffers.average([buffers.unpack(reader) for reader in self._readers])

    def mean(self, slab: Slab, out: Tensor, *, over_senders: bool) -> Tensor:
        parts = (self._codec.decode(reader, slab, self._setting.kernels) for reader in self._readers)
        # Whoever is left out still owes what it said. It counts when it is heard, over as many members, and not twice.
        return mean(parts, self._members, out, over_senders=over_senders)


@dataclass(frozen=True)
class Gathered:
    """Everyone hears everyone: each message is complete, checked and decoded by every replica in the same order."""

    setting: Setting

    def converse(self, say: Say, expected: Expected, peers: Sequence[int]) -> Talk[Heard]:
        heard = yield Gather(seal_message(say.header, self._body(say), self.setting.seal), most=self.setting.longest)
        begin = time.perf_counter()
        read = Read(peers)
        for rank, message in zip(peers, heard, strict=True):
            with read.refusing(rank):
                read.letters[rank] = self.open(message, expected, rank, say)
        seconds = time.perf_counter() - begin
        left_out = yield from settle(read, say.header, expected, self.setting.seal, self.setting.refused)
        counted = {rank: letter for rank, letter in read.letters.items() if rank not in left_out}
        opened = HeardAll(counted, self.setting, say.codec, len(peers))
        opened.left_out = left_out
        opened.seconds = seconds
        return opened

    def _body(self, say: Say) -> bytes:
        if say.header.kind not in WITH_PAYLOAD:
            return in_words(say.why)
        blocks = [block for block in say.blocks if isinstance(block, bytes)]
        return b"".join([self.setting.pack(say.present), self.setting.buffers.pack(), *blocks])

    def open(self, message: bytes, expected: Expected, rank: int, mine: Say) -> Letter:
        """A message that will decode: everything in it is read once, and forgotten, before anything is believed. One of
        another kind than mine (a drain, a round) has another codec; it will not be decoded, but told apart by kind. My
        own is mine."""
        letter = unseal_message(message, expected, rank, self.setting.seal)
        kind = letter.header.kind
        if kind in WITH_PAYLOAD and kind is mine.header.kind and rank != mine.header.sender:
            reader = Reader(letter.body)
            self.setting.unpack(reader)
            self.setting.buffers.unpack(reader)
            check_payload(mine.codec, reader, self.setting.layout, self.setting.kernels)
        return letter


# -- agreeing on who is heard --------------------------------------------------------------------------------------


@dataclass
class Read:
    """What this rank could read of whom."""

    peers: Sequence[int]
    letters: dict[int, Letter] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)

    @contextmanager
    def refusing(self, rank: int) -> Iterator[None]:
        try:
            yield
        except WireError as error:
            self.refused[rank] = str(error)

    @property
    def marks(self) -> dict[int, str]:
        """By sender: the seal of its message, empty if it was refused."""
        return {rank: self.letters[rank].seal.hex() if rank in self.letters else "" for rank in self.peers}


def settle(
    read: Read, mine: Header, expected: Expected, seal: Seal, refused: str = "raise", what: str = "message"
) -> Talk[dict[int, str]]:
    """Who is left out of this exchange, and why: nobody if all have read the same; else the same ranks everywhere."""
    digest = verdict(read, mine, seal)
    try:
        verdicts = yield Gather(digest, equal=True)
    except PeerError as error:
        # A stranger, or a replica of another version, does not stay to talk about it.
        raise _refusal(expected, read.refused, what) if read.refused else error from error
    if not read.refused and all(other == digest for other in verdicts):
        return {}
    return (yield from dispute(read, mine, expected, seal, refused, what))


def verdict(read: Read, mine: Header, seal: Seal) -> bytes:
    """Eight bytes that are equal on all ranks exactly if all have read the same."""
    marks = json.dumps(read.marks).encode()
    return seal.digest([mine.run, mine.round.to_bytes(4, "little"), marks])


def dispute(
    read: Read, mine: Header, expected: Expected, seal: Seal, refused: str = "raise", what: str = "message"
) -> Talk[dict[int, str]]:
    """Trouble: everybody tells what it read of whom, and all come to the same conclusion."""
    body = json.dumps({"marks": read.marks, "refused": read.refused}).encode()
    heard = yield Gather(seal_message(replace(mine, kind=Kind.DISPUTE), body, seal), most=WORDS)
    try:
        disputes = open_all("dispute", heard, read.peers, expected, seal, _read_dispute)
    except PeerError as error:
        # With another key, nothing of a peer can be read: what was refused first tells more.
        raise _refusal(expected, read.refused, what) if read.refused else error from error
    left_out = {rank: why for rank in read.peers if (why := _complaint(rank, disputes))}
    # If most would have to go, the fault is rather with who could not read them.
    if refused == "raise" or 2 * len(left_out) > len(read.peers):
        told = "; ".join(f"the {what} of rank {rank} was refused {why}" for rank, why in left_out.items())
        raise PeerError(f"round {expected.round}: {told or 'the verdict of a rank was damaged on the way'}")
    return left_out


def _refusal(expected: Expected, refused: Mapping[int, str], what: str) -> PeerError:
    """What this rank alone could not read."""
    told = "; ".join(f"the {what} of rank {rank} was refused: {why}" for rank, why in refused.items())
    return PeerError(f"round {expected.round}: {told}")


def tell(
    what: str,
    header: Header,
    body: bytes,
    peers: Sequence[int],
    seal: Seal,
    parse: Callable[[Letter], T],
    most: int = WORDS,
) -> Talk[list[T]]:
    """Everybody's words, parsed, in rank order; read alike by all, or refused by all. The schema stays out of it: where
    models differ, that is to be told in words."""
    expected = Expected(header.round, header.run, header.schema)
    heard = yield Gather(seal_message(header, body, seal), most=most)
    read, found = Read(peers), {}
    for rank, message in zip(peers, heard, strict=True):
        with read.refusing(rank):
            letter = unseal_message(message, expected, rank, seal)
            if letter.header.kind is not header.kind:
                raise WireError(f"kind: {letter.header.kind.name.lower()} where a {what} is due")
            found[rank] = parse(letter)
            read.letters[rank] = letter
    yield from settle(read, header, expected, seal, what=what)
    return [found[rank] for rank in peers]


@dataclass(frozen=True)
class Dispute:
    marks: dict[int, str] = field(default_factory=dict)  # by sender: the seal of its message as this rank read it
    refused: dict[int, str] = field(default_factory=dict)


def _read_dispute(letter: Letter) -> Dispute:
    if letter.header.kind is not Kind.DISPUTE:
        raise WireError(f"kind: {letter.header.kind.name.lower()} where a dispute is due")
    try:
        body = json.loads(letter.body)
        marks, refused = (
            {int(rank): printable(str(text)) for rank, text in body[key].items()} for key in ("marks", "refused")
        )
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise WireError(f"dispute: {error!r}; the message is corrupt") from error
    return Dispute(marks, refused)


def _complaint(rank: int, disputes: Mapping[int, Dispute]) -> str:
    """Why a rank's message does not count; empty if it does."""
    for judge, dispute in disputes.items():
        if rank in dispute.refused:
            return f"by rank {judge}: {dispute.refused[rank]}"
    if len({dispute.marks.get(rank) for dispute in disputes.values()}) > 1:
        return "because not every rank heard the same"
    return ""


# -- summed --------------------------------------------------------------------------------------------------------


class HeardSum(Heard):
    """The sum of all payloads, divided; or, if somebody had nothing to add, no sum but ``reasons``."""

    def __init__(
        self,
        headers: list[Header],
        setting: Setting,
        mean: Tensor | None = None,
        present: Sequence[Tensor] = (),
        reasons: Mapping[int, str] | None = None,
    ) -> None:
        super().__init__(headers)
        self._setting = setting
        self._mean = torch.empty(0) if mean is None else mean
        self._present = present
        self.not_finite = _not_finite(self._mean)
        self._reasons = reasons or {}

    def reason(self, rank: int) -> str:
        return self._reasons[rank]

    def present(self) -> list[bool]:
        return _any(self._present)

    def buffers(self) -> list[Tensor]:
        return self._setting.buffers.changed_by(self._mean[self._setting.layout.size :])

    def mean(self, slab: Slab, out: Tensor, *, over_senders: bool) -> Tensor:  # noqa: ARG002
        return slab.of(self._mean)


@dataclass(frozen=True)
class Summed:
    """Headers are gathered, then the network adds up one vector: [ values | floating buffers | verdict ].

    The verdict rides in the sum, so that a step of plain data parallelism waits for its peers twice and not thrice.
    Hence the sum must not depend on what was read: whoever has nothing to add, adds zeros. Only when everybody that
    could be read is finishing is there none.
    """

    setting: Setting
    room: dict[str, Tensor] = field(default_factory=dict)  # the vector of the round before: fresh memory is slow

    def converse(self, say: Say, expected: Expected, peers: Sequence[int]) -> Talk[Heard]:
        seal = self.setting.seal
        flags = self.setting.pack(say.present or [False] * self.setting.flags)
        heard = yield Gather(seal_message(say.header, flags, seal), equal=True)
        read = Read(peers)
        for rank, message in zip(peers, heard, strict=True):
            with read.refusing(rank):
                read.letters[rank] = self._open(message, expected, rank)
        headers = [letter.header for letter in read.letters.values()]
        if all(header.kind is Kind.FINISH for header in (say.header, *headers)):
            yield from settle(read, say.header, expected, seal)
            return HeardSum(headers, self.setting)
        votes = _votes(verdict(read, say.header, seal)).to(self.setting.device)
        total = yield Sum(self._vector([*self._numbers(say), votes]))
        if read.refused or not _unanimous(total[-len(votes) :], len(peers)):
            yield from dispute(read, say.header, expected, seal)
        if any(header.kind is Kind.FAILURE for header in headers):
            return (yield from self._reasons(say, expected, peers, headers))
        # Divided by a tensor: on GPUs a Python number would be turned into a product with its reciprocal.
        mean = total[: -len(votes)].div_(torch.tensor(float(len(headers)), device=total.device))
        present = [self.setting.unpack(Reader(letter.body)) for letter in read.letters.values()]
        return HeardSum(headers, self.setting, mean, present)

    def _open(self, message: bytes, expected: Expected, rank: int) -> Letter:
        letter = unseal_message(message, expected, rank, self.setting.seal)
        if len(letter.body) != self.setting.flag_bytes:
            raise WireError(f"length: {len(letter.body)} bytes, where {self.setting.flag_bytes} are due")
        return letter

    def _vector(self, parts: list[Tensor]) -> Tensor:
        """All parts end to end, where those of the last round were."""
        size = sum(part.numel() for part in parts)
        if "vector" not in self.room or self.room["vector"].numel() != size:
            self.room["vector"] = torch.empty(size, device=self.setting.device)
        return torch.cat(parts, out=self.room["vector"])

    def _numbers(self, say: Say) -> list[Tensor]:
        device = self.setting.device
        if say.header.kind not in WITH_PAYLOAD:
            changes = sum(shared.numel() for shared in self.setting.buffers.shared)
            return [torch.zeros(self.setting.layout.size + changes, device=device)]
        blocks = [block.view(-1) for block in say.blocks if isinstance(block, Tensor)]
        return [*blocks, self.setting.buffers.changes().to(device)]

    def _reasons(self, say: Say, expected: Expected, peers: Sequence[int], headers: list[Header]) -> Talk[Heard]:
        """Whoever failed says why, in words."""
        heard = yield Gather(seal_message(say.header, in_words(say.why), self.setting.seal), most=WORDS)
        reasons = open_all("message", heard, peers, expected, self.setting.seal, Letter.words)
        return HeardSum(headers, self.setting, reasons=reasons)


def _votes(digest: bytes) -> Tensor:
    """A verdict as numbers that can be added up without rounding: its half-bytes, then their squares."""
    halves = torch.tensor([half for byte in digest for half in (byte >> 4, byte & 15)], dtype=torch.float32)
    return torch.cat([halves, halves.square()])


def _unanimous(total: Tensor, voters: int) -> bool:
    """All votes were equal: the sum of squares is the least it can be. Every rank reads that from the same totals."""
    sums, squares = total.double().chunk(2)
    return bool((squares * voters == sums.square()).all())


def _not_finite(mean: Tensor) -> int | None:
    """Where the first value is that is not finite. The sum of all tells in one pass that there is none; finite ones may
    have an infinite sum, so then each is looked at."""
    if bool(torch.isfinite(mean.sum())):
        return None
    bad = (~torch.isfinite(mean)).nonzero()
    return int(bad[0]) if len(bad) else None


def _any(flags: Sequence[Tensor]) -> list[bool]:
    """Which flags are set in any of the lists."""
    found: list[bool] = torch.stack(list(flags)).any(0).tolist()
    return found


def in_words(why: str) -> bytes:
    return why.encode()[: WORDS // 2]


def open_all(
    what: str,
    heard: Sequence[bytes],
    peers: Sequence[int],
    expected: Expected,
    seal: Seal,
    read: Callable[[Letter], T],
) -> dict[int, T]:
    """What everybody's message says, by rank, where there is no going on without one of them."""
    found = {}
    for rank, message in zip(peers, heard, strict=True):
        try:
            found[rank] = read(unseal_message(message, expected, rank, seal))
        except WireError as error:
            raise PeerError(f"round {expected.round}: the {what} of rank {rank} was refused: {error}") from error
    return found


def pattern_for(codec: Codec, setting: Setting) -> Pattern:
    if not codec.reduces:
        return Gathered(setting)
    if setting.refused != "raise":
        raise MethodError(
            f"refused={setting.refused!r}: payloads that are summed on the way leave nobody out; use 'raise'"
        )
    return Summed(setting)
