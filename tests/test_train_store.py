"""`overtone train --store`: real processes that share nothing but a folder. They come, are killed, and come back."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import overtone
from overtone.runs import log
from overtone.runs.config import Run, Stored, Training
from overtone.runs.leased import LeasedFeed, units_of
from overtone.swarm.store import Store
from overtone.tasks import ShardedFeed, TaskError, Tensors
from overtone.tasks.sharding import Sampler
from running import Live, running, wait_until, warm_starter

TINY = ("--width", "16", "--layers", "1", "--heads", "2", "--context", "16", "--batch", "2", "--valid-samples", "8")
STEPS = ("--steps", "120", "--every", "5")


def written(folder: Path) -> Path:
    file = folder / "text.txt"
    file.write_bytes(bytes(i * i % 251 % 64 + 32 for i in range(40_000)))
    return file


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return written(tmp_path)


@pytest.fixture(scope="module")
def founded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run that is over, and with other data beside it."""
    place = tmp_path_factory.mktemp("founded")
    text = written(place)
    (place / "other.txt").write_bytes(text.read_bytes()[::-1])
    founder = start(place, *TINY, "--steps", "5", "--every", "5", "--data", str(text))
    with running(founder):
        assert founder.end().status == 0, founder.said
    return place


def start(tmp_path: Path, *flags: str, env: Mapping[str, str] | None = None) -> Live:
    """A process of the command, in a directory that all of a test share."""
    return warm_starter().start(["train", "--store", "store", *flags], env or {}, cwd=tmp_path, replicas=1)


def has(tmp_path: Path, path: str) -> bool:
    return (tmp_path / "store" / path).exists()


def events(tmp_path: Path, name: str, event: str) -> list[dict[str, Any]]:
    (folder,) = tmp_path.glob(f"runs/store-*/{name}")
    return [line for line in log.read(folder / log.NAME) if line["event"] == event]


@pytest.mark.slow
def test_members_come_are_killed_and_come_back(tmp_path: Path, text: Path) -> None:
    """No flag but the place is needed to join. A killed member goes on as itself, with what it had not sent yet."""
    founder = start(tmp_path, *TINY, *STEPS, "--data", str(text), "--name", "first", "--min-replicas", "2")
    with running(founder):
        wait_until(lambda: has(tmp_path, "members/0000-0001"), "the run")
        with running(start(tmp_path)) as second:
            wait_until(lambda: has(tmp_path, "rounds/00000004/0001-0001"), "some rounds of both")
            saved = "runs/store-*/*-1/checkpoints/*/replica-*.safetensors"
            wait_until(lambda: list(tmp_path.glob(saved)), "a checkpoint of the second")
            os.kill(second.pid, signal.SIGKILL)
            second.end()
        again = start(tmp_path)
        with running(again):
            assert again.end().status == 0, again.said
        assert founder.end().status == 0, founder.said
    (name,) = (path.name for path in tmp_path.glob("runs/store-*/*") if path.name != "first")
    assert f"{name} is back, as process 2" in again.said.decode()
    (resumed,) = events(tmp_path, name, "resume")
    assert resumed["step"] > 0
    ends = [events(tmp_path, one, "finish")[0] for one in ("first", name)]
    assert ends[0]["anchor_fingerprint"] == ends[1]["anchor_fingerprint"]
    assert ends[0]["metrics"] == ends[1]["metrics"]
    assert [end["rounds"] for end in ends] == [24, 24]
    # Who comes when all is over evaluates the same model, and changes nothing.
    objects = sorted(path for path in tmp_path.glob("store/rounds/**/*"))
    late = start(tmp_path, "--out", "late")
    with running(late):
        assert late.end().status == 0, late.said
    found = [line for line in log.read(tmp_path / "late" / log.NAME) if line["event"] == "finish"]
    assert found[0]["metrics"] == ends[0]["metrics"]
    assert sorted(path for path in tmp_path.glob("store/rounds/**/*")) == objects


def test_a_member_that_waits_stops_when_it_is_asked_and_says_why_it_waits(tmp_path: Path, text: Path) -> None:
    """Alone where two are needed: it trains on for a while and then stands still, with what it has in safety."""
    alone = start(tmp_path, *TINY, *STEPS, "--data", str(text), "--min-replicas", "2", "--name", "alone")
    with running(alone):
        wait_until(lambda: has(tmp_path, "rounds/00000000/0000-0001"), "its first message")
        os.kill(alone.pid, signal.SIGTERM)
        ended = alone.end()
    assert ended.status == 128 + signal.SIGTERM
    assert "SIGTERM: saved step" in ended.said
    (stop,) = events(tmp_path, "alone", "stop")
    assert 0 < stop["step"] <= 5
    with running(start(tmp_path, "--name", "other")) as other, running(start(tmp_path, "--min-replicas", "2")) as again:
        assert other.end().status == 0, other.said
        assert again.end().status == 0, again.said
    assert events(tmp_path, "alone", "resume")[0]["step"] >= stop["step"]
    assert len(events(tmp_path, "alone", "finish")) == 1


