"""`overtone prune`."""

from __future__ import annotations

from dataclasses import dataclass

import tyro

from overtone.cli.console import out
from overtone.common.limits import Limit, check, human_bytes
from overtone.errors import ConfigError
from overtone.swarm.archive import Archive
from overtone.swarm.prune import carry_out, plan

LIMITS = {"keep_rounds": Limit("the last rounds whose messages stay", 1, 10**8 - 1)}


@dataclass(frozen=True)
class Prune:
    """Delete old messages and snapshots of a run in a store, which nobody needs to go on.

    The newest two snapshots stay, with all rounds since the older of them, and so do all commits and the first weights.
    """

    store: tyro.conf.Positional[str]
    """Where the run lives: a folder, s3://bucket/path, gs://bucket/path or az://account/container/path."""
    keep_rounds: int
    """The last rounds whose messages stay, so that their models can be replayed. At least so many are kept."""
    dry_run: tyro.conf.FlagCreatePairsOff[bool] = False
    """Print what would be deleted, and delete nothing."""

    def __post_init__(self) -> None:
        check(self, LIMITS, ConfigError)


def run_prune(flags: Prune) -> None:
    """Delete what is not needed, or say what that is."""
    archive = Archive.open(flags.store)
    found = plan(archive, flags.keep_rounds)
    if flags.dry_run:
        for path in found.paths:
            out.print(path, markup=False)
    else:
        carry_out(archive, found)
    what = f"{len(found.paths)} objects, {human_bytes(found.size)}"
    if not found.base:
        kept = "all rounds stay: there are not two snapshots that can be believed with so many rounds after them"
    else:
        kept = f"messages from round {found.first} on and snapshots from round {found.base} on stay"
    out.print(f"{flags.store}: {what} {'would be ' if flags.dry_run else ''}deleted; {kept}", markup=False)
