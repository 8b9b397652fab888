"""The common parts of the patterns of a round.

A pattern is the way in which the payloads of one round are combined: by an all-gather of all messages (gathered.py), by
an all-reduce, in which the network sums them (summed.py), or by owners, each of which averages a part of the model for
all replicas (sharded.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from overtone.codec import Block, Codec, Decoded
from overtone.coding.bits import Reader, field_bytes, pack_flags, tensor_bytes, unpack_flags
from overtone.coding.chunks import Slab
from overtone.coding.kernels import Kernels
from overtone.coding.layout import Layout
from overtone.errors import MethodError
from overtone.exchange.buffers import Buffers
from overtone.exchange.consensus import MOST_TEXT
from overtone.exchange.control import Tell
from overtone.exchange.dealing import Deal
from overtone.exchange.message import Expected, Header, Kind, Seal
from overtone.rules import State
from overtone.transport import Exchange

WITH_PAYLOAD = (Kind.ROUND, Kind.DRAIN)
POLICIES = ("raise", "leave out")  # for a rank whose message is refused


@dataclass(frozen=True)
class Contribution:
    """The data that a replica sends in one round: its buffers and a block for each piece, or a reason for neither."""

    header: Header
    codec: Codec
    deal: Deal | None = None  # into which pieces and parts the blocks and buffers are dealt
    blocks: Sequence[Block] = ()  # one for each piece
    buffers: Sequence[Block] = ()  # one for each part
    keep_down: int | None = None  # the method's own, for the owners' letters
    present: Sequence[bool] = ()  # for each parameter: it has a signal; empty if that need not be sent
    tell: Tell | None = None  # for the controller, if `keep` is controlled
    why: str = ""  # the reason, if there are no blocks

    def reason(self) -> bytes:
        """The reason as the body of a message."""
        return self.why.encode()[: MOST_TEXT // 2]

    def pack_tell(self) -> bytes:
        """The tell as the beginning of a body. Without a controller it is empty."""
        return b"" if self.tell is None else self.tell.pack()

    def unpack_tell(self, reader: Reader) -> Tell | None:
        """Read the tell of another replica, whose `keep` must be this one's."""
        return None if self.tell is None else Tell.unpack(reader, self.tell.keep)


class Received(ABC):
    """The messages that count in this round. They are the same on every replica."""

    headers: list[Header]  # of the messages that count, in rank order
    left_out: dict[int, str]  # by rank: why its message does not count
    lost: Mapping[int, str] = MappingProxyType({})  # by owner: why its letter does not count
    seconds: float  # spent on opening and checking the messages
    may_return: bool = False  # some of what this replica sent may not count (see `returned`)
    not_finite: int | None  # the position in the sum of the first value that is not finite

    @abstractmethod
    def reason(self, rank: int) -> str:
        """The reason that a rank sent instead of a payload."""

    def tells(self) -> list[Tell]:
        """What the replicas tell of themselves, in rank order. Only where `keep` is controlled. Call this first."""
        return []

    @abstractmethod
    def present(self) -> list[bool]:
        """For each parameter: it had a signal on at least one replica. Call this before `buffers`."""

    @abstractmethod
    def buffers(self) -> list[Tensor | None]:
        """The mean of the floating buffers, None for a buffer that stays as it is. Call this before `mean`."""

    @abstractmethod
    def mean(self, slab: Slab, out: Tensor, *, over_senders: bool) -> Tensor:
        """The mean of all payloads for one slab. Call this for the slabs in the order of the layout."""

    def returned(self, slab: Slab) -> Iterable[tuple[Slab, Decoded]]:  # noqa: ARG002
        """What this replica owes again of one slab, by pieces: values that were sent and do not count. Call this after
        `mean`."""
        return ()


class Pattern(Protocol):
    """One way to combine the payloads of a round.

    ``state`` is kept from round to round, and is saved with the state of the rule.
    """

    name: str
    state: State
    passes_all_on: bool  # every round applies all that its messages have, so that nothing of it is owed
    adds_numbers: bool  # the network sums payloads, so that they are numbers and not bytes

    def deal(self, members: int) -> Deal:
        """How slabs and buffers are dealt into the parts of messages, among so many replicas."""
        ...

    def exchange(self, mine: Contribution, expected: Expected, peers: Sequence[int]) -> Exchange[Received]:
        """Exchange the contributions of all replicas.

        It ends in the same way on every replica: with the same messages, or with an error.
        """
        ...


@dataclass(frozen=True)
class Context:
    """The parts of a replica that a pattern uses."""

    layout: Layout
    kernels: Kernels
    buffers: Buffers
    seal: Seal
    device: torch.device
    refused: str = "raise"
    flags: int = 0  # the number of parameters for which a message has a flag: it has a signal

    def __post_init__(self) -> None:
        if self.refused not in POLICIES:
            raise MethodError(f"refused={self.refused!r}: choose one of {', '.join(map(repr, POLICIES))}")

    def longest_message(self) -> int:
        """An upper bound for the bytes of a message of a round: twice the values in fp32, and a reserve.

        It limits the memory that a wrong or hostile length can make a receiver reserve.
        """
        numbers = self.layout.size + sum(shared.numel() for shared in self.buffers.shared)
        return 8 * numbers + field_bytes(self.flags, 1) + 64 * len(self.layout.slabs) + MOST_TEXT

    def pack_flags(self, present: Sequence[bool]) -> bytes:
        """One bit for each parameter that has a flag."""
        return tensor_bytes(pack_flags(torch.tensor(present, dtype=torch.bool))) if present else b""

    def unpack_flags(self, reader: Reader) -> Tensor:
        """Read the next flags, as (flags,) bool."""
        packed = reader.tensor(field_bytes(self.flags, 1), torch.uint8, "flags of parameters with a signal")
        return unpack_flags(packed, self.flags)


def any_of(flags: Sequence[Tensor]) -> list[bool]:
    """For each flag: it is set in at least one of the lists."""
    found: list[bool] = torch.stack(list(flags)).any(0).tolist()
    return found
