"""The command line as a user meets it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import overtone
from forked import overtone as overtone_cli
from overtone.cli.simulate import run_simulate
from overtone.runs.config import MethodChoice, Simulation, Training
from overtone.runs.directory import write_whole
from overtone.tasks import Language, TaskOptions

TINY = ["--steps", "12", "--batch", "2", "--width", "32", "--layers", "1", "--heads", "2", "--valid-samples", "8"]
KEYS = {
    "method", "numbers", "replicas", "every", "steps", "parameters", "val_loss", "val_loss_anchor", "val_loss_average",
    "bytes_sent", "rounds", "max_drift", "anchor_fingerprint", "simulated_seconds", "wall_seconds",
}  # fmt: skip


def cold(*args: str) -> subprocess.CompletedProcess[str]:
    """As a user does; most tests here are content with a fork (tests/forked.py)."""
    return subprocess.run(
        [sys.executable, "-c", "from overtone.cli import main; main()", *args],
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog; " * 1000)
    return path


def simulate(text: Path, tmp_path: Path, choice: MethodChoice, **options: Any) -> dict[str, Any]:
    size = Language(width=32, layers=1, heads=2)
    task = TaskOptions(data=str(text), valid_samples=8, language=size)
    file = tmp_path / "result.json"
    training = Training(steps=12, batch=2)
    run_simulate(Simulation(choice=choice, task=task, training=training, json=file, **options))
    result: dict[str, Any] = json.loads(file.read_text())
    return result


@pytest.mark.slow
def test_same_seed_same_file(text: Path, tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        done = cold("simulate", "--data", str(text), "--every", "5", "--seed", "3", "--json", str(file), *TINY)
        assert done.returncode == 0, done.stderr
        assert "decoupled: loss" in done.stdout
    a, b = (file.read_text().splitlines() for file in files)
    different = [(x, y) for x, y in zip(a, b, strict=True) if x != y]
    assert all("wall_seconds" in x for x, _ in different)


@pytest.mark.parametrize("name", overtone.METHODS)
def test_every_method_writes_every_key(name: str, text: Path, tmp_path: Path) -> None:
    result = simulate(text, tmp_path, MethodChoice(name), replicas=3)
    assert result.keys() >= KEYS
    assert result["method"] == name
    assert result["replicas"] == 3
    assert (result["bytes_sent"] > 0) == (result["every"] is not None)
    assert 0 < result["val_loss"] < 6


def test_loss_before_and_after_finish(text: Path, tmp_path: Path) -> None:
    """Draining moves the anchor to the mean of the replicas: most of the way in twelve messages."""
    thin = simulate(text, tmp_path, MethodChoice("decoupled", every=4, keep=8, drain=12))
    gap = thin["val_loss_anchor"] - thin["val_loss_average"]
    assert gap > 0.2
    assert thin["val_loss_anchor"] - thin["val_loss"] > 0.9 * gap
    assert thin["max_drift"] > 0
    assert thin["rounds"] == 3
    assert thin["rounds_finish"] == 12


def test_another_seed_is_another_run(text: Path, tmp_path: Path) -> None:
    a, b = (simulate(text, tmp_path, MethodChoice("diloco", every=4), seed=seed) for seed in (0, 1))
    assert a["anchor_fingerprint"] != b["anchor_fingerprint"]


def test_time_follows_the_network(text: Path, tmp_path: Path) -> None:
    from overtone.runs.config import Network

    choice = MethodChoice("diloco", every=4)
    slow = simulate(text, tmp_path, choice, network=Network(bandwidth=1.0, latency=0.0, step_seconds=0.0))
    fast = simulate(text, tmp_path, choice, network=Network(bandwidth=10.0, latency=0.0, step_seconds=0.0))
    assert slow["simulated_seconds"] == pytest.approx(10 * fast["simulated_seconds"], rel=1e-6)
    (
        up,
        down,
    ) = (  # each collective is as slow as its slower direction; all but the first broadcast receive what they send
        simulate(text, tmp_path, choice, network=Network(bandwidth=10.0, latency=0.0, step_seconds=0.0, **apart))
        for apart in ({"up": 1.0}, {"down": 1.0})
    )
    assert up["simulated_seconds"] == pytest.approx(slow["simulated_seconds"], rel=1e-6)
    assert 5 * fast["simulated_seconds"] < down["simulated_seconds"] < up["simulated_seconds"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--method", "dilocoo"], "method 'dilocoo': unknown; there are alone, ddp"),
        (["--method", "diloco", "--keep", "8"], "keep=8: diloco has no such option"),
        (["--keep", "0"], "keep=0"),
        (["--every", "0"], "every=0"),
        (["--data", "no/such/file"], "data no/such/file: no such file or folder"),
        (["--task", "image", "--data", "no/such/folder"], "data no/such/folder: "),
        (["--task", "imag"], "task 'imag': unknown; there are language, image"),
        (["--task", "no/such.py"], "task no/such.py: no such file"),
        (["--model", "gpt2-1n"], "gpt2-1m"),
        (["--json", "no/such/folder/x.json"], "there is no directory no/such/folder"),
        (["--replicas", "0"], "replicas=0"),
        (["--replicas", "60000"], "fewer than one batch"),
        (["--steps", "0"], "steps=0"),
        (["--heads", "5"], "heads=5: must divide the width, 96"),
        (["--bandwidth", "0"], "bandwidth=0"),
        (["--up", "0"], "up=0"),
    ],
)
def test_mistakes_get_one_clear_line(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    from overtone import cli

    if "image" in flags:
        pytest.importorskip("transformers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["overtone", "simulate", *flags])
        with pytest.raises(SystemExit) as stop:
            cli.main()
    message = f"{stop.value.code}{capsys.readouterr().err}"
    assert told in message
    assert "Traceback" not in message
    assert stop.value.code not in (0, None)


def test_an_unknown_flag_is_refused_with_the_nearest() -> None:
    done = cold("simulate", "--stepz", "3")
    assert done.returncode == 2
    assert "--steps" in done.stderr + done.stdout


def test_a_text_too_short(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    done = overtone_cli("simulate", "--data", str(tmp_path / "empty"))
    assert done.returncode == 2
    assert "0 bytes; give a text" in done.stderr


@pytest.mark.slow
def test_demo_shows_its_table(tmp_path: Path) -> None:
    done = overtone_cli("demo", "--steps", "20", "--out", str(tmp_path / "demo"))
    assert done.returncode == 0, done.stderr
    for word in ("alone", "ddp", "diloco", "published", "published, mean", "decoupled", "bytes vs DiLoCo"):
        assert word in done.stdout
    assert (tmp_path / "demo" / "report.html").exists()


def test_plan_says_how_each_tensor_travels() -> None:
    done = overtone_cli("plan", "--keep", "32", "--width", "96", "--layers", "1", "--plain-keep", "4096")
    assert done.returncode == 0, done.stderr
    assert re.search(r"embed.weight +256x96 +32 of each 64x64 \(4\), 16 of each 64x32 \(4\)", done.stdout)
    assert re.search(r"blocks.0.mlp_norm.bias +96 +densely, bf16 +192 B", done.stdout)
    assert "tensors of one axis and those of fewer than 1024 values" in " ".join(done.stdout.split())
    told = " ".join(overtone_cli("plan", "--exchange", "gathered").stdout.split())
    assert re.search(r"gathered by all, as asked \(a round would be about [\d.]+ kB sharded, "
                     r"[\d.]+ kB up and [\d.]+ kB down in a store\)", told)  # fmt: skip
    told = " ".join(overtone_cli("plan", "--exchange", "store").stdout.split())
    assert re.search(r"in a store .*, as asked .* sends about [\d.]+ kB and receives [\d.]+ kB a round", told)
    for method, words in (("diloco", "summed on the way"), ("alone", "nothing is ever sent")):
        assert words in " ".join(overtone_cli("plan", "--method", method).stdout.split())


def test_what_is_not_a_file_is_not_replaced_by_one(text: Path, tmp_path: Path) -> None:
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "target"
    os.mkfifo(pipe)
    link.symlink_to(target)
    done = overtone_cli("simulate", "--data", str(text), "--json", str(pipe), *TINY)
    assert done.returncode == 2
    assert "a device or a pipe, which would be replaced; give the name of a file" in done.stderr
    assert pipe.is_fifo()
    write_whole(link, "words")
    assert link.is_symlink()
    assert target.read_text() == "words"
    with pytest.raises(OSError, match="not a regular file"):
        write_whole(pipe, "words")


@pytest.mark.slow
def test_bench_codec(tmp_path: Path) -> None:
    file = tmp_path / "codec.json"
    small = ["--width", "64", "--layers", "1", "--words", "300", "--times", "1", "--json", str(file)]
    done = overtone_cli("bench", "codec", *small)
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    rows = {
        "overtone",
        "overtone, hadamard",
        "overtone, turning",
        "reference, einsum",
        "reference, scipy.fft",
        "reference, torch.fft",
    }
    assert set(report["sets"]) == {"a GPT", "25 matrices"}
    for found in report["sets"].values():
        assert rows <= set(found["paths"])
        assert found["paths"]["overtone"]["message_bytes"] < found["paths"]["reference, einsum"]["message_bytes"]
    assert "| path | round, copies: best | median |" in done.stdout
    assert "Peak extra memory" in done.stdout


@pytest.mark.slow
def test_bench_train(tmp_path: Path) -> None:
    """Two real processes; the figures are for benchmarks/results/train.md, where nobody disturbs."""
    file = tmp_path / "train.json"
    small = [
        "--model",
        "byte",
        "--context",
        "16",
        "--batch",
        "2",
        "--steps",
        "2",
        "--segments",
        "1",
        "--json",
        str(file),
    ]
    done = overtone_cli("bench", "train", *small)
    assert done.returncode == 0, done.stderr
    races = json.loads(file.read_text())["races"]
    assert len(races) == 2
    assert all(race["ratio"] > 0.05 for race in races.values())
    assert "| ddp against torch's DistributedDataParallel |" in done.stdout


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--keep", "0"], "keep=0"),
        (["--bits", "3"], "bits=3"),
        (["--layers", "0"], "layers=0: the layers of the transformer, from 1 to 4096"),
        (["--json", "nowhere/x.json"], "json nowhere/x.json: there is no directory"),
    ],
)
def test_bench_refuses_bad_flags_at_once(flags: list[str], told: str) -> None:
    done = overtone_cli("bench", "codec", *flags)
    assert done.returncode != 0
    assert told in done.stderr
    assert "Traceback" not in done.stderr
