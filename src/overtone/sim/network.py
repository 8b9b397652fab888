"""A virtual network: links that turn bytes into seconds, and absences of replicas."""

from __future__ import annotations

from dataclasses import dataclass

from overtone.errors import OvertoneError


@dataclass(frozen=True)
class Link:
    """A replica's connection to the others: bits per second each way, and seconds until the first bit arrives."""

    bandwidth: float = 1e9  # upload, bit/s
    latency: float = 0.0
    download: float | None = None  # bit/s; None means the same as upload

    def __post_init__(self) -> None:
        for name in ("bandwidth", "download"):
            value = getattr(self, name)
            if value is not None and not value > 0:  # refuses NaN too
                raise OvertoneError(f"{name}={value}: bits per second, above 0")
        if not self.latency >= 0:
            raise OvertoneError(f"latency={self.latency}: seconds, 0 or more")

    def seconds(self, sent: int, received: int, hops: int) -> float:
        """The time for this replica's share of a collective that passes ``hops`` messages one after another."""
        # Full duplex: upload and download overlap.
        up = 8 * sent / self.bandwidth
        down = 8 * received / (self.download or self.bandwidth)
        return hops * self.latency + max(up, down)


@dataclass(frozen=True)
class Absence:
    """Replica ``rank`` takes no part in rounds ``leaves`` to ``returns`` − 1, then rejoins from a peer's anchor."""

    rank: int
    leaves: int
    returns: int

    def __post_init__(self) -> None:
        if not 0 <= self.leaves < self.returns:
            raise OvertoneError(
                f"absence of rank {self.rank}: leaves={self.leaves} must come before returns={self.returns}"
            )

    def covers(self, index: int) -> bool:
        """True if the replica is absent in round ``index``."""
        return self.leaves <= index < self.returns
