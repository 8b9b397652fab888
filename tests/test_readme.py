"""README and docs: what they tell people to type is typed, what they name is there."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest

from overtone.cli import arguments
from overtone.runs import stored, toml
from overtone.runs.config import Run

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands_of(program: str, text: str = README) -> list[str]:
    lines = [line.split("#")[0].strip() for block in blocks("sh", text) for line in block.splitlines()]
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
    (tmp_path / "run.toml").write_text("replicas = 4")
    monkeypatch.setattr(stored, "inherited", lambda _, base: base)  # the pages name buckets that nobody has
    found = [line for page in PAGES for line in commands_of("overtone", page.read_text())]
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


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 170


def test_the_tree_names_every_flat_file_and_every_folder() -> None:
    """Of src/overtone, and nothing that is not there."""
    (tree,) = [block for block in blocks("text") if "replica.py" in block]
    inside = [line for line in tree.splitlines() if line.startswith("  ")]
    named = [name for line in inside for name in re.findall(r"\w+\.py|\w+/", line)]
    package = ROOT / "src" / "overtone"
    there = [path.name for path in package.glob("*.py")]
    there += [f"{path.parent.name}/" for path in package.glob("*/__init__.py")]
    assert sorted(named) == sorted(there)
    for name in re.findall(r"^(\S+/)|(?<=  )([a-z]+/)", tree.split(inside[-1])[1], re.MULTILINE):
        assert (ROOT / "".join(name)).is_dir(), name


def test_the_files_to_read_first_exist() -> None:
    (sentence,) = [text for text in README.split("\n\n") if text.startswith("Read these five")]
    found = re.findall(r"`([\w/]+\.py)`", sentence)
    assert len(found) == 7  # five, and two side trips
    for name in found:
        assert (ROOT / "src" / "overtone" / name.removeprefix("src/overtone/")).is_file(), name


# -- docs ----------------------------------------------------------------------------------------------------------


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), target
        assert path.is_relative_to(ROOT), target
        if anchor:
            assert anchor in anchors(path), target


def test_the_index_lists_every_page_once() -> None:
    lines = re.findall(r"^- \[\S+\]\((\S+\.md)\): ", (ROOT / "docs" / "index.md").read_text(), re.MULTILINE)
    assert sorted([*lines, "index.md"]) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "tasks.md"], ids=lambda page: page.name)
def test_lines_of_prose_are_short(page: Path) -> None:
    for line in prose(page).splitlines():
        assert len(line) <= 120 or line.startswith(("|", "![", "    ")), line


def test_the_cluster_runs_as_printed() -> None:
    import torch

    import overtone

    (block,) = blocks("python", (ROOT / "docs" / "library.md").read_text())

    def build(rank: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Linear(64, 64)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        mean: torch.Tensor = model(batch).square().mean()
        return mean

    space = {"overtone": overtone, "build": build, "loss": loss, "batch_of": torch.ones(8, 2, 64)}
    exec(block, space)
    assert [replica.steps for replica in space["cluster"].replicas] == [1] * 8  # type: ignore[attr-defined]


def test_every_function_of_the_formulas_exists() -> None:
    text = (ROOT / "docs" / "formulas.md").read_text()
    rows = [line for line in text.split("## ")[0].splitlines() if line.startswith("| ") and "`" in line]
    names = [name for row in rows for name in re.findall(r"`([\w.]+)`", row.rsplit("|", 2)[1])]
    assert len(names) > 20
    for name in names:
        resolve_name(f"overtone.{name}")  # raises if it is not there


def test_the_tests_that_the_docs_name_exist() -> None:
    for page in PAGES:
        for name in re.findall(r"`(?:tests/)?(test_\w+\.py)`", page.read_text()):
            assert (ROOT / "tests" / name).is_file(), f"{page.name}: {name}"


def test_the_glossary_is_short_and_its_words_are_used() -> None:
    glossary = ROOT / "docs" / "glossary.md"
    words = re.findall(r"^\| \*\*(.+?)\*\*", glossary.read_text(), re.MULTILINE)
    assert 20 <= len(words) <= 28
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").glob("*.md")]
    text = "\n".join(path.read_text() for path in sources if path != glossary).lower()
    for word in words:
        assert re.search(rf"\b{word}\b", text), word
