"""What the store says of a run, as far as it can be believed. Whoever looks at a run reads it here; nothing is written.

Every object has a seal. One that nobody with the key has written, or that was meant for another place, raises a
`WireError` that names its path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from overtone.coding import fingerprint
from overtone.errors import MismatchError, StoreError, WireError
from overtone.exchange.message import Seal, open_message
from overtone.swarm.bucket import Bucket
from overtone.swarm.founding import Founded, read_run
from overtone.swarm.leases import Leases
from overtone.swarm.records import (
    MOST_COMMIT,
    About,
    Commit,
    Member,
    Named,
    Process,
    commit_path,
    folder_of,
    rounds_in,
    snapshot_path,
    unpacked_snapshot,
    way_back,
)

LOOKED_AT = 3  # of the last rounds, for a commit that should not be there


class DeletedError(StoreError):
    """A message that counts is not there any more, or another one in its place."""


@dataclass(frozen=True)
class Standing:
    """The shared state before a round, and whose it is."""

    index: int
    tensors: dict[str, Tensor]
    members: tuple[Member, ...]
    leases: Leases | None


class Archive:
    """The objects of one run."""

    def __init__(self, bucket: Bucket, seal: Seal, founded: Founded) -> None:
        self.bucket = bucket
        self.seal = seal
        self.founded = founded

    @classmethod
    def open(cls, url: str, key: str | bytes | None = None) -> Archive:
        """The run that lives in this place. ``key`` is, by default, the environment variable ``OVERTONE_KEY``."""
        bucket, seal = Bucket(url, new=False), Seal.with_key(key)
        founded = read_run(bucket, seal)
        if founded is None:
            raise StoreError(f"store {url}: no run lives there; give the place where a replica has founded one")
        return cls(bucket, seal, founded)

    @property
    def about(self) -> About:
        """The header fields that all objects of the run share."""
        return self.founded.about

    @property
    def url(self) -> str:
        """Where the run lives."""
        return self.bucket.url

    # -- commits and messages --------------------------------------------------------------------------------------

    def commit(self, index: int) -> Commit | None:
        """The commit of a round; None if there is none yet."""
        raw = self.bucket.read(commit_path(index), MOST_COMMIT)
        return None if raw is None else self.opened_commit(raw, index)

    def opened_commit(self, raw: bytes, index: int) -> Commit:
        """The commit of a round, as its object says."""
        try:
            return Commit.unpack(raw, index, self.about, self.seal)
        except WireError as error:
            raise WireError(
                f"store {self.url}: {commit_path(index)}: {error}. Somebody without the key has written it, or it is "
                "damaged: delete it, and put back what was there, if something was"
            ) from error

    def messages(
        self, commit: Commit, most: int | None = None, known: Mapping[Process, bytes] | None = None
    ) -> dict[Process, bytes]:
        """The messages that a commit names, none of more than ``most`` bytes. Those that are ``known`` are not fetched.

        They have the seals that the commit names, and nothing else of them is checked yet. Another one in the place of
        a message is not left out: it would be here, and not where the right one was read.
        """
        return {named.process: self._message(commit.round, named, most, known or {}) for named in commit.messages}

    def _message(self, index: int, named: Named, most: int | None, known: Mapping[Process, bytes]) -> bytes:
        raw = known.get(named.process)
        if raw is not None and self._is_named(raw, named):
            return raw
        path = f"{folder_of(index)}/{named.process}"
        raw = self.bucket.read(path, most)
        if raw is not None and self._is_named(raw, named):
            return raw
        what = "deleted" if raw is None else "replaced"
        raise DeletedError(
            f"store {self.url}: round {index}: the message of member {named.number} counts, and was {what} ({path}); "
            f"put it back, or start again, if there is a later snapshot. {way_back(index)}"
        )

    def _is_named(self, raw: bytes, named: Named) -> bool:
        try:
            return open_message(raw, self.seal).seal.hex() == named.seal
        except WireError:
            return False

    def refuse_hole(self, index: int) -> bool:
        """Refuse to go on from a round that had no commit a moment ago, if a later one has one: history would be
        written anew. Returns True if its commit has come since."""
        later = [other for other in rounds_in(self.bucket.folders("rounds")) if other > index]
        for other in later[-LOOKED_AT:]:
            try:
                is_there = self.commit(other) is not None
            except (StoreError, WireError):
                continue  # somebody without the key may have put it there
            if is_there:
                # The others do not stand still: they may have committed both since this round was looked at.
                if self.commit(index) is not None:
                    return True
                raise MismatchError(
                    f"store {self.url}: the commit of round {index} is missing, and round {other} has one: it was "
                    "deleted. Put it back, or start from a copy of the store"
                )
        return False

    # -- shared states ---------------------------------------------------------------------------------------------

    def snapshots(self) -> list[int]:
        """The rounds that have a snapshot, the newest first, without the first weights."""
        return rounds_in(self.bucket.names("snapshots"))[::-1]

    def snapshot_path(self, index: int) -> str:
        """The path of the shared state before a round."""
        return snapshot_path(index) if index else self.founded.snapshot

    def standing(self, index: int) -> Standing:
        """The shared state before a round: of a snapshot, or the first weights. Its anchor is that which the commit
        before it names."""
        founded, path = self.founded, self.snapshot_path(index)
        members: tuple[Member, ...] = (founded.founder,)
        anchor, leases = founded.anchor, founded.leases
        if index:
            commit = self.commit(index - 1)
            if commit is None:
                raise WireError(f"store {self.url}: {path}: there is no commit of the round before it")
            anchor, members = commit.anchor, commit.members
            leases = Leases.read(commit.data) if commit.data else None
        raw = self.bucket.read(path)
        if raw is None:
            raise WireError(f"store {self.url}: {path}: it is not there")
        try:
            tensors = unpacked_snapshot(raw, index, self.about, self.seal)
        except WireError as error:
            raise WireError(f"store {self.url}: {path}: {error}") from error
        if "anchor" not in tensors or fingerprint.of_tensors([tensors["anchor"]]).hex() != anchor:
            raise WireError(f"store {self.url}: {path}: its anchor is not the one that the commit before it names")
        return Standing(index, tensors, members, leases)
