"""K virtual replicas in one process on a virtual network: no ports, no threads, the same code path as a real run.

`Cluster` holds K replicas and carries their talks in lockstep: everybody's half of an exchange is laid on a `Table`
before anybody picks up the answer. A virtual clock turns the bytes of the ledger into seconds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from overtone.errors import OvertoneError
from overtone.exchange import state
from overtone.exchange.inner_step import Closure
from overtone.exchange.steps import Broadcast, Exchange, Gather, Sum, Talk
from overtone.ledger import SIZE_BYTES, Ledger, Round
from overtone.methods import Method
from overtone.replica import Replica
from overtone.sim.network import Absence, Link
from overtone.sim.rng import Randomness, seed_of

T = TypeVar("T")

Build = Callable[[int], tuple[nn.Module, torch.optim.Optimizer]]


@dataclass
class Table:
    """What the replicas of one exchange have laid down, by rank."""

    peers: list[int] = field(default_factory=list)  # who takes part in the conversation
    laid: dict[int, Exchange] = field(default_factory=dict)
    total: Tensor | None = None  # the sum is worked out once, not once per replica


class Seat:
    """One replica's transport inside the cluster: picks up what lies on the table."""

    def __init__(self, rank: int, size: int, table: Table) -> None:
        self.rank = rank
        self.size = size
        self.table = table
        self.ledger = Ledger()

    @property
    def peers(self) -> Sequence[int]:
        return self.table.peers

    def _laid(self, kind: type[T]) -> list[T]:
        laid = [self.table.laid[rank] for rank in self.peers] if self.rank in self.table.laid else []
        found: list[T] = [exchange for exchange in laid if isinstance(exchange, kind)]
        if not found or len(found) < len(laid):
            raise OvertoneError(
                f"replica {self.rank} of a cluster cannot exchange by itself; call step() and finish() on the Cluster"
            )
        return found

    def gather(self, message: bytes, *, most: int | None) -> list[bytes]:  # noqa: ARG002
        messages = [laid.message for laid in self._laid(Gather)]
        # As a real gather does: sizes first, then buffers of one length.
        longest = max(map(len, messages))
        if most is not None:
            self.ledger.gathered(SIZE_BYTES, len(messages))
        self.ledger.gathered(longest, len(messages))
        return [message.ljust(longest, b"\0") for message in messages]

    def sum(self, buffer: Tensor) -> Tensor:
        laid = self._laid(Sum)
        if self.table.total is None:
            total = laid[0].buffer.clone()
            for other in laid[1:]:
                total.add_(other.buffer)
            self.table.total = total
        self.ledger.summed(buffer.numel() * buffer.element_size(), len(laid))
        return self.table.total.clone()

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        source = self._laid(Broadcast)[0].tensors
        size = sum(t.numel() * t.element_size() for t in tensors)
        self.ledger.broadcast(size, list(self.peers).index(self.rank), len(self.peers))
        if self.rank == self.peers[0]:
            return
        for mine, theirs in zip(tensors, source, strict=True):
            mine.detach().copy_(theirs.detach())


