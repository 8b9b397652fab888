"""The objects of a run in a store, and their names. All are sealed like messages, and each is written once.

    run                          what the run is: description, configuration, where its first weights lie
    members/0003-0001            process 1 that took member number 3, and the member's name
    rounds/00000012/0003-0001    that process's message of round 12, or its wish to join
    rounds/00000012/commit       what counts in round 12
    snapshots/00000012           the shared state before round 12, as safetensors; of round 0 each founder has its own
    pruned/00000012              messages and snapshots before round 12 were deleted

A number in the header says whose message it is, so a message cannot be passed off as another member's.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from overtone.errors import WireError, printable
from overtone.exchange.message import NOBODY, Header, Kind, Message, Seal, open_message, seal_message

RUN = "run"
COMMIT = "commit"
MOST_MEMBERS = 1 << 12
MOST_SESSION = (1 << 32) - 1
MOST_PACE = 1e6  # seconds of a round
MOST_NAME = 64  # letters of a member's name
MOST_COMMIT = 1 << 24  # bytes
_ROUND = re.compile("[0-9]{8}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NOTE = struct.Struct("<IfBQ")
NOTE_BYTES = _NOTE.size
_LEAVES = 1


def folder_of(index: int) -> str:
    """The folder of a round."""
    return f"rounds/{index:08d}"


def commit_path(index: int) -> str:
    """The commit of a round."""
    return f"{folder_of(index)}/{COMMIT}"


def snapshot_path(index: int, founder: str = "") -> str:
    """The snapshot before a round. Before round 0, several founders may race: each has its own."""
    return f"snapshots/{index:08d}{founder and '-'}{founder}"


def way_back(index: int) -> str:
    """How to undo a round that cannot be believed, in words."""
    return (
        f"To undo round {index}: stop all replicas, delete {folder_of(index)} and the folders of all later rounds, and "
        "start them again"
    )


def pruned_path(index: int) -> str:
    """The note that what lies before a round was deleted on purpose."""
    return f"pruned/{index:08d}"


def rounds_in(names: Iterable[str]) -> list[int]:
    """The rounds that objects or folders are named after, in order. Other names are somebody else's."""
    return sorted(int(name) for name in names if _ROUND.fullmatch(name))


def by_round(paths: Iterable[str]) -> dict[int, list[Process]]:
    """The processes that have an object in the folder of a round, by round, both in order."""
    found: dict[int, list[Process]] = {}
    for path in sorted(paths):
        parts = path.split("/")
        if len(parts) == 3 and parts[0] == "rounds" and _ROUND.fullmatch(parts[1]):
            process = Process.parse(parts[2])
            found.setdefault(int(parts[1]), []).extend([] if process is None else [process])
    return found


def is_name(name: str) -> bool:
    """True if a member may have this name. It becomes part of file names and of messages for people."""
    return len(name) <= MOST_NAME and _NAME.fullmatch(name) is not None


@dataclass(frozen=True, order=True)
class Process:
    """One process of a member: the member's number, and how many processes have taken it before."""

    number: int
    session: int

    def __str__(self) -> str:
        return f"{self.number:04d}-{self.session:04d}"

    @classmethod
    def parse(cls, name: str) -> Process | None:
        """The process of a file name; None if it is none."""
        number, _, session = name.partition("-")
        told = len(number) >= 4 <= len(session) and number.isascii() and session.isascii()
        if not (told and number.isdigit() and session.isdigit() and len(name) < 24):
            return None
        found = cls(int(number), int(session))
        return found if _is_process(found.number, found.session) and str(found) == name else None


@dataclass(frozen=True)
class Note:
    """The beginning of a message in a store: what its sender says of itself."""

    session: int
    pace: float = 0.0  # seconds that its last `every` local steps took; 0 if it does not know yet
    leaves: bool = False  # this message is its last
    samples: int = 0  # of its lease, that it has trained on since its last message that counted

    def pack(self) -> bytes:
        """As it travels."""
        return _NOTE.pack(self.session, self.pace, _LEAVES if self.leaves else 0, self.samples)

    @classmethod
    def split(cls, body: bytes) -> tuple[Note, bytes]:
        """The note of a message, and the rest of its body."""
        if len(body) < _NOTE.size:
            raise WireError("note: cut; the message is corrupt")
        session, pace, flags, samples = _NOTE.unpack_from(body)
        if not 0 <= pace <= MOST_PACE or flags > _LEAVES:  # never true of a NaN
            raise WireError("note: makes no sense; the message is corrupt")
        return cls(session, pace, bool(flags & _LEAVES), samples), body[_NOTE.size :]


@dataclass(frozen=True)
class Member:
    """A member of the run, from a commit on."""

    number: int
    session: int
    name: str
    missed: int = 0  # rounds since its message last counted, or since it joined
    pace: float = 0.0  # as its last message told

    @property
    def process(self) -> Process:
        """The process that speaks for this member."""
        return Process(self.number, self.session)


@dataclass(frozen=True)
class Named:
    """A message that a commit names."""

    number: int
    session: int
    seal: str  # in hexadecimal

    @property
    def process(self) -> Process:
        """The process that sent it."""
        return Process(self.number, self.session)


