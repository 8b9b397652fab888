"""The pattern of an all-gather: every replica checks and decodes the complete messages of all, in the same order."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from overtone.codec import Block, check_payload, mean_of_blocks
from overtone.coding.bits import Reader, tensor_bytes
from overtone.coding.chunks import Slab
from overtone.exchange.consensus import Inbox, agree
from overtone.exchange.control import Tell
from overtone.exchange.dealing import Deal
from overtone.exchange.message import Expected, Header, Message, seal_message, unseal_message
from overtone.exchange.pattern import WITH_PAYLOAD, Context, Contribution, Received, any_of
from overtone.rules import State
from overtone.transport import Exchange, Gather


class Gathered:
    """The pattern of an all-gather. It keeps no state from round to round."""

    name = "gathered"
    passes_all_on = True
    adds_numbers = False

    def __init__(self, context: Context) -> None:
        self.context = context
        self.state: State = {}
        self._most = context.longest_message()
        self._deal = Deal.whole(context.layout.slabs, len(context.buffers.floats))

    def deal(self, members: int) -> Deal:  # noqa: ARG002
        return self._deal

    def exchange(self, mine: Contribution, expected: Expected, peers: Sequence[int]) -> Exchange[Received]:
        context = self.context
        gathered = yield Gather(seal_message(mine.header, self.body(mine), context.seal), most=self._most)
        begin = time.perf_counter()
        inbox = Inbox(peers).read(gathered, lambda rank, raw: self.open(raw, expected, rank, mine))
        seconds = time.perf_counter() - begin
        # All ranks compare what they have read (consensus.py). Either the same ranks are left out everywhere, most
        # often none, or every rank raises the same error.
        left_out = yield from agree(inbox, mine.header, expected, context.seal, context.refused)
        counted = {rank: message for rank, message in inbox.messages.items() if rank not in left_out}
        headers = [message.header for message in counted.values()]
        readers = [Reader(message.body) for message in counted.values()]
        return Messages(headers, left_out, seconds, counted, readers, context, mine, len(peers))

    def body(self, mine: Contribution) -> bytes:
        """The body of this replica's message."""
        if mine.header.kind not in WITH_PAYLOAD:
            return mine.reason()
        # The order on the wire: tell, flags, buffers, slabs. docs/wire.md specifies it.
        flags = self.context.pack_flags(mine.present) if self.context.flags else b""
        return b"".join([mine.pack_tell(), flags, *map(bytes_of, mine.buffers), *map(bytes_of, mine.blocks)])

    def open(self, raw: bytes, expected: Expected, rank: int, mine: Contribution) -> Message:
        """Open a message and make sure that it will decode. Its whole body is parsed once, and the result is discarded.

        A message of another kind than this replica's own (a drain, a round) has another codec. It will not be decoded,
        because the kinds are compared later. This replica's own message needs no check.
        """
        message = unseal_message(raw, expected, rank, self.context.seal)
        kind = message.header.kind
        if kind in WITH_PAYLOAD and kind is mine.header.kind and rank != mine.header.sender:
            reader = Reader(message.body)
            mine.unpack_tell(reader)
            if self.context.flags:
                self.context.unpack_flags(reader)
            if self._deal.buffers[0]:
                self.context.buffers.unpack(reader, self._deal.buffers[0])
            check_payload(mine.codec, reader, self.context.layout, self.context.kernels)
        return message


def bytes_of(block: Block) -> bytes:
    """A block as part of a message. Numbers that could be summed are gathered in fp32."""
    return block.packed if block.numbers is None else tensor_bytes(block.numbers)


@dataclass
class Messages(Received):
    """The messages that count. ``members`` is the number of replicas in the round, including those left out.

    Each reader moves through its message, so tell, flags, buffers and slabs must be read in the order of the message.
    """

    headers: list[Header]
    left_out: dict[int, str]
    seconds: float
    messages: dict[int, Message]
    readers: list[Reader]
    context: Context
    mine: Contribution
    members: int
    not_finite: int | None = None

    def reason(self, rank: int) -> str:
        return self.messages[rank].text()

    def tells(self) -> list[Tell]:
        return [tell for reader in self.readers if (tell := self.mine.unpack_tell(reader)) is not None]

    def present(self) -> list[bool]:
        return any_of([self.context.unpack_flags(reader) for reader in self.readers]) if self.context.flags else []

    def buffers(self) -> list[Tensor | None]:
        buffers = self.context.buffers
        every = range(len(buffers.floats))
        return buffers.average(every, [buffers.unpack(reader, every) for reader in self.readers])

    def mean(self, slab: Slab, out: Tensor, *, over_senders: bool) -> Tensor:
        # Divided by all members: a rank that was left out still owes its payload. It sends the payload again later, and
        # the payload then counts with the same weight.
        kernels = self.context.kernels
        return mean_of_blocks(
            self.mine.codec, self.readers, slab, self.members, out, over_senders=over_senders, kernels=kernels
        )
