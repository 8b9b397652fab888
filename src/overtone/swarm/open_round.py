"""The round that is open: what has been posted in it, as far as it can be believed, and the commit that follows."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from overtone.errors import WireError
from overtone.exchange.message import Kind, open_message
from overtone.swarm import members
from overtone.swarm.follower import Follower
from overtone.swarm.members import Posts
from overtone.swarm.records import Commit, Member, Named, Note, Process, is_name, parsed

log = logging.getLogger(__name__)

TURN = 1.0  # seconds by which the next member is later to commit, if the first one does not


class OpenRound:
    """One round, from the commit before it to its own."""

    def __init__(self, follower: Follower) -> None:
        self.follower = follower
        self._read: dict[tuple[Process, bytes], Named | Member | None] = {}  # what was posted, as far as it was read
        self._notes: dict[int, Note] = {}
        self._eligible: float | None = None  # since when the round may be committed

    @property
    def refused(self) -> int:
        """How many objects that were posted do not count."""
        return sum(found is None for found in self._read.values())

    def posts(self, raw: Mapping[Process, bytes]) -> tuple[Posts, tuple[Named, ...]]:
        """What has been posted so far, and the messages that a commit can name."""
        for process, message in raw.items():
            if (process, message) not in self._read:  # what nobody believes may have been replaced since
                self._read[process, message] = self._opened(process, message)
        read = [self._read[post] for post in raw.items()]
        named = {one.number: one for one in read if isinstance(one, Named)}
        joins = {one.number: one for one in read if isinstance(one, Member)}
        messages = {number: self._notes[number] for number in named}
        return Posts(messages, joins), tuple(named[number] for number in sorted(named))

    def proposal(
        self, raw: Mapping[Process, bytes], by: int, *, now: float, since: float, least: int | None
    ) -> Commit | None:
        """The commit of this round by a member, if it is due and that member's turn; ``since`` is when the last commit
        was absorbed."""
        follower = self.follower
        posts, named = self.posts(raw)
        if not members.may_commit(follower.members, posts, now - since, least):
            return None
        if self._eligible is None:
            self._eligible = now
        speakers = sorted(posts.messages.keys() | posts.joins.keys())
        if by not in speakers:
            return None  # its own message is on its way to the store
        # Everybody may commit. One after the other, and another one first in each round, since most would lose.
        place = (speakers.index(by) - follower.index) % len(speakers)
        if now - self._eligible < place * TURN:
            return None
        lineage = follower.lineage
        heard = lineage.hear(named, raw, follower.members)
        after, words = members.after(follower.members, posts)
        anchor = lineage.fingerprint_after(heard)
        leases = follower.renewed(after, heard)
        data = {} if leases is None else leases.told()
        return Commit(follower.index, by, named, after, anchor, tuple(sorted(heard.left_out)), words, data)

    def _opened(self, process: Process, raw: bytes) -> Named | Member | None:
        """A message of a member, the wish of a newcomer, or nothing that counts."""
        follower = self.follower
        try:
            if open_message(raw, follower.archive.seal).header.kind is Kind.JOIN:
                return self._newcomer(process, raw)
            note, message = follower.lineage.opened(process, raw)
        except WireError as error:
            log.warning("round %d: the object of %s was refused: %s", follower.index, process, error)
            return None
        if not any(member.process == process for member in follower.members):
            return None  # it was a member once, and will ask to join when it sees that it is none
        self._notes[process.number] = note
        return Named(process.number, process.session, message.seal.hex())

    def _newcomer(self, process: Process, raw: bytes) -> Member | None:
        follower = self.follower
        message = follower.archive.about.opened(raw, Kind.JOIN, follower.index, follower.archive.seal)
        told = parsed(message.body)
        name, session = str(told.get("name")), told.get("session")
        if message.header.sender != process.number or session != process.session or not is_name(name):
            raise WireError("join: not of the process whose place it lies in")
        known = next((member for member in follower.members if member.number == process.number), None)
        is_older = known is not None and known.session >= process.session
        return None if is_older else Member(process.number, process.session, name)
