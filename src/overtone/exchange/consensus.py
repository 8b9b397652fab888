"""How all replicas come to the same conclusion: which messages count, and whether the replicas still agree.

No weight changes before all replicas have read the same messages. If one rank cannot read a message, all ranks refuse
it, and the error names its sender. An exchange of messages ends with a *verdict*: eight bytes that are equal on all
ranks exactly if all have read the same. If the verdicts differ, a *dispute* follows: every rank reports how it read
each message.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from overtone.errors import MismatchError, PeerError, WireError, printable
from overtone.exchange.message import Expected, Header, Kind, Message, Seal, seal_message, unseal_message
from overtone.transport import Exchange, Gather

T = TypeVar("T")

MOST_TEXT = 1 << 20  # the most bytes of a reason, a dispute or a handshake


@dataclass
class Inbox:
    """The messages of one all-gather, by sender, as this rank could read them."""

    peers: Sequence[int]
    messages: dict[int, Message] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)  # why a message could not be read
    personal: bool = False  # every rank was sent a message of its own: only the headers are the same for all

    def read(self, raw: Sequence[bytes], open_one: Callable[[int, bytes], Message]) -> Inbox:
        """Open the messages of all peers, in rank order. ``open_one`` raises `WireError` if it cannot read one.

        A message that cannot be read is no error yet: all ranks first agree on the messages that count.
        """
        for rank, one in zip(self.peers, raw, strict=True):
            try:
                self.messages[rank] = open_one(rank, one)
            except WireError as error:
                self.refused[rank] = str(error)
        return self

    @property
    def marks(self) -> dict[int, str]:
        """By sender: the mark of its message, which is the same on all ranks. It is empty if the message was refused.

        The mark is the seal, or of personal messages the header without its length.
        """
        return {rank: self._mark(rank) if rank in self.messages else "" for rank in self.peers}

    def _mark(self, rank: int) -> str:
        message = self.messages[rank]
        return message.header.pack(0, Seal()).hex() if self.personal else message.seal.hex()


def agree(
    inbox: Inbox, mine: Header, expected: Expected, seal: Seal, refused: str = "raise", what: str = "message"
) -> Exchange[dict[int, str]]:
    """Which ranks are left out of this exchange, and why. The result is the same on all ranks.

    No rank is left out if all have read the same. ``refused`` is the policy for a rank whose message was refused:
    "raise" on every rank, or "leave out".
    """
    own = verdict(inbox, mine, seal)
    try:
        verdicts = yield Gather(own, equal=True)
    except PeerError as error:
        # A process that is no replica of this run, or is of another version, takes no part in verdict or dispute. The
        # refusal of its message explains more than the broken connection.
        raise _refusal(expected, inbox.refused, what) if inbox.refused else error from error
    if not inbox.refused and all(other == own for other in verdicts):
        return {}
    return (yield from dispute(inbox, mine, expected, seal, refused, what))


def verdict(inbox: Inbox, mine: Header, seal: Seal) -> bytes:
    """Eight bytes that are equal on all ranks exactly if all have read the same."""
    return digest(seal, mine.run, mine.round.to_bytes(4, "little"), json.dumps(inbox.marks).encode())


def digest(seal: Seal, *parts: bytes) -> bytes:
    """Eight bytes of these parts. If the run has a key, only holders of the key can compute them."""
    key = hashlib.sha256(seal.key).digest() if seal.key else b""
    return hashlib.blake2b(b"".join(parts), digest_size=8, key=key).digest()


def dispute(
    inbox: Inbox, mine: Header, expected: Expected, seal: Seal, refused: str = "raise", what: str = "message"
) -> Exchange[dict[int, str]]:
    """Every rank reports how it read each message. All then agree on the ranks to leave out, and on the reasons."""
    body = json.dumps({"marks": inbox.marks, "refused": inbox.refused}).encode()
    gathered = yield Gather(seal_message(replace(mine, kind=Kind.DISPUTE), body, seal), most=MOST_TEXT)
    try:
        disputes = open_all("dispute", gathered, inbox.peers, expected, seal, _read_dispute)
    except PeerError as error:
        # A peer with another key can never be read, its dispute included: the first refusal explains more.
        raise _refusal(expected, inbox.refused, what) if inbox.refused else error from error
    left_out = {rank: why for rank in inbox.peers if (why := _complaint(rank, disputes))}
    # If most ranks would be left out, the fault is more likely with the rank that could not read them.
    if refused == "raise" or 2 * len(left_out) > len(inbox.peers):
        told = "; ".join(f"the {what} of rank {rank} was refused {why}" for rank, why in left_out.items())
        raise PeerError(f"round {expected.round}: {told or 'the verdict of a rank was damaged on the way'}")
    return left_out


def _refusal(expected: Expected, refused: Mapping[int, str], what: str) -> PeerError:
    """An error about the messages that this rank could not read, by its own view alone."""
    told = "; ".join(f"the {what} of rank {rank} was refused: {why}" for rank, why in refused.items())
    return PeerError(f"round {expected.round}: {told}")


def gather_sealed(
    what: str,
    header: Header,
    body: bytes,
    peers: Sequence[int],
    seal: Seal,
    parse: Callable[[Message], T],
    most: int = MOST_TEXT,
) -> Exchange[list[T]]:
    """An all-gather of sealed messages. Returns the parsed bodies of all ranks, in rank order.

    All ranks read the same, or all ranks refuse. The schema is not compared here: if models differ, the handshake
    explains the difference in words.
    """
    expected = Expected(header.round, header.run, header.schema)
    gathered = yield Gather(seal_message(header, body, seal), most=most)
    parsed = {}

    def opened(rank: int, raw: bytes) -> Message:
        message = unseal_message(raw, expected, rank, seal)
        if message.header.kind is not header.kind:
            raise WireError(f"kind: {message.header.kind.name.lower()} where a {what} is due")
        parsed[rank] = parse(message)
        return message

    inbox = Inbox(peers).read(gathered, opened)
    yield from agree(inbox, header, expected, seal, what=what)
    return [parsed[rank] for rank in peers]


def open_all(
    what: str,
    gathered: Sequence[bytes],
    peers: Sequence[int],
    expected: Expected,
    seal: Seal,
    read: Callable[[Message], T],
) -> dict[int, T]:
    """Read the messages of all ranks, where the exchange cannot go on without one of them."""
    found = {}
    for rank, raw in zip(peers, gathered, strict=True):
        try:
            found[rank] = read(unseal_message(raw, expected, rank, seal))
        except WireError as error:
            raise PeerError(f"round {expected.round}: the {what} of rank {rank} was refused: {error}") from error
    return found


@dataclass(frozen=True)
class Dispute:
    """One rank's view of an all-gather."""

    marks: dict[int, str] = field(default_factory=dict)  # by sender: the mark of its message as this rank read it
    refused: dict[int, str] = field(default_factory=dict)


