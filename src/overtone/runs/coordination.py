"""What the replicas of a run agree on besides the rounds: few bytes, sealed like all messages, counted as upkeep.

`Coordinator` has the collectives: every rank must call them, in the same order, or all ranks wait for ever. `StopVote`
is the exception: it goes on beside the training, and no rank waits for it until one is asked to stop.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from overtone.coding import fingerprint
from overtone.common.machine_errors import in_words
from overtone.errors import OvertoneError, PeerError, RelayedError, WireError, printable
from overtone.exchange.consensus import gather_sealed
from overtone.exchange.message import NOBODY, Expected, Header, Kind, Message, Seal, seal_message, unseal_message
from overtone.runs.stop_signals import STOPPING, StopRequest
from overtone.transport import Solo, run_exchange
from overtone.world.process_group import Begun, Torch

T = TypeVar("T")

MOST = 1 << 20  # bytes of one control message
VOTES = (0, *STOPPING)  # the values of a stop vote: 0, or the signal that the sender got
SECONDS_BETWEEN_VOTES = 5.0  # about


class Coordinator:
    """One rank's side of the collectives.

    Every message carries a name of this run, made from nonces of all ranks, and a counter. So every rank refuses a
    message of another run or of another moment.
    """

    def __init__(self, transport: Solo | Torch, seal: Seal | None = None) -> None:
        self.transport = transport
        self.seal = seal or Seal.with_key(None)
        self.world = NOBODY
        self._count = 0
        self.phase = "setup"  # of the ledger; "upkeep" once the replicas train
        nonces = self.all_gather(os.urandom(16).hex())
        self.world = fingerprint.of_text(json.dumps(nonces))

    def all_gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in the order of ranks; they travel as JSON. A collective."""
        header = self.header(self._count)
        self._count += 1
        body = json.dumps(value).encode()
        exchange = gather_sealed("control message", header, body, self.transport.peers, self.seal, _value, MOST)
        return run_exchange(exchange, self.transport, self.phase)

    def header(self, count: int) -> Header:
        """The header of this rank's control message number ``count``."""
        return Header(Kind.CONTROL, self.transport.rank, count, 0, self.world, NOBODY, NOBODY, NOBODY)

    def all_succeed(self, work: Callable[[], T]) -> T:
        """Do the work on every rank. If one rank fails, all raise: the rank itself its own error, the others one that
        names it. A collective."""
        error = None
        try:
            with in_words():
                result = work()
        except OvertoneError as refusal:
            error = refusal
        failures = self.all_gather("" if error is None else str(error)[: MOST // 8])
        if error is not None:
            raise error
        for rank, words in enumerate(failures):
            if words:
                raise RelayedError(f"rank {rank}: {printable(str(words))}")
        return result


def _value(letter: Message) -> Any:
    try:
        return json.loads(letter.body)
    except (RecursionError, ValueError) as error:
        raise WireError(f"body: not JSON ({error!r})") from error


class StopVote:
    """Lets all replicas stop after the same step when one of them was asked to stop.

    Every few seconds each replica sends its vote (the signal it got, or none) on a channel of its own and goes on
    training. When the votes of all have arrived, the next vote may follow. If one of them holds a signal, the next vote
    is binding: the replicas wait for each other and stop after the largest step that one of them may have reached. A
    replica that waits in an exchange meanwhile votes from there (the watchdog calls `_look`); otherwise the two waits
    would block each other.
    """

    def __init__(self, coordinator: Coordinator, step: int, request: StopRequest) -> None:
        self.coordinator = coordinator
        self.request = request
        self._next = step + 1  # the first step after which this replica can still stop
        self._stop: tuple[str, int] | None = None  # which signal, and after which step
        self._trained = False
        self._sent = 0  # votes
        self._begun: Begun | None = None  # the gather under way
        self._due = 0.0
        self._channel: Torch | None = None
        if isinstance(coordinator.transport, Torch) and coordinator.transport.size > 1:
            self._channel = coordinator.transport.branch()
            coordinator.transport.watchdog.idle = self._look

    def stop_after(self, step: int) -> str:
        """The name of the signal if all replicas are to stop after this step; empty otherwise."""
        if self._channel is None:
            return self.request.name
        self._next = step
        self._look()
        while self.request.name and self._stop is None:  # a replica that was asked to stop begins no further step
            self._look(wait=True)
        if self._stop is not None and step >= self._stop[1]:
            return self._stop[0]
        self._next = step + 1
        return ""

    def close(self) -> None:
        """End the votes when training is over, so that none is under way when the processes end. A collective."""
        if self._channel is None:
            return
        self._trained = True
        self.coordinator.all_gather("trained")  # until all ranks are here, a vote may still begin
        self.coordinator.transport.watchdog.idle = None  # type: ignore[union-attr]
        if self._sent < max(self.coordinator.all_gather(self._sent)):
            self._send()
        if self._begun is not None:
            self._received(wait=True)

    def _look(self, *, wait: bool = False) -> None:
        """Send a vote if one is due; count the votes if all have arrived."""
        if self._stop is not None:
            return
        if self._begun is None and (self.request.name or time.monotonic() >= self._due):
            self._send()
        votes = self._received(wait=wait)
        if votes is None:
            return
        self._due = time.monotonic() + SECONDS_BETWEEN_VOTES
        if number := max(vote.body[0] for vote in votes):
            self._send()
            # A replica that has trained to the end only answers: the others may not wait for its next vote any more.
            binding = [] if self._trained else self._received(wait=True) or []
            self._stop = signal.Signals(number).name, max([self._next, *(vote.header.steps for vote in binding)])

    def _send(self) -> None:
        assert self._channel is not None
        number = signal.Signals[self.request.name] if self.request.name else 0
        header = replace(self.coordinator.header(self._sent), steps=self._next)
        self._begun = self._channel.begin_gather(seal_message(header, bytes([number]), self.coordinator.seal))
        self._sent += 1

    def _received(self, *, wait: bool = False) -> list[Message] | None:
        """The votes of all ranks, or None if some have not arrived yet."""
        assert self._channel is not None
        if self._begun is None:
            return None
        messages = self._begun.messages(wait=wait)
        if messages is None:
            return None
        self._begun = None
        expected = Expected(self._sent - 1, self.coordinator.world, NOBODY)
        return [self._opened(message, expected, rank) for rank, message in enumerate(messages)]

    def _opened(self, message: bytes, expected: Expected, rank: int) -> Message:
        try:
            vote = unseal_message(message, expected, rank, self.coordinator.seal)
            if vote.header.kind is not Kind.CONTROL or len(vote.body) != 1 or vote.body[0] not in VOTES:
                raise WireError("body: not a vote, or a vote with an unknown signal")
        except WireError as error:
            raise PeerError(f"the stop vote of rank {rank} was refused: {error}") from error
        return vote
