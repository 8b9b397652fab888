"""The whole run of `overtone simulate`: K virtual replicas in one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from overtone.errors import GaveUpError
from overtone.runs import average, directory, optimizers, records, toml
from overtone.runs import log as runlog
from overtone.runs.config import Simulation
from overtone.runs.loop import Step, evaluate, local_steps, prepare
from overtone.sim.cluster import Cluster
from overtone.sim.network import Link
from overtone.tasks import Task, load_task
from overtone.version import __version__

Progress = Callable[[int, float], None]  # local steps done, newest training loss of replica 0


def simulate(config: Simulation, progress: Progress | None = None) -> dict[str, Any]:
    """Train, finish, evaluate; the result is repeatable to the bit but for ``wall_seconds``."""
    begun = time.perf_counter()
    config = config.resolved()
    method, training, network = config.choice.build(), config.training, config.network
    with ExitStack() as stack:
        if config.out is not None:
            directory.refuse_used(config.out, "choose another --out")
            stack.enter_context(directory.claim(config.out))
        task = load_task(config.task)
        feeds = {
            rank: task.feed(rank, config.replicas, batch=training.batch, seed=config.seed, skew=config.task.skew)
            for rank in range(config.replicas)
        }

        def build(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:  # noqa: ARG001 (rank 0's weights win)
            model = prepare(task.model(), training, torch.device("cpu"))
            return model, optimizers.build(model, training)

        cluster = Cluster(
            build,
            method,
            replicas=config.replicas,
            links=Link(bandwidth=network.bandwidth * 1e6, latency=network.latency / 1e3),
            step_seconds=network.step_seconds,
            seed=config.seed,
        )
        story = Story(config, task, cluster, None if config.out is None else runlog.RunLog(config.out))
        stack.callback(story.close)
        try:
            for step in local_steps(cluster, task, feeds, training):
                story.after(step)
                if progress is not None:
                    progress(step.count, float(step.losses[0]))
            closing = story.finish()
        except GaveUpError as error:
            story.write("fail", why=str(error))
            raise
    first, ledger = cluster.replicas[0], cluster.replicas[0].transport.ledger
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
        "network": asdict(network),
        "versions": {"overtone": __version__, "torch": torch.__version__},
        "wall_seconds": time.perf_counter() - begun,
    }


@dataclass
class Story:
    """What is written of a simulated run while it goes: the records of a real one, as replica 0 would see it."""

    config: Simulation
    task: Task
    cluster: Cluster
    log: runlog.RunLog | None

    def __post_init__(self) -> None:
        self.first = self.cluster.replicas[0]
        self.begun, self.setup = time.perf_counter(), self.cluster.clock
        if self.log is not None:
            hosts = [runlog.this_host(self.first.device)]
            start = records.beginning(self.config, self.cluster.method, self.task, self.first.model, hosts)
            self.write("start", folder=str(self.config.out), **start)

    def write(self, event: str, **values: Any) -> None:
        if self.log is not None:
            self.log.write(event, self.first.steps, **values)

    def close(self) -> None:
        if self.log is not None:
            self.log.close()

    def after(self, step: Step) -> None:
        if self.log is None:
            return
        due = step.count % self.config.log_every == 0
        for record in records.worth_telling(step.rounds[:1], due=due):
            self.write("round", **asdict(record))
        if due:
            self.write("train", loss=float(step.losses[0]), **self._so_far())
        assert self.config.eval_every is not None
        if step.count % self.config.eval_every == 0 and step.count < self.config.training.steps:
            mean = self._mean()
            found = {"metrics": self._at_anchor(), "drift": self._drift(mean), **self._so_far()}
            if not self.cluster.method.consensus:
                found["metrics_average"] = self._at(mean)
            self.write("eval", **found)

    def finish(self) -> dict[str, Any]:
        """The last messages, and the record that closes the log."""
        rounds = self.first.rounds
        before, mean = self._at_anchor(), self._mean()
        drift, at_average = self._drift(mean), self._at(mean)
        last = self.cluster.finish()[0]
        closing = {
            "metrics": evaluate(self.task, self.first.model),
            "metrics_anchor": before,
            "metrics_average": at_average,
            "drift": drift,
            **self._so_far(),
            "rounds": rounds,
            "rounds_finish": len(last),
            "waiting_share": self.first.transport.ledger.waiting / max(self.cluster.clock - self.setup, 1e-9),
            "anchor_fingerprint": self.first.fingerprint,
            "bytes": records.by_phase(self.first.transport.ledger),
        }
        self.write("finish", **closing)
        return closing

    def _so_far(self) -> dict[str, Any]:
        per_step = self.config.training.samples * self.task.units() * len(self.cluster.replicas)
        seconds = time.perf_counter() - self.begun
        found = records.so_far(self.first.transport.ledger, self.first.steps * per_step, seconds)
        return {**found, "simulated_seconds": self.cluster.clock - self.setup}

    def _at_anchor(self) -> dict[str, float]:
        with self.first.anchor() as shared:
            return evaluate(self.task, shared)

    def _at(self, values: Tensor) -> dict[str, float]:
        return evaluate(self.task, average.with_values(self.first.model, values))

    def _mean(self) -> Tensor:
        replicas = self.cluster.replicas
        shares = [average.share_of(replica.model, len(replicas)) for replica in replicas]
        return average.mean_of(torch.stack(shares).sum(dim=0))

    def _drift(self, mean: Tensor) -> float:
        return max(average.drift_of(replica.model, mean) for replica in self.cluster.replicas)
