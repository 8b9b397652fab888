"""A task: a model to train, samples to train it on, and a measure of how well the model does.

A task of your own is a Python file with a function ``task(options)`` that returns an object of a subclass of `Task`.
examples/own_task.py is a whole one in forty lines; docs/tasks.md describes every part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from overtone.tasks.sharding import Feed, Sampler, Samples, ShardedFeed

Batch = Any  # whatever the task's own samples give and its own loss takes: a tensor, or a tuple of tensors


class Task(ABC):
    """A subclass sets ``name``, ``train`` and ``valid`` and defines `model` and `loss`. All else has a default."""

    name: str  # the name of the data, in messages and in the run log
    unit: str = "samples"  # speed is counted in these, per second
    train: Samples
    valid: Samples
    keys: Tensor | None = None  # (len(train),): skewed shards are sorted by these, such as the labels

    @abstractmethod
    def model(self) -> nn.Module:
        """Return a new model with random weights, drawn from torch's global generator."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss over the batch; `backward` is called on it."""

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        """Return means over a batch of validation samples. One of them is called "loss"."""
        return {"loss": float(self.loss(model, batch))}

    def summary(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics to report, computed from the means over all validation samples."""
        return dict(means)

    def units(self) -> int:
        """Return the number of units in one training sample, such as the tokens of a window."""
        return 1

    def feed(self, rank: int, replicas: int, *, batch: int, seed: int, skew: float) -> Feed:
        """Return endless batches of one replica's own samples."""
        sampler = Sampler(len(self.train), self.keys, seed=seed, skew=skew, name=self.name)
        return ShardedFeed(self.train, sampler, rank, replicas, batch=batch)

    def sample(self, model: nn.Module) -> str:  # noqa: ARG002
        """Return a text that the trained model makes, to print at the end of a run; "" prints nothing."""
        return ""

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write the trained model into ``folder``, in a form that other programs load. Default: its weights by name."""
        save_weights(model, folder)

    def about(self) -> dict[str, object]:
        """Return facts for the run log: enough to see whether two runs had the same data."""
        return {"name": self.name, "train_samples": len(self.train), "valid_samples": len(self.valid)}


def save_weights(model: nn.Module, folder: Path) -> None:
    """Write the weights by name into ``folder``/model.safetensors."""
    from safetensors.torch import save_model  # imported here because only an export needs this library

    save_model(model, str(folder / "model.safetensors"))


class Tensors:
    """Samples in memory. Sample i is row i of each tensor; a batch is a tuple, or a tensor if there is only one."""

    def __init__(self, *columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def batch(self, rows: Tensor, generator: torch.Generator | None) -> Batch:  # noqa: ARG002
        """Return these rows of each tensor, without augmentation."""
        picked = tuple(column[rows] for column in self.columns)
        return picked if len(picked) > 1 else picked[0]
