"""Who trains on which samples in a run whose members come and go. A pure function of the commits, like the anchor.

An epoch is a row of *units*, each the samples of one local step. A member holds a lease on some units, and its messages
say how many of them it has used. A commit renews the leases of all members, so that each has enough for some rounds.
What a member that is gone has not used, as far as its messages say, is leased out again. So:

- At any moment no unit is leased to two members.
- An epoch ends when all of its units are leased out. Each unit is counted as used once, in the epoch that it belongs
  to, by a member whose message counted, however members come and go.

A member that is gone may have trained on units without telling. If it comes back and still has what it learnt there, it
sends that too: such units are then trained on twice.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from overtone.errors import WireError

ROUNDS = 4  # for which a lease lasts: a replica trains on while it waits for a commit (course.AHEAD)
MOST_SPANS = 1 << 16
MOST = 1 << 62


@dataclass(frozen=True)
class Span:
    """Units of an epoch, from ``begin`` to before ``end``."""

    epoch: int
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin

    def cut(self, units: int) -> tuple[Span, Span]:
        """The first so many units, and the rest."""
        at = min(self.end, self.begin + units)
        return Span(self.epoch, self.begin, at), Span(self.epoch, at, self.end)


@dataclass(frozen=True)
class Leases:
    """The leases after a commit. ``units`` has an epoch; a round needs ``need`` of them."""

    units: int
    need: int
    epoch: int = 0
    next: int = 0  # the first unit of the epoch that was never leased out
    free: tuple[Span, ...] = ()  # units that came back
    held: Mapping[int, tuple[Span, ...]] = field(default_factory=dict)  # by member, in the order of use

    def after(self, members: Collection[int], used: Mapping[int, int]) -> Leases:
        """The leases among these members, who have used so many units each since their last message that counted."""
        held = {number: _without(spans, used.get(number, 0)) for number, spans in self.held.items()}
        back = [span for number in sorted(held) if number not in members for span in held[number]]
        free, epoch, at = [*self.free, *back], self.epoch, self.next
        new: dict[int, tuple[Span, ...]] = {}
        for number in sorted(members):
            mine = list(held.get(number, ()))
            while (missing := ROUNDS * self.need - sum(map(len, mine))) > 0:
                if free:
                    taken, rest = free.pop(0).cut(missing)
                    if rest:
                        free.insert(0, rest)
                else:
                    if at == self.units:
                        epoch, at = epoch + 1, 0
                    taken, _ = Span(epoch, at, self.units).cut(missing)
                    at = taken.end
                mine.append(taken)
            new[number] = _joined(mine)
        return Leases(self.units, self.need, epoch, at, _joined(free), new)

    def told(self) -> dict[str, Any]:
        """As a commit says it."""
        return {
            "units": self.units,
            "need": self.need,
            "epoch": self.epoch,
            "next": self.next,
            "free": [_list(span) for span in self.free],
            "held": {str(number): [_list(span) for span in spans] for number, spans in self.held.items()},
        }

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> Leases:
        """What a commit says. Raises `WireError` if it makes no sense."""
        try:
            units, need, epoch, following = (_whole(told[name]) for name in ("units", "need", "epoch", "next"))
            free = tuple(_span(span, units) for span in told["free"])
            held = {int(number): tuple(_span(span, units) for span in spans) for number, spans in told["held"].items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise WireError(f"leases: {error!r}; the commit is corrupt") from error
        if not units or not need or following > units or len(free) + sum(map(len, held.values())) > MOST_SPANS:
            raise WireError("leases: out of bounds; the commit is corrupt")
        return cls(units, need, epoch, following, free, held)


def _without(spans: Sequence[Span], used: int) -> tuple[Span, ...]:
    """What is left of a lease when its first units are used."""
    left = []
    for span in spans:
        gone, rest = span.cut(used)
        used -= len(gone)
        if rest:
            left.append(rest)
    return tuple(left)


def _joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The same units in the same order, in as few spans as can be."""
    joined: list[Span] = []
    for span in spans:
        if joined and (joined[-1].epoch, joined[-1].end) == (span.epoch, span.begin):
            joined[-1] = Span(span.epoch, joined[-1].begin, span.end)
        else:
            joined.append(span)
    return tuple(joined)


def _list(span: Span) -> list[int]:
    return [span.epoch, span.begin, span.end]


def _span(told: Sequence[int], units: int) -> Span:
    epoch, begin, end = map(_whole, told)
    if not begin < end <= units:
        raise ValueError(f"span {told}")
    return Span(epoch, begin, end)


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value <= MOST:
        raise ValueError(f"{value!r} is no count")
    return value
