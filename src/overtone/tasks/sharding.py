"""Which replica trains on which samples: shards that are disjoint, the same on every start, and exact to resume.

A `Sampler` divides the training samples among K replicas. The division holds for the whole run; each replica goes
through its own shard in a new random order every epoch. Everything follows from the seed and a `Position`, so a
checkpoint has to hold nothing else. If the number of replicas changes in the middle of an epoch, the samples that no
replica has seen yet are divided again among the new replicas, so that the epoch still shows each sample once. The next
epoch divides all samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from overtone.coding import fingerprint
from overtone.errors import TaskError, shortened

MAX_DIVISIONS = 1000  # within one epoch; resuming computes each of them again
MAX_EPOCHS = 10**12


class Samples(Protocol):
    """Samples that can be fetched by number."""

    def __len__(self) -> int: ...

    def batch(self, rows: Tensor, generator: torch.Generator | None, /) -> Any:
        """Return the samples with these numbers.

        ``generator`` gives the random numbers for augmentation; None (validation) asks for unchanged samples. Both
        arguments are passed by position, so an implementation may give them other names.
        """
        ...


class Feed(Protocol):
    """Endless batches for one replica. The state is small and plain, so that it can be written as JSON."""

    def next(self) -> Any:
        """Return the next batch."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position from which `next` continues."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a position that `state_dict` returned."""
        ...


@dataclass(frozen=True)
class Position:
    """Where all replicas are in their shards."""

    epoch: int = 0
    taken: int = 0  # samples that each replica has taken from its shard in this epoch
    cuts: tuple[tuple[int, int], ...] = ()  # (replicas, taken) of each earlier division within this epoch


class Sampler:
    """Divides samples 0 to n − 1 among replicas.

    ``skew`` 0 divides them at random. ``skew`` 1 sorts them by ``keys`` and gives each replica a contiguous part.
    Between 0 and 1, that share of the samples is divided by key and the rest at random.
    """

    def __init__(self, size: int, keys: Tensor | None, *, seed: int, skew: float, name: str) -> None:
        if not 0.0 <= skew <= 1.0:
            raise TaskError(f"skew={skew}: must be from 0 (random shards) to 1 (sorted shards)")
        self.size = size
        self.keys = torch.arange(size) if keys is None else keys
        self.seed = seed
        self.skew = skew
        self.name = name

    def shards(self, rows: Tensor, replicas: int) -> list[Tensor]:
        """Give every row to exactly one replica. The sizes of two shards differ by at most one."""
        shuffled = rows[torch.randperm(len(rows), generator=generator_for(self.seed, "deal"))]
        by_key = round(self.skew * len(rows))
        skewed = shuffled[:by_key]
        skewed = skewed[torch.sort(self.keys[skewed], stable=True).indices]
        skewed_sizes, shard_sizes = _even_sizes(by_key, replicas), _even_sizes(len(rows), replicas)
        random_sizes = [whole - part for whole, part in zip(shard_sizes, skewed_sizes, strict=True)]
        pairs = zip(skewed.split(skewed_sizes), shuffled[by_key:].split(random_sizes), strict=True)
        return [torch.cat(pair) for pair in pairs]

    def order(self, position: Position, rank: int, replicas: int) -> tuple[Tensor, int]:
        """Return one replica's samples of this epoch, in the order of use, and the size of the smallest shard."""
        rows = torch.arange(self.size)
        for earlier, taken in position.cuts:
            left = [self._shuffled(s, position.epoch, r)[taken:] for r, s in enumerate(self.shards(rows, earlier))]
            rows = torch.cat(left).sort().values
        shards = self.shards(rows, replicas)
        return self._shuffled(shards[rank], position.epoch, rank), min(map(len, shards))

    def _shuffled(self, shard: Tensor, epoch: int, rank: int) -> Tensor:
        generator = generator_for(self.seed, "order", epoch, rank, len(shard))
        return shard[torch.randperm(len(shard), generator=generator)]


