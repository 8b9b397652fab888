"""Which of several failures is told: the one that the others follow from."""

import json
import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from overtone.launch import _in_words, _was_stopped

BROKEN = "rank 0 of 2: the exchange broke off (Connection closed by peer)"


def failure(folder: Path, exitcode: int, message: str = "", at: int = 0) -> ProcessFailure:
    file = folder / f"{exitcode}-{len(message)}-{at}.json"
    if message:
        file.write_text(json.dumps({"message": {"message": message, "extraInfo": {"timestamp": str(at)}}}))
    return ProcessFailure(local_rank=0, pid=1, exitcode=exitcode, error_file=str(file))


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ((1, BROKEN, 1), (1, "no space left", 2), "rank 1: no space left"),
        ((128 + signal.SIGTERM, "", 0), (1, "damaged", 5), "rank 1: damaged"),
        ((-signal.SIGTERM, "", 0), (1, "damaged", 5), "rank 1: damaged"),
        ((1, "rank 1: data x: no such file", 1), (1, "data x: no such file", 1), "rank 1: data x: no such file"),
        ((1, BROKEN, 1), (-signal.SIGKILL, "", 0), "rank 1 was killed by SIGKILL"),
        ((1, "a", 1), (1, "b", 1), "rank 0: a"),
    ],
)
def test_the_cause_is_told_and_not_what_follows_from_it(
    first: tuple[int, str, int], second: tuple[int, str, int], told: str, tmp_path: Path
) -> None:
    failures = {rank: failure(tmp_path, *fields) for rank, fields in enumerate((first, second))}
    assert _in_words(failures).startswith(told)


def test_asked_to_stop_is_no_failure(tmp_path: Path) -> None:
    assert _was_stopped(failure(tmp_path, 128 + signal.SIGINT))
    assert _was_stopped(failure(tmp_path, -signal.SIGTERM))
    assert not _was_stopped(failure(tmp_path, 1))
    assert not _was_stopped(failure(tmp_path, -signal.SIGKILL))
