"""`overtone follow`."""

from __future__ import annotations

from dataclasses import dataclass, field

import tyro

from overtone.runs.follow import Following, follow
from overtone.runs.stop_signals import listening


@dataclass(frozen=True)
class Follow:
    """Observe a run in a store: replay its rounds as they come, validate, and write a run log.

    It is no member of the run, trains nothing, and writes nothing into the store. It ends with the run, or when it is
    interrupted; the same --out goes on.
    """

    store: tyro.conf.Positional[str]
    """Where the run lives: a folder, s3://bucket/path, gs://bucket/path or az://account/container/path."""
    settings: tyro.conf.FlagCreatePairsOff[Following] = field(default_factory=Following)


def run_follow(flags: Follow) -> None:
    """Follow the run until it is over, or until a signal."""
    with listening() as stop:
        follow(flags.store, flags.settings, stop)
