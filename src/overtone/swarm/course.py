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
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from overtone.errors import GaveUpError, MismatchError, PeerError, StateError, StoreError, WireError, shortened
from overtone.exchange import flight
from overtone.exchange.description import Description, compare_saved
from overtone.exchange.inner_step import InnerStep
from overtone.exchange.message import HEADER_BYTES, NOBODY, Kind, Seal, open_message, seal_message
from overtone.exchange.round import Exchanger, Pending
from overtone.ledger import Count, Round
from overtone.swarm import founding, members
from overtone.swarm.founding import DeletedError
from overtone.swarm.leases import Leases
from overtone.swarm.lineage import Heard, Lineage
from overtone.swarm.mailbox import Folder, Mailbox
from overtone.swarm.members import Posts
from overtone.swarm.records import (
    MOST_PACE,
    NOTE_BYTES,
    Commit,
    Member,
    Named,
    Note,
    Process,
    commit_path,
    folder_of,
    is_name,
    is_sealed,
    parsed,
    snapshot_path,
    way_back,
)
from overtone.swarm.store import Store, host_name

log = logging.getLogger(__name__)

AHEAD = 2  # times `every` local steps that a replica takes beyond its last message before it stands still
NAP = 0.02  # seconds between two looks of a replica that stands still
TURN = 1.0  # seconds by which the next member is later to commit, if the first one does not
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
        self.members: tuple[Member, ...] = ()
        self._pending: Pending | None = None
        self._mark = ""  # the seal of the message that was posted last
        self._posted_units = 0  # that it told
        self._has_counted = False  # the message that was posted last
        self._refusals = 0  # of this replica's messages, one after the other
        self._read: dict[tuple[Process, bytes], Named | Member | None] = {}  # posts of the open round
        self._notes: dict[int, Note] = {}
        self._closed = False
        self._proposed = False
        self._eligible: float | None = None  # since when the open round may be committed
        self._since = time.monotonic()  # when the last commit was absorbed
        self._posted = time.monotonic()  # when the last message was made
        self._posted_steps = 0  # local steps so far, then
        self._counted: dict[str, Count] = {}  # of the bucket, by folder, as far as it is in the ledger
        self._phase = "setup"  # of the ledger, to which standing still belongs
        self._enter(description)

    # -- joining ---------------------------------------------------------------------------------------------------

    def _enter(self, description: Description) -> None:
        """Found the run, or catch up with it; then become a member."""
        bucket, exchanger, store = self.store.bucket, self.exchanger, self.store
        # Not lossless, whatever the codec: a message that does not count goes back into the residual.
        exchanger.begin(NOBODY, lossless=False)
        founded, mine = founding.read_run(bucket, self.seal, exchanger.schema, description), b""
        if founded is None:
            name = store.name or f"{host_name()}-1"
            anchor = exchanger.fingerprint().hex()
            units, every = store.units, exchanger.method.every or 1
            leases = None if units is None else Leases(units, every).after({0}, {})
            mine = founding.found(
                bucket, self.seal, description, exchanger.schema, self._tensors(), anchor, name, leases,
                store.settings, self._agreed,
            )  # fmt: skip
            founded = founding.read_run(bucket, self.seal, exchanger.schema, description)
            assert founded is not None, "somebody has founded it"
        self.about = founded.about
        exchanger.state.run = self.about.run
        founded.refuse_other(bucket.url, self._agreed)
        self.members, store.leases = (founded.founder,), founded.leases
        self._catch_up(founded)
        self.lineage = Lineage(exchanger)
        self._replay()
        if founded.about.run == mine:
            store.become(founded.founder.process, founded.founder.name)
        else:
            taken = founding.take_number(bucket, self.seal, founded, store.name, host_name(), self.members)
            store.become(*taken)
        longest = self.lineage.pattern.context.longest_message()
        self._most = longest + HEADER_BYTES + NOTE_BYTES + self.seal.size  # bytes of a message
        self.mail = Mailbox(bucket, self.lineage.index, self._most, lambda raw: is_sealed(raw, self.seal))
        self._set_members(self.members)
        if not self.is_over:
            self._join()
        self.store.ledger.add("setup", self._cost("run", "members", "snapshots", "rounds"))
        self._phase, self._posted = "rounds", time.monotonic()
        log.info(
            "%s is a member of the run in %s: round %d, %d members",
            store.name,
            bucket.url,
            self.lineage.index,
            len(self.members),
        )

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

    def _tensors(self) -> dict[str, Tensor]:
        """The shared state, by name."""
        exchanger = self.exchanger
        tensors = exchanger.state.tensors
        shared = {name: tensors[name] for name in exchanger.method.rule.shared if name in tensors}
        frozen = {f"frozen {i}": tensor for i, tensor in enumerate(exchanger.parameters.frozen)}
        return {**shared, **frozen, **{f"buffer {i}": t for i, t in enumerate(exchanger.buffers.shared)}}

    def _catch_up(self, founded: founding.Founded) -> None:
        """Take over the newest snapshot that can be believed, or else the first weights."""
        bucket, seal, about = self.store.bucket, self.seal, founded.about
        for index in founding.snapshots(bucket):
            try:
                commit = founding.read_commit(bucket, seal, about, index - 1)
                if commit is None:
                    continue
                self._adopt(founding.read_snapshot(bucket, seal, about, index, snapshot_path(index)), commit.anchor)
            except (StoreError, WireError, MismatchError) as error:
                log.warning("snapshot of round %d: %s; an older one is tried", index, error)
                continue
            self.exchanger.state.rounds, self.members = index, commit.members
            self.store.leases = Leases.read(commit.data) if commit.data else None
            return
        try:
            first = founding.read_snapshot(bucket, seal, about, 0, founded.snapshot)
        except WireError as error:
            raise StoreError(f"store {bucket.url}: the first weights cannot be believed: {error}") from error
        self._adopt(first, founded.anchor)

    def _adopt(self, tensors: Mapping[str, Tensor], anchor: str) -> None:
        own = self._tensors()
        if {name: t.shape for name, t in own.items()} != {name: t.shape for name, t in tensors.items()}:
            raise WireError("snapshot: of other tensors than this model has")
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
        exchanger = self.exchanger
        exchanger.buffers.put(exchanger.buffers.shared)
        exchanger.show(exchanger.method.rule.place(exchanger.state.tensors))
        if exchanger.fingerprint().hex() != anchor:
            raise MismatchError("its anchor is not the one that the commit names")

    def _replay(self) -> None:
        """Absorb all commits that are there."""
        for commit, raw in founding.commits_from(self.store.bucket, self.seal, self.about, self.lineage.index):
            heard = self.lineage.hear(commit.messages, raw, len(self.members))
            self.lineage.follow(heard)
            self.lineage.check(commit, heard)
            self.store.leases = self._leases_after(commit, heard)
            self.members = commit.members

    @property
    def _agreed(self) -> dict[str, Any]:
        """What must be the same for all members, beside model and method."""
        return {**self.store.agreed, "units": self.store.units, "rounds": self.store.rounds}

    def _leases_after(self, commit: Commit, heard: Heard) -> Leases | None:
        """The leases after a commit. They follow from the leases before and from what was heard."""
        found = self._renewed(commit.members, heard)
        if (found.told() if found is not None else {}) != commit.data:
            raise MismatchError(
                f"round {commit.round}: the commit of member {commit.by} leases out other samples than follow from the "
                f"rounds before; stop that member. {way_back(commit.round)}"
            )
        return found

    def _renewed(self, now: Sequence[Member], heard: Heard) -> Leases | None:
        if self.store.leases is None:
            return None
        used = {number: note.samples for number, note in heard.notes.items()}
        return self.store.leases.after({member.number for member in now}, used)

    # -- what a replica calls --------------------------------------------------------------------------------------

    def after_step(self, inner_step: InnerStep, *, due: bool) -> Round | None:
        """Absorb a commit if one has come, then post and commit what is due. Returns the record of a commit."""
        if self._closed:
            raise StateError("step: this replica has finished, and is no member any more; build a new one")
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
        while (
            self.store.units_left == 0 and not self.is_over and not self.store.stopping()
        ):  # messages came too late again and again, so that its lease was not renewed
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
        log.info("%s asked the store %d times in this session", self.store.name, self.store.bucket.requests)
        self.store.ledger.add("upkeep", self._cost("snapshots"))
        self.store.ledger.add("finish", self._cost("rounds"))

    # -- saving ----------------------------------------------------------------------------------------------------

    def saved(self) -> dict[str, Any]:
        """What a saved state must know of the store, beside the exchange state."""
        process = self.store.process
        return {
            "name": self.store.name,
            "number": process.number,
            "session": process.session,
            "seal": self._mark,
            "used": self.store.used,
            "posted": self._posted_units,
            "run": self.about.run.hex(),
        }

    def restore(self, saved: Mapping[str, Any], description: Description) -> None:
        """Owe again what a saved state owed, as far as no commit has counted it since. The shared state stays that of
        the store. The model must have the weights that were saved with the state."""
        compare_saved(saved.get("about", {}), description)
        exchanger = self.exchanger
        try:
            told = saved["store"]
            if told["name"] != self.store.name:
                raise StateError(
                    f"saved state: of the member {told['name']}, this is {self.store.name}; open the store under its "
                    "name, or go on without the saved state"
                )
            if told["run"] != self.about.run.hex():
                raise StateError(
                    f"saved state: of the run {told['run']}, that in {self.store.url} is {self.about.run.hex()}; open "
                    "the store of that run, or go on without the saved state"
                )
            if self._pending is not None:
                raise StateError("load_state_dict: a message of this replica is on its way; load before the first step")
            used = int(told["used"])
            counted, spoken, present = self._since_saved(int(saved["counts"]["rounds"]), told)
            if saved.get("flight") is not None:
                measured = list(saved["flight"]["measured_at"])
                if counted:
                    used -= int(told["posted"])
                else:
                    saved = flight.take_back(saved, exchanger)
                saved = {**saved, "signal": measured}
            layout, steps = exchanger.layout, int(saved["counts"]["steps"])
            begin = layout.read(saved["signal"], layout.empty(exchanger.device)).clone()
            now = layout.read(exchanger.parameters.tensors, layout.empty(exchanger.device))
            owed = saved["state"]["residual"] + (begin - now)
            if owed.shape != exchanger.state.tensors["residual"].shape or not bool(torch.isfinite(owed).all()):
                raise ValueError("a residual that is not this model's")
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            if isinstance(error, StateError):
                raise
            raise StateError(f"saved state: incomplete or damaged ({shortened(error)})") from error
        if spoken:
            log.warning("saved state: this member has sent a later message, which counted; what was owed is dropped")
            owed.zero_()
        exchanger.state.tensors["residual"].copy_(owed)
        exchanger.state.steps = exchanger.state.steps_at_round = self._posted_steps = steps
        self.store.used = 0 if spoken or not present else max(0, used)
        exchanger.show(exchanger.method.rule.place(exchanger.state.tensors))
        self._posted = time.monotonic()

    def _since_saved(self, index: int, told: Mapping[str, Any]) -> tuple[bool, bool, bool]:
        """What the commits from a round on say of the member whose state was saved: whether the message that was on
        its way has counted, whether a later one has, and whether it was a member all the time. If a commit is not there
        any more, a later message may have counted."""
        counted, spoken, present = False, False, True
        member = int(told["number"])
        for other in range(index, self.lineage.index):
            commit = founding.read_commit(self.store.bucket, self.seal, self.about, other)
            if commit is None:
                return counted, True, False
            if member not in commit.left_out:
                # Of any of its processes: one that came in between may have started from the same state, and sent it.
                seals = {one.seal for one in commit.messages if one.number == member}
                counted |= told["seal"] in seals
                spoken |= bool(seals - {told["seal"]})
            present &= any(one.number == member for one in commit.members)
        return counted, spoken, present

    # -- one turn --------------------------------------------------------------------------------------------------

    def _stand_still(self, until: Callable[[], bool]) -> Round | None:
        """Absorb and commit until something is true. Returns the last record."""
        begin, last = time.monotonic(), None
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
        self.store.ledger.add(self._phase, Count(waiting=time.monotonic() - begin))
        return last

    def _tell_why(self) -> None:
        """Tell a person why nothing goes on."""
        posts, least = self._posts()[0].count, members.least(self.members, self.store.min_replicas)
        why = f"{posts} have posted, {least} must have"
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
        for named in commit.messages:  # a listing may have shown the commit, and not yet a message before it
            if not founding.is_named(folder.posts.get(named.process), named, self.seal):
                try:
                    found = founding.read_message(self.store.bucket, self.seal, index, named, self._most)
                except DeletedError:
                    raise
                except StoreError as error:
                    log.warning("%s; it is asked again", error)
                    return None
                folder.posts[named.process] = found
        return self._absorb(commit, folder)

    def _absorb(self, commit: Commit, folder: Folder) -> Round:
        exchanger, pending, steps = self.exchanger, self._pending, self.exchanger.state.steps
        heard = self.lineage.hear(commit.messages, folder.posts, len(self.members))
        cost, store = self._cost("rounds"), self.store
        store.ledger.add("upkeep", self._cost("snapshots"))
        leases = self._leases_after(commit, heard)
        self._pending = None
        # By its seal: if somebody runs a copy of this process, the other one's message may be there in its place.
        named = any(one.seal == self._mark for one in commit.messages)
        self._has_counted = pending is not None and named and store.rank in heard.notes
        if pending is not None and self._has_counted:
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
        store.leases = leases
        self._set_members(commit.members)
        self.mail.done_with(self.lineage.index)
        self._read, self._notes, self._proposed, self._eligible = {}, {}, False, None
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
        packed = founding.packed_snapshot(self.seal, self.about, index, self._tensors(), self.store.rank)
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
        posts, named, raw = self._posts()
        now = time.monotonic()
        if not members.may_commit(self.members, posts, now - self._since, self.store.min_replicas):
            return
        if self._eligible is None:
            self._eligible = now
        speakers = sorted(posts.messages.keys() | posts.joins.keys())
        if self.store.rank not in speakers:
            return  # its own message is on its way to the store
        # Everybody may commit. One after the other, and another one first in each round, since most would lose.
        place = (speakers.index(self.store.rank) - self.lineage.index) % len(speakers)
        if now - self._eligible < place * TURN:
            return
        heard = self.lineage.hear(named, raw, len(self.members))
        after, words = members.after(self.members, posts)
        anchor = self.lineage.fingerprint_after(heard)
        index = self.lineage.index
        leases = self._renewed(after, heard)
        data = {} if leases is None else leases.told()
        commit = Commit(index, self.store.rank, named, after, anchor, tuple(sorted(heard.left_out)), words, data)
        self.mail.send(commit_path(index), commit.pack(self.about, self.seal))
        self._proposed = True

    def _posts(self) -> tuple[Posts, tuple[Named, ...], dict[Process, bytes]]:
        """What has been posted in the open round, as far as it can be believed."""
        folder = self.mail.folder(self.lineage.index)
        for process, raw in folder.posts.items():
            if (process, raw) not in self._read:  # what nobody believes may have been replaced since
                self._read[process, raw] = self._opened(process, raw)
        read = [self._read[post] for post in folder.posts.items()]
        named = {one.number: one for one in read if isinstance(one, Named)}
        joins = {one.number: one for one in read if isinstance(one, Member)}
        messages = {number: self._notes[number] for number in named}
        return Posts(messages, joins), tuple(named[number] for number in sorted(named)), folder.posts

    def _opened(self, process: Process, raw: bytes) -> Named | Member | None:
        """A message of a member, the wish of a newcomer, or nothing that counts."""
        index = self.lineage.index
        try:
            if open_message(raw, self.seal).header.kind is Kind.JOIN:
                return self._newcomer(process, raw)
            note, message = self.lineage.opened(process, raw)
        except WireError as error:
            log.warning("round %d: the object of %s was refused: %s", index, process, error)
            return None
        if not any(member.process == process for member in self.members):
            return None  # it was a member once, and will ask to join when it sees that it is none
        self._notes[process.number] = note
        return Named(process.number, process.session, message.seal.hex())

    def _newcomer(self, process: Process, raw: bytes) -> Member | None:
        message = self.about.opened(raw, Kind.JOIN, self.lineage.index, self.seal)
        told = parsed(message.body)
        name, session = str(told.get("name")), told.get("session")
        if message.header.sender != process.number or session != process.session or not is_name(name):
            raise WireError("join: not of the process whose place it lies in")
        known = next((member for member in self.members if member.number == process.number), None)
        is_older = known is not None and known.session >= process.session
        return None if is_older else Member(process.number, process.session, name)

    # -- parts -----------------------------------------------------------------------------------------------------

    @property
    def _is_member(self) -> bool:
        return any(member.process == self.store.process for member in self.members)

    def _set_members(self, now: tuple[Member, ...]) -> None:
        self.members = now
        self.store.size = max(1, len(now))
        process = self.store.process
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
            cost.add(Count(now.sent - before.sent, now.received - before.received))
        return cost
