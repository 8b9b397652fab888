"""Runs that are killed, stopped or hindered, and go on: bit for bit, or refused in one clear line.

Real processes, real sockets, real signals. Each chain kills one run again and again, the launcher and all replicas, and
compares in the end with a run that nobody disturbed.
"""

import json
import os
import pickle
import random
import shutil
import signal
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("safetensors")
pytest.importorskip("tyro")

import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overtone.errors import CheckpointError
from overtone.runs import log as runlog
from overtone.runs.checkpoint import format, index
from overtone.tasks.sharding import Sampler, ShardedFeed
from running import (
    Cold,
    Moment,
    Torchrun,
    Trial,
    Warm,
    after,
    assert_equal,
    assert_same,
    before,
    running,
    wait_until,
    warm_starter,
)

STEPS, EVERY, SAVE, VALIDATE = 24, 4, 3, 5  # checkpoints fall inside rounds, validations beside both
LAST_MESSAGES = ("--drain", "2")
TINY = ("--width", "32", "--layers", "1", "--heads", "2", "--context", "16", "--valid-samples", "8", "--batch", "2")
PACE = ("--steps", STEPS, "--checkpoint-every", SAVE, "--eval-every", VALIDATE, "--log-every", 1)
SAVE_FILE = "safetensors.torch:save_file"


@pytest.fixture(scope="session")
def warm() -> Warm:
    return warm_starter()


@pytest.fixture(scope="session")
def flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """So little text that the second epoch begins within the run."""
    text = tmp_path_factory.mktemp("data") / "text.txt"
    text.write_text("".join(f"line {i}: the quick brown fox {i * 7919 % 1000} jumps over it\n" for i in range(24)))
    return ("--data", str(text), *TINY, *map(str, PACE))


