"""Pauses between two questions to a store: longer and longer, and never in step with those of others."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

SOONEST, LATEST = 0.1, 15.0  # seconds between two questions
LONGEST_BACKOFF = 60.0  # seconds until a store that failed is asked again
SLICE = 0.2  # seconds: the longest time until a signal is heeded


class Pause:
    """The pause before the next question. It ends early when ``is_over`` says so."""

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self.failing = False  # the store did not answer the last question
        self._is_over = is_over
        self._random = random.Random()
        self._seconds = SOONEST

    def reset(self) -> None:
        """Something has come: the next pause is a short one."""
        self._seconds, self.failing = SOONEST, False

    def wait(self) -> None:
        """Nothing has come yet."""
        self.failing = False
        self._sleep(LATEST)

    def fail(self) -> None:
        """The store did not answer."""
        self.failing = True
        self._sleep(LONGEST_BACKOFF)

    def _sleep(self, most: float) -> None:
        end = time.monotonic() + self._seconds * self._random.uniform(0.8, 1.2)
        self._seconds = min(most, 2 * self._seconds)
        while (left := end - time.monotonic()) > 0 and not self._is_over():
            time.sleep(min(left, SLICE))
