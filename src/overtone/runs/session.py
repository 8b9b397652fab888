"""The whole run of `overtone train`, as one of its replicas sees it: meet, train, validate, save, log, finish."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import IO, Any

import torch
from rich.console import Console
from torch import nn

from overtone.common.machine_errors import in_words
from overtone.errors import CheckpointError, ConfigError, GaveUpError, MismatchError, shortened
from overtone.ledger import Count
from overtone.replica import Replica
from overtone.runs import average, directory, log, optimizers, records, toml, trackers
from overtone.runs.checkpoint import format
from overtone.runs.checkpoint.index import Mark, file_of, newest_common
from overtone.runs.checkpoint.writer import Saver
from overtone.runs.config import Run
from overtone.runs.coordination import Asked, Pulse, Upkeep
from overtone.runs.live import View
from overtone.runs.loop import Own, Step, evaluate, local_steps, measure, prepare
from overtone.runs.timing import Accounts
from overtone.sim import rng
from overtone.tasks import Feed, Task, load_task
from overtone.transport import Solo
from overtone.world.join import whole_number
from overtone.world.process_group import Torch

# What may differ from host to host, or is compared by other means: the model by the greeting, the data by fingerprint.
PRIVATE = ("out", "device", "threads", "timeout", "replicas", "task", "model", "data", "tokenizer")


TOLD_AGAIN = {"metrics", "sample", "shares", "bytes_sent", "rounds"}  # of how a run ended


class Stopped(SystemExit):
    """A signal asked the run to stop, and everything was saved."""

    saved = True

    def __init__(self, name: str) -> None:
        super().__init__(128 + signal.Signals[name])


class Session:
    """Everything that one replica of a run holds."""

    @in_words()
    def __init__(self, config: Run, transport: Solo | Torch, *, resume: bool, asked: Asked | None = None) -> None:
        begun = time.perf_counter()
        self.asked = asked or Asked()
        self.config = config = config.resolved()
        self.method = config.choice.build()
        self.transport = transport
        self.rank, self.size = self.transport.rank, self.transport.size
        self.upkeep = Upkeep(self.transport)
        self.task, self.feed = self.upkeep.all_or_none(self._load)
        self.data = self.task.about()
        # What a resumed run must have in common with itself, besides model and method, which the replica compares.
        self.fixed = {
            "inner": config.training.inner,
            "data": self.data.get("fingerprint", self.data.get("name")),
            "training samples": len(self.task.train),
        }
        self._agree()
        name = self.upkeep.tell(directory.fresh(self.method.name).name)[0]
        self.folder = config.out or directory.elected(name)
        self.lock = self.upkeep.all_or_none(lambda: self._claim(resume))
        model, inner = self.upkeep.all_or_none(self._build)
        self.replica = Replica(model, inner, self.method, self.transport)
        self.upkeep.phase = "upkeep"
        self.saver = Saver(
            self.folder / directory.CHECKPOINTS,
            self.rank,
            self.size,
            keep=config.saving.keep_checkpoints,
            tell=self.upkeep.tell,
            told=lambda mark: self._write("saved", step=mark.step),
        )
        training = config.training
        self.accounts = Accounts(training.samples * self.task.units() * self.size)
        self.finished: dict[str, int] | None = None  # how many rounds it took, once it is
        self.log: log.RunLog | None = None
        self.mark = self._go_on() if resume else None
        if not self._is_done:
            self._begin(resume)
        self.seconds_starting = time.perf_counter() - begun

    # -- meeting ---------------------------------------------------------------------------------------------------

    def _load(self) -> tuple[Task, Feed]:
        task, training = load_task(self.config.task), self.config.training
        skew = self.config.task.skew
        return task, task.feed(self.rank, self.size, batch=training.batch, seed=self.config.seed, skew=skew)

    def _build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        device = device_for(self.config.device, self.rank)
        rng.seed_all(rng.seed_of(self.config.seed, self.rank))
        model = prepare(self.task.model(), self.config.training, device)
        return model, optimizers.build(model, self.config.training)

    def _claim(self, resume: bool) -> IO[str]:
        if not resume:
            directory.refuse_used(self.folder)
        return directory.claim(self.folder, self.upkeep.world.hex())

    def _agree(self) -> None:
        """What the replicas' own greeting does not cover, such as the batch, must be equal everywhere too. So must the
        data: shards are dealt from one deck."""
        mine = {**toml.flat(self.config, leave_out=PRIVATE), **self.fixed}
        for rank, theirs in enumerate(self.upkeep.tell(mine)):
            if key := _difference(mine, theirs):
                raise MismatchError(
                    f"replicas do not match: {key} is {mine.get(key)} on rank {self.rank} and {theirs.get(key)} on "
                    f"rank {rank}; start every rank with the same configuration and the same data"
                )

    def _begin(self, resume: bool) -> None:
        """Everything fits: from here on the run's directory is written to."""
        self.upkeep.all_or_none(self._open)
        folded = self.mark is not None and self.mark.replicas != self.size
        if folded:  # dice of another rank would fall alike on two of them
            rng.seed_all(rng.seed_of(self.config.seed + self.replica.steps, self.rank))
        self.finished = None  # if it was, there is more to do now
        if resume:
            self.saver.forget_after(self.mark)
            before = self.mark.replicas if self.mark is not None else self.size
            self._say_start("resume", from_replicas=before, folded=folded)
        else:
            self._say_start("start")

    def _open(self) -> None:
        """Configuration and log. The configuration first: a log without one could be neither resumed nor begun."""
        if whole_number("LOCAL_RANK", 0) == 0:  # on each host: it may have a disk of its own
            directory.write_config(self.folder, toml.toml(toml.absolute(replace(self.config, replicas=self.size))))
        if self.rank == 0:
            sinks = trackers.sinks(self.folder, self.config.saving.track, self.replica.steps)
            self.log = log.RunLog(self.folder, [*sinks, View(Console(stderr=True))])

    def _write(self, event: str, *, step: int | None = None, **values: Any) -> None:
        if self.log is not None:
            self.log.write(event, self.replica.steps if step is None else step, **values)

    def _say_start(self, event: str, **values: Any) -> None:
        hosts = self.upkeep.tell(log.this_host(self.replica.device))
        if self.log is not None:  # the environment takes a moment to find out
            config = replace(self.config, replicas=self.size)
            start = records.beginning(config, self.method, self.task, self.replica.model, hosts)
            self._write(event, folder=str(self.folder), **start, **values)

    def _go_on(self) -> Mark | None:
        """Everything from the newest checkpoint that all can go on from, or nothing at all; which one that was."""
        saved = self.upkeep.all_or_none(lambda: self._last("saved"))
        ever = self.upkeep.tell(saved is not None)[0]
        mark = newest_common(self.saver.folder, self.rank, self.size, ever=ever, tell=self.upkeep.tell)
        if mark is not None:
            self.upkeep.all_or_none(lambda: self._restore(mark))
        return mark

    def _last(self, event: str) -> dict[str, Any] | None:
        """From the log, which is replica 0's."""
        return log.last(self.folder, event) if self.rank == 0 else None

    @property
    def _is_done(self) -> bool:
        return self.finished is not None and self.replica.steps >= self.config.training.steps

    # -- training --------------------------------------------------------------------------------------------------

    @in_words()
    def run(self) -> dict[str, Any]:
        """Train to the end; the record that closes the log."""
        self.accounts.begun = time.perf_counter()
        self.asked.has_something_to_save = True
        try:
            if self._is_done:
                return self._told_again()
            pulse = Pulse(self.upkeep, self.replica.steps, self.asked)
            self._train(pulse)
            return self._finish(pulse)
        except GaveUpError as error:
            self._write("fail", why=str(error))
            raise
        finally:
            if self.log is not None:
                self.log.close()
            self.lock.close()

    def _train(self, pulse: Pulse) -> None:
        training, saving, feeds = self.config.training, self.config.saving, {self.rank: self.feed}
        assert saving.eval_every is not None
        assert saving.checkpoint_every is not None
        for step in local_steps(Own(self.replica), self.task, feeds, training, begin=self.replica.steps):
            self._log_step(step)
            self.saver.check()
            if step.count == training.steps:  # `_finish` validates and saves
                return
            if step.count % saving.eval_every == 0:
                self._write("eval", **self._evaluated())
            why = pulse.stop_after(step.count)
            if why or step.count % saving.checkpoint_every == 0:
                self._save()
            if why:
                self.saver.settle()
                self._write("stop", why=why, folder=str(self.folder))
                raise Stopped(why)

    def _log_step(self, step: Step) -> None:
        self.accounts.count(step)
        if self.log is None:
            return
        due = step.count % self.config.saving.log_every == 0
        for record in records.worth_telling(step.rounds, due=due):
            self._write("round", **asdict(record))
        if due:
            training = self.config.training
            self._write(
                "train",
                loss=float(step.losses[0]),
                lr=self.replica.inner.param_groups[0]["lr"],
                **self._so_far(),
                **self.accounts.speed(training.steps - step.count),  # type: ignore[arg-type]
                waiting_share=self._waiting_share(),
            )

    def _so_far(self) -> dict[str, Any]:
        return records.so_far(self.transport.ledger, self.accounts.units, self.accounts.passed)

    def _waiting_share(self) -> float:
        return self.transport.ledger.waiting / self.accounts.passed

    def _evaluated(self) -> dict[str, Any]:
        """The metrics of the weights and statistics that all replicas share, each replica measuring its part of the
        validation samples. Without consensus nothing is shared: replica 0's own are reported, and everybody's loss."""
        rows = torch.arange(len(self.task.valid))
        mine = rows[self.rank :: self.size] if self.method.consensus else rows
        with self.accounts.during("evaluation"):
            with self.replica.anchor() as model:
                sums, count = measure(self.task, model, self.task.valid, mine, max(64, self.config.training.batch))
            heard = self.upkeep.tell([sums, count])
        parts = heard if self.method.consensus else heard[:1]
        names = dict.fromkeys(name for part, _ in parts for name in part)
        total = sum(count for _, count in parts)
        means = {name: sum(part.get(name, 0.0) for part, _ in parts) / total for name in names}
        found = {"metrics": self.task.summary(means), **self._so_far()}
        if not self.method.consensus:
            found["losses"] = [part["loss"] / count for part, count in heard]
        return found

    def _averaged(self) -> dict[str, Any]:
        """Without consensus: the metrics of the average of all replicas, and how far from it they are. It takes a dense
        exchange, which is not the method's own."""
        if self.method.consensus or self.method.every is None:
            return {}
        with self.accounts.during("evaluation"):
            count = Count()
            mean = average.mean_of(self.transport.sum(average.share_of(self.replica.model, self.size), count=count))
            self.transport.ledger.add("upkeep", count)
            drift = max(self.upkeep.tell(average.drift_of(self.replica.model, mean)))
            return {"metrics_average": evaluate(self.task, average.with_values(self.replica.model, mean)),
                    "drift": drift}  # fmt: skip

    def _finish(self, pulse: Pulse) -> dict[str, Any]:
        last = self.replica.finish()
        pulse.close()
        self.accounts.rounds(last)
        self.finished = {"rounds": self.replica.rounds - len(last), "rounds_finish": len(last)}
        self._save()
        return self._close()

    def _close(self) -> dict[str, Any]:
        found = self._evaluated()
        with self.accounts.during("checkpoints"):
            self.saver.settle()
        closing = {
            **found,
            **self._averaged(),
            **(self.finished or {}),
            "waiting_share": self._waiting_share(),
            "anchor_fingerprint": self.replica.fingerprint,
            "bytes": records.by_phase(self.transport.ledger),
            "shares": self.accounts.shares(),
            "seconds_starting": self.seconds_starting,
            "sample": self.task.sample(self.replica.model) if self.rank == 0 else "",
        }
        self._write("finish", **closing)
        return closing

    def _told_again(self) -> dict[str, Any]:
        """The run was over already: show how it ended. If it was cut off before it could say so, say so now."""
        closing = self._last("finish")
        if closing is not None and not closing.keys() >= TOLD_AGAIN:
            closing = None  # not as this version writes it
        if self.upkeep.tell(closing is not None)[0]:
            if closing is not None:
                View(Console(stderr=True)).write(closing)
            return closing or {}
        self.upkeep.all_or_none(self._open)
        assert self.mark is not None
        self.saver.prune(self.mark)
        return self._close()

    # -- saving ----------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        begin = time.perf_counter()
        with self.accounts.during("checkpoints"):
            self.saver.save(self.replica.steps, self._tree(), final=self.finished is not None)
        self._write("checkpoint", seconds=time.perf_counter() - begin)  # for which training stood still

    def _tree(self) -> dict[str, Any]:
        return {
            "finished": self.finished,
            "fixed": self.fixed,
            **format.tree_of(self.replica),
            "feed": self.feed.state_dict(),
            "random": rng.states(),
            "accounts": self.accounts.state_dict(),
        }

    def _restore(self, mark: Mark) -> None:
        folder = self.saver.folder
        files = [file_of(folder, mark, rank) for rank in range(mark.replicas)]
        own = files[self.rank % mark.replicas]
        if mark.replicas == self.size:
            tree = format.read(own)
        else:
            tree = format.blend(files, consensus=self.method.consensus, rank=self.rank)
        with format.reading(own, "list of what is fixed"):
            self._refuse_other(tree["fixed"])
        with format.reading(own, "model or optimiser"):
            format.restore(self.replica, tree)
        with format.reading(own, "position in the data"):
            self.feed.load_state_dict(tree["feed"])
        with format.reading(own, "random states"):
            rng.set_states(tree["random"])
        with format.reading(own, "accounts"):
            self.accounts.load_state_dict(tree["accounts"])
            self.finished = None if tree["finished"] is None else {k: int(v) for k, v in tree["finished"].items()}

    def _refuse_other(self, saved: Mapping[str, Any]) -> None:
        if key := _difference(saved, self.fixed):
            was, now = shortened(saved.get(key)), shortened(self.fixed.get(key))
            raise CheckpointError(
                f"resume {self.folder}: {key} was {was} and is {now} now; what was saved would mean nothing. Leave it "
                "as it was, or start a new run"
            )


def _difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The first key under which two differ; empty if none."""
    return next((str(key) or "''" for key in {**one, **other} if one.get(key) != other.get(key)), "")


def device_for(choice: str, rank: int) -> torch.device:
    """A GPU of its own for each replica of this host, if there is one and it is wanted."""
    local, there = whole_number("LOCAL_RANK", rank), torch.cuda.device_count()
    if choice == "cuda" and local >= there:
        raise ConfigError(f"device=cuda: replica {local} of this host needs a GPU of its own, and there are {there}")
    if choice == "cpu" or local >= there:
        return torch.device("cpu")
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device
