"""The whole run of `overtone train`, as one of its replicas sees it: meet, train, validate, save, log, finish."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console

from overtone import checkpoint, optimisers, randomness, rundir, runlog, settings, track
from overtone.config import Run
from overtone.errors import MismatchError
from overtone.record import Round
from overtone.replica import Replica
from overtone.tasks import Feed, Task, load_task
from overtone.train import Own, Step, local_steps, measure, prepare
from overtone.transport import connect
from overtone.upkeep import Pulse, Upkeep
from overtone.view import View

PRIVATE = ("out", "device", "threads", "port", "data", "tokenizer", "replicas")  # may differ from host to host


class Stopped(Exception):  # noqa: N818 (nothing went wrong)
    """A signal asked the run to stop, and everything was saved."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.signal = signal.Signals[name]


class Session:
    """Everything that one replica of a run holds."""

    def __init__(self, config: Run, *, resume: bool) -> None:
        self.begun = time.perf_counter()
        self.config = config = config.resolved()
        self.method = config.choice.build()
        self.task: Task = load_task(config.task)
        self.transport = connect()
        self.rank, self.size = self.transport.rank, self.transport.size
        self.device = device_for(config.device, self.rank)
        self.feed: Feed = self.task.feed(
            self.rank, self.size, batch=config.training.batch, seed=config.seed, skew=config.task.skew
        )
        self.upkeep = Upkeep(self.transport)
        self.data = self.task.about()
        self._agree()
        self.folder = Path(self.upkeep.tell(str(config.out or rundir.fresh(self.method.name)))[0])
        self.lock = rundir.claim(self.folder, first=self.rank == 0, resume=resume, tell=self.upkeep.tell)
        randomness.seed_all(randomness.seed_of(config.seed, self.rank))
        model = prepare(self.task.model(), config.training, self.device)
        inner = optimisers.build(model, config.training)
        self.replica = Replica(model, inner, self.method, self.transport)
        self.saver = checkpoint.Saver(
            self.folder / "checkpoints",
            self.rank,
            self.size,
            keep=config.saving.keep_checkpoints,
            tell=self.upkeep.tell,
        )
        self.log = self._open_log()
        self.seconds = {"inner steps": 0.0, "rounds": 0.0, "evaluation": 0.0, "checkpoints": 0.0, "data": 0.0}
        self.units = 0  # trained on by this replica
        self.earlier = 0.0  # seconds of training before the last resume
        self.finished = False
        if resume:
            self._go_on()
        else:
            self._say_start("start")

    # -- meeting ---------------------------------------------------------------------------------------------------

    def _agree(self) -> None:
        """What the replicas' own greeting does not cover, such as the batch, must be equal everywhere too. So must the
        data: shards are dealt from one deck."""
        mine = {**settings.flat(self.config, leave_out=PRIVATE), **{f"data: {k}": v for k, v in self.data.items()}}
        for rank, theirs in enumerate(self.upkeep.tell(mine)):
            if key := _difference(mine, theirs):
                raise MismatchError(
                    f"replicas do not match: {key} is {mine.get(key)} on rank {self.rank} and {theirs.get(key)} on "
                    f"rank {rank}; start every rank with the same configuration and the same data"
                )

    def _open_log(self) -> runlog.RunLog | None:
        if self.rank:
            return None
        view = View(Console(stderr=True))
        return runlog.RunLog(self.folder, [*track.sinks(self.folder, self.config.saving.track), view])

    def _write(self, event: str, **values: Any) -> None:
        if self.log is not None:
            self.log.write(event, self.replica.steps, **values)

    def _say_start(self, event: str, **values: Any) -> None:
        hosts = self.upkeep.tell(runlog.this_host(self.device))
        if self.rank == 0:
            rundir.write_config(self.folder, settings.toml(replace(self.config, out=None, replicas=self.size)))
        training = self.config.training
        self._write(
            event,
            folder=str(self.folder),
            method=self.method.name,
            numbers=self.method.numbers(),
            consensus=self.method.consensus,
            parameters=sum(p.numel() for p in self.replica.model.parameters()),
            steps=training.steps,
            unit=self.task.unit,
            units_per_step=training.batch * training.accumulate * self.task.units(),
            data=self.data,
            config=settings.flat(self.config),
            environment=runlog.environment(hosts),
            **values,
        )

    def _go_on(self) -> None:
        folder = self.saver.folder
        begun = len(runlog.steps_of(self.folder, "checkpoint")) if self.rank == 0 else 0  # the log is replica 0's
        begun = self.upkeep.tell(begun)[0]
        mark = checkpoint.newest_common(folder, self.rank, self.size, begun=begun, tell=self.upkeep.tell)
        if mark is None:  # cut off before the first checkpoint: the beginning is where to go on from
            self.saver.forget_after(0)
            self._say_start("resume", from_replicas=self.size, folded=False)
            return
        folded = mark.replicas != self.size
        if folded:
            files = [checkpoint.file_of(folder, mark, rank) for rank in range(mark.replicas)]
            tree = checkpoint.blend(
                [checkpoint.read(file) for file in files], consensus=self.method.consensus, rank=self.rank
            )
        else:
            tree = checkpoint.read(checkpoint.file_of(folder, mark, self.rank))
        self._restore(tree)
        if self.finished and self.replica.steps >= self.config.training.steps:
            return
        if folded:  # dice of another rank would fall alike on two of them
            randomness.seed_all(randomness.seed_of(self.config.seed + self.replica.steps, self.rank))
        self.saver.forget_after(mark.step)
        self._say_start("resume", from_replicas=mark.replicas, folded=folded)

    # -- training --------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        if self.finished and self.replica.steps >= self.config.training.steps:
            return self._nothing_to_do()
        self.training_begun = time.perf_counter()
        self.begun_at = self.replica.steps
        pulse = Pulse(self.upkeep, self.replica.steps)
        saving, steps = self.config.saving, self.config.training.steps
        assert saving.eval_every is not None
        assert saving.checkpoint_every is not None
        try:
            with listening(pulse):
                crew = Own(self.replica)
                training = self.config.training
                for step in local_steps(crew, self.task, {self.rank: self.feed}, training, begin=self.replica.steps):
                    self._count(step)
                    self.saver.check()
                    if step.count % saving.eval_every == 0 and step.count < steps:
                        self._write("eval", **self._evaluated())
                    if step.count == steps:
                        break
                    if step.count % saving.checkpoint_every == 0:
                        self._save()
                    if why := pulse.stop_after(step.count):
                        self._stop(why)
                return self._finish()
        finally:
            if self.log is not None:
                self.log.close()

    def _count(self, step: Step) -> None:
        training = self.config.training
        in_round = sum(map(seconds_of, step.rounds))
        self.seconds["data"] += step.seconds_data
        self.seconds["rounds"] += in_round
        self.seconds["inner steps"] += step.seconds - step.seconds_data - in_round
        self.units += training.batch * training.accumulate * self.task.units()
        due = step.count % self.config.saving.log_every == 0
        for record in step.rounds:
            if due or record.local_steps > 1:
                self._write("round", **asdict(record))
        if due and self.log is not None:
            self._write("train", **self._progress(step))

    def _progress(self, step: Step) -> dict[str, Any]:
        passed = time.perf_counter() - self.training_begun
        done = step.count - self.begun_at
        training = self.config.training
        per_step = training.batch * training.accumulate * self.task.units() * self.size
        return {
            "loss": float(step.losses[0]),
            "lr": optimisers.Schedule(training).rate(step.count - 1),
            "units": self.units * self.size,
            "units_per_second": per_step * done / passed,
            "seconds": self.earlier + passed,
            "seconds_left": passed / done * (training.steps - step.count),
            "bytes_sent": self.transport.ledger.sent,
            "waiting_share": self.transport.ledger.waiting / (self.earlier + passed),
        }

    def _evaluated(self) -> dict[str, Any]:
        """The metrics of the weights and statistics that all replicas share, each replica measuring its part of the
        validation samples. Without consensus nothing is shared: replica 0's own are reported, and everybody's loss."""
        begin = time.perf_counter()
        rows = torch.arange(len(self.task.valid))
        mine = rows[self.rank :: self.size] if self.method.consensus else rows
        with self.replica.anchor() as model:
            sums, count = measure(self.task, model, self.task.valid, mine, max(64, self.config.training.batch))
        heard = self.upkeep.tell([sums, count])
        parts = heard if self.method.consensus else heard[:1]
        names = dict.fromkeys(name for part, _ in parts for name in part)
        total = sum(count for _, count in parts)
        means = {name: sum(part.get(name, 0.0) for part, _ in parts) / total for name in names}
        self.seconds["evaluation"] += time.perf_counter() - begin
        found: dict[str, Any] = {
            "metrics": self.task.summary(means),
            "bytes_sent": self.transport.ledger.sent,
            "units": self.units * self.size,
            "seconds": self.earlier + time.perf_counter() - self.training_begun,
        }
        if not self.method.consensus:
            found["losses"] = [part["loss"] / count for part, count in heard]
        return found

    def _nothing_to_do(self) -> dict[str, Any]:
        """Tell again how it ended; the log stays as it is."""
        if self.log is None:
            return {}
        closing = [record for record in runlog.read(self.folder) if record["event"] == "finish"][-1]
        self.log.show(closing)
        self.log.close()
        return closing

    def _stop(self, why: str) -> None:
        self._save()
        self.saver.settle()
        self._write("stop", why=why, folder=str(self.folder))
        raise Stopped(why)

    def _finish(self) -> dict[str, Any]:
        last = self.replica.finish()
        self.seconds["rounds"] += sum(map(seconds_of, last))
        found = self._evaluated()
        self._save(finished=True)
        begin = time.perf_counter()
        self.saver.settle()
        self.seconds["checkpoints"] += time.perf_counter() - begin
        passed = time.perf_counter() - self.training_begun
        shares = {name: seconds / passed for name, seconds in self.seconds.items()}
        shares["other"] = 1.0 - sum(shares.values())
        ledger = self.transport.ledger
        closing = {
            **found,
            "rounds": self.replica.rounds - len(last),
            "rounds_finish": len(last),
            "anchor_fingerprint": self.replica.fingerprint,
            "bytes": {phase: asdict(count) for phase, count in ledger.counts.items()},
            "shares": shares,
            "seconds_starting": self.training_begun - self.begun,
            "sample": self.task.sample(self.replica.model) if self.rank == 0 else "",
        }
        self._write("finish", **closing)
        return closing

    # -- saving ----------------------------------------------------------------------------------------------------

    def _save(self, *, finished: bool = False) -> None:
        begin = time.perf_counter()
        self.saver.save(self.replica.steps, self._tree(finished))
        stalled = time.perf_counter() - begin
        self.seconds["checkpoints"] += stalled
        self._write("checkpoint", seconds=stalled)

    def _tree(self, finished: bool) -> dict[str, Any]:
        return {
            "finished": finished,
            "data": self.data,
            **checkpoint.tree_of(self.replica),
            "feed": self.feed.state_dict(),
            "random": randomness.states(),
            "units": self.units,
            "seconds": self.earlier + time.perf_counter() - self.training_begun,
        }

    def _restore(self, tree: dict[str, Any]) -> None:
        if key := _difference(tree["data"], self.data):
            raise checkpoint.CheckpointError(
                f"resume {self.folder}: the data's {key} was {tree['data'].get(key)} and is {self.data.get(key)} now; "
                "a position in other data means nothing. Give the same data, or start a new run"
            )
        checkpoint.restore(self.replica, tree)
        self.feed.load_state_dict(tree["feed"])
        randomness.set_states(tree["random"])
        self.finished = tree["finished"]
        self.units = tree["units"]
        self.earlier = tree["seconds"]


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The first key under which two differ; empty if none."""
    return next((key for key in {**one, **other} if one.get(key) != other.get(key)), "")


def seconds_of(record: Round) -> float:
    return record.seconds_encoding + record.seconds_waiting + record.seconds_decoding


def device_for(choice: str, rank: int) -> torch.device:
    """A GPU of its own for each replica of this host, if there is one and it is wanted."""
    local = int(os.environ.get("LOCAL_RANK", rank))
    if choice == "cpu" or not torch.cuda.is_available() or (choice == "auto" and local >= torch.cuda.device_count()):
        return torch.device("cpu")
    return torch.device("cuda", local % torch.cuda.device_count())


@contextmanager
def listening(pulse: Pulse) -> Iterator[None]:
    """SIGTERM and SIGINT ask for a stop after everything was saved; a second one does not wait."""

    def ask(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        if pulse.asked:
            raise KeyboardInterrupt
        pulse.asked = signal.Signals(number).name

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
