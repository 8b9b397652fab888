"""Random states for each of several replicas in one process."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


class Randomness:
    """One replica's random states. As a context manager, it sets them for the replica's turn."""

    def __init__(self, seed: int) -> None:
        outside = states()  # building a replica must not change the caller's random states
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
    """Seed all random generators of this process. `seed_of` gives different seeds to different ranks."""
    torch.manual_seed(seed)
    random.seed(seed)
    # numpy is optional: it is seeded only if another module has imported it.
    if (numpy := sys.modules.get("numpy")) is not None and hasattr(numpy, "random"):
        numpy.random.seed(seed % 2**32)


def seed_of(run: int, rank: int) -> int:
    """The seed of one rank of a run."""
    return run * 1_000_003 + rank


def states() -> dict[str, Any]:
    """The global random states of this process, for a later `set_states`."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [],  # the current device's
        "python": random.getstate(),
        "numpy": _numpy_state(),
    }


def set_states(saved: Mapping[str, Any]) -> None:
    """Set the global random states of this process."""
    torch.set_rng_state(saved["torch"])
    random.setstate(saved["python"])
    if saved["numpy"] and (numpy := sys.modules.get("numpy")) is not None:
        name, key, *rest = saved["numpy"]
        numpy.random.set_state((name, key.numpy().astype("uint32"), *rest))
    if saved["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"][0])


def _numpy_state() -> list[Any]:
    """The state of numpy's global generator, if numpy is loaded: tasks of users may use it."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not hasattr(numpy, "random"):
        return []
    name, key, *rest = numpy.random.get_state()
    # As a tensor: checkpoints hold tensors and JSON values, not numpy arrays.
    return [name, torch.from_numpy(key.astype("int64")), *rest]
