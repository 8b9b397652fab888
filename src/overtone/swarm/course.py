"""A replica's course through the rounds of a run that lives in a store.

After each local step: absorb a commit that has come, post a message if one is due, commit the round if all have posted.
Nothing of this waits. The mailbox writes and reads beside the training, and a commit that comes late moves the weights
by a shift, as an overlapped round does.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

from overtone.errors import GaveUpError, PeerError, StateError, StoreError, WireError
from overtone.exchange.description import Description, compare_described
from overtone.exchange.inner_step import InnerStep
from overtone.exchange.message import NOBODY, Kind, Seal, seal_message
from overtone.exchange.round import Exchanger, Pending
from overtone.ledger import Count, Round
from overtone.swarm import founding, members, saving
from overtone.swarm.archive import Archive, DeletedError
from overtone.swarm.follower import Follower, shared_tensors
from overtone.swarm.leases import Leases
from overtone.swarm.lineage import Heard
from overtone.swarm.mailbox import Folder, Mailbox
from overtone.swarm.open_round import OpenRound
from overtone.swarm.records import (
    MOST_PACE,
    Commit,
    Member,
    Note,
    commit_path,
    folder_of,
    is_sealed,
    packed_snapshot,
    snapshot_path,
)
from overtone.swarm.store import Store, host_name

log = logging.getLogger(__name__)

AHEAD = 2  # times `every` local steps that a replica takes beyond its last message before it stands still
NAP = 0.02  # seconds between two looks of a replica that stands still
SEVERAL = 10  # rounds in which a newcomer asks to join, until it says that it still does
MOST_REFUSALS = 3  # of a replica's messages in a row, before it drops what it owes
PATIENCE = 3.0  # times a round's deadline: then a replica that stands still says why, and one that ends goes
SNAPSHOT_TRIES = 12  # to write one; newcomers can start from an older one
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
        self._has_counted = False  # the message that was posted last
        self._refusals = 0  # of this replica's messages, one after the other
        self._closed = False
        self._proposed = False
        self._since = time.monotonic()  # when the last commit was absorbed
        self._posted = time.monotonic()  # when the last message was made, and later if it had to wait since
        self._posted_steps = 0  # local steps so far, then
        self._counted: dict[str, Count] = {}  # of the bucket, by folder, as far as it is in the ledger
        self._phase = "setup"  # of the ledger, to which standing still belongs
        self._stands_since: float | None = None  # the moment from which on it is not counted yet
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
            mine = founding.found(
                bucket, self.seal, description, tensors, anchor, name, leases, store.settings, self._agreed
            )
            founded = founding.read_run(bucket, self.seal)
            assert founded is not None, "somebody has founded it"
        compare_described(f"the run in {bucket.url}", founded.description, description)
        founded.refuse_other(bucket.url, self._agreed)
        self.about = founded.about
        self.follower = Follower(exchanger, Archive(bucket, self.seal, founded))
        self.lineage = self.follower.lineage
        self.follower.begin()
        self.follower.catch_up()
        if founded.about.run == mine:
            store.become(founded.founder.process, founded.founder.name)
        else:
            taken = founding.take_number(bucket, self.seal, founded, store.name, host_name(), self.members)
            store.become(*taken)
        longest = self.lineage.longest
        self.mail = Mailbox(bucket, self.lineage.index, longest, lambda raw: is_sealed(raw, self.seal))
        self._open = OpenRound(self.follower)
        self._follow_members()
        if not self.is_over:
            self._join()
        self.store.ledger.add("setup", self._cost("run", "members", "snapshots", "rounds"))
        self._phase, self._posted = "rounds", time.monotonic()
        where, index = bucket.url, self.lineage.index
        if self.is_over:
            log.info("the run in %s is over, after %d rounds", where, index)
        else:
            log.info("%s is a member of the run in %s: round %d, %d members", store.name, where, index, store.size)

    @property
    def is_over(self) -> bool:
        """True if all rounds of the run are committed and absorbed."""
        return self.store.rounds is not None and self.lineage.index >= self.store.rounds

    @property
    def progress(self) -> int:
        """Local steps of the run so far, by its rounds: the same for a replica that came late, or is slow.

        The last step of a round counts when the round is committed, so a run does not end before.
        """
        every, counts = self.exchanger.method.every or 1, self.exchanger.state
        since = 0 if self.is_over else min(every - 1, counts.steps - counts.steps_at_round)
        return self.lineage.index * every + since

    @property
    def _agreed(self) -> dict[str, Any]:
        """What must be the same for all members, beside model and method."""
        return {**self.store.agreed, "units": self.store.units, "rounds": self.store.rounds}

    # -- what a replica calls --------------------------------------------------------------------------------------

    def after_step(self, inner_step: InnerStep, *, due: bool) -> Round | None:
        """Absorb a commit if one has come, then post and commit what is due. Returns the record of a commit."""
        if self._closed:
            raise StateError("step: this replica has finished, and is no member any more; build a new one")
        self.store.bucket.patience = 0.0  # from the first step on the mailbox asks again, and the training never waits
        record = None
        while (found := self._turn()) is not None:  # one a step would leave a replica of long steps behind for ever
            record = found
        if self.is_over:
            return record
        if not self._is_member:  # it was silent for too long
            self._join()
        if due and self._pending is None:
            self._post(inner_step)
        self._commit_if_due()
        every, pending = self.exchanger.method.every or 1, self._pending
        is_last = self.lineage.index + 1 == self.store.rounds  # no step after this message would count
        most = 0 if self.store.wait or is_last else AHEAD * every
        if pending is not None and self.exchanger.state.steps - pending.steps >= most:
            record = self._stand_still(lambda: self._pending is None) or record
        # Messages came too late again and again, so that its lease was not renewed.
        while self.store.units_left == 0 and not self.is_over and not self.store.stopping():
            if not self._is_member:
                self._join()
            elif self._pending is None:
                self._post(inner_step)
            record = self._stand_still(lambda: self._pending is None) or record
        return record

    def finish(self, inner_step: InnerStep) -> list[Round]:
        """Send what is left, leave the run, and take over the anchor. If the run is over, nothing is sent any more.

        A replica that is no member any more asks to join once more before. If too few members are there to commit, it
        leaves without a word, and what it owes is lost.
        """
        if self._closed:
            return []
        records, exchanger = [], self.exchanger
        end = time.monotonic() + PATIENCE * members.deadline(self.members)

        def is_over() -> bool:
            return self._pending is None or time.monotonic() > end

        if record := self._stand_still(is_over):
            records.append(record)
        self._has_counted = False  # no message with which it leaves, so far
        while not self._has_counted and not self.is_over and time.monotonic() < end:
            self._join(end)
            if self._is_member and self._pending is None:
                self._post(inner_step, leaves=True)
            if record := self._stand_still(is_over):
                records.append(record)
        if not self._has_counted and not self.is_over:
            log.warning("store %s: no commit has come; what this replica still owed is lost", self.store.url)
        if self._pending is not None:
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
        log.info(
            "%s made %d requests to the store in this session", self.store.name, self.store.bucket.count().requests
        )
        self.store.ledger.add("upkeep", self._cost("snapshots"))
        self.store.ledger.add("finish", self._cost("rounds"))

    # -- saving ----------------------------------------------------------------------------------------------------

    def saved(self) -> dict[str, Any]:
        """What a saved state must know of the store, beside the exchange state."""
        return saving.saved(self.store, self.about.run, self._mark, self._posted_units)

    def restore(self, saved: Mapping[str, Any], description: Description) -> None:
        """Owe again what a saved state owed, as far as no commit has counted it since. The shared state stays that of
        the store. The model must have the weights that were saved with the state."""
        if self._pending is not None:
            raise StateError("load_state_dict: a message of this replica is on its way; load before the first step")
        saving.restore(self.follower, self.store, saved, description)
        self._posted, self._posted_steps = time.monotonic(), self.exchanger.state.steps

    # -- one turn --------------------------------------------------------------------------------------------------

    def _stand_still(self, until: Callable[[], bool]) -> Round | None:
        """Absorb and commit until something is true. Returns the last record."""
        begin, last = time.monotonic(), None
        self._stands_since = begin
        tell = PATIENCE * members.deadline(self.members)  # seconds
        while not until() and not self.store.stopping():
            if (record := self._turn()) is not None:
                last = record
                continue
            self._commit_if_due()
            if time.monotonic() - begin > tell:
                tell *= 2
                self._tell_why()
            time.sleep(NAP)
        self.store.ledger.add(self._phase, Count(waiting=self._waited()))
        self._stands_since = None
        return last

    def _waited(self) -> float:
        """Seconds in which this replica has stood still, since they were counted last."""
        if self._stands_since is None:
            return 0.0
        begin, self._stands_since = self._stands_since, time.monotonic()
        return self._stands_since - begin

    def _forgive(self, folder: Folder) -> None:
        """Take the time in which this replica stood still for others out of its pace. Else all would tell that they are
        as slow as the slowest, and would wait for it. What its own requests take stays in."""
        if self._stands_since is not None:
            self._posted += max(0.0, folder.listed - max(folder.written, self._stands_since))

    def _tell_why(self) -> None:
        """Tell a person why nothing goes on."""
        posted, _ = self._open.posts(self.mail.folder(self.lineage.index).posts)
        posts, least = posted.count, members.least(self.members, self.store.min_replicas)
        why = f"{posts} have posted, {least} must have"
        if refused := self._open.refused:
            why += f"; {refused} other objects there do not count, for reasons told before"
        if posts < least:
            why += "; start more replicas, or this one with fewer min_replicas"
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
        try:  # a listing may have shown the commit, and not yet a message before it
            found = self.follower.archive.messages(commit, self.lineage.longest, folder.posts)
        except DeletedError:
            raise
        except StoreError as error:
            log.warning("%s; it is asked again", error)
            return None
        folder.posts.update(found)
        return self._absorb(commit, folder)

    def _absorb(self, commit: Commit, folder: Folder) -> Round:
        exchanger, pending, steps = self.exchanger, self._pending, self.exchanger.state.steps
        heard = self.lineage.hear(commit.messages, folder.posts, self.members)
        cost, store = self._cost("rounds"), self.store
        self._forgive(folder)
        if self._phase == "rounds":
            cost.waiting = self._waited()
        store.ledger.add("upkeep", self._cost("snapshots"))
        leases = self.follower.leases_after(commit, heard)
        self._pending = None
        # By its seal: if somebody runs a copy of this process, the other one's message may be there in its place.
        named = any(one.seal == self._mark for one in commit.messages)
        self._has_counted = pending is not None and named and store.rank in heard.notes
        if pending is not None and self._has_counted:
            pending.received, pending.count = heard.received, cost
            record = exchanger.finish(pending, waited=cost.waiting)
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
            seconds_waiting=cost.waiting,
            seconds_decoding=heard.received.seconds,
            drift_norm=0.0,
            residual_norm=0.0,
            anchor_fingerprint=commit.anchor,
            left_out=tuple(sorted(heard.left_out)),
        )

    def _snapshot(self) -> None:
        index = self.lineage.index
        packed = packed_snapshot(self.seal, self.about, index, shared_tensors(self.exchanger), self.store.rank)
        self.mail.send(snapshot_path(index), packed, SNAPSHOT_TRIES)

    # -- posting ---------------------------------------------------------------------------------------------------

    def _post(self, inner_step: InnerStep, *, leaves: bool = False) -> None:
        exchanger, index = self.exchanger, self.lineage.index
        # Not since the last round that counted: a message that did not count was posted in between.
        steps = exchanger.state.steps - self._posted_steps
        pending = exchanger.start(inner_step, overlapped=True)
        mine = pending.contribution
        if mine.header.kind is not Kind.ROUND:
            exchanger.refuse(pending)
            raise GaveUpError(f"round {index}: {mine.why}")
        now = time.monotonic()
        pace = min(MOST_PACE, (now - self._posted) * (exchanger.method.every or 1) / steps) if steps > 0 else 0.0
        self._posted, self._posted_steps = now, exchanger.state.steps
        note = Note(self.store.process.session, pace, leaves, self.store.used)
        message = seal_message(mine.header, note.pack() + self.lineage.pattern.body(mine), self.seal)
        self.mail.send(f"{folder_of(index)}/{self.store.process}", message)
        self._pending, self._mark, self._posted_units = pending, message[-self.seal.size :].hex(), self.store.used

    def _join(self, end: float = math.inf) -> None:
        """Ask to join, round by round, until a commit names this process as a member, the run is over, or until a
        moment."""
        for asked in count(1):
            if self._is_member or self.is_over or self.store.stopping() or time.monotonic() > end:
                return
            if asked % SEVERAL == 0:
                log.warning(
                    "store %s: %s has asked to join in %d rounds, and no commit has named it: the others commit before "
                    "its wish arrives. It goes on asking",
                    self.store.url,
                    self.store.name,
                    asked - 1,
                )
            index = self.lineage.index
            body = json.dumps({"name": self.store.name, "session": self.store.process.session}).encode()
            message = seal_message(self.about.header(Kind.JOIN, self.store.rank, index), body, self.seal)
            self.mail.send(f"{folder_of(index)}/{self.store.process}", message)
            self._stand_still(lambda index=index: self.lineage.index > index or time.monotonic() > end)  # type: ignore[misc]

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

    def _cost(self, *folders: str) -> Count:
        """What the objects of these folders have cost since the last time."""
        cost = Count()
        for folder in folders:
            now, before = self.store.bucket.count(folder), self._counted.get(folder, Count())
            self._counted[folder] = now
            cost.add(now.since(before))
        return cost
