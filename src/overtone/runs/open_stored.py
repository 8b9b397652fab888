"""Everything before the first step of `overtone train --store`: data, model, joining, the directory of this member.

The process is one member of a run that lives in object storage (swarm/). Beside it, nothing is shared: the session is
that of a single process, with a directory, checkpoints and a log of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

from overtone.common.machine_errors import in_words
from overtone.errors import RunError, UnfitRunError
from overtone.replica import Replica
from overtone.runs import directory, log, spectrum, toml
from overtone.runs.checkpoint.run_state import RunState
from overtone.runs.config import Run
from overtone.runs.coordination import Coordinator
from overtone.runs.leased import LeasedFeed, units_of
from overtone.runs.open_run import build, fixed_facts
from overtone.runs.session import Session
from overtone.runs.stop_signals import StopRequest
from overtone.runs.stored import agreed_of, founded_in, settings_of
from overtone.runs.timing import RunTimer
from overtone.sim import rng
from overtone.swarm.store import Store, refuse_unfit
from overtone.tasks import ShardedFeed, load_task
from overtone.transport import Solo

Slot = tuple[Path, IO[str]]  # a directory of a member, and the lock on it


@in_words()
def open_stored(config: Run, *, stop: StopRequest | None = None) -> Session:
    """Join the run in the store, or found it; continue from this member's own checkpoint if it has one."""
    begun, stop = time.perf_counter(), stop or StopRequest()
    config = _resolved(config)
    method, training, place = config.choice.build(), config.training, config.stored
    refuse_unfit(method)
    spectrum.refuse_unfit(config.saving.spectrum, method)
    task = load_task(config.task)
    feed = task.feed(0, 1, batch=training.batch, seed=config.seed, skew=config.task.skew)
    units = units_of(feed, task.name, training.samples)
    assert isinstance(feed, ShardedFeed)
    assert place.store is not None
    slot = _own_slot(config, place.store)
    name = place.name if slot is None else _name_in(slot[0], config)
    fixed = fixed_facts(config, task)
    assert method.every is not None
    store = Store(
        place.store,
        name,
        min_replicas=place.min_replicas,
        snapshot_every=place.snapshot_every,
        wait=place.wait,
        units=units,
        rounds=-(-training.steps // method.every),
        settings=settings_of(config, fixed),
        agreed=agreed_of(config, fixed),
    )
    model, inner = build(config, task, 0)
    replica = Replica(model, inner, method, store)
    run = replica.state.run.hex()
    folder, lock = slot or _new_slot(run, str(store.name))
    config = replace(config, replicas=1, out=None, stored=replace(place, name=store.name))
    rng.seed_all(rng.seed_of(config.seed + store.process.session, store.process.number))
    timer = RunTimer(training.samples * task.units())
    state = RunState(replica, LeasedFeed(feed, store, accumulate=training.accumulate), timer, {**fixed, "run": run})
    coordinator = Coordinator(Solo())
    coordinator.phase = "upkeep"
    session = Session(config, task, state, coordinator, folder, lock, stop)
    resume = (folder / log.NAME).exists()
    if resume:
        session.restore()
    if not session.is_done:
        session.begin(resume=resume)
    session.recorder.seconds_starting = time.perf_counter() - begun
    store.stopping = lambda: bool(stop.name)
    return session


def _resolved(config: Run) -> Run:
    """With a value for every field. Members do not validate before the end: `overtone follow` does that for all."""
    resolved, saving = config.resolved(), config.saving
    every = config.choice.build().every or 1
    never = resolved.training.steps + 1
    saving = replace(saving, eval_every=saving.eval_every or never, checkpoint_every=saving.checkpoint_every or every)
    return replace(resolved, saving=saving)


# -- the directory of a member -----------------------------------------------------------------------------------------


def _own_slot(config: Run, url: str) -> Slot | None:
    """The directory that was named; or one of a member of this run that this machine had and that has ended."""
    if config.out is not None:
        if (config.out / log.NAME).exists() or (config.out / directory.CONFIG).exists():
            directory.refuse_unused(config.out, "store")
        return config.out, directory.claim(config.out)
    found = founded_in(url)
    for folder in _slots(found.about.run.hex()) if found is not None else ():
        if config.stored.name in (None, folder.name):
            try:
                return folder, directory.claim(folder)
            except RunError:  # its process lives
                if config.stored.name is not None:
                    raise
    return None


def _slots(run: str) -> Iterator[Path]:
    yield from sorted(path.parent for path in _home(run).glob(f"*/{directory.CONFIG}"))


def _home(run: str) -> Path:
    return directory.RUNS / f"store-{run}"


def _new_slot(run: str, name: str) -> Slot:
    folder = _home(run) / name
    return folder, directory.claim(folder)


def _name_in(folder: Path, config: Run) -> str | None:
    """The name under which the member of this directory goes on. A name that was given must be that name."""
    file = folder / directory.CONFIG
    if not file.exists():
        return config.stored.name
    known, asked = toml.load(file, Run()).stored, config.stored
    if known.store is None or (asked.name is not None and known.name != asked.name):
        whose = f"of the member {known.name}" if known.store else "not of a run in a store"
        raise UnfitRunError(f"run {folder}: {whose}; give another --out, or leave it out")
    return known.name
