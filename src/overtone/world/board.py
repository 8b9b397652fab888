"""Notes of replicas that wait, in the store through which they met: so that whoever waits can say for whom.

A collective that hangs does not say who is missing. So a replica that has waited for a few seconds leaves a note, "I
wait in exchange 12", and renews it while it waits. Whoever has left no such note, or does not renew it, is the one
that the others wait for. A replica that gives up leaves its last words, for those whose connection to it then breaks.

The store has no authentication (docs: SECURITY.md): notes are only ever shown, nothing else follows from them.
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

PERIOD = 2.0  # seconds between two looks at the board, or less where the time-out is short
SILENT = 5  # periods without a new note after which a replica that was waiting counts as silent
LONGEST = 512  # bytes of a note
ANSWER = 3.0  # seconds that a store has to answer when a replica is about to leave


class Store(Protocol):
    """What a board needs of torch's stores."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


@dataclass
class Note:
    """What a replica left last, and when a new one was seen."""

    exchange: int
    beat: int
    host: str
    seen: float = field(default_factory=time.monotonic)


class Board:
    """One replica's view. ``name`` sets the boards of one store apart."""

    def __init__(self, store: Store | None, name: str, rank: int, size: int) -> None:
        self.store = store
        self.name = name
        self.rank = rank
        self.others = [other for other in range(size) if other != rank]
        self.exchange = 0
        self.period = PERIOD
        self._host = socket.gethostname()
        self._beat = 0
        self._notes: dict[int, Note] = {}
        self._opened = math.inf  # when, in this exchange
        self._answered = 0.0
        self._stop: threading.Event | None = None
        self.is_open = False

    # -- while waiting ---------------------------------------------------------------------------------------------

    def open(self, exchange: int, period: float = PERIOD) -> None:
        """Begin to tell the others that this replica waits in this exchange, and to look who else does."""
        if self.exchange != exchange:
            self.exchange, self._opened = exchange, math.inf
        if self.store is None or self.is_open:
            return
        self.period = period
        self._stop = threading.Event()
        self.is_open = True
        self._opened = self._answered = time.monotonic()
        # A thread: a store that is cut off does not answer, and whoever waits must go on hearing signals.
        threading.Thread(target=self._look, args=(self._stop,), name="board", daemon=True).start()

    def close(self) -> None:
        if self._stop is not None:
            self._stop.set()
            self._stop = None
            self.is_open = False

    def _look(self, stop: threading.Event) -> None:
        with suppress(RuntimeError):  # the store is gone: `absent` says so
            while not stop.is_set():
                self._beat += 1
                self._put("waits", json.dumps([self.exchange, self._beat, self._host]))
                for other in self.others:
                    note, known = _read(self._get("waits", other)), self._notes.get(other)
                    if note and (known is None or known.beat != note.beat):
                        self._notes[other] = note
                self._answered = time.monotonic()
                stop.wait(self.period)

    def absent(self) -> dict[int, str]:
        """Who is waited for, and what is known of it; empty if nothing is."""
        now = time.monotonic()
        if now - self._opened < self.period:
            return {}
        if now - self._answered > SILENT * self.period:
            away = [0] if self.rank else self.others
            return dict.fromkeys(away, "the store of this world does not answer, or this host is cut off")
        found = {}
        for other in self.others:
            note = self._notes.get(other)
            if note is None or note.exchange < self.exchange:
                found[other] = "it has not come to this exchange"
            elif note.exchange == self.exchange and now - note.seen > SILENT * self.period:
                found[other] = f"it came and has been silent for {now - note.seen:.0f} s"
        return found

    def speaks(self) -> bool:
        """One voice per host is enough: that of the first rank there that is known to wait."""
        fresh, here = time.monotonic() - SILENT * self.period, (self.exchange, self._host)
        return not any(
            other < self.rank and (note.exchange, note.host) == here and note.seen > fresh
            for other, note in self._notes.items()
        )

    # -- joining ---------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        self._put("here", "1")

    def missing(self) -> dict[int, str]:
        """Who has not arrived."""
        unreachable = dict.fromkeys([0] if self.rank else self.others, "the store of this world does not answer")
        if self.store is None:
            return unreachable
        away = _within(ANSWER, lambda: [other for other in self.others if not self._check("here", other)], None)
        return unreachable if away is None else dict.fromkeys(away, "it has not come to join")

    # -- leaving ---------------------------------------------------------------------------------------------------

    def leave(self, words: str) -> None:
        """Last words, for those that lose this replica."""
        if self.store is not None:
            _within(ANSWER, lambda: self._put("left", words), None)

    def last_words(self) -> dict[int, str]:
        """Of those that have left."""
        if self.store is None:
            return {}
        return _within(ANSWER, lambda: dict(self._all_last_words()), {})

    def _all_last_words(self) -> Iterable[tuple[int, str]]:
        for other in self.others:
            if words := self._get("left", other):
                yield other, printable(words.decode(errors="replace"))

    # -- the store -------------------------------------------------------------------------------------------------

    def _key(self, what: str, rank: int) -> str:
        return f"overtone/{self.name}/{what}/{rank}"

    def _put(self, what: str, words: str) -> None:
        if self.store is not None:
            self.store.set(self._key(what, self.rank), words)

    def _check(self, what: str, rank: int) -> bool:
        return self.store is not None and self.store.check([self._key(what, rank)])

    def _get(self, what: str, rank: int) -> bytes:
        # Asked first: a store waits for a key that is not there.
        return self.store.get(self._key(what, rank)) if self.store is not None and self._check(what, rank) else b""


def _read(raw: bytes) -> Note | None:
    """Anybody may have written it: whatever is not a note is none."""
    with suppress(ValueError, TypeError, RecursionError):
        exchange, beat, host = json.loads(raw[:LONGEST])
        return Note(int(exchange), int(beat), str(host))
    return None


def _within(seconds: float, work: Callable[[], T], otherwise: U) -> T | U:
    """What ``work`` returns, if it does so in time and without an error of the store's."""
    found: list[T] = []

    def attempt() -> None:
        with suppress(RuntimeError):
            found.append(work())

    thread = threading.Thread(target=attempt, name="board", daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else otherwise
