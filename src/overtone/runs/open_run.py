"""Everything before the first step of `overtone train`: data, directory, model, handshake, checkpoint, log."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from overtone.common.machine_errors import in_words
from overtone.errors import ConfigError, MismatchError
from overtone.replica import Replica
from overtone.runs import directory, optimizers, spectrum, toml
from overtone.runs.advice import warn_of_few_rounds
from overtone.runs.checkpoint.run_state import RunState, first_difference
from overtone.runs.config import Run
from overtone.runs.coordination import Coordinator
from overtone.runs.loop import prepare
from overtone.runs.session import Session
from overtone.runs.stop_signals import StopRequest
from overtone.runs.timing import RunTimer
from overtone.sim import rng
from overtone.tasks import Feed, Task, load_task
from overtone.transport import Solo
from overtone.world.join import whole_number
from overtone.world.process_group import Torch

# Options that may differ from host to host, and options that are compared by other means: the handshake compares the
# models, and a fingerprint compares the data.
PRIVATE = ("out", "device", "threads", "timeout", "replicas", "task", "model", "data", "tokenizer")


@in_words()
def open_run(config: Run, transport: Solo | Torch, *, resume: bool, stop: StopRequest | None = None) -> Session:
    """Everything before the first step: data, directory, model, handshake, checkpoint, first line of the log.

    A step that can fail on one rank alone goes through `Coordinator.all_succeed`, so that all ranks fail together.
    Nothing is written into the run's directory, except the lock, before everything fits.
    """
    begun = time.perf_counter()
    config = config.resolved()
    spectrum.refuse_unfit(config.saving.spectrum, config.choice.build())
    coordinator = Coordinator(transport)
    task, feed = coordinator.all_succeed(lambda: _load(config, transport))
    fixed = fixed_facts(config, task)
    _refuse_differences(config, fixed, coordinator)
    folder = _folder(config, coordinator)
    lock = coordinator.all_succeed(lambda: _claim(folder, coordinator, resume=resume))
    model, inner = coordinator.all_succeed(lambda: build(config, task, transport.rank))
    replica = Replica(model, inner, config.choice.build(), transport)
    if transport.rank == 0:
        warn_of_few_rounds(replica, config.training.steps)
    coordinator.phase = "upkeep"  # the replicas train from here on
    timer = RunTimer(config.training.samples * task.units() * transport.size)
    state = RunState(replica, feed, timer, fixed)
    session = Session(config, task, state, coordinator, folder, lock, stop or StopRequest())
    if resume:
        session.restore()
    if not session.is_done:
        session.begin(resume=resume)
    session.recorder.seconds_starting = time.perf_counter() - begun
    return session


def _load(config: Run, transport: Solo | Torch) -> tuple[Task, Feed]:
    task, training = load_task(config.task), config.training
    skew = config.task.skew
    return task, task.feed(transport.rank, transport.size, batch=training.batch, seed=config.seed, skew=skew)


def fixed_facts(config: Run, task: Task) -> dict[str, Any]:
    """Facts that must be the same on all ranks and in all sessions. The replica itself compares model and method."""
    data = task.about()
    return {
        "inner": config.training.inner,
        "data": data.get("fingerprint", data.get("name")),
        "training samples": len(task.train),
    }


def _refuse_differences(config: Run, fixed: Mapping[str, Any], coordinator: Coordinator) -> None:
    """Options that the handshake of the replicas does not compare, such as the batch, must be equal on all ranks. So
    must the data, because the shards of all ranks are cut from the same samples. A collective."""
    mine = {**toml.flat(config, leave_out=PRIVATE), **fixed}
    for rank, theirs in enumerate(coordinator.all_gather(mine)):
        if key := first_difference(mine, theirs):
            raise MismatchError(
                f"replicas do not match: {key} is {mine.get(key)} on rank {coordinator.transport.rank} and "
                f"{theirs.get(key)} on rank {rank}; start every rank with the same configuration and the same data"
            )


def _folder(config: Run, coordinator: Coordinator) -> Path:
    """The directory that the user named, or else the one that rank 0 chooses below runs/. A collective in either case:
    the user may have named one on some hosts only."""
    name = coordinator.all_gather(directory.fresh(config.choice.method).name)[0]
    return config.out or directory.elected(name)


def _claim(folder: Path, coordinator: Coordinator, *, resume: bool) -> IO[str]:
    if not resume:
        directory.refuse_used(folder)
    return directory.claim(folder, coordinator.world.hex())


def build(config: Run, task: Task, rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model of a replica, with random weights, and its inner optimizer."""
    device = device_for(config.device, rank)
    rng.seed_all(rng.seed_of(config.seed, rank))
    model = prepare(task.model(), config.training, device)
    return model, optimizers.build(model, config.training)


def device_for(choice: str, rank: int) -> torch.device:
    """The device of this replica: a GPU of its own, if the host has enough and the user wants it; else the CPU."""
    local, there = whole_number("LOCAL_RANK", rank), torch.cuda.device_count()
    if choice == "cuda" and local >= there:
        raise ConfigError(f"device=cuda: replica {local} of this host needs a GPU of its own, and there are {there}")
    if choice == "cpu" or local >= there:
        return torch.device("cpu")
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device
