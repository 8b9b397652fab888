"""Whole runs of `overtone train` as processes: started, stopped at a chosen moment, started again, compared."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from overtone.runs import log as runlog
from overtone.runs.checkpoint import format, index

SUPPORT = Path(__file__).parent / "kill"
PATIENCE = 120.0  # seconds; a run that takes longer hangs

# What a never-stopped run and a stopped one must have in common, by event; the rest are times.
KEPT = {
    "train": ("loss", "lr", "units", "bytes_sent"),
    "eval": ("metrics", "losses", "bytes_sent", "units"),
    "round": ("index", "local_steps", "bytes_sent", "bytes_received", "drift_norm", "residual_norm",
              "anchor_fingerprint", "left_out"),
    "finish": ("metrics", "losses", "bytes_sent", "units", "rounds", "rounds_finish", "anchor_fingerprint", "sample"),
}  # fmt: skip


@dataclass(frozen=True)
class Moment:
    """When to do what to a run; tests/kill/sitecustomize.py tells what the fields mean."""

    where: str
    edge: str = "before"
    rank: int = 0
    count: int = 1
    step: int | None = None
    match: str = "*"
    until: tuple[str, ...] = ()  # files of the run's folder
    does: str = "kill all"
    fresh: bool = False  # no checkpoint can exist by then

    def environment(self, folder: Path, note: Path) -> dict[str, str]:
        said = {**asdict(self), "note": str(note), "until": [str(folder / path) for path in self.until]}
        return {"OVERTONE_MOMENT": json.dumps(said)}


def before(where: str, **fields: Any) -> Moment:
    return Moment(f"overtone.{where}", "before", **fields)


def after(where: str, **fields: Any) -> Moment:
    return Moment(f"overtone.{where}", "after", **fields)


@dataclass(frozen=True)
class Ended:
    """How a run went: the launcher's exit status (negative: the signal that killed it) and what everybody said."""

    status: int
    said: str


