"""What the replicas of a run tell each other besides the rounds: sealed, read alike by all, or refused by all."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

import worlds
from overtone.errors import OvertoneError, PeerError, RunError
from overtone.exchange.consensus import gather_sealed
from overtone.exchange.message import HEADER_BYTES, Kind, Seal
from overtone.ledger import Count, Ledger
from overtone.runs import coordination, directory
from overtone.runs.coordination import Coordinator, StopVote
from overtone.runs.stop_signals import StopRequest
from overtone.transport import run_exchange
from overtone.world.process_group import Begun, Torch

LIAR = 1
KEY = "everybody's"
Spoil = Callable[[bytes], bytes]


class Tampered(Torch):
    """Hears one message of rank 1 otherwise than it was said."""

    spoil: Spoil | None = None

    def gather(self, message: bytes, *, most: int | None, count: Count) -> list[bytes]:
        heard = super().gather(message, most=most, count=count)
        if self.spoil is not None and most is not None and heard[LIAR][5] & 0x7F == Kind.CONTROL:
            heard[LIAR], self.spoil = self.spoil(heard[LIAR]), None
        return heard


def forged(message: bytes, body: bytes) -> bytes:
    """What a stranger without the key can make of it: the header as it was, and a checksum that fits."""
    header = message[:5] + bytes([message[5]]) + message[6:16] + len(body).to_bytes(8, "little") + message[24:56]
    return header + body + Seal().of(header, body).ljust(16, b"\1")


def damages() -> dict[str, Spoil]:
    earlier: list[bytes] = []

    def replay(message: bytes) -> bytes:
        return earlier[0]

    def remember(message: bytes) -> bytes:
        earlier.append(message)
        return message

    return {
        "remember": remember,
        "flipped": lambda m: m[:60] + bytes([m[60] ^ 1]) + m[61:],
        "forged": lambda m: forged(m, json.dumps(["SIGTERM", 99]).encode()),
        "cut": lambda m: m[: HEADER_BYTES + 2],
        "empty": lambda m: m[:0],
        "replayed": replay,
    }


def told_to_all() -> dict[str, str]:
    """Each damage reaches rank 2 only; what every rank says of it."""
    rank, found = dist.get_rank(), {}
    spoils = damages()
    for name, spoil in spoils.items():
        transport = Tampered()
        mine = Coordinator(transport)
        if rank == 2:
            transport.spoil = spoil
        try:
            found[name] = str(mine.all_gather(["", rank]))
        except PeerError as error:
            found[name] = str(error)
        dist.barrier()
    return found


@pytest.mark.parametrize("key", ["", KEY], ids=["no key", "key"])
def test_a_damaged_control_message_ends_alike_on_all_ranks(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERTONE_KEY", key)
    found = worlds.run(told_to_all, size=3, folder=tmp_path)
    for result in found:
        assert "value" in result, result
    for name in damages():
        told = {result["value"][name] for result in found}
        assert len(told) == 1, (name, told)
        (words,) = told
        if name == "remember":
            assert words == "[['', 0], ['', 1], ['', 2]]"
        else:
            assert "the control message of rank 1 was refused by rank 2" in words, (name, words)


def bad_words() -> dict[str, str]:
    """True messages of a liar that has the key: nothing in them may hurt."""
    rank, found = dist.get_rank(), {}
    for name, body in {"deep": b"[" * 200_000, "no text": b"\xff\xfe", "not JSON": b"stop!"}.items():
        mine = Coordinator(Torch())
        said = body if rank == LIAR else b"1"
        talk = gather_sealed("control message", mine.header(1), said, range(2), mine.seal, coordination._value)
        try:
            found[name] = str(run_exchange(talk, mine.transport))
        except OvertoneError as error:
            found[name] = str(error)
        dist.barrier()
    return found


def test_what_is_no_json_is_refused_by_all(tmp_path: Path) -> None:
    found = worlds.run(bad_words, size=2, folder=tmp_path)
    for result in found:
        assert "value" in result, result
        for name, words in result["value"].items():
            assert "the control message of rank 1 was refused by rank 0: body: not JSON" in words, (name, words)


def all_succeed() -> dict[str, str]:
    rank, mine = dist.get_rank(), Coordinator(Torch())

    def works() -> int:
        return 3

    def fails() -> int:
        raise OvertoneError("no room\x1b[2J\nanywhere")

    found = {}
    for name, work in {"well": works, "ill": fails if rank == LIAR else works}.items():
        try:
            found[name] = str(mine.all_succeed(work))
        except OvertoneError as error:
            found[name] = str(error)
    return found


def test_what_one_rank_cannot_do_is_told_to_all_without_control_characters(tmp_path: Path) -> None:
    here, there = (result["value"] for result in worlds.run(all_succeed, size=2, folder=tmp_path))
    assert here["well"] == there["well"] == "3"
    assert there["ill"].startswith("no room")
    assert here["ill"] == "rank 1: no room\\x1b[2J\\nanywhere"


# -- votes ---------------------------------------------------------------------------------------------------------


class Slow:
    """Replicas of very different pace, without a training: what matters is who waits for whom."""

    def __init__(self, asked: StopRequest) -> None:
        coordination.SECONDS_BETWEEN_VOTES = 0.0
        self.mine = Coordinator(Torch())
        self.mine.phase = "upkeep"
        self.vote = StopVote(self.mine, 0, asked)


def free_running(folder: str) -> dict[str, float]:
    """Rank 0 takes a thousand steps while rank 1 takes none: it must not wait; then rank 1 follows."""
    rank, asked = dist.get_rank(), StopRequest()
    world, gate = Slow(asked), Path(folder, "gate")
    if rank == 1:
        while not gate.exists():
            pass
    for step in range(1, 1001):
        assert world.vote.stop_after(step) == ""
    gate.touch()
    world.vote.close()
    counts = world.mine.transport.ledger.counts["upkeep"]
    return {"sent": counts.sent, "received": counts.received}


def test_a_fast_replica_does_not_wait_for_a_slow_one(tmp_path: Path) -> None:
    found = worlds.run(free_running, str(tmp_path), size=2, folder=tmp_path)
    for result in found:
        assert "value" in result, result
        assert result["value"]["sent"] > 0


def test_waiting_for_control_messages_is_waiting() -> None:
    """Also where a run waits besides its rounds; not what it waited for before it began to train."""
    ledger = Ledger()
    for phase, seconds in {"setup": 1.0, "rounds": 2.0, "finish": 4.0, "upkeep": 8.0}.items():
        ledger.counts[phase].waiting = seconds
    assert ledger.waiting == 14.0


def asked_in_the_middle(folder: str) -> tuple[str, int]:
    """Rank 1 is asked at step 5; rank 0 is ahead, waiting for it in an exchange after step 8."""
    rank, asked, gate = dist.get_rank(), StopRequest(), Path(folder, "gate")
    world = Slow(asked)
    for step in range(1, 100):
        if rank == 1 and step == 5:
            asked.name = "SIGINT"
        if step % 8 == 0:  # a round
            world.mine.all_gather("round")
        if why := world.vote.stop_after(step):
            gate.touch()
            return why, step
    raise AssertionError("nobody stopped")


def test_all_stop_after_the_same_step_wherever_they_are(tmp_path: Path) -> None:
    found = worlds.run(asked_in_the_middle, str(tmp_path), size=3, folder=tmp_path)
    for result in found:
        assert "value" in result, result
    (stopped,) = {result["value"] for result in found}
    assert stopped[0] == "SIGINT"
    assert 5 <= stopped[1] <= 8


def altered_stop() -> str:
    """Somebody without the key turns «nobody was asked» into «stop»."""
    asked = StopRequest()
    world = Slow(asked)
    opened = Begun.messages

    def altered(self: Begun, *, wait: bool = False) -> list[bytes] | None:
        heard = opened(self, wait=wait)
        if heard is not None and dist.get_rank() == 0:
            heard[LIAR] = forged(heard[LIAR], bytes([signal.SIGTERM]))
        return heard

    Begun.messages = altered  # type: ignore[method-assign]
    try:
        for step in range(1, 100):
            if why := world.vote.stop_after(step):
                return f"stopped by {why}"
            world.mine.all_gather("round")
    except PeerError as error:
        return str(error)
    finally:
        world.mine.transport.leave("refused a vote")
    return "went on"


def test_an_altered_stop_request_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERTONE_KEY", KEY)
    here, there = (result["value"] for result in worlds.run(altered_stop, size=2, folder=tmp_path))
    assert here.startswith("the stop vote of rank 1 was refused: HMAC")
    assert "broke off" in there


# -- the elected directory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["20261117-101500-decoupled", "a", "x_y.z-2"])
def test_rank_0_may_choose_a_name_below_runs(name: str) -> None:
    assert directory.elected(name) == Path("runs") / name


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "/etc", "a/b", "a\\b", "~x", "-x", ".x", "a b", "a\x1b[2J", "ä", "a" * 101, 3, None]
)
def test_and_nothing_else(name: object) -> None:
    with pytest.raises(RunError, match="not the name of a directory") as refused:
        directory.elected(name)
    assert "\x1b" not in str(refused.value)
