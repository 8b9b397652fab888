"""Looking at a run in a store: observers, replay, audit, pruning. The run is a real one, made once for all tests."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("obstore")
pytest.importorskip("safetensors")
pytest.importorskip("rich")
pytest.importorskip("tyro")

import overtone
from forked import overtone as overtone_cli
from overtone import MismatchError, Replica, StoreError, TaskError, WireError
from overtone.exchange.buffers import Buffers
from overtone.exchange.description import describe, schema_of
from overtone.exchange.message import Kind, Seal, open_message, seal_message
from overtone.exchange.parameters import Parameters
from overtone.report import history, page_data, standings
from overtone.runs import events as schema
from overtone.runs import log
from overtone.runs.config import MethodChoice, Run, Training
from overtone.runs.follow import Following, follow
from overtone.runs.observed import OnThisHost, auditor_of, config_in, observer_of, task_in
from overtone.runs.pause import LATEST, LONGEST_BACKOFF, SOONEST, Pause
from overtone.runs.replay import export_round, replay_to
from overtone.runs.session import Stopped
from overtone.runs.stop_signals import StopRequest
from overtone.runs.stored import settings_of
from overtone.swarm import members
from overtone.swarm.archive import Archive, DeletedError
from overtone.swarm.audit import Audit, audit
from overtone.swarm.follower import Follower
from overtone.swarm.observer import Observer
from overtone.swarm.outline import outline
from overtone.swarm.prune import carry_out, plan
from overtone.swarm.records import commit_path, folder_of, snapshot_path
from overtone.swarm.store import Store
from overtone.tasks import Language, TaskOptions, load_task
from running import Warm
from scenario import EVERY, backward, batches, build

KEY = "secret"
ROUNDS, SNAPSHOTS, STEPS_A_ROUND = 12, 4, 2
PATIENCE = 300.0  # seconds that no test comes near, unless something hangs
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def keyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERTONE_KEY", KEY)


# -- the run -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """A run that is over, and what one of its replicas saw."""

    url: str
    config: Run
    prints: dict[int, str]  # by round: the fingerprint of the anchor after it
    models: dict[int, dict[str, Tensor]]  # by round: the shared model

    @property
    def last(self) -> int:
        return max(self.prints)


def recorded(replica: Replica, steps: Callable[[], None], rounds: int, made: Made) -> None:
    """Train, and keep what the anchor was after each round."""

    def keep(records: list[overtone.Round]) -> None:
        for record in records:
            assert made.prints.setdefault(record.index, record.anchor_fingerprint) == record.anchor_fingerprint
            if record.index == replica.rounds - 1:
                with replica.anchor() as model:
                    made.models.setdefault(record.index, {k: v.clone() for k, v in model.state_dict().items()})

    while replica.rounds < rounds:
        steps()
        keep([record] if (record := replica.step()) is not None else [])
    keep(replica.finish())


def all_wait_for_all() -> Any:
    """So that a round is the same however busy the machine is: no member is slow, late or dropped."""
    return mock.patch.multiple(members, SLOW=1e9, SLACK=1e9, MOST_MISSED=10**6)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Three members and a language task. In round 5 the weights of one become noise."""
    root = tmp_path_factory.mktemp("run")
    (root / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 200)
    config = Run(
        choice=MethodChoice("decoupled", every=STEPS_A_ROUND, keep=64),
        task=TaskOptions(
            data=str(root / "text.txt"), valid_samples=4, language=Language(context=16, width=16, layers=1, heads=2)
        ),
        training=Training(steps=ROUNDS * STEPS_A_ROUND, batch=2),
    )
    task = load_task(config.task)
    made = Made(str(root / "store"), config, {}, {})
    settings = settings_of(config, {"data": task.about()["fingerprint"]})

    def go(rank: int) -> None:
        torch.set_num_threads(1)
        model = task.model()
        # All join in round 0, which is not committed before.
        store = Store(made.url, f"m{rank}", min_replicas=3, snapshot_every=SNAPSHOTS, units=400, settings=settings)
        inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
        replica = Replica(model, inner, config.choice.build(), store, key=KEY)
        feed, noise = task.feed(rank, 3, batch=2, seed=0, skew=0.0), [rank == 2]

        def step() -> None:
            if replica.rounds:
                store.min_replicas = None
            store.next_unit()
            replica.inner.zero_grad()
            task.loss(replica.model, feed.next()).backward()
            if replica.rounds >= 5 and noise.pop() if noise else False:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(torch.randn_like(parameter))  # some 80 times a drift

        recorded(replica, step, ROUNDS, made)

    with all_wait_for_all(), ThreadPoolExecutor(3) as pool:
        list(pool.map(go, range(3)))
    return made


@pytest.fixture
def store(made: Made, tmp_path: Path) -> Path:
    """A copy of it, to spoil."""
    return Path(shutil.copytree(made.url, tmp_path / "store"))


def contents(folder: Path | str) -> dict[str, bytes]:
    found = Path(folder)
    return {str(path.relative_to(found)): path.read_bytes() for path in found.rglob("*") if path.is_file()}


