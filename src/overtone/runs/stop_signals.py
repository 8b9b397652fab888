"""Operating-system signals that ask a run to stop (SIGTERM, Ctrl-C, a closed terminal)."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass
class StopRequest:
    """Whether this process was asked to stop, and by which signal."""

    name: str = ""  # of the signal; empty: nobody asked
    has_something_to_save: bool = False  # before that, a signal ends the process at once


def heeded() -> list[signal.Signals]:
    """The signals to stop by. Signals that this process ignores, as under nohup, are not among them."""
    return [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def listening(*, repeats: bool = True) -> Iterator[StopRequest]:
    """Turn the first signal into a `StopRequest`, so that the run can save before it stops.

    A second signal ends the process at once, unless ``repeats`` is false: a launcher may send the same signal again. So
    does a signal that comes before there is anything to save.
    """
    request = StopRequest()

    def ask(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        if not request.has_something_to_save or (request.name and repeats):
            sys.exit(128 + number)
        request.name = request.name or signal.Signals(number).name

    before = {number: signal.signal(number, ask) for number in heeded()}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
