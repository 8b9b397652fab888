"""Where the time of a run goes, and how much it has trained on, over all its sessions."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from overtone.ledger import Round
from overtone.runs.loop import Step

KINDS = ("inner steps", "rounds", "evaluation", "checkpoints", "data")


class RunTimer:
    """Measures the time of each kind of work, and counts the units that the run has trained on.

    All replicas together train on ``per_step`` units in one local step. With ``virtual`` the seconds that a round waits
    are those of a simulated network: they take no time and are not counted.
    """

    def __init__(self, per_step: int, *, virtual: bool = False) -> None:
        self.per_step = per_step
        self.virtual = virtual
        self.units = 0
        self.steps = 0  # of this session
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self.earlier = 0.0  # seconds of training in earlier sessions
        self.begun = time.perf_counter()

    def start(self) -> None:
        """Training begins now: what came before is not counted."""
        self.begun = time.perf_counter()

    @property
    def here(self) -> float:
        """Seconds of this session."""
        return time.perf_counter() - self.begun

    @property
    def passed(self) -> float:
        """Seconds of training in all sessions."""
        return self.earlier + self.here

    @contextmanager
    def during(self, kind: str) -> Iterator[None]:
        """Count the time inside as this kind of work."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[kind] += time.perf_counter() - begin

    def count(self, step: Step) -> None:
        """Count one local step of all replicas."""
        in_round = self.count_rounds(step.rounds)
        self.seconds["data"] += step.seconds_data
        self.seconds["inner steps"] += step.seconds - step.seconds_data - in_round
        self.units += self.per_step
        self.steps += 1

    def count_rounds(self, rounds: Sequence[Round]) -> float:
        """Count rounds that were not part of a step; return the seconds they took."""
        took = sum(r.seconds_encoding + r.seconds_decoding for r in rounds)
        took += 0.0 if self.virtual else sum(r.seconds_waiting for r in rounds)
        self.seconds["rounds"] += took
        return took

    @property
    def units_per_second(self) -> float:
        """The speed of this session so far."""
        return self.per_step * self.steps / self.here

    def seconds_left(self, steps: int) -> float:
        """Seconds that so many more steps will take at the speed of this session."""
        return self.here / self.steps * steps

    def shares(self) -> dict[str, float]:
        """Shares of this session's time, by kind of work; they add up to 1."""
        here = self.here
        shares = {kind: seconds / here for kind, seconds in self.seconds.items()}
        return {**shares, "other": 1.0 - sum(shares.values())}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: units and seconds of all sessions."""
        return {"units": self.units, "seconds": self.passed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the counts of an earlier session."""
        units, seconds = state["units"], state["seconds"]
        if not (type(units) is int and units >= 0 and 0.0 <= seconds < math.inf):
            raise ValueError(f"units {units!r}, seconds {seconds!r}")
        self.units, self.earlier = units, seconds
