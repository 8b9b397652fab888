"""`Store`, the transport of a replica whose run lives in object storage. There is no world to join and no port to open:

replica = overtone.Replica(model, inner, overtone.decoupled(every=64), transport=overtone.Store("s3://bucket/run"))
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from overtone.errors import MethodError, StateError
from overtone.exchange.gathered import Gathered
from overtone.ledger import Ledger
from overtone.methods import Method
from overtone.swarm.bucket import Bucket
from overtone.swarm.leases import Leases
from overtone.swarm.records import MOST_NAME, Process, is_name
from overtone.transport import Background, OneProcess

MOST_SNAPSHOT_EVERY = 10**9
MOST_UNITS = 10**15
MOST_ROUNDS = 10**8 - 1  # folders have eight digits


@dataclass
class Store(OneProcess):
    """Where a run lives, and who this process is in it.

    ``name`` is a stable identity: a process that comes back under its name is the same member. By default it is the
    host's name and a number. ``min_replicas``: how many must have posted before a round is committed without the rest;
    by default half of the members. A member puts a snapshot every ``snapshot_every`` rounds, from which newcomers
    start. ``wait``: stand still until the round is committed, instead of training on. ``rounds``: how many the run has.
    """

    pattern: ClassVar[str] = Gathered.name  # of all rounds: everybody reads every message

    url: str
    name: str | None = None
    min_replicas: int | None = None
    snapshot_every: int = 10
    wait: bool = False
    units: int | None = None  # local steps' worth of samples in an epoch, if members are to share them (`next_unit`)
    rounds: int | None = None  # after so many the run is over, for all members alike; by default it has no end
    settings: Mapping[str, Any] = field(default_factory=dict)  # the founder's are kept for whoever comes later
    agreed: Mapping[str, Any] = field(default_factory=dict)  # facts, as JSON, that must be the same for all members
    stopping: Callable[[], bool] = lambda: False  # while it is true, the replica does not stand still for anything
    ledger: Ledger = field(default_factory=Ledger, repr=False)
    leases: Leases | None = field(default=None, init=False, repr=False)  # as the last commit says
    used: int = field(default=0, init=False)  # units of its own lease, of which no commit knows yet
    process: Process = field(default=Process(0, 0), init=False)  # set when the replica has joined
    # A replica asks these of any transport. They are the member's number, and the number of members.
    rank: int = field(default=0, init=False)
    size: int = field(default=1, init=False)

    def __post_init__(self) -> None:
        if self.name is not None and not is_name(self.name):
            raise MethodError(
                f"name={self.name!r}: letters, digits, points, dashes and underscores, at most {MOST_NAME}, and a "
                "letter or digit first"
            )
        for what, value, most in (
            ("min_replicas", self.min_replicas, 1 << 16),
            ("snapshot_every", self.snapshot_every, MOST_SNAPSHOT_EVERY),
            ("units", self.units, MOST_UNITS),
            ("rounds", self.rounds, MOST_ROUNDS),
        ):
            if value is not None and not (type(value) is int and 1 <= value <= most):
                raise MethodError(f"{what}={value!r}: a whole number from 1 to {most}")
        self.bucket = Bucket(self.url)

    @property
    def peers(self) -> range:
        """As many as there are members."""
        return range(self.size)

    def become(self, process: Process, name: str) -> None:
        """Take an identity in the run."""
        self.process, self.rank, self.name = process, process.number, name

    @property
    def units_left(self) -> int | None:
        """The units of this replica's lease that it has not used yet; None if the store has no units."""
        if self.leases is None:
            return None
        return sum(map(len, self.leases.held.get(self.rank, ()))) - self.used

    def next_unit(self) -> tuple[int, int]:
        """The epoch and the unit of it that the next local step is to train on: one that no other member has.

        Call this once for each local step, if ``units`` was given.
        """
        if self.leases is None:
            raise MethodError("next_unit: the store was opened without units; give Store(units=...)")
        skip = self.used
        for span in self.leases.held.get(self.rank, ()):
            if skip < len(span):
                self.used += 1
                return span.epoch, span.begin + skip
            skip -= len(span)
        raise StateError("next_unit: more local steps than a lease has; call it once for each `replica.step()`")

    def background(self) -> Background:
        """A store never makes a replica wait, so that nothing has to go on beside the training."""
        return Background(self)


def host_name() -> str:
    """The name of this host, as a member may be called."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", socket.gethostname().partition(".")[0]).strip("-._")
    return name[: MOST_NAME - 8] or "host"


def refuse_unfit(method: Method) -> None:
    """Refuse a method that cannot work over a store, with the reason."""
    if why := method.unfit_for_store:
        raise MethodError(why)
    if method.delay:
        raise MethodError(f"delay={method.delay}: a replica never waits for a store; leave it out")
    if method.exchange == "sharded":
        raise MethodError("exchange='sharded': everybody reads every message of a store; use store, or leave it out")
