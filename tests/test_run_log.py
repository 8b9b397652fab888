"""The run log is a contract: its schema, who writes it, and what readers refuse."""

from __future__ import annotations

import json
import math
import runpy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints, is_typeddict

import pytest

pytest.importorskip("safetensors")

import overtone
from overtone.errors import NotALogError, RunLogError
from overtone.ledger import PHASES, Count
from overtone.report import history, page_data, standings, table
from overtone.runs import events, log
from overtone.runs.config import MethodChoice, Run, Saving, Simulation, Training
from overtone.runs.open_run import open_run
from overtone.runs.simulate import simulate
from overtone.runs.timing import KINDS
from overtone.tasks import Language, TaskOptions

ROOT = Path(__file__).parent.parent
STAMP = "event step time"
COST = "bytes_sent bytes_received hops units seconds simulated_seconds?"
EVALUATION = "metrics losses? drift? metrics_average?"
BEGINNING = (
    "format folder simulated method numbers consensus parameters steps unit units_per_step data config environment "
    "observed?"
)
# Every event of format 5 with all its fields; a question mark: optional. A change needs a new number in events.FORMAT,
# a way to read the old number in runs/log.py, and then a change here.
FROZEN_FORMAT = 5
FROZEN = {
    "start": f"{STAMP} {BEGINNING}",
    "resume": f"{STAMP} {BEGINNING} from_replicas folded",
    "train": f"{STAMP} {COST} rounds loss lr units_per_second seconds_left waiting_share",
    "round": f"{STAMP} index local_steps bytes_sent bytes_received seconds_encoding seconds_waiting seconds_hidden "
    "seconds_decoding drift_norm residual_norm anchor_fingerprint left_out keep control",
    "eval": f"{STAMP} {EVALUATION} {COST} rounds",
    "checkpoint": f"{STAMP} seconds",
    "saved": STAMP,
    "stop": f"{STAMP} why folder",
    "fail": f"{STAMP} why",
    "finish": f"{STAMP} {EVALUATION} {COST} rounds rounds_finish in_flight? metrics_anchor? waiting_share "
    "anchor_fingerprint bytes shares seconds_starting sample",
    "Environment": "overtone python versions commit platform? world hosts? command",
    "Host": "host device name threads cores",
    "Observed": "store run from_round costs_from host",
    "PhaseCount": "sent received waiting hops requests?",
    "InFlight": "steps sent received hops",
}


def keys(kind: Any) -> set[str]:
    return set(kind.__required_keys__) | {f"{key}?" for key in kind.__optional_keys__}


def test_the_format_is_frozen() -> None:
    assert events.FORMAT == FROZEN_FORMAT
    tables = (events.Environment, events.Host, events.Observed, events.PhaseCount, events.InFlight)
    schema = {**events.EVENTS, **{kind.__name__: kind for kind in tables}}
    assert {name: keys(kind) for name, kind in schema.items()} == {k: set(v.split()) for k, v in FROZEN.items()}


def test_the_schema_covers_what_is_measured() -> None:
    measured = {field.name for field in fields(overtone.Round)}
    assert events.RoundDone.__required_keys__ - {"event", "step", "time"} == measured
    kind = events.PhaseCount
    assert kind.__required_keys__ | kind.__optional_keys__ == {field.name for field in fields(Count)}


def test_the_document_lists_what_the_schema_does() -> None:
    made = runpy.run_path(str(ROOT / "tools" / "document_run_log.py"))["document"]()
    assert (ROOT / "docs" / "run-log.md").read_text() == made, "run python tools/document_run_log.py"
    for name, kind in events.EVENTS.items():
        section = made.split(f"\n## {name}\n")[1].split("\n## ")[0]
        assert {line.split("`")[1] for line in section.splitlines() if line.startswith("| `")} == set(
            get_type_hints(kind)
        ) - {"event"}
        assert "| |" not in section.replace("| field | type | |", "")  # every field has its text


# -- what is written -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog; " * 1000)
    return str(path)


