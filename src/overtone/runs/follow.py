"""The session of `overtone follow`: an observer replays the rounds of a run in a store as they come, validates the
model now and then on its own machine, and writes the run log.

It writes nothing into the store, and asks it gently: the less comes, the more seldom.
"""

from __future__ import annotations

import logging
import math
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Literal

from rich.console import Console

from overtone.common.limits import COUNT, Limit, check
from overtone.common.machine_errors import in_words
from overtone.errors import ConfigError, OvertoneError, StoreError, UnfitRunError, WireError
from overtone.ledger import Round
from overtone.runs import directory, log, trackers
from overtone.runs.config import Run
from overtone.runs.evaluate import evaluate
from overtone.runs.events import Beginning, Evaluation, Observed
from overtone.runs.live import View
from overtone.runs.observed import OnThisHost, config_in, observer_of, task_in
from overtone.runs.open_run import device_for
from overtone.runs.pause import Pause
from overtone.runs.recorder import RunRecorder, beginning
from overtone.runs.session import Stopped
from overtone.runs.stop_signals import StopRequest
from overtone.runs.tally import Tally
from overtone.runs.timing import RunTimer
from overtone.swarm.archive import Archive, DeletedError
from overtone.swarm.follower import Followed
from overtone.swarm.observer import Observer
from overtone.tasks import Task

note = logging.getLogger(__name__)

ASIDE = 120.0  # seconds without a commit, after which it is looked whether one was deleted; then twice as long
LIMITS = {
    "eval_every": Limit("rounds between two validations", 1, COUNT),
    "until_round": Limit("the last round to follow", 0, 10**8 - 1),
}


@dataclass(frozen=True)
class Following:
    """How a run is followed."""

    out: Path | None = None
    """Directory for the run log; that of an earlier session is gone on with. By default a new one below runs/."""
    eval_every: int | None = None
    """Rounds between two validations. By default a tenth of all rounds."""
    until_round: int | None = None
    """The last round to follow, by its number in the store. By default all of them, to the end of the run."""
    from_start: bool = False
    """Replay all rounds from the first weights on, instead of beginning with the newest snapshot."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model. auto: a GPU if there is one, else the CPU."""
    track: Literal["none", "wandb", "trackio"] = "none"
    """Service that receives the metrics as well. The run log and TensorBoard always have them."""
    here: OnThisHost = field(default_factory=OnThisHost)

    def __post_init__(self) -> None:
        check(self, LIMITS, ConfigError)


@in_words()
def follow(url: str, how: Following, stop: StopRequest) -> None:
    """Follow the run in a store until it is over, or somebody asks to stop."""
    begun = time.perf_counter()
    archive = Archive.open(url)
    config = config_in(archive)
    task = task_in(archive, config, how.here, "follow")
    folder = how.out or directory.fresh("observed")
    done = _rounds_done(folder, archive, config)
    if done is None:
        directory.refuse_used(folder, "choose another --out")
    lock = directory.claim(folder)
    observer = observer_of(archive, config, task, device_for(how.device, 0))
    ends = [number for number in (done, None if how.until_round is None else how.until_round + 1) if number is not None]
    observer.begin(from_start=how.from_start, most=min(ends, default=None))
    archive.bucket.patience = 0.0  # from here on the session asks again by itself, and hears of signals in between
    session = _Session(config, task, observer, folder, lock, how, stop)
    session.open(resumes=done is not None)
    session.recorder.seconds_starting = time.perf_counter() - begun
    session.run()


