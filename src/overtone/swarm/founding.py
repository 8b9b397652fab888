"""How a process comes into a run: it founds it, or takes over what the store says, and takes a member's number."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from overtone.errors import MismatchError, StoreError, WireError, shortened
from overtone.exchange.description import Description, compare_described
from overtone.exchange.message import Kind, Seal, seal_message
from overtone.swarm.bucket import Bucket
from overtone.swarm.leases import Leases
from overtone.swarm.records import (
    MOST_MEMBERS,
    RUN,
    About,
    Commit,
    Member,
    Named,
    Process,
    commit_path,
    folder_of,
    is_name,
    parsed,
    processes,
    snapshot_path,
)

NOT_READ = "what the store says cannot be believed: {why}. Give the key of this run (OVERTONE_KEY), or another store"
MOST_TRIES = 100  # to take a number
LOOKED_AT = 3  # of the last rounds, for a commit that should not be there
_ROUND = re.compile("[0-9]{8}")
_nobody = About()


@dataclass(frozen=True)
class Founded:
    """What the object `run` says."""

    about: About
    description: Description
    snapshot: str  # the path of the first weights
    anchor: str  # their fingerprint
    founder: Member
    leases: Leases | None  # of the founder, if members share the samples
    settings: Mapping[str, Any]  # of whoever uses the store, such as `overtone train`
    agreed: Mapping[str, Any]  # what must be the same for all members, beside model and method

    def refuse_other(self, where: str, agreed: Mapping[str, Any]) -> None:
        """Refuse a member whose facts are not those of the run."""
        for key in {**self.agreed, **agreed}:
            if (there := self.agreed.get(key)) != (here := agreed.get(key)):
                raise MismatchError(
                    f"the run in {where} does not match: {key} is {shortened(there)} there and {shortened(here)} here. "
                    "Leave it as it is there, or use another place"
                )


def found(
    bucket: Bucket,
    seal: Seal,
    description: Description,
    schema: bytes,
    tensors: Mapping[str, Tensor],
    anchor: str,
    name: str,
    leases: Leases | None,
    settings: Mapping[str, Any],
    agreed: Mapping[str, Any],
) -> bytes:
    """Try to found the run with these weights. If somebody else was first, that is the run.

    Returns the id that the run has if this process founded it.
    """
    about = About(os.urandom(8), schema)
    snapshot = snapshot_path(0, about.run.hex())
    bucket.create(snapshot, packed_snapshot(seal, about, 0, tensors, 0))
    told = {
        "run": about.run.hex(),
        "description": description,
        "snapshot": snapshot,
        "anchor": anchor,
        "name": name,
        "leases": None if leases is None else leases.told(),
        "settings": dict(settings),
        "agreed": dict(agreed),
    }
    founder = Process(0, 1)
    if bucket.create(RUN, seal_message(_nobody.header(Kind.RUN, 0), json.dumps(told).encode(), seal)):
        _claim(bucket, seal, about, founder, name)
    return about.run


def settings_in(bucket: Bucket, seal: Seal) -> tuple[str, Mapping[str, Any]] | None:
    """The id of the run that the store has, and its settings, for whoever has no model yet; None if it has no run."""
    raw = bucket.read(RUN)
    if raw is None:
        return None
    try:
        told = parsed(_nobody.opened(raw, Kind.RUN, 0, seal).body)
        return str(told["run"]), dict(told["settings"])
    except (KeyError, TypeError, ValueError, WireError) as error:
        raise StoreError(f"store {bucket.url}: {NOT_READ.format(why=error)}") from error


def read_run(bucket: Bucket, seal: Seal, schema: bytes, description: Description) -> Founded | None:
    """The run that the store has; None if it has none. Refuses one that is not of this model and method."""
    raw = bucket.read(RUN)
    if raw is None:
        return None
    try:
        told = parsed(_nobody.opened(raw, Kind.RUN, 0, seal).body)
        about = About(bytes.fromhex(told["run"]), schema)
        founded = Founded(
            about,
            told["description"],
            str(told["snapshot"]),
            str(told["anchor"]),
            Member(0, 1, str(told["name"])),
            None if told["leases"] is None else Leases.read(told["leases"]),
            dict(told["settings"]),
            dict(told["agreed"]),
        )
    except (KeyError, TypeError, ValueError, WireError) as error:
        raise StoreError(f"store {bucket.url}: {NOT_READ.format(why=error)}") from error
    compare_described(f"the run in {bucket.url}", founded.description, description)
    return founded


# -- the identity of a process -------------------------------------------------------------------------------------


def take_number(bucket: Bucket, seal: Seal, founded: Founded, name: str | None, host: str) -> tuple[Process, str]:
    """Take the number of the member of this name, or a new one; without a name, the first free one of this host."""
    for _ in range(MOST_TRIES):
        taken = _claims(bucket, seal, founded)
        chosen = name or _free(host, {other for other in taken.values() if other is not None})
        own = [process.number for process, other in taken.items() if other == chosen]
        number = own[-1] if own else max(process.number for process in taken) + 1
        # What somebody else put there binds nobody, but its place is taken.
        process = Process(number, max((p.session for p in taken if p.number == number), default=0) + 1)
        if process.number >= MOST_MEMBERS:
            raise StoreError(f"store {bucket.url}: {process.number} members have come already; at most {MOST_MEMBERS}")
        if _claim(bucket, seal, founded.about, process, chosen):
            return process, chosen
    raise StoreError(f"store {bucket.url}: no number could be taken in {MOST_TRIES} tries; others were always faster")


def _claims(bucket: Bucket, seal: Seal, founded: Founded) -> dict[Process, str | None]:
    """All claims in order, with the names of the members; None for one that cannot be believed."""
    found: dict[Process, str | None] = {founded.founder.process: founded.founder.name}
    for process in processes(list(bucket.names("members"))):
        raw = bucket.read(f"members/{process}") or b""
        found.setdefault(process, None)
        try:
            message = founded.about.opened(raw, Kind.CLAIM, process.session, seal)
            name = str(parsed(message.body).get("name"))
        except WireError:
            continue  # put there by somebody else
        if message.header.sender == process.number and is_name(name):
            found[process] = name
    return dict(sorted(found.items()))


def _claim(bucket: Bucket, seal: Seal, about: About, process: Process, name: str) -> bool:
    # The nonce makes two processes with one name two different objects.
    body = json.dumps({"name": name, "nonce": os.urandom(8).hex()}).encode()
    header = about.header(Kind.CLAIM, process.number, process.session)
    return bucket.create(f"members/{process}", seal_message(header, body, seal))


def _free(host: str, taken: set[str]) -> str:
    return next(name for number in range(1, len(taken) + 2) if (name := f"{host}-{number}") not in taken)


# -- snapshots and commits -----------------------------------------------------------------------------------------


def packed_snapshot(seal: Seal, about: About, index: int, tensors: Mapping[str, Tensor], sender: int) -> bytes:
    """The shared state before a round, as it is stored."""
    import safetensors.torch

    body = safetensors.torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    return seal_message(about.header(Kind.SNAPSHOT, sender, index), body, seal)


def read_snapshot(bucket: Bucket, seal: Seal, about: About, index: int, path: str) -> dict[str, Tensor]:
    """The shared state before a round. Raises `WireError` if it is not there or cannot be believed."""
    import safetensors.torch

    raw = bucket.read(path)
    if raw is None:
        raise WireError(f"snapshot {path}: it is not there")
    message = about.opened(raw, Kind.SNAPSHOT, index, seal)
    try:
        return safetensors.torch.load(message.body)
    except Exception as error:  # safetensors raises errors of its own kind
        raise WireError(f"snapshot {path}: {error!r}; it is corrupt") from error


def snapshots(bucket: Bucket) -> list[int]:
    """The rounds that have a snapshot, the newest first, without the first weights."""
    return sorted((int(name) for name in bucket.names("snapshots") if _ROUND.fullmatch(name)), reverse=True)


def read_commit(bucket: Bucket, seal: Seal, about: About, index: int) -> Commit | None:
    """The commit of a round; None if there is none yet."""
    raw = bucket.read(commit_path(index))
    if raw is None:
        return None
    try:
        return Commit.unpack(raw, index, about, seal)
    except WireError as error:
        raise StoreError(f"store {bucket.url}: the commit of round {index} was refused: {error}") from error


def read_message(bucket: Bucket, index: int, named: Named) -> bytes:
    """A message that a commit names."""
    message = bucket.read(f"{folder_of(index)}/{named.process}")
    if message is None:
        raise StoreError(
            f"store {bucket.url}: round {index}: the message of member {named.number} counts, and was deleted; start "
            "again, so that a later snapshot is taken"
        )
    return message


def commits_from(bucket: Bucket, seal: Seal, about: About, index: int) -> Iterator[tuple[Commit, dict[Process, bytes]]]:
    """The commits from this round on that are there now, each with the messages that it names."""
    while (commit := read_commit(bucket, seal, about, index)) is not None:
        raw = {}
        for named in commit.messages:
            raw[named.process] = read_message(bucket, index, named)
        yield commit, raw
        index += 1
    _refuse_hole(bucket, seal, about, index)


def _refuse_hole(bucket: Bucket, seal: Seal, about: About, index: int) -> None:
    """Refuse to go on from a round without a commit if a later round has one: history would be written anew."""
    later = [int(name) for name in bucket.folders("rounds") if _ROUND.fullmatch(name) and int(name) > index]
    for other in later[-LOOKED_AT:]:
        with suppress(StoreError):  # somebody without the key may have put it there
            if read_commit(bucket, seal, about, other) is not None:
                raise MismatchError(
                    f"store {bucket.url}: the commit of round {index} is missing, and round {other} has one: it was "
                    "deleted. Put it back, or start from a copy of the store"
                )
