"""How a process comes into a run: it founds it, or takes over what the store says, and takes a member's number."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from overtone.errors import StoreError, WireError
from overtone.exchange.description import Description, schema_of
from overtone.exchange.message import Kind, Seal, seal_message
from overtone.swarm.bucket import Bucket
from overtone.swarm.leases import Leases
from overtone.swarm.records import (
    MOST_MEMBERS,
    RUN,
    About,
    Member,
    Process,
    is_name,
    packed_snapshot,
    parsed,
    processes,
    snapshot_path,
)

NOT_READ = (
    "what its object `run` says cannot be believed: {why}. Give the key of this run (OVERTONE_KEY), or another store"
)
MOST_TRIES = 100  # to take a number
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


def found(
    bucket: Bucket,
    seal: Seal,
    description: Description,
    tensors: Mapping[str, Tensor],
    anchor: str,
    name: str,
    leases: Leases | None,
    settings: Mapping[str, Any],
) -> bytes:
    """Try to found the run with these weights. If somebody else was first, that is the run.

    Returns the id that the run has if this process founded it.
    """
    about = About(os.urandom(8), schema_of(description))
    snapshot = snapshot_path(0, about.run.hex())
    bucket.create(snapshot, packed_snapshot(seal, about, 0, tensors, 0))
    told = {
        "run": about.run.hex(),
        "description": description,
        "snapshot": snapshot,
        "anchor": anchor,
        "name": name,
        "leases": None if leases is None else leases.told(),
        "settings": settings,
    }
    founder = Process(0, 1)
    if bucket.create(RUN, seal_message(_nobody.header(Kind.RUN, 0), json.dumps(told).encode(), seal)):
        _claim(bucket, seal, about, founder, name)
    return about.run


def read_run(bucket: Bucket, seal: Seal) -> Founded | None:
    """The run that the store has; None if it has none."""
    raw = bucket.read(RUN)
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
        )
    except (KeyError, TypeError, ValueError, WireError) as error:
        raise StoreError(f"store {bucket.url}: {NOT_READ.format(why=error)}") from error


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
        found.setdefault(process, None)
        with suppress(WireError):  # put there by somebody else
            found[process] = claimed(bucket, seal, founded.about, process)
    return dict(sorted(found.items()))


def claimed(bucket: Bucket, seal: Seal, about: About, process: Process) -> str:
    """The name of the member for which this process has come. Raises `WireError` if that cannot be believed."""
    message = about.opened(bucket.read(f"members/{process}") or b"", Kind.CLAIM, process.session, seal)
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
