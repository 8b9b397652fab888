"""The training loop, the same for real runs and simulations.

It drives `Replicas`: a `Cluster` of virtual replicas, or the `SingleReplica` of a process whose peers are other
processes. The caller decides what happens between two steps: it evaluates, saves and logs.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from overtone.errors import ConfigError
from overtone.ledger import Round
from overtone.replica import Replica
from overtone.runs.config import Training
from overtone.runs.optimizers import Schedule
from overtone.tasks import Feed, Task


class Replicas(Protocol):
    """Replicas of this process that step together."""

    @property
    def replicas(self) -> Sequence[Replica]:
        """All of them, by rank."""
        ...

    def turns(self) -> Iterator[Replica]:
        """Each replica in turn, with its own random state in force."""
        ...

    def step(self, *, clip: float | None) -> list[Round]:
        """One step of each replica; the records of their rounds, if the step ended in one."""
        ...

    @property
    def progress(self) -> int:
        """How many local steps of the run are done."""
        ...


class SingleReplica:
    """The one replica of this process. Its peers are in other processes."""

    def __init__(self, replica: Replica) -> None:
        self.replicas = [replica]

    def turns(self) -> Iterator[Replica]:
        """The replica; the random state of the process is its own."""
        yield from self.replicas

    def step(self, *, clip: float | None) -> list[Round]:
        """One step of the replica."""
        record = self.replicas[0].step(clip=clip)
        return [] if record is None else [record]

    @property
    def progress(self) -> int:
        """That of the replica."""
        return self.replicas[0].progress


@dataclass(frozen=True)
class Step:
    """What one local step of all replicas did."""

    before: int  # local steps of the run before this one
    count: int  # and after it: one more, except in a run in a store, where the rounds count
    losses: list[Tensor]  # the loss of each replica, on its device
    rounds: list[Round]  # the record of each replica, if the step ended in a round
    seconds_data: float  # to get the batches
    seconds: float  # of the whole step

    def passed(self, every: int) -> bool:
        """True if a multiple of so many steps was reached."""
        return self.count // every > self.before // every


def local_steps(replicas: Replicas, task: Task, feeds: Mapping[int, Feed], training: Training) -> Iterator[Step]:
    """Train to the end, one local step of every replica at a time. ``feeds`` are by rank."""
    schedule = Schedule(training)
    while (begin := replicas.progress) < training.steps:
        started = time.perf_counter()
        data = 0.0
        losses = []
        for replica in replicas.turns():
            schedule.set(replica.inner, begin)
            total = torch.zeros((), device=replica.device)
            for _ in range(training.accumulate):
                asked = time.perf_counter()
                batch = to_device(feeds[replica.transport.rank].next(), replica.device)
                data += time.perf_counter() - asked
                with casting(training, replica.device):
                    loss = task.loss(replica.model, batch) / training.accumulate
                loss.backward()
                total += loss.detach()
            losses.append(total)
        rounds = replicas.step(clip=training.clip)
        for replica in replicas.replicas:
            replica.inner.zero_grad()
        yield Step(begin, replicas.progress, losses, rounds, data, time.perf_counter() - started)


def casting(training: Training, device: torch.device) -> torch.autocast | nullcontext[None]:
    """The context for the forward pass: bf16 autocast, or nothing."""
    if training.precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def to_device(batch: object, device: torch.device) -> object:
    """The batch with all its tensors on this device."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    return type(batch)(to_device(part, device) for part in batch) if isinstance(batch, tuple | list) else batch


def prepare(model: nn.Module, training: Training, device: torch.device) -> nn.Module:
    """The model, ready to train: on its device, with gradient checkpointing or compiled if the run asks for it."""
    model.to(device).train()
    if training.recompute:
        if not getattr(model, "supports_gradient_checkpointing", False):
            raise ConfigError(
                f"recompute: {type(model).__name__} does not support gradient checkpointing; leave it out"
            )
        model.gradient_checkpointing_enable(  # type: ignore[operator]
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    if training.compile:
        model.compile()
    return model
