"""A replica's course through the rounds of a run that lives in a store.

After each local step: absorb a commit that has come, post a message if one is due, commit the round if all have posted.
Nothing of this waits. The mailbox writes and reads beside the training, and a commit that comes late moves the weights
by a shift, as an overlapped round does.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from overtone.errors import GaveUpError, MismatchError, PeerError, StateError, WireError
from overtone.exchange.description import Description, compare_described
from overtone.exchange.inner_step import InnerStep
from overtone.exchange.message import NOBODY, Kind, Seal, seal_message
from overtone.exchange.round import Exchanger, Pending
from overtone.ledger import Count, Round
from overtone.swarm import founding, members, saving
from overtone.swarm.archive import Archive
from overtone.swarm.follower import Follower, shared_tensors
from overtone.swarm.leases import Leases
from overtone.swarm.lineage import Heard
from overtone.swarm.mailbox import Folder, Mailbox
from overtone.swarm.open_round import OpenRound
from overtone.swarm.records import Commit, Member, Note, commit_path, folder_of, packed_snapshot, snapshot_path
from overtone.swarm.store import Store, host_name

log = logging.getLogger(__name__)

AHEAD = 2  # times `every` local steps that a replica takes beyond its last message before it stands still
NAP = 0.02  # seconds between two looks of a replica that stands still
MOST_REFUSALS = 3  # of a replica's messages in a row, before it drops what it owes
PATIENCE = 3.0  # times a round's deadline: then a replica that stands still says why, and one that ends goes
FLUSH = 30.0  # seconds that the end waits for the last objects to be written


class Course:
    """Joins the run on creation; then `after_step` and `finish`."""

    def __init__(self, exchanger: Exchanger, store: Store, description: Description, seal: Seal) -> None:
        self.exchanger = exchanger
        self.store = store
        self.seal = seal
        self._pending: Pending | None = None
        self._mark = ""  # the seal of the message that was posted last
        self._posted_units = 0  # that it told
        self._refusals = 0  # of this replica's messages, one after the other
        self._closed = False
        self._proposed = False
        self._since = time.monotonic()  # when the last commit was absorbed
        self._posted = time.monotonic()  # when the last message was made
        self._counted = Count()  # of the bucket, as far as it is in the ledger
        self._enter(description)

    # -- joining ---------------------------------------------------------------------------------------------------

    def _enter(self, description: Description) -> None:
        """Found the run, or catch up with it; then become a member."""
        bucket, exchanger, store = self.store.bucket, self.exchanger, self.store
        # Not lossless, whatever the codec: a message that does not count goes back into the residual.
        exchanger.begin(NOBODY, lossless=False)
        founded, mine = founding.read_run(bucket, self.seal), b""
        if founded is None:
            name = store.name or f"{host_name()}-1"
            tensors, anchor = shared_tensors(exchanger), exchanger.fingerprint().hex()
            units, every = store.units, exchanger.method.every or 1
            leases = None if units is None else Leases(units, every).after({0}, {})
            mine = founding.found(bucket, self.seal, description, tensors, anchor, name, leases, store.settings)
            founded = founding.read_run(bucket, self.seal)
            assert founded is not None, "somebody has founded it"
        compare_described(f"the run in {bucket.url}", founded.description, description)
        self._refuse_other_units(founded.leases)
        self.about = founded.about
        self.follower = Follower(exchanger, Archive(bucket, self.seal, founded))
        self.follower.begin()
        if founded.about.run == mine:
            store.become(founded.founder.process, founded.founder.name)
        else:
            store.become(*founding.take_number(bucket, self.seal, founded, store.name, host_name()))
        self.follower.catch_up()
        self.lineage = self.follower.lineage
        self.mail = Mailbox(bucket, self.lineage.index, self.lineage.longest)
        self._open = OpenRound(self.follower)
        self._follow_members()
        self._join()
        self._count("setup")
        self._posted = time.monotonic()

    def _refuse_other_units(self, theirs: Leases | None) -> None:
        units, every = self.store.units, self.exchanger.method.every
        if units != (None if theirs is None else theirs.units):
            there = "none" if theirs is None else theirs.units
            raise MismatchError(
                f"the run in {self.store.url} does not match: units: {there} there, {units} here, at {every} steps a "
                "round. Use the same data and batch, or another place"
            )

    # -- what a replica calls --------------------------------------------------------------------------------------

    def after_step(self, inner_step: InnerStep, *, due: bool) -> Round | None:
        """Absorb a commit if one has come, then post and commit what is due. Returns the record of a commit."""
        if self._closed:
            raise StateError("step: this replica has finished, and is no member any more; build a new one")
        record = self._turn()
        if not self._is_member:  # it was silent for too long
            self._join()
        if due and self._pending is None:
            self._post(inner_step)
        self._commit_if_due()
        every, pending = self.exchanger.method.every or 1, self._pending
        most = 0 if self.store.wait else AHEAD * every
        if pending is not None and self.exchanger.state.steps - pending.steps >= most:
            record = self._stand_still(lambda: self._pending is None) or record
        while self.store.units_left == 0:  # messages came too late again and again, so that its lease was not renewed
            if not self._is_member:
                self._join()
            elif self._pending is None:
                self._post(inner_step)
            record = self._stand_still(lambda: self._pending is None) or record
        return record

    def finish(self, inner_step: InnerStep) -> list[Round]:
        """Send what is left, leave the run, and take over the anchor.

        If too few members are there to commit, it leaves without a word, and what it owes is lost.
        """
        records, exchanger = [], self.exchanger
        end = time.monotonic() + PATIENCE * members.deadline(self.members)

        def is_over() -> bool:
            return self._pending is None or time.monotonic() > end

        if record := self._stand_still(is_over):
            records.append(record)
        while self._is_member and time.monotonic() < end:
            if self._pending is None:
                self._post(inner_step, leaves=True)
            if record := self._stand_still(is_over):
                records.append(record)
        if self._pending is not None:
            log.warning("store %s: no commit has come; what this replica still owed is lost", self.store.url)
            exchanger.refuse(self._pending)
            self._pending = None
        exchanger.state.tensors["residual"].zero_()
        exchanger.show(exchanger.state.tensors["anchor"])
        self.close()
        return records

    def close(self) -> None:
        """Write what is left to write, and end the thread."""
        if not self.mail.flush(FLUSH):
            log.warning("store %s: not everything was written: %s", self.store.url, self.mail.trouble)
        self.mail.close()
        self._closed = True
        self._count("finish")

    # -- saving ----------------------------------------------------------------------------------------------------

    def saved(self) -> dict[str, Any]:
        """What a saved state must know of the store, beside the exchange state."""
        return saving.saved(self.store, self._mark, self._posted_units)

    def restore(self, saved: Mapping[str, Any], description: Description) -> None:
        """Owe again what a saved state owed, as far as no commit has counted it since. The shared state stays that of
        the store. The model must have the weights that were saved with the state."""
        saving.restore(self.follower, self.store, saved, description)
        self._posted = time.monotonic()

    # -- one turn --------------------------------------------------------------------------------------------------

    def _stand_still(self, until: Callable[[], bool]) -> Round | None:
        """Absorb and commit until something is true. Returns the last record."""
        begin, last, told = time.monotonic(), None, False
        while not until():
            if (record := self._turn()) is not None:
                last = record
                continue
            self._commit_if_due()
            if not told and time.monotonic() - begin > PATIENCE * members.deadline(self.members):
                told = True
                self._tell_why()
            time.sleep(NAP)
        self.store.ledger.add("rounds", Count(waiting=time.monotonic() - begin))
        return last

    def _tell_why(self) -> None:
        """Tell a person why nothing goes on."""
        posted, _ = self._open.posts(self.mail.folder(self.lineage.index).posts)
        posts, least = posted.count, members.least(self.members, self.store.min_replicas)
        why = f"{posts} have posted, {least} must have; start more replicas, or this one with fewer min_replicas"
        log.warning("round %d in %s waits: %s", self.lineage.index, self.store.url, self.mail.trouble or why)

    def _turn(self) -> Round | None:
        """Absorb the commit of the open round, if it has come."""
        index = self.lineage.index
        folder = self.mail.folder(index)
        if folder.commit is None:
            return None
        try:
            commit = Commit.unpack(folder.commit, index, self.about, self.seal)
        except WireError as error:
            raise PeerError(
                f"round {index}: its commit in {self.store.url} was refused: {error}. Somebody without the key has "
                "written it, or it is damaged: delete it, and the round is committed again"
            ) from error
        if any(named.process not in folder.posts for named in commit.messages):
            # A listing may have shown the commit, and not yet a message before it.
            folder.posts.update(self.follower.archive.messages(commit, self.lineage.longest))
        return self._absorb(commit, folder)

    def _absorb(self, commit: Commit, folder: Folder) -> Round:
        exchanger, pending, steps = self.exchanger, self._pending, self.exchanger.state.steps
        heard = self.lineage.hear(commit.messages, folder.posts, len(self.members))
        cost, store = self._cost(), self.store
        leases = self.follower.leases_after(commit, heard)
        self._pending = None
        if pending is not None and self.store.rank in heard.notes:
            pending.received, pending.count = heard.received, cost
            record = exchanger.finish(pending)
            store.used -= heard.notes[store.rank].samples
            self._refusals = 0
        else:
            if pending is not None:
                exchanger.refuse(pending)
                self._after_refusal(heard)
            self.lineage.follow(heard)
            self.store.ledger.add("rounds", cost)
            record = self._record(commit, heard, cost, steps)
        self.lineage.check(commit, heard)
        if not any(member.number == store.rank for member in commit.members):
            store.used = 0  # its lease is gone
        self.follower.leases, self.follower.members = leases, commit.members
        self._follow_members()
        self.mail.done_with(self.lineage.index)
        self._open, self._proposed = OpenRound(self.follower), False
        self._since = time.monotonic()
        for note in commit.notes:
            log.info("round %d: %s", commit.round, note)
        for number, why in heard.left_out.items():
            log.warning("round %d: the message of member %d does not count: %s", commit.round, number, why)
        if commit.by == self.store.rank and self.lineage.index % self.store.snapshot_every == 0:
            self._snapshot()
        return record

    def _after_refusal(self, heard: Heard) -> None:
        """A replica that is too far outside the others, again and again, would never be heard: it starts afresh."""
        self._refusals = self._refusals + 1 if self.store.rank in heard.left_out else 0
        if self._refusals < MOST_REFUSALS:
            return
        log.warning(
            "round %d: %d messages of this replica in a row did not count (%s); what it owed is dropped, and it starts "
            "again from the anchor",
            self.lineage.index,
            self._refusals,
            heard.left_out[self.store.rank],
        )
        tensors, self._refusals = self.exchanger.state.tensors, 0
        tensors["residual"].zero_()
        self.exchanger.show(tensors["anchor"])

    def _record(self, commit: Commit, heard: Heard, cost: Count, steps: int) -> Round:
        """Of a round in which this replica did not speak."""
        return Round(
            index=commit.round,
            local_steps=steps - self.exchanger.state.steps_at_round,
            bytes_sent=cost.sent,
            bytes_received=cost.received,
            seconds_encoding=0.0,
            seconds_waiting=0.0,
            seconds_decoding=heard.received.seconds,
            drift_norm=0.0,
            residual_norm=0.0,
            anchor_fingerprint=commit.anchor,
            left_out=tuple(sorted(heard.left_out)),
        )

    def _snapshot(self) -> None:
        index = self.lineage.index
        packed = packed_snapshot(self.seal, self.about, index, shared_tensors(self.exchanger), self.store.rank)
        self.mail.send(snapshot_path(index), packed)

    # -- posting ---------------------------------------------------------------------------------------------------

    def _post(self, inner_step: InnerStep, *, leaves: bool = False) -> None:
        exchanger, index = self.exchanger, self.lineage.index
        steps = exchanger.state.steps - exchanger.state.steps_at_round
        pending = exchanger.start(inner_step, overlapped=True)
        mine = pending.contribution
        if mine.header.kind is not Kind.ROUND:
            exchanger.refuse(pending)
            raise GaveUpError(f"round {index}: {mine.why}")
        now = time.monotonic()
        pace = (now - self._posted) * (exchanger.method.every or 1) / max(1, steps)
        self._posted = now
        note = Note(self.store.process.session, pace, leaves, self.store.used)
        message = seal_message(mine.header, note.pack() + self.lineage.pattern.body(mine), self.seal)
        self.mail.send(f"{folder_of(index)}/{self.store.process}", message)
        self._pending, self._mark, self._posted_units = pending, message[-self.seal.size :].hex(), self.store.used

    def _join(self) -> None:
        """Ask to join, round by round, until a commit names this process as a member."""
        while not self._is_member:
            index = self.lineage.index
            body = json.dumps({"name": self.store.name, "session": self.store.process.session}).encode()
            message = seal_message(self.about.header(Kind.JOIN, self.store.rank, index), body, self.seal)
            self.mail.send(f"{folder_of(index)}/{self.store.process}", message)
            self._stand_still(lambda index=index: self.lineage.index > index)  # type: ignore[misc]

    # -- committing ------------------------------------------------------------------------------------------------

    def _commit_if_due(self) -> None:
        if self._proposed:
            return
        index, now, store = self.lineage.index, time.monotonic(), self.store
        raw = self.mail.folder(index).posts
        commit = self._open.proposal(raw, store.rank, now=now, since=self._since, least=store.min_replicas)
        if commit is not None:
            self.mail.send(commit_path(index), commit.pack(self.about, self.seal))
            self._proposed = True

    # -- parts -----------------------------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[Member, ...]:
        """The members of the round that is open."""
        return self.follower.members

    @property
    def _is_member(self) -> bool:
        return any(member.process == self.store.process for member in self.members)

    def _follow_members(self) -> None:
        """Take over who is a member, and who trains on what, from the last commit."""
        now, process = self.members, self.store.process
        self.store.size, self.store.leases = max(1, len(now)), self.follower.leases
        if any(member.number == process.number and member.session > process.session for member in now):
            raise PeerError(
                f"store {self.store.url}: another process has come under the name {self.store.name}, and this one is "
                "no member any more. Give each process a name of its own"
            )
        self.mail.pace = members.usual_pace(now)

    def _cost(self) -> Count:
        """What the bucket has cost since the last time."""
        now = replace(self.store.bucket.count)
        before, self._counted = self._counted, now
        return Count(now.sent - before.sent, now.received - before.received)

    def _count(self, phase: str) -> None:
        self.store.ledger.add(phase, self._cost())
