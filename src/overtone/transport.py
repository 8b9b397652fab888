"""Transports carry buffers between replicas. A transport carries whole buffers and counts their bytes; it does not
know their content.

An *exchange* is a generator. It yields *collectives* (a gather, an all-to-all, a sum, a broadcast, a commit) and is
sent their results. A replica's side of a handshake, of a round or of the last messages is such a generator. So a real
transport can carry one exchange in its process (`run_exchange`), and the simulator can carry K exchanges in lockstep,
with the same code.

This module has the transport of a single process, `Solo`. The transport over `torch.distributed` is in
world/process_group.py.
"""

from __future__ import annotations

import atexit
import inspect
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

from torch import Tensor

from overtone.errors import OvertoneError
from overtone.ledger import Count, Ledger

T = TypeVar("T")


class Transport(Protocol):
    """The interface between a replica and its peers. A buffer holds all tensors: one call per round, not per tensor.

    Every method is a collective: all replicas must call it, in the same order, or they block each other. Each method
    adds its cost to the ``count`` that it is given; `run_exchange` adds that count to the ledger.
    """

    rank: int
    size: int  # number of replicas in this world, present or absent
    ledger: Ledger

    @property
    def peers(self) -> Sequence[int]:
        """The ranks that take part in this round, in order."""
        ...

    def gather(self, message: bytes, *, most: int | None, count: Count) -> list[bytes]:
        """All-gather: the messages of all replicas, in rank order. A returned message may be padded with zeros.

        No message may be longer than ``most`` bytes. If ``most`` is None, all messages are as long as this one.
        """
        ...

    def all_to_all(self, messages: Sequence[bytes], *, most: int, count: Count) -> list[bytes]:
        """All-to-all: message i goes to the i-th of `peers`. Returns one message of each, in rank order.

        A returned message may be padded with zeros. No message may be longer than ``most`` bytes.
        """
        ...

    def sum(self, buffer: Tensor, *, count: Count) -> Tensor:
        """All-reduce: the sum of the buffers of all replicas, with the same bits on every rank."""
        ...

    def broadcast(self, tensors: Sequence[Tensor], *, count: Count) -> None:
        """Copy the tensors of rank 0 into the tensors of all other ranks."""
        ...

    def background(self) -> Background:
        """Make a second channel to the same peers, with its own order of collectives, for exchanges that go on beside
        the training. Only methods with a delay need it."""
        ...

    def commit(self, index: int) -> None:
        """Confirm round ``index``: all replicas have read the same messages, and no weight has changed yet.

        A transport that can still lose a peer at this point raises a `PeerError` here. The round is then refused, and
        its payload goes back into the residual.
        """
        ...


COLLECTIVES = ("all_to_all", "broadcast", "gather", "sum")  # each adds its cost to a count
PARTS = ("rank", "size", "ledger", "peers", *COLLECTIVES, "commit")


def lacking(thing: object, *, overlaps: bool) -> list[str]:
    """The parts of a transport that a thing does not have. ``overlaps``: exchanges are to go on beside the training."""
    missing = [name for name in (*PARTS, *(("background",) if overlaps else ())) if not hasattr(thing, name)]
    for verb in (name for name in COLLECTIVES if name not in missing):
        kinds = {name: p.kind for name, p in inspect.signature(getattr(thing, verb)).parameters.items()}
        if "count" not in kinds and inspect.Parameter.VAR_KEYWORD not in kinds.values():
            missing.append(f"{verb}(count=)")
    return missing


# -- exchanges -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gather:
    """An all-gather of messages.

    ``equal``: the messages of all replicas are known to be as long as this one, so no lengths are sent first.
    Otherwise a message may have at most ``most`` bytes, whatever length its sender announces.
    """

    message: bytes
    equal: bool = False
    most: int = 0
    count: Count = field(default_factory=Count)

    def carry(self, transport: Transport) -> list[bytes]:
        """Run this collective on a transport."""
        return transport.gather(self.message, most=None if self.equal else self.most, count=self.count)


@dataclass(frozen=True)
class AllToAll:
    """An all-to-all: a message of its own for each of the peers, in rank order. Each may have ``most`` bytes."""

    messages: Sequence[bytes]
    most: int
    count: Count = field(default_factory=Count)

    def carry(self, transport: Transport) -> list[bytes]:
        """Run this collective on a transport."""
        return transport.all_to_all(self.messages, most=self.most, count=self.count)


@dataclass(frozen=True)
class Sum:
    """An all-reduce: the sum of the buffers of all replicas."""

    buffer: Tensor
    count: Count = field(default_factory=Count)

    def carry(self, transport: Transport) -> Tensor:
        """Run this collective on a transport."""
        return transport.sum(self.buffer, count=self.count)


@dataclass(frozen=True)
class Broadcast:
    """A broadcast of the first replica's tensors."""

    tensors: Sequence[Tensor]
    count: Count = field(default_factory=Count)

    def carry(self, transport: Transport) -> None:
        """Run this collective on a transport."""
        transport.broadcast(self.tensors, count=self.count)


@dataclass(frozen=True)
class Commit:
    """The last point at which a round can be refused."""

    index: int
    count: Count = field(default_factory=Count)

    def carry(self, transport: Transport) -> None:
        """Run this collective on a transport."""
        transport.commit(self.index)


Collective = Gather | AllToAll | Sum | Broadcast | Commit
Exchange = Generator[Collective, Any, T]  # each collective it yields is answered with the result of `carry`


