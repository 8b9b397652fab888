"""Follows the commits of a run: takes over its shared state, and steps it round by round.

A newcomer does so until it is a member, an observer and an auditor do nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from overtone.errors import MismatchError, StoreError, WireError
from overtone.exchange.round import Exchanger
from overtone.swarm.archive import Archive, DeletedError, Standing
from overtone.swarm.leases import Leases
from overtone.swarm.lineage import Heard, Lineage
from overtone.swarm.records import MOST_COMMIT, Commit, Member, Process, commit_path, way_back

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Followed:
    """A round that was followed."""

    commit: Commit
    heard: Heard
    size: int  # bytes of the commit and of the messages that it names


class Follower:
    """The shared state of a run at one round, in the tensors of an exchanger whose model stands at the anchor.

    ``members`` and ``leases`` are those of the round that is open.
    """

    def __init__(self, exchanger: Exchanger, archive: Archive) -> None:
        self.exchanger = exchanger
        self.archive = archive
        exchanger.state.run = archive.about.run
        self.lineage = Lineage(exchanger)
        self.members: tuple[Member, ...] = (archive.founded.founder,)
        self.leases = archive.founded.leases

    @property
    def index(self) -> int:
        """The number of the round that is open."""
        return self.lineage.index

    # -- taking over -----------------------------------------------------------------------------------------------

    def begin(self, most: int | None = None) -> None:
        """Take over the newest snapshot that can be believed, at most that before round ``most``; or else the first
        weights."""
        if not self.take_newest(most=most):
            self.take(self.archive.standing(0))

    def take_newest(self, *, least: int = 1, most: int | None = None) -> bool:
        """Take over the newest snapshot that can be believed, between two rounds. Returns False if there is none."""
        for index in self.archive.snapshots():
            if index < least or (most is not None and index > most):
                continue
            try:
                self.take(self.archive.standing(index))
            except (StoreError, WireError) as error:
                log.warning("%s; an older snapshot is tried", error)
            else:
                return True
        return False

    def take(self, standing: Standing) -> None:
        """Take over a shared state. Nothing is changed unless it fits."""
        own, exchanger = shared_tensors(self.exchanger), self.exchanger
        if _outlines(own) != _outlines(standing.tensors):
            path = self.archive.snapshot_path(standing.index)
            raise WireError(f"store {self.archive.url}: {path}: of other tensors than this model has")
        for name, tensor in own.items():
            tensor.copy_(standing.tensors[name])
        exchanger.buffers.put(exchanger.buffers.shared)
        exchanger.show(exchanger.method.rule.place(exchanger.state.tensors))
        exchanger.state.rounds, self.members, self.leases = standing.index, standing.members, standing.leases
        self.lineage.anchor = exchanger.fingerprint()

    # -- stepping --------------------------------------------------------------------------------------------------

    def advance(self) -> Followed | None:
        """Follow the commit of the open round, if it is there. If its messages were pruned meanwhile, a later snapshot
        is taken over, and its round followed."""
        while True:
            raw = self.archive.bucket.read(commit_path(self.index), MOST_COMMIT)
            if raw is None:
                return None
            commit = self.archive.opened_commit(raw, self.index)
            try:
                messages = self.archive.messages(commit, self.lineage.longest)
            except DeletedError:
                if not self.take_newest(least=self.index + 1):
                    raise
                log.warning(
                    "store %s: messages of round %d were deleted or replaced; it goes on from the snapshot of round %d",
                    self.archive.url,
                    commit.round,
                    self.index,
                )
            else:
                return Followed(commit, self.step(commit, messages), len(raw) + sum(map(len, messages.values())))

    def catch_up(self) -> None:
        """Follow all commits that are there."""
        while self.advance() is not None or self.archive.refuse_hole(self.index):
            pass

    def step(self, commit: Commit, messages: Mapping[Process, bytes]) -> Heard:
        """Step the shared state by a commit and the messages that it names."""
        heard = self.lineage.hear(commit.messages, messages, self.members)
        self.lineage.follow(heard, stands=True)
        self.lineage.check(commit, heard)
        self.leases, self.members = self.leases_after(commit, heard), commit.members
        return heard

    def leases_after(self, commit: Commit, heard: Heard) -> Leases | None:
        """The leases after a commit. They follow from the leases before and from what was heard."""
        found = self.renewed(commit.members, heard)
        if (found.told() if found is not None else {}) != commit.data:
            raise MismatchError(
                f"round {commit.round}: the commit of member {commit.by} leases out other samples than follow from the "
                f"rounds before; stop that member. {way_back(commit.round)}"
            )
        return found

    def renewed(self, now: Sequence[Member], heard: Heard) -> Leases | None:
        """The leases among these members, if this was heard; None if the members share no samples."""
        if self.leases is None:
            return None
        used = {number: note.samples for number, note in heard.notes.items()}
        return self.leases.after({member.number for member in now}, used)


def shared_tensors(exchanger: Exchanger) -> dict[str, Tensor]:
    """The shared state of an exchanger, by the names that snapshots have."""
    tensors = exchanger.state.tensors
    shared = {name: tensors[name] for name in exchanger.method.rule.shared if name in tensors}
    frozen = {f"frozen {i}": tensor for i, tensor in enumerate(exchanger.parameters.frozen)}
    return {**shared, **frozen, **{f"buffer {i}": t for i, t in enumerate(exchanger.buffers.shared)}}


def _outlines(tensors: Mapping[str, Tensor]) -> dict[str, object]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
