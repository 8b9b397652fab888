"""Which of several failures is told: the one that the others follow from."""

import json
import signal
from pathlib import Path
from subprocess import Popen
from typing import Any, cast

import pytest

from overtone.launch import Started, cause

BROKEN = "rank 0 of 2: the exchange broke off: a replica died or the network was cut (Connection closed by peer)"
HEARD = {"told": True}


class Ended:
    """A process that has ended."""

    def __init__(self, status: int) -> None:
        self.returncode = status

    def poll(self) -> int:
        return self.returncode


def replica(folder: Path, rank: int, status: int, words: str = "", at: float = 0, **said: Any) -> Started:
    killed = said.pop("killed", False)
    file = folder / f"words-{rank}"
    if words:
        file.write_text(json.dumps({"message": words, "told": False, **said}))
    return Started(rank, cast(Popen[bytes], Ended(status)), file, ended=at, killed=killed)


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ((1, BROKEN, 1, HEARD), (1, "no space left", 2, {}), "rank 1: no space left"),
        ((128 + signal.SIGTERM, "", 0, {}), (1, "damaged", 5, {}), "rank 1: damaged"),
        ((-signal.SIGTERM, "", 0, {}), (1, "damaged", 5, {}), "rank 1: damaged"),
        ((1, "rank 1: no such file", 1, HEARD), (1, "no such file", 1, {}), "rank 1: no such file"),
        ((1, BROKEN, 1, HEARD), (-signal.SIGKILL, "", 2, {}), "rank 1 was killed by SIGKILL"),
        ((1, "a", 1, {}), (1, "b", 1, {}), "rank 0: a"),
        ((1, "a", 2, {}), (1, "b", 1, {}), "rank 1: b"),
        # The launcher ended it itself, after the other had waited in vain: that one knows what happened.
        ((1, "rank 1 did not answer", 1, {}), (-signal.SIGKILL, "", 9, {"killed": True}), "rank 0: rank 1 did not"),
        ((1, BROKEN, 1, HEARD), (3, "", 2, {}), "rank 1: ended with status 3 and without a word"),
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
