"""A task of the user's own: the example trains, in real processes as in the simulator, and mistakes are told.

The command lines run in forks of one process that has imported everything (tests/kill/warm.py).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("tyro")

from overtone.cli import arguments
from overtone.errors import TaskError
from overtone.runs import log
from overtone.runs.evaluate import evaluate
from overtone.tasks import Task, TaskOptions, Tensors, load_task
from overtone.tasks.text.hf_models import PRESETS
from running import Ended, Warm

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "own_task.py"
DOCS = (ROOT / "docs" / "tasks.md").read_text()
RUN = ["--replicas", "2", "--steps", "60", "--every", "10"]


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    started = Warm("runs.export", "runs.simulate")
    yield started
    started.close()


def overtone(warm: Warm, *arguments: object, replicas: int = 1) -> Ended:
    """Run a command line to its end. More than one replica: it starts that many processes."""
    return warm.start([*map(str, arguments)], {}, cwd=ROOT, replicas=replicas).end()


def test_a_run_directory_does_not_decide_what_code_runs(warm: Warm, tmp_path: Path) -> None:
    """Somebody else's run names a Python file: it runs only if the user trusts it, or names a file."""
    code = tmp_path / "theirs.py"
    code.write_text(f"{EXAMPLE.read_text()}\nfrom pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n")
    run, few = tmp_path / "run", ["--replicas", "1", "--every", "2", "--steps"]
    done = overtone(warm, "train", "--task", code, *few, "4", "--out", run)
    assert done.status == 0, done.said
    ran = tmp_path / "ran"
    for command in (
        ["train", "--resume", run],
        ["train", "--resume", run, "--dry-run"],
        ["export", run, tmp_path / "m"],
    ):
        ran.unlink(missing_ok=True)
        done = overtone(warm, *command)
        assert done.status == 2
        assert str(code) in done.said
        assert "--trust-task" in done.said
        assert len(done.said.splitlines()) == 1
        assert not ran.exists()
    for command in (
        ["train", "--resume", run, "--steps", "6", "--trust-task"],
        ["train", "--resume", run, "--steps", "8", "--task", code],
        ["export", run, tmp_path / "trusted", "--trust-task"],
        ["export", run, tmp_path / "named", "--task", code],
    ):
        ran.unlink(missing_ok=True)
        done = overtone(warm, *command)
        assert done.status == 0, done.said
        assert ran.exists()