class Cluster:
    """K replicas in lockstep.

    ``build(rank)`` makes one replica's model and inner optimiser. Every replica has random states of its own, seeded
    by ``seed`` and rank, that are in force whenever it has its turn. ``links`` and ``step_seconds`` are one for all, or
    one per replica (asymmetric links, stragglers); ``absences`` is churn.

        for replica in cluster.turns():
            loss(replica.model, shard[replica.transport.rank]).backward()
        cluster.step()
    """

    def __init__(
        self,
        build: Build,
        method: Method,
        *,
        replicas: int,
        links: Link | Sequence[Link] = Link(),  # noqa: B008 (frozen)
        step_seconds: float | Sequence[float] = 0.0,
        absences: Sequence[Absence] = (),
        seed: int = 0,
        buffers: str = "shared",
    ) -> None:
        if replicas < 1:
            raise OvertoneError(f"replicas={replicas}: a cluster has at least one")
        self.links = _one_each("links", links, replicas, Link)
        self.step_seconds = _one_each("step_seconds", step_seconds, replicas, float)
        self.absences = tuple(absences)
        for absence in self.absences:
            if not 0 <= absence.rank < replicas:
                raise OvertoneError(f"absence of rank {absence.rank}: there are ranks 0 to {replicas - 1}")
        self.clock = 0.0  # virtual seconds since the start
        self._busy = [0.0] * replicas  # virtual time up to which each replica has computed
        self._random = [Randomness(seed_of(seed, rank)) for rank in range(replicas)]
        self.table = Table()
        self.replicas: list[Replica] = []
        for rank in range(replicas):
            with self._random[rank]:
                model, inner = build(rank)
                seat = Seat(rank, replicas, self.table)
                self.replicas.append(Replica(model, inner, method, seat, buffers=buffers, join=False))
        self.method = method
        self.rounds = 0
        self._converse({rank: replica.joining() for rank, replica in enumerate(self.replicas)})

    def present(self) -> list[Replica]:
        """The replicas that take part now."""
        away = {absence.rank for absence in self.absences if absence.covers(self.rounds)}
        here = [replica for rank, replica in enumerate(self.replicas) if rank not in away]
        if not here:
            raise OvertoneError(f"round {self.rounds}: every replica is absent; somebody must keep the anchor")
        return here

    def turns(self) -> Iterator[Replica]:
        """Each present replica in turn, with its own random state in force."""
        for replica in self.present():
            with self._random[replica.transport.rank]:
                yield replica

    def step(
        self,
        *,
        clip: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        closure: Closure | None = None,
    ) -> list[Round]:
        """`Replica.step` for all present replicas; one record per replica if this step ended in a round."""
        due = []
        for replica in self.turns():
            rank = replica.transport.rank
            self._busy[rank] += self.step_seconds[rank]
            due.append(replica.local_step(clip=clip, scaler=scaler, closure=closure))
        if not all(due):
            self.clock = max(self.clock, *(self._busy[r.transport.rank] for r in self.present()))
            return []
        rounds = self._converse({r.transport.rank: r.rounding() for r in self.present()})
        self._advance()
        return rounds

    def finish(self) -> list[list[Round]]:
        """`Replica.finish` for all; absent replicas come back first, so that all end with the same weights."""
        host = self.present()[0]
        for absence in self.absences:
            if absence.covers(self.rounds):
                self._rejoin(self.replicas[absence.rank], host)
        self.absences = ()
        return self._converse({rank: replica.finishing() for rank, replica in enumerate(self.replicas)})

    def _advance(self) -> None:
        """The round is over: whoever is due back rejoins from the anchor of a replica that was present."""
        host = self.present()[0]
        self.rounds += 1
        for absence in self.absences:
            if absence.returns == self.rounds:
                self._rejoin(self.replicas[absence.rank], host)

    def _rejoin(self, guest: Replica, host: Replica) -> None:
        shared = state.share(host)
        state.adopt(guest, shared)
        size = _bytes_of(shared)
        guest.transport.ledger.now.received += size
        host.transport.ledger.now.sent += size
        up, down = self.links[host.transport.rank], self.links[guest.transport.rank]
        seconds = max(up.seconds(size, 0, 1), down.seconds(0, size, 1))
        self._busy[guest.transport.rank] = self.clock + seconds

    def _converse(self, talks: Mapping[int, Talk[T]]) -> list[T]:
        """Carry all talks to their end, one exchange of everybody at a time."""
        self.table.peers = sorted(talks)
        results: dict[int, T] = {}
        heard: dict[int, object] = dict.fromkeys(talks)
        while len(results) < len(talks):
            self.table.laid.clear()
            self.table.total = None
            errors = []
            for rank, talk in talks.items():
                try:
                    self.table.laid[rank] = talk.send(heard[rank])
                except StopIteration as end:
                    results[rank] = end.value
                except OvertoneError as error:  # the others shall hear of it too, and take back what they said
                    errors.append(error)
            if errors:
                raise errors[0]
            if self.table.laid and results:
                raise OvertoneError(
                    f"ranks {sorted(results)} ended the conversation, ranks {sorted(self.table.laid)} did not"
                )
            if self.table.laid:
                heard = self._carry()
        return [results[rank] for rank in talks]

    def _carry(self) -> dict[int, object]:
        """One exchange: everybody picks up the answer, and the clock moves by what the slowest needs."""
        ranks = sorted(self.table.laid)
        seats = {rank: self.replicas[rank].transport for rank in ranks}
        before = {rank: copy.copy(seats[rank].ledger.now) for rank in ranks}
        heard: dict[int, object] = {rank: self.table.laid[rank].carry(seats[rank]) for rank in ranks}
        begin = max(self._busy[rank] for rank in ranks)  # an exchange waits for the slowest replica
        end = begin + max(
            self.links[rank].seconds(now.sent - was.sent, now.received - was.received, now.hops - was.hops)
            for rank, was in before.items()
            for now in (seats[rank].ledger.now,)
        )
        for rank in ranks:
            seats[rank].ledger.now.waiting += end - self._busy[rank]
            self._busy[rank] = end
        self.clock = max(self.clock, end)
        return heard


def _bytes_of(shared: object) -> int:
    """The bytes of all tensors in a nest of containers."""
    if isinstance(shared, Tensor):
        return shared.numel() * shared.element_size()
    if isinstance(shared, Mapping):
        return sum(map(_bytes_of, shared.values()))
    return sum(map(_bytes_of, shared)) if isinstance(shared, list | tuple) else 0


def _one_each(name: str, value: T | Sequence[T], count: int, kind: type) -> list[T]:
    """One value for all, or a sequence with one for each."""
    if isinstance(value, kind) or not isinstance(value, Sequence):
        return [value] * count  # type: ignore[list-item]
    if len(value) != count:
        raise OvertoneError(f"{name}: {len(value)} given for {count} replicas; give one for all, or one each")
    return list(value)
