"""Makes the events of a run and writes them into its log. Real runs and simulations write through this file only."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import cast

from overtone.ledger import Round
from overtone.replica import Replica
from overtone.runs import log, toml
from overtone.runs.config import Run, Simulation
from overtone.runs.events import (
    FORMAT,
    Beginning,
    Cost,
    Ending,
    Evaluation,
    Event,
    Exchanged,
    Finish,
    Host,
    PhaseCount,
    RoundDone,
    Stamp,
    Train,
)
from overtone.runs.log import RunLog
from overtone.runs.loop import Step
from overtone.runs.timing import RunTimer
from overtone.swarm.observer import Observer
from overtone.tasks import Task


class RunRecorder:
    """The events of one run, as ``replica`` sees it: replica 0 in a simulation, its own one in a process. Of a
    run in a store it may be an observer.

    Every process has a recorder; that of replica 0 gets a log (`open`), the others write nothing. ``virtual_clock``
    gives the virtual seconds of a simulation.
    """

    def __init__(
        self,
        replica: Replica | Observer,
        timer: RunTimer,
        *,
        steps: int,
        virtual_clock: Callable[[], float] | None = None,
    ) -> None:
        self.replica = replica
        self.timer = timer
        self.steps = steps  # of the whole run
        self.virtual_clock = virtual_clock
        self.seconds_starting = 0.0
        self._log: RunLog | None = None

    def open(self, run_log: RunLog) -> None:
        """From now on, write into this log."""
        self._log = run_log

    @property
    def is_open(self) -> bool:
        """Whether events are written: making some of them takes time."""
        return self._log is not None

    def close(self) -> None:
        """Close the log and its sinks."""
        if self._log is not None:
            self._log.close()

    # -- the events ----------------------------------------------------------------------------------------------------

    def start(self, beginning: Beginning) -> None:
        """The run begins."""
        self._write({"event": "start", **self._stamp(), **beginning})

    def resume(self, beginning: Beginning, *, from_replicas: int, folded: bool) -> None:
        """The run continues from a checkpoint of ``from_replicas`` replicas."""
        self._write({"event": "resume", **self._stamp(), **beginning, "from_replicas": from_replicas, "folded": folded})

    def step(self, step: Step, *, due: bool) -> None:
        """A local step. Its round is written at once; but if each step ends in one, only when a line is ``due``."""
        if not self.is_open:
            return
        for done in step.rounds[:1]:
            if due or done.local_steps > 1:
                self._write(self._round(done))
        if due:
            self._write(self._train(step))

    def exchanged(self, done: Round) -> None:
        """A round that was no part of a local step here."""
        self._write(self._round(done))

    def evaluation(self, found: Evaluation) -> None:
        """A validation before the end of training."""
        self._write({"event": "eval", **self._stamp(), **found, **self._cost(), **self._exchanged()})

    def checkpoint(self, seconds: float) -> None:
        """A checkpoint was begun, and training stood still for so long."""
        self._write({"event": "checkpoint", **self._stamp(), "seconds": seconds})

    def saved(self, step: int) -> None:
        """The checkpoint of this step is complete on all ranks."""
        self._write({"event": "saved", **self._stamp(), "step": step})

    def stop(self, why: str, folder: Path) -> None:
        """A signal stopped the run, and everything is saved."""
        self._write({"event": "stop", **self._stamp(), "why": why, "folder": str(folder)})

    def fail(self, error: Exception) -> None:
        """The run gave up."""
        self._write({"event": "fail", **self._stamp(), "why": str(error)})

    def last_messages(self, finish: Callable[[], Sequence[Sequence[Round]]]) -> Ending:
        """Call ``finish``, which sends the last messages and returns the records of each replica, replica 0 first.

        A round that was in flight is among the records, as the first. It is no last message, and has an event.
        """
        pending = self.replica.exchanger.in_flight
        records = finish()
        for of_replica in records:
            self.timer.count_rounds(of_replica)
        count = len(records[0])
        if pending is None:
            return {"rounds": self.replica.rounds - count, "rounds_finish": count}
        # Its message was made in a local step, so these seconds were counted before.
        self.timer.seconds["inner steps"] -= sum(of_replica[0].seconds_encoding for of_replica in records)
        self._write(self._round(records[0][0]))
        cost = pending.count
        return {
            "rounds": self.replica.rounds - count + 1,
            "rounds_finish": count - 1,
            "in_flight": {
                "steps": self.replica.steps - pending.steps,
                "sent": cost.sent,
                "received": cost.received,
                "hops": cost.hops,
            },
        }

    def finish(
        self,
        found: Evaluation,
        ending: Ending,
        *,
        sample: Callable[[], str] = lambda: "",
    ) -> Finish:
        """The run is over; return the event that says so. ``sample`` is called last: the time it takes is not the
        run's."""
        event: Finish = {
            "event": "finish",
            **self._stamp(),
            **found,
            **self._cost(),
            **ending,
            "waiting_share": self._waiting_share(),
            "anchor_fingerprint": self.replica.fingerprint,
            "bytes": self._bytes(),
            "shares": self.timer.shares(),
            "seconds_starting": self.seconds_starting,
            "sample": sample(),
        }
        self._write(event)
        return event

    # -- their parts ---------------------------------------------------------------------------------------------------

    def _write(self, event: Event) -> None:
        if self._log is not None:
            self._log.write(event)

    def _stamp(self) -> Stamp:
        return {"step": self.replica.progress, "time": round(time.time(), 3)}

    def _cost(self) -> Cost:
        ledger = self.replica.transport.ledger
        found: Cost = {
            "bytes_sent": ledger.sent,
            "bytes_received": ledger.received,
            "hops": ledger.hops,
            "units": self.timer.units,
            "seconds": self.timer.passed,
        }
        if self.virtual_clock is not None:
            found["simulated_seconds"] = self.virtual_clock()
        return found

    def _exchanged(self) -> Exchanged:
        return {"rounds": self.replica.rounds}

    def _waiting_share(self) -> float:
        """Of the time in which the waiting took place: virtual time in a simulation."""
        passed = self.timer.passed if self.virtual_clock is None else max(self.virtual_clock(), 1e-9)
        return self.replica.transport.ledger.waiting / passed

    def _bytes(self) -> dict[str, PhaseCount]:
        counts = self.replica.transport.ledger.counts
        found = {phase: asdict(count) for phase, count in counts.items()}
        for phase, count in counts.items():
            if not count.requests:
                del found[phase]["requests"]
        return cast(dict[str, PhaseCount], found)

    def _round(self, done: Round) -> RoundDone:
        return {
            "event": "round",
            **self._stamp(),
            "index": done.index,
            "local_steps": done.local_steps,
            "bytes_sent": done.bytes_sent,
            "bytes_received": done.bytes_received,
            "seconds_encoding": done.seconds_encoding,
            "seconds_waiting": done.seconds_waiting,
            "seconds_hidden": done.seconds_hidden,
            "seconds_decoding": done.seconds_decoding,
            "drift_norm": done.drift_norm,
            "residual_norm": done.residual_norm,
            "anchor_fingerprint": done.anchor_fingerprint,
            "left_out": list(done.left_out),
            "keep": done.keep,
            "control": done.control,
        }

    def _train(self, step: Step) -> Train:
        return {
            "event": "train",
            **self._stamp(),
            "loss": float(step.losses[0]),
            "lr": self.replica.inner.param_groups[0]["lr"],
            **self._cost(),
            **self._exchanged(),
            "units_per_second": self.timer.units_per_second,
            "seconds_left": self.timer.seconds_left(self.steps - step.count),
            "waiting_share": self._waiting_share(),
        }


def beginning(
    config: Run | Simulation, task: Task, replica: Replica | Observer, hosts: Sequence[Host], folder: Path
) -> Beginning:
    """Everything that is known before the first step."""
    training = config.training
    return {
        "format": FORMAT,
        "folder": str(folder),
        "simulated": isinstance(config, Simulation),
        "method": replica.method.name,
        "numbers": replica.method.numbers(),
        "consensus": replica.method.consensus,
        "parameters": sum(p.numel() for p in replica.model.parameters()),
        "steps": training.steps,
        "unit": task.unit,
        "units_per_step": training.samples * task.units(),
        "data": task.about(),
        "config": toml.flat(config),
        "environment": log.environment(hosts),
    }
