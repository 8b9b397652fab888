"""A run in a store under disturbances: `make chaos`.

Four replicas of the language task train as real processes on one store. About every fifth round something happens: a
kill -9, a process that is frozen and goes on, a restart, a newcomer, a store that answers with errors and delays. One
replica is three times slower than the rest, and every clock is wrong by minutes. The disturbances follow from a seed.

1. 200 rounds on a folder. 2. 50 rounds on S3 (moto, on this machine). 3. For each, four undisturbed replicas that take
as many local steps in all. 4. Four replicas that wait for every commit (`--wait`), 50 rounds: how long a round takes
on a folder. 5. Four replicas of which one is three times slower, 50 rounds. 6. Sixteen processes on one folder, 20
rounds.

A part that was made is not made again (benchmarks/results/chaos.json); chaos.md beside it has the table.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from chaos.members import PATIENCE, Member, Slow
from overtone.exchange.message import Seal, open_message
from overtone.runs import log
from overtone.runs.events import Event, Finish
from overtone.swarm.bucket import Bucket
from overtone.swarm.records import COMMIT, About, Commit, Note, Process, commit_path, folder_of

RUNS = Path("runs/chaos")
RESULTS = Path("benchmarks/results")
TASK = ("--width", "64", "--layers", "2", "--heads", "4", "--batch", "16", "--log-every", "1", "--keep", "128")
EVERY = 30
REPLICAS = 4
MOST = 6  # members at a time, with newcomers
LONGEST = 20.0  # seconds after which something is undone, though no round may have passed

S3 = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@dataclass
class Trial:
    """One run with its members."""

    url: str
    folder: Path
    rounds: int
    flags: tuple[str, ...] = ()
    members: list[Member] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def add(self, clock: float = 0.0) -> Member:
        """Start one more member."""
        flags = (*TASK, "--every", str(EVERY), "--steps", str(self.rounds * EVERY), *self.flags)
        member = Member(len(self.members), self.url, self.folder, flags, clock)
        self.members.append(member)
        member.start()
        return member

    def committed(self) -> int:
        """The number of rounds that are committed."""
        bucket = Bucket(self.url)
        index = max((int(name) for name in bucket.folders("rounds")), default=0)
        return index + (COMMIT in bucket.names(folder_of(index)))

    def wait(self) -> int:
        """Wait until all processes have ended. Returns how many hang, and kills them."""
        end, hanging = time.monotonic() + PATIENCE, 0
        for member in self.members:
            assert member.process is not None
            try:
                member.process.wait(max(1.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                hanging += 1
                member.kill()
        return hanging


# -- disturbances ------------------------------------------------------------------------------------------------------


class Disturber:
    """Does something about every fifth round, as a seed says, and undoes it some rounds later. Half of all replicas
    live at any time."""

    def __init__(self, trial: Trial, seed: int) -> None:
        self.trial = trial
        self.random = random.Random(seed)
        self.later: list[tuple[int, float, Callable[[], None]]] = []
        self.kinds = [self.kill, self.freeze, self.restart, self.join, self.fail]

    def at(self, index: int) -> None:
        """A round is open: perhaps do something."""
        if index and self.random.random() < 0.25:  # some of it is not possible, or not over, when its turn comes
            any(kind(index) for kind in self.random.sample(self.kinds, 2))

    def undo(self, index: int) -> None:
        """Undo what is due."""
        now = time.monotonic()
        for one in [one for one in self.later if one[0] <= index or one[1] <= now]:
            one[2]()
            self.later.remove(one)

    def _later(self, index: int, undo: Callable[[], None]) -> None:
        self.later.append((index, time.monotonic() + LONGEST, undo))

    def _victim(self) -> Member | None:
        """A member that may be disturbed."""
        alive = [member for member in self.trial.members if member.lives]
        return self.random.choice(alive) if 2 * len(alive) > 1 + len(self.trial.members) else None

    def _tell(self, index: int, words: str) -> None:
        self.trial.events.append(f"round {index}: {words}")
        print(f"round {index}: {words}", flush=True)

    def kill(self, index: int) -> bool:
        if victim := self._victim():
            self._tell(index, f"kill -9 of m{victim.number}")
            victim.kill()
            self._later(index + self.random.randint(1, 4), victim.start)
        return victim is not None

    def freeze(self, index: int) -> bool:
        if victim := self._victim():
            rounds = self.random.randint(1, 8)  # after 4 rounds of silence it is no member any more
            self._tell(index, f"m{victim.number} is frozen for {rounds} rounds")
            victim.stop()
            self._later(index + rounds, victim.go_on)
        return victim is not None

    def restart(self, index: int) -> bool:
        if victim := self._victim():
            self._tell(index, f"m{victim.number} restarts")
            victim.restart()
        return victim is not None

    def join(self, index: int) -> bool:
        if len(self.trial.members) >= MOST:
            return False
        member = self.trial.add(clock=self.random.uniform(-600, 600))
        self._tell(index, f"m{member.number} comes")
        return True

    def fail(self, index: int) -> bool:
        self._tell(index, "the store fails for 2 rounds, or 5 s")
        faults = self.trial.folder / "faults"
        faults.touch()
        begin = time.monotonic()
        while self.trial.committed() < index + 2 and time.monotonic() < begin + 5:
            time.sleep(0.1)
        faults.unlink()
        return True

    def end(self) -> None:
        """Undo everything."""
        for _, _, undo in self.later:
            undo()


def disturbed(trial: Trial, seed: int) -> int:
    """A run with disturbances. Returns how many processes hang at its end."""
    for _ in range(REPLICAS):
        trial.add(clock=random.Random(seed + len(trial.members)).uniform(-600, 600))
    slow, disturber, seen = Slow(trial.members[-1]), Disturber(trial, seed), -1
    end = time.monotonic() + PATIENCE + 20 * trial.rounds
    while (index := trial.committed()) < trial.rounds and time.monotonic() < end:
        disturber.undo(index)
        if index > seen:
            seen = index
            disturber.at(index)
        time.sleep(0.1)
    disturber.end()
    slow.end()
    return trial.wait()


def undisturbed(trial: Trial) -> int:
    """The same without disturbances."""
    for _ in range(REPLICAS):
        trial.add()
    return trial.wait()


# -- what came of it ---------------------------------------------------------------------------------------------------


def figures(trial: Trial, hanging: int) -> dict[str, Any]:
    """What a run has shown, from its store and from the logs of its members."""
    bucket, seal = Bucket(trial.url), Seal.with_key(None)
    raw = bucket.read("run")
    assert raw is not None
    body = json.loads(open_message(raw, seal).body)
    notes = list(_commits(bucket, seal, bytes.fromhex(body["run"])))
    told = [(member, log.read(member.out)) for member in trial.members if (member.out / log.NAME).exists()]
    logs = [lines for _, lines in told]
    rounds = [line for lines in logs for line in lines if line["event"] == "round"]
    ends = [lines[-1] for lines in logs if lines and lines[-1]["event"] == "finish"]
    stalls = [stall for member, lines in told for stall in _stalls(member, lines)]
    named = [len(commit.messages) for commit in notes]
    audit = _audit(trial.url)
    return {
        "rounds": len(notes),
        "events": trial.events,
        "replicas, in all": len(trial.members),
        "members of a round": fmean(len(commit.members) for commit in notes),
        "messages of a round": fmean(named),
        "messages left out": sum(len(commit.left_out) for commit in notes),
        "local steps that counted": sum(_used(bucket, seal, commit) for commit in notes),
        "seconds of a round": _seconds(logs) / max(1, len(notes)),
        "longest stall of a live replica (s)": max(stalls, default=0.0),
        "time that replicas stood still (%)": [round(100 * end["waiting_share"], 1) for end in ends],
        "least wait of a replica, a round (s)": min(end["bytes"]["rounds"]["waiting"] for end in ends) / len(notes),
        "processes that hang": hanging,
        "processes that ended with an error": sum(member.failed for member in trial.members),
        "divergent anchors": len({end["anchor_fingerprint"] for end in ends}) - 1,
        "rounds replayed by an audit": audit["replayed"],
        "faults that the audit found": len(audit["faults"]),
        "bytes up, replica and round": fmean(line["bytes_sent"] for line in rounds),
        "bytes down, replica and round": fmean(line["bytes_received"] for line in rounds),
        "requests, replica and round": _requests(ends) / sum(len(commit.members) for commit in notes),
        "loss": ends[0]["metrics"]["loss"],
    }


def _audit(url: str) -> dict[str, Any]:
    """What `overtone replay --verify` finds, on the store alone."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "overtone", "replay", url, "--verify", "--json", file.name]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode not in (0, 1):
            raise RuntimeError(done.stderr)
        return dict(json.loads(Path(file.name).read_text()))


