"""A virtual network: links that turn bytes into seconds, and absences of replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from overtone.errors import OvertoneError
from overtone.ledger import REQUEST_HOPS, Count


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

    def seconds_in_store(self, sent: int, received: int, hops: int) -> float:
        """The time of requests to a store, one after another. Nothing is read before it has been written."""
        return self.seconds(sent, 0, hops) + self.seconds(0, received, 0)


def together(counts: Mapping[int, Count], links: Sequence[Link], clocks: Sequence[float]) -> dict[int, float]:
    """When the replicas have the result of a collective, by rank: it waits for the slowest replica, and takes the time
    of the slowest link."""
    begin = max(clocks[rank] for rank in counts)
    end = begin + max(links[rank].seconds(one.sent, one.received, one.hops) for rank, one in counts.items())
    return dict.fromkeys(counts, end)


def through_store(counts: Mapping[int, Count], links: Sequence[Link], clocks: Sequence[float]) -> dict[int, float]:
    """When the replicas have read what others have written into a store, by rank: nobody waits for another's reading.

    All objects are read when the last of them is there. Each takes a request to write, which is the first of the hops.
    """
    written = [
        clocks[rank] + links[rank].seconds(one.sent, 0, REQUEST_HOPS) for rank, one in counts.items() if one.sent
    ]
    ready, ends = max(written, default=0.0), {}
    for rank, one in counts.items():
        reading = links[rank].seconds(0, one.received, one.hops - REQUEST_HOPS)
        ends[rank] = max(clocks[rank], ready) + reading if one.hops else clocks[rank]
    return ends


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
