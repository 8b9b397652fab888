"""A run of `overtone train`, as one of its replicas sees it: train, validate, save, log, finish.

`open_run` (in runs/open_run.py) makes a `Session`, and `Session.run` trains to the end. Both are collectives: every
rank calls them, and all ranks take the same steps in the same order.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, cast

from rich.console import Console

from overtone.common.machine_errors import in_words
from overtone.errors import GaveUpError
from overtone.replica import Replica
from overtone.runs import directory, log, spectrum, toml, trackers
from overtone.runs.checkpoint.index import CheckpointId, newest_common
from overtone.runs.checkpoint.run_state import RunState
from overtone.runs.checkpoint.writer import CheckpointWriter
from overtone.runs.config import Run
from overtone.runs.coordination import Coordinator, StopVote
from overtone.runs.evaluate import RankEvaluator
from overtone.runs.events import Finish, Record
from overtone.runs.live import View
from overtone.runs.loop import SingleReplica, local_steps
from overtone.runs.recorder import RunRecorder, beginning
from overtone.runs.stop_signals import StopRequest
from overtone.runs.timing import RunTimer
from overtone.sim import rng
from overtone.tasks import Task
from overtone.world.join import whole_number


class Stopped(SystemExit):
    """A signal asked the run to stop, and everything was saved."""

    saved = True

    def __init__(self, name: str) -> None:
        super().__init__(128 + signal.Signals[name])


@dataclass
class Session:
    """One replica's run, from its first step (or from a checkpoint) to its end. `open_run` makes it."""

    config: Run
    task: Task
    state: RunState
    coordinator: Coordinator
    folder: Path  # the run's directory
    lock: IO[str]  # held while the run lives
    stop: StopRequest
    checkpoint: CheckpointId | None = None  # from which the run continues
    recorder: RunRecorder = field(init=False)
    evaluator: RankEvaluator = field(init=False)
    writer: CheckpointWriter = field(init=False)

    def __post_init__(self) -> None:
        training, saving = self.config.training, self.config.saving
        self.recorder = RunRecorder(self.replica, self.timer, steps=training.steps)
        self.evaluator = RankEvaluator(self.task, self.replica, self.coordinator, batch=training.batch)
        self.writer = CheckpointWriter(
            self.folder / directory.CHECKPOINTS,
            self.rank,
            self.size,
            keep=saving.keep_checkpoints,
            all_gather=self.coordinator.all_gather,
            on_complete=lambda checkpoint: self.recorder.saved(checkpoint.step),
        )

    @property
    def replica(self) -> Replica:
        """The replica of this process."""
        return self.state.replica

    @property
    def rank(self) -> int:
        """The rank of this process among those that share the run's directory. Over a store, it is alone."""
        return self.coordinator.transport.rank

    @property
    def size(self) -> int:
        """How many processes share the run's directory."""
        return self.coordinator.transport.size

    @property
    def timer(self) -> RunTimer:
        """Where the time goes."""
        return self.state.timer

    @property
    def is_done(self) -> bool:
        """The run had finished before this session, and nobody asks for more steps."""
        return self.state.finished is not None and self.replica.progress >= self.config.training.steps

    # -- opening: called by `open_run` ---------------------------------------------------------------------------------

    def restore(self) -> None:
        """Load the newest checkpoint that all ranks have, if there ever was one. A collective."""
        saved = self.coordinator.all_succeed(lambda: self._last("saved"))
        ever = self.coordinator.all_gather(saved is not None)[0]
        gather = self.coordinator.all_gather
        self.checkpoint = found = newest_common(self.writer.folder, self.rank, self.size, ever=ever, all_gather=gather)
        if found is not None:
            self.coordinator.all_succeed(lambda: self.state.restore(self.writer.folder, found, self.rank, self.size))

    def begin(self, *, resume: bool) -> None:
        """Write the configuration and the first line of the log. A collective."""
        self.coordinator.all_succeed(self._open_log)
        if self._is_folded:  # otherwise two new ranks could share the random state of one old rank
            rng.seed_all(rng.seed_of(self.config.seed + self.replica.steps, self.rank))
        self.state.finished = None  # if the run had finished, there are more steps to take now
        if resume:
            self.writer.delete_after(self.checkpoint)
        self._write_first_event(resume=resume)

    @property
    def _is_folded(self) -> bool:
        return self.checkpoint is not None and self.checkpoint.replicas != self.size

    def _open_log(self) -> None:
        """The configuration comes first: a run with a log and without a configuration could not be resumed."""
        if whole_number("LOCAL_RANK", 0) == 0:  # on each host: it may have a disk of its own
            config = replace(self.config, replicas=self.size)
            directory.write_config(self.folder, toml.toml(toml.absolute(config)))
        if self.rank == 0:
            sinks = trackers.sinks(self.folder, self.config.saving.track, self.replica.progress)
            self.recorder.open(log.RunLog(self.folder, [*sinks, View(Console(stderr=True))]))
            steps, looks = self.config.training.steps, self.config.saving.spectrum
            spectrum.attach(self.replica, self.folder, steps=steps, looks=looks)

    def _write_first_event(self, *, resume: bool) -> None:
        """Write "start" or "resume". A collective."""
        hosts = self.coordinator.all_gather(log.this_host(self.replica.device))
        if not self.recorder.is_open:  # the environment takes a moment to find out
            return
        size = self.size
        about = beginning(replace(self.config, replicas=size), self.task, self.replica, hosts, self.folder)
        if resume:
            before = size if self.checkpoint is None else self.checkpoint.replicas
            self.recorder.resume(about, from_replicas=before, folded=self._is_folded)
        else:
            self.recorder.start(about)

    def _last(self, event: str) -> Record | None:
        """From the log, which is on the disk of rank 0."""
        return log.last(self.folder, event) if self.rank == 0 else None

    # -- training ------------------------------------------------------------------------------------------------------

    @in_words()
    def run(self) -> Finish:
        """Train to the end; return the event that closes the log. A collective."""
        self.timer.start()
        self.stop.has_something_to_save = True
        try:
            if self.is_done:
                return self._finish_again()
            vote = StopVote(self.coordinator, self.replica.steps, self.stop)
            self._train(vote)
            return self._finish(vote)
        except GaveUpError as error:
            self.recorder.fail(error)
            raise
        finally:
            self.recorder.close()
            self.lock.close()

    def _train(self, vote: StopVote) -> None:
        training, saving = self.config.training, self.config.saving
        feeds = {self.replica.transport.rank: self.state.feed}
        assert saving.eval_every is not None
        assert saving.checkpoint_every is not None
        for step in local_steps(SingleReplica(self.replica), self.task, feeds, training):
            self.timer.count(step)
            self.recorder.step(step, due=step.passed(saving.log_every))
            self.writer.check()
            if step.count >= training.steps:  # `_finish` validates and saves
                return
            if step.passed(saving.eval_every):
                with self.timer.during("evaluation"):
                    found = self.evaluator.evaluate()
                self.recorder.evaluation(found)
            why = vote.stop_after(step.count)
            if why or step.passed(saving.checkpoint_every):
                self._save()
            if why:
                self.writer.wait()
                self.replica.settle()  # peers may still be waiting for this replica's part of an exchange
                self.recorder.stop(why, self.folder)
                raise Stopped(why)

    def _save(self) -> None:
        begin = time.perf_counter()
        with self.timer.during("checkpoints"):
            self.writer.save(self.replica.steps, self.state.tree(), final=self.state.finished is not None)
        self.recorder.checkpoint(time.perf_counter() - begin)

    # -- closing -------------------------------------------------------------------------------------------------------

    def _finish(self, vote: StopVote) -> Finish:
        self.state.finished = self.recorder.last_messages(lambda: [self.replica.finish()])
        vote.close()
        self._save()
        return self._close()

    def _close(self) -> Finish:
        """Validate the final model, wait for the final checkpoint, write the last event."""
        assert self.state.finished is not None
        with self.timer.during("evaluation"):
            found = self.evaluator.evaluate(average=True)
        with self.timer.during("checkpoints"):
            self.writer.wait()
        return self.recorder.finish(found, self.state.finished, sample=self._sample)

    def _sample(self) -> str:
        return self.task.sample(self.replica.model) if self.rank == 0 else ""

    def _finish_again(self) -> Finish:
        """The run had finished before: show how it ended. If it was killed before it could write its last event, or if
        that event is not complete, write it now."""
        closing = self._last("finish")
        if closing is not None and log.missing(closing):
            closing = None
        if self.coordinator.all_gather(closing is not None)[0]:
            event = cast(Finish, closing or {})
            if closing is not None:
                View(Console(stderr=True)).write(event)
            return event
        self.coordinator.all_succeed(self._open_log)
        assert self.checkpoint is not None
        self.writer.prune(self.checkpoint)
        return self._close()
