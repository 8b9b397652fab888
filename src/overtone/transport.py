"""From replica to replica. A transport carries whole buffers and counts them; it knows nothing of what they mean.

An *exchange* is a generator. It yields *collectives* (a gather, a sum, a broadcast, a commit) and is sent their
results. A replica's side of a handshake, of a round or of the last messages is such a generator. So a real transport
can carry it in one process (`run_exchange`), and the simulator can carry K of them in lockstep, by the same code.

`Solo` is here; the transport of real worlds, over `torch.distributed`, is world/process_group.py.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torch import Tensor

from overtone.errors import OvertoneError
from overtone.ledger import Count, Ledger

T = TypeVar("T")


class Transport(Protocol):
    """What a replica needs of the world. Buffers are complete: one call per round, never one per tensor.

    Every verb is a collective: all replicas must call it, in the same order, or they wait for each other. Each adds
    what it cost to the ``count`` it is given; `run_exchange` adds that to the ledger.
    """

    rank: int
    size: int  # replicas in this world, present or not
    ledger: Ledger

    @property
    def peers(self) -> Sequence[int]:
        """The ranks that take part in this round, in order."""
        ...

    def gather(self, message: bytes, *, most: int | None, count: Count) -> list[bytes]:
        """Everybody's message, in rank order. Messages may come back with zeros behind them. None may be longer than
        ``most`` bytes; None says that all are as long as this one."""
        ...

    def sum(self, buffer: Tensor, *, count: Count) -> Tensor:
        """The sum of everybody's buffer, the same bits on every rank."""
        ...

    def broadcast(self, tensors: Sequence[Tensor], *, count: Count) -> None:
        """Rank 0's tensors into everybody's."""
        ...

    def commit(self, index: int) -> None:
        """All replicas have read the same messages of round ``index``, and no weight has moved. A transport whose peers
        can still be lost raises a `PeerError` here: the round is then refused and its payload is owed again."""
        ...


VERBS = ("rank", "size", "ledger", "peers", "gather", "sum", "broadcast", "commit")


def is_transport(thing: object) -> bool:
    """The thing has all that a replica needs of a transport."""
    return all(hasattr(thing, name) for name in VERBS)


# -- exchanges -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gather:
    """``equal``: everybody's message is known to be as long as this one, so lengths need not be sent first. Otherwise
    ``most`` is how long a message may be, whatever its sender says."""

    message: bytes
    equal: bool = False
    most: int = 0
    count: Count = field(default_factory=Count)

    def carry(self, transport: Transport) -> list[bytes]:
        return transport.gather(self.message, most=None if self.equal else self.most, count=self.count)


@dataclass(frozen=True)
class Sum:
    """The sum of everybody's buffer."""

    buffer: Tensor
    count: Count = field(default_factory=Count)

    def carry(self, transport: Transport) -> Tensor:
        return transport.sum(self.buffer, count=self.count)


@dataclass(frozen=True)
class Broadcast:
    """The first replica's tensors."""

    tensors: Sequence[Tensor]
    count: Count = field(default_factory=Count)

    def carry(self, transport: Transport) -> None:
        transport.broadcast(self.tensors, count=self.count)


@dataclass(frozen=True)
class Commit:
    """The last moment at which a round can be refused."""

    index: int
    count: Count = field(default_factory=Count)

    def carry(self, transport: Transport) -> None:
        transport.commit(self.index)


Collective = Gather | Sum | Broadcast | Commit
Exchange = Generator[Collective, Any, T]  # is sent what `carry` returned


def run_exchange(exchange: Exchange[T], transport: Transport, phase: str = "rounds") -> T:
    """Carry one exchange to its end, and count it as part of ``phase``. An error on the way is thrown into the
    exchange, which may have something to take back."""
    try:
        collective = next(exchange)
        while True:
            try:
                result = collective.carry(transport)
            except OvertoneError as error:
                transport.ledger.add(phase, collective.count)
                collective = exchange.throw(error)
            else:
                transport.ledger.add(phase, collective.count)
                collective = exchange.send(result)
    except StopIteration as end:
        value: T = end.value
        return value


def counted(exchange: Exchange[T], total: Count) -> Exchange[T]:
    """The same exchange; its bytes and seconds are also added to ``total``."""
    try:
        collective = next(exchange)
        while True:
            try:
                result = yield collective
            except OvertoneError as error:
                collective = exchange.throw(error)
            else:
                total.add(collective.count)
                collective = exchange.send(result)
    except StopIteration as end:
        value: T = end.value
        return value


class AlwaysCommits:
    """A transport that cannot lose a peer between the last message of a round and its commit."""

    def commit(self, index: int) -> None:
        """Nothing to ask."""


class Solo(AlwaysCommits):
    """A world of one."""

    rank = 0
    size = 1

    peers = (0,)

    def __init__(self) -> None:
        self.ledger = Ledger()

    def gather(self, message: bytes, *, most: int | None, count: Count) -> list[bytes]:  # noqa: ARG002
        return [message]

    def sum(self, buffer: Tensor, *, count: Count) -> Tensor:  # noqa: ARG002
        return buffer

    def broadcast(self, tensors: Sequence[Tensor], *, count: Count) -> None:
        pass

    def leave(self, words: str) -> None:
        pass
