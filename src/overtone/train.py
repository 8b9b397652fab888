"""The run: build, train, evaluate. One training loop, whatever carries the messages."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from overtone import fingerprint
from overtone.config import Simulation, Training
from overtone.network import Link
from overtone.replica import Replica
from overtone.simulate import Cluster
from overtone.tasks.language import ByteTransformer, load_text
from overtone.version import __version__

Progress = Callable[[int, float], None]  # local steps done, newest training loss of replica 0


def simulate(config: Simulation, progress: Progress | None = None) -> dict[str, Any]:
    """The whole run of `overtone simulate`; its result is repeatable to the bit but for ``wall_seconds``."""
    begin = time.perf_counter()
    method = config.choice.build()
    text = load_text(None if config.data is None else str(config.data))
    size, training, network = config.model, config.training.resolved(), config.network
    shards = [
        text.shard(rank, config.replicas, context=size.context, batch=training.batch, seed=config.seed)
        for rank in range(config.replicas)
    ]

    def build(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:  # noqa: ARG001 (rank 0's weights win)
        model = ByteTransformer(size)
        return model, torch.optim.AdamW(
            model.parameters(), lr=training.inner_lr, betas=(0.9, 0.95), weight_decay=training.weight_decay
        )

    cluster = Cluster(
        build,
        method,
        replicas=config.replicas,
        links=Link(bandwidth=network.bandwidth * 1e6, latency=network.latency / 1e3),
        step_seconds=network.step_seconds,
        seed=config.seed,
    )
    schedules = [schedule(replica.inner, training) for replica in cluster.replicas]
    for step in range(training.steps):
        losses = []
        for replica in cluster.turns():
            loss = replica.model(next(shards[replica.transport.rank]))
            loss.backward()
            losses.append(loss.detach())
        cluster.step(clip=training.clip)
        for replica, plan in zip(cluster.replicas, schedules, strict=True):
            replica.inner.zero_grad()
            plan.step()
        if progress is not None:
            progress(step + 1, float(losses[0]))

    valid = text.validation(context=size.context, windows=training.windows)
    first = cluster.replicas[0]
    rounds = first.rounds
    with first.anchor() as shared:
        at_anchor = evaluate(shared, valid)
    mean = average_model(cluster.replicas)
    drift = max_drift(cluster.replicas, mean)
    at_average = evaluate(mean, valid)
    finish = cluster.finish()
    ledger = first.transport.ledger
    return {
        "method": method.name,
        "numbers": method.numbers(),
        "replicas": config.replicas,
        "every": method.every,
        "steps": training.steps,
        "seed": config.seed,
        "parameters": sum(p.numel() for p in first.model.parameters()),
        "val_loss": evaluate(first.model, valid),
        "val_loss_anchor": at_anchor,
        "val_loss_average": at_average,
        "consensus": method.consensus,
        "bytes_sent": ledger.sent,
        "bytes_finish": ledger.counts["finish"].sent,
        "bytes_setup": ledger.counts["setup"].sent,
        "rounds": rounds,
        "rounds_finish": len(finish[0]),
        "max_drift": drift,
        "anchor_fingerprint": first.fingerprint,
        "simulated_seconds": cluster.clock,
        "data": {
            "name": text.name,
            "train_bytes": text.train.numel(),
            "valid_bytes": text.valid.numel(),
            "fingerprint": fingerprint.of_tensors([text.train, text.valid]).hex(),
        },
        "training": asdict(training),
        "model": asdict(size),
        "network": asdict(network),
        "versions": {"overtone": __version__, "torch": torch.__version__},
        "wall_seconds": time.perf_counter() - begin,
    }


def schedule(inner: torch.optim.Optimizer, training: Training) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up, then cosine to a tenth."""
    warmup = training.resolved().warmup or 0

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / max(1, training.steps - warmup)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))

    return torch.optim.lr_scheduler.LambdaLR(inner, factor)


@torch.no_grad()
def evaluate(model: nn.Module, windows: Tensor, batch: int = 64) -> float:
    """Mean loss over all windows."""
    training = model.training
    model.eval()
    total = sum(float(model(part)) * len(part) for part in windows.split(batch))
    model.train(training)
    return total / len(windows)


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
