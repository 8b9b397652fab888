"""The audit of a run: every seal, every fingerprint, and who sent what.

It replays the run from its first weights. Where something is missing or cannot be believed, the anchor is not known any
more: from there on only seals are checked, until a snapshot that fits the commits tells the anchor again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from overtone.coding import fingerprint
from overtone.errors import MismatchError, StoreError, WireError
from overtone.exchange.message import Expected, Kind, open_message, unseal_message
from overtone.swarm.archive import Archive
from overtone.swarm.follower import shared_tensors
from overtone.swarm.founding import claimed
from overtone.swarm.observer import Observer
from overtone.swarm.prune import pruned_before
from overtone.swarm.records import (
    Commit,
    Note,
    Process,
    by_round,
    commit_path,
    folder_of,
    parsed,
    pruned_path,
    rounds_in,
)

MOST_TOLD = 3  # faults, in the words of an error
Progress = Callable[[int, int], None]  # the round, and how many there are


@dataclass(frozen=True)
class Fault:
    """An object that is missing, damaged or forged."""

    path: str
    why: str


@dataclass
class Sent:
    """What a member has sent."""

    number: int
    name: str = ""  # "" if nothing that can be believed tells it
    counted: int = 0  # messages
    left_out: dict[int, str] = field(default_factory=dict)  # by round: why the message does not count
    late: int = 0  # messages that no commit names
    bytes: int = 0  # of all of them
    norms: list[float] = field(default_factory=list)  # of the payloads that could be decoded


@dataclass
class Gap:
    """Rounds that could not be replayed: from ``first`` to ``last``, both included."""

    first: int
    last: int
    why: str


@dataclass
class Audit:
    """What was found."""

    rounds: int = 0  # that are committed
    replayed: int = 0  # of them, with the fingerprint that the commit names
    gaps: list[Gap] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    members: dict[int, Sent] = field(default_factory=dict)
    pruned: int = 0  # messages and snapshots before this round were deleted on purpose


def audit(observer: Observer, progress: Progress | None = None) -> Audit:
    """Check everything that is there, and go on after whatever is wrong."""
    return _Auditor(observer).run(progress)


class _Auditor:
    def __init__(self, observer: Observer) -> None:
        self.follower = observer.follower
        self.archive: Archive = observer.archive
        self.found = Audit()
        self._why = "the first weights are not known"  # why the anchor is not known; "" while it is
        paths = self.archive.bucket.sizes()
        self._posts = by_round(paths)
        self._claims = [process for path in sorted(paths) if (process := _claim_at(path)) is not None]
        self._snapshots = rounds_in(path.removeprefix("snapshots/") for path in paths)
        self._pruned = rounds_in(path.removeprefix("pruned/") for path in paths)
        self._commits = [index for index in self._posts if commit_path(index) in paths]

    def run(self, progress: Progress | None) -> Audit:
        found = self.found
        self._check_claims()
        self._check_pruned()
        found.rounds = self._end()
        self._look_at_first()
        for index in range(found.rounds):
            if progress is not None:
                progress(index, found.rounds)
            self._look_at_snapshot(index)
            self._look_at_round(index)
        self._look_at_snapshot(found.rounds)
        for index in (i for i in self._snapshots if i > found.rounds):
            self._fault(self.archive.snapshot_path(index), "of a round that the run has not come to")
        for index in (i for i in self._posts if i >= found.rounds):
            self._look_at_others(index, set(), late=False)
        found.faults.sort(key=lambda fault: fault.path)
        return found

    # -- what is there ---------------------------------------------------------------------------------------------

    def _fault(self, path: str, why: object) -> None:
        self.found.faults.append(Fault(path, str(why).removeprefix(f"store {self.archive.url}: {path}: ")))

    def _check_claims(self) -> None:
        archive = self.archive
        founder = archive.founded.founder
        self._member(founder.number).name = founder.name
        for process in self._claims:
            try:
                self._member(process.number).name = claimed(archive.bucket, archive.seal, archive.about, process)
            except WireError as error:
                self._fault(f"members/{process}", error)

    def _check_pruned(self) -> None:
        self.found.pruned = pruned_before(self.archive)
        for index in self._pruned:
            if index > self.found.pruned:
                self._fault(pruned_path(index), "not of somebody with the key")

    def _end(self) -> int:
        """The first round after all commits that can be believed."""
        for index in self._commits[::-1]:
            try:
                if self.archive.commit(index) is not None:
                    return index + 1
            except WireError as error:
                self._fault(commit_path(index), error)
        return 0

    def _member(self, number: int) -> Sent:
        return self.found.members.setdefault(number, Sent(number))

    # -- shared states ---------------------------------------------------------------------------------------------

    def _look_at_first(self) -> None:
        try:
            self.follower.take(self.archive.standing(0))
            self._why = ""
        except WireError as error:
            self._fault(self.archive.snapshot_path(0), error)

    def _look_at_snapshot(self, index: int) -> None:
        """Compare a snapshot with the shared state here; or take it over, if that is not known."""
        if index not in self._snapshots:
            return
        path = self.archive.snapshot_path(index)
        try:
            standing = self.archive.standing(index)
            if self._why:
                self.follower.take(standing)
                self._why = ""
                return
        except WireError as error:
            self._fault(path, error)
            return
        here = shared_tensors(self.follower.exchanger)
        theirs = [standing.tensors[name] for name in here if name in standing.tensors]
        # By their fingerprints: a NaN is equal to itself there.
        if fingerprint.of_tensors(here.values()) != fingerprint.of_tensors(theirs):
            self._fault(path, "not the shared state that follows from the rounds before it")

    # -- rounds ----------------------------------------------------------------------------------------------------

    def _look_at_round(self, index: int) -> None:
        path, commit = commit_path(index), None
        try:
            commit = self.archive.commit(index)
            if commit is None:
                self._lose(path, "missing")
        except WireError as error:
            self._lose(path, error)
        named = {one.process for one in commit.messages} if commit is not None else set()
        if commit is not None:
            self._look_at_messages(commit)
        if self._why:
            self._count_gap(index)
        # Without a commit nobody knows which of them counted.
        self._look_at_others(index, named, late=commit is not None)

    def _lose(self, path: str, why: object) -> None:
        """Something without which the anchor is not known any more."""
        self._fault(path, why)
        self._why = f"{path}: {self.found.faults[-1].why}"

    def _count_gap(self, index: int) -> None:
        gaps = self.found.gaps
        if gaps and gaps[-1].last == index - 1 and gaps[-1].why == self._why:
            gaps[-1].last = index
        else:
            gaps.append(Gap(index, index, self._why))

    def _look_at_messages(self, commit: Commit) -> None:
        """Check the messages that a commit names, then step by them."""
        messages: dict[Process, bytes] = {}
        for named in commit.messages:
            path, member = f"{folder_of(commit.round)}/{named.process}", self._member(named.number)
            raw = self.archive.bucket.read(path, self.follower.lineage.longest)
            messages[named.process] = raw or b""
            why = "" if raw is not None else "missing"
            if raw is not None:
                try:
                    seal = self._checked(commit.round, named.process, raw)
                    why = "" if seal.hex() == named.seal else "another message than the commit names"
                except WireError as error:
                    why = str(error)
            if raw is None and commit.round < self.found.pruned:
                self._why = self._why or f"messages before round {self.found.pruned} were pruned"
            elif why and named.number not in commit.left_out:
                self._lose(path, why)
            elif why:
                self._fault(path, why)
            if not why:
                member.bytes += len(messages[named.process])
                if named.number in commit.left_out:
                    member.left_out[commit.round] = "the commit says so; it was not replayed"
                else:
                    member.counted += 1
        for member_now in commit.members:
            self._member(member_now.number).name = member_now.name
        if not self._why:
            self._step(commit, messages)

    def _step(self, commit: Commit, messages: dict[Process, bytes]) -> None:
        try:
            heard = self.follower.step(commit, messages)
        except MismatchError as error:
            self._lose(commit_path(commit.round), error)
            return
        self.found.replayed += 1
        for number, norm in heard.norms.items():
            self._member(number).norms.append(norm)
        for number, why in heard.left_out.items():
            if commit.round in self._member(number).left_out:
                self._member(number).left_out[commit.round] = why

    def _look_at_others(self, index: int, named: set[Process], *, late: bool) -> None:
        """Objects of a round that its commit does not name: messages that came too late, wishes to join, and what
        somebody else has put there."""
        for process in self._posts.get(index, ()):
            if process in named:
                continue
            path = f"{folder_of(index)}/{process}"
            raw = self.archive.bucket.read(path, self.follower.lineage.longest)
            if raw is None:  # pruned meanwhile
                continue
            try:
                self._checked(index, process, raw)
                if late and open_message(raw, self.archive.seal).header.kind is Kind.ROUND:
                    self._member(process.number).late += 1
                    self._member(process.number).bytes += len(raw)
            except WireError as error:
                self._fault(path, error)

    def _checked(self, index: int, process: Process, raw: bytes) -> bytes:
        """The seal of a message, or of a wish to join, that this process has put into this round."""
        archive = self.archive
        expected = Expected(index, archive.about.run, archive.about.schema)
        message = unseal_message(raw, expected, process.number, archive.seal)
        kind = message.header.kind
        if kind not in (Kind.ROUND, Kind.JOIN):
            raise WireError(f"kind: {kind.name.lower()} where a round or a join is due")
        session = Note.split(message.body)[0].session if kind is Kind.ROUND else parsed(message.body).get("session")
        if session != process.session:
            raise WireError(f"session: says {session}, lies where {process.session} would write")
        return message.seal


def _claim_at(path: str) -> Process | None:
    folder, _, name = path.rpartition("/")
    return Process.parse(name) if folder == "members" else None


def refuse_faults(archive: Archive, found: Audit) -> None:
    """Raise an error if anything was found wrong."""
    if not found.faults:
        return
    first = "; ".join(f"{fault.path}: {fault.why}" for fault in found.faults[:MOST_TOLD])
    more = f" (and {len(found.faults) - MOST_TOLD} more)" if len(found.faults) > MOST_TOLD else ""
    raise StoreError(f"store {archive.url}: objects that are missing, damaged or forged: {first}{more}")
