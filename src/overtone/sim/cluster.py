"""K virtual replicas in one process, on a virtual network: no ports, no threads, the same code path as a real run.

`Cluster` holds K replicas and carries their exchanges in lockstep: all replicas put their side of a collective into a
`Mailbox` before any replica takes the result. A virtual clock turns the bytes of each collective into seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from overtone.errors import OvertoneError
from overtone.exchange.inner_step import Closure
from overtone.ledger import Count, Round
from overtone.methods import STORE, Method
from overtone.replica import Replica
from overtone.sim.network import Absence, Link, through_store, together
from overtone.sim.rng import Randomness, seed_of
from overtone.sim.store import VirtualStore
from overtone.sim.transport import Mailbox, SimTransport
from overtone.transport import Exchange

T = TypeVar("T")

Build = Callable[[int], tuple[nn.Module, torch.optim.Optimizer]]


@dataclass
class _Flight:
    """An exchange that goes on beside the training, in virtual time."""

    began: list[float]  # by rank: when it was launched
    arrives: list[float]  # by rank: when the last of its messages arrives
    error: OvertoneError | None = None


class Cluster:
    """K replicas in lockstep.

    ``build(rank)`` makes one replica's model and inner optimizer. Every replica has its own random states, seeded by
    ``seed`` and rank. They are set whenever the replica has its turn. ``links`` and ``step_seconds`` are one value for
    all, or one per replica (asymmetric links, stragglers). ``absences`` are the rounds that a replica misses.

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
        in_store = method.exchange == STORE
        if in_store and self.absences:
            raise OvertoneError(
                "absences: in a simulated store every member posts in every round; leave them out, or use "
                "exchange='gathered'"
            )
        self._ends = through_store if in_store else together  # when the replicas have the result of a collective
        self.clock = 0.0  # virtual seconds since the start
        self._busy = [0.0] * replicas  # virtual time up to which each replica has computed
        self._flight: _Flight | None = None  # the exchange that goes on beside the training
        self._random = [Randomness(seed_of(seed, rank)) for rank in range(replicas)]
        self.mailbox = Mailbox(store=VirtualStore(replicas) if in_store else None)
        self.replicas: list[Replica] = []
        for rank in range(replicas):
            with self._random[rank]:
                model, inner = build(rank)
                transport = SimTransport(rank, replicas, self.mailbox, self._busy)
                self.replicas.append(Replica(model, inner, method, transport, buffers=buffers, join=False))
        self.method = method
        self.rounds = 0
        self.run_exchanges({rank: replica.joining() for rank, replica in enumerate(self.replicas)}, "setup")
        self._busy[:] = [self.clock] * replicas  # training begins when the last replica has the first weights

    def present(self) -> list[Replica]:
        """The replicas that take part in the present round."""
        away = {absence.rank for absence in self.absences if absence.covers(self.rounds)}
        here = [replica for rank, replica in enumerate(self.replicas) if rank not in away]
        if not here:
            raise OvertoneError(f"round {self.rounds}: every replica is absent; somebody must keep the anchor")
        return here

    def turns(self) -> Iterator[Replica]:
        """Each present replica in turn, with its own random states set."""
        for replica in self.present():
            with self._random[replica.transport.rank]:
                yield replica

    @property
    def progress(self) -> int:
        """How many local steps of the run are done: those of the replica that was never absent."""
        return max(replica.steps for replica in self.replicas)

    def step(
        self,
        *,
        clip: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        closure: Closure | None = None,
    ) -> list[Round]:
        """`Replica.step` for all present replicas. Returns one record per replica if this step ended in a round."""
        due = []
        for replica in self.turns():
            rank = replica.transport.rank
            self._busy[rank] += self.step_seconds[rank]
            due.append(replica.local_step(clip=clip, scaler=scaler, closure=closure))
        self.clock = max(self.clock, *(self._busy[r.transport.rank] for r in self.present()))
        absorbed = self._absorb() if self.present()[0].exchanger.must_absorb else []
        if not all(due):
            return absorbed
        if self.method.delay:
            self._launch()
            return absorbed
        rounds = self.run_exchanges({r.transport.rank: r.rounding() for r in self.present()}, "rounds")
        self._advance()
        return rounds

    def _launch(self) -> None:
        """Start a round whose exchange goes on beside the training."""
        self.mailbox.peers = [replica.transport.rank for replica in self.present()]
        for replica in self.turns():
            replica.exchanger.start(replica._inner_step, overlapped=True)
        self._fly()

    def _fly(self) -> None:
        """Carry the exchange of the rounds in flight. The clock of the network runs beside that of the training."""
        pending = {r.transport.rank: r.exchanger.in_flight for r in self.present()}
        self._flight = flight = _Flight(list(self._busy), list(self._busy))
        try:
            self.run_exchanges({rank: one.exchange for rank, one in pending.items() if one}, None, flight.arrives)
        except OvertoneError as error:  # raised when the round is to be absorbed, as in a real run
            flight.error = error

    def _absorb(self) -> list[Round]:
        """Finish the round in flight. A replica that gets here before its messages do stands still until they come."""
        if self._flight is None:  # the replicas were restored from a state with a round in flight
            self._fly()
        flight, self._flight = self._flight, None
        assert flight is not None
        rounds = []
        for replica in self.turns():
            rank, pending = replica.transport.rank, replica.exchanger.in_flight
            assert pending is not None
            waited = max(0.0, flight.arrives[rank] - self._busy[rank])
            if flight.error is not None:
                replica.exchanger.refuse(pending, waited=waited)
                continue
            self._busy[rank] += waited
            hidden = flight.arrives[rank] - flight.began[rank] - waited
            rounds.append(replica.exchanger.finish(pending, waited=waited, hidden=hidden))
        if flight.error is not None:
            raise flight.error
        self.clock = max(self.clock, *(self._busy[r.transport.rank] for r in self.present()))
        self._advance()
        return rounds

    def finish(self) -> list[list[Round]]:
        """`Replica.finish` for all replicas. Absent replicas rejoin first, so that all end with the same weights."""
        ranks = [replica.transport.rank for replica in self.present()]
        absorbed = dict(zip(ranks, self._absorb(), strict=True)) if self.present()[0].exchanger.in_flight else {}
        host = self.present()[0]
        for absence in self.absences:
            if absence.covers(self.rounds):
                self._rejoin(self.replicas[absence.rank], host)
        self.absences = ()
        finishing = {rank: replica.finishing() for rank, replica in enumerate(self.replicas)}
        last = self.run_exchanges(finishing, "finish")
        return [[*([absorbed[rank]] if rank in absorbed else []), *rounds] for rank, rounds in enumerate(last)]

    def _advance(self) -> None:
        """End the round. Replicas whose absence is over rejoin from the anchor of a replica that was present."""
        # Chosen before the count moves on: a replica that returns now has an old anchor and must not be the host.
        host = self.present()[0]
        self.rounds += 1
        for absence in self.absences:
            if absence.returns == self.rounds:
                self._rejoin(self.replicas[absence.rank], host)

    def _rejoin(self, guest: Replica, host: Replica) -> None:
        shared = host.share()
        guest.adopt(shared)
        size = shared.size
        # A rejoin is part of the cost of the method, so it counts with the rounds.
        guest.transport.ledger.add("rounds", Count(received=size))
        host.transport.ledger.add("rounds", Count(sent=size))
        up, down = self.links[host.transport.rank], self.links[guest.transport.rank]
        seconds = max(up.seconds(size, 0, 1), down.seconds(0, size, 1))
        self._busy[guest.transport.rank] = self.clock + seconds

    def run_exchanges(
        self, exchanges: Mapping[int, Exchange[T]], phase: str | None, clocks: list[float] | None = None
    ) -> list[T]:
        """Carry all exchanges to their end, one collective at a time, and add their cost to ``phase`` (None: the caller
        will). ``clocks`` are the virtual times of the replicas, which advance; by default those of their work."""
        mailbox = self.mailbox
        mailbox.peers = sorted(exchanges)
        results: dict[int, T] = {}
        answers: dict[int, object] = dict.fromkeys(exchanges)
        while len(results) < len(exchanges):
            mailbox.clear()
            errors = []
            for rank, exchange in exchanges.items():
                try:
                    mailbox.posted[rank] = exchange.send(answers[rank])
                except StopIteration as end:
                    results[rank] = end.value
                except OvertoneError as error:  # raised after the loop: each replica must reach it and undo its changes
                    errors.append(error)
            if errors:
                raise errors[0]
            # Replicas run the same code, so this would be a bug in an exchange. In a real world it would be a deadlock.
            if mailbox.posted and results:
                raise OvertoneError(
                    f"ranks {sorted(results)} ended the exchange, ranks {sorted(mailbox.posted)} did not"
                )
            if mailbox.posted:
                answers = self._carry(phase, self._busy if clocks is None else clocks)
        return [results[rank] for rank in exchanges]

    def _carry(self, phase: str | None, clocks: list[float]) -> dict[int, object]:
        """Run one collective: all replicas take the result, and their clocks advance until they have it."""
        posted = {rank: self.mailbox.posted[rank] for rank in sorted(self.mailbox.posted)}
        transports = {rank: self.replicas[rank].transport for rank in posted}
        answers: dict[int, object] = {rank: one.carry(transports[rank]) for rank, one in posted.items()}
        ends = self._ends({rank: one.count for rank, one in posted.items()}, self.links, clocks)
        for rank, one in posted.items():
            one.count.waiting += ends[rank] - clocks[rank]
            if phase is not None:
                transports[rank].ledger.add(phase, one.count)
            clocks[rank] = ends[rank]
        if clocks is self._busy:
            self.clock = max(self.clock, *ends.values())
        return answers


def _one_each(name: str, value: T | Sequence[T], count: int, kind: type) -> list[T]:
    """A list with one value per replica, from one value for all or from a sequence."""
    if isinstance(value, kind) or not isinstance(value, Sequence):
        return [value] * count  # type: ignore[list-item]
    if len(value) != count:
        raise OvertoneError(f"{name}: {len(value)} given for {count} replicas; give one for all, or one each")
    return list(value)
