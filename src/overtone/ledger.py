"""All that is measured: bytes through a replica's network interface, seconds spent waiting, the record of a round.

Every collective counts its own bytes, in a `Count` of its own. A `Ledger` is the sum of these counts by phase.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PHASES = ("setup", "rounds", "finish", "upkeep")
SIZE_BYTES = 8  # of a message's length, which is sent before the message


@dataclass
class Count:
    """Bytes through this replica's network interface, and seconds spent waiting for them.

    The bytes of a gather are the buffers that were handed over. Those of a sum and of a broadcast are modelled: a ring
    and a binomial tree, whatever the backend does.
    """

    sent: int = 0
    received: int = 0
    waiting: float = 0.0
    hops: int = 0  # messages that had to pass one after another: each costs a link's latency

    def add(self, other: Count) -> None:
        self.sent += other.sent
        self.received += other.received
        self.waiting += other.waiting
        self.hops += other.hops

    def gathered(self, buffer_bytes: int, size: int) -> None:
        """A gather of equal buffers: each replica's goes to all others."""
        self.sent += (size - 1) * buffer_bytes
        self.received += (size - 1) * buffer_bytes
        self.hops += min(1, size - 1)

    def summed(self, buffer_bytes: int, size: int) -> None:
        """A ring all-reduce: every part of the buffer passes each link twice, except for one hop each way."""
        through = 2 * (size - 1) * buffer_bytes // size
        self.sent += through
        self.received += through
        self.hops += 2 * (size - 1)

    def broadcast(self, buffer_bytes: int, position: int, size: int) -> None:
        """From the first replica down a binomial tree: replica r passes it on to r + 1, 2, 4 …, each above r itself."""
        steps = (1 << i for i in range(size.bit_length()))
        self.sent += buffer_bytes * sum(step > position and position + step < size for step in steps)
        self.received += buffer_bytes if position else 0
        self.hops += (size - 1).bit_length()


@dataclass
class Ledger:
    """What a replica's messages cost, by phase.

    *setup* is the handshake and the first broadcast, *rounds* the training, *finish* the last messages, *upkeep* the
    other messages of a run (stop votes, sums of a validation). `sent` and `received` are rounds and finish together:
    the cost of the method.
    """

    counts: dict[str, Count] = field(default_factory=lambda: {p: Count() for p in PHASES})

    def add(self, phase: str, count: Count) -> None:
        self.counts[phase].add(count)

    @property
    def sent(self) -> int:
        return self.counts["rounds"].sent + self.counts["finish"].sent

    @property
    def received(self) -> int:
        return self.counts["rounds"].received + self.counts["finish"].received

    @property
    def waiting(self) -> float:
        """Seconds in which this replica stood still for others since training began, whatever it waited for."""
        return sum(self.counts[phase].waiting for phase in ("rounds", "finish", "upkeep"))

    @property
    def hops(self) -> int:
        return self.counts["rounds"].hops + self.counts["finish"].hops

    def state_dict(self) -> dict[str, list[float]]:
        return {phase: [c.sent, c.received, c.waiting, c.hops] for phase, c in self.counts.items()}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        for phase, (sent, received, waiting, hops) in state.items():
            self.counts[phase] = Count(int(sent), int(received), float(waiting), int(hops))


@dataclass(frozen=True)
class Round:
    """The record of one round. Bytes and seconds are this replica's own, measured where they happen. (In the simulator
    the waiting is virtual.)"""

    index: int
    local_steps: int
    bytes_sent: int
    bytes_received: int
    seconds_encoding: float
    seconds_waiting: float
    seconds_decoding: float
    drift_norm: float  # of the gradient, for methods that exchange gradients
    residual_norm: float
    anchor_fingerprint: str  # after the round; where gradients are exchanged, of the weights that all began it with
    left_out: tuple[int, ...] = ()  # ranks whose message was refused, where the policy is to go on without them
