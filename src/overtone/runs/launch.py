"""Starts the replicas of a run on this machine, stops them, and speaks for those that fail.

Not torch's elastic launcher: that opens a store on all interfaces, without authentication, and unpickles what lies in
it. Replicas that start here meet in a file that only this user can open, and talk on the loopback interface.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import Popen
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from overtone.common import machine_errors
from overtone.errors import OvertoneError, RelayedError, ReplicaError, printable
from overtone.runs import directory, toml
from overtone.runs.config import Run
from overtone.runs.stop_signals import STOPPING, heeded, listening
from overtone.world.join import MEETING, connect, whole_number

T = TypeVar("T")

SPAWNED = "OVERTONE_SPAWNED"  # for replicas that this module started: its process
WORDS = "OVERTONE_WORDS"  # … and the file for what they die of
PATIENCE = 600.0  # seconds that replicas have to save before they are killed
GRACE = 5.0  # seconds in which the others may tell why they end, after one has failed
LOOK = 0.05  # seconds between two looks at the replicas
# A replica imports for seconds before it can hear a signal: a Ctrl-C meanwhile shall end it without a traceback.
START = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); sys.argv.pop(0); "
    "from overtone.cli import main; main()"
)
LOOPBACK = {"linux": "lo", "darwin": "lo0"}


def is_replica() -> bool:
    """This process is one of a world already: ours, or that of an outer torchrun."""
    return is_ours() or "TORCHELASTIC_RUN_ID" in os.environ


def is_ours() -> bool:
    return SPAWNED in os.environ


def train(config: Run, *, resume: bool) -> None:
    """`overtone train`: as one replica of a world that exists, alone, or by starting all replicas here."""
    if is_replica() or config.replicas == 1:
        one_replica(config, resume=resume)
    else:
        all_replicas(config, resume=resume)


def all_replicas(config: Run, *, resume: bool) -> None:
    """Start them, each with the same configuration; refuse early what can be seen to fail."""
    config.choice.build()
    folder = config.out or directory.fresh(config.choice.method)
    if not resume:
        directory.refuse_used(folder)
    directory.refuse_busy(folder)
    os.environ[toml.TOLD] = toml.toml(replace(config, out=folder))
    arguments = ["train", "--resume", str(folder)] if resume else ["train"]
    threads = threads_of(config, config.replicas)
    try:
        spawn(arguments, replicas=config.replicas, threads=threads)
    finally:
        del os.environ[toml.TOLD]


def threads_of(config: Run, replicas: int) -> int:
    return config.threads or max(1, (os.cpu_count() or 1) // 2 // replicas)


def one_replica(config: Run, *, resume: bool) -> None:
    """Be one of them."""
    from overtone.runs.open_run import open_run  # the launcher itself has no need of it

    if config.threads or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_of(config, whole_number("LOCAL_WORLD_SIZE", 1)))

    def work() -> None:
        transport = connect(config.timeout)  # first of all, so that what one replica cannot do is told to the others
        try:
            warn_of_open_rendezvous()
            open_run(config, transport, resume=resume, stop=stop).run()
        except Exception as error:
            transport.leave(words_of(error))
            raise

    # A launcher passes signals on, and may not be the only one who sends them; it ends everything by other means.
    with listening(repeats=not is_ours()) as stop:
        in_world(work)
        if is_replica():
            _end(0)  # in here, where a late signal finds a handler that knows there is nothing left to stop


def in_world(work: Callable[[], T]) -> T:
    """One replica's work. Its failure is left for the launcher to tell, or told with the rank's name."""
    _die_with_parent()
    try:
        with machine_errors.in_words():
            result = work()
    except Exception as error:
        if not is_replica():
            raise
        confess(error)
        if not isinstance(error, OvertoneError):
            traceback.print_exc()
        elif not is_ours():
            say(_of_rank(os.environ["RANK"], str(error)))
        _end(error.status if isinstance(error, OvertoneError) else 1)
    except SystemExit as stop:
        if is_replica():
            _leave_note(saved=getattr(stop, "saved", False))
            _end(stop.code if isinstance(stop.code, int) else 1)
        raise
    return result


def _end(status: int) -> NoReturn:
    """At once. An ordinary exit waits for, or is aborted by, the threads of a process group whose peers are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def warn_of_open_rendezvous() -> None:
    """One line, on each host, if the launcher around this process unpickles what strangers may write."""
    if os.environ.get("LOCAL_RANK") == "0" and _rendezvous_is_open():
        say(
            "warning: torchrun's c10d rendezvous listens on all interfaces of this host and unpickles what "
            "anybody writes there: whoever reaches its port runs code as you. Use the static form (--nnodes N "
            "--node-rank I --master-addr HOST --master-port P), on one host `overtone train --replicas K`; SECURITY.md"
        )


