"""Waiting for peers: in short slices, so that the process reacts to signals; with a log line after a minute; and with a
time-out.

The user can set the time-out. By default it follows from the duration of rounds: a peer may take several times as long
as the longest round so far, and a large message may take long on a slow network.
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
from overtone.transport import SLICE
from overtone.world.board import PERIOD, Board

T = TypeVar("T")

SOON = 2.0  # seconds of waiting after which the board is opened
NOTICE = 60.0  # seconds of waiting after which a log line names the missing ranks; the next after twice the time
LEAST = 600.0  # seconds: no default time-out is shorter
MARGIN = 5.0  # seconds after our time-out at which torch itself gives up a collective, so that a process can end
ROUNDS = 4  # the default time-out is at least so many times the longest round so far
SLOWEST = 125_000  # bytes a second, 1 Mbit/s: the default time-out allows for a message at this rate
LONGEST = 30 * 86400.0  # seconds: no time-out is longer

log = logging.getLogger("overtone")


class Watchdog:
    """Waits for peers on behalf of one replica, with a time-out and log lines."""

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
        self.exchanges = 0  # exchanges so far; the count is the same on all replicas
        self._longest = 0.0  # seconds from the end of one exchange to the end of the next
        self._ended = time.monotonic()

    def limit(self, size: int = 0) -> float:
        """The time-out in seconds for an exchange of ``size`` bytes that begins now."""
        if self.timeout is not None:
            return self.timeout
        # The work before this exchange counts too: the present round may be the longest so far.
        worked = time.monotonic() - self._ended
        return min(LONGEST, max(LEAST, ROUNDS * max(self._longest, worked)) + size / SLOWEST)

    def run(self, start: Callable[[Any], Any], options: Any, size: int, *, on_gpu: bool = False) -> None:
        """Start a collective of ``size`` bytes with these torch options, and wait for its end."""
        limit = self.limit(size)
        options.timeout = timedelta(seconds=limit + MARGIN)
        work = start(options)
        if on_gpu:
            work.wait()  # it only queues the collective on the GPU: the host does not wait here
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
        """Wait until ``done(seconds)`` returns True. Each call of it waits up to so many seconds.

        ``missing`` returns the missing ranks, each with a reason; the default is the board's view. ``begun``: this
        exchange was counted when it began.
        """
        begin, since = time.monotonic(), time.strftime("%H:%M:%S")
        missing = missing or self.board.absent
        self.exchanges += not begun
        notice = NOTICE
        # With a short time-out the board is opened sooner, so that the error can still name the missing ranks.
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
        """Run ``work`` in a thread and wait for it.

        ``work`` waits for peers in native code. In the main thread, Python could not react to signals meanwhile.
        """
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
        """Why an exchange broke off, as far as known: the last words of a replica that left, or the missing ranks."""
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
    """Wait up to so many seconds for a collective. True if it has ended; raises if it has failed."""
    # torch's `wait` also raises when the time is over, though the collective goes on.
    try:
        work.wait(timedelta(seconds=max(seconds, 0.001)))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it has ended: this returns at once, or raises the error of the collective
    return True


def _names(absent: Mapping[int, str]) -> str:
    if not absent:
        return "a peer"
    return f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"


def _brief(error: Exception) -> str:
    """The error text of gloo, without the place in its source code and its advice."""
    return re.sub(r"^\[[^\]]*\] ", "", str(error)).partition(". This is typically")[0]