@pytest.fixture(scope="session")
def unbroken(warm: Warm, flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """Two replicas, decoupled, never disturbed. With a momentum and last messages, so that there is more to lose."""
    given = (*flags, "--every", str(EVERY), "--momentum", "0.5", *LAST_MESSAGES)
    trial = Trial(warm, tmp_path_factory.mktemp("unbroken") / "run", given).finished()
    positions = [tree["feed"] for tree in trial.trees()]
    assert positions[0]["epoch"] > 0
    return trial


@pytest.fixture
def trial(unbroken: Trial, tmp_path: Path) -> Trial:
    """The same run, to be disturbed."""
    return unbroken.on(folder=tmp_path / "run")


def file(step: int, rank: int, replicas: int = 2) -> str:
    final = "-final" if step == STEPS else ""
    return f"checkpoints/step-{step:08d}{final}/replica-{rank}-of-{replicas}.safetensors"


def saved(step: int, replicas: int = 2) -> tuple[str, ...]:
    return tuple(file(step, rank, replicas) for rank in range(replicas))


def one_line(said: str) -> str:
    """The last thing said, a complaint; there is no traceback above it."""
    assert "Traceback" not in said
    complaints = [line for line in said.splitlines() if line.startswith("overtone: ")]
    assert len(complaints) == 1, said
    return complaints[0]


# -- killed at any moment -----------------------------------------------------------------------------------------

CHAINS = {
    "before there is a checkpoint": [
        before("runs.open_run:_refuse_differences", fresh=True),
        after("runs.directory:claim", rank=0, fresh=True),
        before("world.process_group:Torch.broadcast", rank=1, fresh=True),
        after("exchange.handshake:compare_initial_weights", fresh=True),
        after("runs.session:Session._write_first_event", fresh=True),
        after("tasks.sharding:ShardedFeed.next", rank=1, count=2, fresh=True),
        before("runs.checkpoint.format:write", match="*step-00000003/*", fresh=True),
        Moment(SAVE_FILE, "half", rank=1, until=(file(3, 0),), fresh=True),
        Moment(SAVE_FILE, "after", until=(file(3, 1),), fresh=True),
    ],
    "steps, and going on": [
        after("tasks.text.task:LanguageTask.loss", count=5, until=saved(3)),
        before("runs.session:newest_common", rank=1),
        before("runs.checkpoint.format:restore", rank=1),
        after("runs.checkpoint.format:restore"),
        before("runs.checkpoint.writer:CheckpointWriter.delete_after"),
        after("runs.checkpoint.writer:CheckpointWriter.delete_after", rank=1),
        before("runs.directory:write_config"),
        Moment("overtone.runs.log:RunLog.write", "torn"),
        after("exchange.inner_step:InnerStep.take", rank=1, count=2),
        after("tasks.sharding:ShardedFeed.next", rank=1, count=5, until=saved(6)),
        Moment("overtone.runs.log:RunLog.write", "torn", count=4),
        before("runs.evaluate:measure", rank=1, step=10, until=saved(9)),
        after("runs.evaluate:measure", step=10),
        after("runs.evaluate:RankEvaluator.evaluate", rank=1, step=15, until=saved(12)),
    ],
    "inside a round": [
        before("exchange.round:Exchanger.start", step=4, until=saved(3)),
        after("exchange.slab_work:SlabWork.encode", rank=1, step=4),
        after("exchange.round:Exchanger.start", rank=0, step=4),
        before("transport:Gather.carry", rank=1, step=4, count=1),
        after("transport:Gather.carry", rank=0, step=4, count=1),
        after("transport:Gather.carry", rank=1, step=4, count=2),
        after("exchange.round:compare_anchors", rank=0, step=8, until=saved(6)),
        before("exchange.round:Exchanger._absorb", rank=1, step=8),
        after("rules:Outer.absorb", rank=0, step=8),
        after("coding.layout:SlabTarget.outer_step", rank=1, step=12, until=saved(9)),
        after("exchange.slab_work:SlabWork.absorb", rank=0, step=12),
        after("exchange.round:Exchanger._absorb", rank=1, step=12),
        after("exchange.round:Exchanger._record", rank=0, step=12),
        after("replica:Replica.step", rank=1, step=16, until=saved(15)),
    ],
    "inside a checkpoint": [
        before("runs.checkpoint.format:write", rank=1, match="*step-00000006/*", until=(*saved(3), file(6, 0))),
        Moment(SAVE_FILE, "half", until=(file(6, 1),)),
        Moment(SAVE_FILE, "after", rank=1, until=(file(6, 0),)),
        after("runs.checkpoint.format:_flush", rank=1, match="*step-00000006/.replica-1*", until=(file(6, 0),)),
        Moment("pathlib:Path.replace", "before", match="*step-00000006/.replica-0*", until=(file(6, 1),)),
        Moment("pathlib:Path.replace", "after", rank=1, match="*step-00000006/.replica-1*", until=(file(6, 0),)),
        after("runs.checkpoint.format:_flush", match="*/checkpoints", until=saved(9)),
        before("runs.checkpoint.writer:CheckpointWriter.prune"),
        Moment("pathlib:Path.unlink", "after", rank=1, match="*/replica-1-of-2.safetensors"),
        Moment("pathlib:Path.rmdir", "before", rank=0, match="*/step-*"),
        after("runs.checkpoint.writer:CheckpointWriter.prune", rank=1),
        after("runs.checkpoint.writer:CheckpointWriter.save", rank=0),
    ],
    "at the end": [
        before("tasks.text.task:LanguageTask.loss", step=22, until=saved(21)),
        before("replica:Replica.finish", rank=1),
        before("rules:Outer.close"),
        before("methods:Method.draining", rank=1, count=1),
        after("exchange.round:Exchanger._absorb", rank=0, step=24, count=2),
        before("methods:Method.draining", rank=1, count=2),
        after("exchange.round:Exchanger.show", rank=0),
        before("runs.session:Session._save", rank=0, step=24),
        Moment(SAVE_FILE, "half", rank=0, until=(file(24, 1),)),
        before("runs.checkpoint.format:write", rank=1, match="*step-00000024-final/*", until=(file(24, 0),)),
        before("runs.evaluate:RankEvaluator.evaluate", rank=1, step=24, until=saved(24)),
        after("runs.evaluate:RankEvaluator.evaluate", rank=0, step=24),
    ],
}  # fmt: skip


def follow(trial: Trial, chain: list[Moment]) -> Trial:
    for moment in chain:
        trial.stopped_at(moment)
        assert trial.resumable != moment.fresh, moment
    return trial


@pytest.mark.slow
@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_a_run_killed_at_every_moment_ends_as_if_never_disturbed(
    chain: list[Moment], trial: Trial, unbroken: Trial
) -> None:
    assert_same(follow(trial, chain).finished(), unbroken)
    assert sum(map(len, CHAINS.values())) >= 50


@pytest.mark.slow
def test_killed_after_the_last_checkpoint_but_before_the_log_says_so(trial: Trial, unbroken: Trial) -> None:
    """Everything is saved; only the closing line is missing."""
    trial.stopped_at(after("runs.checkpoint.writer:CheckpointWriter.wait", step=STEPS, count=2))
    assert trial.newest().step == STEPS
    assert_same(trial.finished(), unbroken)


@pytest.mark.slow
def test_a_finished_run_only_tells_again_how_it_ended(trial: Trial, unbroken: Trial) -> None:
    shutil.copytree(unbroken.folder, trial.folder)
    log = (trial.folder / runlog.NAME).read_bytes()
    trial.finished()
    assert (trial.folder / runlog.NAME).read_bytes() == log
    assert_same(trial, unbroken)


OWN_TASK = '''
"""A task that throws every kind of dice."""
import random
import numpy as np
import torch
from torch import nn
from overtone.tasks import Task
from overtone.tasks.task import Tensors

class Dice(Task):
    name = "dice"
    def __init__(self):
        x = torch.linspace(-1, 1, 300).view(60, 5)
        self.train, self.valid = Tensors(x, x.sum(1)), Tensors(x[:9], x[:9].sum(1))
    def model(self):
        return nn.Sequential(nn.Linear(5, 40), nn.Dropout(0.3), nn.Tanh(), nn.Linear(40, 1))
    def loss(self, model, batch):
        x, y = batch
        if model.training:
            x = x + 0.01 * random.gauss(0, 1) + 0.01 * float(np.random.normal()) + 0.01 * torch.randn_like(x)
        return ((model(x)[:, 0] - y) ** 2).mean()

def task(options):
    return Dice()
'''

METHODS = {
    "ddp": ("--method", "ddp"),
    "demo": ("--method", "demo", "--inner", "sgd"),
    "published": ("--method", "published", "--every", "4"),
    "diloco": ("--method", "diloco", "--every", "4", "--inner", "muon"),
    "sparse_loco": ("--method", "sparse_loco", "--every", "4", "--skew", "0.5", "--accumulate", "2"),
}
DELAYED = {  # some checkpoints, or all but the first, have a message in flight
    "decoupled": ("--every", "4", "--delay", "3"),
    "decoupled, sharded": ("--every", "4", "--delay", "4", "--exchange", "sharded", "--keep", "64"),
    "diloco": ("--method", "diloco", "--every", "4", "--delay", "2"),
}
MOMENTS = [
    after("exchange.round:Exchanger.start", rank=1, step=4, until=saved(3)),
    after("exchange.round:compare_anchors", rank=0, step=8, until=saved(6)),
    Moment(SAVE_FILE, "half", rank=1, until=(file(9, 0),)),
    after("coding.layout:SlabTarget.write", rank=1, step=12, until=saved(9)),
    before("runs.evaluate:measure", rank=0, step=20, until=saved(18)),
    before("runs.checkpoint.format:write", rank=1, match="*step-00000024-final/*", until=(file(24, 0),)),
]


# What happens in the background happens at no particular step, so these moments are found in the training thread.
IN_FLIGHT = [
    after("exchange.round:Exchanger.start", rank=1, step=4, until=saved(3)),
    before("replica:Replica._absorb", rank=0, count=1),
    after("exchange.round:Exchanger.finish", rank=1, count=1),
    after("exchange.round:Exchanger.start", rank=0, step=8, until=saved(6)),
    Moment(SAVE_FILE, "half", rank=1, until=(file(9, 0),)),
    after("transport:Flight.settle", rank=1, count=2, until=saved(9)),
    before("runs.evaluate:measure", rank=0, step=20, until=saved(18)),
    before("replica:Replica.finish", rank=1),
    before("runs.checkpoint.format:write", rank=1, match="*step-00000024-final/*", until=(file(24, 0),)),
]


def disturbed_and_not(warm: Warm, tmp_path: Path, flags: tuple[str, ...], chain: list[Moment]) -> None:
    wanted = Trial(warm, tmp_path / "unbroken", flags).finished()
    assert_same(follow(wanted.on(folder=tmp_path / "run"), chain).finished(), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_goes_on_bit_for_bit(method: str, warm: Warm, flags: tuple[str, ...], tmp_path: Path) -> None:
    disturbed_and_not(warm, tmp_path, (*flags, *METHODS[method]), MOMENTS)


@pytest.mark.slow
@pytest.mark.parametrize("method", DELAYED)
def test_a_message_in_flight_is_part_of_the_checkpoint(
    method: str, warm: Warm, flags: tuple[str, ...], tmp_path: Path
) -> None:
    """It is sent again, and absorbed at the step at which it would have been: bit for bit."""
    disturbed_and_not(warm, tmp_path, (*flags, *DELAYED[method]), IN_FLIGHT)


@pytest.mark.slow
def test_all_dice_go_on_where_they_were(warm: Warm, tmp_path: Path) -> None:
    """Dropout, Python's and numpy's."""
    (tmp_path / "dice.py").write_text(OWN_TASK)
    own = ("--task", str(tmp_path / "dice.py"), "--every", "4", "--batch", "2", *map(str, PACE))
    disturbed_and_not(warm, tmp_path, own, MOMENTS[:3])


@pytest.mark.slow
def test_images_with_statistics_and_augmentation_go_on_bit_for_bit(tmp_path: Path) -> None:
    """BatchNorm's statistics are shared at rounds and private between them; pictures are decoded a batch ahead."""
    pytest.importorskip("transformers")
    pytest.importorskip("sklearn")
    from PIL import Image

    dice = random.Random(0)
    for i in range(60):
        folder = tmp_path / "pictures" / ("cat", "dog", "eel")[i % 3]
        folder.mkdir(parents=True, exist_ok=True)
        Image.frombytes("RGB", (8, 8), dice.randbytes(192)).save(folder / f"{i:02d}.png")
    flags = ("--task", "image", "--data", str(tmp_path / "pictures"), "--flip", "--crop", "2", "--every", "4",
             "--batch", "3", "--model", "resnet-tiny", *map(str, PACE))  # fmt: skip
    starter = Warm("tasks.image")
    try:
        chain = [m for m in MOMENTS if "SlabTarget.write" not in m.where]
        disturbed_and_not(starter, tmp_path, flags, [*chain, after("exchange.buffers:Buffers.absorb", rank=0, step=24)])
        tree = Trial(starter, tmp_path / "run", flags).trees()[1]
        assert any("running_mean" in name for name in tree["model"])
        assert tree["feed"]["epoch"] > 0
    finally:
        starter.close()


@pytest.mark.slow
def test_a_run_of_one_replica_goes_on_bit_for_bit(warm: Warm, flags: tuple[str, ...], tmp_path: Path) -> None:
    wanted = Trial(warm, tmp_path / "unbroken", (*flags, "--every", "4"), replicas=1).finished()
    trial = wanted.on(folder=tmp_path / "run")
    for moment in (
        after("exchange.round:Exchanger.start", step=4, until=saved(3, 1), does="kill myself"),
        Moment(SAVE_FILE, "half", count=2, does="kill myself"),
        Moment("pathlib:Path.unlink", "after", match="*/replica-0-of-1.safetensors", does="kill myself"),
    ):
        assert trial.stopped_at(moment).status == -signal.SIGKILL
    assert_same(trial.finished(), wanted)


@pytest.mark.slow
def test_started_cold_as_a_user_does(trial: Trial, unbroken: Trial) -> None:
    """A process of its own for everything, imports and all."""
    cold = trial.on(starter=Cold())
    cold.stopped_at(after("exchange.round:compare_anchors", rank=1, step=8, until=saved(6)))
    assert_same(cold.finished(), unbroken)


@pytest.mark.slow
def test_without_its_launcher_no_replica_lives_on(trial: Trial, unbroken: Trial) -> None:
    """Only the launcher is killed. That the output ends is the proof: every process of the run holds it open."""
    cold = trial.on(starter=Cold())
    moment = before("tasks.text.task:LanguageTask.loss", rank=1, count=5, until=saved(3), does="kill launcher")
    with running(cold.start(moment=moment)) as live:
        wait_until(cold.note.exists, "the moment")
        assert live.end().status == -signal.SIGKILL
    assert_same(trial.finished(), unbroken)


@pytest.mark.slow
def test_a_launcher_killed_while_replicas_still_load(trial: Trial) -> None:
    """Before a replica could ask the kernel to end it with its launcher."""
    cold = trial.on(starter=Cold())
    with running(cold.start(moment=Moment("start", rank=1, does="kill launcher"))) as live:
        wait_until(cold.note.exists, "the moment")
        assert live.end().status == -signal.SIGKILL


@pytest.mark.slow
def test_killed_in_the_middle_of_the_very_first_line_of_the_log(trial: Trial, unbroken: Trial) -> None:
    trial.stopped_at(Moment("overtone.runs.log:RunLog.write", "torn", fresh=True))
    trial.stopped_at(after("tasks.sharding:ShardedFeed.next", rank=1, count=2, fresh=True))
    assert_same(trial.finished(), unbroken)


@pytest.mark.slow
def test_killed_before_the_configuration_is_written(trial: Trial, unbroken: Trial) -> None:
    """The log is there and empty. One of the two ways to start must be open."""
    trial.stopped_at(before("runs.session:Session._write_first_event", rank=1, until=(runlog.NAME,)))
    tries = [trial.go(resume=resume) for resume in (False, True)]
    assert 0 in [ended.status for ended in tries], tries
    assert_same(trial, unbroken)


@pytest.mark.slow
def test_what_a_killed_write_has_left_disappears(cut: Trial, unbroken: Trial, tmp_path: Path) -> None:
    """safetensors itself writes beside, under a random name; a kill in the midst of that (some chains above meet one by
    chance) leaves such a file."""
    trial = cut.on(folder=tmp_path / "run")
    shutil.copytree(cut.folder, trial.folder)
    (trial.folder / "checkpoints/step-00000009").mkdir(exist_ok=True)
    for step in (3, 6, 9):
        (trial.folder / f"checkpoints/step-{step:08d}/.tmp4uYl7Z").write_bytes(bytes(1000))
    assert_same(trial.finished(), unbroken)
    assert sorted(path.name for path in trial.checkpoints.iterdir()) == ["step-00000021", "step-00000024-final"]


@pytest.mark.slow
def test_a_run_that_has_lost_all_its_checkpoints_does_not_begin_anew_unasked(cut: Trial, tmp_path: Path) -> None:
    trial = cut.on(folder=tmp_path / "run")
    shutil.copytree(cut.folder, trial.folder)
    for step in (3, 6):
        (trial.folder / file(step, 1)).unlink()
    ended = trial.go(resume=True)
    assert ended.status == 1, ended
    assert "no complete checkpoint that all 2 replicas can go on from" in one_line(ended.said)


# -- asked to stop ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_asked_to_stop_it_saves_first(trial: Trial, unbroken: Trial) -> None:
    """In a step, in a round, during a validation; by the launcher's SIGTERM and SIGINT. Nothing runs twice. A replica
    that was asked begins no further step, so the others come no further than the next round."""
    attentive = trial.on(env={"OVERTONE_PULSE": "0"})
    loss = "tasks.text.task:LanguageTask.loss"
    for moment, first, name in (
        (before(loss, rank=1, step=1, does="interrupt launcher"), 2, "SIGINT"),
        (after("runs.evaluate:measure", step=10, does="terminate launcher"), 10, "SIGTERM"),
        (after("exchange.round:Exchanger.start", rank=1, step=16, does="terminate launcher"), 16, "SIGTERM"),
    ):
        ended = attentive.stopped_at(moment)
        assert ended.status == 128 + signal.Signals[name], ended
        step = trial.newest().step
        assert first <= step <= (first // EVERY + 1) * EVERY
        assert f"{name}: saved step {step}; overtone train --resume {trial.folder} goes on" in ended.said
        assert "Traceback" not in ended.said
        assert trial.log()[-1]["step"] == step
    trial.finished()
    assert [record["step"] for record in trial.raw("train")] == list(range(1, STEPS + 1))
    assert [record["step"] for record in trial.raw("eval")] == [5, 10, 15, 20]
    # Where it was saved in between leaves other folders; the numbers are the same.
    assert trial.log() == unbroken.log()
    assert_equal(trial.trees(), unbroken.trees(), "end")


@pytest.mark.slow
def test_one_replica_asked_to_stop_stops_all(trial: Trial, unbroken: Trial) -> None:
    moment = before("tasks.text.task:LanguageTask.loss", rank=1, step=6, does="terminate myself")
    ended = trial.on(env={"OVERTONE_PULSE": "0"}).stopped_at(moment)
    assert ended.status not in (0, None)
    step = trial.newest().step
    assert 7 <= step <= 8  # it holds after its step, and the other comes to the next round at most
    assert f"SIGTERM: saved step {step}; overtone train --resume {trial.folder} goes on" in ended.said
    assert_equal(trial.finished().trees(), unbroken.trees(), "end")


@pytest.mark.slow
def test_asked_to_stop_during_the_last_messages_it_finishes(trial: Trial, unbroken: Trial) -> None:
    ended = trial.stopped_at(before("methods:Method.draining", rank=1, does="terminate launcher"))
    assert "Traceback" not in ended.said
    assert "finished after" in ended.said
    assert_same(trial, unbroken)


@pytest.mark.slow
def test_a_replica_of_an_outer_torchrun_asked_to_stop_stops_all(trial: Trial, unbroken: Trial) -> None:
    """At the first step, after which the replicas always ask each other."""
    outer = trial.on(starter=Torchrun())
    moment = before("tasks.text.task:LanguageTask.loss", rank=1, does="terminate myself")
    ended = outer.stopped_at(moment)
    assert ended.status != 0
    step = trial.newest().step
    assert 1 <= step <= EVERY
    assert f"SIGTERM: saved step {step}; overtone train --resume {trial.folder} goes on" in ended.said
    trial.finished()
    assert [record["step"] for record in trial.raw("train")] == list(range(1, STEPS + 1))
    assert trial.log() == unbroken.log()
    assert_equal(trial.trees(), unbroken.trees(), "end")


@pytest.mark.slow
def test_a_long_run_hears_of_a_signal_within_seconds(trial: Trial, tmp_path: Path) -> None:
    """At the program's own pace of asking, from outside."""
    long = trial.on(flags=(*trial.flags, "--schedule", "constant", "--warmup", "0"))
    with running(long.start("--steps", "1000000", "--checkpoint-every", "400")) as live:
        wait_until(lambda: (long.folder / runlog.NAME).exists() and len(long.raw("train")) > 20, "some steps")
        os.kill(live.pid, signal.SIGTERM)
        ended = live.end()
    assert ended.status == 143
    step = long.newest().step
    assert f"SIGTERM: saved step {step}; overtone train --resume {long.folder} goes on" in ended.said
    steps = str(step + 5)
    wanted = long.on(folder=tmp_path / "unbroken")
    assert wanted.go("--steps", steps, "--checkpoint-every", "400").status == 0
    long.finished("--steps", steps)
    assert [record["step"] for record in long.raw("train")] == list(range(1, step + 6))
    assert long.log() == wanted.log()
    assert_equal(long.trees(), wanted.trees(), "end")
    assert "death signal" not in ended.said, "torch's launcher speaks too"


# -- another number of replicas -----------------------------------------------------------------------------------


@pytest.fixture(params=[(4, 2), (2, 4)], ids=["4 to 2", "2 to 4"])
def change(request: pytest.FixtureRequest) -> tuple[int, int]:
    found: tuple[int, int] = request.param
    return found


def after_step_12(replicas: int) -> Moment:
    """Of a run that went on from step 9: in step 13, when step 12 is saved."""
    return after("exchange.inner_step:InnerStep.take", rank=1, count=4, until=saved(12, replicas))


@pytest.fixture
def rare(trial: Trial, flags: tuple[str, ...]) -> Trial:
    """Rounds at steps 8, 16, 24."""
    return trial.on(flags=(*flags, "--every", "8", "--momentum", "0.5"))


def mean_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([t.double() for t in tensors]).mean(0)


@pytest.mark.slow
def test_another_number_of_replicas_in_the_middle_of_a_round(change: tuple[int, int], rare: Trial) -> None:
    old, new = change
    trial = rare.on(replicas=old)
    trial.stopped_at(after("exchange.inner_step:InnerStep.take", rank=1, count=11, until=saved(9, old)))
    assert trial.newest() == index.CheckpointId(9, False, old)
    then = trial.trees()
    assert all(tree["replica"]["counts"] == {"steps": 9, "rounds": 1, "steps_at_round": 8} for tree in then)

    # What the rule says, on the files themselves.
    files = [index.file_of(trial.checkpoints, trial.newest(), rank) for rank in range(old)]
    folded = [format.fold(files, consensus=True, rank=rank) for rank in range(new)]
    for tree in folded:
        for name in ("anchor", "momentum"):
            assert torch.equal(tree["replica"]["state"][name], then[0]["replica"]["state"][name])
    for pick in (
        lambda t: t["replica"]["state"]["residual"],
        *(lambda t, n=n: t["model"][n] for n in then[0]["model"]),
    ):
        wanted = mean_of([pick(tree) for tree in then])
        assert torch.allclose(mean_of([pick(tree) for tree in folded]), wanted, atol=1e-6, rtol=0)

    # The same in the run: until the next round a step moves the weights only.
    changed = trial.on(replicas=new)
    ended = changed.stopped_at(after_step_12(new))
    assert f"goes on from step 9, saved by {old} replicas" in ended.said
    now = changed.trees(index.CheckpointId(12, False, new))
    for tree in now:
        for name in ("anchor", "momentum"):
            assert torch.equal(tree["replica"]["state"][name], then[0]["replica"]["state"][name])
        assert tree["replica"]["counts"] == {"steps": 12, "rounds": 1, "steps_at_round": 8}
        was = then[0]["feed"]
        assert tree["feed"] == {"epoch": was["epoch"], "taken": 6, "cuts": [[old, was["taken"]]], "replicas": new}
        assert tree["replica"]["ledger"] == then[0]["replica"]["ledger"]
    residuals = [[tree["replica"]["state"]["residual"] for tree in trees] for trees in (now, then)]
    assert torch.allclose(mean_of(residuals[0]), mean_of(residuals[1]), atol=1e-6, rtol=0)
    assert not torch.equal(residuals[1][0], residuals[1][1])

    # Twice in one epoch, and to the end.
    changed.on(replicas=old).finished()
    losses = [record["metrics"]["loss"] for record in trial.log() if record["event"] in ("eval", "finish")]
    assert all(later < earlier + 1e-5 for earlier, later in pairwise(losses))  # between two rounds nothing moves
    assert losses[-1] < losses[0] - 0.5
    assert [record["step"] for record in trial.log() if record["event"] == "train"] == list(range(1, STEPS + 1))
    sent = [record["bytes_sent"] for record in trial.log() if record["event"] == "train"]
    assert sent == sorted(sent)
    assert len({tree["replica"]["counts"]["rounds"] for tree in trial.trees()}) == 1
    anchors = [tree["replica"]["state"]["anchor"] for tree in trial.trees()]
    assert all(torch.equal(anchors[0], anchor) for anchor in anchors)


@pytest.mark.slow
def test_another_number_of_replicas_takes_a_message_in_flight_back(
    change: tuple[int, int], trial: Trial, flags: tuple[str, ...]
) -> None:
    """Its content is owed again: the mean of all residuals is what it was with it, and nobody absorbs it later."""
    old, new = change
    delayed = (*flags, "--every", "4", "--delay", "4", "--exchange", "sharded", "--keep", "64")
    trial = trial.on(replicas=old, flags=delayed)
    trial.stopped_at(after("exchange.inner_step:InnerStep.take", rank=1, count=11, until=saved(9, old)))
    then = trial.trees()
    assert all("flight" in tree["replica"] for tree in then)
    changed = trial.on(replicas=new)
    changed.stopped_at(after("exchange.inner_step:InnerStep.take", rank=1, count=2, until=()))
    ended = changed.finished()
    assert ended.trees()[0]["replica"]["counts"]["rounds"] == ended.trees()[1]["replica"]["counts"]["rounds"]
    anchors = [tree["replica"]["state"]["anchor"] for tree in ended.trees()]
    assert all(torch.equal(anchors[0], anchor) for anchor in anchors)


@pytest.mark.slow
def test_units_count_what_all_replicas_trained_on(trial: Trial) -> None:
    """Also across a change of their number: 6 steps of four, then 18 of two, each of 2 windows of 16 tokens."""
    trial.on(replicas=4).stopped_at(after("exchange.inner_step:InnerStep.take", rank=1, count=8, until=saved(6, 4)))
    trial.finished()
    units = [record["units"] for record in trial.log() if record["event"] == "train"]
    assert units == [32 * (4 * min(step, 6) + 2 * max(step - 6, 0)) for step in range(1, STEPS + 1)]


@pytest.mark.slow
def test_killed_after_the_number_changed_it_changes_again_alike(trial: Trial, tmp_path: Path) -> None:
    """And what the old replicas left behind disappears in time."""
    trial.on(replicas=4).stopped_at(after("exchange.inner_step:InnerStep.take", rank=3, count=8, until=saved(6, 4)))
    other = trial.on(folder=tmp_path / "other")
    shutil.copytree(trial.folder, other.folder)
    other.finished()
    for moment in (
        after("runs.checkpoint.writer:CheckpointWriter.delete_after", rank=1),
        after("exchange.round:Exchanger._absorb", rank=1, step=8),
        before("runs.checkpoint.format:write", rank=1, match="*step-00000009/*", until=(file(9, 0),)),
        after("exchange.round:Exchanger._absorb", rank=1, step=12, until=saved(9)),
    ):
        trial.stopped_at(moment)
    assert_same(trial.finished(), other)
    assert {mark.replicas for mark in index.complete(trial.checkpoints)} == {2}


@pytest.mark.slow
def test_another_number_of_replicas_without_consensus(
    change: tuple[int, int], trial: Trial, flags: tuple[str, ...]
) -> None:
    """The new replica goes on from the old one of the same rank, modulo their number."""
    old, new = change
    trial = trial.on(replicas=old, flags=(*flags, "--every", "8", "--method", "published"))
    trial.stopped_at(after("exchange.inner_step:InnerStep.take", rank=1, count=11, until=saved(9, old)))
    then = trial.trees()
    changed = trial.on(replicas=new)
    changed.stopped_at(after_step_12(new))
    for rank, tree in enumerate(changed.trees(index.CheckpointId(12, False, new))):
        assert_equal(tree["replica"]["state"], then[rank % old]["replica"]["state"], f"replica {rank}")
        assert_equal(tree["replica"]["signal"], then[rank % old]["replica"]["signal"], f"replica {rank}")
    changed.finished()
    losses = [record["metrics"]["loss"] for record in trial.log() if record["event"] in ("eval", "finish")]
    assert losses[-1] < losses[0]


# -- who trains on what -------------------------------------------------------------------------------------------


class Numbers:
    """Samples that are their own numbers, and a number from the generator for augmentation."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def batch(self, rows: torch.Tensor, generator: torch.Generator | None) -> tuple[list[int], float]:
        return rows.tolist(), float(torch.rand((), generator=generator))


def feeds(sampler: Sampler, replicas: int, batch: int, states: list[dict[str, Any]] | None = None) -> list[ShardedFeed]:
    made = [ShardedFeed(Numbers(sampler.size), sampler, rank, replicas, batch=batch) for rank in range(replicas)]
    for rank, feed in enumerate(made):
        if states:
            feed.load_state_dict(json.loads(json.dumps(states[rank % len(states)])))
    return made


samplers = st.builds(
    lambda size, kinds, seed, skew: Sampler(size, torch.arange(size) * 7 % kinds, seed=seed, skew=skew, name="sampler"),
    st.integers(30, 120), st.integers(1, 9), st.integers(0, 2**40 - 1), st.sampled_from([0.0, 0.5, 1.0]),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(samplers, st.integers(1, 6), st.integers(1, 5))
def test_shards_are_disjoint_complete_and_the_same_again(sampler: Sampler, replicas: int, batch: int) -> None:
    everything = torch.arange(sampler.size)
    shards = sampler.shards(everything, replicas)
    assert torch.equal(torch.cat(shards).sort().values, everything)
    lengths = [len(shard) for shard in shards]
    assert max(lengths) - min(lengths) <= 1
    for epoch in range(2):
        seen = [row for feed in feeds_at(sampler, replicas, batch, epoch) for row in rows_of_epoch(feed)]
        assert len(seen) == len(set(seen))
        assert sampler.size - len(seen) < replicas * (batch + 2)
    again = Sampler(sampler.size, sampler.keys, seed=sampler.seed, skew=sampler.skew, name="sampler")
    assert all(torch.equal(a, b) for a, b in zip(shards, again.shards(everything, replicas), strict=True))
    if sampler.skew == 1:
        keys = [sampler.keys[shard] for shard in shards]
        assert all(a.max() <= b.min() for a, b in pairwise(keys))


def feeds_at(sampler: Sampler, replicas: int, batch: int, epoch: int) -> list[ShardedFeed]:
    start = {"epoch": epoch, "taken": 0, "cuts": [], "replicas": replicas}
    return feeds(sampler, replicas, batch, [start])


def rows_of_epoch(feed: ShardedFeed) -> list[int]:
    found, epoch = [], feed.position.epoch
    while True:
        rows, _ = feed.next()
        if feed.position.epoch != epoch:
            return found
        found += rows


@settings(max_examples=60, deadline=None)
@given(samplers, st.integers(1, 4), st.integers(1, 5), st.integers(0, 60), st.integers(1, 12))
def test_a_feed_goes_on_exactly_from_any_position(
    sampler: Sampler, replicas: int, batch: int, done: int, more: int
) -> None:
    straight = feeds(sampler, replicas, batch)
    for feed in straight:
        for _ in range(done):
            feed.next()
    resumed = feeds(sampler, replicas, batch, [feed.state_dict() for feed in straight])
    for one, other in zip(straight, resumed, strict=True):
        assert [one.next() for _ in range(more)] == [other.next() for _ in range(more)]
        assert one.state_dict() == other.state_dict()


@settings(max_examples=100, deadline=None)
@given(samplers, st.integers(1, 3), st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=2, max_size=5))
def test_an_epoch_shows_each_sample_once_however_often_the_number_changes(
    sampler: Sampler, batch: int, stages: list[tuple[int, int]]
) -> None:
    """Only what does not fill everybody's last batch is left out, as without a change."""
    seen: list[int] = []
    states: list[dict[str, Any]] = []
    for replicas, turns in stages:
        crew = feeds(sampler, replicas, batch, states)
        for _ in range(turns):
            if any(feed.position.taken + batch > feed._length for feed in crew):
                break  # the epoch is over
            seen += [row for feed in crew for row in feed.next()[0]]
        states = [feed.state_dict() for feed in crew]
        assert all(state == states[0] for state in states)
        assert states[0]["epoch"] == 0
    assert len(seen) == len(set(seen))
    rest = [row for feed in crew for row in rows_left(feed)]
    assert not set(rest) & set(seen)
    assert len(rest) == len(set(rest))
    assert len(rest) + len(seen) > sampler.size - len(crew) * (batch + 2)
    # In the next epoch it is as if nothing had changed.
    assert rows_of_epoch(feeds_at(sampler, len(crew), batch, 1)[0]) == rows_of_epoch(next_epoch(crew[0]))


def rows_left(feed: ShardedFeed) -> list[int]:
    rows = feed._order[feed.position.taken : feed._length].tolist()
    return rows[: len(rows) // feed.batch * feed.batch]


def next_epoch(feed: ShardedFeed) -> ShardedFeed:
    while feed.position.epoch == 0:
        feed.next()
    return feeds(feed.sampler, feed.replicas, feed.batch, [{**feed.state_dict(), "taken": 0}])[0]


# -- damaged checkpoints ------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def cut(unbroken: Trial, tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """A run that was cut off when it had two checkpoints."""
    return cut_off(unbroken.on(folder=tmp_path_factory.mktemp("cut") / "run"))


def cut_off(trial: Trial) -> Trial:
    trial.stopped_at(before("tasks.text.task:LanguageTask.loss", step=7, until=saved(6)))
    return trial


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 16
    path.write_bytes(data)


def rewrite(path: Path, **said: Any) -> None:
    """The same tensors under another header."""
    with safetensors.safe_open(str(path), framework="pt") as opened:
        header = json.loads(opened.metadata()["overtone"]) | said
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    safetensors.torch.save_file(tensors, str(path), metadata={"overtone": json.dumps(header)})


def edit(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert data.count(old) == 1
    assert len(old) == len(new)
    path.write_bytes(data.replace(old, new))


DAMAGE = {
    "a flipped bit in the tensors": (lambda p: flip(p, -1000), "damaged (it does not hold what was written)"),
    "a flipped bit in the header": (lambda p: flip(p, 3000), "damaged ("),
    "another number in the header": (
        lambda p: edit(p, rb"[\"taken\", 12]", rb"[\"taken\", 14]"), "damaged ("),
    "truncated": (lambda p: os.truncate(p, p.stat().st_size // 2), "damaged ("),
    "empty": (lambda p: p.write_bytes(b""), "damaged ("),
    "foreign": (lambda p: safetensors.torch.save_file({"a": torch.ones(2)}, str(p)), "not a checkpoint of overtone"),
    "format": (lambda p: rewrite(p, format=2), "format 2; this version of overtone reads 1"),
    "pickle": (lambda p: p.write_bytes(pickle.dumps(Payload(p.parents[2] / "executed"))), "damaged ("),
    "missing": (lambda p: p.unlink(), ""),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_there(
    damage: str, cut: Trial, tmp_path: Path, unbroken: Trial
) -> None:
    trial = cut.on(folder=tmp_path / "run")
    shutil.copytree(cut.folder, trial.folder)
    victim = trial.folder / file(6, 1)
    harm, told = DAMAGE[damage]
    harm(victim)
    files = trial.bytes_of_files()
    if damage == "missing":  # not complete, and therefore none
        trial.stopped_at(before("tasks.text.task:LanguageTask.loss", step=3))
        assert trial.newest().step == 3
        return
    ended = trial.go(resume=True)
    assert not (trial.folder / "executed").exists()
    assert ended.status == 1, ended
    line = one_line(ended.said)
    assert str(victim) in line
    assert told in line
    assert trial.bytes_of_files() == files
    if told.startswith("damaged"):
        assert f"Delete {victim.parent} to go on from the checkpoint before it" in line
    shutil.rmtree(victim.parent)
    trial.stopped_at(after("runs.checkpoint.format:restore"))
    if damage == "truncated":
        assert_same(trial.finished(), unbroken)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (["--width", "48"], "parameter embed.weight: 256x32 float32 in the saved state, 256x48 float32 here"),
        (["--method", "diloco"], "saved state: of another replica: "),
        (["--transform", "dct"], "transform: turning in the saved state, dct here"),
        (["--every", "5"], "every: 4 in the saved state, 5 here"),
        (["--inner", "sgd"], "inner"),
    ],
)
def test_a_checkpoint_of_another_model_or_method_is_refused(
    changed: list[str], told: str, cut: Trial, tmp_path: Path
) -> None:
    trial = cut.on(folder=tmp_path / "run")
    if "--method" in changed:  # diloco has no last messages, and its command line refuses the run's own
        assert trial.flags[-2:] == LAST_MESSAGES
        trial = cut_off(trial.on(flags=trial.flags[:-2]))
    else:
        shutil.copytree(cut.folder, trial.folder)
    files = trial.bytes_of_files()
    ended = trial.go(*changed, resume=True)
    assert ended.status == 1, ended
    assert told in one_line(ended.said)
    assert trial.bytes_of_files() == files
    trial.stopped_at(after("runs.checkpoint.format:restore"))


@pytest.mark.parametrize(
    "header",
    [
        "[]", "{}", "null", "1", '"x"', "{", "", "[" * 100_000, '{"format": 1}', '{"format": 1, "fingerprint": 3}',
        '{"format": 1, "fingerprint": "FP"}', '{"format": 1, "fingerprint": "FP", "tree": {"tensor": "b"}}',
        '{"format": 1, "fingerprint": "FP", "tree": {"map": 3}}', '{"format": 1, "fingerprint": "FP", "tree": {}}',
        '{"format": 1, "fingerprint": "FP", "tree": {"map": [[[], 1]]}}',
    ],
)  # fmt: skip
def test_any_header_is_refused_in_words(header: str, tmp_path: Path) -> None:
    """Whatever a file says, reading it ends in a CheckpointError; a right fingerprint does not make it sound."""
    tensors = {"a": torch.ones(2)}
    with suppress(ValueError, RecursionError):
        parsed = json.loads(header)
        tree = parsed.get("tree") if isinstance(parsed, dict) else None
        header = header.replace("FP", format.stamp(tree, sorted(tensors), tensors.__getitem__))
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file(tensors, str(path), metadata={"overtone": header})
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        format.read(path)


# -- the run's directory ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_directory_belongs_to_one_run_at_a_time(trial: Trial, unbroken: Trial) -> None:
    hold = Moment("overtone.tasks.text.task:LanguageTask.loss", count=5, until=("go",), does="nothing")
    with running(trial.start(moment=hold)) as live:
        wait_until(lambda: (trial.folder / file(3, 0)).exists(), "the first checkpoint")
        for contender, resume, status, told in (
            (trial, True, 1, f"run {trial.folder}: in use by a live run (process "),
            (trial.on(replicas=1), True, 1, f"run {trial.folder}: in use by a live run (process "),
            (trial, False, 2, f"run {trial.folder}: holds a run already; --resume {trial.folder} goes on with it"),
        ):
            ended = contender.go(resume=resume)
            assert ended.status == status, ended
            assert told in one_line(ended.said)
        (trial.folder / "go").touch()
        ended = live.end()
        assert ended.status == 0, ended
    (trial.folder / "go").unlink()
    assert_same(trial, unbroken)
    assert trial.go(resume=True).status == 0


@pytest.mark.slow
def test_a_directory_is_free_again_when_its_run_was_killed(trial: Trial, unbroken: Trial) -> None:
    hold = Moment("overtone.tasks.text.task:LanguageTask.loss", count=5, until=("never",), does="nothing")
    with running(trial.start(moment=hold)) as live:
        wait_until(lambda: all((trial.folder / path).exists() for path in saved(3)), "the first checkpoint")
        pid = int((trial.folder / "lock").read_text().split()[0])
        ended = trial.go(resume=True)
        assert f"in use by a live run (process {pid})" in one_line(ended.said)
        live.kill()
        live.end()
    assert_same(trial.finished(), unbroken)


@pytest.mark.slow
def test_no_run_to_resume_and_a_run_not_to_overwrite(cut: Trial, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "none"):
        ended = cut.on(folder=folder).go(resume=True)
        assert ended.status == 2
        assert f"resume {folder}: no run there" in one_line(ended.said)
    assert not (tmp_path / "none").exists()
    assert not list((tmp_path / "empty").iterdir())
    files = cut.bytes_of_files()
    ended = cut.go()
    assert ended.status == 2
    assert f"run {cut.folder}: holds a run already" in one_line(ended.said)
    assert cut.bytes_of_files() == files


# -- a full disk --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_checkpoint_that_does_not_fit_on_the_disk(cut: Trial, unbroken: Trial, tmp_path: Path) -> None:
    """The kernel refuses to let a file grow: the run ends, what was saved before stays, and there is a way on."""
    trial = cut.on(folder=tmp_path / "run")
    shutil.copytree(cut.folder, trial.folder)
    files = trial.bytes_of_files()
    ended = trial.go(resume=True, file_limit=len(files[file(6, 0)]) // 2)
    assert ended.status == 1, ended
    line = one_line(ended.said)
    assert "checkpoints/step-00000009/replica-" in line
    assert "cannot be written (" in line
    assert "free some space, then --resume. Earlier checkpoints are intact" in line
    assert trial.bytes_of_files() == files
    assert_same(trial.finished(), unbroken)


@pytest.mark.slow
def test_a_first_checkpoint_that_does_not_fit_on_the_disk(trial: Trial) -> None:
    ended = trial.go(file_limit=100_000)
    assert ended.status == 1, ended
    assert "checkpoints/step-00000003/replica-" in one_line(ended.said)
    assert not trial.bytes_of_files()
