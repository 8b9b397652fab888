"""An *exchange* is one thing for the transport to carry; a *talk* is a generator that yields exchanges and is sent what
was heard. A replica's side of any conversation (joining, a round, finishing) is a talk, so that a real transport can
carry it in one process and the simulator can carry K of them in lockstep, through the same code.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from overtone.errors import OvertoneError
from overtone.transport import Transport

T = TypeVar("T")


@dataclass(frozen=True)
class Gather:
    """``equal``: everybody's message is known to be as long as this one, so lengths need not be told first. Otherwise
    ``most`` is how long a message may be, whatever its sender says."""

    message: bytes
    equal: bool = False
    most: int = 0

    def carry(self, transport: Transport) -> list[bytes]:
        return transport.gather(self.message, most=None if self.equal else self.most)


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
