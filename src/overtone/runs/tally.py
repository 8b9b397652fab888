"""What a run in a store has cost its members, as an observer counts it: from the sizes of objects, and from what their
messages tell. What the observer itself reads is told apart."""

from __future__ import annotations

import math

from overtone.ledger import Count
from overtone.runs.timing import RunTimer
from overtone.swarm.archive import Archive
from overtone.swarm.follower import Followed
from overtone.swarm.observer import Observer
from overtone.swarm.records import by_round, commit_path, folder_of


class Tally:
    """Adds to the ledger of an observer and to the units of a timer."""

    def __init__(self, observer: Observer, timer: RunTimer) -> None:
        self.observer = observer
        self.timer = timer
        self._told: dict[int, int] = {}  # by member: local steps that its last message told
        self._counted = Count()  # of the store, as far as it is in the ledger

    def begin(self, index: int) -> int:
        """Count only the rounds before this one, as far as the store has them. Returns the first one."""
        cost, first = _earlier(self.observer.archive, index)
        self.observer.transport.ledger.counts["rounds"] = cost
        return first

    def add(self, followed: Followed) -> Count:
        """Count a round that was followed. Returns its cost."""
        cost = _cost(followed.size, len(followed.commit.messages))
        self.observer.transport.ledger.add("rounds", cost)
        self.add_own("upkeep")
        for header in followed.heard.received.headers:
            before = self._told.get(header.sender, 0)
            # A member that began anew counts from 0 again.
            self.timer.units += self.timer.per_step * (header.steps - (before if header.steps >= before else 0))
            self._told[header.sender] = header.steps
        return cost

    def add_own(self, phase: str) -> None:
        """Add to the ledger what was read from the store since the last time."""
        now = self.observer.archive.bucket.count()
        self.observer.transport.ledger.add(phase, now.since(self._counted))
        self._counted = now


def _cost(size: int, messages: int) -> Count:
    """What a member has sent, and what it had to read, in a round of so many bytes and messages."""
    sent = size // max(1, messages)
    return Count(sent=sent, received=size - sent, waiting=math.nan)


def _earlier(archive: Archive, rounds: int) -> tuple[Count, int]:
    """The cost of the rounds before this one, as the store lists them, and the first of them that is there."""
    total, first = Count(), rounds
    sizes = archive.bucket.sizes("rounds") if rounds else {}
    for index, processes in by_round(sizes).items():
        if index < rounds and processes:
            first = min(first, index)
            paths = [commit_path(index), *(f"{folder_of(index)}/{process}" for process in processes)]
            total.add(_cost(sum(sizes.get(path, 0) for path in paths), len(processes)))
    return total, first
