"""What the README tells people to type, typed."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from overtone import arguments, settings
from overtone.config import Run

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
    (tmp_path / "runs" / "mine" / "config.toml").write_text(settings.toml(Run()))
    found = commands_of("overtone")
    assert found
    for line in found:
        arguments.parse(shlex.split(line)[1:])


@pytest.mark.slow
def test_the_example_runs_alone() -> None:
    assert "rank 0 of 1: test loss" in run(sys.executable, "examples/wrap_a_loop.py")


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
