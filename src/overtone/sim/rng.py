"""Random states that belong to one replica of many in a process."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


class Randomness:
    """One replica's random states, swapped in for its turn."""

    def __init__(self, seed: int) -> None:
        outside = states()
        seed_all(seed)
        self.own = states()
        set_states(outside)

    def __enter__(self) -> None:
        self.outside = states()
        set_states(self.own)

    def __exit__(self, *exc: object) -> None:
        self.own = states()
        set_states(self.outside)


def seed_all(seed: int) -> None:
    """The dice of one replica; `seed_of` keeps those of different ranks apart."""
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None and hasattr(numpy, "random"):
        numpy.random.seed(seed % 2**32)


def seed_of(run: int, rank: int) -> int:
    return run * 1_000_003 + rank


def states() -> dict[str, Any]:
    """The global random states of this process, to go on from."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [],  # of the current device
        "python": random.getstate(),
        "numpy": _numpy_state(),
    }


def set_states(saved: Mapping[str, Any]) -> None:
    torch.set_rng_state(saved["torch"])
    random.setstate(saved["python"])
    if saved["numpy"] and (numpy := sys.modules.get("numpy")) is not None:
        name, key, *rest = saved["numpy"]
        numpy.random.set_state((name, key.numpy().astype("uint32"), *rest))
    if saved["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"][0])


def _numpy_state() -> list[Any]:
    """Of numpy's global dice, if anybody has loaded it; tasks of users may throw them."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not hasattr(numpy, "random"):
        return []
    name, key, *rest = numpy.random.get_state()
    return [name, torch.from_numpy(key.astype("int64")), *rest]
