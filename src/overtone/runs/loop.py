"""The one training loop, whatever carries the messages: a crew of replicas, their feeds, and nothing else.

A crew is a `Cluster` of virtual replicas or this process's own replica in a world of real ones. Who runs the loop
decides what happens between two steps: `simulation.py` shows a bar, `session.py` evaluates, saves and logs.
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
from overtone.tasks import Feed, Samples, Task


class Crew(Protocol):
    """Replicas that step together."""

    @property
    def replicas(self) -> Sequence[Replica]: ...

    def turns(self) -> Iterator[Replica]:
        """Each replica in turn, with its own random state in force."""
        ...

    def step(self, *, clip: float | None) -> list[Round]: ...


class Own:
    """This process's replica: a crew of one, whose peers are elsewhere."""

    def __init__(self, replica: Replica) -> None:
        self.replicas = [replica]

    def turns(self) -> Iterator[Replica]:
        yield from self.replicas

    def step(self, *, clip: float | None) -> list[Round]:
        record = self.replicas[0].step(clip=clip)
        return [] if record is None else [record]


@dataclass(frozen=True)
class Step:
    """What one local step of the whole crew did."""

    count: int  # local steps since the beginning, this one included
    losses: list[Tensor]  # of each replica, on the device
    rounds: list[Round]  # each replica's record, if the step ended in a round
    seconds_data: float  # getting the batches
    seconds: float  # all of it


def local_steps(
    crew: Crew, task: Task, feeds: Mapping[int, Feed], training: Training, *, begin: int = 0
) -> Iterator[Step]:
    """Train to the end, one local step of every replica at a time. ``feeds`` are by rank."""
    schedule = Schedule(training)
    while begin < training.steps:
        started = time.perf_counter()
        data = 0.0
        losses = []
        for replica in crew.turns():
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
        rounds = crew.step(clip=training.clip)
        for replica in crew.replicas:
            replica.inner.zero_grad()
        begin += 1
        yield Step(begin, losses, rounds, data, time.perf_counter() - started)


def casting(training: Training, device: torch.device) -> torch.autocast | nullcontext[None]:
    if training.precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def to_device(batch: object, device: torch.device) -> object:
    if isinstance(batch, Tensor):
        return batch.to(device)
    return type(batch)(to_device(part, device) for part in batch) if isinstance(batch, tuple | list) else batch


def prepare(model: nn.Module, training: Training, device: torch.device) -> nn.Module:
    """The model as the run wants it: on its device, recomputing or compiled."""
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


@torch.no_grad()
def measure(task: Task, model: nn.Module, samples: Samples, rows: Tensor, batch: int) -> tuple[dict[str, float], int]:
    """Sums of the task's measures over these rows, and how many there were."""
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    sums: dict[str, float] = {}
    for part in rows.split(batch) if len(rows) else ():
        for name, mean in task.measure(model, to_device(samples.batch(part, None), device)).items():
            sums[name] = sums.get(name, 0.0) + mean * len(part)
    model.train(training)
    return sums, len(rows)


def evaluate(task: Task, model: nn.Module, batch: int = 64) -> dict[str, float]:
    """The task's metrics over all validation samples."""
    sums, count = measure(task, model, task.valid, torch.arange(len(task.valid)), batch)
    return task.summary({name: total / count for name, total in sums.items()})
