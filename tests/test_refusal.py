"""A bad message from one rank, on real processes: every rank refuses it alike and names its sender, or, where the
policy says so, goes on without it; and no weight is touched by a round that does not count."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import overtone
import worlds
from overtone import Replica
from overtone.errors import MismatchError, PeerError
from overtone.exchange.message import HEADER_BYTES, MAGIC, Kind, Seal
from overtone.ledger import Count
from overtone.transport import run_exchange
from overtone.world.process_group import Torch
from scenario import METHODS, backward, batches, build, weights

LIAR = 1
Spoil = Callable[[bytes], bytes]


class Tampered(Torch):
    """Hears what rank 1 says in one round differently from how it was said."""

    def __init__(self, spoil: Spoil | None, at_round: int = 1) -> None:
        super().__init__()
        self.spoil = spoil
        self.at_round = at_round

    def gather(self, message: bytes, *, most: int | None, count: Count) -> list[bytes]:
        heard = super().gather(message, most=most, count=count)
        said = heard[LIAR]
        is_round = said[:4] == MAGIC and said[5] & 0x7F in (Kind.ROUND, Kind.ABSTAIN, Kind.FAILURE)
        if self.spoil is not None and is_round and int.from_bytes(said[8:12], "little") == self.at_round:
            heard[LIAR] = self.spoil(said)
        return heard


def flip(message: bytes) -> bytes:
    return message[:70] + bytes([message[70] ^ 16]) + message[71:]


def flip_header(message: bytes) -> bytes:
    return message[:13] + bytes([message[13] ^ 16]) + message[14:]


def reseal(message: bytes) -> bytes:
    """Another true message, as a liar would send it to some and not to others: nobody else has a changed mind."""
    length = int.from_bytes(message[16:24], "little")
    changed = message[: HEADER_BYTES + length - 1] + b"\x01"
    return changed + Seal().of(changed)


def train(replica: Replica, steps: int) -> list[overtone.Round]:
    rank = dist.get_rank()
    done = []
    for batch, _ in zip(batches(rank), range(steps), strict=False):
        backward(replica, batch)
        record = replica.step()
        if record is not None:
            done.append(record)
    return done


def lies() -> dict[str, str]:
    rank = dist.get_rank()
    told: dict[str, str] = {}

    def attempt(name: str, spoil: Spoil | None, method: overtone.Method, poisoned: bool = False) -> None:
        replica = Replica(*build(rank), method, Tampered(spoil))
        train(replica, method.every or 1)
        before = replica.fingerprint
        if poisoned:
            with torch.no_grad():
                replica.parameters.exchanged[0].fill_(math.nan)
        try:
            train(replica, method.every or 1)
            told[name] = "no error"
        except PeerError as error:
            told[name] = str(error)
        assert replica.fingerprint == before, "the anchor was touched"

    others, last = rank != LIAR, rank == 2
    attempt("all others", flip if others else None, METHODS["decoupled"])
    attempt("one of them", flip if last else None, METHODS["decoupled"])
    attempt("two tongues", reseal if last else None, replace(METHODS["decoupled"], codec=overtone.codec.TopK(bits=32)))
    attempt("header of a sum", flip_header if last else None, METHODS["diloco"])
    attempt("header of a failure", flip_header if last else None, METHODS["diloco"], poisoned=rank == LIAR)
    attempt("gradients", flip if last else None, METHODS["demo"])
    return told


@pytest.mark.slow
def test_every_rank_refuses_alike_and_names_the_sender(tmp_path: Path) -> None:
    found = worlds.run(lies, size=3, folder=tmp_path)
    for result in found:
        assert "value" in result, result
    told = [result["value"] for result in found]
    for name, refused in {
        "all others": "round 1: the message of rank 1 was refused by rank 0: checksum",
        "one of them": "round 1: the message of rank 1 was refused by rank 2: checksum",
        "two tongues": "round 1: the message of rank 1 was refused because not every rank received the same",
        "header of a sum": "round 1: the message of rank 1 was refused by rank 2: checksum",
        "header of a failure": "round 1: the message of rank 1 was refused by rank 2: checksum",
        "gradients": "round 1: the message of rank 1 was refused by rank 2: checksum",
    }.items():
        assert {t[name].startswith(refused) for t in told} == {True}, [t[name] for t in told]
        assert len({t[name] for t in told}) == 1


def damaged_greetings() -> dict[str, str]:
    """Rank 2 hears one of rank 1's two greetings damaged: its introduction, or its fingerprint of the first weights."""
    rank = dist.get_rank()

    class Deafened(Torch):
        due = 0

        def gather(self, message: bytes, *, most: int | None, count: Count) -> list[bytes]:
            heard = super().gather(message, most=most, count=count)
            if heard[LIAR][:4] == MAGIC and heard[LIAR][5] == Kind.GREETING:
                self.due -= 1
                heard[LIAR] = flip(heard[LIAR]) if self.due == 0 and rank == 2 else heard[LIAR]
            return heard

    told = {}
    for which in (1, 2):
        transport = Deafened()
        transport.due = which
        try:
            Replica(*build(rank), METHODS["decoupled"], transport)
            told[str(which)] = "no error"
        except PeerError as error:
            told[str(which)] = str(error)
    return told


