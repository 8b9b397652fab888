"""Who trains on which samples: shards that are disjoint, the same on every start, and exact to resume.

A deck is dealt to K replicas once, for the whole run; each goes through its own shard in a new random order every
epoch. Everything follows from the seed and a position, so a position is all there is to save. When the number of
replicas changes in the middle of an epoch, the samples that nobody has seen yet are dealt anew among the new ones, so
that the epoch still shows each sample once; the next epoch deals the whole deck.
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

MOST_CUTS = 1000  # changes of the number of replicas within one epoch: each takes as long as a deal
EPOCHS = 10**12


class Samples(Protocol):
    """Samples that can be asked for by number."""

    def __len__(self) -> int: ...

    def batch(self, rows: Tensor, dice: torch.Generator | None) -> Any:
        """The samples with these numbers. ``dice`` is for augmentation; None (validation) asks for them as they are."""
        ...


class Feed(Protocol):
    """Endless batches of one replica. Its state is small and plain (fit for JSON)."""

    def next(self) -> Any: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class Position:
    """Where all replicas are in their shards."""

    epoch: int = 0
    taken: int = 0  # samples that each replica has taken of its shard in this epoch
    cuts: tuple[tuple[int, int], ...] = ()  # (replicas, taken) of each earlier deal of this epoch


class Deck:
    """Samples 0 to n − 1 and how they are dealt. ``skew`` 0 deals at random; 1 gives each replica a contiguous part in
    the order of ``keys``; between, that share of the samples is dealt by key and the rest at random."""

    def __init__(self, size: int, keys: Tensor | None, *, seed: int, skew: float, name: str) -> None:
        if not 0.0 <= skew <= 1.0:
            raise TaskError(f"skew={skew}: from 0 (random shards) to 1 (sorted ones)")
        self.size = size
        self.keys = torch.arange(size) if keys is None else keys
        self.seed = seed
        self.skew = skew
        self.name = name

    def shards(self, rows: Tensor, replicas: int) -> list[Tensor]:
        """Every row to exactly one replica; nobody has two more than another."""
        mixed = rows[torch.randperm(len(rows), generator=dice_for(self.seed, "deal"))]
        by_key = round(self.skew * len(rows))
        skewed = mixed[:by_key]
        skewed = skewed[torch.sort(self.keys[skewed], stable=True).indices]
        of_key, in_all = _evenly(by_key, replicas), _evenly(len(rows), replicas)
        rest = [whole - part for whole, part in zip(in_all, of_key, strict=True)]
        pairs = zip(skewed.split(of_key), mixed[by_key:].split(rest), strict=True)
        return [torch.cat(pair) for pair in pairs]

    def order(self, position: Position, rank: int, replicas: int) -> tuple[Tensor, int]:
        """A replica's samples of this epoch in the order they are taken, and how many each replica has at least."""
        rows = torch.arange(self.size)
        for earlier, taken in position.cuts:
            left = [self._shuffled(s, position.epoch, r)[taken:] for r, s in enumerate(self.shards(rows, earlier))]
            rows = torch.cat(left).sort().values
        shards = self.shards(rows, replicas)
        return self._shuffled(shards[rank], position.epoch, rank), min(map(len, shards))

    def _shuffled(self, shard: Tensor, epoch: int, rank: int) -> Tensor:
        return shard[torch.randperm(len(shard), generator=dice_for(self.seed, "order", epoch, rank, len(shard)))]


def _evenly(count: int, parts: int) -> list[int]:
    return [count // parts + (part < count % parts) for part in range(parts)]


class Dealt:
    """One replica's share of a deck, batch by batch. All replicas take equally many, so that no one runs ahead: what
    does not fill everybody's last batch is left for another epoch's order."""

    def __init__(self, samples: Samples, deck: Deck, rank: int, replicas: int, *, batch: int) -> None:
        if deck.size // replicas < batch:
            raise TaskError(
                f"{deck.name}: {deck.size} training samples give each of {replicas} replicas "
                f"{deck.size // replicas}, fewer than one batch of {batch}; use more data, a smaller batch or "
                "fewer replicas"
            )
        self.samples = samples
        self.deck = deck
        self.rank = rank
        self.replicas = replicas
        self.batch = batch
        self.position = Position()
        self._order, self._length = self._arrange()
        # Samples that must be decoded first are fetched one batch ahead, while the model computes.
        self._pool = ThreadPoolExecutor(1) if getattr(samples, "slow", False) else None
        self._ahead: tuple[Position, Future[Any]] | None = None

    def next(self) -> Any:
        here = self._here()
        found = self._ahead[1].result() if self._ahead and self._ahead[0] == here else self._fetch(here)
        self.position = Position(here.epoch, here.taken + self.batch, here.cuts)
        if self._pool is not None:
            ahead = self._here()
            self._ahead = ahead, self._pool.submit(self._fetch, ahead)
        return found

    def _here(self) -> Position:
        """The position to take from: this one, or the start of the next epoch."""
        while self.position.taken + self.batch > self._length:
            self.position = Position(self.position.epoch + 1)
            self._order, self._length = self._arrange()
        return self.position

    def _fetch(self, at: Position) -> Any:
        rows = self._order[at.taken : at.taken + self.batch]
        return self.samples.batch(
            rows, dice_for(self.deck.seed, "augment", at.epoch, at.taken, self.rank, self.replicas)
        )

    def _arrange(self) -> tuple[Tensor, int]:
        return self.deck.order(self.position, self.rank, self.replicas)

    def _is_deal(self, replicas: object, taken: object) -> bool:
        """A number of replicas among whom the deck could be dealt, and of samples that each of them could take."""
        return replicas != 0 and _count(replicas, self.deck.size) and _count(taken, self.deck.size)

    def state_dict(self) -> dict[str, Any]:
        p = self.position
        return {"epoch": p.epoch, "taken": p.taken, "cuts": list(map(list, p.cuts)), "replicas": self.replicas}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        deals = [*state["cuts"], (state["replicas"], state["taken"])]
        if (
            len(deals) > MOST_CUTS
            or not all(self._is_deal(*deal) for deal in deals)
            or not _count(state["epoch"], EPOCHS)
        ):
            raise TaskError(
                f"saved position in {self.deck.name}: {shortened(state)} is none of {self.deck.size} samples"
            )
        cuts = tuple((k, taken) for k, taken in deals[:-1])
        self.position = Position(state["epoch"], state["taken"], cuts)
        if state["replicas"] != self.replicas:
            self.position = Position(self.position.epoch, 0, (*cuts, (state["replicas"], self.position.taken)))
        self._ahead = None
        self._order, self._length = self._arrange()


def _count(value: object, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def dice_for(*what: object) -> torch.Generator:
    """A generator of its own for every purpose, the same on every start."""
    seed = int.from_bytes(fingerprint.of_text(repr(what)), "little") >> 1
    return torch.Generator().manual_seed(seed)
