"""Pruning: deletes messages and snapshots that nobody needs any more. Only ever on request.

A newcomer needs the newest snapshot that it can believe, and all rounds from there on; the snapshot before it is kept
in reserve. So everything from a *base* on stays: a snapshot of which there is a newer one, and that has enough rounds
after it. What is read to find the base is sealed, and the snapshots that stay are fetched and compared with the commits
before them: an object that somebody without the key has put there decides nothing.

Commits always stay, and so do the run, its members, and its first weights. A commit is small, and it is what holds a
replica that was asleep for long: without it, that replica could commit the round anew.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass

from overtone.errors import WireError
from overtone.exchange.message import Kind, seal_message
from overtone.swarm.archive import Archive
from overtone.swarm.records import by_round, folder_of, pruned_path, rounds_in

log = logging.getLogger(__name__)

NEEDED = 2  # snapshots


@dataclass(frozen=True)
class Plan:
    """What can be deleted, and what stays."""

    rounds: int  # that are committed
    base: int  # the round before which nothing is needed; 0: everything is
    paths: tuple[str, ...]  # to delete, the oldest first
    size: int  # bytes of them

    @property
    def first(self) -> int:
        """The first round whose messages stay: that whose commit names the anchor of the base, too."""
        return max(0, self.base - 1)


def plan(archive: Archive, keep_rounds: int) -> Plan:
    """What can be deleted if the messages of the last ``keep_rounds`` rounds, at least, are to stay."""
    base, rounds = _base(archive, keep_rounds)
    sizes = archive.bucket.sizes("rounds")
    posts = [f"{folder_of(i)}/{process}" for i, some in by_round(sizes).items() if i < base - 1 for process in some]
    found = {path: sizes[path] for path in posts}
    for name, size in archive.bucket.names("snapshots").items():
        # Of several that wanted to found the run, all but one have left weights behind.
        is_lost = name.startswith("00000000-") and f"snapshots/{name}" != archive.founded.snapshot
        if is_lost or (rounds_in([name]) and int(name) < base):
            found[f"snapshots/{name}"] = size
    return Plan(rounds, base, tuple(found), sum(found.values()))


def carry_out(archive: Archive, plan: Plan) -> None:
    """Delete what was planned. Before that, a sealed note tells auditors that it was meant."""
    if plan.base:
        header = archive.about.header(Kind.PRUNED, 0, plan.base)
        archive.bucket.create(pruned_path(plan.base), seal_message(header, json.dumps({}).encode(), archive.seal))
    archive.bucket.remove_all(plan.paths)


def pruned_before(archive: Archive) -> int:
    """The round before which messages may be missing, because they were pruned; 0 if none were."""
    for index in rounds_in(archive.bucket.names("pruned"))[::-1]:
        try:
            archive.about.opened(archive.bucket.read(pruned_path(index)) or b"", Kind.PRUNED, index, archive.seal)
        except WireError as error:
            log.warning("store %s: %s: %s; it is not believed", archive.url, pruned_path(index), error)
        else:
            return index
    return 0


def _base(archive: Archive, keep_rounds: int) -> tuple[int, int]:
    """The snapshot from which everything stays (0: the first weights), and how many rounds are committed."""
    believed, rounds = 0, 0
    for index in archive.snapshots():
        if believed >= NEEDED and index > rounds - keep_rounds:
            continue
        try:
            archive.standing(index)
        except WireError as error:
            log.warning("%s; the snapshot is not counted", error)
            continue
        believed += 1
        if believed == 1:
            rounds = _end(archive, index)
        if believed >= NEEDED and index <= rounds - keep_rounds:
            return index, rounds
    return 0, rounds


def _end(archive: Archive, index: int) -> int:
    """The first round after a snapshot that has no commit which can be believed."""
    try:
        while archive.commit(index) is not None:
            index += 1
    except WireError as error:
        log.warning("%s; the rounds before it count", error)
    return index
