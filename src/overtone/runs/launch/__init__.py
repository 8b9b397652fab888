"""`overtone train`: start all replicas of a run on this machine, or be one of them.

`supervisor` is the launcher's side: it starts processes, passes signals on and tells why one failed. `inside` is the
side of a replica: it trains, and reports a failure to its launcher.
"""

from __future__ import annotations

import os
from dataclasses import replace

from overtone.runs import directory, spectrum, toml
from overtone.runs.config import Run
from overtone.runs.launch.inside import in_world, is_replica, one_member, one_replica, threads_of
from overtone.runs.launch.supervisor import refuse_too_many, spawn

__all__ = ["all_replicas", "in_world", "is_replica", "one_replica", "refuse_too_many", "spawn", "train"]


def train(config: Run, *, resume: bool) -> None:
    """Train as one replica of a world that exists, as a member of a run in a store, as the only replica, or by starting
    all replicas here."""
    if config.stored.store is not None:
        one_member(config)
    elif is_replica() or config.replicas == 1:
        one_replica(config, resume=resume)
    else:
        all_replicas(config, resume=resume)


def all_replicas(config: Run, *, resume: bool) -> None:
    """Start all replicas with the same configuration, and wait for them. Whatever must fail is refused before."""
    spectrum.refuse_unfit(config.saving.spectrum, config.choice.build())
    folder = config.out or directory.fresh(config.choice.method)
    if not resume:
        directory.refuse_used(folder)
    directory.refuse_busy(folder)
    os.environ[toml.INHERITED] = toml.toml(replace(config, out=folder))
    arguments = ["train", "--resume", str(folder)] if resume else ["train"]
    try:
        spawn(arguments, replicas=config.replicas, threads=threads_of(config, config.replicas))
    finally:
        del os.environ[toml.INHERITED]