def _even_sizes(count: int, parts: int) -> list[int]:
    return [count // parts + (part < count % parts) for part in range(parts)]


class ShardedFeed:
    """Endless batches from one replica's shard.

    All replicas take equally many samples per epoch, so that none runs ahead. Samples that do not fill a last batch on
    every replica are left out of this epoch; another epoch has another order.
    """

    def __init__(self, samples: Samples, sampler: Sampler, rank: int, replicas: int, *, batch: int) -> None:
        if sampler.size // replicas < batch:
            raise TaskError(
                f"{sampler.name}: {sampler.size} training samples give each of {replicas} replicas "
                f"{sampler.size // replicas}, fewer than one batch of {batch}; use more data, a smaller batch or "
                "fewer replicas"
            )
        self.samples = samples
        self.sampler = sampler
        self.rank = rank
        self.replicas = replicas
        self.batch = batch
        self.position = Position()
        self._order, self._length = self._arrange()
        # Samples that have to be decoded are fetched one batch ahead, while the model computes.
        self._pool = ThreadPoolExecutor(1) if getattr(samples, "slow", False) else None
        self._ahead: tuple[Position, Future[Any]] | None = None

    def next(self) -> Any:
        """Return the next batch of this replica's shard."""
        here = self._here()
        found = self._ahead[1].result() if self._ahead and self._ahead[0] == here else self._fetch(here)
        self.position = Position(here.epoch, here.taken + self.batch, here.cuts)
        if self._pool is not None:
            ahead = self._here()
            self._ahead = ahead, self._pool.submit(self._fetch, ahead)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the position of all replicas: it is the same for each of them."""
        p = self.position
        return {"epoch": p.epoch, "taken": p.taken, "cuts": list(map(list, p.cuts)), "replicas": self.replicas}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position, which may be one of another number of replicas."""
        divisions = [*state["cuts"], (state["replicas"], state["taken"])]
        if (
            len(divisions) > MAX_DIVISIONS
            or not all(self._is_division(*division) for division in divisions)
            or not _is_count(state["epoch"], MAX_EPOCHS)
        ):
            raise TaskError(
                f"saved position in {self.sampler.name}: {shortened(state)} is not a position among "
                f"{self.sampler.size} samples; resume with the data that the run was trained on"
            )
        cuts = tuple((replicas, taken) for replicas, taken in divisions[:-1])
        self.position = Position(state["epoch"], state["taken"], cuts)
        if state["replicas"] != self.replicas:
            # The rest of this epoch is divided again, among as many replicas as there are now.
            self.position = Position(self.position.epoch, 0, (*cuts, (state["replicas"], self.position.taken)))
        self._ahead = None
        self._order, self._length = self._arrange()

    def _here(self) -> Position:
        """Return the position to take a batch from: the current one, or the start of the next epoch."""
        while self.position.taken + self.batch > self._length:
            self.position = Position(self.position.epoch + 1)
            self._order, self._length = self._arrange()
        return self.position

    def _fetch(self, at: Position) -> Any:
        rows = self._order[at.taken : at.taken + self.batch]
        generator = generator_for(self.sampler.seed, "augment", at.epoch, at.taken, self.rank, self.replicas)
        return self.samples.batch(rows, generator)

    def _arrange(self) -> tuple[Tensor, int]:
        return self.sampler.order(self.position, self.rank, self.replicas)

    def _is_division(self, replicas: object, taken: object) -> bool:
        """Whether the samples can be divided among that many replicas, of which each has taken that many."""
        return replicas != 0 and _is_count(replicas, self.sampler.size) and _is_count(taken, self.sampler.size)


def _is_count(value: object, most: int) -> bool:
    return type(value) is int and 0 <= value <= most  # a bool is no count


def generator_for(*purpose: object) -> torch.Generator:
    """Return a generator that is seeded by its purpose: the same on every start, another one for every purpose.

    The purpose decides which random numbers a run gets. To change a word of one ("deal", "order" ...) is to change the
    data order of all runs.
    """
    seed = int.from_bytes(fingerprint.of_text(repr(purpose)), "little") >> 1
    return torch.Generator().manual_seed(seed)