def _commits(bucket: Bucket, seal: Seal, run: bytes) -> Iterator[Commit]:
    index = 0
    while (raw := bucket.read(commit_path(index))) is not None:
        header = open_message(raw, seal).header
        yield Commit.unpack(raw, index, About(run, header.schema), seal)
        index += 1


def _requests(ends: list[Finish]) -> int:
    """The requests of all replicas, without those of joining."""
    return sum(count.get("requests", 0) for end in ends for phase, count in end["bytes"].items() if phase != "setup")


def _seconds(logs: list[list[Event]]) -> float:
    """From the first line to the last of the founder, whose clock is as wrong at both."""
    return float(logs[0][-1]["time"] - logs[0][0]["time"])


def _used(bucket: Bucket, seal: Seal, commit: Commit) -> int:
    """The local steps that the messages of a round stand for."""
    used = 0
    for named in commit.messages:
        raw = bucket.read(f"{folder_of(commit.round)}/{Process(named.number, named.session)}")
        if raw is not None and named.number not in commit.left_out:
            used += Note.split(open_message(raw, seal).body)[0].samples
    return used


def _stalls(member: Member, lines: list[Event]) -> Iterator[float]:
    """The seconds that a member stood still for the store or for others, by round, where it was not held up by us."""
    for line in lines:
        if line["event"] == "round":
            end = line["time"] - member.clock
            begin = end - line["seconds_waiting"]
            if not any(held < end and until > begin for held, until in member.held):
                yield line["seconds_waiting"]


