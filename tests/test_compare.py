"""`overtone compare`: real commands, kept, cut off, gone on with."""

import functools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import forked
from overtone.cli.arguments import parse
from overtone.errors import ConfigError, MethodError
from overtone.report import comparison, history
from overtone.report.comparison import Comparison
from overtone.runs import toml
from overtone.runs.config import Run, Simulation
from overtone.runs.simulate import simulate

TINY = ["--batch", "2", "--width", "32", "--layers", "1", "--heads", "2", "--valid-samples", "8", "--every", "4"]
KILL = Path(__file__).parent / "kill"
METHODS = ["alone", "ddp", "diloco", "published", "decoupled", "decoupled:keep=8,bits=2"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog; " * 1000)
    return path


# Runs that are asked to stop look more often than every five seconds.
ENV = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(KILL), "OVERTONE_PULSE": "0"}


def words(out: Path, text: Path, *flags: str, methods: list[str] = METHODS, steps: int = 12) -> list[str]:
    named = ["compare", "--methods", *methods, "--data", str(text), *TINY]
    return [*named, "--steps", str(steps), "--out", str(out), *flags]


def begin(*args: Any, **more: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "overtone", *words(*args, **more)]
    env = {**os.environ, **ENV}
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # which a shell's background job ignores
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, preexec_fn=heed
    )


def run(out: Path, text: Path, *flags: str, **more: Any) -> tuple[int, str, str]:
    done = forked.overtone(*words(out, text, *flags, **more), env=ENV)
    return done.returncode, done.stdout, done.stderr


def logs(out: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in (out / comparison.CELLS).glob("*/run.jsonl")}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, text: Path) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("comparison") / "out"
    code, stdout, stderr = run(out, text)
    assert code == 0, stderr
    return out, stdout


@pytest.mark.slow
def test_the_table_and_the_files(made: tuple[Path, str]) -> None:
    out, shown = made
    for word in ("loss vs DiLoCo", "published, mean", "decoupled, keep 56, bits 1", "decoupled, keep 8, bits 2", "1x"):
        assert word in shown
    for name in ("report.html", "report.md", "report.csv"):
        assert (out / name).stat().st_size > 500
    assert str(out / "report.html") in shown
    assert (out / "report.csv").read_text().count("\n") == len(METHODS) + 2  # a header, and published has two rows


@pytest.mark.slow
def test_a_cell_is_what_its_command_makes(made: tuple[Path, str]) -> None:
    """Same data order, same seed, same tokens as the simulation by itself, to the bit; and its log says which."""
    out, _ = made
    for cell in comparison.cells(Comparison(methods=("decoupled",)), out):
        found = history.load(cell.folder)
        given = {key: value for key, value in found.config.items() if value is not None and key != "out"}
        alone = simulate(toml.updated(Simulation(), given, "test"))
        assert found.finish is not None
        assert alone["anchor_fingerprint"] == found.finish["anchor_fingerprint"]
        assert alone["val_loss"] == found.finish["metrics"]["loss"]
        assert alone["bytes_sent"] == found.finish["bytes_sent"]
        again = parse(shlex.split(found.command())[1:]).flags
        assert isinstance(again, Simulation)
        assert {**toml.flat(again.resolved()), "out": found.config["out"]} == found.config


@pytest.mark.slow
def test_what_is_finished_is_kept_and_the_rest_is_made_again(
    made: tuple[Path, str], text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(made[0], out)
    cut = out / comparison.CELLS / "diloco-seed0" / "run.jsonl"
    lines = cut.read_text().splitlines(keepends=True)
    cut.write_text("".join(lines[:-3]) + lines[-3][:40])  # as a kill leaves it: no end, a torn line
    before = logs(out)
    code, stdout, stderr = run(out, text)
    assert code == 0, stderr
    after = logs(out)
    assert {name for name in before if before[name] != after[name]} == {"diloco-seed0"}
    assert stderr.count(": kept ") == len(METHODS) - 1
    assert _table(stdout) == _table(made[1])


def _table(shown: str) -> list[str]:
    return [line for line in shown.splitlines() if not line.startswith("page:")]


@pytest.mark.slow
def test_interrupted_it_goes_on(text: Path, tmp_path: Path) -> None:
    out, methods = tmp_path / "out", ["diloco", "decoupled", "alone"]
    process = begin(out, text, "--workers", "1", methods=methods, steps=150)
    deadline = time.monotonic() + 300
    while b'"finish"' not in logs(out).get("diloco-seed0", b"") or "decoupled-seed0" not in logs(out):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    finished = logs(out)["diloco-seed0"]
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 130
    assert f"--out {out}" in stderr
    assert "Traceback" not in stderr
    assert b'"finish"' not in logs(out)["decoupled-seed0"]
    code, stdout, stderr = run(out, text, "--workers", "1", methods=methods, steps=150)
    assert code == 0, stderr
    assert logs(out)["diloco-seed0"] == finished
    assert len(logs(out)) == 3
    assert "loss vs DiLoCo" in stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "steps", "told"),
    [
        ([], 24, "was run with steps=12, and 24 is asked for now"),
        (["--replicas", "3"], 12, "was run with replicas=4, and 3 is asked for now"),
        (["--bandwidth", "10"], 12, "was run with bandwidth=50.0, and 10.0 is asked for now"),
        (["--processes"], 12, "was run with simulated=True, and False is asked for now"),
    ],
)
def test_other_numbers_are_not_mixed_in(
    flags: list[str], steps: int, told: str, made: tuple[Path, str], text: Path
) -> None:
    before = logs(made[0])
    code, _, stderr = run(made[0], text, *flags, steps=steps)
    assert code == 2
    assert told in " ".join(stderr.split())
    assert "Traceback" not in stderr
    assert logs(made[0]) == before