@pytest.mark.slow
def test_a_greeting_damaged_on_one_link_ends_on_all(tmp_path: Path) -> None:
    found = worlds.run(damaged_greetings, size=3, folder=tmp_path)
    for result in found:
        assert "value" in result, result
        for told in result["value"].values():
            assert told.startswith("round 0: the handshake of rank 1 was refused by rank 2: checksum"), told


def leaving_out() -> dict[str, object]:
    rank = dist.get_rank()
    spoil = flip if rank == 2 else None
    replica = Replica(*build(rank), METHODS["decoupled"], Tampered(spoil), refused="leave out")
    owed = []
    for _ in range(3):
        before = replica.state.tensors["residual"].clone()
        (record,) = train(replica, replica.method.every or 1)
        owed.append((float(before.norm()), record))
    replica.finish()
    return {
        "left out": [record.left_out for _, record in owed],
        "residual": [record.residual_norm for _, record in owed],
        "drift": [record.drift_norm for _, record in owed],
        "fingerprints": [record.anchor_fingerprint for _, record in owed],
        "weights": weights(replica),
    }


@pytest.mark.slow
def test_a_refused_rank_is_left_out_everywhere_alike(tmp_path: Path) -> None:
    """Rank 2 cannot read what rank 1 said in round 1: all go on without it, with one anchor; what rank 1 said is still
    owed, so its residual grows by all of its drift instead of the unsent part."""
    found = worlds.run(leaving_out, size=3, folder=tmp_path)
    for result in found:
        assert "value" in result, result
    values = [result["value"] for result in found]
    for value in values:
        assert value["left out"] == [(), (LIAR,), ()]
        assert value["fingerprints"] == values[0]["fingerprints"]
        for name, tensor in value["weights"].items():
            assert torch.equal(tensor, values[0]["weights"][name]), name
    before, after = values[LIAR]["residual"][:2]
    assert after > 1.2 * before
    assert values[0]["residual"][1] < after


def uneven() -> dict[str, str]:
    """Rank 0 has more batches than the others, who finish early."""
    rank = dist.get_rank()
    told = {}
    for name in ("ddp", "diloco", "local_sgd", "decoupled", "demo"):
        method = METHODS[name]
        replica = Replica(*build(rank), method)
        every = method.every or 1
        try:
            train(replica, every * (3 if rank == 0 else 2))
            replica.finish()
            told[name] = "no error"
        except MismatchError as error:
            told[name] = str(error)
    return told


@pytest.mark.slow
def test_unequal_numbers_of_batches_are_told_on_every_rank(tmp_path: Path) -> None:
    found = worlds.run(uneven, size=3, folder=tmp_path)
    for result in found:
        assert "value" in result, result
        for name, told in result["value"].items():
            assert "replicas are at different steps: round after" in told, (name, told)
            assert "on rank 0" in told
            assert "on ranks 1, 2" in told


def strangers() -> dict[str, str]:
    rank = dist.get_rank()
    told = {}
    keys = {"other key": "wrong" if rank == LIAR else "right", "no key": None if rank == LIAR else "right"}
    for name, key in keys.items():
        try:
            Replica(*build(rank), METHODS["decoupled"], key=key)
            told[name] = "no error"
        except PeerError as error:
            told[name] = str(error)
    replica = Replica(*build(rank), METHODS["decoupled"], key="right")
    train(replica, replica.method.every or 1)
    told["the same key"] = replica.fingerprint
    return told


@pytest.mark.slow
def test_a_key_keeps_strangers_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OVERTONE_KEY", raising=False)
    found = worlds.run(strangers, size=2, folder=tmp_path)
    for rank, result in enumerate(found):
        assert "value" in result, result
        told = result["value"]
        assert told["other key"].startswith(
            f"round 0: the handshake of rank {1 - rank} was refused: HMAC: does not match"
        )
        assert "has none; set OVERTONE_KEY to the same on every replica" in told["no key"]
    assert found[0]["value"]["the same key"] == found[1]["value"]["the same key"]