def configs(text: str, folder: Path, method: str = "decoupled") -> tuple[Run, Simulation]:
    """The same training as a real run of one replica and as a simulation of two."""
    choice = MethodChoice(method, every=4)
    task = TaskOptions(data=text, valid_samples=8, language=Language(width=32, layers=1, heads=2))
    training = Training(steps=12, batch=2)
    saving = Saving(eval_every=4, log_every=2, checkpoint_every=5)
    real = Run(choice=choice, replicas=1, out=folder / "real", task=task, training=training, saving=saving)
    virtual = Simulation(
        choice=choice, replicas=2, out=folder / "virtual", task=task, training=training, eval_every=4, log_every=2
    )
    return real, virtual


def raw(folder: Path | None) -> list[dict[str, Any]]:
    assert folder is not None
    return [json.loads(line) for line in (folder / log.NAME).read_text().splitlines()]


def check(value: Any, hint: Any, where: str) -> None:
    """A value is what its field says; nothing else is in it."""
    origin, args = getattr(hint, "__origin__", hint), getattr(hint, "__args__", ())
    if is_typeddict(hint):
        assert hint.__required_keys__ <= value.keys() <= set(get_type_hints(hint)), where
        for key, inner in value.items():
            check(inner, get_type_hints(hint)[key], f"{where}.{key}")
    elif origin is dict:
        assert all(isinstance(key, str) for key in value), where
        for key, inner in value.items():
            check(inner, args[1], f"{where}.{key}")
    elif origin is list:
        for inner in value:
            check(inner, args[0], where)
    elif hint is not Any:
        kinds = args or (hint,)  # a union, or a single type
        right = {int: (int,), float: (int, float), str: (str,), bool: (bool,), type(None): (type(None),)}
        assert any(value == kind or type(value) in right.get(kind, ()) for kind in kinds), (where, value, hint)


@pytest.mark.parametrize("method", ["decoupled", "published"])
def test_real_runs_and_simulations_write_what_the_schema_says_and_the_same(
    method: str, text: str, tmp_path: Path
) -> None:
    real, virtual = configs(text, tmp_path, method)
    open_run(real, overtone.Solo(), resume=False).run()
    open_run(replace(real, training=replace(real.training, steps=16)), overtone.Solo(), resume=True).run()
    simulate(virtual)
    written = {name: raw(config.out) for name, config in (("real", real), ("virtual", virtual))}
    for name, lines in written.items():
        for line in lines:
            check(line, events.EVENTS[line["event"]], f"{name}: {line['event']}")
    found = {name: {line["event"] for line in lines} for name, lines in written.items()}
    assert found["real"] == {"start", "resume", "train", "round", "eval", "checkpoint", "saved", "finish"}
    assert found["virtual"] == {"start", "train", "round", "eval", "finish"}
    for event in found["virtual"]:
        optional = events.EVENTS[event].__optional_keys__  # type: ignore[attr-defined]
        mine, theirs = (
            {key for line in lines if line["event"] == event for key in line} - optional for lines in written.values()
        )
        assert mine == theirs, event


def test_each_session_begins_with_the_format_and_the_version(text: str, tmp_path: Path) -> None:
    real, _ = configs(text, tmp_path)
    open_run(real, overtone.Solo(), resume=False).run()
    open_run(replace(real, training=replace(real.training, steps=14)), overtone.Solo(), resume=True).run()
    openings = [line for line in raw(real.out) if line["event"] in ("start", "resume")]
    assert [line["event"] for line in openings] == ["start", "resume"]
    assert {line["format"] for line in openings} == {events.FORMAT}
    assert {line["environment"]["overtone"] for line in openings} == {overtone.__version__}


def test_the_last_event_accounts_for_bytes_and_time(text: str, tmp_path: Path) -> None:
    real, virtual = configs(text, tmp_path)
    open_run(real, overtone.Solo(), resume=False).run()
    simulate(virtual)
    for config in (real, virtual):
        last = raw(config.out)[-1]
        assert last["event"] == "finish"
        assert set(last["bytes"]) == set(PHASES)
        assert last["bytes"]["rounds"]["sent"] + last["bytes"]["finish"]["sent"] == last["bytes_sent"]
        assert set(last["shares"]) == {*KINDS, "other"}
        assert sum(last["shares"].values()) == pytest.approx(1.0)
        assert all(share >= 0 for share in last["shares"].values())
        assert last["seconds_starting"] > 0


