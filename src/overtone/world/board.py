"""Notes of waiting replicas, in the store of the process group, so that a waiting replica can name the missing peer.

A collective that hangs does not tell which rank is missing. So a replica that has waited for a few seconds writes a
note, "I wait in exchange 12", and renews it while it waits. A replica that has no such note, or does not renew it, is
the missing one. A replica that gives up writes its last words, for the peers whose connection to it then breaks.

The store has no authentication (docs: SECURITY.md). So notes are only shown to the user; nothing else depends on them.
"""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from overtone.errors import printable

T = TypeVar("T")
U = TypeVar("U")

PERIOD = 2.0  # seconds between two looks at the board; less if the time-out is short
SILENT = 5  # after so many periods without a new note, a replica that was waiting counts as silent
LONGEST = 512  # the most bytes of a note
ANSWER = 3.0  # seconds to wait for an answer of the store when a replica is about to leave


class Store(Protocol):
    """The methods of torch's stores that a board uses."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


@dataclass
class Note:
    """The last note of a replica, and the time at which this replica first saw it."""

    exchange: int
    beat: int
    host: str
    seen: float = field(default_factory=time.monotonic)


class Board:
    """One replica's view of the notes. ``name`` distinguishes the boards in one store. ``words``: the board on which
    last words are written and looked for, if that is another one."""

    def __init__(self, store: Store | None, name: str, rank: int, size: int, words: str = "") -> None:
        self.store = store
        self.name = name
        self.words = words or name
        self.rank = rank
        self.others = [other for other in range(size) if other != rank]
        self.exchange = 0
        self.period = PERIOD
        self._host = socket.gethostname()
        self._beat = 0
        self._notes: dict[int, Note] = {}
        self._opened = math.inf  # the time at which the board was opened in this exchange
        self._answered = 0.0  # the time of the store's last answer
        self._stop: threading.Event | None = None
        self.is_open = False

    # -- while waiting ---------------------------------------------------------------------------------------------

    def open(self, exchange: int, period: float = PERIOD) -> None:
        """Start to write notes that this replica waits in this exchange, and to read the notes of its peers."""
        if self.exchange != exchange:
            self.exchange, self._opened = exchange, math.inf
        if self.store is None or self.is_open:
            return
        self.period = period
        self._stop = threading.Event()
        self.is_open = True
        self._opened = self._answered = time.monotonic()
        # In a thread: a store that is cut off does not answer, and the waiting thread must still react to signals.
        threading.Thread(target=self._look, args=(self._stop,), name="board", daemon=True).start()

    def close(self) -> None:
        """Stop to write and read notes."""
        if self._stop is not None:
            self._stop.set()
            self._stop = None
            self.is_open = False

    def _look(self, stop: threading.Event) -> None:
        with suppress(RuntimeError):  # the store is gone: `absent` reports it
            while not stop.is_set():
                self._beat += 1
                self._put("waits", json.dumps([self.exchange, self._beat, self._host]))
                for other in self.others:
                    note, known = _read(self._get("waits", other)), self._notes.get(other)
                    # By the count of beats, with the time taken here: the clocks of two hosts may differ.
                    if note and (known is None or known.beat != note.beat):
                        self._notes[other] = note
                self._answered = time.monotonic()
                stop.wait(self.period)

    def absent(self) -> dict[int, str]:
        """The ranks that this replica waits for, each with a reason. Empty if no rank is known to be missing."""
        now = time.monotonic()
        if now - self._opened < self.period:  # too early: peers have not had the time to write their notes
            return {}
        if now - self._answered > SILENT * self.period:
            away = [0] if self.rank else self.others  # the store is usually on the host of rank 0
            return dict.fromkeys(away, "the store of this world does not answer, or this host is cut off")
        lost: dict[int, str] = {}
        behind: dict[int, str] = {}
        for other in self.others:
            note = self._notes.get(other)
            silent = math.inf if note is None else now - note.seen
            if note is None or note.exchange < self.exchange:
                # One that waits in an earlier exchange is not the missing one: it waits for somebody itself.
                (behind if silent <= SILENT * self.period else lost)[other] = "it has not come to this exchange"
            elif note.exchange == self.exchange and silent > SILENT * self.period:
                lost[other] = f"it came and has been silent for {silent:.0f} s"
        return lost or behind

    def speaks(self) -> bool:
        """True if this replica shall log for its host: only the lowest rank on a host that is known to wait does."""
        fresh, here = time.monotonic() - SILENT * self.period, (self.exchange, self._host)
        return not any(
            other < self.rank and (note.exchange, note.host) == here and note.seen > fresh
            for other, note in self._notes.items()
        )

    # -- joining ---------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """Write a note that this replica has come to join."""
        self._put("here", "1")

    def missing(self) -> dict[int, str]:
        """The ranks that have not come to join, each with a reason."""
        unreachable = dict.fromkeys([0] if self.rank else self.others, "the store of this world does not answer")
        if self.store is None:
            return unreachable
        away = _within(ANSWER, lambda: [other for other in self.others if not self._check("here", other)], None)
        return unreachable if away is None else dict.fromkeys(away, "it has not come to join")

    # -- leaving ---------------------------------------------------------------------------------------------------

    def leave(self, words: str) -> None:
        """Write this replica's last words, for the peers that lose their connection to it."""
        if self.store is not None:
            _within(ANSWER, lambda: self._put("left", words), None)

    def last_words(self) -> dict[int, str]:
        """The last words of the replicas that have left, by rank."""
        if self.store is None:
            return {}
        return _within(ANSWER, lambda: dict(self._all_last_words()), {})

    def _all_last_words(self) -> Iterable[tuple[int, str]]:
        for other in self.others:
            if words := self._get("left", other):
                yield other, printable(words.decode(errors="replace"))

    # -- the store -------------------------------------------------------------------------------------------------

    def _key(self, what: str, rank: int) -> str:
        return f"overtone/{self.words if what == 'left' else self.name}/{what}/{rank}"

    def _put(self, what: str, words: str) -> None:
        if self.store is not None:
            self.store.set(self._key(what, self.rank), words)

    def _check(self, what: str, rank: int) -> bool:
        return self.store is not None and self.store.check([self._key(what, rank)])

    def _get(self, what: str, rank: int) -> bytes:
        # `check` first: `get` would wait for a key that does not exist.
        return self.store.get(self._key(what, rank)) if self.store is not None and self._check(what, rank) else b""


def _read(raw: bytes) -> Note | None:
    """Parse a note. Any process may have written it, so a text that is no valid note gives None."""
    with suppress(ValueError, TypeError, RecursionError):
        exchange, beat, host = json.loads(raw[:LONGEST])
        return Note(int(exchange), int(beat), str(host))
    return None


def _within(seconds: float, work: Callable[[], T], otherwise: U) -> T | U:
    """The result of ``work``, or ``otherwise`` if it takes longer or the store raises an error."""
    found: list[T] = []

    def attempt() -> None:
        with suppress(RuntimeError):
            found.append(work())

    # A daemon thread: one that still waits for the store does not keep the process alive.
    thread = threading.Thread(target=attempt, name="board", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else otherwise