def _rendezvous_is_open() -> bool:
    """The launcher around this process is torchrun with a rendezvous that unpickles. Nothing in the environment tells:
    its command line does, and the variables that stand for its flags."""
    if is_ours() or not dist.is_torchelastic_launched():
        return False
    words = [
        *_command_of(os.getppid()),
        *(f"--{name[4:]}={value}" for name, value in os.environ.items() if name.startswith("PET_")),
    ]
    flags = " ".join(words).lower().replace("_", "-")
    unpickles = re.search(r"--rdzv-b\S*[ =](c10d|etcd-v2)\b", flags) or "--standalone" in flags
    return bool(unpickles) and "store-type=file" not in flags


def _command_of(process: int) -> list[str]:
    """Where there is no /proc, or it is not ours to read, nothing is known."""
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return []


# -- the launcher ------------------------------------------------------------------------------------------------------


@dataclass
class Started:
    """A replica that was started here, and how it ended."""

    rank: int
    process: Popen[bytes]
    words: Path
    ended: float = 0.0
    killed: bool = False  # by this launcher

    @property
    def status(self) -> int | None:
        return self.process.returncode

    @property
    def stopped(self) -> bool:
        """It had nothing against it: it was asked by a signal."""
        return self.status in {128 + number for number in STOPPING} | {-number for number in STOPPING}

    @property
    def left(self) -> bool:
        """It was stopped before there was anything to save: the others cannot go on, and wait for it."""
        return self.stopped and not self.said().get("saved", False)

    @property
    def code(self) -> int:
        """The exit status that a shell gives to a signal, however the replica ended by it."""
        status = self.status or 0
        return status if status > 0 else 128 - status

    @property
    def failed(self) -> bool:
        return self.status not in (None, 0) and not self.stopped

    def said(self) -> dict[str, Any]:
        """What `confess` left."""
        with suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads(self.words.read_text())
            return found
        return {}

    @property
    def only_heard(self) -> bool:
        """It failed since another one did, or left."""
        return not self.killed and bool(self.said().get("told"))

    def end(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.killed = True
            self.end(signal.SIGKILL)


@dataclass
class Wanted:
    """The signals that this launcher was sent."""

    first: signal.Signals | None = None
    again: bool = False
    fresh: list[signal.Signals] = field(default_factory=list)  # not yet passed on

    def hear(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.again = self.first is not None
        self.first = self.first or signal.Signals(number)
        self.fresh.append(signal.Signals(number))


def spawn(arguments: Sequence[str], *, replicas: int, threads: int) -> None:
    """``python -m overtone …`` as each of K replicas, until all are done. What one of them died of is raised here."""
    started: list[Started] = []
    with tempfile.TemporaryDirectory(prefix="overtone-") as place, _hearing() as wanted:
        try:
            started.extend(_start(arguments, rank, replicas, threads, Path(place)) for rank in range(replicas))
            _watch(started, wanted)
        finally:
            for replica in started:
                replica.kill()
                replica.process.wait()
        _conclude(started, wanted)


def _conclude(started: Sequence[Started], wanted: Wanted) -> None:
    """All have ended: well, as they were asked to, or by a failure, which is raised."""
    if wanted.first and wanted.again:
        say("ended at once by a second signal; --resume goes on from the last checkpoint")
        sys.exit(128 + wanted.first)
    failed = [replica for replica in started if replica.failed]
    stopped = [replica for replica in started if replica.stopped]
    # Where one has left by a signal the others see connections break, or wait for it until they are killed.
    follow = any(replica.left for replica in stopped)
    if any(not replica.only_heard and not (replica.killed and follow) for replica in failed) or (
        failed and not stopped
    ):
        raise cause(started)
    if stopped:
        sys.exit(128 + wanted.first if wanted.first else max(replica.code for replica in stopped))


@contextmanager
def _hearing() -> Iterator[Wanted]:
    wanted = Wanted()
    before = {number: signal.signal(number, wanted.hear) for number in heeded()}
    try:
        yield wanted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(arguments: Sequence[str], rank: int, replicas: int, threads: int, place: Path) -> Started:
    words = place / f"words-{rank}"
    env = {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        **_world(rank, replicas),
        SPAWNED: str(os.getpid()),
        MEETING: str(place / "meeting"),
        WORDS: str(words),
    }
    if loopback := LOOPBACK.get(sys.platform):
        env["GLOO_SOCKET_IFNAME"] = loopback  # whatever the host's own name leads to: these replicas are all here
    command = [sys.executable, "-c", START, "overtone", *arguments]
    # A session of its own: a Ctrl-C is passed on once, by this launcher, and not heard twice.
    return Started(rank, Popen(command, env=env, start_new_session=True), words)


def _world(rank: int, replicas: int) -> Mapping[str, str]:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": replicas, "LOCAL_WORLD_SIZE": replicas}
    return {name: str(value) for name, value in names.items()}


def _watch(started: Sequence[Started], wanted: Wanted) -> None:
    """Until all have ended: pass signals on; when one has failed the others may tell why they end, and are killed."""
    asked = failed = 0.0
    while None in [replica.process.poll() for replica in started]:
        now = time.monotonic()
        for replica in started:
            if replica.status is not None:
                replica.ended = replica.ended or now
        if wanted.again:
            return
        for number in wanted.fresh:
            asked = asked or now
            say(f"{number.name}: the replicas save and stop; a second signal ends them at once")
            for replica in started:
                replica.end(number)
        wanted.fresh.clear()
        if any(replica.failed or replica.left for replica in started):
            failed = failed or now
        if (failed and now > failed + GRACE) or (asked and now > asked + PATIENCE):
            return
        if any(replica.status is not None for replica in started):  # they end together, or one is frozen
            asked = asked or now
        time.sleep(LOOK)


def say(words: str) -> None:
    print(f"overtone: {words}", file=sys.stderr, flush=True)


def cause(started: Sequence[Started]) -> ReplicaError:
    """The failure that the others follow from: a replica that somebody killed, else the first that says more than that
    the others are gone. What this launcher killed itself is no cause, but may be what the others complain of."""
    found = [replica for replica in started if replica.failed and not replica.killed]
    found = found or [replica for replica in started if replica.killed]
    first = min(found, key=lambda one: (one.only_heard, one.ended, one.rank))
    died = [replica for replica in found if (replica.status or 0) < 0 and not replica.killed]
    if died:
        first = min(died, key=lambda one: (one.ended, one.rank))
        name = signal.Signals(-(first.status or 0)).name
        return ReplicaError(
            f"rank {first.rank} was killed by {name}, and the others stopped; --resume goes on from the last checkpoint"
        )
    if first.killed:
        return ReplicaError(f"rank {first.rank} did not end within {PATIENCE:.0f} s of the others and was killed; "
                            "--resume goes on from the last checkpoint")  # fmt: skip
    said = first.said()
    words = str(said.get("message", f"ended with status {first.status} and without a word"))
    return ReplicaError(_of_rank(first.rank, words), int(said.get("status", 1)))


def _of_rank(rank: object, words: str) -> str:
    return f"rank {rank}: {words.removeprefix(f'rank {rank}: ')}"


# -- in a replica ------------------------------------------------------------------------------------------------------


def _die_with_parent() -> None:
    """Without its launcher a replica would train on unseen and hold the run's directory: the kernel ends it instead."""
    if is_ours() and sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != whole_number(SPAWNED):  # it died before this line
            sys.exit(1)


def _leave_note(**said: Any) -> None:
    """For a launcher of ours."""
    if path := os.environ.get(WORDS):
        Path(path).write_text(json.dumps(said))


def words_of(error: BaseException) -> str:
    return str(error) if isinstance(error, OvertoneError) else printable(f"{type(error).__name__}: {error}")


def confess(error: BaseException) -> None:
    """Leave the reason where the launcher looks for it: ours, or torch's."""
    if WORDS in os.environ:
        status = error.status if isinstance(error, OvertoneError) else 1
        _leave_note(message=words_of(error), told=isinstance(error, RelayedError), status=status)
    elif path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        said = {"message": words_of(error), "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": said}))