# -- what is read --------------------------------------------------------------------------------------------------


def opening(event: str = "start", step: int = 0, **more: Any) -> dict[str, Any]:
    environment = {"overtone": "9.9", "python": "3", "versions": {}, "commit": "", "world": 1, "command": []}
    return {
        "event": event, "step": step, "time": 0.0, "format": 2, "folder": "runs/x", "simulated": True, "method": "ddp",
        "numbers": {"every": 1}, "consensus": True, "parameters": 1, "steps": 9, "unit": "tokens", "units_per_step": 1,
        "data": {"name": "x"}, "config": {"seed": 0, "replicas": 2, "task": "language"}, "environment": environment,
        "from_replicas": 1, "folded": False, **more,
    }  # fmt: skip


def saved(step: int) -> dict[str, Any]:
    return {"event": "saved", "step": step, "time": 0.0}


def write(folder: Path, *lines: dict[str, Any], end: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / log.NAME).write_text("".join(json.dumps(line) + "\n" for line in lines) + end)
    return folder


def test_a_log_that_was_cut_reads_as_if_it_had_not_been(tmp_path: Path) -> None:
    run = write(tmp_path / "run", opening(), saved(1), saved(2), end='{"event": "tr')
    assert [event["step"] for event in log.read(run)] == [0, 1, 2]
    appended = log.RunLog(run)
    for event in (opening("resume", 1), saved(2)):
        appended.write(event)  # type: ignore[arg-type]
    appended.close()
    assert [(event["event"], event["step"]) for event in log.read(run / log.NAME)] == [
        ("start", 0), ("saved", 1), ("resume", 1), ("saved", 2),
    ]  # fmt: skip
    with pytest.raises(RunLogError, match="give the directory of a run"):
        log.read(tmp_path / "nowhere")


@pytest.mark.parametrize("number", [events.FORMAT + 1, -1, "1", True, None, 1.0, [1]])
def test_a_format_that_nobody_knows_is_refused_in_words(number: Any, tmp_path: Path) -> None:
    """In the middle of a log too: a later version may have gone on with it."""
    for lines in ([opening(format=number)], [opening(), saved(3), opening("resume", 3, format=number)]):
        run = write(tmp_path / "run", *lines)
        for read in (log.read, history.load, history.so_far, lambda folder: log.last(folder, "saved")):
            with pytest.raises(RunLogError) as refused:
                read(run)
            words = str(refused.value)
            assert f"run.jsonl: line {len(lines)}: run log of format {number!r}; overtone " in words
            assert (
                "reads formats 0, 1, 2, 3, 4 and 5. Use the version of overtone that wrote it, or make the run again"
                in words
            )


def test_a_run_whose_log_has_another_format_is_not_resumed(text: str, tmp_path: Path) -> None:
    real, _ = configs(text, tmp_path)
    open_run(real, overtone.Solo(), resume=False).run()
    assert real.out is not None
    file = real.out / log.NAME
    file.write_text(file.read_text().replace(f'"format": {events.FORMAT}', '"format": 7'))
    before = file.read_bytes()
    with pytest.raises(RunLogError, match="run log of format 7"):
        open_run(real, overtone.Solo(), resume=True)
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda line: line.pop("config"), "has no config,"),
        (lambda line: line["config"].pop("seed"), "has no config.seed,"),
        (lambda line: line["environment"].pop("world"), "has no environment.world,"),
        (lambda line: line.update(environment=3), "has no environment (a table),"),
        (lambda line: line.update(data=[]), "has no data (a table),"),
        (lambda line: line.pop("time"), "has no time,"),
    ],
)
def test_an_event_without_a_field_is_refused_in_words(change: Any, told: str, tmp_path: Path) -> None:
    line = opening()
    change(line)
    with pytest.raises(NotALogError) as refused:
        history.load(write(tmp_path / "run", line))
    assert f"run.jsonl: the event 'start' of step 0 {told}" in str(refused.value)
    assert "make the run again" in str(refused.value)


