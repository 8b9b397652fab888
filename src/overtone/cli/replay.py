"""`overtone replay`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import tyro
from rich.table import Table

from overtone.cli.console import check_writable, out, progress_bar, write_json
from overtone.common.limits import Limit, check, human_bytes
from overtone.errors import ConfigError, printable
from overtone.runs.live import metrics_line
from overtone.runs.observed import OnThisHost, auditor_of
from overtone.runs.replay import export_round
from overtone.swarm.archive import Archive
from overtone.swarm.audit import Audit, Sent, audit, refuse_faults

LIMITS = {"round": Limit("a round, by its number in the store", 0, 10**8 - 1)}


@dataclass(frozen=True)
class Replay:
    """Replay a run in a store: export its model as it was after any round, or verify all of it.

    What is verified needs neither the task nor its data: every seal, the fingerprint of the anchor after each round,
    and every snapshot.
    """

    store: tyro.conf.Positional[str]
    """Where the run lives: a folder, s3://bucket/path, gs://bucket/path or az://account/container/path."""
    round: int | None = None
    """The round after which the model is exported, by its number in the store. By default the newest."""
    export: Path | None = None
    """Folder to write the model into. It must not exist yet."""
    verify: tyro.conf.FlagCreatePairsOff[bool] = False
    """Check every object, and print who has sent what. The exit status is 1 if anything is wrong."""
    json: Path | None = None
    """File for what was found by --verify, as one JSON object."""
    here: tyro.conf.FlagCreatePairsOff[OnThisHost] = field(default_factory=OnThisHost)

    def __post_init__(self) -> None:
        check(self, LIMITS, ConfigError)


def run_replay(flags: Replay) -> None:
    """Export the model of a round, or verify the run."""
    if flags.verify == (flags.export is not None):
        raise ConfigError("replay: give either --export FOLDER or --verify")
    if flags.verify and flags.round is not None:
        raise ConfigError(f"round={flags.round}: --verify checks all rounds; leave one of them out")
    if flags.json is not None and not flags.verify:
        raise ConfigError(f"json {flags.json}: for what --verify finds; give that too, or leave it out")
    if flags.export is not None:
        index, metrics = export_round(flags.store, flags.round, flags.export, flags.here)
        after = f"after round {index}" if index >= 0 else "before the first round"
        out.print(f"{flags.export}: the model of {flags.store} {after}; {metrics_line(metrics)}", markup=False)
    else:
        _verify(flags)


def _verify(flags: Replay) -> None:
    if flags.json is not None:
        check_writable(flags.json)
    archive = Archive.open(flags.store)
    with progress_bar() as bar:
        task = bar.add_task("verify", total=None, note="")
        found = audit(auditor_of(archive), lambda index, rounds: bar.update(task, completed=index, total=rounds))
    if flags.json is not None:
        write_json(flags.json, _plain(found))
    out.print(_table(found))
    for line in _words(found):
        out.print(printable(line), markup=False)
    refuse_faults(archive, found)


def _table(found: Audit) -> Table:
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for header in ("member", "name", "messages", "left out", "late", "bytes", "norm, median", "largest"):
        shown.add_column(header, justify="left" if header == "name" else "right")
    for sent in _members(found):
        norms = [f"{of(sent.norms):.3g}" if sent.norms else "" for of in (median, max)]
        counts = (sent.counted, len(sent.left_out), sent.late)
        shown.add_row(str(sent.number), printable(sent.name), *map(str, counts), human_bytes(sent.bytes), *norms)
    return shown


def _words(found: Audit) -> list[str]:
    """All that the table does not say."""
    lines = [
        f"member {sent.number}, round {index}: does not count: {why}"
        for sent in _members(found)
        for index, why in sorted(sent.left_out.items())
    ]
    lines.append(f"{found.rounds} rounds, {found.replayed} of them replayed, with the fingerprints of their commits")
    if found.pruned:
        lines.append(f"pruned: messages and snapshots before round {found.pruned} were deleted on purpose")
    lines += [f"not replayed: rounds {gap.first} to {gap.last}: {gap.why}" for gap in found.gaps]
    return [*lines, *(f"WRONG: {fault.path}: {fault.why}" for fault in found.faults)]


def _members(found: Audit) -> list[Sent]:
    return [found.members[number] for number in sorted(found.members)]


def _plain(found: Audit) -> dict[str, Any]:
    return {**asdict(found), "members": [asdict(sent) for sent in _members(found)]}