def observer(url: Path | str) -> Observer:
    archive = Archive.open(str(url))
    config = config_in(archive)
    return observer_of(archive, config, task_in(archive, config, OnThisHost(), "test"), CPU)


def message_of(store: Path, index: int, number: int) -> Path:
    (path,) = (store / folder_of(index)).glob(f"{number:04d}-*")
    return path


# -- observers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("from_start", [True, False])
def test_an_observer_finds_the_anchors_of_the_replicas_and_writes_nothing(made: Made, from_start: bool) -> None:
    before = contents(made.url)
    one = observer(made.url)
    one.begin(from_start=from_start)
    assert one.rounds == (0 if from_start else max(made.prints) // SNAPSHOTS * SNAPSHOTS)
    while (followed := one.advance()) is not None:
        assert one.fingerprint == made.prints[followed.commit.round]
    assert one.rounds == made.last + 1
    assert one.show() is one.model
    assert same(one.model.state_dict(), made.models[made.last])
    assert set(one.exchanger.state.tensors) == {"anchor"}  # no residual, and no momentum here
    assert contents(made.url) == before


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("index", [0, 2, SNAPSHOTS - 1, SNAPSHOTS, ROUNDS - 1])
def test_the_model_after_an_early_round_is_that_of_the_replicas(made: Made, index: int) -> None:
    one = observer(made.url)
    replay_to(one, index)
    assert one.fingerprint == made.prints[index]
    assert same(one.show().state_dict(), made.models[index])


def test_buffers_frozen_and_tied_parameters_are_replayed_too() -> None:
    """And a momentum. Counters are no part of the shared state."""
    place = f"memory://{time.monotonic_ns()}"
    method = overtone.decoupled(every=EVERY, keep=300, momentum=0.5)
    made = Made(place, Run(), {}, {})

    def go(rank: int) -> None:
        torch.set_num_threads(1)
        replica = Replica(*build(rank), method, Store(place, name=f"m{rank}", snapshot_every=3), key=KEY)
        stream = batches(rank)
        recorded(replica, lambda: backward(replica, next(stream)) and None, 6, made)

    with all_wait_for_all(), ThreadPoolExecutor(2) as pool:
        list(pool.map(go, range(2)))
    archive = Archive.open(place)
    for last in (1, 4, made.last):
        one = Observer(build(7)[0], method, archive)
        replay_to(one, last)
        shown, theirs = one.show().state_dict(), made.models[last]
        counters = {name for name, tensor in shown.items() if not tensor.is_floating_point()}
        assert same(*({k: v for k, v in state.items() if k not in counters} for state in (shown, theirs)))
    with pytest.raises(StoreError, match="has left no configuration there"):
        config_in(archive)
    with pytest.raises(MismatchError, match="keep: 300 there, 200 here"):
        Observer(build(7)[0], overtone.decoupled(every=EVERY, keep=200, momentum=0.5), archive)


def test_a_model_without_code_has_the_same_description() -> None:
    """The names, order and types of all parameters and buffers, so that it opens the same messages."""
    model, inner = build(0)
    method = overtone.decoupled()
    told = describe(method, Parameters(model, inner).all, Buffers(model, "shared"), "raise")
    told = json.loads(json.dumps(told))
    bare = outline(told)
    trainable = [p for p in bare.parameters() if p.requires_grad]
    again = describe(method, Parameters(bare, torch.optim.SGD(trainable)).all, Buffers(bare, "shared"), "raise")
    assert schema_of(again) == schema_of(told)
    for wrong in ("3x float32", "3x3 int99", "", "-1 float32", None, "3 int64"):
        with pytest.raises(WireError, match=r"parameter a.b is .*, which cannot be"):
            outline({"parameter a.b": wrong})


# -- follow --------------------------------------------------------------------------------------------------------


def cut(store: Path, rounds: int) -> None:
    """As the store was before this round was committed."""
    for folder in (store / "rounds").iterdir():
        if int(folder.name) >= rounds:
            shutil.rmtree(folder)
    for file in (store / "snapshots").iterdir():
        if "-" not in file.name and int(file.name) > rounds:
            file.unlink()


def grow(store: Path, made: Made, index: int, *, messages: bool = True) -> None:
    """Put a round into the store, as its members did: the commit last."""
    there = Path(made.url) / folder_of(index)
    (store / folder_of(index)).mkdir(exist_ok=True)
    for file in sorted(there.iterdir()) if messages else [there / "commit"]:
        beside = store / f"{file.name}.tmp"
        shutil.copyfile(file, beside)
        beside.rename(store / folder_of(index) / file.name)


def logged(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    if not (folder / log.NAME).exists():
        return []
    lines = [json.loads(line) for line in (folder / log.NAME).read_text().splitlines()]
    return [line for line in lines if not kinds or line["event"] in kinds]


def wait_for(what: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end, "it hangs"
        time.sleep(0.02)


def followed(url: Path | str, folder: Path, stop: StopRequest | None = None, **how: Any) -> None:
    follow(str(url), Following(out=folder, **how), stop or StopRequest())


def test_a_run_is_followed_to_its_end_while_it_goes_on(made: Made, store: Path, tmp_path: Path) -> None:
    cut(store, 6)
    folder = tmp_path / "seen"
    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(followed, store, folder, from_start=True, eval_every=3)
        wait_for(lambda: len(logged(folder, "round")) == 6)
        for index in range(6, made.last + 1):
            assert index >= ROUNDS or not going.done()
            grow(store, made, index)
            wait_for(lambda index=index: going.done() or len(logged(folder, "round")) == index + 1)  # type: ignore[misc]
            if going.done():
                break
        going.result(PATIENCE)
    rounds, (finish,) = logged(folder, "round"), logged(folder, "finish")
    assert {line["index"]: line["anchor_fingerprint"] for line in rounds} == {
        index: made.prints[index] for index in range(finish["rounds"])
    }
    assert finish["rounds"] >= ROUNDS
    assert finish["anchor_fingerprint"] == made.prints[finish["rounds"] - 1]
    assert [line["rounds"] for line in logged(folder, "eval")] == [3, 6, 9]
    (start,) = logged(folder, "start")
    assert start["observed"]["from_round"] == start["observed"]["costs_from"] == 0
    assert start["environment"]["world"] == 3


def test_what_the_log_of_an_observer_says(made: Made, tmp_path: Path) -> None:
    """It has the fields of the schema. Bytes of members are those of the objects, and its own are told apart."""
    folder = tmp_path / "seen"
    followed(made.url, folder, from_start=True)
    lines = logged(folder)
    for line in lines:
        kind = schema.EVENTS[line["event"]]
        assert kind.__required_keys__ <= line.keys() <= {*kind.__annotations__, *_inherited(kind)}  # type: ignore[attr-defined]
    assert {line["event"] for line in lines} == {"start", "round", "eval", "finish"}
    finish = lines[-1]
    told: dict[int, int] = {}
    for line in logged(folder, "round"):
        index = line["index"]
        named = [path for path in Path(made.url, folder_of(index)).iterdir() if path.name != "commit"]
        commit = Archive.open(made.url).commit(index)
        assert commit is not None
        spoke = {str(one.process) for one in commit.messages}
        size = sum(path.stat().st_size for path in named if path.name in spoke)
        size += Path(made.url, commit_path(index)).stat().st_size
        assert line["bytes_sent"] == size // len(spoke)
        assert line["bytes_sent"] + line["bytes_received"] == size
        assert line["drift_norm"] != line["drift_norm"]  # not known
        for path in named:
            header = open_message(path.read_bytes(), Seal(KEY.encode())).header
            if path.name in spoke and header.sender not in line["left_out"]:
                told[header.sender] = header.steps
    assert finish["bytes_sent"] == sum(line["bytes_sent"] for line in logged(folder, "round"))
    assert finish["bytes"]["rounds"]["sent"] == finish["bytes_sent"]
    assert finish["bytes"]["upkeep"]["sent"] == finish["bytes"]["setup"]["sent"] == 0
    assert finish["bytes"]["upkeep"]["received"] == finish["bytes_sent"] + finish["bytes_received"]
    assert finish["units"] == sum(told.values()) * made.config.training.batch * 16
    run = history.load(folder)
    assert run.status == "finished"
    assert run.caveats == ["seen by an observer from round 0 on"]
    assert run.command() == f"overtone follow {made.url}"
    assert page_data.data(standings.groups([run]), title="")["groups"][0]["rows"]


def _inherited(kind: type) -> set[str]:
    return set(kind.__required_keys__ | kind.__optional_keys__)  # type: ignore[attr-defined]


def test_tensorboard_shows_the_validation(made: Made, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "seen"
    followed(made.url, folder, from_start=True, eval_every=5)
    board = EventAccumulator(str(folder / "tensorboard"))  # type: ignore[operator]
    board.Reload()
    points = [line for line in logged(folder) if line["event"] == "eval"]
    assert [point.value for point in board.Scalars("eval/loss")] == pytest.approx(
        [p["metrics"]["loss"] for p in points]
    )
    assert len(board.Scalars("round/bytes_sent")) == made.last + 1
    assert "NaN" not in caplog.text


def test_a_follower_that_is_stopped_goes_on_in_its_directory(made: Made, store: Path, tmp_path: Path) -> None:
    cut(store, 7)
    folder, stop = tmp_path / "seen", StopRequest()
    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(followed, store, folder, stop)
        wait_for(lambda: len(logged(folder, "round")) == 3)
        stop.name = "SIGINT"
        with pytest.raises(Stopped):
            going.result(PATIENCE)
    assert [line["event"] for line in logged(folder, "eval", "stop")][-2:] == ["eval", "stop"]
    assert logged(folder, "eval")[-1]["rounds"] == 7
    for index in range(7, made.last + 1):
        grow(store, made, index)
    for file in Path(made.url, "snapshots").iterdir():
        shutil.copyfile(file, store / "snapshots" / file.name)
    followed(store, folder)
    run = history.load(folder)
    assert [event["index"] for event in run.exchanged] == list(range(SNAPSHOTS, made.last + 1))  # no hole
    assert run.status == "finished"
    assert run.finish is not None
    assert run.finish["anchor_fingerprint"] == made.prints[made.last]
    assert run.finish["seconds"] > logged(folder, "stop", "eval")[0]["seconds"]
    (store / "run").unlink()
    another = Replica(*build(0), overtone.decoupled(every=3), Store(str(tmp_path / "other"), name="a"))
    assert another._course is not None
    another._course.close()
    with pytest.raises(StoreError, match="no run lives there"):
        followed(store, folder)


def test_another_run_does_not_go_into_the_same_directory(made: Made, tmp_path: Path) -> None:
    folder = tmp_path / "seen"
    folder.mkdir()
    (folder / log.NAME).write_text('{"event": "start", "step": 0, "format": 4}\n')
    with pytest.raises(overtone.UnfitRunError, match="holds the log of another run; choose another --out"):
        followed(made.url, folder)


def test_it_ends_after_a_round_that_was_named(made: Made, tmp_path: Path) -> None:
    followed(made.url, tmp_path / "seen", until_round=6, from_start=True)
    (finish,) = logged(tmp_path / "seen", "finish")
    assert finish["rounds"] == 7
    assert finish["anchor_fingerprint"] == made.prints[6]


def test_a_store_that_fails_for_a_while_is_asked_again(made: Made, tmp_path: Path) -> None:
    from overtone.swarm.bucket import Bucket

    ask, asked = Bucket._ask, []

    def failing(bucket: Bucket, what: str, *rest: Any) -> Any:
        if "commit" in what:
            asked.append(what)
            if 5 <= len(asked) < 8:
                raise StoreError(f"store: cannot {what}: out of order")
        return ask(bucket, what, *rest)

    with mock.patch.object(Bucket, "_ask", failing):
        followed(made.url, tmp_path / "seen", from_start=True)
    (finish,) = logged(tmp_path / "seen", "finish")
    assert finish["rounds"] == made.last + 1


def test_a_commit_that_was_deleted_or_damaged_ends_it_with_its_path(made: Made, store: Path, tmp_path: Path) -> None:
    (store / commit_path(9)).write_bytes(b"nonsense")
    with pytest.raises(WireError, match=f"{commit_path(9)}: message: 8 bytes"):
        followed(store, tmp_path / "a", from_start=True)
    assert logged(tmp_path / "a")[-1]["event"] == "fail"
    path = message_of(store, 2, 0)
    path.unlink()
    for file in (store / "snapshots").glob("0000000[1-9]"):
        file.unlink()
    cut(store, 4)
    with pytest.raises(DeletedError, match=str(path.name)):
        followed(store, tmp_path / "b", from_start=True)


def test_a_commit_that_was_deleted_is_not_waited_for(store: Path, tmp_path: Path) -> None:
    (store / commit_path(6)).unlink()
    for file in (store / "snapshots").glob("0000000[8-9]"):
        file.unlink()
    (store / snapshot_path(12)).unlink()
    with (
        mock.patch("overtone.runs.follow.ASIDE", 0.0),
        pytest.raises(MismatchError, match="the commit of round 6 is missing, and round"),
    ):
        followed(store, tmp_path / "seen")


def test_the_store_is_asked_more_and_more_seldom_and_not_in_step() -> None:
    clock, slept = [0.0], []

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    with mock.patch.multiple("overtone.runs.pause.time", monotonic=lambda: clock[0], sleep=sleep):
        pause = Pause(lambda: False)
        for turn in (pause.wait, pause.fail):
            pause.reset()
            for _ in range(14):
                before = clock[0]
                turn()
                slept.append(clock[0] - before)
    expected = [min(most, SOONEST * 2**turn) for most in (LATEST, LONGEST_BACKOFF) for turn in range(14)]
    assert all(0.8 * pause <= took <= 1.2 * pause + 1e-9 for took, pause in zip(slept, expected, strict=True))
    assert len(set(slept)) == len(slept)
    pause = Pause(lambda: True)  # somebody asks to stop
    for _ in range(20):
        pause.wait()


@pytest.mark.slow
def test_a_signal_ends_it_with_a_whole_log(made: Made, store: Path, tmp_path: Path) -> None:
    cut(store, 7)
    warm = Warm("cli.follow")
    try:
        words = ["follow", str(store), "--out", str(tmp_path / "seen")]
        for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
            live = warm.start(words, {"OVERTONE_KEY": KEY}, cwd=tmp_path, replicas=1)
            before = len(logged(tmp_path / "seen", "round"))
            wait_for(lambda before=before: len(logged(tmp_path / "seen", "round")) >= before + 3)  # type: ignore[misc]
            os.kill(live.pid, number)
            ended = live.end()
            assert ended.status == status, ended.said
            assert f"overtone follow {store} --out {tmp_path / 'seen'} goes on" in ended.said
            assert logged(tmp_path / "seen")[-1]["why"] == number.name
    finally:
        warm.close()


def test_follow_as_a_user_types_it(made: Made, tmp_path: Path) -> None:
    before = contents(made.url)
    done = overtone_cli("follow", made.url, "--out", tmp_path / "seen", env={"OVERTONE_KEY": KEY})
    assert done.returncode == 0, done.stderr
    assert f"observing {made.url}: " in done.stderr
    assert logged(tmp_path / "seen", "finish")[0]["anchor_fingerprint"] == made.prints[made.last]
    assert contents(made.url) == before
    done = overtone_cli("report", tmp_path / "seen", "--out", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    assert "seen by an observer from round 12 on" in done.stdout
    for words, told in (
        (["follow", tmp_path / "nothing"], "no such folder"),
        (["follow", tmp_path], "no run lives there"),
        (["follow", made.url, "--data", "nofile"], "data nofile: no such file or folder"),
    ):
        done = overtone_cli(*words, env={"OVERTONE_KEY": KEY})
        assert done.returncode in (1, 2)
        assert told in done.stderr
    assert not (tmp_path / "nothing").exists()
    done = overtone_cli("follow", made.url, env={"OVERTONE_KEY": "other"})
    assert done.returncode == 1
    assert "`run` says cannot be believed: HMAC" in done.stderr


# -- what the settings name ----------------------------------------------------------------------------------------

OWN = """
from pathlib import Path
Path({mark!r}).touch()
import torch
from overtone.tasks import Task, Tensors

class Own(Task):
    name = "own"
    def __init__(self):
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
        self.train = self.valid = Tensors(x, x.sum(1, keepdim=True))
    def model(self):
        return torch.nn.Linear(8, 1)
    def loss(self, model, batch):
        return (model(batch[0]) - batch[1]).square().mean()

def task(options):
    return Own()
"""


def test_a_task_of_a_file_runs_only_if_the_user_says_so(tmp_path: Path) -> None:
    code, mark = tmp_path / "own.py", tmp_path / "ran"
    code.write_text(OWN.format(mark=str(mark)))
    config = Run(
        choice=MethodChoice("decoupled", every=2), task=TaskOptions(task=str(code)), training=Training(steps=2, batch=4)
    )
    place = str(tmp_path / "store")
    model = nn.Linear(8, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    replica = Replica(model, inner, config.choice.build(), Store(place, name="a", settings=settings_of(config, {})))
    while replica.rounds < 1:
        model(torch.ones(2, 8)).square().mean().backward()
        replica.step()
    replica.finish()
    for words in (["follow", place], ["replay", place, "--export", tmp_path / "m"]):
        done = overtone_cli(*words, env={"OVERTONE_KEY": KEY})
        assert done.returncode == 2
        assert f"its task is the Python file {code}, which would run here; allow that with --trust-task" in done.stderr
    done = overtone_cli("replay", place, "--verify", env={"OVERTONE_KEY": KEY})
    assert done.returncode == 0, done.stderr
    assert not mark.exists()
    words = ["replay", place, "--trust-task", "--round", "0", "--export", tmp_path / "m"]
    done = overtone_cli(*words, env={"OVERTONE_KEY": KEY})
    assert done.returncode == 0, done.stderr
    assert mark.exists()
    assert (tmp_path / "m" / "model.safetensors").is_file()


def test_data_elsewhere_need_a_flag_and_other_data_are_told(made: Made, tmp_path: Path) -> None:
    archive = Archive.open(made.url)
    config = config_in(archive)
    elsewhere = replace(config, task=replace(config.task, data=str(tmp_path / "gone.txt")))
    with pytest.raises(
        TaskError, match=r"gone.txt: the run in .* has it there, and this host has not; give --data PATH"
    ):
        task_in(archive, elsewhere, OnThisHost(), "follow")
    assert config.task.data is not None
    copy = tmp_path / "copy.txt"
    shutil.copyfile(config.task.data, copy)
    task_in(archive, elsewhere, OnThisHost(data=str(copy)), "follow")
    copy.write_text("another text, which nobody has trained on. " * 200)
    with pytest.warns(overtone.OvertoneWarning, match="not what the members of .* train on"):
        task_in(archive, elsewhere, OnThisHost(data=str(copy)), "follow")


# -- replay --------------------------------------------------------------------------------------------------------


def test_the_model_of_a_round_is_exported(made: Made, tmp_path: Path) -> None:
    done = overtone_cli("replay", made.url, "--round", 3, "--export", tmp_path / "model", env={"OVERTONE_KEY": KEY})
    assert done.returncode == 0, done.stderr
    assert f"the model of {made.url} after round 3; loss" in done.stdout
    from safetensors.torch import load_file

    assert same(load_file(tmp_path / "model" / "model.safetensors"), made.models[3])
    index, _ = export_round(made.url, None, tmp_path / "newest", OnThisHost())
    assert index == made.last
    for words, told in (
        (["--export", tmp_path / "model"], "exists already"),
        (["--export", tmp_path / "x", "--round", 99], "round 99 is not committed; the newest is round"),
        ([], "give either --export FOLDER or --verify"),
        (["--export", tmp_path / "x", "--verify"], "give either --export FOLDER or --verify"),
        (["--verify", "--round", 3], "--verify checks all rounds"),
        (["--export", tmp_path / "x", "--json", "y"], "for what --verify finds"),
    ):
        done = overtone_cli("replay", made.url, *words, env={"OVERTONE_KEY": KEY})
        assert done.returncode in (1, 2)
        assert told in done.stderr
        assert not (tmp_path / "x").exists()


# -- verify --------------------------------------------------------------------------------------------------------


def audited(store: Path | str) -> Audit:
    return audit(auditor_of(Archive.open(str(store))))


def test_a_sound_run_is_verified_and_tells_who_sent_what(made: Made, tmp_path: Path) -> None:
    done = overtone_cli("replay", made.url, "--verify", "--json", tmp_path / "a.json", env={"OVERTONE_KEY": KEY})
    assert done.returncode == 0, done.stderr
    count = made.last + 1
    assert f"{count} rounds, {count} of them replayed" in done.stdout
    found = json.loads((tmp_path / "a.json").read_text())
    assert (found["rounds"], found["replayed"], found["faults"], found["gaps"]) == (count, count, [], [])
    assert sorted(sent["name"] for sent in found["members"]) == ["m0", "m1", "m2"]
    (noisy,) = [sent for sent in found["members"] if sent["left_out"]]
    assert noisy["name"] == "m2"
    assert all("its norm is" in why for why in noisy["left_out"].values())
    for index in noisy["left_out"]:
        assert f"member {noisy['number']}, round {index}: does not count: its norm is" in done.stdout
    for sent in found["members"]:
        mine = [path for path in Path(made.url).glob(f"rounds/*/{sent['number']:04d}-*") if path.stat().st_size > 300]
        assert sent["counted"] + len(sent["left_out"]) + sent["late"] == len(mine)
        assert sent["bytes"] == sum(path.stat().st_size for path in mine)
        assert len(sent["norms"]) == sent["counted"] + len(sent["left_out"])


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(bytes(raw))


def swap(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def spoil_message(store: Path) -> set[str]:
    flip(message_of(store, 2, 0))
    return {f"{folder_of(2)}/0000-0001"}


def spoil_commit(store: Path) -> set[str]:
    flip(store / commit_path(2))
    return {commit_path(2)}


def delete_message(store: Path) -> set[str]:
    message_of(store, 2, 0).unlink()
    return {f"{folder_of(2)}/0000-0001"}


def delete_commit(store: Path) -> set[str]:
    (store / commit_path(2)).unlink()
    return {commit_path(2)}


def swap_rounds(store: Path) -> set[str]:
    swap(message_of(store, 2, 0), message_of(store, 1, 0))
    return {f"{folder_of(1)}/0000-0001", f"{folder_of(2)}/0000-0001"}


def swap_members(store: Path) -> set[str]:
    swap(message_of(store, 2, 0), message_of(store, 2, 1))
    return {f"{folder_of(2)}/0000-0001", f"{folder_of(2)}/0001-0001"}


def forge_message(store: Path) -> set[str]:
    """A member that had not posted: nobody with the key has written this."""
    path = store / folder_of(2) / "0007-0001"
    path.write_bytes(message_of(store, 2, 0).read_bytes())
    return {f"{folder_of(2)}/0007-0001"}


def forge_claim(store: Path) -> set[str]:
    shutil.copyfile(store / "members" / "0000-0001", store / "members" / "0009-0001")
    return {"members/0009-0001"}


def forge_snapshot(store: Path) -> set[str]:
    shutil.copyfile(store / snapshot_path(4), store / snapshot_path(400))
    return {snapshot_path(400)}


def spoil_snapshot(store: Path) -> set[str]:
    flip(store / snapshot_path(4))
    return {snapshot_path(4)}


def spoil_first_weights(store: Path) -> set[str]:
    first = Archive.open(str(store)).founded.snapshot
    flip(store / first)
    return {first}


SPOILT = {  # how, and which rounds cannot be replayed then
    spoil_message: [(2, 3)],
    spoil_commit: [(2, 3)],
    delete_message: [(2, 3)],
    delete_commit: [(2, 3)],
    swap_rounds: [(1, 3)],
    swap_members: [(2, 3)],
    forge_message: [],
    forge_claim: [],
    forge_snapshot: [],
    spoil_snapshot: [],
    spoil_first_weights: [(0, 3)],
}


@pytest.mark.parametrize("spoil", SPOILT, ids=lambda spoil: spoil.__name__)
def test_what_was_spoilt_is_found_and_the_rest_is_verified(
    spoil: Callable[[Path], set[str]], made: Made, store: Path
) -> None:
    paths = spoil(store)
    found = audited(store)
    assert {fault.path for fault in found.faults} == paths
    gaps = [(gap.first, gap.last) for gap in found.gaps]
    merged = [(min(first for first, _ in gaps), max(last for _, last in gaps))] if gaps else []
    assert merged == SPOILT[spoil]
    missed = sum(last - first + 1 for first, last in gaps)
    assert found.replayed == made.last + 1 - missed


def test_the_exit_status_and_the_path_tell_of_it(store: Path, tmp_path: Path) -> None:
    spoil_message(store)
    delete_commit(store)
    done = overtone_cli("replay", store, "--verify", "--json", tmp_path / "a.json", env={"OVERTONE_KEY": KEY})
    assert done.returncode == 1
    assert f"WRONG: {commit_path(2)}: missing" in done.stdout
    assert f"{folder_of(2)}/0000-0001: HMAC: does not match" in done.stderr
    assert json.loads((tmp_path / "a.json").read_text())["faults"]
    done = overtone_cli("replay", store, "--verify", env={"OVERTONE_KEY": "wrong"})
    assert done.returncode == 1
    assert "`run` says cannot be believed: HMAC" in done.stderr


def test_a_member_that_lies_with_the_key_is_found(store: Path) -> None:
    """A commit with another anchor, well sealed; and a snapshot that does not follow from its round."""
    archive = Archive.open(str(store))
    commit = archive.commit(2)
    assert commit is not None
    (store / commit_path(2)).write_bytes(replace(commit, anchor="00" * 8).pack(archive.about, archive.seal))
    (fault,) = audited(store).faults
    assert fault.path == commit_path(2)
    assert "One of the two machines computes differently" in fault.why


# -- prune ---------------------------------------------------------------------------------------------------------


def pruned(store: Path, keep: int) -> set[str]:
    """What it deletes."""
    before = contents(store)
    archive = Archive.open(str(store))
    carry_out(archive, plan(archive, keep))
    return before.keys() - contents(store).keys()


def test_pruning_keeps_what_newcomers_and_auditors_need(made: Made, store: Path, tmp_path: Path) -> None:
    words = ["prune", str(store), "--keep-rounds", "1"]
    before = contents(store)
    done = overtone_cli(*words, "--dry-run", env={"OVERTONE_KEY": KEY})
    assert done.returncode == 0, done.stderr
    assert contents(store) == before
    said = set(done.stdout.splitlines()[:-1])
    done = overtone_cli(*words, env={"OVERTONE_KEY": KEY})
    assert done.returncode == 0, done.stderr
    left = contents(store)
    assert before.keys() - left.keys() == said
    assert left.keys() - before.keys() == {"pruned/00000008"}  # 12 is the newest, and 8 is in reserve
    assert "messages from round 7 on and snapshots from round 8 on stay" in done.stdout
    assert {path for path in said if path.startswith("rounds/")} == {
        path for path in before if path.startswith("rounds/") and int(path.split("/")[1]) < 7 and "commit" not in path
    }
    assert {path for path in said if not path.startswith("rounds/")} == {
        *(snapshot_path(index) for index in range(4, 8, SNAPSHOTS)),
        *(p for p in before if "/00000000-" in p and p.startswith("snapshots") and p != first_weights(store)),
    }
    assert pruned(store, 1) == set()  # again: nothing more
    found = audited(store)
    assert not found.faults
    assert (found.pruned, found.replayed) == (8, made.last + 1 - 8)
    assert [(gap.first, gap.last, gap.why) for gap in found.gaps] == [(0, 7, "messages before round 8 were pruned")]
    for index in (7, 8, made.last):
        one = observer(store)
        replay_to(one, index)
        assert one.fingerprint == made.prints[index]
    with pytest.raises(StoreError, match="round 3 cannot be replayed, its messages were deleted"):
        replay_to(observer(store), 3)
    message_of(store, 9, 0).unlink()  # of a round that was to stay
    assert [fault.path for fault in audited(store).faults] == [f"{folder_of(9)}/0000-0001"]
    shutil.copyfile(message_of(Path(made.url), 9, 0), store / folder_of(9) / "0000-0001")
    newcomer = newcomer_at(store, made)
    assert newcomer.rounds > made.last + 1
    assert newcomer.fingerprint == made.prints[made.last]


def newcomer_at(store: Path, made: Made) -> Replica:
    model = load_task(made.config.task).model()
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    place = Store(str(store), name="late", units=400, min_replicas=1)
    replica = Replica(model, inner, made.config.choice.build(), place)
    assert replica._course is not None
    replica._course.close()
    return replica


def first_weights(store: Path) -> str:
    return Archive.open(str(store)).founded.snapshot


def test_so_many_rounds_stay_and_a_snapshot_to_replay_them_from(made: Made) -> None:
    archive, rounds = Archive.open(made.url), made.last + 1
    for keep in range(1, rounds + 3):
        found = plan(archive, keep)
        expected = max(base for base in (0, 4, 8) if base <= max(0, rounds - keep))  # 12 is the newest of them
        assert (found.base, found.rounds) == (expected, rounds)
        assert bool(found.base) == any(path.startswith("rounds") for path in found.paths)


def test_what_nobody_with_the_key_has_written_decides_nothing(made: Made, store: Path) -> None:
    """A snapshot of the far future, with and without a commit before it; copies of true ones; a damaged one; a note
    that all was pruned."""
    true = plan(Archive.open(str(store)), 1)
    for index in (100, 200):
        shutil.copyfile(store / snapshot_path(12), store / snapshot_path(index))
        for file in (commit_path(index - 1), commit_path(index)):
            (store / file).parent.mkdir(exist_ok=True)
            shutil.copyfile(store / commit_path(11), store / file)
    other = Seal(b"other")
    archive = Archive.open(str(store))
    forged = seal_message(archive.about.header(Kind.SNAPSHOT, 0, 300), b"{}", other)
    (store / snapshot_path(300)).write_bytes(forged)
    (store / "pruned").mkdir()
    (store / "pruned" / "00000300").write_bytes(seal_message(archive.about.header(Kind.PRUNED, 0, 300), b"{}", other))
    assert plan(archive, 1) == true
    flip(store / snapshot_path(12))  # now 8 is the newest, and 4 in reserve
    assert plan(archive, 1).base == 4
    found = audited(store)
    assert found.pruned == 0
    assert {fault.path for fault in found.faults} == {
        *(snapshot_path(index) for index in (12, 100, 200, 300)),
        *(commit_path(index) for index in (99, 100, 199, 200)),
        "pruned/00000300",
    }


def test_who_catches_up_while_it_is_pruned_goes_on_from_a_later_snapshot(made: Made, store: Path) -> None:
    """Neither a newcomer nor an observer has to be started again."""
    one = observer(store)
    one.begin(from_start=True)
    one.advance()
    pruned(store, 1)
    step = one.advance()
    assert step is not None
    assert step.commit.round == SNAPSHOTS * 3  # the newest snapshot is the shortest way
    assert one.fingerprint == made.prints[SNAPSHOTS * 3]
    take_newest, asked = Follower.take_newest, []

    def pruned_meanwhile(follower: Follower, **limits: Any) -> bool:
        """At first, those that the newcomer has seen in the list are gone when it wants to read them."""
        asked.append(limits)
        return len(asked) > 1 and take_newest(follower, **limits)

    with mock.patch.object(Follower, "take_newest", pruned_meanwhile):
        assert newcomer_at(store, made).fingerprint == made.prints[made.last]


def test_who_meets_a_message_that_was_replaced_goes_on_from_a_later_snapshot(made: Made, store: Path) -> None:
    """Left out, it would lead to another anchor than where the right one was heard."""
    path = message_of(store, 1, 0)
    path.write_bytes(message_of(store, 2, 0).read_bytes())
    one = observer(store)
    one.begin(from_start=True)
    while (step := one.advance()) is not None:
        assert one.fingerprint == made.prints[step.commit.round]
        assert step.commit.round in (0, *range(max(made.prints) // SNAPSHOTS * SNAPSHOTS, made.last + 1))
    assert one.rounds == made.last + 1
    for file in (store / "snapshots").glob("0000????"):
        file.unlink()
    with pytest.raises(DeletedError, match=rf"message of member 0 counts, and was replaced \(.*{path.name}"):
        replay_to(observer(store), 1)


def test_the_log_of_an_observer_tells_of_rounds_that_were_pruned(made: Made, store: Path, tmp_path: Path) -> None:
    """What they have cost is not known any more, and not in the sums."""
    pruned(store, 1)
    folder = tmp_path / "seen"
    followed(store, folder, from_start=True)
    seen = [line["observed"] for line in logged(folder, "start", "resume")]
    assert [(one["from_round"], one["costs_from"]) for one in seen] == [(0, 0), (12, 7)]
    (finish,) = logged(folder, "finish")
    followed(made.url, tmp_path / "whole", from_start=True)
    whole = {line["index"]: line["bytes_sent"] for line in logged(tmp_path / "whole", "round")}
    assert finish["bytes_sent"] == sum(sent for index, sent in whole.items() if index >= 7)
    assert finish["anchor_fingerprint"] == made.prints[made.last]


def test_a_replica_that_was_asleep_does_not_write_history_anew(made: Made, store: Path) -> None:
    """It finds the commits of the rounds that it has missed, but not their messages, and says what to do."""
    cut(store, 5)
    model = load_task(made.config.task).model()
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    place = Store(str(store), name="late", units=400, min_replicas=1)
    replica = Replica(model, inner, made.config.choice.build(), place)
    assert replica._course is not None
    for index in range(replica.rounds, made.last + 1):  # while it slept; their messages are pruned
        grow(store, made, index, messages=False)
    before = contents(store)
    with pytest.raises(StoreError, match=r"was deleted .*start again, if there is a later snapshot"):
        wait_for(lambda: replica._course is not None and replica._course._turn() and False)
    replica._course.close()
    assert contents(store) == before
