"""Processes of `overtone train --store`, and what is done to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

INSIDE = Path(__file__).parent / "inside"
PATIENCE = 900.0  # seconds: a process that has not ended by then hangs


@dataclass
class Member:
    """One replica: its process now, and when it was held up by us."""

    number: int
    url: str
    folder: Path  # its run directory is below
    flags: tuple[str, ...]
    clock: float = 0.0  # seconds by which its clock is wrong
    process: subprocess.Popen[bytes] | None = None
    held: list[tuple[float, float]] = field(default_factory=list)  # when it was stopped, by the right clock
    since: float = 0.0  # since when it is stopped; 0 if it is not

    @property
    def out(self) -> Path:
        """Its run directory."""
        return self.folder / f"m{self.number}"

    @property
    def lives(self) -> bool:
        """True if its process is there and may run."""
        return self.process is not None and self.process.poll() is None and not self.since

    @property
    def failed(self) -> bool:
        """True if its last process has ended with an error."""
        return self.process is not None and self.process.returncode != 0

    def start(self) -> None:
        """Start its process, or start it again."""
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(INSIDE), os.environ.get("PYTHONPATH", "")]),
            "CHAOS_CLOCK": str(self.clock),
            "CHAOS_FAULTS": str(self.folder / "faults"),
        }
        command = [sys.executable, "-m", "overtone", "train", "--store", self.url, "--name", f"m{self.number}"]
        with (self.folder / f"m{self.number}.txt").open("ab") as said:
            self.process = subprocess.Popen(
                [*command, "--out", str(self.out), *self.flags], stdout=said, stderr=said, env=env
            )

    def send(self, number: signal.Signals) -> None:
        """Send its process a signal."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9."""
        self.go_on()
        self.send(signal.SIGKILL)
        if self.process is not None:
            self.process.wait()

    def restart(self) -> None:
        """SIGTERM, and start again when it has saved."""
        self.send(signal.SIGTERM)
        if self.process is not None:
            self.process.wait(PATIENCE)
        self.start()

    def stop(self) -> None:
        """Freeze its process."""
        self.since = time.time()
        self.send(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let a frozen process go on."""
        if self.since:
            self.send(signal.SIGCONT)
            self.held.append((self.since, time.time()))
            self.since = 0.0


class Slow:
    """Makes a member three times slower: it may run for a third of the time."""

    def __init__(self, member: Member, slice_seconds: float = 0.2) -> None:
        self.member = member
        self.seconds = slice_seconds
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while not self.ended.wait(self.seconds / 3):
            if self.member.lives:
                self.member.send(signal.SIGSTOP)
                self.ended.wait(self.seconds * 2 / 3)
                self.member.send(signal.SIGCONT)

    def end(self) -> None:
        """Let it run freely."""
        self.ended.set()
        self.thread.join()
        self.member.send(signal.SIGCONT)
