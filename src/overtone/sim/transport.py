"""The transport of a virtual replica: it takes its results from a mailbox, into which all have put their side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from overtone.errors import OvertoneError
from overtone.ledger import SIZE_BYTES, Count, Ledger
from overtone.sim.store import VirtualStore
from overtone.swarm.store import Store
from overtone.transport import AllToAll, AlwaysCommits, Background, Broadcast, Collective, Gather, Sum

T = TypeVar("T")


@dataclass
class Mailbox:
    """The collectives that the replicas have put in, by rank."""

    peers: list[int] = field(default_factory=list)  # the ranks that take part in the exchange
    posted: dict[int, Collective] = field(default_factory=dict)
    total: Tensor | None = None  # the sum is computed once, not once per replica
    store: VirtualStore | None = None  # counts the messages, if they meet in a store
    costs: Sequence[Count] = ()  # of a gather, if there is a store; by rank, and computed once like the sum

    def clear(self) -> None:
        """Make room for the next collectives."""
        self.posted.clear()
        self.total, self.costs = None, ()


class SimTransport(AlwaysCommits):
    """One replica's transport inside the cluster. It takes its results from the mailbox."""

    def __init__(self, rank: int, size: int, mailbox: Mailbox, busy: Sequence[float]) -> None:
        self.rank = rank
        self.size = size
        self.mailbox = mailbox
        self.ledger = Ledger()
        self._busy = busy

    @property
    def pattern(self) -> str | None:
        """The pattern of all rounds, if the run is in a store: everybody reads every message."""
        return None if self.mailbox.store is None else Store.pattern

    def now(self) -> float:
        """The virtual time of this replica."""
        return self._busy[self.rank]

    @property
    def peers(self) -> Sequence[int]:
        """The ranks that take part in this exchange."""
        return self.mailbox.peers

    def _posted(self, kind: type[T]) -> list[T]:
        posted = [self.mailbox.posted[rank] for rank in self.peers] if self.rank in self.mailbox.posted else []
        found: list[T] = [collective for collective in posted if isinstance(collective, kind)]
        if not found or len(found) < len(posted):
            raise self._not_alone()
        return found

    def _not_alone(self) -> OvertoneError:
        return OvertoneError(
            f"replica {self.rank} of a cluster cannot exchange by itself; call step() and finish() on the Cluster"
        )

    def gather(self, message: bytes, *, most: int | None, count: Count) -> list[bytes]:  # noqa: ARG002
        messages = [posted.message for posted in self._posted(Gather)]
        box = self.mailbox
        if box.store is not None:
            # Messages of one known length are verdicts.
            box.costs = box.costs or (
                box.store.committed() if most is None else box.store.written(messages, self._busy)
            )
            count.add(box.costs[self.rank])
            return messages
        # Like a real all-gather: first the sizes, then buffers of one length.
        longest = max(map(len, messages))
        if most is not None:
            count.gathered(SIZE_BYTES, len(messages))
        count.gathered(longest, len(messages))
        return [message.ljust(longest, b"\0") for message in messages]

    def all_to_all(self, messages: Sequence[bytes], *, most: int, count: Count) -> list[bytes]:  # noqa: ARG002
        posted = self._posted(AllToAll)
        longest = max(len(message) for one in posted for message in one.messages)
        count.gathered(SIZE_BYTES, len(posted))
        count.gathered(longest, len(posted))
        place = list(self.peers).index(self.rank)
        return [one.messages[place].ljust(longest, b"\0") for one in posted]

    def sum(self, buffer: Tensor, *, count: Count) -> Tensor:
        posted = self._posted(Sum)
        if self.mailbox.total is None:
            # In rank order, so that a run gives the same bits each time.
            total = posted[0].buffer.clone()
            for other in posted[1:]:
                total.add_(other.buffer)
            self.mailbox.total = total
        count.summed(buffer.numel() * buffer.element_size(), len(posted))
        return self.mailbox.total.clone()

    def broadcast(self, tensors: Sequence[Tensor], *, count: Count) -> None:
        source = self._posted(Broadcast)[0].tensors
        size = sum(t.numel() * t.element_size() for t in tensors)
        is_source = self.rank == self.peers[0]
        if self.mailbox.store is None:
            count.broadcast(size, list(self.peers).index(self.rank), len(self.peers))
        else:
            count.stored(size * is_source, size * (not is_source), requests=2)
        if is_source:
            return
        for mine, theirs in zip(tensors, source, strict=True):
            mine.detach().copy_(theirs.detach())

    def background(self) -> Background:
        raise self._not_alone()
