"""Batches of a replica in a store, whose members share the samples of an epoch by leases (swarm/leases.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from overtone.errors import TaskError
from overtone.swarm.store import Store
from overtone.tasks import Feed, ShardedFeed
from overtone.tasks.sharding import generator_for


def units_of(feed: Feed, name: str, per_step: int) -> int:
    """How many local steps an epoch has, if one replica takes all of them."""
    if not isinstance(feed, ShardedFeed):
        raise TaskError(
            f"data {name}: read in an order of its own, so the members of a store cannot share it; give files, or "
            "train without --store"
        )
    size: int = feed.sampler.size
    if feed.sampler.skew:
        raise TaskError(f"skew={feed.sampler.skew}: members of a store share all samples as they come; leave it out")
    if size < per_step:
        raise TaskError(f"data {name}: {size} training samples, and a step takes {per_step}; use more data")
    return size // per_step


class LeasedFeed:
    """Endless batches of one member: of the units that the store leases to it.

    Every member orders the samples of an epoch alike, by the seed and the epoch. Unit u is the u-th part of them, as
    many as a local step takes. What fills no last unit is left out of this epoch.
    """

    def __init__(self, feed: ShardedFeed, store: Store, *, accumulate: int) -> None:
        self.samples, self.sampler, self.batch = feed.samples, feed.sampler, feed.batch
        self.store = store
        self.accumulate = accumulate  # batches of a local step
        self._left: list[torch.Tensor] = []  # batches of the unit that is being used
        self._order = (-1, torch.empty(0, dtype=torch.long))  # of the samples in an epoch
        self._unit = (0, 0)

    def next(self) -> Any:
        """Return the next batch. The first one of a local step takes a unit from the lease."""
        if not self._left:
            self._unit = self.store.next_unit()
            self._left = list(self._rows(*self._unit).split(self.batch))
        rows = self._left.pop(0)
        return self.samples.batch(rows, generator_for(self.sampler.seed, "augment", *self._unit, len(self._left)))

    def _rows(self, epoch: int, unit: int) -> torch.Tensor:
        if self._order[0] != epoch:
            generator = generator_for(self.sampler.seed, "units", epoch)
            self._order = epoch, torch.randperm(self.sampler.size, generator=generator)
        size = self.batch * self.accumulate
        return self._order[1][unit * size : (unit + 1) * size]

    def state_dict(self) -> dict[str, Any]:
        """Nothing: commits say which samples are whose, and the replica's state how many it has used."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Continue. What was left of a unit belonged to a step that was never made."""
        self._left = []