@dataclass
class Live:
    """A run that was started. Its output ends when its last process does."""

    pid: int
    output: int
    wait: Any
    said: bytes = b""

    def end(self, patience: float = PATIENCE) -> Ended:
        """Wait for the launcher and for every process that it started."""
        end = time.monotonic() + patience
        try:
            while True:
                ready, *_ = select.select([self.output], [], [], max(0.0, end - time.monotonic()))
                if not ready:
                    raise TimeoutError(f"processes of the run are left after {patience} s; said: {self.said.decode()}")
                if not (some := os.read(self.output, 1 << 16)):
                    break
                self.said += some
        finally:
            self.kill()
            os.close(self.output)
            self.output = -1
        return Ended(self.wait(), self.said.decode())

    def read(self) -> bytes:
        """What it has said so far."""
        while select.select([self.output], [], [], 0)[0] and (some := os.read(self.output, 1 << 16)):
            self.said += some
        return self.said

    def kill(self) -> None:
        """Whatever is left of it: every process whose output this is."""
        with suppress(OSError):  # closed: it has ended
            for pid in holders(os.fstat(self.output).st_ino):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def holders(inode: int) -> list[int]:
    """The processes with this pipe as standard output."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.readlink(process / "fd" / "1") == f"pipe:[{inode}]":
                found.append(int(process.name))
    return found


class Cold:
    """Starts runs as a user does."""

    command = (sys.executable, "-m", "overtone")

    def start(
        self, args: Sequence[str], env: Mapping[str, str], *, cwd: Path, replicas: int = 2, file_limit: int = 0
    ) -> Live:
        assert not file_limit
        assert replicas > 1
        read, write = os.pipe()
        process = subprocess.Popen(
            [*self.command, *args],
            stdout=write,
            stderr=write,
            env={**surroundings(), **env, "PYTHONPATH": str(SUPPORT)},
            cwd=cwd,
            start_new_session=True,
        )
        os.close(write)
        return Live(process.pid, read, process.wait)


class Torchrun(Cold):
    """Starts runs in a world that an outer torchrun makes."""

    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "overtone")


class Warm:
    """Starts runs from a process that has imported everything; see tests/kill/warm.py."""

    def __init__(self, *modules: str) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel = mine
        self.ended: dict[int, int] = {}
        self.process = subprocess.Popen(
            [sys.executable, str(SUPPORT / "warm.py"), str(theirs.fileno()), *modules],
            pass_fds=[theirs.fileno()],
            env=surroundings(),
        )
        theirs.close()
        self.channel.settimeout(PATIENCE)
        self.channel.recv(1 << 16)

    def start(
        self, args: Sequence[str], env: Mapping[str, str], *, cwd: Path, replicas: int = 2, file_limit: int = 0
    ) -> Live:
        read, write = os.pipe()
        request = {"args": list(args), "env": dict(env), "cwd": str(cwd), "replicas": replicas if replicas > 1 else 0,
                   "file_limit": file_limit}  # fmt: skip
        socket.send_fds(self.channel, [json.dumps(request).encode()], [write])
        os.close(write)
        pid = self._hear("started")
        return Live(pid, read, lambda: self._status(pid))

    def _hear(self, what: str) -> int:
        while True:
            heard = json.loads(self.channel.recv(1 << 16))
            if "pid" in heard:
                self.ended[heard["pid"]] = heard["status"]
            if what in heard:
                return int(heard[what])

    def _status(self, pid: int) -> int:
        while pid not in self.ended:
            self._hear("pid")
        return self.ended.pop(pid)

    def close(self) -> None:
        self.channel.close()
        self.process.wait(PATIENCE)


def surroundings() -> dict[str, str]:
    """One thread each, and no world that the tests themselves might be part of."""
    mine = {key: value for key, value in os.environ.items() if not key.startswith(("TORCHELASTIC", "OVERTONE"))}
    return {**mine, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Trial:
    """A run that is started, stopped and started again in one folder."""

    starter: Cold | Warm
    folder: Path
    flags: tuple[str, ...]
    replicas: int = 2
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def resumable(self) -> bool:
        return bool(index.complete(self.checkpoints))

    def on(self, **changes: Any) -> Trial:
        return replace(self, **changes)

    def start(self, *more: str, resume: bool = False, moment: Moment | None = None, file_limit: int = 0) -> Live:
        trust = ["--trust-task"] if any(flag.endswith(".py") for flag in self.flags) else []
        own = ["--resume", str(self.folder), *trust] if resume else [*self.flags, "--out", str(self.folder)]
        env = {**self.env, **(moment.environment(self.folder, self.note) if moment else {})}
        return self.starter.start(
            ["train", *own, "--replicas", str(self.replicas), *more],
            env,
            cwd=self.folder.parent,
            replicas=self.replicas,
            file_limit=file_limit,
        )

    def go(self, *more: str, resume: bool = False, moment: Moment | None = None, file_limit: int = 0) -> Ended:
        return self.start(*more, resume=resume, moment=moment, file_limit=file_limit).end()

    @property
    def note(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.note")

    def stopped_at(self, moment: Moment, *more: str, file_limit: int = 0) -> Ended:
        """Start or go on, as a user would after a crash, until the moment; it must have come."""
        self.note.unlink(missing_ok=True)
        ended = self.go(*more, resume=self.goes_on(), moment=moment, file_limit=file_limit)
        assert self.note.exists(), f"{moment}: never came; {ended}"
        if moment.does == "kill all":
            assert ended.status == -signal.SIGKILL, (moment, ended)
            assert "Traceback" not in ended.said, (moment, ended)
        return ended

    def goes_on(self) -> bool:
        """There is a run to go on with, if only from its beginning."""
        return (self.folder / runlog.NAME).exists()

    def finished(self, *more: str) -> Trial:
        """Go on to the end."""
        ended = self.go(*more, resume=self.goes_on())
        assert ended.status == 0, ended
        assert "finished after" in ended.said
        return self

    def log(self) -> list[dict[str, Any]]:
        """What the log tells of the training, without times."""
        return [
            {"event": record["event"], "step": record["step"], **{k: record.get(k) for k in KEPT[record["event"]]}}
            for record in runlog.read(self.folder)
            if record["event"] in KEPT
        ]

    def raw(self, event: str) -> list[dict[str, Any]]:
        """Every line of the log of this event, those of lost steps too."""
        lines = map(json.loads, (self.folder / runlog.NAME).read_text().splitlines())
        return [line for line in lines if line["event"] == event]

    def newest(self) -> index.CheckpointId:
        return index.complete(self.checkpoints)[-1]

    def trees(self, mark: index.CheckpointId | None = None) -> list[dict[str, Any]]:
        """Everything of every replica in a checkpoint, without times and the upkeep's bytes."""
        mark = mark or self.newest()
        files = [index.file_of(self.checkpoints, mark, rank) for rank in range(mark.replicas)]
        found = [format.read(file) for file in files]
        for tree in found:
            del tree["accounts"]["seconds"]
            ledger = tree["replica"]["ledger"]
            tree["replica"]["ledger"] = {phase: ledger[phase][:2] for phase in ("rounds", "finish")}
        return found

    def bytes_of_files(self) -> dict[str, bytes]:
        return {str(p.relative_to(self.folder)): p.read_bytes() for p in self.checkpoints.rglob("*") if p.is_file()}


def assert_same(mine: Trial, theirs: Trial) -> None:
    """To the bit: the log's numbers, and all that the replicas hold in the end. Nothing is left over, either."""
    for ours, wanted in zip(mine.log(), theirs.log(), strict=True):
        assert ours == wanted, f"{ours} is not {wanted}"
    files = sorted(mine.bytes_of_files())
    assert files == sorted(theirs.bytes_of_files()), files
    for mark in index.complete(theirs.checkpoints):
        for rank, (ours, wanted) in enumerate(zip(mine.trees(mark), theirs.trees(mark), strict=True)):
            assert_equal(ours, wanted, f"step {mark.step}, replica {rank}")


def assert_equal(mine: Any, theirs: Any, where: str) -> None:
    assert type(mine) is type(theirs), where
    if isinstance(mine, torch.Tensor):
        assert mine.dtype == theirs.dtype, where
        assert torch.equal(mine, theirs), where
    elif isinstance(mine, dict):
        assert mine.keys() == theirs.keys(), where
        for key in mine:
            assert_equal(mine[key], theirs[key], f"{where}.{key}")
    elif isinstance(mine, list | tuple):
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert_equal(a, b, f"{where}.{i}")
    else:
        assert mine == theirs, where


def wait_until(condition: Any, what: str, patience: float = PATIENCE) -> None:
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end, f"waited {patience} s for {what}"
        time.sleep(0.01)


@contextmanager
def running(live: Live) -> Iterator[Live]:
    """Killed at the end, if nothing else has ended it."""
    try:
        yield live
    finally:
        live.kill()
