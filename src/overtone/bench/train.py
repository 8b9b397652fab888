"""`overtone bench train`: the training loop's speed, as ratios within one run.

`ddp` against torch's own `DistributedDataParallel`, in real processes, and one replica against the bare loop, all on
the same model and batches. The contestants take turns in short segments, so that a machine that slows down slows both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from overtone.methods import ddp, decoupled
from overtone.replica import Replica
from overtone.runs import optimizers
from overtone.runs.config import TrainBench, Training
from overtone.runs.coordination import Coordinator
from overtone.runs.loop import SingleReplica, local_steps
from overtone.tasks import Task, load_task
from overtone.transport import Solo, Transport
from overtone.world.join import connect

Segment = Callable[[], float]  # runs some steps; seconds they took


def run(bench: TrainBench) -> dict[str, Any]:
    """This rank's part; the report is the same on every rank."""
    transport = connect()
    task = load_task(bench.task)
    training = Training(steps=10**9, batch=bench.batch, warmup=0, schedule="constant", inner_lr=1e-3)
    tell = Coordinator(transport).all_gather
    found: dict[str, dict[str, float]] = {}
    if transport.size > 1:
        theirs = _bare(task, training, bench.steps, transport, around=DistributedDataParallel)
        ours = _ours(task, training, bench.steps, transport, ddp())
        found["ddp against torch's DistributedDataParallel"] = _race(ours, theirs, bench.segments, tell)
    # On replica 0 alone, while the others wait: all at once would measure how they share the machine.
    alone = None
    if transport.rank == 0:
        bare = _bare(task, training, bench.steps, Solo())
        one = _ours(task, training, bench.steps, Solo(), decoupled())
        alone = _race(one, bare, bench.segments, lambda value: [value])
    found["one replica (decoupled) against the bare loop"] = tell(alone)[0]
    per_segment = bench.steps * bench.batch * task.units()
    return {
        "rank": transport.rank,
        "replicas": transport.size,
        "parameters": sum(p.numel() for p in task.model().parameters()),
        "steps_per_segment": bench.steps,
        "segments": bench.segments,
        "unit": task.unit,
        "races": {
            name: {
                "ratio": race["ratio"],
                "ours_per_second": per_segment / race["ours"],
                "theirs_per_second": per_segment / race["theirs"],
            }
            for name, race in found.items()
        },
    }


def _race(ours: Segment, theirs: Segment, segments: int, tell: Callable[[Any], list[Any]]) -> dict[str, float]:
    """Median seconds of each, and the median of the ratios of neighbours; the slowest rank's time counts."""
    for warm_up in (theirs, ours):
        warm_up()
    pairs = []
    for turn in range(segments):
        times = {}
        for who in (ours, theirs) if turn % 2 else (theirs, ours):
            tell("ready")
            times[who] = max(tell(who()))
        pairs.append((times[ours], times[theirs]))
    return {
        "ours": median(mine for mine, _ in pairs),
        "theirs": median(other for _, other in pairs),
        "ratio": median(other / mine for mine, other in pairs),
    }


def _ours(task: Task, training: Training, steps: int, transport: Transport, method: Any) -> Segment:
    model = _model(task)
    replica = Replica(model, optimizers.build(model, training), method, transport)
    feed = task.feed(transport.rank, transport.size, batch=training.batch, seed=0, skew=0.0)
    loop = local_steps(SingleReplica(replica), task, {transport.rank: feed}, training)

    def segment() -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            next(loop)
        return time.perf_counter() - begin

    return segment


def _bare(
    task: Task,
    training: Training,
    steps: int,
    transport: Transport,
    around: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Segment:
    """The loop as anyone writes it, around a model of torch's own making."""
    model = _model(task)
    inner = optimizers.build(model, training)
    trained = around(model)
    feed = task.feed(transport.rank, transport.size, batch=training.batch, seed=0, skew=0.0)

    def segment() -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            task.loss(trained, feed.next()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), training.clip)
            inner.step()
            inner.zero_grad()
        return time.perf_counter() - begin

    return segment


def _model(task: Task) -> nn.Module:
    torch.manual_seed(0)
    return task.model().train()


def markdown(report: dict[str, Any]) -> str:
    unit = report["unit"]
    lines = [
        f"{report['parameters']:,} parameters, {report['replicas']} replicas; medians of {report['segments']} segments "
        f"of {report['steps_per_segment']} steps, taken in turns.",
        "",
        f"| | ratio | overtone, {unit}/s per replica | the other, {unit}/s per replica |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {race['ratio']:.3f} | {race['ours_per_second']:,.0f} | {race['theirs_per_second']:,.0f} |"
        for name, race in report["races"].items()
    ]
    return "\n".join(lines)
