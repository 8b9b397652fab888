"""A task of the user's own: the example trains, in real processes as in the simulator, and mistakes are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("rich")
pytest.importorskip("tyro")

from forked import overtone
from overtone import runlog
from overtone.tasks import TaskError, TaskOptions, load_task

EXAMPLE = Path(__file__).parent.parent / "examples" / "own_task.py"
RUN = ["--replicas", "2", "--steps", "60", "--every", "10"]


def test_a_run_directory_does_not_decide_what_code_runs(tmp_path: Path) -> None:
    """Somebody else's run names a Python file: it runs if that is asked for, or named by the user."""
    code = tmp_path / "theirs.py"
    code.write_text(f"{EXAMPLE.read_text()}\nfrom pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n")
    run, few = tmp_path / "run", ["--replicas", "1", "--every", "2", "--steps"]
    done = overtone("train", "--task", code, *few, "4", "--out", run)
    assert done.returncode == 0, done.stderr
    ran = tmp_path / "ran"
    for command in (
        ["train", "--resume", run],
        ["train", "--resume", run, "--dry-run"],
        ["export", run, tmp_path / "m"],
    ):
        ran.unlink(missing_ok=True)
        done = overtone(*command)
        assert done.returncode == 2
        assert str(code) in done.stderr
        assert "--trust-task" in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert not ran.exists()
    for command in (
        ["train", "--resume", run, "--steps", "6", "--trust-task"],
        ["train", "--resume", run, "--steps", "8", "--task", code],
        ["export", run, tmp_path / "trusted", "--trust-task"],
        ["export", run, tmp_path / "named", "--task", code],
    ):
        ran.unlink(missing_ok=True)
        done = overtone(*command)
        assert done.returncode == 0, done.stderr
        assert ran.exists()


def test_the_example_has_forty_lines_and_says_how_to_run_it() -> None:
    lines = EXAMPLE.read_text().splitlines()
    assert len(lines) <= 40
    assert " ".join(["overtone train --task examples/own_task.py", *RUN]) in lines


@pytest.mark.slow
def test_the_example_ends_alike_in_processes_and_in_the_simulator(tmp_path: Path) -> None:
    done = overtone("train", "--task", EXAMPLE, *RUN, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "on two moons:" in done.stderr
    real = [record for record in runlog.read(tmp_path / "run") if record["event"] == "finish"][-1]
    done = overtone("simulate", "--task", EXAMPLE, *RUN, "--json", tmp_path / "simulated.json")
    assert done.returncode == 0, done.stderr
    simulated = json.loads((tmp_path / "simulated.json").read_text())
    assert real["anchor_fingerprint"] == simulated["anchor_fingerprint"]
    assert real["metrics"]["accuracy"] == pytest.approx(simulated["metrics"]["accuracy"])
    assert real["metrics"]["accuracy"] > 0.8  # chance: 0.5


WRONG = {
    "x = 1": "has no function task(options); examples/own_task.py shows one",
    "task = 3": "has no function task(options); examples/own_task.py shows one",
    "def task(options): return 3": "task(options) gave int; give an overtone.tasks.Task",
    "def task(options): pass": "task(options) gave NoneType; give an overtone.tasks.Task",
}


@pytest.mark.parametrize("code", WRONG)
def test_a_file_that_makes_no_task_is_refused(tmp_path: Path, code: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(code)
    with pytest.raises(TaskError) as caught:
        load_task(TaskOptions(task=str(file)))
    assert str(caught.value) == f"task {file}: {WRONG[code]}"


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    for file, why in ((tmp_path / "own.py", "no such file; give a Python file"), (tmp_path, "unknown; there are")):
        done = overtone("simulate", "--task", file, *RUN)
        assert done.returncode == 2
        assert why in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_an_error_of_the_users_own_shows_where_it_is(tmp_path: Path) -> None:
    """It is no error of ours to put into words: the traceback ends in the user's own line, as in any program."""
    file = tmp_path / "own.py"
    file.write_text("def task(options):\n    return {}['colour']\n")
    done = overtone("train", "--task", file, *RUN, "--out", tmp_path / "run")
    assert done.returncode == 1
    assert f'File "{file}", line 2, in task' in done.stderr
    assert "return {}['colour']" in done.stderr
    assert "KeyError: 'colour'" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("overtone: rank ")
