"""Which of several failures is told: the one that the others follow from."""

import json
import signal
from pathlib import Path
from subprocess import Popen
from typing import Any, cast

import pytest

from overtone.errors import ReplicaError
from overtone.runs.launch.supervisor import ReceivedSignals, ReplicaProcess, _conclude, cause

BROKEN = "rank 0 of 2: the exchange broke off: a replica died or the network was cut (Connection closed by peer)"
RELAYED = {"relayed": True}


class Ended:
    """A process that has ended."""

    def __init__(self, status: int) -> None:
        self.returncode = status

    def poll(self) -> int:
        return self.returncode


def replica(folder: Path, rank: int, code: int, words: str = "", at: float = 0, **said: Any) -> ReplicaProcess:
    killed = said.pop("killed", False)
    file = folder / f"note-{rank}"
    if words:
        file.write_text(json.dumps({"message": words, "relayed": False, **said}))
    return ReplicaProcess(rank, cast(Popen[bytes], Ended(code)), file, ended=at, killed=killed)


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ((1, BROKEN, 1, RELAYED), (1, "no space left", 2, {}), "rank 1: no space left"),
        ((128 + signal.SIGTERM, "", 0, {}), (1, "damaged", 5, {}), "rank 1: damaged"),
        ((-signal.SIGTERM, "", 0, {}), (1, "damaged", 5, {}), "rank 1: damaged"),
        ((1, "rank 1: no such file", 1, RELAYED), (1, "no such file", 1, {}), "rank 1: no such file"),
        ((1, BROKEN, 1, RELAYED), (-signal.SIGKILL, "", 2, {}), "rank 1 was killed by SIGKILL"),
        ((1, "a", 1, {}), (1, "b", 1, {}), "rank 0: a"),
        ((1, "a", 2, {}), (1, "b", 1, {}), "rank 1: b"),
        # The launcher ended it itself, after the other had waited in vain: that one knows what happened.
        ((1, "rank 1 did not answer", 1, {}), (-signal.SIGKILL, "", 9, {"killed": True}), "rank 0: rank 1 did not"),
        ((1, BROKEN, 1, RELAYED), (3, "", 2, {}), "rank 1: ended with status 3 and without a message"),
    ],
)
def test_the_cause_is_told_and_not_what_follows_from_it(
    first: tuple[int, str, float, dict[str, Any]],
    second: tuple[int, str, float, dict[str, Any]],
    told: str,
    tmp_path: Path,
) -> None:
    started = [replica(tmp_path, rank, *fields[:3], **fields[3]) for rank, fields in enumerate((first, second))]
    assert str(cause(started)).startswith(told)


def test_asked_to_stop_is_no_failure(tmp_path: Path) -> None:
    assert not replica(tmp_path, 0, 128 + signal.SIGINT).failed
    assert not replica(tmp_path, 0, -signal.SIGTERM).failed
    assert not replica(tmp_path, 0, 0).failed
    assert replica(tmp_path, 0, 1).failed
    assert replica(tmp_path, 0, -signal.SIGKILL).failed


def how(started: list[ReplicaProcess], *signals: signal.Signals) -> str:
    """How a launcher ends that was sent these."""
    received = ReceivedSignals()
    for number in signals:
        received.receive(number, None)
    try:
        _conclude(started, received)
    except SystemExit as stop:
        return f"status {stop.code}"
    except ReplicaError as error:
        return f"{error.status}: {error}"
    return "well"


def test_how_a_launcher_ends(tmp_path: Path) -> None:
    fine = replica(tmp_path, 0, 0)
    stopped = replica(tmp_path, 5, 128 + signal.SIGTERM, "-", saved=True)
    left = replica(tmp_path, 6, -signal.SIGINT)
    heard = replica(tmp_path, 1, 1, BROKEN, **RELAYED)
    full = replica(tmp_path, 2, 1, "no space left")
    typed = replica(tmp_path, 3, 2, "heads=5: must divide the width", status=2)
    stuck = replica(tmp_path, 4, -signal.SIGKILL, killed=True)
    assert how([fine, fine]) == "well"
    assert how([fine, fine], signal.SIGTERM) == "well"  # it came too late
    assert how([stopped, stopped]) == "status 143"
    assert how([stopped, stopped], signal.SIGINT) == "status 130"
    assert how([left, heard], signal.SIGTERM) == "status 143"  # before there was anything to save
    assert how([left, heard]) == how([left, stuck]) == "status 130"  # one alone, and the others could not go on
    assert how([stopped, full], signal.SIGTERM) == "1: rank 2: no space left"  # asked to stop, it could not save
    assert how([heard, full]) == "1: rank 2: no space left"
    assert how([heard, typed]) == "2: rank 3: heads=5: must divide the width"
    assert how([stopped, stuck], signal.SIGTERM).startswith("1: rank 4 did not end within")
    assert how([heard, stuck], signal.SIGTERM, signal.SIGTERM) == "status 143"
    assert how([fine, stuck]).startswith("1: rank 4 did not end within")  # frozen after its last word