@dataclass(frozen=True)
class Commit:
    """What counts in a round, by the word of the first who said it."""

    round: int
    by: int  # number of the member that wrote it
    messages: tuple[Named, ...]  # in the order of numbers
    members: tuple[Member, ...]  # from now on, in the order of numbers
    anchor: str  # fingerprint of the anchor after the round, in hexadecimal
    left_out: tuple[int, ...] = ()  # numbers of messages that are named and do not count; it follows from them
    notes: tuple[str, ...] = ()  # for people: who came, who left, and why
    data: Mapping[str, Any] = field(default_factory=dict)  # who trains on which samples next

    def pack(self, about: About, seal: Seal) -> bytes:
        """As it is stored."""
        body = {name: value for name, value in asdict(self).items() if name not in ("round", "by")}
        return seal_message(about.header(Kind.COMMIT, self.by, self.round), json.dumps(body).encode(), seal)

    @classmethod
    def unpack(cls, raw: bytes, index: int, about: About, seal: Seal) -> Commit:
        """Read the commit of this round. Raises `WireError` if it is none."""
        message = about.opened(raw, Kind.COMMIT, index, seal)
        told = parsed(message.body)
        try:
            found = cls(
                index,
                message.header.sender,
                tuple(_named(message) for message in told["messages"]),
                tuple(_member(member) for member in told["members"]),
                str(told["anchor"]),
                tuple(int(number) for number in told["left_out"]),
                tuple(printable(str(note)) for note in told["notes"]),
                dict(told["data"]),
            )
        except (KeyError, OverflowError, TypeError, ValueError) as error:
            raise WireError(f"commit: {error!r}; it is corrupt") from error
        for sort, some in (("members", found.members), ("messages", found.messages)):
            numbers = [one.number for one in some]
            if numbers != sorted(set(numbers)) or len(numbers) > MOST_MEMBERS:
                raise WireError(f"commit: its {sort} are not in the order of numbers; it is corrupt")
        return found


def _is_process(number: int, session: int) -> bool:
    return 0 <= number < MOST_MEMBERS and 0 <= session <= MOST_SESSION


def _named(told: Mapping[str, Any]) -> Named:
    number, session = int(told["number"]), int(told["session"])
    if not _is_process(number, session):
        raise ValueError(f"message {told}")
    return Named(number, session, str(told["seal"]))


def _member(told: Mapping[str, Any]) -> Member:
    number, session, missed = (int(told[key]) for key in ("number", "session", "missed"))
    name, pace = str(told["name"]), float(told["pace"])
    if not (is_name(name) and _is_process(number, session) and missed >= 0 and 0 <= pace <= MOST_PACE):
        raise ValueError(f"member {told}")
    return Member(number, session, name, missed, pace)


@dataclass(frozen=True)
class About:
    """The header fields that all objects of a run share."""

    run: bytes = NOBODY
    schema: bytes = NOBODY

    def header(self, kind: Kind, sender: int, index: int = 0) -> Header:
        """The header of an object that is no message of a round."""
        return Header(kind, sender, index, 0, self.run, self.schema, NOBODY, NOBODY)

    def opened(self, raw: bytes, kind: Kind, index: int, seal: Seal) -> Message:
        """Open an object of this run, kind and round."""
        message = open_message(raw, seal)
        header = message.header
        if header.kind is not kind:
            raise WireError(f"kind: {header.kind.name.lower()} where a {kind.name.lower()} is due")
        if (header.run, header.schema, header.round) != (self.run, self.schema, index):
            raise WireError(f"{kind.name.lower()}: of another run, model or round; it was put there from elsewhere")
        return message


def is_sealed(raw: bytes, seal: Seal) -> bool:
    """True if somebody with the key has written this object. Where it belongs is not checked."""
    try:
        open_message(raw, seal)
    except WireError:
        return False
    return True


def packed_snapshot(seal: Seal, about: About, index: int, tensors: Mapping[str, Tensor], sender: int) -> bytes:
    """The shared state before a round, as it is stored."""
    import safetensors.torch

    body = safetensors.torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    return seal_message(about.header(Kind.SNAPSHOT, sender, index), body, seal)


def unpacked_snapshot(raw: bytes, index: int, about: About, seal: Seal) -> dict[str, Tensor]:
    """Read the shared state before a round. Raises `WireError` if it cannot be believed."""
    import safetensors.torch

    message = about.opened(raw, Kind.SNAPSHOT, index, seal)
    try:
        return safetensors.torch.load(message.body)
    except Exception as error:  # safetensors raises errors of its own kind
        raise WireError(f"snapshot: {error!r}; it is corrupt") from error


def parsed(body: bytes) -> dict[str, Any]:
    """A body that is a JSON object."""
    try:
        found = json.loads(body)
    except (RecursionError, ValueError) as error:
        raise WireError(f"body: not JSON ({error!r})") from error
    if not isinstance(found, dict):
        raise WireError("body: not a JSON object")
    return found


def processes(names: Sequence[str]) -> list[Process]:
    """The processes that have an object among these names, in order."""
    return sorted(process for name in names if (process := Process.parse(name)) is not None)
