"""Validation: metrics of the model that all replicas share, of each replica, and of the mean of all replicas.

A real run uses `RankEvaluator`: each process holds one replica, and the processes exchange what they measured. A
simulation uses `ClusterEvaluator`: one process holds all replicas, and nothing is exchanged. Both measure with
`measure` and average with `share_of` and `mean_of`.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from overtone.ledger import Count
from overtone.replica import Replica
from overtone.runs.coordination import Coordinator
from overtone.runs.events import Evaluation
from overtone.runs.loop import to_device
from overtone.sim.cluster import Cluster
from overtone.tasks import Samples, Task


@torch.no_grad()
def measure(task: Task, model: nn.Module, samples: Samples, rows: Tensor, batch: int) -> tuple[dict[str, float], int]:
    """Sums of the task's measures over these rows of the samples, and how many rows there were."""
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
    """The metrics of one model over all validation samples."""
    sums, count = measure(task, model, task.valid, torch.arange(len(task.valid)), batch)
    return task.summary({name: total / count for name, total in sums.items()})


class RankEvaluator:
    """Evaluates a real run, in which every process holds one replica."""

    def __init__(self, task: Task, replica: Replica, coordinator: Coordinator, *, batch: int) -> None:
        self.task = task
        self.replica = replica
        self.coordinator = coordinator
        self.batch = max(64, batch)

    def evaluate(self, *, average: bool = False) -> Evaluation:
        """Evaluate the shared model; each rank measures its part of the samples. A collective.

        Without consensus there is no shared model: every rank measures all samples with its own replica, and the
        metrics are those of replica 0. ``average`` then also evaluates the mean of all replicas.
        """
        consensus = self.replica.method.consensus
        rank, size = self.coordinator.transport.rank, self.coordinator.transport.size
        rows = torch.arange(len(self.task.valid))
        with self.replica.anchor() as model:
            sums, count = measure(
                self.task, model, self.task.valid, rows[rank::size] if consensus else rows, self.batch
            )
        gathered = self.coordinator.all_gather([sums, count])
        parts = gathered if consensus else gathered[:1]
        names = dict.fromkeys(name for part, _ in parts for name in part)
        total = sum(count for _, count in parts)
        means = {name: sum(part.get(name, 0.0) for part, _ in parts) / total for name in names}
        found: Evaluation = {"metrics": self.task.summary(means)}
        if not consensus:
            found["losses"] = [part["loss"] / count for part, count in gathered]
            if average and self.replica.method.every is not None:
                self._evaluate_average(found)
        return found

    def _evaluate_average(self, found: Evaluation) -> None:
        """The mean takes a dense sum of all weights. It is counted as upkeep: the method itself does not need it."""
        model, transport = self.replica.model, self.replica.transport
        count = Count()
        mean = mean_of(transport.sum(share_of(model, transport.size), count=count))
        transport.ledger.add("upkeep", count)
        found["drift"] = max(self.coordinator.all_gather(drift_of(model, mean)))
        found["metrics_average"] = evaluate(self.task, with_values(model, mean))


class ClusterEvaluator:
    """Evaluates a simulation, in which one process holds all replicas."""

    def __init__(self, task: Task, cluster: Cluster) -> None:
        self.task = task
        self.cluster = cluster

    def evaluate(self, *, average: bool = False) -> Evaluation:
        """Evaluate the shared model (without consensus: replica 0) and the drift; with ``average`` also the mean of all
        replicas."""
        replicas = self.cluster.replicas
        with replicas[0].anchor() as shared:
            metrics = evaluate(self.task, shared)
        shares = [share_of(replica.model, len(replicas)) for replica in replicas]
        mean = mean_of(torch.stack(shares).sum(dim=0))
        found: Evaluation = {
            "metrics": metrics,
            "drift": max(drift_of(replica.model, mean) for replica in replicas),
        }
        if average:
            found["metrics_average"] = evaluate(self.task, with_values(replicas[0].model, mean))
        return found


# -- the mean of all replicas ----------------------------------------------------------------------------------------


@torch.no_grad()
def flat(model: nn.Module) -> Tensor:  # (weights and statistics,) float32
    """All parameters, then all floating buffers, as one vector."""
    return torch.cat([tensor.detach().float().flatten() for tensor in _floating(model)])


def share_of(model: nn.Module, replicas: int) -> Tensor:
    """A replica's summand of the mean. It is divided before the sum, so that the sum cannot overflow."""
    return flat(model) / replicas


def mean_of(total: Tensor) -> Tensor:
    """The mean, from the sum of all shares. A mask of the lowest float stays finite, however the sum was rounded."""
    limits = torch.finfo(total.dtype)
    return total.clamp(limits.min, limits.max)


@torch.no_grad()
def with_values(model: nn.Module, values: Tensor) -> nn.Module:
    """A copy of the model with these values, in the order of `flat`; integer buffers stay as they are."""
    other = copy.deepcopy(model)
    tensors = _floating(other)
    for tensor, part in zip(tensors, values.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
    return other


@torch.no_grad()
def drift_of(model: nn.Module, mean: Tensor) -> float:
    """The distance of the parameters from their mean, relative to the norm of the mean."""
    count = sum(p.numel() for p in model.parameters())
    return float((flat(model)[:count] - mean[:count]).norm() / mean[:count].norm())


def _floating(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *(buffer for buffer in model.buffers() if buffer.is_floating_point())]