def _rounds_done(folder: Path, archive: Archive, config: Run) -> int | None:
    """The rounds that an earlier session in this directory has seen; None if there was none."""
    opening = log.last(folder, "resume") or log.last(folder, "start")
    if opening is None:
        return None
    observed = opening.get("observed")
    if not isinstance(observed, dict) or observed.get("run") != archive.about.run.hex():
        raise UnfitRunError(f"run {folder}: holds the log of another run; choose another --out")
    last = log.last(folder, "round")
    every = config.choice.build().every or 1
    return max(int(opening["step"]) // every, 0 if last is None else int(last["index"]) + 1)


@dataclass
class _Session:
    config: Run
    task: Task
    observer: Observer
    folder: Path
    lock: IO[str]
    how: Following
    stop: StopRequest
    recorder: RunRecorder = field(init=False)
    timer: RunTimer = field(init=False)
    every: int = field(init=False)  # rounds between two validations

    def __post_init__(self) -> None:
        training, eval_every = self.config.training, self.config.saving.eval_every
        assert eval_every is not None, "a resolved configuration has all values"
        self.timer = RunTimer(training.samples * self.task.units())
        self.recorder = RunRecorder(self.observer, self.timer, steps=training.steps)
        steps = self.observer.method.every or 1
        self.every = self.how.eval_every or max(1, eval_every // steps)
        self._validated = -1  # rounds at the last validation
        self._expected = 0  # the round that comes next
        self._tally = Tally(self.observer, self.timer)
        self._pause = Pause(lambda: bool(self.stop.name))
        self._since = time.monotonic()  # when the last commit was followed
        self._aside = ASIDE

    # -- opening ---------------------------------------------------------------------------------------------------

    def open(self, *, resumes: bool) -> None:
        """Write the first event of the session."""
        observer = self.observer
        earlier = log.last(self.folder, "eval") if resumes else None
        if earlier is not None:
            self.timer.load_state_dict({"units": 0, "seconds": float(earlier["seconds"])})
        sinks = trackers.sinks(self.folder, self.how.track, observer.steps)
        self.recorder.open(log.RunLog(self.folder, [*sinks, View(Console(stderr=True))]))
        about = self._beginning(observer.rounds)
        self._tally.add_own("setup")
        if resumes:
            self._resume(about)
        else:
            self.recorder.start(about)

    def _resume(self, about: Beginning) -> None:
        self.recorder.resume(about, from_replicas=about["environment"]["world"], folded=False)

    def _beginning(self, index: int) -> Beginning:
        """What is known before round ``index``, the first that is replayed."""
        observer, world = self.observer, _size(self.observer)
        config = replace(self.config, replicas=world, out=self.folder)
        about = beginning(config, self.task, observer, [], self.folder)
        about["environment"]["world"] = world
        del about["environment"]["hosts"]  # of the members, nobody tells
        about["observed"] = Observed(
            store=observer.archive.url,
            run=observer.archive.about.run.hex(),
            from_round=index,
            costs_from=self._tally.begin(index),
            host=log.this_host(observer.device),
        )
        self._expected = index
        return about

    # -- following -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Follow to the end."""
        self.timer.start()
        self.stop.has_something_to_save = True
        try:
            while not self._is_there:
                if self.stop.name:
                    self._stop()
                begin = time.perf_counter()
                followed = self._next()
                if followed is not None:
                    self._record(followed, time.perf_counter() - begin)
                elif self._is_over and not self._pause.failing:
                    break
            self.recorder.finish(
                self._evaluation(),
                {"rounds": self.observer.rounds, "rounds_finish": 0},
                sample=lambda: self.task.sample(self.observer.model),
            )
        except OvertoneError as error:
            self.recorder.fail(error)
            raise
        finally:
            self.recorder.close()
            self.lock.close()

    @property
    def _is_there(self) -> bool:
        return self.how.until_round is not None and self.observer.rounds > self.how.until_round

    @property
    def _is_over(self) -> bool:
        return self.observer.steps >= self.config.training.steps

    def _next(self) -> Followed | None:
        """Follow the next round; after a pause, if it is not there yet."""
        try:
            followed = self.observer.advance()
            if followed is None:
                self._look_for_hole()
        except DeletedError:
            raise
        except StoreError as error:
            if not self._pause.failing:
                note.warning("%s; the store is asked again", error)
            self._pause.fail()
            return None
        if followed is None:
            if not self._is_over:
                self._pause.wait()
            return None
        self._pause.reset()
        self._since, self._aside = time.monotonic(), ASIDE
        return followed

    def _look_for_hole(self) -> None:
        """Now and then, if no commit comes: one that was deleted would be waited for in vain."""
        waited = time.monotonic() - self._since
        if waited >= self._aside:
            self._aside *= 2
            rounds, archive = self.observer.rounds, self.observer.archive
            note.warning("round %d of %s: no commit for %.0f s; it is waited for", rounds, archive.url, waited)
            archive.refuse_hole(rounds)

    def _record(self, followed: Followed, seconds: float) -> None:
        """Write what a round has cost, and validate if it is time."""
        observer, commit = self.observer, followed.commit
        if commit.round != self._expected:  # those between were pruned, and nobody knows what they have cost
            self._resume(self._beginning(commit.round))
        self._expected += 1
        cost = self._tally.add(followed)
        self.timer.seconds["rounds"] += seconds
        self.recorder.exchanged(
            Round(
                index=commit.round,
                local_steps=observer.method.every or 1,
                bytes_sent=cost.sent,
                bytes_received=cost.received,
                seconds_encoding=math.nan,
                seconds_waiting=math.nan,
                seconds_decoding=seconds,
                drift_norm=math.nan,
                residual_norm=math.nan,
                anchor_fingerprint=commit.anchor,
                left_out=commit.left_out,
            )
        )
        for words in commit.notes:
            note.info("round %d: %s", commit.round, words)
        if observer.rounds % self.every == 0 and not (self._is_over or self._is_there):
            self.recorder.evaluation(self._evaluation())

    def _evaluation(self) -> Evaluation:
        self._validated = self.observer.rounds
        with self.timer.during("evaluation"):
            found = evaluate(self.task, self.observer.show(), max(64, self.config.training.batch))
        return {"metrics": found}

    def _stop(self) -> None:
        if self._validated != self.observer.rounds:
            self.recorder.evaluation(self._evaluation())
        self.recorder.stop(self.stop.name, self.folder)
        raise Stopped(self.stop.name)


def _size(observer: Observer) -> int:
    """How many members the run has, by the newest snapshot: a session may begin long before it."""
    archive, now = observer.archive, observer.members
    for index in archive.snapshots():
        with suppress(WireError):  # somebody without the key may have put it there
            commit = archive.commit(index - 1) if index > observer.rounds else None
            if commit is not None:
                now = commit.members
                break
    return max(1, len(now))
