"""How a process comes into a run: it founds it, or takes over what the store says, and takes a member's number."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from torch import Tensor

from overtone.errors import MismatchError, StoreError, WireError, shortened
from overtone.exchange.description import Description, schema_of
from overtone.exchange.message import Kind, Seal, seal_message
from overtone.swarm.bucket import Bucket
from overtone.swarm.leases import Leases
from overtone.swarm.records import (
    MOST_COMMIT,
    MOST_MEMBERS,
    MOST_SESSION,
    RUN,
    About,
    Member,
    Process,
    commit_path,
    is_name,
    is_sealed,
    packed_snapshot,
    parsed,
    processes,
    rounds_in,
    snapshot_path,
)

NOT_READ = (
    "what its object `run` says cannot be believed: {why}. Give the key of this run (OVERTONE_KEY), or another store. "
    "If somebody without the key has written that object, delete it, and put back what was there"
)
MOST_TRIES = 100  # to take a number
MOST_CLAIM = 4096  # bytes
LOOKED_AT = 3  # of the first and of the last rounds, for a commit that should not be there
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
    _refuse_remains(bucket, seal)
    about = About(os.urandom(8), schema_of(description))
    snapshot = snapshot_path(0, about.run.hex())
    bucket.create(snapshot, packed_snapshot(seal, about, 0, tensors, 0))
    if bucket.create(snapshot, b"another"):
        raise StoreError(
            f"store {bucket.url}: the storage writes over an object that is there already, so that two replicas could "
            "both commit a round; use one that heeds `If-None-Match: *`, as S3 does"
        )
    told = {
        "run": about.run.hex(),
        "description": description,
        "snapshot": snapshot,
        "anchor": anchor,
        "name": name,
        "leases": None if leases is None else leases.told(),
        "settings": settings,
        "agreed": agreed,
    }
    founder = Process(0, 1)
    if bucket.create(RUN, seal_message(_nobody.header(Kind.RUN, 0), json.dumps(told).encode(), seal)):
        _claim(bucket, seal, about, founder, name)
    return about.run


def _refuse_remains(bucket: Bucket, seal: Seal) -> None:
    """Refuse to found a run where rounds are already. They began with an object `run`, so it was deleted."""
    rounds = rounds_in(bucket.folders("rounds"))
    for index in {*rounds[:LOOKED_AT], *rounds[-LOOKED_AT:]}:
        is_one = is_sealed(bucket.read(commit_path(index), MOST_COMMIT) or b"", seal)
        if is_one and bucket.read(RUN, MOST_COMMIT) is None:  # somebody else may have founded it just now
            raise MismatchError(
                f"store {bucket.url}: {commit_path(index)} is there, and the object `{RUN}` is not: it was deleted. "
                "Put it back, or use an empty place"
            )


def read_run(bucket: Bucket, seal: Seal) -> Founded | None:
    """The run that the store has; None if it has none."""
    raw = bucket.read(RUN, MOST_COMMIT)
    if raw is None:
        return None
    try:
        told = parsed(_nobody.opened(raw, Kind.RUN, 0, seal).body)
        description = dict(told["description"])
        return Founded(
            About(bytes.fromhex(told["run"]), schema_of(description)),
            description,
            str(told["snapshot"]),
            str(told["anchor"]),
            Member(0, 1, str(told["name"])),
            None if told["leases"] is None else Leases.read(told["leases"]),
            dict(told["settings"]),
            dict(told["agreed"]),
        )
    except (KeyError, TypeError, ValueError, WireError) as error:
        raise StoreError(f"store {bucket.url}: {NOT_READ.format(why=error)}") from error


# -- the identity of a process -------------------------------------------------------------------------------------


def take_number(
    bucket: Bucket, seal: Seal, founded: Founded, name: str | None, host: str, present: Sequence[Member] = ()
) -> tuple[Process, str]:
    """Take the number of the member of this name, or a new one; without a name, the first free one of this host.
    ``present``: the members now, whose claims may have been deleted."""
    lost: set[Process] = set()  # places that somebody else took first
    for _ in range(MOST_TRIES):
        claims, junk = _claims(bucket, seal, founded, lost)
        claims |= {member.process: member.name for member in present}
        chosen = name or _free(host, set(claims.values()))
        own = [process for process, other in claims.items() if other == chosen]
        # What somebody else put there binds nobody, but its place is taken.
        process = next(place for place in _places(max(own or claims), renewed=bool(own)) if place not in junk)
        if process.number >= MOST_MEMBERS or process.session > MOST_SESSION:
            raise StoreError(
                f"store {bucket.url}: no number is left for {chosen}: {len(claims)} processes have come, and "
                f"{len(junk)} objects in members/ cannot be believed; at most {MOST_MEMBERS} members. Delete the latter"
            )
        if _claim(bucket, seal, founded.about, process, chosen):
            return process, chosen
        lost.add(process)
    raise StoreError(f"store {bucket.url}: no number could be taken in {MOST_TRIES} tries; others were always faster")


def _places(last: Process, *, renewed: bool) -> Iterator[Process]:
    """The processes that may come after the last one: of the same member, or the first ones of other members."""
    for ahead in count(1):
        yield Process(last.number, last.session + ahead) if renewed else Process(last.number + ahead, 1)


def _claims(
    bucket: Bucket, seal: Seal, founded: Founded, lost: Collection[Process]
) -> tuple[dict[Process, str], set[Process]]:
    """All claims with the names of the members; and the places of those that cannot be believed. ``lost``: places that
    a listing may not show yet."""
    found, junk = {founded.founder.process: founded.founder.name}, set()
    for process in {*processes(list(bucket.names("members"))), *lost}:
        try:
            found[process] = claimed(bucket, seal, founded.about, process)
        except WireError:
            junk.add(process)  # put there by somebody else
    return found, junk


def claimed(bucket: Bucket, seal: Seal, about: About, process: Process) -> str:
    """The name of the member for which this process has come. Raises `WireError` if that cannot be believed."""
    raw = bucket.read(f"members/{process}", MOST_CLAIM) or b""
    message = about.opened(raw, Kind.CLAIM, process.session, seal)
    name = str(parsed(message.body).get("name"))
    if message.header.sender != process.number or not is_name(name):
        raise WireError("claim: not of the process whose place it lies in")
    return name


def _claim(bucket: Bucket, seal: Seal, about: About, process: Process, name: str) -> bool:
    # The nonce makes two processes with one name two different objects.
    body = json.dumps({"name": name, "nonce": os.urandom(8).hex()}).encode()
    header = about.header(Kind.CLAIM, process.number, process.session)
    return bucket.create(f"members/{process}", seal_message(header, body, seal))


def _free(host: str, taken: set[str]) -> str:
    return next(name for number in range(1, len(taken) + 2) if (name := f"{host}-{number}") not in taken)