def test_an_incomplete_log_keeps_nobody_from_resuming(text: str, tmp_path: Path) -> None:
    """Checkpoints do not depend on it; and a last event that is not complete is written again."""
    real, _ = configs(text, tmp_path)
    whole = open_run(real, overtone.Solo(), resume=False).run()
    lines = raw(real.out)
    del lines[-1]["shares"]
    assert real.out is not None
    write(real.out, *lines)
    again = open_run(real, overtone.Solo(), resume=True).run()
    assert again["metrics"] == whole["metrics"]
    assert raw(real.out)[-1].keys() == whole.keys()


def test_logs_without_a_number_are_of_format_0(tmp_path: Path) -> None:
    """As overtone 0.1.0 wrote them; a run that this version goes on with has both."""
    paper = ROOT / "benchmarks" / "results" / "paper" / "kjv" / "diloco-outer_lr-0.9-momentum-0.8-seed0"
    assert "format" not in raw(paper)[0]
    run = history.load(paper)
    assert run.start["format"] == events.FORMAT
    assert run.status == "finished"
    assert table.markdown(standings.groups([run]))
    mixed = write(tmp_path / "run", *raw(paper)[:-1], opening("resume", 40))
    assert [event["event"] for event in log.read(mixed)][-1] == "resume"
    assert max(event["step"] for event in log.read(mixed)) == 40


def test_logs_of_format_1_are_read(text: str, tmp_path: Path) -> None:
    """They are of runs without a delay: nothing was hidden, and the number of rounds so far was not written."""
    _, virtual = configs(text, tmp_path)
    simulate(virtual)
    now = history.load(tmp_path / "virtual")
    lines = raw(tmp_path / "virtual")
    for line in lines:
        line.pop("seconds_hidden", None)
        if line["event"] in ("train", "eval"):
            del line["rounds"]
        if line["event"] == "start":
            line["format"] = 1
    before = history.load(write(tmp_path / "before", *lines))
    assert before.start["format"] == events.FORMAT
    assert [event["seconds_hidden"] for event in before.exchanged] == [0.0, 0.0, 0.0]
    assert all(math.isnan(event["rounds"]) for event in before.evals[:-1])
    assert table.as_csv(standings.groups([before])) == table.as_csv(standings.groups([now]))
    assert page_data.data(standings.groups([before]), title="")["groups"][0]["rows"]


def test_logs_of_format_3_are_read(text: str, tmp_path: Path) -> None:
    """Nobody observed a run then; all else is as it is now."""
    _, virtual = configs(text, tmp_path)
    simulate(virtual)
    lines = raw(tmp_path / "virtual")
    lines[0]["format"] = 3
    assert log.read(write(tmp_path / "before", *lines)) == log.read(tmp_path / "virtual")


def test_the_round_in_flight_at_the_end_is_a_round(text: str, tmp_path: Path) -> None:
    """Not a last message; the log has its event, and tells how far it had come. Real runs say it as simulations do."""
    real, virtual = configs(text, tmp_path)
    delayed = replace(real.choice, delay=3, drain=1)
    open_run(replace(real, choice=delayed), overtone.Solo(), resume=False).run()
    simulate(replace(virtual, choice=delayed))
    for config in (real, virtual):
        lines = raw(config.out)
        last, rounds = lines[-1], [line for line in lines if line["event"] == "round"]
        check(last, events.Finish, "finish")
        assert [line["index"] for line in rounds] == [0, 1, 2]
        assert [line["step"] for line in rounds] == [7, 11, 12]
        assert (last["rounds"], last["rounds_finish"]) == (3, 1)
        assert last["in_flight"]["steps"] == 0
        assert last["in_flight"]["sent"] == rounds[-1]["bytes_sent"]
        assert last["bytes"]["rounds"]["sent"] == sum(line["bytes_sent"] for line in rounds)
        assert [line["rounds"] for line in lines if line["event"] == "eval"] == [0, 1]
        assert sum(last["shares"].values()) == pytest.approx(1.0)
        assert all(share >= 0 for share in last["shares"].values())


def test_an_event_that_the_format_does_not_have_is_ignored(tmp_path: Path) -> None:
    run = write(tmp_path / "run", opening(), {"event": "odd", "step": 1}, saved(1))
    assert [event["event"] for event in log.read(run)] == ["start", "saved"]
