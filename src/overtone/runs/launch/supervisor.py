"""The launcher: it starts the replicas of a run on this machine, passes signals on, and tells why one failed.

It is not torch's elastic launcher, which opens a store on all interfaces, without authentication, and unpickles what
lies in it. Our replicas meet in a file that only this user can open, and exchange on the loopback interface.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from types import FrameType
from typing import Any

from overtone.errors import ConfigError, ReplicaError
from overtone.runs.launch.inside import NOTE, SPAWNED, say, with_rank
from overtone.runs.stop_signals import STOPPING, heeded
from overtone.world.join import MEETING

PATIENCE = 600.0  # seconds that replicas have to save before they are killed
GRACE = 5.0  # seconds that the others have to end by themselves after one replica has failed
POLL = 0.05  # seconds between two looks at the replicas
# A replica imports modules for seconds before it can handle a signal. A Ctrl-C in that time must not print a traceback.
START = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); sys.argv.pop(0); "
    "from overtone.cli import main; main()"
)
LOOPBACK = {"linux": "lo", "darwin": "lo0"}


@dataclass
class ReplicaProcess:
    """The process of a replica that this launcher started, and how it ended."""

    rank: int
    process: Popen[bytes]
    note_file: Path
    ended: float = 0.0  # when this launcher noticed its end
    killed: bool = False  # by this launcher

    @property
    def status(self) -> int | None:
        """The exit status; negative if a signal ended the process, None while it runs."""
        return self.process.returncode

    @property
    def stopped(self) -> bool:
        """True if the replica ended because a signal asked it to, and not by a failure."""
        return self.status in {128 + number for number in STOPPING} | {-number for number in STOPPING}

    @property
    def left(self) -> bool:
        """True if the replica stopped without saving: the others wait for it and cannot continue."""
        return self.stopped and not self.note().get("saved", False)

    @property
    def code(self) -> int:
        """The exit status as a shell gives it: 128 and the number of the signal if a signal ended the replica."""
        status = self.status or 0
        return status if status > 0 else 128 - status

    @property
    def failed(self) -> bool:
        return self.status not in (None, 0) and not self.stopped

    def note(self) -> dict[str, Any]:
        """The note that the replica left (`inside.report_failure`); empty if it left none."""
        with suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads(self.note_file.read_text())
            return found
        return {}

    @property
    def only_relayed(self) -> bool:
        """True if the replica failed because another one had failed or left."""
        return not self.killed and bool(self.note().get("relayed"))

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it still exists."""
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    def kill(self) -> None:
        """Kill the process if it still runs."""
        if self.process.poll() is None:
            self.killed = True
            self.send(signal.SIGKILL)


