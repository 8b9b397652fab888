"""Everything of one process that a checkpoint keeps: the replica, its position in the data, random states, timing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from overtone.errors import CheckpointError, shortened
from overtone.exchange import flight
from overtone.replica import Replica
from overtone.runs.checkpoint import format
from overtone.runs.checkpoint.index import CheckpointId, file_of
from overtone.runs.events import Ending, InFlight
from overtone.runs.timing import RunTimer
from overtone.sim import rng
from overtone.tasks import Feed


@dataclass
class RunState:
    """What a run must have to continue bit for bit."""

    replica: Replica
    feed: Feed
    timer: RunTimer
    fixed: Mapping[str, Any]  # facts that must be the same in all sessions of a run, by name
    finished: Ending | None = None  # how many rounds the run took, once it has finished

    def tree(self) -> dict[str, Any]:
        """All of it, to be saved. The tensors are references, not copies."""
        return {
            "finished": self.finished,
            "fixed": self.fixed,
            **format.tree_of(self.replica),
            "feed": self.feed.state_dict(),
            "random": rng.states(),
            "accounts": self.timer.state_dict(),
        }

    def restore(self, folder: Path, checkpoint: CheckpointId, rank: int, size: int) -> None:
        """Load this rank's part of a checkpoint. If another number of replicas saved it, fold their states."""
        files = [file_of(folder, checkpoint, old) for old in range(checkpoint.replicas)]
        own = files[rank % checkpoint.replicas]
        if checkpoint.replicas == size:
            tree = format.read(own)
        else:
            take_back = partial(flight.take_back, exchanger=self.replica.exchanger)
            tree = format.fold(files, consensus=self.replica.method.consensus, rank=rank, take_back=take_back)
        with format.reading(own, "list of what is fixed"):
            self._refuse_other(tree["fixed"], folder.parent)
        with format.reading(own, "model or optimizer"):
            format.restore(self.replica, tree)
        with format.reading(own, "position in the data"):
            self.feed.load_state_dict(tree["feed"])
        with format.reading(own, "random states"):
            rng.set_states(tree["random"])
        with format.reading(own, "accounts"):
            self.timer.load_state_dict(tree["accounts"])
            self.finished = _finished(tree["finished"])

    def _refuse_other(self, saved: Mapping[str, Any], run: Path) -> None:
        if key := first_difference(saved, self.fixed):
            was, now = shortened(saved.get(key)), shortened(self.fixed.get(key))
            raise CheckpointError(
                f"resume {run}: {key} was {was} and is {now} now; the saved state does not fit that. Leave it as it "
                "was, or start a new run"
            )


def _finished(saved: Mapping[str, Any] | None) -> Ending | None:
    if saved is None:
        return None
    found: Ending = {"rounds": int(saved["rounds"]), "rounds_finish": int(saved["rounds_finish"])}
    if "in_flight" in saved:
        sent, received, hops, steps = (int(saved["in_flight"][key]) for key in ("sent", "received", "hops", "steps"))
        found["in_flight"] = InFlight(steps=steps, sent=sent, received=received, hops=hops)
    return found


def first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The first key under which two tables differ; empty if there is none."""
    return next((str(key) or "''" for key in {**one, **other} if one.get(key) != other.get(key)), "")