@pytest.mark.slow
def test_real_replicas_save_before_they_stop_and_go_on(text: Path, tmp_path: Path) -> None:
    """Asked to end, the comparison asks its run to; the same command goes on from there, to the same end."""
    flags, more = ("--processes", "--replicas", "2", "--log-every", "1"), {"methods": ["decoupled"], "steps": 200}
    out = tmp_path / "out"
    process = begin(out, text, *flags, **more)
    deadline = time.monotonic() + 300
    while b'"round"' not in logs(out).get("decoupled-seed0", b""):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 130, stderr
    cell = out / comparison.CELLS / "decoupled-seed0"
    (stop,) = [event for event in history.load(cell).events if event["event"] == "stop"]
    assert 0 < stop["step"] < 200
    assert history.load(cell).status == "stopped"
    code, _, stderr = run(out, text, *flags, **more)
    assert code == 0, stderr
    resumed = history.load(cell)
    assert next(event["step"] for event in resumed.events if event["event"] == "resume") == stop["step"]
    known = toml.flat(Simulation())
    given = {key: value for key, value in resumed.config.items() if key in known and value is not None}
    virtual = simulate(replace(toml.updated(Simulation(), given, "test"), out=None))
    assert resumed.finish is not None
    assert resumed.finish["anchor_fingerprint"] == virtual["anchor_fingerprint"]


@pytest.mark.slow
def test_a_run_that_diverges_is_marked_and_the_others_go_on(text: Path, tmp_path: Path) -> None:
    out, methods = tmp_path / "out", ["alone", "diloco", "decoupled:inner=sgd,inner_lr=1e6,clip=inf"]
    code, stdout, stderr = run(out, text, methods=methods)
    assert code == 0, stderr
    assert "stopped at step" in stdout
    assert "not finite" in stdout
    code, again, stderr = run(out, text, methods=methods)
    assert code == 0, stderr
    assert _table(again) == _table(stdout)  # the same numbers would end there again: it is not tried a second time


@pytest.mark.slow
def test_a_run_that_cannot_start_is_named(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a few words")
    code, _, stderr = run(tmp_path / "out", tmp_path / "short.txt", methods=["alone", "decoupled"])
    assert code == 1
    told = " ".join(stderr.split())
    assert "2 of 2 runs failed, first alone-seed0: data short.txt: 9 training tokens" in told
    assert "9 training tokens" in (tmp_path / "out" / comparison.CELLS / "alone-seed0" / "stderr.txt").read_text()


def test_data_that_is_not_there_is_told_once_before_any_run(tmp_path: Path) -> None:
    code, _, stderr = run(tmp_path / "out", tmp_path / "missing.txt", methods=["alone", "decoupled"])
    assert code == 2
    assert "missing.txt: no such file" in stderr
    assert len(stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_real_processes_end_where_virtual_replicas_do(made: tuple[Path, str], text: Path, tmp_path: Path) -> None:
    out, methods = tmp_path / "out", ["published", "decoupled"]
    code, stdout, stderr = run(out, text, "--processes", methods=methods)
    assert code == 0, stderr
    assert "published, mean" in stdout
    for method in methods:
        real, virtual = (history.load(at / comparison.CELLS / f"{method}-seed0") for at in (out, made[0]))
        assert (real.simulated, virtual.simulated) == (False, True)
        assert real.finish is not None
        assert virtual.finish is not None
        for key in ("bytes_sent", "bytes_received", "hops", "rounds", "rounds_finish", "anchor_fingerprint"):
            assert real.finish[key] == virtual.finish[key], key
        assert real.loss() == pytest.approx(virtual.loss(), rel=1e-6)
        if real.has_average:
            assert real.loss("metrics_average") == pytest.approx(virtual.loss("metrics_average"), rel=1e-4)
            assert real.finish["drift"] == pytest.approx(virtual.finish["drift"], rel=1e-4)
    resumed = run(out, text, "--processes", methods=methods)
    assert resumed[0] == 0
    assert _table(resumed[1]) == _table(stdout)


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        (["dilocoo"], "method 'dilocoo': unknown; there are alone, ddp"),
        (["decoupled:kep=8"], "kep: unknown; did you mean keep"),
        (["diloco:keep=8"], "keep=8: diloco has no such option"),
        (["decoupled:keep"], "keep: a method's options are key=value"),
        (["decoupled:seed=3"], "seed=3: a method's options"),
        (["decoupled:keep=many"], 'keep = "many": must be a whole number'),
        (["decoupled:keep=8", "decoupled:keep= 8"], "the same run as decoupled:keep=8"),
        (["decoupled", "decoupled:preset=balanced"], "the same run as decoupled"),
        (["decoupled", "decoupled"], "one of them is given twice"),
        (["decoupled:keep=8,keep=16"], "keep is given twice"),
        ([], "methods: none given; give at least one"),
    ],
)
def test_mistakes_are_told_before_anything_runs(entries: list[str], told: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, MethodError)) as refused:
        comparison.cells(Comparison(methods=tuple(entries)), tmp_path / "out")
    assert told in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_an_entry_may_set_anything_that_a_flag_sets(tmp_path: Path) -> None:
    asked = Comparison(methods=("demo:inner=sgd,inner_lr=1e-3,clip=inf",), processes=True, seeds=(7,))
    (cell,) = comparison.cells(asked, tmp_path)
    assert isinstance(cell.config, Run)
    assert (cell.config.training.inner, cell.config.training.inner_lr) == ("sgd", 1e-3)
    assert cell.config.training.clip == float("inf")
    assert cell.seed == 7
    assert cell.arguments()[0] == "train"
    json.dumps(toml.flat(cell.config))
