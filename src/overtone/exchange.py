"""How a round's payloads meet: gathered one by one, or summed on the way.

An *exchange* is one thing for the transport to carry; a *talk* is a generator that yields exchanges and is sent what
was heard. A replica's side of any conversation (joining, a round, finishing) is a talk, so that a real transport can
carry it in one process and the simulator can carry K of them in lockstep, through the same code.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from overtone import wire
from overtone.bits import Reader
from overtone.buffers import Buffers
from overtone.codec import Codec, Payload, mean
from overtone.errors import OvertoneError, PeerError, WireError
from overtone.layout import Layout
from overtone.transport import Transport
from overtone.wire import Expected, Header

T = TypeVar("T")


@dataclass(frozen=True)
class Gather:
    message: bytes

    def carry(self, transport: Transport) -> list[bytes]:
        return transport.gather(self.message)


@dataclass(frozen=True)
class Sum:
    buffer: Tensor

    def carry(self, transport: Transport) -> Tensor:
        return transport.sum(self.buffer)


@dataclass(frozen=True)
class Broadcast:
    tensors: Sequence[Tensor]

    def carry(self, transport: Transport) -> None:
        transport.broadcast(self.tensors)


Exchange = Gather | Sum | Broadcast
Talk = Generator[Exchange, Any, T]  # sent what `carry` returned


def hold(talk: Talk[T], transport: Transport) -> T:
    """Carry one talk to its end. What breaks on the way is told to the talk, which may have something to take back."""
    try:
        exchange = next(talk)
        while True:
            try:
                heard = exchange.carry(transport)
            except OvertoneError as error:
                exchange = talk.throw(error)
            else:
                exchange = talk.send(heard)
    except StopIteration as end:
        result: T = end.value
        return result


@dataclass(frozen=True)
class Opened:
    """A round's exchange, verified but not decoded: everybody's header, and bodies for the pattern's own `mean`."""

    headers: list[Header]
    bodies: list[Any]  # one per header if gathered, one for all if summed

    def confession(self, position: int) -> str:
        """What the sender at this position said instead of a payload."""
        if len(self.bodies) == len(self.headers) and isinstance(self.bodies[position], bytes):
            return str(self.bodies[position].decode(errors="replace"))
        return "its own log says why"


class Pattern(Protocol):
    """How the payloads of a codec are packed into one exchange and taken apart again."""

    def pack(self, header: Header, payload: Payload, buffers: Buffers) -> Exchange: ...

    def refuse(self, header: Header, why: str, buffers: Buffers) -> Exchange:
        """An exchange without payload, for a replica that has none but must not leave the others waiting."""
        ...

    def open(self, heard: Any, expected: Expected, peers: Sequence[int]) -> Opened: ...

    def mean(
        self, opened: Opened, codec: Codec, buffers: Buffers, *, over_senders: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """The mean of all payloads (flat), and of all floating buffers."""
        ...


@dataclass(frozen=True)
class Gathered:
    """Everyone hears everyone: each message is complete, checked and decoded by every replica in the same order."""

    layout: Layout
    device: torch.device

    def pack(self, header: Header, payload: Payload, buffers: Buffers) -> Exchange:
        assert isinstance(payload, bytes)
        return Gather(wire.seal(header, buffers.pack() + payload))

    def refuse(self, header: Header, why: str, buffers: Buffers) -> Exchange:  # noqa: ARG002
        return Gather(wire.seal(header, why.encode()))

    def open(self, heard: list[bytes], expected: Expected, peers: Sequence[int]) -> Opened:
        opened = Opened([], [])
        for rank, message in zip(peers, heard, strict=True):
            with _refusing(f"message of rank {rank}", expected.round):
                header, body = wire.unseal(message, expected, rank)
            opened.headers.append(header)
            opened.bodies.append(body)
        return opened

    def mean(
        self, opened: Opened, codec: Codec, buffers: Buffers, *, over_senders: bool
    ) -> tuple[Tensor, list[Tensor]]:
        payloads, their_buffers = [], []
        for header, body in zip(opened.headers, opened.bodies, strict=True):
            with _refusing(f"payload of rank {header.sender}", header.round):
                reader = Reader(body)
                their_buffers.append(buffers.unpack(reader))
                payloads.append(codec.decode(body[reader.at :], self.layout))
        return mean(payloads, self.layout, self.device, over_senders=over_senders), buffers.average(their_buffers)


@dataclass(frozen=True)
class Summed:
    """The network adds the payloads up: [ values | floating buffers | one slot per replica for its header ]."""

    layout: Layout
    device: torch.device
    rank: int
    size: int

    def pack(self, header: Header, payload: Payload, buffers: Buffers) -> Exchange:
        assert isinstance(payload, Tensor)
        return self._with_slots(header, torch.cat([payload, buffers.changes().to(payload.device)]))

    def refuse(self, header: Header, why: str, buffers: Buffers) -> Exchange:  # noqa: ARG002
        nothing = torch.zeros(self.layout.size + sum(s.numel() for s in buffers.shared), device=self.device)
        return self._with_slots(header, nothing)

    def _with_slots(self, header: Header, numbers: Tensor) -> Exchange:
        return Sum(torch.cat([numbers, wire.slots(header, self.rank, self.size).to(numbers.device)]))

    def open(self, heard: Tensor, expected: Expected, peers: Sequence[int]) -> Opened:
        cut = heard.numel() - self.size * wire.SLOT
        with _refusing("sum", expected.round):
            headers = wire.read_slots(heard[cut:], expected)
        spoke = [header.sender for header in headers]
        if spoke != list(peers):
            raise PeerError(f"round {expected.round}: heard ranks {spoke}, expected {list(peers)}")
        # Divided by a tensor: on GPUs a Python number would be turned into a product with its reciprocal.
        return Opened(headers, [heard[:cut] / torch.tensor(float(len(headers)), device=heard.device)])

    def mean(
        self,
        opened: Opened,
        codec: Codec,  # noqa: ARG002
        buffers: Buffers,
        *,
        over_senders: bool,  # noqa: ARG002
    ) -> tuple[Tensor, list[Tensor]]:
        (body,) = opened.bodies
        return body[: self.layout.size], buffers.changed_by(body[self.layout.size :])


@contextmanager
def _refusing(what: str, index: int) -> Iterator[None]:
    """Every rank sees the same bytes, so every rank refuses them alike."""
    try:
        yield
    except WireError as error:
        raise PeerError(f"round {index}: the {what} was refused: {error}") from error


def pattern_for(codec: Codec, layout: Layout, transport: Transport, device: torch.device) -> Pattern:
    if codec.reduces:
        return Summed(layout, device, transport.rank, transport.size)
    return Gathered(layout, device)
