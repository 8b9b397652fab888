"""Waiting for peers: in slices, so that signals are heard; with a word after a minute; and not for ever.

The time-out is what the user says. By default it follows from how long rounds take: a peer may need several times as
long as the longest round so far, and a large message may take its time on a thin wire.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from overtone.errors import MethodError, PeerError
from overtone.world.board import PERIOD, Board

T = TypeVar("T")

SLICE = 0.25  # seconds: as long as a signal may have to wait for an answer
SOON = 2.0  # seconds of waiting after which the board is opened
NOTICE = 60.0  # seconds of waiting after which a line says for whom; then twice as long, and so on
LEAST = 600.0  # seconds: no default time-out is shorter
MARGIN = 5.0  # seconds after its time-out at which torch gives up a collective by itself, so that a process can end
ROUNDS = 4  # … nor shorter than so many of the longest round so far
SLOWEST = 125_000  # bytes a second, 1 Mbit/s: a message may take as long as it does at this rate
LONGEST = 30 * 86400.0  # seconds that a time-out may have

log = logging.getLogger("overtone")


class Watchdog:
    """Guards the waiting of one replica."""

    def __init__(self, board: Board, timeout: float | None = None) -> None:
        if timeout is not None and not (
            isinstance(timeout, int | float) and not isinstance(timeout, bool) and 0 < timeout <= LONGEST
        ):
            raise MethodError(
                f"timeout={timeout!r}: seconds to wait for a peer, above 0, at most {LONGEST:.0f}; leave it out to "
                "let it follow from how long rounds take"
            )
        self.board = board
        self.timeout = timeout
        self.idle: Callable[[], None] | None = None  # called while waiting, about once per slice
        self.exchanges = 0  # so far; all replicas count alike
        self._longest = 0.0  # seconds from the end of one exchange to the end of the next
        self._ended = time.monotonic()

    def limit(self, size: int = 0) -> float:
        """Seconds to wait in an exchange of so many bytes that begins now."""
        if self.timeout is not None:
            return self.timeout
        worked = time.monotonic() - self._ended
        return min(LONGEST, max(LEAST, ROUNDS * max(self._longest, worked)) + size / SLOWEST)

    def run(self, start: Callable[[Any], Any], options: Any, size: int, *, on_gpu: bool = False) -> None:
        """Start a collective of ``size`` bytes, with torch's options for it, and wait for its end."""
        limit = self.limit(size)
        options.timeout = timedelta(seconds=limit + MARGIN)
        work = start(options)
        if on_gpu:
            work.wait()  # the host does not wait for a GPU's collective: there is nothing to watch over here
        else:
            self.wait(partial(is_done, work), limit)

    def wait(
        self,
        done: Callable[[float], bool],
        limit: float,
        missing: Callable[[], Mapping[int, str]] | None = None,
        what: str = "the exchange",
        *,
        begun: bool = False,
    ) -> None:
        """Until ``done(seconds)``, which waits that long, says so. ``missing`` tells who is waited for, and why it is
        thought so; by default the board does. ``begun``: this exchange was counted when it began."""
        begin, since = time.monotonic(), time.strftime("%H:%M:%S")
        missing = missing or self.board.absent
        self.exchanges += not begun
        notice = NOTICE
        soon, period = min(SOON, limit / 4), min(PERIOD, limit / 8)
        try:
            while not done(SLICE):
                if self.idle is not None:
                    self.idle()
                waited = time.monotonic() - begin
                if waited > soon:
                    self.board.open(self.exchanges, period)
                if waited >= limit:
                    self._give_up(missing(), waited, since, what)
                if waited >= notice:
                    notice *= 2
                    self._say(f"waiting for {_names(missing())} since {since}, {waited:.0f} s, in {what}; gives up "
                              f"after {limit:.0f} s")  # fmt: skip
        finally:
            if self.board.is_open:
                self.board.close()
        if notice > NOTICE:
            self._say(f"goes on after {time.monotonic() - begin:.0f} s of waiting")
        now = time.monotonic()
        self._longest, self._ended = max(self._longest, now - self._ended), now

    def call(self, work: Callable[[], T], limit: float, missing: Callable[[], Mapping[int, str]], what: str) -> T:
        """Wait for ``work``, which waits for peers in native code where no signal is heard: in a thread."""
        found: list[T] = []
        failed: list[BaseException] = []

        def attempt() -> None:
            try:
                found.append(work())
            except BaseException as error:  # raised below, in the thread that can act on it
                failed.append(error)

        thread = threading.Thread(target=attempt, name="joining", daemon=True)
        thread.start()

        def ended(seconds: float) -> bool:
            thread.join(seconds)
            return not thread.is_alive()

        self.wait(ended, limit, missing, what)
        if failed:
            raise failed[0]
        return found[0]

    def broken(self, error: Exception) -> str:
        """Why an exchange broke off, as far as is known: the last words of a replica that left, or who is missing."""
        for rank, words in self.board.last_words().items():
            return f"rank {rank} left: {words}"
        absent = self.board.absent() if self.board.exchange == self.exchanges else {}
        waited = f" while waiting for {_names(absent)}" if absent else ""
        return f"a replica died or the network was cut{waited} ({_brief(error)})"

    def _give_up(self, absent: Mapping[int, str], waited: float, since: str, what: str) -> None:
        words = f"{_names(absent)} did not answer for {waited:.0f} s (since {since}) in {what}"
        if absent:
            words += f": {'; '.join(dict.fromkeys(absent.values()))}. Stopped, far too slow, or cut off"
        else:
            words += ". Nobody is seen to be missing: perhaps a link between two of the others is cut"
        self.board.leave(words)
        raise PeerError(f"rank {self.board.rank}: {words}; no weight was touched. Restart all from a checkpoint, or "
                        "allow more time (--timeout, connect(timeout=))")  # fmt: skip

    def _say(self, words: str) -> None:
        if self.board.speaks():
            log.warning("overtone: rank %d: %s", self.board.rank, words)


def is_done(work: Any, seconds: float) -> bool:
    """Wait so long for a collective. It raises when it failed; it also does when the time is over, and may go on."""
    try:
        work.wait(timedelta(seconds=max(seconds, 0.001)))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it has ended since: well, or with an error of its own
    return True


def _names(absent: Mapping[int, str]) -> str:
    if not absent:
        return "a peer"
    return f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"


def _brief(error: Exception) -> str:
    """What gloo says, without the place in its sources and its advice."""
    return re.sub(r"^\[[^\]]*\] ", "", str(error)).partition(". This is typically")[0]