@pytest.mark.parametrize(
    ("flags", "env", "words"),
    [
        (["--batch", "4"], {}, "batch=4: the run in store has 2; leave --batch out"),
        (["--keep", "7"], {}, "keep=7: the run in store has none"),
        (["--method", "ddp"], {}, "method=ddp: the run in store has 'decoupled'"),
        (["--replicas", "3"], {}, "replicas=3: with --store, this process is one replica"),
        ([], {"OVERTONE_KEY": "another"}, "cannot be believed"),
        ([], {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "1"}, "start it without torchrun"),
        (["--data", "other.txt"], {}, "data is"),
    ],
    ids=["batch", "keep", "method", "replicas", "key", "torchrun", "data"],
)
def test_what_does_not_fit_the_run_is_refused(founded: Path, flags: list[str], env: dict[str, str], words: str) -> None:
    other = start(founded, *flags, env=env)
    with running(other):
        ended = other.end()
    assert ended.status in (1, 2)
    assert words in ended.said
    assert "Traceback" not in ended.said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--method", "ddp", "--every", "1"], "every"),
        (["--method", "ddp"], "ddp: cannot live in a store"),
        (["--method", "published"], "published: cannot live in a store"),
        (["--delay", "5"], "delay=5"),
        (["--skew", "1"], "skew=1.0: members of a store share all samples"),
        (["--name", "../x"], "name='../x'"),
        (["--batch", "100000"], "fewer than one batch of 100000"),
    ],
    ids=["every", "ddp", "published", "delay", "skew", "name", "batch"],
)
def test_what_cannot_live_in_a_store_is_refused_before_a_run_is_founded(
    tmp_path: Path, text: Path, flags: list[str], words: str
) -> None:
    live = start(tmp_path, *TINY, "--data", str(text), *flags)
    with running(live):
        ended = live.end()
    assert ended.status in (1, 2)
    assert words in ended.said
    assert not has(tmp_path, "run")


def test_a_python_file_that_a_store_names_as_its_task_is_not_run_unasked(tmp_path: Path) -> None:
    example = Path(__file__).parents[1] / "examples" / "own_task.py"
    founder = start(tmp_path, "--task", str(example), "--steps", "5", "--every", "5")
    with running(founder):
        assert founder.end().status == 0, founder.said
    for flags, status in ([], 2), (["--trust-task"], 0):
        live = start(tmp_path, *flags)
        with running(live):
            ended = live.end()
        assert ended.status == status, ended.said
        assert status == 0 or "--trust-task" in ended.said


def test_units_of_an_epoch_are_each_trained_on_once(tmp_path: Path) -> None:
    """What two members take of an epoch: every sample that fills a unit, and none twice."""
    samples = Tensors(torch.arange(103))
    feed = ShardedFeed(samples, Sampler(103, None, seed=3, skew=0.0, name="numbers"), 0, 1, batch=2)
    units = units_of(feed, "numbers", per_step=4)
    assert units == 25
    place = f"memory://{tmp_path}"
    model = torch.nn.Linear(4, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    store = Store(place, "only", units=units, min_replicas=1, wait=True)
    replica = overtone.Replica(model, inner, overtone.decoupled(every=3), store)
    leased = LeasedFeed(feed, store, accumulate=2)
    seen: Counter[int] = Counter()
    for _ in range(units):
        for _ in range(2):
            seen.update(leased.next().tolist())
        model(torch.ones(1, 4)).sum().backward()
        replica.step()
    assert len(seen) == 100
    assert set(seen.values()) == {1}
    replica.finish()


def test_the_order_of_the_data_must_be_the_stores() -> None:
    class Endless:
        def next(self) -> None: ...

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    with pytest.raises(TaskError, match="read in an order of its own"):
        units_of(Endless(), "hub:text", 4)


def test_every_option_is_one_of_the_run_or_of_a_host() -> None:
    """A later member takes over the first kind, and may set the second."""
    from overtone.runs.stored import agreed_of, config_of, settings_of

    config = Run(training=Training(batch=3), stored=Stored(store="x", name="me", wait=True), seed=7)
    kept = settings_of(config, {"data": "abc"})
    other = config_of(kept, "store x", Run(stored=Stored(name="you")))
    assert (other.training.batch, other.seed, other.stored.name, other.stored.wait) == (3, 7, "you", False)
    assert agreed_of(other, {"data": "abc"}) == agreed_of(config, {"data": "abc"})
    assert "data" in agreed_of(config, {"data": "abc"})
    assert "out" not in kept["config"]
