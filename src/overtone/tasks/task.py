"""What a task is: a model to train, samples to train it on, and a measure of how well it does.

A task of your own is a Python file with a function ``task(options)`` that returns an object of a subclass of `Task`;
examples/own_task.py is one in forty lines, and docs/tasks.md tells the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from overtone.tasks.sharding import Dealt, Deck, Feed, Samples

Batch = Any  # whatever the task's own samples give and its own loss takes: a tensor, or a tuple of them


class Task(ABC):
    """The four things to say of a task are ``train``, ``valid``, `model` and `loss`; the rest has an answer already."""

    name: str
    unit: str = "samples"  # what speed is counted in
    train: Samples
    valid: Samples
    keys: Tensor | None = None  # (len(train),): what skewed shards are sorted by, such as the label

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model with random weights, from torch's own dice."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean over the batch, to call `backward` on."""

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        """Means over a batch of validation samples; "loss" is among them."""
        return {"loss": float(self.loss(model, batch))}

    def summary(self, means: Mapping[str, float]) -> dict[str, float]:
        """The metrics to report, from the means over all validation samples."""
        return dict(means)

    def units(self) -> int:
        """Units in one training sample: tokens of a window; a sample is one unit otherwise."""
        return 1

    def feed(self, rank: int, replicas: int, *, batch: int, seed: int, skew: float) -> Feed:
        """Endless batches of one replica's own samples."""
        deck = Deck(len(self.train), self.keys, seed=seed, skew=skew, name=self.name)
        return Dealt(self.train, deck, rank, replicas, batch=batch)

    def sample(self, model: nn.Module) -> str:  # noqa: ARG002
        """Something the trained model makes, to look at."""
        return ""

    def export(self, model: nn.Module, folder: Path) -> None:
        """The trained model into ``folder``, in the form that others load. Here: its weights by name."""
        save_weights(model, folder)

    def about(self) -> dict[str, object]:
        """For the run log: enough to see whether two runs had the same data."""
        return {"name": self.name, "train_samples": len(self.train), "valid_samples": len(self.valid)}


def save_weights(model: nn.Module, folder: Path) -> None:
    from safetensors.torch import save_model  # when there is something to save: a simulation needs no such library

    save_model(model, str(folder / "model.safetensors"))


class Tensors:
    """Samples that are rows of tensors in memory."""

    def __init__(self, *columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def batch(self, rows: Tensor, dice: torch.Generator | None) -> Batch:  # noqa: ARG002
        picked = tuple(column[rows] for column in self.columns)
        return picked if len(picked) > 1 else picked[0]
