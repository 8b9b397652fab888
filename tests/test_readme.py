"""What the README tells people to type, typed."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from overtone.cli import arguments
from overtone.runs import toml
from overtone.runs.config import Run

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands_of(program: str) -> list[str]:
    lines = [line.split("#")[0].strip() for block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if line.startswith(program + " ")]


def run(*args: str) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(args, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_loop_runs_as_printed() -> None:
    (loop,) = [block for block in blocks("python") if "overtone.Replica" in block]
    preamble = (
        "import torch, overtone\n"
        "class M(torch.nn.Linear):\n"
        "    def forward(self, x): return super().forward(x).square().mean()\n"
        "model, data = M(70, 70), [torch.ones(2, 70)] * 70\n"
    )
    space: dict[str, object] = {}
    exec(preamble + loop, space)
    replica = space["replica"]
    assert replica.steps == 70  # type: ignore[attr-defined]
    assert replica.rounds >= 2  # type: ignore[attr-defined]


def test_every_overtone_command_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)  # what --resume speaks of
    (tmp_path / "runs" / "mine" / "run.jsonl").write_text("")
    (tmp_path / "runs" / "mine" / "config.toml").write_text(toml.toml(Run()))
    found = commands_of("overtone")
    assert found
    for line in found:
        arguments.parse(shlex.split(line)[1:])


@pytest.mark.slow
def test_the_example_runs_alone() -> None:
    assert "rank 0 of 1: test loss" in run(sys.executable, "examples/wrap_a_loop.py")


def test_the_example_of_mixed_precision_runs() -> None:
    shown = re.search(
        r"rank 0 of 1: loss ([\d.]+), (\d+) steps skipped", run(sys.executable, "examples/mixed_precision.py")
    )
    assert shown
    assert float(shown[1]) < 0.4  # 0.5 before training
    assert 0 < int(shown[2]) < 20  # the scaler begins too high, and finds its scale


def test_the_example_of_resuming_ends_as_if_never_stopped(tmp_path: Path) -> None:
    def ended(folder: str, *flags: str) -> list[str]:
        return run(sys.executable, "examples/resume.py", str(tmp_path / folder), *flags).splitlines()

    (whole,) = ended("whole")
    assert whole.startswith("rank 0 of 1: finished, model ")
    assert ended("cut", "--stop-at", "130") == []
    assert ended("cut") == ["rank 0 of 1: continues from step 100", whole]


@pytest.mark.slow
def test_the_torchrun_line_runs() -> None:
    (line,) = [line for line in commands_of("torchrun") if "--nnodes" not in line]
    out = run(*shlex.split(line))
    models = re.findall(r"rank (\d) of 4: test loss ([\d.]+), (\d+) bytes sent, model (\w+)", out)
    assert sorted(rank for rank, *_ in models) == ["0", "1", "2", "3"]
    assert len({(loss, sent, model) for _, loss, sent, model in models}) == 1


def test_every_file_of_the_tree_exists() -> None:
    (tree,) = [block for block in blocks("text") if "replica.py" in block]
    for name in re.findall(r"^\s*(\S+\.(?:py|md|txt))\s", tree, re.MULTILINE):
        assert list(ROOT.glob(f"**/{name}")), name
    shown = set(re.findall(r"(\w+\.py)", tree))
    for path in (ROOT / "src" / "overtone").rglob("*.py"):
        if path.name != "__init__.py":
            assert path.name in shown, f"{path.name} is not in the README's tree"
