"""What the replicas of a run tell each other besides the rounds: few bytes, sealed like all messages, counted apart."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, TypeVar

from overtone.coding import fingerprint
from overtone.common.machine_errors import in_words
from overtone.errors import OvertoneError, PeerError, RelayedError, WireError, printable
from overtone.exchange.consensus import gather_sealed
from overtone.exchange.message import NOBODY, Expected, Header, Kind, Message, Seal, seal_message, unseal_message
from overtone.transport import Solo, run_exchange
from overtone.world.process_group import Begun, Torch

T = TypeVar("T")

MOST = 1 << 20  # bytes of one such message
STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SIGNALS = (0, *STOPPING)  # that a pulse may tell of; 0: none
SECONDS = 5.0  # between two pulses, about


class Upkeep:
    """A replica's side of it. Messages carry the name of this meeting, drawn by all together, and a counter: one of
    another run, or of another moment, is refused by every rank."""

    def __init__(self, transport: Solo | Torch, seal: Seal | None = None) -> None:
        self.transport = transport
        self.seal = seal or Seal.with_key(None)
        self.world = NOBODY
        self._told = 0
        self.phase = "setup"  # of the ledger; "upkeep" once the replicas train
        nonces = self.tell(os.urandom(16).hex())
        self.world = fingerprint.of_text(json.dumps(nonces))

    def tell(self, value: Any) -> list[Any]:
        """Everybody's value, in the order of ranks. A collective: every rank must come here, or all wait."""
        header = self.header(self._told)
        self._told += 1
        body = json.dumps(value).encode()
        exchange = gather_sealed("word", header, body, self.transport.peers, self.seal, _value, MOST)
        return run_exchange(exchange, self.transport, self.phase)

    def header(self, count: int) -> Header:
        return Header(Kind.CONTROL, self.transport.rank, count, 0, self.world, NOBODY, NOBODY, NOBODY)

    def all_or_none(self, work: Callable[[], T]) -> T:
        """Everybody's work, or nobody's: what one rank cannot do is told to all, and all give up alike."""
        error = None
        try:
            with in_words():
                result = work()
        except OvertoneError as refusal:
            error = refusal
        heard = self.tell("" if error is None else str(error)[: MOST // 8])
        if error is not None:
            raise error
        for rank, words in enumerate(heard):
            if words:
                raise RelayedError(f"rank {rank}: {printable(str(words))}")
        return result


def _value(letter: Message) -> Any:
    try:
        return json.loads(letter.body)
    except (RecursionError, ValueError) as error:
        raise WireError(f"word: cannot be read ({error!r})") from error


@dataclass
class Asked:
    """Whether this process was asked to stop, and by which signal."""

    name: str = ""
    has_something_to_save: bool = False


def heeded() -> list[signal.Signals]:
    """The signals to stop by, without those that are ignored."""
    return [number for number in STOPPING if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def listening(*, repeats: bool = True) -> Iterator[Asked]:
    """A signal asks for a stop after everything was saved; a second one does not wait (unless ``repeats`` mean
    nothing), nor does one before there is anything to save. What is ignored, as under nohup, stays ignored."""
    asked = Asked()

    def ask(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        if not asked.has_something_to_save or (asked.name and repeats):
            sys.exit(128 + number)
        asked.name = asked.name or signal.Signals(number).name

    before = {number: signal.signal(number, ask) for number in heeded()}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Pulse:
    """Now and then the replicas tell each other whether one of them was asked to stop, so that all stop after the same
    step.

    Nobody waits for that: a replica says its word on a way of its own and goes on training; when everybody's has come,
    the next one may follow. Only once somebody was asked do they wait for each other, to agree on the step: the largest
    that one of them may have reached. A replica that waits in an exchange meanwhile answers from there (`idle`), or the
    two would wait for each other.
    """

    def __init__(self, upkeep: Upkeep, step: int, asked: Asked) -> None:
        self.upkeep = upkeep
        self.asked = asked
        self._next = step + 1  # the first step after which this replica can still stop
        self._stop: tuple[str, int] | None = None  # which signal, and after which step
        self._trained = False
        self._said = 0
        self._begun: Begun | None = None
        self._due = 0.0
        self._way: Torch | None = None
        if isinstance(upkeep.transport, Torch) and upkeep.transport.size > 1:
            self._way = upkeep.transport.branch()
            upkeep.transport.watchdog.idle = self._look

    def stop_after(self, step: int) -> str:
        """Which signal somebody got, if all are to stop after this step; empty otherwise."""
        if self._way is None:
            return self.asked.name
        self._next = step
        self._look()
        while self.asked.name and self._stop is None:  # who was asked to stop begins no further step
            self._look(wait=True)
        if self._stop is not None and step >= self._stop[1]:
            return self._stop[0]
        self._next = step + 1
        return ""

    def close(self) -> None:
        """Training is over on all ranks: nothing may be under way when the processes part."""
        if self._way is None:
            return
        self._trained = True
        self.upkeep.tell("trained")  # until all have come here, they may still ask
        self.upkeep.transport.watchdog.idle = None  # type: ignore[union-attr]
        if self._said < max(self.upkeep.tell(self._said)):
            self._begin()
        if self._begun is not None:
            self._heard(wait=True)

    def _look(self, *, wait: bool = False) -> None:
        """Say a word if it is time for one; hear everybody's if all have come."""
        if self._stop is not None:
            return
        if self._begun is None and (self.asked.name or time.monotonic() >= self._due):
            self._begin()
        heard = self._heard(wait=wait)
        if heard is None:
            return
        self._due = time.monotonic() + SECONDS
        if asked := max(letter.body[0] for letter in heard):
            self._begin()
            # Who has trained to the end answers, and need not know: others may be past waiting for its next word.
            agreed = [] if self._trained else self._heard(wait=True) or []
            self._stop = signal.Signals(asked).name, max([self._next, *(letter.header.steps for letter in agreed)])

    def _begin(self) -> None:
        assert self._way is not None
        number = signal.Signals[self.asked.name] if self.asked.name else 0
        header = replace(self.upkeep.header(self._said), steps=self._next)
        self._begun = self._way.begin_gather(seal_message(header, bytes([number]), self.upkeep.seal))
        self._said += 1

    def _heard(self, *, wait: bool = False) -> list[Message] | None:
        """Everybody's word, once all have come."""
        assert self._way is not None
        if self._begun is None:
            return None
        messages = self._begun.messages(wait=wait)
        if messages is None:
            return None
        self._begun = None
        expected = Expected(self._said - 1, self.upkeep.world, NOBODY)
        return [self._opened(message, expected, rank) for rank, message in enumerate(messages)]

    def _opened(self, message: bytes, expected: Expected, rank: int) -> Message:
        try:
            letter = unseal_message(message, expected, rank, self.upkeep.seal)
            if letter.header.kind is not Kind.CONTROL or len(letter.body) != 1 or letter.body[0] not in SIGNALS:
                raise WireError("pulse: not one, or of an unknown signal")
        except WireError as error:
            raise PeerError(f"the pulse of rank {rank} was refused: {error}") from error
        return letter
