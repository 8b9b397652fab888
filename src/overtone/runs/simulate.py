"""The whole run of `overtone simulate`: K virtual replicas in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from overtone.errors import ConfigError, GaveUpError
from overtone.runs import directory, log, optimizers, spectrum, toml
from overtone.runs.advice import warn_of_few_rounds
from overtone.runs.config import Simulation
from overtone.runs.evaluate import ClusterEvaluator, evaluate
from overtone.runs.events import Ending, Finish
from overtone.runs.loop import Step, local_steps, prepare
from overtone.runs.recorder import RunRecorder, beginning
from overtone.runs.timing import RunTimer
from overtone.sim.cluster import Cluster
from overtone.tasks import Task, load_task
from overtone.version import __version__

Progress = Callable[[int, float], None]  # local steps done, newest training loss of replica 0


def simulate(config: Simulation, progress: Progress | None = None) -> dict[str, Any]:
    """Train, finish, evaluate. The result is repeatable to the bit, except for ``wall_seconds``."""
    begun = time.perf_counter()
    config = config.resolved()
    spectrum.refuse_unfit(config.spectrum, config.choice.build())
    if config.spectrum and config.out is None:
        raise ConfigError(f"spectrum={config.spectrum}: there is no directory for its records; give one with --out")
    with ExitStack() as stack:
        if config.out is not None:
            directory.refuse_used(config.out, "choose another --out")
            stack.enter_context(directory.claim(config.out))
        task = load_task(config.task)
        feeds = {
            rank: task.feed(rank, config.replicas, batch=config.training.batch, seed=config.seed, skew=config.task.skew)
            for rank in range(config.replicas)
        }
        cluster = _cluster(config, task)
        warn_of_few_rounds(cluster.replicas[0], config.training.steps)
        recorder = _recorder(config, task, cluster)
        stack.callback(recorder.close)
        recorder.seconds_starting = time.perf_counter() - begun
        steps = local_steps(cluster, task, feeds, config.training)
        try:
            closing = _train(config, steps, ClusterEvaluator(task, cluster), recorder, progress)
        except GaveUpError as error:
            recorder.fail(error)
            raise
    return {**_result(config, task, cluster, closing), "wall_seconds": time.perf_counter() - begun}


def _cluster(config: Simulation, task: Task) -> Cluster:
    training, network = config.training, config.network

    def build(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:  # noqa: ARG001 (all begin with rank 0's weights)
        model = prepare(task.model(), training, torch.device("cpu"))
        return model, optimizers.build(model, training)

    return Cluster(
        build,
        config.choice.build(),
        replicas=config.replicas,
        links=network.link,
        step_seconds=network.step_seconds,
        seed=config.seed,
    )


def _recorder(config: Simulation, task: Task, cluster: Cluster) -> RunRecorder:
    """Writes the events of replica 0, if the user asked for a log. Virtual time counts from the first step."""
    first, setup = cluster.replicas[0], cluster.clock
    timer = RunTimer(config.training.samples * task.units() * config.replicas, virtual=True)
    recorder = RunRecorder(first, timer, steps=config.training.steps, virtual_clock=lambda: cluster.clock - setup)
    if config.out is not None:
        recorder.open(log.RunLog(config.out))
        spectrum.attach(first, config.out, steps=config.training.steps, looks=config.spectrum)
        recorder.start(beginning(config, task, first, [log.this_host(first.device)], config.out))
    return recorder


def _train(
    config: Simulation,
    steps: Iterator[Step],
    evaluator: ClusterEvaluator,
    recorder: RunRecorder,
    progress: Progress | None,
) -> Finish:
    """Train to the end and finish; return the event that closes the log."""
    timer = recorder.timer
    assert config.eval_every is not None
    for step in steps:
        timer.count(step)
        recorder.step(step, due=step.passed(config.log_every))
        if recorder.is_open and step.passed(config.eval_every) and step.count < config.training.steps:
            with timer.during("evaluation"):
                found = evaluator.evaluate(average=not evaluator.cluster.method.consensus)
            recorder.evaluation(found)
        if progress is not None:
            progress(step.count, float(step.losses[0]))
    return _finish(evaluator, recorder)


def _finish(evaluator: ClusterEvaluator, recorder: RunRecorder) -> Finish:
    """The last messages, and the event that closes the log. Drift and average are those before the last messages."""
    cluster, timer = evaluator.cluster, recorder.timer
    with timer.during("evaluation"):
        found = evaluator.evaluate(average=True)
    ending: Ending = {**recorder.last_messages(cluster.finish), "metrics_anchor": found["metrics"]}
    with timer.during("evaluation"):
        found["metrics"] = evaluate(evaluator.task, cluster.replicas[0].model)
    return recorder.finish(found, ending)


def _result(config: Simulation, task: Task, cluster: Cluster, closing: Finish) -> dict[str, Any]:
    """The answer of `overtone simulate --json`."""
    first, training, method = cluster.replicas[0], config.training, cluster.method
    ledger = first.transport.ledger
    return {
        "method": method.name,
        "numbers": method.numbers(),
        "replicas": config.replicas,
        "every": method.every,
        "steps": training.steps,
        "seed": config.seed,
        "parameters": sum(p.numel() for p in first.model.parameters()),
        "val_loss": closing["metrics"]["loss"],
        "val_loss_anchor": closing["metrics_anchor"]["loss"],
        "val_loss_average": closing["metrics_average"]["loss"],
        "metrics": closing["metrics"],
        "consensus": method.consensus,
        "bytes_sent": ledger.sent,
        "bytes_received": ledger.received,
        "bytes_finish": ledger.counts["finish"].sent,
        "bytes_setup": ledger.counts["setup"].sent,
        "rounds": closing["rounds"],
        "rounds_finish": closing["rounds_finish"],
        "max_drift": closing["drift"],
        "anchor_fingerprint": first.fingerprint,
        "simulated_seconds": cluster.clock,
        "units_per_replica": training.steps * training.samples * task.units(),
        "unit": task.unit,
        "data": task.about(),
        "task": toml.flat(config.task),
        "training": asdict(training),
        "network": asdict(config.network),
        "versions": {"overtone": __version__, "torch": torch.__version__},
    }
