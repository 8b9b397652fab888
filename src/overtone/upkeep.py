"""What the replicas of a run tell each other besides the rounds: few bytes, counted apart from the method's own."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

from overtone.errors import OvertoneError, PeerError
from overtone.transport import Transport
from overtone.trouble import in_words

T = TypeVar("T")

MOST = 1 << 20  # bytes of one such message
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SECONDS = 5.0  # between two pulses, about


class Upkeep:
    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def tell(self, value: Any) -> list[Any]:
        """Everybody's value, in the order of ranks. Whoever calls this must be sure that all others do."""
        with self.transport.ledger.during("upkeep"):
            heard = self.transport.gather(json.dumps(value).encode(), most=MOST)
        return [json.loads(message.rstrip(b"\0")) for message in heard]

    def all_or_none(self, work: Callable[[], T]) -> T:
        """Everybody's work, or nobody's: what one rank cannot do is told to all, and all give up alike."""
        error = None
        try:
            with in_words():
                result = work()
        except OvertoneError as refusal:
            error = refusal
        heard = self.tell("" if error is None else str(error))
        if error is not None:
            raise error
        for rank, words in enumerate(heard):
            if words:
                raise PeerError(f"rank {rank}: {words}")
        return result


@dataclass
class Asked:
    """Whether this process was asked to stop, and by which signal."""

    name: str = ""
    has_something_to_save: bool = False


def heeded() -> list[signal.Signals]:
    """The signals to stop by, without those that are ignored."""
    return [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def listening() -> Iterator[Asked]:
    """A signal asks for a stop after everything was saved; a second one does not wait, nor does one before there is
    anything to save. A signal that is ignored, as under nohup, stays ignored."""
    asked = Asked()

    def ask(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        if asked.name or not asked.has_something_to_save:
            sys.exit(128 + number)
        asked.name = signal.Signals(number).name

    before = {number: signal.signal(number, ask) for number in heeded()}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Pulse:
    """Now and then the replicas tell each other whether one of them was asked to stop, so that all stop after the same
    step. Replica 0 says when the next pulse is due, from how long steps take."""

    def __init__(self, upkeep: Upkeep, step: int, asked: Asked) -> None:
        self.upkeep = upkeep
        self.asked = asked
        self.due = step + 1
        self._last = (step, time.perf_counter())

    def stop_after(self, step: int) -> str:
        """Which signal somebody got, if all are to stop after this step; empty otherwise."""
        if self.upkeep.transport.size > 1 and step < self.due:
            return ""
        before, began = self._last
        per_step = max(1e-6, (time.perf_counter() - began) / max(1, step - before))
        self._last = (step, time.perf_counter())
        heard = self.upkeep.tell([self.asked.name, step + max(1, int(SECONDS / per_step))])
        self.due = heard[0][1]
        return next((asked for asked, _ in heard if asked), "")
