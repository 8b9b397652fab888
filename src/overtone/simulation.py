"""The whole run of `overtone simulate`: K virtual replicas in one process."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from overtone import optimisers, settings
from overtone.config import Simulation
from overtone.network import Link
from overtone.replica import Replica
from overtone.simulate import Cluster
from overtone.tasks import load_task
from overtone.train import evaluate, local_steps, prepare
from overtone.version import __version__

Progress = Callable[[int, float], None]  # local steps done, newest training loss of replica 0


def simulate(config: Simulation, progress: Progress | None = None) -> dict[str, Any]:
    """Train, finish, evaluate; the result is repeatable to the bit but for ``wall_seconds``."""
    begin = time.perf_counter()
    method = config.choice.build()
    task = load_task(config.task)
    training, network = config.training.resolved(), config.network
    feeds = {
        rank: task.feed(rank, config.replicas, batch=training.batch, seed=config.seed, skew=config.task.skew)
        for rank in range(config.replicas)
    }

    def build(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:  # noqa: ARG001 (rank 0's weights win)
        model = prepare(task.model(), training, torch.device("cpu"))
        return model, optimisers.build(model, training)

    cluster = Cluster(
        build,
        method,
        replicas=config.replicas,
        links=Link(bandwidth=network.bandwidth * 1e6, latency=network.latency / 1e3),
        step_seconds=network.step_seconds,
        seed=config.seed,
    )
    for step in local_steps(cluster, task, feeds, training):
        if progress is not None:
            progress(step.count, float(step.losses[0]))

    first = cluster.replicas[0]
    rounds = first.rounds
    with first.anchor() as shared:
        at_anchor = evaluate(task, shared)
    mean = average_model(cluster.replicas)
    drift = max_drift(cluster.replicas, mean)
    at_average = evaluate(task, mean)
    finish = cluster.finish()
    metrics = evaluate(task, first.model)
    ledger = first.transport.ledger
    return {
        "method": method.name,
        "numbers": method.numbers(),
        "replicas": config.replicas,
        "every": method.every,
        "steps": training.steps,
        "seed": config.seed,
        "parameters": sum(p.numel() for p in first.model.parameters()),
        "val_loss": metrics["loss"],
        "val_loss_anchor": at_anchor["loss"],
        "val_loss_average": at_average["loss"],
        "metrics": metrics,
        "consensus": method.consensus,
        "bytes_sent": ledger.sent,
        "bytes_finish": ledger.counts["finish"].sent,
        "bytes_setup": ledger.counts["setup"].sent,
        "rounds": rounds,
        "rounds_finish": len(finish[0]),
        "max_drift": drift,
        "anchor_fingerprint": first.fingerprint,
        "simulated_seconds": cluster.clock,
        "units_per_replica": training.steps * training.samples * task.units(),
        "unit": task.unit,
        "data": task.about(),
        "task": settings.flat(config.task),
        "training": asdict(training),
        "network": asdict(network),
        "versions": {"overtone": __version__, "torch": torch.__version__},
        "wall_seconds": time.perf_counter() - begin,
    }


@torch.no_grad()
def average_model(replicas: Sequence[Replica]) -> nn.Module:
    """A model with the mean of the replicas' weights (and floating buffers)."""
    mean = copy.deepcopy(replicas[0].model)
    states = [replica.model.state_dict() for replica in replicas]
    for name, tensor in mean.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(torch.stack([state[name].float() for state in states]).mean(dim=0))
    return mean


@torch.no_grad()
def max_drift(replicas: Sequence[Replica], mean: nn.Module) -> float:
    """The largest distance of a replica's weights to their mean, relative to the mean's norm."""
    centre = nn.utils.parameters_to_vector(mean.parameters())
    distances = [
        float((nn.utils.parameters_to_vector(replica.model.parameters()) - centre).norm()) for replica in replicas
    ]
    return max(distances) / float(centre.norm())