def run_exchange(exchange: Exchange[T], transport: Transport, phase: str | None = "rounds") -> T:
    """Carry one exchange to its end, and add its cost to ``phase`` of the ledger (None: the caller will).

    An error of a collective is thrown into the exchange, so that the exchange can undo its changes.
    """
    ledger = Ledger() if phase is None else transport.ledger
    phase = phase or "rounds"
    try:
        collective = next(exchange)
        while True:
            try:
                result = collective.carry(transport)
            except OvertoneError as error:
                # Counted too: a failed collective has also taken time.
                ledger.add(phase, collective.count)
                collective = exchange.throw(error)
            else:
                ledger.add(phase, collective.count)
                collective = exchange.send(result)
    except StopIteration as end:
        value: T = end.value
        return value
    finally:
        exchange.close()  # an interrupt, such as Ctrl-C, has not reached the exchange yet


def counted(exchange: Exchange[T], total: Count) -> Exchange[T]:
    """The same exchange. The cost of its collectives is also added to ``total``."""
    try:
        collective = next(exchange)
        while True:
            try:
                # Passed on to the carrier, which fills the collective's own count before it answers.
                result = yield collective
            except OvertoneError as error:
                total.add(collective.count)
                collective = exchange.throw(error)
            else:
                total.add(collective.count)
                collective = exchange.send(result)
    except StopIteration as end:
        value: T = end.value
        return value
    finally:
        exchange.close()


# -- exchanges beside the training ---------------------------------------------------------------------------------

SLICE = 0.25  # seconds: the longest time until a waiting thread reacts to a signal
PATIENCE = 30.0  # seconds that the end of a process waits for an exchange, which may have to end a computation first


class Background:
    """Carries exchanges in a thread, one at a time, while the replica goes on training.

    ``channel`` is a transport that nothing else uses. ``idle`` is called now and then while the training thread waits.
    """

    def __init__(self, channel: Transport, idle: Callable[[], None] = lambda: None) -> None:
        self.channel = channel
        self.idle = idle
        self._ending = False

    def give_way(self) -> None:
        """Raise an error if the process ends. A channel calls this now and then while it waits for a peer."""
        if self._ending:
            raise OvertoneError("the process ends, and with it the exchange in the background")

    def end(self) -> None:
        """Let `give_way` raise from now on."""
        self._ending = True

    def flight(self, exchange: Exchange[None]) -> Flight:
        """A flight for an exchange. Its cost is not added to the ledger: whoever lands it does that."""
        return Flight(exchange, self)


class Flight:
    """An exchange that is carried in the background, from `begin` on."""

    def __init__(self, exchange: Exchange[None], background: Background) -> None:
        self.seconds = 0.0  # that it took
        self.background = background
        self._error: BaseException | None = None
        # A daemon: a process that fails in its training must be able to end.
        self._thread = threading.Thread(target=self._carry, args=(exchange,), name="overtone exchange", daemon=True)
        _flights.add(self)

    def begin(self) -> None:
        """Begin to carry the exchange, if it has not begun."""
        if self._thread.ident is None:
            self._thread.start()

    def _carry(self, exchange: Exchange[None]) -> None:
        begin = time.perf_counter()
        try:
            run_exchange(exchange, self.background.channel, None)
        except BaseException as error:  # raised by `land`, in the thread that can act on it
            self._error = error
        self.seconds = time.perf_counter() - begin

    def settle(self) -> float:
        """Wait for the end of the exchange, successful or not. Returns the seconds of waiting."""
        if not self._thread.is_alive():
            return 0.0
        begin = time.perf_counter()
        while self._thread.is_alive():
            self._thread.join(SLICE)
            self.background.idle()
        return time.perf_counter() - begin

    def land(self) -> None:
        """Raise the error of the exchange, if it failed. Call `settle` first."""
        if self._error is not None:
            raise self._error

    def abandon(self, patience: float) -> None:
        """Wait for the end of an exchange that gives way. A thread that is still in native code would abort the end of
        the process."""
        if self._thread.ident is not None:
            self._thread.join(patience)


_flights: WeakSet[Flight] = WeakSet()


@atexit.register
def _abandon_all() -> None:
    flights = list(_flights)
    for flight in flights:
        flight.background.end()
    deadline = time.monotonic() + PATIENCE
    for flight in flights:
        flight.abandon(max(0.0, deadline - time.monotonic()))


class AlwaysCommits:
    """A transport that cannot lose a peer between the last message of a round and its commit."""

    def commit(self, index: int) -> None:
        """Do nothing: no peer can be lost here."""


class OneProcess(AlwaysCommits):
    """A transport whose collectives have nobody to wait for: they return at once and cost nothing."""

    ledger: Ledger

    def gather(self, message: bytes, *, most: int | None, count: Count) -> list[bytes]:  # noqa: ARG002
        return [message]

    def all_to_all(self, messages: Sequence[bytes], *, most: int, count: Count) -> list[bytes]:  # noqa: ARG002
        return list(messages)

    def sum(self, buffer: Tensor, *, count: Count) -> Tensor:  # noqa: ARG002
        return buffer

    def broadcast(self, tensors: Sequence[Tensor], *, count: Count) -> None:
        pass

    def leave(self, words: str) -> None:  # there is no peer to notify
        pass


class Solo(OneProcess):
    """A world of one replica."""

    rank = 0
    size = 1

    peers = (0,)

    def __init__(self) -> None:
        self.ledger = Ledger()

    def background(self) -> Background:
        return Background(self)