@dataclass
class ReceivedSignals:
    """The signals that this launcher has received."""

    first: signal.Signals | None = None
    again: bool = False
    unsent: list[signal.Signals] = field(default_factory=list)  # not yet passed on to the replicas

    def receive(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """The handler of the signals."""
        self.again = self.first is not None
        self.first = self.first or signal.Signals(number)
        self.unsent.append(signal.Signals(number))


def refuse_too_many(replicas: int) -> None:
    """Refuse more processes than this machine can hold: each replica takes some hundred megabytes."""
    most = max(64, 16 * (os.cpu_count() or 1))
    if replicas > most:
        raise ConfigError(
            f"replicas={replicas}: processes to start on this machine, at most {most}; `overtone simulate` takes more"
        )


def spawn(arguments: Sequence[str], *, replicas: int, threads: int) -> None:
    """Run ``overtone ARGUMENTS`` as each of K replicas until all have ended. A replica's failure is raised here."""
    started: list[ReplicaProcess] = []
    with tempfile.TemporaryDirectory(prefix="overtone-") as place, _receiving() as received:
        try:
            started.extend(_start(arguments, rank, replicas, threads, Path(place)) for rank in range(replicas))
            _watch(started, received)
        finally:
            for replica in started:
                replica.kill()
                replica.process.wait()
        _conclude(started, received)


@contextmanager
def _receiving() -> Iterator[ReceivedSignals]:
    """Receive the signals that stop a run, instead of being ended by them."""
    received = ReceivedSignals()
    before = {number: signal.signal(number, received.receive) for number in heeded()}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(arguments: Sequence[str], rank: int, replicas: int, threads: int, place: Path) -> ReplicaProcess:
    note_file = place / f"note-{rank}"
    env = {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        **_world(rank, replicas),
        SPAWNED: str(os.getpid()),
        MEETING: str(place / "meeting"),
        NOTE: str(note_file),
    }
    if loopback := LOOPBACK.get(sys.platform):
        env["GLOO_SOCKET_IFNAME"] = loopback  # all replicas are here, whatever the host's own name resolves to
    command = [sys.executable, "-c", START, "overtone", *arguments]
    # In a session of its own: this launcher passes a Ctrl-C on, and the replica does not receive it a second time.
    return ReplicaProcess(rank, Popen(command, env=env, start_new_session=True), note_file)


def _world(rank: int, replicas: int) -> Mapping[str, str]:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": replicas, "LOCAL_WORLD_SIZE": replicas}
    return {name: str(value) for name, value in names.items()}


def _watch(started: Sequence[ReplicaProcess], received: ReceivedSignals) -> None:
    """Wait until all replicas have ended, and pass signals on. Return early if the rest must be killed: after a second
    signal, or when replicas do not end soon after another one has failed or ended."""
    asked = failed = 0.0  # when the first replica was asked to end, and when the first failure was noticed
    while None in [replica.process.poll() for replica in started]:
        now = time.monotonic()
        for replica in started:
            if replica.status is not None:
                replica.ended = replica.ended or now
        if received.again:
            return
        for number in received.unsent:
            asked = asked or now
            say(f"{number.name}: the replicas save and stop; a second signal ends them at once")
            for replica in started:
                replica.send(number)
        received.unsent.clear()
        if any(replica.failed or replica.left for replica in started):
            failed = failed or now
        if (failed and now > failed + GRACE) or (asked and now > asked + PATIENCE):
            return
        if any(replica.status is not None for replica in started):  # replicas end together, unless one is frozen
            asked = asked or now
        time.sleep(POLL)


def _conclude(started: Sequence[ReplicaProcess], received: ReceivedSignals) -> None:
    """All replicas have ended. Return if they finished, exit if a signal stopped them, raise if one failed."""
    if received.first and received.again:
        say("ended at once by a second signal; --resume goes on from the last checkpoint")
        sys.exit(128 + received.first)
    failed = [replica for replica in started if replica.failed]
    stopped = [replica for replica in started if replica.stopped]
    # If one replica has left by a signal, the others fail by a broken connection or wait until they are killed.
    one_left = any(replica.left for replica in stopped)
    if any(not replica.only_relayed and not (replica.killed and one_left) for replica in failed) or (
        failed and not stopped
    ):
        raise cause(started)
    if stopped:
        sys.exit(128 + received.first if received.first else max(replica.code for replica in stopped))


def cause(started: Sequence[ReplicaProcess]) -> ReplicaError:
    """The failure that caused the others: a replica that somebody killed, else the first replica that reports more than
    that another one is gone. A replica that this launcher killed is the cause only if no other replica failed."""
    found = [replica for replica in started if replica.failed and not replica.killed]
    found = found or [replica for replica in started if replica.killed]
    died = [replica for replica in found if (replica.status or 0) < 0 and not replica.killed]
    if died:
        first = min(died, key=lambda one: (one.ended, one.rank))
        name = signal.Signals(-(first.status or 0)).name
        return ReplicaError(
            f"rank {first.rank} was killed by {name}, and the others stopped; --resume goes on from the last checkpoint"
        )
    first = min(found, key=lambda one: (one.only_relayed, one.ended, one.rank))
    if first.killed:
        return ReplicaError(
            f"rank {first.rank} did not end within {PATIENCE:.0f} s of the others and was killed; "
            "--resume goes on from the last checkpoint"
        )
    note = first.note()
    message = str(note.get("message", f"ended with status {first.status} and without a message"))
    return ReplicaError(with_rank(first.rank, message), int(note.get("status", 1)))
