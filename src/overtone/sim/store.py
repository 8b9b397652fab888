"""What a round costs in a store. Nothing is stored here: the replicas of a cluster gather their messages and confirm
them by a verdict, as ever, and this module counts what the same round would write and read in a store.

    gather    each member writes its message, lists the folder of the round, and reads the messages of all others
    verdict   one member writes the commit; all list the folder once more, and read it

All members post in every round. The objects have the sizes that swarm/records.py gives them. Not counted are snapshots,
and the time from the moment at which an object is there until a member next looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from overtone.exchange.message import NOBODY, Header, Kind, Message, Seal, open_message
from overtone.ledger import Count
from overtone.swarm.records import MOST_PACE, NOTE_BYTES, About, Commit, Member, Named, Note

SESSION = 1  # of every virtual member: none restarts


class VirtualStore:
    """Counts the objects of the rounds of a cluster, all of whose members take part in each round."""

    def __init__(self, members: int) -> None:
        self._seal = Seal.with_key(None)  # as the replicas of a cluster
        self._members = team(members)
        self._posted = [0.0] * members  # when the members wrote their last messages
        self._round: list[Message] = []  # the messages of the round that has no commit yet

    def written(self, messages: Sequence[bytes], now: Sequence[float]) -> list[Count]:
        """The cost of a gather of messages, for each member. ``now``: when each of them posts.

        Only messages of rounds are objects of a store. A member reads the description of the run when it joins, and
        nobody compares the last weights: the commits have their fingerprint.
        """
        opened = [open_message(message, self._seal) for message in messages]
        if any(message.header.kind is not Kind.ROUND for message in opened):
            return self._nothing()
        paces = [_told(time - last) for time, last in zip(now, self._posted, strict=True)]
        self._members = tuple(replace(one, pace=pace) for one, pace in zip(self._members, paces, strict=True))
        self._posted, self._round = list(now), opened
        sizes = [len(message) + NOTE_BYTES for message in messages]
        # A member writes, then lists, then reads one message after the other, as swarm/mailbox.py does.
        return [_count(size, sum(sizes) - size, requests=1 + 1 + len(sizes) - 1) for size in sizes]

    def committed(self) -> list[Count]:
        """The cost of a verdict, for each member."""
        if not self._round:
            return self._nothing()
        seals = [message.seal for message in self._round]
        header, self._round = self._round[0].header, []
        size = commit_bytes(self._members, header, seals, self._seal)
        # All wait until it was written, and then list and read.
        return [_count(size * (one.number == _writer(header.round, seals)), size, requests=3) for one in self._members]

    def _nothing(self) -> list[Count]:
        return [Count() for _ in self._members]


def mean_cost(message: int, members: int) -> Count:
    """About what a member writes and reads in a round, if a message that passes between replicas has so many bytes."""
    seal, header = Seal(), Header(Kind.ROUND, 0, 0, 0, NOBODY, NOBODY, NOBODY, NOBODY)
    paced = tuple(replace(one, pace=_told(1 / 3)) for one in team(members))
    commit = commit_bytes(paced, header, [bytes(seal.size)] * members, seal)
    written = message + NOTE_BYTES
    return _count(written + commit // members, (members - 1) * written + commit, requests=0)


def team(members: int) -> tuple[Member, ...]:
    """So many virtual members."""
    return tuple(Member(number, SESSION, f"replica-{number}") for number in range(members))


def commit_bytes(members: Sequence[Member], header: Header, seals: Sequence[bytes], seal: Seal) -> int:
    """The size of the commit of a round, from the header of one of its messages and the seals of all."""
    named = tuple(Named(one.number, one.session, mark.hex()) for one, mark in zip(members, seals, strict=True))
    # The anchor after the round is not known here. The one before it has as many digits.
    commit = Commit(header.round, _writer(header.round, seals), named, tuple(members), header.anchor.hex())
    return len(commit.pack(About(header.run, header.schema), seal))


def _writer(index: int, posted: Sequence[object]) -> int:
    """The number of the member that commits a round: another one each time, as in swarm/course.py."""
    return index % len(posted)


def _told(pace: float) -> float:
    """A pace as it arrives in a message."""
    return Note.split(Note(SESSION, min(pace, MOST_PACE)).pack())[0].pace


def _count(written: int, read: int, *, requests: int) -> Count:
    count = Count()
    count.stored(written, read, requests)
    return count
