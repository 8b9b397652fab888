"""Whole runs of `overtone train`: what they compute, write and show."""

from __future__ import annotations

import errno
import io
import math
import os
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from rich.console import Console
from torch import nn

import overtone
import worlds
from overtone.errors import DamagedLogWarning, OvertoneError, RunError
from overtone.report import history
from overtone.runs import log as runlog
from overtone.runs import optimizers, toml, trackers
from overtone.runs.checkpoint import format, index
from overtone.runs.config import MethodChoice, Run, Saving, Simulation, Training
from overtone.runs.evaluate import evaluate
from overtone.runs.export import export
from overtone.runs.live import View
from overtone.runs.open_run import open_run
from overtone.runs.session import Session
from overtone.runs.simulate import simulate
from overtone.tasks import Image, Language, TaskOptions, load_task

SMALL = Language(width=32, layers=1, heads=2)
TASKS = {
    "language": TaskOptions(valid_samples=16, language=SMALL),
    "image": TaskOptions(task="image", valid_samples=40, image=Image(crop=1, flip=True)),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"{i} times {i} makes {i * i}; " for i in range(3000)))
    return str(path)


@pytest.fixture
def small(text: str, tmp_path: Path) -> Run:
    """A run of one replica in this process, over in a second."""
    return Run(
        choice=MethodChoice(every=4),
        replicas=1,
        out=tmp_path / "run",
        task=replace(TASKS["language"], data=text),
        training=Training(steps=12, batch=4),
        saving=Saving(eval_every=4, log_every=2, checkpoint_every=5),
    )


def run(config: Run, *, resume: bool = False) -> dict[str, Any]:
    return open_run(config, overtone.Solo(), resume=resume).run()


def events(config: Run, event: str) -> list[dict[str, Any]]:
    assert config.out is not None
    return [record for record in runlog.read(config.out) if record["event"] == event]


def overtone_train(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "overtone", "train", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )


# -- what is computed ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_real_processes_compute_what_the_simulator_does(task: str, tmp_path: Path) -> None:
    """Three replicas in processes of their own, and three virtual ones: the same model to the bit, the same bytes."""
    training, choice = Training(steps=10, batch=8), MethodChoice(every=4)
    config = Run(choice=choice, replicas=3, out=tmp_path / "run", task=TASKS[task], training=training, seed=5)
    file = tmp_path / "config.toml"
    file.write_text(toml.toml(config))
    done = overtone_train("--config", str(file))
    assert done.returncode == 0, done.stderr
    (real,) = events(config, "finish")
    virtual = simulate(Simulation(choice=choice, replicas=3, task=TASKS[task], training=training, seed=5))
    assert real["anchor_fingerprint"] == virtual["anchor_fingerprint"]
    assert real["bytes_sent"] == virtual["bytes_sent"]
    assert real["metrics"]["loss"] == pytest.approx(virtual["val_loss"], rel=1e-6)  # summed in another order


@pytest.mark.parametrize("name", overtone.METHODS)
def test_every_method_trains(name: str, small: Run) -> None:
    every = {"every": 4} if name not in ("alone", "ddp", "demo") else {}
    config = replace(small, choice=MethodChoice(name, **every))  # type: ignore[arg-type]
    closing = run(config)
    first, *_ = events(config, "eval")
    assert closing["metrics"]["loss"] < first["metrics"]["loss"]
    assert closing["metrics"]["perplexity"] == pytest.approx(math.exp(closing["metrics"]["loss"]))
    assert closing["metrics"]["bits_per_byte"] == pytest.approx(closing["metrics"]["loss"] / math.log(2))


