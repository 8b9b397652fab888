"""All measurements: bytes through a replica's network interface, seconds spent waiting, the record of a round.

Every collective counts its bytes in a `Count` of its own. A `Ledger` is the sum of these counts by phase.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

PHASES = ("setup", "rounds", "finish", "upkeep")
SIZE_BYTES = 8  # the size of a message's length field, which is sent before the message
REQUEST_HOPS = 2  # of a request to a store: there and back


@dataclass
class Count:
    """Bytes through this replica's network interface, and seconds spent waiting for them.

    The bytes of a gather are the buffers that the backend was given. The bytes of a sum and of a broadcast follow a
    model (a ring, and a binomial tree), whatever the backend really does.
    """

    sent: int = 0
    received: int = 0
    waiting: float = 0.0
    hops: int = 0  # messages that had to pass one after another: each costs a link's latency
    requests: int = 0  # to a real store, which bills them; with those that only looked whether it has news

    def add(self, other: Count) -> None:
        """Add another count to this one."""
        self.sent += other.sent
        self.received += other.received
        self.waiting += other.waiting
        self.hops += other.hops
        self.requests += other.requests

    def since(self, before: Count) -> Count:
        """What has been added since this was ``before``."""
        return Count(**{one.name: getattr(self, one.name) - getattr(before, one.name) for one in fields(self)})

    def gathered(self, buffer_bytes: int, size: int) -> None:
        """Count an all-gather of equal buffers: each replica sends its buffer to all others."""
        self.sent += (size - 1) * buffer_bytes
        self.received += (size - 1) * buffer_bytes
        self.hops += min(1, size - 1)

    def stored(self, written: int, read: int, requests: int) -> None:
        """Count objects of a store: those that this replica writes and reads, and the requests that follow one another
        until it has read them."""
        self.sent += written
        self.received += read
        self.hops += REQUEST_HOPS * requests

    def summed(self, buffer_bytes: int, size: int) -> None:
        """Count a ring all-reduce: every part of the buffer passes each link twice, except for one hop each way."""
        through = 2 * (size - 1) * buffer_bytes // size
        self.sent += through
        self.received += through
        self.hops += 2 * (size - 1)

    def broadcast(self, buffer_bytes: int, position: int, size: int) -> None:
        """Count a broadcast from the first replica down a binomial tree.

        The replica at position r passes the buffer on to the positions r + 1, r + 2, r + 4 …, for steps larger than r.
        """
        steps = (1 << i for i in range(size.bit_length()))
        self.sent += buffer_bytes * sum(step > position and position + step < size for step in steps)
        self.received += buffer_bytes if position else 0
        self.hops += (size - 1).bit_length()


@dataclass
class Ledger:
    """The cost of a replica's messages, by phase.

    *setup* is the handshake and the first broadcast. *rounds* is the training. *finish* is the last messages. *upkeep*
    is the other messages of a run (stop votes, sums of a validation). `sent` and `received` are rounds and finish
    together: the cost of the method.
    """

    counts: dict[str, Count] = field(default_factory=lambda: {p: Count() for p in PHASES})

    def add(self, phase: str, count: Count) -> None:
        """Add the cost of one collective to a phase."""
        self.counts[phase].add(count)

    @property
    def sent(self) -> int:
        """Bytes that the method sent."""
        return self.counts["rounds"].sent + self.counts["finish"].sent

    @property
    def received(self) -> int:
        """Bytes that the method received."""
        return self.counts["rounds"].received + self.counts["finish"].received

    @property
    def waiting(self) -> float:
        """Seconds that this replica has waited for its peers since training began, in any phase."""
        return sum(self.counts[phase].waiting for phase in ("rounds", "finish", "upkeep"))

    @property
    def hops(self) -> int:
        """Messages of the method that had to pass one after another."""
        return self.counts["rounds"].hops + self.counts["finish"].hops

    def state_dict(self) -> dict[str, list[float]]:
        """The counts by phase, for a checkpoint."""
        return {phase: [c.sent, c.received, c.waiting, c.hops, c.requests] for phase, c in self.counts.items()}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Continue from the counts of a `state_dict`."""
        for phase, (sent, received, waiting, *whole) in state.items():  # before format 5 of the run log: no requests
            self.counts[phase] = Count(int(sent), int(received), float(waiting), *map(int, whole))


@dataclass(frozen=True)
class Round:
    """The record of one round on one replica.

    Bytes and seconds are those of this replica, measured where they occur. In the simulator, the waiting time is that
    of the virtual clock.
    """

    index: int
    local_steps: int
    bytes_sent: int
    bytes_received: int
    seconds_encoding: float
    seconds_waiting: float  # in which the replica stood still for the exchange
    seconds_decoding: float
    drift_norm: float  # for methods that exchange gradients, the norm of the gradient
    residual_norm: float
    # The anchor's fingerprint after the round. Where gradients are exchanged, it is the fingerprint of the weights with
    # which all replicas began the round.
    anchor_fingerprint: str
    left_out: tuple[int, ...] = ()  # ranks whose message was refused, if the policy is to go on without them
    seconds_hidden: float = 0.0  # of the exchange, in which the replica went on training
    keep: int | None = None  # the `keep` of this round, if a controller chose it
    control: str = ""  # why the next round has another one