def _read_dispute(message: Message) -> Dispute:
    if message.header.kind is not Kind.DISPUTE:
        raise WireError(f"kind: {message.header.kind.name.lower()} where a dispute is due")
    try:
        body = json.loads(message.body)
        marks, refused = (
            {int(rank): printable(str(text)) for rank, text in body[key].items()} for key in ("marks", "refused")
        )
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise WireError(f"dispute: {error!r}; the message is corrupt") from error
    return Dispute(marks, refused)


def _complaint(rank: int, disputes: Mapping[int, Dispute]) -> str:
    """Why a rank's message does not count. Empty if it counts."""
    for judge, dispute in disputes.items():
        if rank in dispute.refused:
            return f"by rank {judge}: {dispute.refused[rank]}"
    # Each copy was valid for its reader, but the copies differ: the sender or the network gave out two messages.
    if len({dispute.marks.get(rank) for dispute in disputes.values()}) > 1:
        return "because not every rank received the same"
    return ""


# -- do the replicas still agree? ----------------------------------------------------------------------------------


NOT_AS_SENT = "They were broadcast and did not arrive as sent: suspect network or memory of the odd one out"
APART = "The replicas no longer train one model: restart all of them from one checkpoint"
UNLIKE_HOSTS = (
    "Each host works them out with its own inner optimizer, so unlike hosts are the likely cause: another type of CPU "
    "or another build of a library rounds differently, and would again after a restart. Use like hosts, or a method "
    "whose anchor does not depend on that, such as decoupled() or diloco(); on like hosts restart from one checkpoint"
)


def compare_initial_weights(ranks: Sequence[int], prints: Sequence[bytes]) -> None:
    """Refuse a start from different weights, by their fingerprints."""
    _compare("the initial weights", dict(zip(ranks, prints, strict=True)), NOT_AS_SENT)


def compare_last_weights(prints: Mapping[int, bytes]) -> None:
    """Refuse to end with different weights, by their fingerprints."""
    _compare("the last weights", prints, NOT_AS_SENT)


def compare_anchors(index: int, prints: Mapping[int, bytes], *, of_weights: bool) -> None:
    """Refuse a round from different anchors, by their fingerprints.

    ``of_weights``: the weights serve as the anchor, and every host computes them itself.
    """
    what = f"round {index}: the anchors that the replicas start it from"
    _compare(what, prints, UNLIKE_HOSTS if of_weights else APART)


def compare_progress(index: int, headers: Sequence[Header]) -> None:
    """Refuse a round between replicas at different steps, or between replicas of which only some are finishing."""
    where = {header.sender: f"{header.kind.name.lower()} after {header.steps} steps" for header in headers}
    stages = {Kind.ABSTAIN: Kind.ROUND}  # a replica that abstains is in the round too
    if len({(header.steps, stages.get(header.kind, header.kind)) for header in headers}) > 1:
        way_out = "Give every replica the same number of batches, and finish() all of them"
        raise MismatchError(f"round {index}: replicas are at different steps: {camps(where)}. {way_out}")


def compare_counters(index: int, prints: Mapping[int, bytes], names: Sequence[str]) -> None:
    """Refuse a round between replicas with different integer buffers, by their fingerprints."""
    way_out = 'Make them equal on all replicas, or build the Replica with buffers="private"'
    _compare(f"round {index}: the integer buffers ({', '.join(names)})", prints, way_out)


def _compare(what: str, prints: Mapping[int, bytes], way_out: str) -> None:
    """Refuse replicas that hold different numbers; maps rank to fingerprint."""
    if len(set(prints.values())) > 1:
        told = camps({rank: value.hex() for rank, value in prints.items()})
        raise MismatchError(f"{what} differ: {told}. {way_out}")


def camps(values: Mapping[int, object]) -> str:
    """A text about which ranks hold which value: '10 on ranks 0, 1; 20 on rank 2'."""
    camps: dict[str, list[int]] = defaultdict(list)
    for rank, value in values.items():
        camps[printable(str(value))].append(rank)
    return "; ".join(
        f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" for value, ranks in camps.items()
    )
