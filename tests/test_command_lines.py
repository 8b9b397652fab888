"""What is typed wrong ends in one line, two at most, and status 2: rules times values, and the odd ones.

The command lines run in forks of one process that has imported everything (tests/forked.py); a few are started cold,
as a user does.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

pytest.importorskip("rich")
pytest.importorskip("tyro")

import overtone
from forked import Forks, shared
from overtone.bench import options as bench
from overtone.cli import demo, plan, prune, replay
from overtone.report.comparison import Comparison
from overtone.runs import config
from overtone.runs.follow import Following
from overtone.tasks import Image, Language, TaskOptions
from running import surroundings

HUGE = str(10**30)
LONG = "a" * 300


@dataclass(frozen=True)
class Line:
    """A command line, and what is said of it."""

    words: tuple[str, ...]
    told: tuple[str, ...]  # each of them
    status: int = 2
    env: tuple[tuple[str, str], ...] = ()


def line(words: str, *told: str, status: int = 2, **env: str) -> Line:
    return Line(tuple(words.split()), told, status, tuple(env.items()))


# -- rules times values ----------------------------------------------------------------------------------------------

MAY_BE_ZERO = {"delay", 
    "warmup", "weight_decay", "latency", "step_seconds", "port", "seed", "skew", "crop", "momentum", "decay", "carry",
    "drain", "spectrum", "first_rounds", "until_round", "round",
}  # fmt: skip
MAY_BE_ENDLESS = {"clip"}
GROUPS: dict[tuple[str, ...], tuple[type, ...]] = {  # whose numbers are flags of which command
    ("simulate",): (config.Simulation, config.MethodChoice, config.Training, config.Network),
    ("simulate", "--seed=0"): (TaskOptions, Language, Image),
    ("train", "--replicas=1"): (config.Run, config.Saving),
    ("compare",): (Comparison,),
    ("demo",): (demo.Demo,),
    ("plan",): (plan.Plan,),
    ("follow", "STORE"): (Following,),
    ("replay", "STORE", "--verify"): (replay.Replay,),
    ("prune", "STORE", "--keep-rounds=1"): (prune.Prune,),
    ("bench", "codec"): (bench.CodecBench,),
    ("bench", "train"): (bench.TrainBench,),
}  # fmt: skip


def numbers(group: type) -> Iterator[tuple[str, type]]:
    """The fields of a dataclass that are numbers, and of which kind."""
    hints = get_type_hints(group)
    for field in dataclasses.fields(group):
        kinds = get_args(hints[field.name]) or (hints[field.name],)
        if Ellipsis in kinds:
            continue  # several numbers
        for kind in (int, float):
            if kind in kinds:
                yield field.name, kind


def wrong(name: str, kind: type) -> Iterator[tuple[str, str]]:
    """Values that no number of this name may have, and what is said of each."""
    flag = f"--{name.replace('_', '-')}"
    yield "-1", f"{name}=-1"
    yield HUGE, f"{name}=1" if kind is int else f"{name}=1e+30"
    if name not in MAY_BE_ZERO:
        yield "0", f"{name}=0"
    yield "many", flag
    for value in ("nan", "1e300", "inf"):
        if kind is int:
            yield value, flag
            return  # one word is like another
        if not (value == "inf" and name in MAY_BE_ENDLESS):
            yield value, f"{name}={float(value)}"


def all_wrong_numbers() -> Iterator[Any]:
    for command, groups in GROUPS.items():
        for group in groups:
            for name, kind in numbers(group):
                for value, told in wrong(name, kind):
                    words = (*command, f"--{name.replace('_', '-')}={value}")
                    yield pytest.param(Line(words, (told,)), id=" ".join((*command[:2], name, value or "nothing")))


NUMBERS = list(all_wrong_numbers())


# -- the odd ones ----------------------------------------------------------------------------------------------------

ODD = [
    line("", "no command; give one of train, simulate"),
    line("nothing", "nothing: unknown command; give one of train, simulate"),
    line("simulate --stepz 3", "--stepz", "did you mean --steps?"),
    line("train --stepz=3", "--stepz"),
    line("simulate extra", "extra"),
    line("simulate --steps", "--steps", "Missing value"),
    line("simulate --inner adam", "'adam'", "'adamw', 'sgd', 'muon'"),
    line("train --device gpu", "'gpu'", "cuda"),
    line("train --compile=3", "3"),
    line("export run", "export", "PATH"),
    line("export", "export", "PATH"),
    line("report", "runs: give at least one"),
    line("bench", "bench: not a whole command; give one of codec, train"),
    line("bench foo", "bench foo: unknown command; give one of codec, train"),
    line("--tyro-print-completion foo", "foo"),
    line("compare --seeds a b", "--seeds", "'a'"),
    line("compare --seeds -1", "seeds -1: the seed"),
    line("compare --seeds 1 1", "seeds 1 1: one of them is given twice"),
    line("compare --methods", "methods: none given; give at least one"),
    line("compare --methods diloco:keep=3", "keep=3: diloco has no such option"),
    line("compare --methods nope", "method 'nope': unknown"),
    line("compare --methods decoupled:keep=[[[", "keep"),
    line("compare --methods decoupled:keep", "key=value"),
    line("compare --data nofile", "data nofile: no such file or folder"),
    line("compare --task nofile.py", "task nofile.py: no such file"),
    line("compare --methods decoupled:data=nofile", "data nofile: no such file or folder"),
    line("compare --processes --bandwidth 3", "processes: real replicas"),
    line("compare --processes --up 3", "processes: real replicas"),
    line("compare --processes --methods decoupled:exchange=store", "have no store; leave out --processes"),
    line("compare --methods decoupled:exchange=store,drain=1", "drain=1: replicas of a store do not end together"),
    line("simulate --method dilocoo", "method 'dilocoo': unknown; there are alone, ddp"),
    line("simulate --method diloco --keep 8", "keep=8: diloco has no such option"),
    line("simulate --bits 3", "bits=3"),
    line("simulate --transform fft", "transform='fft'"),
    line("simulate --exchange bucket", "exchange='bucket': choose one of auto, gathered, sharded, store"),
    line("simulate --exchange store --budget 1MB", "budget=1000000 bytes a round: not with a store yet"),
    line("simulate --lr 0", "lr=0.0: the outer learning rate"),
    line("simulate --outer-lr 0", "lr=0.0: the outer learning rate"),  # its former name
    line("simulate --momentum 1", "momentum=1.0: must lie in [0, 1)"),
    line("simulate --every 0", "every=0: local steps between rounds"),
    line("simulate --drain 1000000000", "drain=1000000000: last messages"),
    line("simulate --inner-lr 1e38", "inner_lr=1e+38"),
    line("simulate --bandwidth -1", "bandwidth=-1.0: Mbit/s"),
    line("simulate --weight-decay nan", "weight_decay=nan"),
    line("simulate --heads 5", "heads=5: must divide the width, 96"),
    line("simulate --width 65536 --heads 1", "parameters", "this machine has"),
    line("simulate --context 16777216 --data TEXT", "needs 16777217"),
    line("simulate --replicas 60000 --data TEXT", "fewer than one batch"),
    line("simulate --batch 1000000 --data TEXT", "fewer than one batch of 1000000"),
    line("simulate --task image --side 100000", "side=100000: pixels of an image's side, from 1 to 16384"),
    line("simulate --task image --side 16000", "this machine has"),
    line("simulate --task image --crop 9", "crop=9: must be less than the images' side"),
    line("simulate --task imag", "task 'imag': unknown; there are language, image"),
    line("simulate --task no/such.py", "task no/such.py: no such file"),
    line("simulate --model gpt2-1n", "gpt2-1m"),
    line("simulate --model BINARY", "not a config that transformers knows"),
    line("simulate --tokenizer BINARY --model gpt2-1m", "tokenizer"),
    line("simulate --tokenizer nofile --model gpt2-1m", "tokenizer nofile: no such file"),
    line("simulate --data no/such/file", "data no/such/file: no such file or folder"),
    line("simulate --data /dev/zero", "data /dev/zero: neither a file nor a folder"),
    line("simulate --task image --data /dev/zero", "data /dev/zero: neither a file nor a folder"),
    line("simulate --data PIPE", "neither a file nor a folder"),
    line("simulate --data SPARSE", "this machine has"),
    line("simulate --data EMPTY", "0 bytes; give a text"),
    line(f"simulate --data {LONG}", "File name too long"),
    line(f"simulate --task {LONG}.py", "File name too long"),
    line(f"simulate --model {LONG}", "File name too long"),
    line(f"simulate --json {LONG}/x", "File name too long"),
    line("simulate --json no/such/x.json", "there is no directory no/such"),
    line("simulate --json /dev", "is a directory"),
    line(f"simulate --out {LONG}", "File name too long"),
    line("simulate --out TEXT --data TEXT", "choose an --out that can be written"),
    line(f"train --out {LONG}", "File name too long"),
    line(f"train --replicas 1 --out {LONG}", "File name too long"),
    line(f"train --config {LONG}", "File name too long"),
    line(f"train --resume {LONG}", "File name too long"),
    line(f"export {LONG} model", "File name too long"),
    line(f"export RUN {LONG}", "File name too long"),
    line(f"report {LONG}", "File name too long"),
    line(f"report RUN --out {LONG}.html", "File name too long"),
    line("report RUN --out x/y.html", "there is no directory x"),
    line("report nofile", "nofile: no such file or directory"),
    line("report BINARY", "the log has no beginning"),
    line("report DEEPLOG", "the log has no beginning"),
    line("report /dev/zero", "/dev/zero"),
    line("report EMPTY", "the log has no beginning"),
    line("report FOREIGN", "has no time, which format 5 of the run log requires; make the run again"),
    line("export RUN RUN", "exists already"),
    line("export nofile model", "export nofile: no run there"),
    line("train --resume nofile", "resume nofile: no run there"),
    line("train --resume RUN --out x", "a resumed run stays where it is"),
    line("train --recipe nope", "recipe 'nope': unknown; there are paper-language"),
    line("train --config nofile", "config nofile: No such file"),
    line("train --config BINARY", "is not UTF-8; give a TOML file"),
    line("train --config /dev/zero", "config /dev/zero: not a file"),
    line("train --config /dev", "config /dev: not a file"),
    line("train --config DEEP", "nested too deeply"),
    line("train --config TEXT", "not TOML"),
    line("train --config DIGITS", "not TOML"),
    line("train --config HUGEINT", "inner_lr=inf"),
    line("train --config EMPTYPATH", 'out = "": empty'),
    line("train --config EMPTYDATA", "data='': empty"),
    line("train --config NUL", "holds a NUL"),
    line("train --data nofile", "data nofile: no such file or folder"),
    line("train --task nofile.py", "task nofile.py: no such file"),
    line("train --threads 1000000", "threads=1000000: CPU threads of a replica, from 1 to 1024"),
    line("train --width 1000000000", "width=1000000000: the width of the transformer, from 1 to 65536"),
    line("train --replicas 60000", "replicas=60000: processes to start on this machine"),
    line("train --replicas 1 --device cuda --data TEXT", "device=cuda: replica 0"),
    line("train --replicas 1", "OVERTONE_CONFIG", "not TOML", OVERTONE_CONFIG="junk"),
    line("train --replicas 1", "OVERTONE_CONFIG", "nope: unknown", OVERTONE_CONFIG="nope = 3"),
    line("train --replicas 1 --exchange store --data TEXT", "exchange='store'", "overtone train --store"),
    line("train --replicas 1", "WORLD_SIZE='junk'", WORLD_SIZE="junk"),
    line("train --replicas 1", "RANK='-1'", RANK="-1"),
    line("train --replicas 1", "LOCAL_RANK='1e9'", LOCAL_RANK="1e9"),
    line("train --replicas 1", "LOCAL_WORLD_SIZE='x'", LOCAL_WORLD_SIZE="x"),
    line("bench train --replicas 60000", "replicas=60000: processes to start on this machine"),
    line("bench codec --width 100000000", "width=100000000"),
    line("bench codec --width 65536", "this machine has"),
    line("bench codec --bits 3", "bits=3"),
    line("bench codec --json nowhere/x.json", "json nowhere/x.json: there is no directory"),
    line("plan --method nope", "method 'nope': unknown"),
    line("follow", "STR"),
    line("follow nofolder", "store nofolder: cannot be opened", "no such folder", status=1),
    line("follow RUN", "store RUN: no run lives there", status=1),
    line("follow ftp://x/y", "cannot be opened", "give a folder, s3://", status=1),
    line("follow RUN --device gpu", "'gpu'", "cuda"),
    line("replay RUN", "replay: give either --export FOLDER or --verify"),
    line("replay RUN --verify", "store RUN: no run lives there", status=1),
    line("replay RUN --verify --json no/such/x.json", "there is no directory no/such"),
    line("replay RUN --verify --round 3", "round=3: --verify checks all rounds"),
    line("replay RUN --export RUN", "exists already"),
    line("prune RUN", "--keep-rounds"),
    line("prune RUN --keep-rounds 3", "store RUN: no run lives there", status=1),
    line("plan --model nope", "model 'nope'"),
    Line(("simulate", "--data", "\udcff\udcfe.txt"), ("--data \\udcff\\udcfe.txt: not UTF-8",)),
    Line(("report", "RUN", "--title", "\udcff"), ("not UTF-8",)),
    Line(("simulate", "--data", "no\x1b[31m\x7f"), ("data no\\x1b[31m\\x7f: no such file",)),
    Line(("simulate", "--data", "two\nlines"), ("no such file or folder",)),
    Line(("simulate", "--data", ""), ("--data '': empty",)),
    Line(("simulate", "--out", ""), ("--out '': empty",)),
    Line(("",), ("empty",)),
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the command lines name in capitals."""
    root = tmp_path_factory.mktemp("lines")
    (root / "TEXT").write_text("the quick brown fox jumps over the lazy dog; " * 1000)
    (root / "EMPTY").touch()
    (root / "BINARY").write_bytes(b"\x7fELF\xff\xfe\x00" * 100)
    with (root / "SPARSE").open("wb") as sparse:
        sparse.truncate(1 << 43)
    os.mkfifo(root / "PIPE")
    (root / "DEEP").write_text("steps = " + "[" * 5000)
    (root / "DEEPLOG").write_text("[" * 200_000 + "\n" + "\xff\n")
    (root / "FOREIGN").write_text(
        '{"event": "start", "step": 0, "config": {}, "numbers": {}, "data": {}, "simulated": true}\n'
    )
    (root / "DIGITS").write_text("steps = " + "9" * 5000)
    (root / "HUGEINT").write_text("inner_lr = 1" + "0" * 400)
    (root / "EMPTYPATH").write_text('out = ""')
    (root / "EMPTYDATA").write_text('data = ""')
    (root / "NUL").write_text(r'data = "a\u0000b"')
    (root / "RUN").mkdir()
    (root / "RUN" / "config.toml").write_text("steps = 3\n")
    (root / "RUN" / "run.jsonl").write_text("")
    return root


