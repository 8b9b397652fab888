"""Peers that freeze, come late or are cut off: named on every survivor, within the time-out; signals are heard.

Processes stop themselves (SIGSTOP) at a chosen moment. From outside that is what a frozen or black-holed peer looks
like: sockets open, and nobody there.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import worlds
from overtone import Replica
from overtone.errors import MethodError, PeerError, RelayedError, ReplicaError
from overtone.ledger import Count
from overtone.runs import log
from overtone.runs.launch import supervisor
from overtone.transport import run_exchange
from overtone.world import watchdog
from overtone.world.board import Board
from overtone.world.process_group import Torch
from overtone.world.watchdog import LEAST, ROUNDS, SLOWEST, Watchdog
from running import SUPPORT, Cold, Moment, Trial, before, running, surroundings, wait_until, warm_starter
from scenario import METHODS, backward, batches, build

FROZEN = 1
PATIENT = 12.0  # seconds, where all have been together a moment ago
PATIENT_AT_START = 20.0  # seconds, where processes have yet to import everything
TINY = ("--width", "32", "--layers", "1", "--heads", "2", "--context", "16", "--valid-samples", "8", "--batch", "2")
PACE = ("--steps", "24", "--every", "4", "--checkpoint-every", "3", "--eval-every", "5", "--log-every", "1")


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


class Freezing(Torch):
    """Stops before the verdict of a round."""

    def gather(self, message: bytes, *, most: int | None, count: Count) -> list[bytes]:
        if most is None:
            freeze()
        return super().gather(message, most=most, count=count)


def train_a_round(replica: Replica) -> None:
    for batch, _ in zip(batches(dist.get_rank()), range(replica.method.every or 1), strict=False):
        backward(replica, batch)
        replica.local_step()
    run_exchange(replica.rounding(), replica.transport)


def freezing(moment: str) -> dict[str, object]:
    """Three replicas, of which rank 1 freezes at this moment of its life. Only then is time short: what a replica does
    for the first time may take long here."""
    rank, transport = dist.get_rank(), Torch()
    method = METHODS["diloco" if moment == "sum" else "decoupled"]
    steps: dict[str, Callable[[Replica], object]] = {
        "joining": lambda _: Replica(*build(rank), method, transport),
        "round": train_a_round,
        "sum": train_a_round,
        "verdict": train_a_round,
        "finish": lambda r: r.finish(),
    }
    replica = Replica(*build(rank), method, transport)
    train_a_round(replica)
    dist.barrier()
    transport.watchdog.timeout = PATIENT
    if rank == FROZEN and moment == "verdict":
        transport.__class__ = Freezing
    elif rank == FROZEN:
        freeze()
    anchor = replica.fingerprint
    try:
        steps[moment](replica)
    except PeerError as error:
        return {"told": str(error), "same": replica.fingerprint == anchor}
    return {"told": "nothing"}


@pytest.mark.slow
def test_a_frozen_peer_is_named_on_every_survivor(tmp_path: Path) -> None:
    """Five worlds at once: they do nothing but wait."""
    moments = ("joining", "round", "sum", "verdict", "finish")

    def world(moment: str) -> list[dict[str, Any]]:
        (tmp_path / moment).mkdir()
        return worlds.run(freezing, moment, size=3, folder=tmp_path / moment)

    with ThreadPoolExecutor(len(moments)) as pool:
        found = dict(zip(moments, pool.map(world, moments), strict=True))
    for moment, (first, frozen, last) in found.items():
        assert frozen == {"died": -signal.SIGKILL}, moment  # by this test, when the others had ended
        for survivor in (first, last):
            assert "value" in survivor, (moment, survivor)
            told = survivor["value"]["told"]
            assert "rank 1 did not answer for" in told, (moment, told)
            assert "rank 0 did not" not in told, moment
            assert "rank 2 did not" not in told, moment
            assert "no weight was touched" in told, moment
            assert survivor["value"]["same"], moment


def late(folder: str) -> dict[str, str]:
    """Rank 1 comes only when rank 0 has said that it waits for it."""
    rank, transport = dist.get_rank(), Torch()
    watchdog.NOTICE = 6.0
    said, heard = Path(folder, "said"), []

    class Note(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())
            said.touch()

    logging.getLogger("overtone").addHandler(Note())
    if rank == 1:
        while not said.exists():
            time.sleep(0.01)
    transport.gather(b"x", most=8, count=Count())
    return {"heard": "\n".join(heard)}


@pytest.mark.slow
def test_after_a_while_a_line_says_for_whom(tmp_path: Path) -> None:
    first, second, last = worlds.run(late, str(tmp_path), size=3, folder=tmp_path)
    waits, goes_on = first["value"]["heard"].splitlines()[:2]
    assert waits.startswith("overtone: rank 0: waiting for rank 1 since ")
    assert "gives up after 600 s" in waits
    assert goes_on.startswith("overtone: rank 0: goes on after ")
    assert second["value"]["heard"] == ""
    assert last["value"]["heard"] == ""  # one voice per host


def test_the_default_follows_from_how_long_rounds_take(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now)
    dog = Watchdog(Board(None, "x", 0, 2))
    assert dog.limit() == LEAST
    assert dog.limit(SLOWEST * 100) == LEAST + 100  # a large message on a thin wire
    now += 2000.0  # this replica has computed that long: its peers may need a few times as much
    assert dog.limit() == ROUNDS * 2000
    dog.wait(lambda _: True, dog.limit())
    assert dog.limit() == ROUNDS * 2000  # and in later rounds too
    assert Watchdog(Board(None, "x", 0, 2), timeout=5.0).limit(10**12) == 5.0


def test_a_replica_that_waits_one_exchange_behind_is_not_the_missing_one() -> None:
    """A cut can let one replica finish an exchange that another one cannot. Both then wait, in two exchanges."""
    store = dist.HashStore()
    first, missing, behind = (Board(store, "x", rank, 3) for rank in range(3))
    try:
        behind.open(4, period=0.05)
        first.open(5, period=0.05)
        wait_until(lambda: set(first.absent()) == {1}, "the missing one alone")
        missing.open(4, period=0.05)  # it was only slow: now both are behind, and nobody else can be meant
        wait_until(lambda: set(first.absent()) == {1, 2}, "both that are behind")
    finally:
        for board in (first, missing, behind):
            board.close()


def leaving() -> str:
    """Rank 2 gives up in the rounds. The others wait on a second channel, as stop votes do."""
    transport = Torch()
    channel = transport.branch()
    if transport.rank == 2:
        transport.leave("rank 1 did not answer")
        return ""
    with pytest.raises(RelayedError) as found:
        channel.gather(b"a vote", most=None, count=Count())
    return str(found.value)


@pytest.mark.slow
def test_last_words_are_heard_on_every_channel(tmp_path: Path) -> None:
    results = worlds.run(leaving, size=3, folder=tmp_path)
    for result in results[:2]:
        assert "rank 2 left: rank 1 did not answer" in result["value"], result


class Work:
    """A collective that ends between the end of a wait and the next look."""

    def __init__(self, error: str = "") -> None:
        self.error = error

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: object = None) -> None:
        if timeout is not None:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)


def test_what_ends_just_after_a_slice_has_not_failed() -> None:
    assert watchdog.is_done(Work(), 0.1)
    with pytest.raises(RuntimeError, match="closed by peer"):
        watchdog.is_done(Work("closed by peer"), 0.1)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "a", True, 1e9])
def test_a_time_out_beyond_reason_is_refused(timeout: object) -> None:
    with pytest.raises(MethodError, match="timeout="):
        Watchdog(Board(None, "x", 0, 2), timeout)  # type: ignore[arg-type]


# -- whole runs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {i}: the quick brown fox {i * 7919 % 1000} jumps over it\n" for i in range(200)))
    return Trial(Cold(), tmp_path / "run", ("--data", str(text), *TINY, *PACE), replicas=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment",
    [
        Moment("start", rank=1, does="freeze"),
        before("runs.checkpoint.format:write", rank=1, does="freeze"),
        before("runs.checkpoint.writer:CheckpointWriter.wait", rank=1, count=3, does="freeze"),
    ],
    ids=["joining", "writing a checkpoint", "a checkpoint's end"],
)
def test_a_frozen_replica_ends_the_run_with_the_true_cause(moment: Moment, trial: Trial) -> None:
    """The launcher kills it in the end, and does not call that the cause."""
    cold = moment.where == "start"
    starter, patience = (Cold(), PATIENT_AT_START) if cold else (warm_starter(), PATIENT)
    ended = trial.on(starter=starter).stopped_at(moment, "--timeout", str(patience))
    assert ended.status == 1, ended
    (line,) = [line for line in ended.said.splitlines() if line.startswith("overtone: ")]
    assert "rank 1 did not answer for" in line, line
    assert "SIGKILL" not in ended.said
    assert "Traceback" not in ended.said


@pytest.mark.slow
def test_a_second_signal_ends_everything_at_once(trial: Trial) -> None:
    """Also where the replicas wait for one that is frozen, and can neither save nor stop."""
    moment = before("exchange.round:Exchanger.start", rank=1, count=2, does="freeze")
    with running(trial.on(starter=warm_starter()).start(moment=moment)) as live:
        wait_until(trial.note.exists, "the replica to freeze")
        pids = [int(p) for p in Path(f"/proc/{live.pid}/task/{live.pid}/children").read_text().split()]
        assert len(pids) == 3
        os.kill(live.pid, signal.SIGTERM)
        wait_until(lambda: b"a second signal" in live.read(), "the launcher to pass the first on")
        os.kill(live.pid, signal.SIGTERM)
        ended = live.end()
    assert ended.status == 128 + signal.SIGTERM
    assert "ended at once by a second signal" in ended.said
    assert "Traceback" not in ended.said
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_importing(pid: int) -> bool:
    with suppress(OSError):
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text()
    return False


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_a_signal_while_replicas_start(number: signal.Signals, trial: Trial) -> None:
    with running(trial.start()) as live:
        wait_until(lambda: len(children(live.pid)) == 3 and all(map(is_importing, children(live.pid))), "the replicas")
        os.kill(live.pid, number)
        ended = live.end()
    assert ended.status == 128 + number, ended
    assert "Traceback" not in ended.said
    assert "killed by" not in ended.said


@pytest.mark.slow
def test_a_replica_that_is_ended_while_it_starts_ends_the_others(trial: Trial) -> None:
    with running(trial.start()) as live:
        wait_until(lambda: len(children(live.pid)) == 3 and all(map(is_importing, children(live.pid))), "the replicas")
        os.kill(children(live.pid)[1], signal.SIGTERM)
        ended = live.end()
    assert ended.status == 128 + signal.SIGTERM, ended
    assert "Traceback" not in ended.said


@pytest.mark.slow
def test_a_stop_sent_to_every_process_is_one_request(trial: Trial) -> None:
    """As a supervisor does that signals a whole group of processes: everything is saved, once."""
    long = trial.on(starter=warm_starter(), flags=(*trial.flags, "--schedule", "constant", "--warmup", "0"))
    with running(long.start("--steps", "1000000", "--checkpoint-every", "1000000")) as live:
        wait_until(lambda: (long.folder / log.NAME).exists() and len(long.raw("train")) > 20, "some steps")
        for pid in (live.pid, *children(live.pid)):
            os.kill(pid, signal.SIGTERM)
        ended = live.end()
    assert ended.status == 128 + signal.SIGTERM, ended
    assert f"SIGTERM: saved step {long.newest().step}" in ended.said


@pytest.mark.slow
def test_a_replica_that_freezes_after_its_last_word_is_named(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the launcher runs in this process, to be less patient."""
    monkeypatch.setattr(supervisor, "PATIENCE", 2.0)
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    moment = Moment("overtone.runs.launch.inside:_end", rank=1, does="freeze")
    for name, value in {**surroundings(), **moment.environment(trial.folder, trial.note)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ReplicaError, match="rank 1 did not end within 2 s of the others and was killed"):
        supervisor.spawn(["train", *trial.flags, "--out", str(trial.folder), "--steps", "4"], replicas=2, threads=1)


@pytest.mark.slow
def test_a_run_leaves_nothing_in_the_temporary_directory(trial: Trial, tmp_path: Path) -> None:
    place = tmp_path / "tmp"
    place.mkdir()
    fine = trial.on(env={"TMPDIR": str(place)})
    assert fine.go("--steps", "4").status == 0
    left = [path.name for path in place.iterdir() if not path.name.startswith("torchinductor_")]  # torch's own cache
    assert left == []