@pytest.mark.parametrize("inner", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_every_optimizer_resumes_to_the_bit(inner: Any, schedule: Any, small: Run, tmp_path: Path) -> None:
    training = replace(small.training, inner=inner, schedule=schedule)
    whole = run(replace(small, training=training))
    cut = replace(small, out=tmp_path / "cut", training=training)
    session = open_run(cut, overtone.Solo(), resume=False)
    session._save = _dies_at(session, 10)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        session.run()
    assert run(cut, resume=True)["anchor_fingerprint"] == whole["anchor_fingerprint"]
    assert [r["lr"] for r in events(cut, "train")] == [r["lr"] for r in events(replace(small), "train")]


def _dies_at(session: Session, step: int) -> Any:
    """Its process ends at a checkpoint that it cannot begin any more; tests/test_resume.py does it for real."""
    save = session._save

    def dying(**options: bool) -> None:
        if session.replica.steps == step:
            session.writer.wait()
            session.lock.close()
            raise KeyboardInterrupt
        save(**options)

    return dying


def test_accumulation_is_a_larger_batch(small: Run, tmp_path: Path) -> None:
    whole = run(replace(small, training=replace(small.training, batch=8)))
    parts = replace(small, out=tmp_path / "parts", training=replace(small.training, batch=4, accumulate=2))
    assert run(parts)["metrics"]["loss"] == pytest.approx(whole["metrics"]["loss"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("option", "tolerance"), [("recompute", 1e-6), ("compile", 1e-4)])
def test_options_that_change_how_and_not_what(option: str, tolerance: float, small: Run, tmp_path: Path) -> None:
    task = replace(small.task, model="gpt-neox-1m", language=Language(context=16, layers=1, width=32, heads=2))
    plain = run(replace(small, task=task))
    other = replace(small, task=task, out=tmp_path / "other", training=replace(small.training, **{option: True}))
    assert run(other)["metrics"]["loss"] == pytest.approx(plain["metrics"]["loss"], rel=tolerance)


@pytest.mark.slow
def test_bf16_trains_nearly_as_well(small: Run) -> None:
    """In a process of its own: some virtual machines need oneDNN told not to use what they cannot."""
    assert small.out is not None
    arguments = ["--replicas", "1", "--steps", "12", "--every", "4", "--batch", "4", "--data", str(small.task.data)]
    arguments += ["--width", "32", "--layers", "1", "--heads", "2", "--precision", "bf16", "--out", str(small.out)]
    done = overtone_train(*arguments, ONEDNN_MAX_CPU_ISA="AVX512_CORE_BF16")
    assert done.returncode == 0, done.stderr
    (coarse,) = events(small, "finish")
    exact = run(replace(small, out=small.out.with_name("exact")))
    assert coarse["metrics"]["loss"] == pytest.approx(exact["metrics"]["loss"], rel=0.02)
    assert coarse["anchor_fingerprint"] != exact["anchor_fingerprint"]


def test_validation_is_of_what_all_share() -> None:
    """With BatchNorm: the anchor's weights and the averaged statistics, not those of the replica's own last batches."""
    task = load_task(TASKS["image"])
    training = Training(steps=3, batch=8)

    def build(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = task.model()
        return model, optimizers.build(model, training)

    from overtone.runs.loop import local_steps

    cluster = overtone.Cluster(build, overtone.decoupled(every=2), replicas=2)
    feeds = {rank: task.feed(rank, 2, batch=8, seed=0, skew=0.0) for rank in range(2)}
    list(local_steps(cluster, task, feeds, training))
    own = [evaluate(task, replica.model)["loss"] for replica in cluster.replicas]
    shared = []
    for replica in cluster.replicas:
        with replica.anchor() as model:
            shared.append(evaluate(task, model)["loss"])
    assert own[0] != own[1]
    assert shared[0] == shared[1]


def test_schedules() -> None:
    def rates(schedule: Any) -> list[float]:
        shape = optimizers.Schedule(Training(steps=100, warmup=10, inner_lr=1.0, schedule=schedule))
        return [shape.rate(step) for step in range(101)]

    for name in ("cosine", "wsd", "constant"):
        assert rates(name)[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
        assert rates(name)[10] == 1.0
    assert rates("cosine")[100] == pytest.approx(0.1)
    assert rates("wsd")[81] == pytest.approx(1.0)
    assert rates("wsd")[91] == pytest.approx(0.5)
    assert rates("wsd")[100] == 0.0
    assert rates("constant")[100] == 1.0


def test_together_is_each_by_itself() -> None:
    """Muon takes the matrices between embedding and output; a rate set on the pair reaches both parts."""
    model = load_task(replace(TASKS["language"], model="gpt-neox-1m", language=Language(layers=1, width=32, heads=2)))
    weights = model.model()
    inner = optimizers.build(weights, Training(inner="muon"))
    assert isinstance(inner, optimizers.CombinedOptimizer)
    muon, adamw = inner.parts
    in_muon = {id(p) for group in muon.param_groups for p in group["params"]}
    in_adamw = {id(p) for group in adamw.param_groups for p in group["params"]}
    ends = {id(weights.get_input_embeddings().weight), id(weights.get_output_embeddings().weight)}
    for name, p in weights.named_parameters():
        matrix = p.ndim == 2 and id(p) not in ends
        assert (id(p) in in_muon, id(p) in in_adamw) == (matrix, not matrix), name
    optimizers.Schedule(Training(warmup=0, inner_lr=0.25)).set(inner, 0)
    assert {group["lr"] for part in inner.parts for group in part.param_groups} == {0.25}
    inner.load_state_dict(inner.state_dict())
    assert inner.param_groups[0] is muon.param_groups[0]


# -- what is written -----------------------------------------------------------------------------------------------


def test_the_log_opens_with_configuration_and_environment(small: Run) -> None:
    run(small)
    start, *rest = runlog.read(small.out)  # type: ignore[arg-type]
    assert start["event"] == "start"
    assert start["config"]["steps"] == 12
    assert start["config"]["warmup"] == 2  # what was left to a default is said
    assert start["config"]["eval_every"] == 4
    environment = start["environment"]
    assert environment["versions"]["torch"] == torch.__version__.split("+")[0] or environment["versions"]["torch"]
    assert environment["world"] == len(environment["hosts"]) == 1
    assert {"host", "device", "cores"} <= environment["hosts"][0].keys()
    assert environment["overtone"] == overtone.__version__
    assert "commit" in environment
    assert start["numbers"]["every"] == 4
    assert start["data"]["fingerprint"]
    found = [(record["event"], record["step"]) for record in rest]
    assert [step for event, step in found if event == "train"] == [2, 4, 6, 8, 10, 12]
    assert [step for event, step in found if event == "round"] == [4, 8, 12]
    assert [step for event, step in found if event == "eval"] == [4, 8]
    assert [step for event, step in found if event == "checkpoint"] == [5, 10, 12]
    assert found[-1] == ("finish", 12)
    assert rest[-1]["sample"]
    assert sum(rest[-1]["shares"].values()) == pytest.approx(1.0)


DAMAGE = {
    "a cut line": (b'{"event": "tr', True),
    "another program's": (b'{"event": 3, "step": "x"}', True),
    "NULs": (b"\0" * 50, True),
    "not UTF-8": (b'{"event": "train", "step": 1, "x": "\xff\xfe"}', True),
    "a deep nest": (b"[" * 200_000, True),
    "a byte order mark": (b'\xef\xbb\xbf{"event": "odd", "step": 1}', False),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("where", [1, 3])
def test_a_damaged_log_locks_nobody_out(where: int, damage: str, small: Run) -> None:
    """The checkpoints are good: the run goes on to the very same end, with a warning that names file and line."""
    run(replace(small, training=replace(small.training, steps=10, warmup=2)))
    assert small.out is not None
    log = small.out / runlog.NAME
    lines = log.read_bytes().splitlines()
    text, is_told = DAMAGE[damage]
    log.write_bytes(b"\n".join([*lines[:where], text, *lines[where:]]) + b"\n")
    told = rf"run\.jsonl: line {where + 1} cannot"
    for work in (lambda: run(small, resume=True), lambda: history.load(small.out).finish["metrics"]):
        with pytest.warns(DamagedLogWarning, match=told) if is_told else nullcontext():
            assert work()


FORGED: dict[str, Any] = {
    "fixed": [3, "x", None, {"inner": "sgd"}, []],
    "feed": [3, "x", None, {}, [1], {"epoch": 0, "taken": 4, "cuts": 3, "replicas": 1}],
    "feed.replicas": [0, -1, 10**9, 10**30, "x", True, None],
    "feed.taken": [-3, 10**9, 10**30, 0.5, "x", None],
    "feed.epoch": [-1, 10**30, "x"],
    "feed.cuts": [10**9, [[10**9, 0]], [[0, 0]], [[1, -1]], [[1]], [["x", "y"]], [[1, 0]] * 100_000],
    "random": [3, None, {}, {"torch": 3}, "x"],
    "random.torch": [3, None, "x"],
    "random.python": [3, [1, 2], "x"],
    "random.numpy": [3, ["x", 3, 4], "x"],
    "accounts": [3, None, {}, {"units": "x", "seconds": 0.0}, {"units": -1, "seconds": 0.0}],
    "finished": [3, "x", {"rounds": "x"}, [1]],
    "model": [3, None, {}, "x"],
    "model.embed.weight": [3, None, "x"],
    "inner": [3, None, {}, "x", {"state": 3, "param_groups": 4}],
    "replica": [3, None, {}, "x"],
    "replica.ledger": [3, None, "x", {"rounds": 3}, {"rounds": ["x"] * 4}, {"other": [1, 2, 3, 4]}],
    "replica.counts": [3, None, {}, {"steps": -3, "rounds": 0, "steps_at_round": 0}],
    "replica.state": [3, None, {}],
    "replica.about": [3, None, "x"],
}


@pytest.fixture(scope="module")
def stopped(text: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with a checkpoint at its end, to be forged."""
    config = Run(
        choice=MethodChoice(every=4),
        replicas=1,
        out=tmp_path_factory.mktemp("forged") / "run",
        task=replace(TASKS["language"], data=text),
        training=Training(steps=5, batch=4),
        saving=Saving(keep_checkpoints=1),
    )
    run(config)
    return config


@pytest.mark.parametrize("part", FORGED)
def test_a_forged_checkpoint_is_refused_in_one_line(part: str, stopped: Run) -> None:
    """Its stamp is right, and what it says is of a wrong kind, or would take for ever."""
    assert stopped.out is not None
    (path,) = (stopped.out / "checkpoints").rglob("*.safetensors")
    genuine = path.read_bytes()
    for value in FORGED[part]:
        tree = format.read(path)
        here, name = tree, part
        while name not in here:
            first, _, name = name.partition(".")
            here = here[first]
        here[name] = value
        tensors: dict[str, torch.Tensor] = {}
        plain = format.flatten(tree, tensors)
        format.write(path, plain, tensors)
        begun = time.process_time()  # what it computes; waiting for a processor does not count
        try:
            with pytest.raises(OvertoneError) as caught:
                run(replace(stopped, training=replace(stopped.training, steps=6)), resume=True)
        finally:
            path.write_bytes(genuine)
        assert "\n" not in str(caught.value), (part, value)
        assert len(str(caught.value)) < 1000
        assert time.process_time() - begun < 20, (part, value)


def test_a_name_that_claims_a_billion_replicas_takes_no_time(tmp_path: Path) -> None:
    place = tmp_path / "step-00000003"
    place.mkdir()
    for name in ("replica-0-of-1000000000", "replica-0-of-0", "replica-7-of-1"):
        (place / f"{name}.safetensors").touch()
    assert index.complete(tmp_path) == []


def test_tensorboard_s_place_may_be_taken(small: Run) -> None:
    assert small.out is not None
    small.out.mkdir()
    (small.out / "tensorboard").touch()
    with pytest.raises(OvertoneError, match="tensorboard: File exists; move it away"):
        run(small)


def test_tensorboard_s_thread_says_nothing_besides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its thread could not write is told by the next call, once, and not in a traceback before it."""
    heard: list[object] = []
    monkeypatch.setattr(threading, "excepthook", heard.append)
    board = trackers.TensorBoard(tmp_path, 0)

    def full(data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = board.writer._get_file_writer().event_writer._async_writer  # type: ignore[no-untyped-call]
    monkeypatch.setattr(writer._writer, "write", full)
    board.write({"event": "train", "step": 1, "loss": 1.0})
    writer._worker.join(300)
    with pytest.raises(OSError, match="No space left"):
        board.write({"event": "train", "step": 2, "loss": 1.0})
    assert not heard


def test_tensorboard_has_what_the_log_has(small: Run) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(small)
    board = EventAccumulator(str(small.out / "tensorboard"))  # type: ignore[operator]
    board.Reload()
    logged, curve = events(small, "train"), board.Scalars("train/loss")
    assert [point.step for point in curve] == [record["step"] for record in logged]
    assert [point.value for point in curve] == pytest.approx([record["loss"] for record in logged])
    assert board.Scalars("round/bytes_sent")


@pytest.mark.slow
@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_trackers_hear_the_same(name: Any, small: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # it is read when the library is imported
    pytest.importorskip(name, reason=f"{name} is not installed; it comes with 'overtone[track]'")
    run(replace(small, saving=replace(small.saving, track=name)))
    wrote = [p for p in tmp_path.rglob("*") if p.suffix in (".wandb", ".db") and p.stat().st_size > 0]
    assert wrote


@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_what_a_tracker_is_told(name: Any, small: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the library, whose many packages the tests do without: the calls that we make to it."""
    library = MagicMock()
    monkeypatch.setitem(sys.modules, name, library)
    run(replace(small, saving=replace(small.saving, track=name)))
    started = library.init.call_args.kwargs
    assert (started["project"], started["name"], started["resume"]) == ("overtone", "run", "allow")
    told = [call.args[0] for call in library.init.return_value.log.call_args_list]
    logged = events(small, "train")
    assert [(line["local_step"], line["train/loss"]) for line in told if "train/loss" in line] == [
        (record["step"], record["loss"]) for record in logged
    ]
    library.init.return_value.finish.assert_called_once_with()


def test_a_tracker_that_is_missing_is_named(small: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(OvertoneError, match="track=wandb: not installed; pip install wandb"):
        run(replace(small, saving=replace(small.saving, track="wandb")))


def test_time_is_accounted_for(small: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that stands still while another process has the processor: shares do not depend on who else works."""
    monkeypatch.setattr(time, "perf_counter", time.thread_time)
    closing = run(replace(small, training=replace(small.training, steps=100, batch=16), saving=Saving()))
    shares = closing["shares"]
    assert sum(shares.values()) == pytest.approx(1.0)
    assert min(shares.values()) > -1e-6
    assert shares["inner steps"] > 0.3
    assert shares["other"] + shares["data"] < 0.2  # benchmarks/overhead.py measures it where nobody disturbs


# -- what is shown -------------------------------------------------------------------------------------------------


def shown(config: Run, **console: Any) -> str:
    where = io.StringIO()
    view = View(Console(file=where, **console))
    for record in runlog.read(config.out):  # type: ignore[arg-type]
        view.write(record)
    view.close()
    return where.getvalue()


def test_lines_for_a_file_and_a_bar_for_a_terminal(small: Run) -> None:
    run(small)
    lines = [line for line in shown(small, width=60).splitlines() if line]  # older versions of rich add empty ones
    assert lines[0].startswith("decoupled on text.txt: ")
    assert any(line.startswith("step 2/12  loss ") and line.endswith(" left") for line in lines)
    assert any(line.startswith("step 8: loss ") and "bits per byte" in line for line in lines)
    assert "finished after 12 steps" in lines[-1]
    assert not any("\x1b" in line for line in lines)
    bar = shown(small, force_terminal=True, width=100)
    for words in ("tokens/s", "round 3: 0 B", "waiting", "left", "12/12"):
        assert words in bar


# -- export --------------------------------------------------------------------------------------------------------


def test_an_exported_language_model_loads_elsewhere(small: Run, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tiny = Language(context=32, layers=1, width=32, heads=2)
    config = replace(small, task=replace(small.task, model="llama-1m", language=tiny))
    closing = run(config)
    folder = tmp_path / "exported"
    step, metrics = export(config.out, folder)  # type: ignore[arg-type]
    assert step == 12
    assert metrics["loss"] == pytest.approx(closing["metrics"]["loss"], rel=1e-6)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert evaluate(load_task(config.task), model)["loss"] == pytest.approx(closing["metrics"]["loss"], rel=1e-6)
    with pytest.raises(RunError, match="exists already"):
        export(config.out, folder)  # type: ignore[arg-type]


@pytest.mark.parametrize("stem", ["small", "full"])
def test_an_exported_classifier_loads_elsewhere(stem: Any, small: Run, tmp_path: Path) -> None:
    from transformers import AutoModelForImageClassification

    options = replace(TASKS["image"], image=Image(stem=stem, side=32 if stem == "full" else None))
    config = replace(small, task=options, training=replace(small.training, batch=16))
    closing = run(config)
    export(config.out, tmp_path / "exported")  # type: ignore[arg-type]
    model = AutoModelForImageClassification.from_pretrained(tmp_path / "exported")
    found = evaluate(load_task(options), model)
    assert found == pytest.approx(closing["metrics"], rel=1e-5)


def test_export_in_the_middle_of_a_run_is_of_the_anchor(small: Run, tmp_path: Path) -> None:
    """At step 10, in the middle of a round, the shared model is that of the round at step 8."""
    session = open_run(small, overtone.Solo(), resume=False)
    session._save = _dies_at(session, 12)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        session.run()
    step, metrics = export(small.out, tmp_path / "exported")  # type: ignore[arg-type]
    assert step == 10
    assert metrics["loss"] == pytest.approx(events(small, "eval")[-1]["metrics"]["loss"], rel=1e-6)


def test_there_is_nothing_to_resume(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from overtone import cli

    monkeypatch.setattr(sys, "argv", ["overtone", "train", "--resume", "nowhere"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert "resume nowhere: no run there" in capsys.readouterr().err


def test_flags_of_a_resumed_run_count(small: Run) -> None:
    run(small)
    decayed = replace(small, training=replace(small.training, weight_decay=0.7, steps=16))
    session = open_run(decayed, overtone.Solo(), resume=True)
    assert {group["weight_decay"] for group in session.replica.inner.param_groups} == {0.7}
    session.run()
    assert events(small, "resume")[0]["config"]["weight_decay"] == 0.7


def test_a_run_can_be_resumed_from_elsewhere(small: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Relative paths are written down as seen from anywhere."""
    monkeypatch.chdir(Path(str(small.task.data)).parent)
    assert small.out is not None
    run(replace(small, task=replace(small.task, data="text.txt")))
    monkeypatch.chdir(tmp_path)
    assert export(small.out, tmp_path / "exported")[0] == 12
    assert events(small, "start")[0]["config"]["data"] == "text.txt"


def test_export_where_the_other_replicas_files_are_elsewhere(small: Run, tmp_path: Path) -> None:
    run(small)
    assert small.out is not None
    (mine,) = (small.out / "checkpoints" / "step-00000012-final").iterdir()
    mine.rename(mine.with_name("replica-0-of-3.safetensors"))
    assert export(small.out, tmp_path / "exported")[0] == 12


# -- what goes wrong -----------------------------------------------------------------------------------------------


def _start(config: Run, differ: dict[str, Any]) -> None:
    from overtone.runs import launch
    from overtone.world.join import connect

    rank = connect().rank
    launch.one_replica(toml.updated(config, differ if rank else {}, "test"), resume=False)


def _named_on_rank_1(config: Run, folder: Path) -> str:
    from overtone.world.join import connect

    transport = connect()
    config = replace(config, out=folder if transport.rank else None)
    return open_run(config, transport, resume=False).run()["anchor_fingerprint"]


def test_a_directory_may_be_named_on_some_hosts_only(
    small: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts may have disks of their own. All ranks go through the same collectives all the same."""
    monkeypatch.chdir(tmp_path)
    found = worlds.run(_named_on_rank_1, small, tmp_path / "mine", size=2, folder=tmp_path)
    assert "value" in found[0], found
    assert found[0] == found[1]
    (elected,) = (tmp_path / "runs").iterdir()
    assert (elected / runlog.NAME).exists()
    assert not (tmp_path / "mine" / runlog.NAME).exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("differ", "told"),
    [
        ({"batch": 3}, "replicas do not match: batch is 4 on rank 0 and 3 on rank 1"),
        ({"data": "other"}, "replicas do not match: data is"),
        ({"data": "nowhere"}, "rank 1: data nowhere: no such file"),
    ],
)
def test_replicas_that_differ_are_refused_on_every_rank(
    differ: dict[str, Any], told: str, small: Run, tmp_path: Path
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("something else entirely; " * 2000)
    differ = {key: str(other) if value == "other" else value for key, value in differ.items()}
    found = worlds.run(_start, small, differ, size=2, folder=tmp_path)
    assert all("error" in result for result in found)
    assert any(told in result["error"] for result in found)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--data", "nowhere.txt"], "data nowhere.txt: no such file or folder"),
        (["--task", "image", "--data", "nowhere.npz"], "data nowhere.npz"),
        (["--model", "gpt9"], "model 'gpt9'"),
        (["--batch", "1000000"], "fewer than one batch of 1000000"),
        (["--data", "none"], "data none: no validation samples"),
        (["--method", "dilocoo"], "method 'dilocoo': unknown"),
        (["--keep", "7", "--method", "ddp"], "keep=7: ddp has no such option"),
        (["--device", "cuda"], "device=cuda: replica 0 of this host needs a GPU of its own, and there are 0"),
        (["--task", "image", "--recompute"], "recompute: SmallResNetForImageClassification does not support"),
    ],
)
def test_mistakes_get_one_line(
    arguments: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from overtone import cli

    monkeypatch.setattr(
        sys, "argv", ["overtone", "train", "--replicas", "1", "--out", str(tmp_path / "run"), *arguments]
    )
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert told in said
    assert said.count("\n") == 1
    assert not (tmp_path / "run" / runlog.NAME).exists()


@pytest.mark.slow
def test_a_replica_s_mistake_is_told_once_with_its_rank(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("word " * 60)
    done = overtone_train("--out", str(tmp_path / "run"), "--data", str(tmp_path / "short.txt"), "--batch", "2")
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.strip()]
    assert line.startswith("overtone: rank ")
    assert "4 training samples give each of 2 replicas 2" in line or "fewer than one batch" in line or "needs" in line
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_it_runs_unchanged_under_torchrun(small: Run) -> None:
    assert small.out is not None
    file = small.out.with_name("config.toml")
    file.write_text(toml.toml(replace(small, out=None)))
    torchrun = Path(sys.executable).with_name("torchrun")
    command = [str(torchrun), "--nproc-per-node", "2", "-m", "overtone", "train", "--config", str(file)]
    done = subprocess.run(
        [*command, "--out", str(small.out)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert events(small, "start")[0]["environment"]["world"] == 2