@pytest.fixture(scope="module")
def forks() -> Forks:
    return shared()


def check(asked: Line, status: int, out: str, said: str) -> None:
    assert status == asked.status, (asked, status, said)
    assert not out
    assert "Traceback" not in said
    assert "__tyro" not in said
    assert 1 <= len(said.splitlines()) <= 2, said
    assert said.startswith("overtone: ")
    assert all(c == "\n" or c.isprintable() for c in said), said
    for words in asked.told:
        assert words in said, (asked, said)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [*NUMBERS, *(pytest.param(one, id=f"odd {i}") for i, one in enumerate(ODD))])
def test_one_line(asked: Line, forks: Forks, place: Path) -> None:
    if {"image", "gpt2-1m", "BINARY"} & set(asked.words):
        pytest.importorskip("transformers")
    check(asked, *forks.run(asked.words, dict(asked.env), place))


def test_there_are_enough_of_them() -> None:
    assert len(NUMBERS) + len(ODD) >= 200
    assert len({tuple(param.values[0].words) for param in NUMBERS}) == len(NUMBERS)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [pytest.param(one, id=" ".join(one.words)[:40]) for one in ODD[2::30]])
def test_started_as_a_user_does(asked: Line, place: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "overtone", *asked.words],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=place,
        env={**surroundings(), **dict(asked.env)},
    )
    check(asked, done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("flag", ["--version", "--help"])
def test_what_is_asked_for_is_no_mistake(flag: str, forks: Forks, place: Path) -> None:
    status, out, err = forks.run([flag], {}, place)
    assert (status, err) == (0, "")
    assert out == f"overtone {overtone.__version__}\n" if flag == "--version" else "simulate" in out
