"""What the patterns of a round have in common. A pattern says how the messages of one round meet: gathered one by one
(gathered.py), or summed on the way (summed.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from overtone.codec import Block, Codec
from overtone.coding.bits import Reader, field_bytes, pack_flags, tensor_bytes, unpack_flags
from overtone.coding.chunks import Slab
from overtone.coding.kernels import Kernels
from overtone.coding.layout import Layout
from overtone.errors import MethodError
from overtone.exchange.buffers import Buffers
from overtone.exchange.consensus import MOST_TEXT
from overtone.exchange.message import Expected, Header, Kind, Seal
from overtone.rules import State
from overtone.transport import Exchange

WITH_PAYLOAD = (Kind.ROUND, Kind.DRAIN)
POLICIES = ("raise", "leave out")  # for a rank whose message is refused


@dataclass(frozen=True)
class Contribution:
    """What a replica sends in one round: a block for each slab and its buffers, or a reason why there are none."""

    header: Header
    codec: Codec
    blocks: Sequence[Block] = ()
    buffers: Block = field(default_factory=Block)
    present: Sequence[bool] = ()  # which parameters have a signal, where that must be sent
    why: str = ""

    def reason(self) -> bytes:
        """The reason as the body of a message."""
        return self.why.encode()[: MOST_TEXT // 2]


class Received(ABC):
    """What counts in this round, the same on every replica."""

    headers: list[Header]  # of the messages that count, in rank order
    left_out: dict[int, str]  # by rank: why its message does not count
    seconds: float  # spent on opening and checking
    not_finite: int | None  # where in a sum the first value is that is not finite

    @abstractmethod
    def reason(self, rank: int) -> str:
        """What a rank sent instead of a payload."""

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
    """One way for the messages of a round to meet. ``state`` is what it remembers from round to round; it is saved with
    the state of the rule."""

    state: State

    def exchange(self, mine: Contribution, expected: Expected, peers: Sequence[int]) -> Exchange[Received]:
        """Everybody's contribution. Ends the same on every replica: with what counts, or with an error."""
        ...


@dataclass(frozen=True)
class Context:
    """What a pattern knows of its replica."""

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

    def longest_message(self) -> int:
        """Bytes that no message of a round exceeds, whatever it says: twice the values in fp32, and some more."""
        numbers = self.layout.size + sum(shared.numel() for shared in self.buffers.shared)
        return 8 * numbers + field_bytes(self.flags, 1) + 64 * len(self.layout.slabs) + MOST_TEXT

    def pack_flags(self, present: Sequence[bool]) -> bytes:
        """One bit for each of those parameters."""
        return tensor_bytes(pack_flags(torch.tensor(present, dtype=torch.bool))) if present else b""

    def unpack_flags(self, reader: Reader) -> Tensor:
        """The bits that come next, as (flags,) bool."""
        packed = reader.tensor(field_bytes(self.flags, 1), torch.uint8, "flags of parameters with a signal")
        return unpack_flags(packed, self.flags)


def any_of(flags: Sequence[Tensor]) -> list[bool]:
    """Which flags are set in any of the lists."""
    found: list[bool] = torch.stack(list(flags)).any(0).tolist()
    return found