def test_a_message_of_an_earlier_round_or_run_is_refused() -> None:
    """Replayed bytes, true once: refused by round, and in another run by the run's name."""

    class Recorder(overtone.Solo):
        said: list[bytes]
        replay: bytes | None = None

        def gather(self, message: bytes, *, most: int | None, count: Count) -> list[bytes]:  # noqa: ARG002
            if most is not None:
                self.said = [*getattr(self, "said", []), message]
            return [message if self.replay is None or most is None else self.replay]

    worlds_apart = [Recorder(), Recorder()]
    replicas = [Replica(*build(0), overtone.decoupled(every=1), world) for world in worlds_apart]
    for replica in replicas:
        backward(replica, next(batches(0)))
        replica.step()
    old, other = worlds_apart[0].said[-1], worlds_apart[1].said[-1]
    for replayed, refused in (
        (old, "round: 0, this is round 1; a stale or replayed message"),
        (other, "run: .* of another run"),
    ):
        worlds_apart[0].replay = replayed
        backward(replicas[0], next(batches(0)))
        before = weights(replicas[0])
        with pytest.raises(overtone.OvertoneError, match=refused):
            hold_round(replicas[0])
        assert all(torch.equal(tensor, before[name]) for name, tensor in weights(replicas[0]).items())
        worlds_apart[0].replay = None
        replicas[0].exchanger.signal.begin()


def hold_round(replica: Replica) -> None:
    """A round without a local step before it, so that any change of a weight is the round's."""
    run_exchange(replica.rounding(), replica.transport)


def overflows() -> dict[str, str]:
    """Rank 1's gradient overflows under a scaler, and rank 2 cannot read the header that says so."""
    rank = dist.get_rank()
    spoil = flip_header if rank == 2 else None
    replica = Replica(*build(rank), METHODS["ddp"], Tampered(spoil))
    train(replica, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    x, y = next(batches(rank))
    replica.inner.zero_grad()
    scaler.scale(torch.nn.functional.cross_entropy(replica.model(x), y)).backward()
    if rank == LIAR:
        replica.model.up.weight.grad.fill_(math.inf)  # type: ignore[union-attr]
    try:
        replica.step(scaler=scaler)
        return {"told": "no error"}
    except PeerError as error:
        return {"told": str(error)}


@pytest.mark.slow
def test_a_damaged_header_parts_nobody(tmp_path: Path) -> None:
    """Whatever a header said that one rank could not read, all ranks take the same way from there."""
    found = worlds.run(overflows, size=3, folder=tmp_path)
    for result in found:
        assert "value" in result, result
        assert result["value"]["told"].startswith("round 1: the message of rank 1 was refused by rank 2: checksum")


def giants() -> str:
    """Rank 1 announces a message that nobody could hold."""
    rank = dist.get_rank()
    transport = Torch()
    try:
        if rank == LIAR:
            sizes = [torch.empty(1, dtype=torch.int64) for _ in range(2)]
            dist.all_gather(sizes, torch.tensor([1 << 62]))
            return "announced"
        transport.gather(b"x" * 10, most=1000, count=Count())
        return "no error"
    except PeerError as error:
        return str(error)


@pytest.mark.slow
def test_an_absurd_length_is_refused_before_any_memory_is_taken(tmp_path: Path) -> None:
    found = worlds.run(giants, size=2, folder=tmp_path)
    assert found[0]["value"].startswith(f"rank 1 announces a message of {1 << 62} bytes, where 1000 are the most")


def deaf() -> dict[str, str]:
    """Rank 2 can read nobody: by «leave out» everybody else would have to go."""
    rank = dist.get_rank()

    class Deaf(Torch):
        def gather(self, message: bytes, *, most: int | None, count: Count) -> list[bytes]:
            heard = super().gather(message, most=most, count=count)
            if rank == 2 and message[5:6] == bytes([Kind.ROUND]) and message[:4] == MAGIC:
                return [m if r == rank else flip(m) for r, m in enumerate(heard)]
            return heard

    replica = Replica(*build(rank), METHODS["decoupled"], Deaf(), refused="leave out")
    try:
        train(replica, replica.method.every or 1)
        return {"told": "no error"}
    except PeerError as error:
        return {"told": str(error)}


@pytest.mark.slow
def test_one_that_reads_nobody_does_not_expel_everybody(tmp_path: Path) -> None:
    for result in worlds.run(deaf, size=3, folder=tmp_path):
        assert "value" in result, result
        assert "the message of rank 0 was refused by rank 2" in result["value"]["told"]
