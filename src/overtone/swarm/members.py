"""Who is a member, who is waited for, and when a round may be committed. Pure functions, without a clock or a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from overtone.swarm.records import Member, Note

SLOW = 1.5  # times the usual pace: a slower member is heard when it speaks, and not waited for
LATE = 1.5  # times the usual pace: the longest wait for a member that was on time before
SLACK = 1.0  # seconds that are always granted beyond that
UNKNOWN_PACE = 60.0  # seconds of a round, before any member has told its own
SLOWEST = 10.0  # times the usual pace: a slower member is dropped as one of this pace would be
MOST_MISSED = 4  # rounds in which a member of the usual pace may be silent before it is dropped


@dataclass(frozen=True)
class Posts:
    """What members and newcomers have put into the folder of a round so far. All by number."""

    messages: Mapping[int, Note] = field(default_factory=dict)
    joins: Mapping[int, Member] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many have posted."""
        return len(self.messages.keys() | self.joins.keys())


def usual_pace(members: Sequence[Member]) -> float:
    """The seconds of a round, as the members have told them; 0 if none has."""
    known = [member.pace for member in members if member.pace > 0]
    return median(known) if known else 0.0


def deadline(members: Sequence[Member]) -> float:
    """Seconds after the last commit, after which nobody is waited for."""
    return LATE * (usual_pace(members) or UNKNOWN_PACE) + SLACK


def waited_for(members: Sequence[Member]) -> list[Member]:
    """The members without which a round is not committed before its deadline: those that are neither slow nor late."""
    usual = usual_pace(members)
    return [member for member in members if member.missed == 0 and member.pace <= SLOW * (usual or member.pace)]


def least(members: Sequence[Member], asked: int | None) -> int:
    """How many must have posted before a round is committed: as asked, or at least half of the members."""
    return max(1, -(-len(members) // 2)) if asked is None else asked


def may_commit(members: Sequence[Member], posts: Posts, since: float, asked: int | None = None) -> bool:
    """True if the round may be committed, so many seconds after the last commit was seen."""
    if posts.count < least(members, asked):
        return False
    posted = posts.messages.keys() | posts.joins.keys()
    return all(member.number in posted for member in waited_for(members)) or since >= deadline(members)


def after(members: Sequence[Member], posts: Posts) -> tuple[tuple[Member, ...], tuple[str, ...]]:
    """The members after a round in which these posts were heard, and in words who came and left."""
    usual = usual_pace(members)
    kept: dict[int, Member] = {}
    words: list[str] = []
    for member in members:
        note, join = posts.messages.get(member.number), posts.joins.get(member.number)
        missed = member.missed + 1
        if join is not None:  # even if its process before speaks in every round: it would keep this one out for ever
            kept[member.number] = join
            words.append(f"{member.name} is back, as process {join.session}")
        elif note is not None and note.leaves:
            words.append(f"{member.name} has left")
        elif note is not None:
            kept[member.number] = replace(member, missed=0, pace=note.pace or member.pace)
        elif missed > MOST_MISSED * min(SLOWEST, max(1.0, member.pace / usual if usual else 1.0)):
            words.append(f"{member.name} was not heard of for {missed} rounds, and is no member any more")
        else:
            kept[member.number] = replace(member, missed=missed)
    for number, join in posts.joins.items():
        if number not in kept and not any(member.number == number for member in members):
            kept[number] = join
            words.append(f"{join.name} has joined")
    return tuple(kept[number] for number in sorted(kept)), tuple(words)
