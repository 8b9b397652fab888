"""Where a run's time goes and how much it has trained on, over all its sessions."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from overtone.ledger import Round
from overtone.runs.loop import Step

KINDS = ("inner steps", "rounds", "evaluation", "checkpoints", "data")


class Accounts:
    """``per_step`` units are trained on by all replicas together in one local step."""

    def __init__(self, per_step: int) -> None:
        self.per_step = per_step
        self.units = 0
        self.steps = 0  # of this session
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self.earlier = 0.0  # seconds of training in earlier sessions
        self.begun = time.perf_counter()

    @property
    def here(self) -> float:
        """Seconds of this session."""
        return time.perf_counter() - self.begun

    @property
    def passed(self) -> float:
        """Seconds of training in all."""
        return self.earlier + self.here

    @contextmanager
    def during(self, kind: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[kind] += time.perf_counter() - begin

    def count(self, step: Step) -> None:
        in_round = self.rounds(step.rounds)
        self.seconds["data"] += step.seconds_data
        self.seconds["inner steps"] += step.seconds - step.seconds_data - in_round
        self.units += self.per_step
        self.steps += 1

    def rounds(self, records: list[Round]) -> float:
        """Count rounds that were not counted with a step; the seconds they took."""
        took = sum(r.seconds_encoding + r.seconds_waiting + r.seconds_decoding for r in records)
        self.seconds["rounds"] += took
        return took

    def speed(self, left: int) -> dict[str, float]:
        """Of this session so far, and how long ``left`` more steps will take."""
        here = self.here
        return {"units_per_second": self.per_step * self.steps / here, "seconds_left": here / self.steps * left}

    def shares(self) -> dict[str, float]:
        """Of this session's time; they add up to 1."""
        shares = {kind: seconds / self.here for kind, seconds in self.seconds.items()}
        return {**shares, "other": 1.0 - sum(shares.values())}

    def state_dict(self) -> dict[str, Any]:
        return {"units": self.units, "seconds": self.passed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        units, seconds = state["units"], state["seconds"]
        if not (type(units) is int and units >= 0 and 0.0 <= seconds < math.inf):
            raise ValueError(f"units {units!r}, seconds {seconds!r}")
        self.units, self.earlier = units, seconds