# -- the study ---------------------------------------------------------------------------------------------------------


@contextmanager
def s3() -> Iterator[str]:
    """A server on this machine that speaks as S3 does, with an empty bucket; its environment for all processes."""
    import os

    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", S3], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as server:
        assert server.stdout is not None
        address = f"http://127.0.0.1:{int(server.stdout.readline())}"
        urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT")).close()
        names = {"ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "s", "REGION": "us-east-1", "ALLOW_HTTP": "true"}
        for name, value in {**names, "ENDPOINT_URL": address}.items():
            os.environ[f"AWS_{name}"] = value
        yield "s3://bucket/run"
        server.kill()


def part(name: str, rounds: int, seed: int, *, on_s3: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """A disturbed run, and an undisturbed one of as many local steps."""
    found = []
    for kind in ("disturbed", "undisturbed"):
        folder = RUNS / f"{name}-{kind}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with ExitStack() as stack:
            url = stack.enter_context(s3()) if on_s3 else str((folder / "store").resolve())
            if kind == "disturbed":
                trial = Trial(url, folder, rounds)
                found.append(figures(trial, disturbed(trial, seed)))
            else:
                trial = Trial(url, folder, round(found[0]["local steps that counted"] / REPLICAS / EVERY))
                found.append(figures(trial, undisturbed(trial)))
    return found[0], found[1]


def healthy(name: str, replicas: int, rounds: int, *flags: str, slow: bool = False) -> dict[str, Any]:
    """So many replicas on a folder, undisturbed, but that the last one may be ``slow``."""
    folder = RUNS / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    trial = Trial(str((folder / "store").resolve()), folder, rounds, flags)
    for _ in range(replicas):
        trial.add()
    slowing = None
    if slow:
        while trial.committed() < 5:  # all have joined
            time.sleep(0.1)
        slowing = Slow(trial.members[-1])
    hanging = trial.wait()
    if slowing is not None:
        slowing.end()
    return figures(trial, hanging)


def page(found: dict[str, Any]) -> str:
    """The table of all parts."""
    columns = {
        f"{name}, {kind}": found[name][number]
        for name in ("folder", "S3")
        if name in found
        for number, kind in enumerate(("disturbed", "undisturbed"))
    }
    columns |= {title: one for title, one in found.items() if isinstance(one, dict)}
    rows = [key for key in next(iter(columns.values())) if key != "events"]
    lines = [
        "# A run in a store under disturbances",
        "",
        "Made by `make chaos` (benchmarks/chaos/): `overtone train --store`, real processes, one of them three times",
        "slower, every clock wrong by up to ten minutes. An undisturbed run takes as many local steps in all.",
        "",
        f"| | {' | '.join(columns)} |",
        f"|---|{'---|' * len(columns)}",
        f"| events | {' | '.join(str(len(one['events'])) for one in columns.values())} |",
        *(f"| {row} | {' | '.join(_number(one[row]) for one in columns.values())} |" for row in rows),
    ]
    for name in ("folder", "S3"):
        if name in found:
            before, after = found[name][1]["loss"], found[name][0]["loss"]
            lines += ["", f"Loss on {name}: {after / before - 1:+.2%} against the undisturbed run."]
    for title, one in columns.items():
        if one["events"]:
            lines += ["", f"## What happened: {title}", "", *(f"- {event}" for event in one["events"])]
    return "\n".join(lines) + "\n"


def _number(value: float | list[float]) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="of the part on a folder")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    file = RESULTS / "chaos.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    parts: dict[str, Callable[[], Any]] = {
        "folder": lambda: part("folder", args.rounds, args.seed),
        "S3": lambda: part("s3", 50, args.seed + 1, on_s3=True),
        "all wait (--wait)": lambda: healthy("wait", REPLICAS, 50, "--wait"),
        "one of four is slow": lambda: healthy("slow", REPLICAS, 50, slow=True),
        "16 processes": lambda: healthy("sixteen", 16, 20, "--min-replicas", "16"),
    }
    for name, make in parts.items():
        if name not in found:
            found[name] = make()
            file.write_text(json.dumps(found, indent=1) + "\n")
            (RESULTS / "chaos.md").write_text(page(found))
    print(page(found))


if __name__ == "__main__":
    main()