def test_the_documented_task_trains(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    (tmp_path / "documented.py").write_text(code)
    made = load_task(TaskOptions(task=str(tmp_path / "documented.py"), valid_samples=64))
    torch.manual_seed(0)
    model = made.model()
    before = evaluate(made, model)["loss"]
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    feed = made.feed(0, 1, batch=32, seed=0, skew=0.0)
    for _ in range(60):
        inner.zero_grad()
        made.loss(model, feed.next()).backward()
        inner.step()
    assert evaluate(made, model)["loss"] < before / 2
    rows, noise = torch.arange(8), torch.Generator()
    assert torch.equal(made.train.batch(rows, None)[0], made.train.batch(rows, None)[0])
    assert not torch.equal(made.train.batch(rows, noise)[0], made.train.batch(rows, None)[0])


def test_the_documented_commands_are_understood() -> None:
    lines = [line for block in re.findall(r"```sh\n(.*?)```", DOCS, re.DOTALL) for line in block.splitlines()]
    assert len(lines) == 3
    for line in lines:
        arguments.parse(shlex.split(line)[1:])


def test_every_preset_is_documented() -> None:
    pytest.importorskip("transformers")
    from overtone.tasks import image

    tables = [line for line in DOCS.splitlines() if line.startswith("|")]
    for name in ("byte", *PRESETS, *image.PRESETS):
        assert any(f"`{name}`" in line for line in tables), name


class FreelyNamed(Tensors):
    """Samples whose parameters have names of their own. A batch is true if it may be augmented."""

    def batch(self, numbers: torch.Tensor, dice: torch.Generator | None) -> bool:
        assert len(numbers) == 2
        return dice is not None


class FreelyNamedTask(Task):
    name = "freely named"
    train, valid = FreelyNamed(torch.zeros(8)), FreelyNamed(torch.zeros(4))

    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(1, 1)

    def loss(self, net: torch.nn.Module, augmented: bool) -> torch.Tensor:
        return net.weight.sum() * 0 + augmented


@pytest.mark.parametrize("slow", [False, True])
def test_samples_may_name_their_parameters_as_they_like(monkeypatch: pytest.MonkeyPatch, slow: bool) -> None:
    """`batch` is called by position: in training, also by a thread, and in validation."""
    monkeypatch.setattr(FreelyNamed, "slow", slow, raising=False)
    task = FreelyNamedTask()
    feed = task.feed(0, 1, batch=2, seed=0, skew=0.0)
    assert [feed.next() for _ in range(6)] == [True] * 6
    assert evaluate(task, task.model(), batch=2) == {"loss": 0.0}


def test_the_example_has_forty_lines_and_says_how_to_run_it() -> None:
    lines = EXAMPLE.read_text().splitlines()
    assert len(lines) <= 40
    assert " ".join(["overtone train --task examples/own_task.py", *RUN]) in lines


def test_the_example_ends_alike_in_processes_and_in_the_simulator(warm: Warm, tmp_path: Path) -> None:
    done = overtone(warm, "train", "--task", EXAMPLE, *RUN, "--out", tmp_path / "run", replicas=2)
    assert done.status == 0, done.said
    assert "on two moons:" in done.said
    real = [record for record in log.read(tmp_path / "run") if record["event"] == "finish"][-1]
    done = overtone(warm, "simulate", "--task", EXAMPLE, *RUN, "--json", tmp_path / "simulated.json")
    assert done.status == 0, done.said
    simulated = json.loads((tmp_path / "simulated.json").read_text())
    assert real["anchor_fingerprint"] == simulated["anchor_fingerprint"]
    assert real["metrics"]["accuracy"] == pytest.approx(simulated["metrics"]["accuracy"])
    assert real["metrics"]["accuracy"] > 0.8  # chance: 0.5


WRONG = {
    "x = 1": "has no function task(options); examples/own_task.py shows one",
    "task = 3": "has no function task(options); examples/own_task.py shows one",
    "def task(options): return 3": "task(options) returned int; return an overtone.tasks.Task",
    "def task(options): pass": "task(options) returned NoneType; return an overtone.tasks.Task",
}


@pytest.mark.parametrize("code", WRONG)
def test_a_file_that_makes_no_task_is_refused(tmp_path: Path, code: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(code)
    with pytest.raises(TaskError) as caught:
        load_task(TaskOptions(task=str(file)))
    assert str(caught.value) == f"task {file}: {WRONG[code]}"


def test_a_file_that_is_not_there_is_named(warm: Warm, tmp_path: Path) -> None:
    for file, why in ((tmp_path / "own.py", "no such file; give a Python file"), (tmp_path, "unknown; there are")):
        done = overtone(warm, "simulate", "--task", file, *RUN)
        assert done.status == 2
        assert why in done.said
        assert "Traceback" not in done.said


def test_an_error_of_the_users_own_shows_where_it_is(warm: Warm, tmp_path: Path) -> None:
    """It is no error of ours to put into words: the traceback ends in the user's own line, as in any program."""
    file = tmp_path / "own.py"
    file.write_text("def task(options):\n    return {}['colour']\n")
    done = overtone(warm, "train", "--task", file, *RUN, "--out", tmp_path / "run", replicas=2)
    assert done.status == 1
    assert f'File "{file}", line 2, in task' in done.said
    assert "return {}['colour']" in done.said
    assert "KeyError: 'colour'" in done.said
    assert done.said.splitlines()[-1].startswith("overtone: rank ")
