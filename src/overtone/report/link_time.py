"""The time that a run takes on a link, from the counts in its log, as the simulator's clock measures it.

    time = steps · s + x(rest) + Σ max(0, x(part) - n · s)

s are the seconds of a local step, and x(...) those of an exchange on the link: `Link.seconds`, or in a store
`Link.seconds_in_store`. A *part* are rounds whose exchange went on beside the training, and n the local steps that were
taken meanwhile. For the rest, training stood still: all rounds of a method without a delay, and the last messages.

All rounds of a part are added up. That is exact if each of them takes longer than its local steps, or none does. In a
store it is exact if all replicas write as much: a log has the bytes of replica 0 only, which waits for the others'.
page/link.js has the same formula; tests/test_standings.py and tests/test_page.py compare both with the simulator's
clock.
"""

from __future__ import annotations

from typing import NamedTuple

from overtone.report.history import History
from overtone.runs.events import Eval, Finish, InFlight, PhaseCount
from overtone.sim.network import Link

NOTHING = PhaseCount(sent=0, received=0, waiting=0.0, hops=0)


class Part(NamedTuple):
    """Rounds whose exchange went on beside the training."""

    steps: int  # n: the local steps that were taken meanwhile
    sent: int
    received: int
    hops: int


def overlapped(run: History, point: Eval | Finish) -> list[Part]:
    """The overlapped rounds up to a validation. All had `delay` steps, except one in flight when training ended."""
    if not run.delay:
        return []
    last, cut, count = NOTHING, InFlight(steps=0, sent=0, received=0, hops=0), point["rounds"]
    if point["event"] == "finish":
        last = point["bytes"].get("finish", NOTHING)
        if "in_flight" in point:
            cut, count = point["in_flight"], count - 1
    parts = [
        Part(
            count * run.delay,
            point["bytes_sent"] - last["sent"] - cut["sent"],
            point["bytes_received"] - last["received"] - cut["received"],
            point["hops"] - last["hops"] - cut["hops"],
        ),
        Part(cut["steps"], cut["sent"], cut["received"], cut["hops"]),
    ]
    return [part for part in parts if part.hops]


def seconds(run: History, point: Eval | Finish, link: Link, step_seconds: float) -> float:
    """The time of the run up to a validation, on this link and with local steps of ``step_seconds``."""
    exchange_seconds = link.seconds_in_store if run.in_store else link.seconds
    parts = overlapped(run, point)
    rest = exchange_seconds(
        point["bytes_sent"] - sum(part.sent for part in parts),
        point["bytes_received"] - sum(part.received for part in parts),
        point["hops"] - sum(part.hops for part in parts),
    )
    waited = (exchange_seconds(part.sent, part.received, part.hops) - part.steps * step_seconds for part in parts)
    return point["step"] * step_seconds + rest + sum(max(0.0, wait) for wait in waited)
