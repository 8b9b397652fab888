"""The pattern of an all-reduce: headers are gathered, then the network sums one vector.

    vector = [ values | floating buffers | verdict ]          float32

The verdict is part of the sum, so that a step of plain data parallelism waits for its peers twice and not three times.
So every replica must call the sum, whatever it has read: a replica that has no payload adds zeros. The sum is left out
only if every replica whose message could be read is finishing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from overtone.coding.bits import Reader, field_bytes
from overtone.coding.chunks import Slab
from overtone.coding.layout import part_of
from overtone.errors import WireError
from overtone.exchange.consensus import MOST_TEXT, Inbox, agree, dispute, open_all, verdict
from overtone.exchange.dealing import Deal
from overtone.exchange.message import Expected, Header, Kind, Message, seal_message, unseal_message
from overtone.exchange.pattern import WITH_PAYLOAD, Context, Contribution, Received, any_of
from overtone.rules import State
from overtone.transport import Exchange, Gather, Sum


class Summed:
    """The pattern of an all-reduce. The vector of one round is used again in the next, because new memory is slow."""

    name = "summed"
    passes_all_on = True
    adds_numbers = True

    def __init__(self, context: Context) -> None:
        self.context = context
        self.state: State = {}
        self._flag_bytes = field_bytes(context.flags, 1)
        self._vector = torch.empty(0, device=context.device)
        self._deal = Deal.whole(context.layout.slabs, len(context.buffers.floats))

    def deal(self, members: int) -> Deal:  # noqa: ARG002
        return self._deal

    def exchange(self, mine: Contribution, expected: Expected, peers: Sequence[int]) -> Exchange[Received]:
        seal = self.context.seal
        flags = self.context.pack_flags(mine.present or [False] * self.context.flags)
        # A replica without a payload sends flags too, so that all messages have one length.
        gathered = yield Gather(seal_message(mine.header, flags, seal), equal=True)
        inbox = Inbox(peers).read(gathered, lambda rank, raw: self._open(raw, expected, rank))
        headers = [message.header for message in inbox.messages.values()]
        # The last messages have no payload, so they need no sum: the verdict is gathered instead.
        if all(header.kind is Kind.FINISH for header in (mine.header, *headers)):
            yield from agree(inbox, mine.header, expected, seal)
            return _Sum(headers, self.context)
        votes = _votes(verdict(inbox, mine.header, seal)).to(self.context.device)
        total = yield Sum(self._filled([*self._numbers(mine), votes]))
        if inbox.refused or not _unanimous(total[-len(votes) :], len(peers)):
            yield from dispute(inbox, mine.header, expected, seal)
        if any(header.kind is Kind.FAILURE for header in headers):
            return (yield from self._reasons(mine, expected, peers, headers))
        # The divisor is a tensor: on GPUs, torch turns the division by a Python number into a product with its
        # reciprocal.
        mean = total[: -len(votes)].div_(torch.tensor(float(len(headers)), device=total.device))
        present = [self.context.unpack_flags(Reader(message.body)) for message in inbox.messages.values()]
        return _Sum(headers, self.context, mean, present, not_finite=_first_not_finite(mean))

    def _open(self, raw: bytes, expected: Expected, rank: int) -> Message:
        message = unseal_message(raw, expected, rank, self.context.seal)
        if len(message.body) != self._flag_bytes:
            raise WireError(f"length: {len(message.body)} bytes, where {self._flag_bytes} are due")
        return message

    def _filled(self, parts: list[Tensor]) -> Tensor:
        """All parts as one vector, in the memory of the last round's vector."""
        size = sum(part.numel() for part in parts)
        if self._vector.numel() != size:
            self._vector = torch.empty(size, device=self.context.device)
        return torch.cat(parts, out=self._vector)

    def _numbers(self, mine: Contribution) -> list[Tensor]:
        device = self.context.device
        if mine.header.kind not in WITH_PAYLOAD:  # zeros: every rank must call the sum, with one length
            changes = sum(shared.numel() for shared in self.context.buffers.shared)
            return [torch.zeros(self.context.layout.size + changes, device=device)]
        blocks = [*mine.blocks, *mine.buffers]
        return [block.numbers.view(-1).to(device) for block in blocks if block.numbers is not None]

    def _reasons(
        self, mine: Contribution, expected: Expected, peers: Sequence[int], headers: list[Header]
    ) -> Exchange[Received]:
        """A second all-gather, after a failure: the replicas that failed send their reasons, in words."""
        gathered = yield Gather(seal_message(mine.header, mine.reason(), self.context.seal), most=MOST_TEXT)
        reasons = open_all("message", gathered, peers, expected, self.context.seal, Message.text)
        return _Sum(headers, self.context, reasons=reasons)


@dataclass
class _Sum(Received):
    """The mean of all payloads. If a replica failed, there are ``reasons`` and no mean."""

    headers: list[Header]
    context: Context
    vector: Tensor = field(default_factory=lambda: torch.empty(0))
    flags: Sequence[Tensor] = ()
    reasons: dict[int, str] = field(default_factory=dict)
    not_finite: int | None = None
    left_out: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0

    def reason(self, rank: int) -> str:
        return self.reasons[rank]

    def present(self) -> list[bool]:
        return any_of(self.flags)

    def buffers(self) -> list[Tensor | None]:
        return self.context.buffers.changed_by(self.vector[self.context.layout.size :])

    def mean(self, slab: Slab, out: Tensor, *, over_senders: bool) -> Tensor:  # noqa: ARG002
        return part_of(self.vector, slab)


def _votes(digest: bytes) -> Tensor:
    """A verdict as numbers that can be summed without rounding: its half-bytes, then their squares."""
    halves = torch.tensor([half for byte in digest for half in (byte >> 4, byte & 15)], dtype=torch.float32)
    return torch.cat([halves, halves.square()])


def _unanimous(total: Tensor, voters: int) -> bool:
    """True if all votes were equal: only then n · Σx² = (Σx)². Every rank computes this from the same totals."""
    sums, squares = total.double().chunk(2)
    return bool((squares * voters == sums.square()).all())


def _first_not_finite(mean: Tensor) -> int | None:
    """The position of the first value that is not finite, or None.

    A finite sum shows in one fast pass that all values are finite. Finite values may have an infinite sum, so then each
    value is tested.
    """
    if bool(torch.isfinite(mean.sum())):
        return None
    bad = (~torch.isfinite(mean)).nonzero()
    return int(bad[0]) if len(bad) else None
