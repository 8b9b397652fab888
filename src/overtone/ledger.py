"""The one place that counts: bytes through a replica's network interface, and seconds spent waiting for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

PHASES = ("setup", "rounds", "finish", "upkeep")
SIZE_BYTES = 8  # the length of a message, told beside it


@dataclass
class Count:
    """Bytes through this replica's network interface, and seconds spent waiting for them."""

    sent: int = 0
    received: int = 0
    waiting: float = 0.0
    hops: int = 0  # messages that had to pass one after another: each costs a link's latency


@dataclass
class Ledger:
    """The one place that counts: the buffers really handed over, in the phase they belong to.

    *setup* is the greeting and the first broadcast, *rounds* the training, *finish* the last messages, *upkeep* what a
    run says besides (who was asked to stop, sums of a validation). `sent` and `received` are rounds and finish
    together: what a method costs.
    """

    phase: str = "setup"
    counts: dict[str, Count] = field(default_factory=lambda: {p: Count() for p in PHASES})

    @property
    def now(self) -> Count:
        return self.counts[self.phase]

    @property
    def sent(self) -> int:
        return self.counts["rounds"].sent + self.counts["finish"].sent

    @property
    def received(self) -> int:
        return self.counts["rounds"].received + self.counts["finish"].received

    @property
    def waiting(self) -> float:
        """Seconds in which this replica stood still for others, whatever it waited for since training began."""
        return sum(self.counts[phase].waiting for phase in ("rounds", "finish", "upkeep"))

    @property
    def hops(self) -> int:
        return self.counts["rounds"].hops + self.counts["finish"].hops

    def gathered(self, buffer_bytes: int, size: int) -> None:
        """A gather of equal buffers: each replica's goes to all others."""
        self.now.sent += (size - 1) * buffer_bytes
        self.now.received += (size - 1) * buffer_bytes
        self.now.hops += min(1, size - 1)

    def summed(self, buffer_bytes: int, size: int) -> None:
        """A ring all-reduce: every part of the buffer passes each link twice, but for one hop each way."""
        through = 2 * (size - 1) * buffer_bytes // size
        self.now.sent += through
        self.now.received += through
        self.now.hops += 2 * (size - 1)

    def broadcast(self, buffer_bytes: int, position: int, size: int) -> None:
        """From the first replica down a binomial tree: replica r passes it on to r + 1, 2, 4 …, each above r itself."""
        steps = (1 << i for i in range(size.bit_length()))
        self.now.sent += buffer_bytes * sum(step > position and position + step < size for step in steps)
        self.now.received += buffer_bytes if position else 0
        self.now.hops += (size - 1).bit_length()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """What is counted meanwhile belongs to this phase."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    @contextmanager
    def wait(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.now.waiting += time.perf_counter() - begin

    def state_dict(self) -> dict[str, list[float]]:
        return {phase: [c.sent, c.received, c.waiting, c.hops] for phase, c in self.counts.items()}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        for phase, (sent, received, waiting, hops) in state.items():
            self.counts[phase] = Count(int(sent), int(received), float(waiting), int(hops))


@dataclass(frozen=True)
class Round:
    """What one exchange did. Bytes and seconds are this replica's own, measured where they happen (in the simulator the
    waiting is virtual)."""

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
