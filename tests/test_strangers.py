"""Who can reach a run from another host, and what they can do there: nothing on one machine, little on many.

Hosts are network namespaces; see namespaces.py.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from namespaces import WIRE, Network, address, network
from running import wait_until

TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
SMALL = ("--every", "5", "--width", "32", "--layers", "1", "--heads", "2", "--context", "16", "--batch", "2")
LONG = ("--steps", "1000000", "--checkpoint-every", "1000000")
PORT = "29500"  # a namespace has all ports to itself
KNOCK = """
import socket, sys
for port in sys.argv[2:]:
    print(socket.socket().connect_ex((sys.argv[1], int(port))))
"""


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("".join(f"{i} and {i + 1} make {2 * i + 1}; " for i in range(2000)))
    return file


@contextmanager
def started(commands: Sequence[Sequence[str]], folder: Path, **env: str) -> Iterator[list[Path]]:
    """Each in the background; the files with what they say. Ended, with all that they started, in the end."""
    logs = [folder / f"said-{number}" for number in range(len(commands))]
    here = {key: value for key, value in os.environ.items() if not key.startswith(("TORCHELASTIC", "OVERTONE"))}
    processes = []
    for command, log in zip(commands, logs, strict=True):
        with log.open("wb") as file:
            processes.append(
                subprocess.Popen(
                    command,
                    stdout=file,
                    stderr=file,
                    cwd=folder,
                    start_new_session=True,
                    env={**here, "OMP_NUM_THREADS": "1", **env},
                )
            )
    try:
        yield logs
    except AssertionError:
        for log in logs:
            print(f"-- {log}\n{log.read_text(errors='replace')[-4000:]}")
        raise
    finally:
        for process in processes:
            for child in descendants(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            process.wait()


def descendants(pid: int) -> list[int]:
    found = [pid]
    with suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += descendants(int(child))
    return found


def listening(host: str) -> list[tuple[str, int]]:
    """Address and port of every socket in a namespace that waits for connections."""
    said = subprocess.run(
        ["ip", "netns", "exec", host, "cat", "/proc/net/tcp", "/proc/net/tcp6"], capture_output=True, text=True
    ).stdout
    found = []
    for line in said.splitlines():
        fields = line.split()
        if len(fields) > 3 and fields[3] == "0A":
            raw, port = fields[1].split(":")
            family = socket.AF_INET if len(raw) == 8 else socket.AF_INET6
            packed = b"".join(bytes.fromhex(raw[i : i + 8])[::-1] for i in range(0, len(raw), 8))
            found.append((socket.inet_ntop(family, packed), int(port, 16)))
    return found


def is_loopback(place: str) -> bool:
    return place.startswith(("127.", "::ffff:127.")) or place == "::1"


def in_host(hosts: Network, number: int, *command: str) -> list[str]:
    return ["ip", "netns", "exec", hosts[number], *command]


@pytest.mark.slow
def test_nothing_of_a_local_run_listens_beyond_the_loopback_interface(text: Path, tmp_path: Path) -> None:
    """Seen from another host: no port of the one where replicas train takes a connection."""
    flags = ["train", "--replicas", "2", "--data", str(text), *SMALL, *LONG, "--out", "run"]
    with network(2) as hosts, started([in_host(hosts, 0, sys.executable, "-m", "overtone", *flags)], tmp_path) as logs:
        wait_until(lambda: b"step 10/" in logs[0].read_bytes(), "some steps")
        sockets = listening(hosts[0])
        assert sockets, "gloo listens somewhere"
        assert all(is_loopback(place) for place, _ in sockets), sockets
        ports = [str(port) for _, port in sockets]
        said = subprocess.run(
            in_host(hosts, 1, sys.executable, "-c", KNOCK, address(0), *ports), capture_output=True, text=True
        )
        assert said.stdout.split() == ["111"] * len(ports), said  # refused, every one


def worlds_of(hosts: Network, form: Sequence[Sequence[str]], flags: Sequence[str]) -> list[list[str]]:
    return [
        in_host(hosts, number, TORCHRUN, "--nnodes", str(len(hosts)), "--nproc-per-node", "1", *form[number],
                "-m", "overtone", "train", *flags)
        for number in range(len(hosts))
    ]  # fmt: skip


def static(hosts: Network) -> list[list[str]]:
    where = ["--master-addr", address(0), "--master-port", PORT]
    return [["--node-rank", str(number), *where] for number in range(len(hosts))]


def dynamic(hosts: Network) -> list[list[str]]:
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{address(0)}:{PORT}"]
    return [
        [*where, "--local-addr", address(number), "--rdzv-conf", f"is_host={int(number == 0)}"]
        for number in range(len(hosts))
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("form", "warned"), [(static, 0), (dynamic, 1)], ids=["static", "c10d"])
def test_a_rendezvous_that_unpickles_is_warned_of(form: object, warned: int, text: Path, tmp_path: Path) -> None:
    flags = ["--data", str(text), *SMALL, "--steps", "5", "--out", "run"]
    with network(2) as hosts:
        commands = worlds_of(hosts, form(hosts), flags)  # type: ignore[operator]
        with started(commands, tmp_path, GLOO_SOCKET_IFNAME=WIRE) as logs:
            wait_until(lambda: any(b"finished after" in log.read_bytes() for log in logs), "the end of the run")
        for log in logs:  # on each host: each unpickles
            lines = [
                line for line in log.read_text().splitlines() if "c10d rendezvous listens on all interfaces" in line
            ]
            assert len(lines) == warned, log.read_text()
            assert all("--master-addr" in line for line in lines)


@pytest.mark.slow
def test_a_host_that_is_cut_off_is_named_on_every_other(text: Path, tmp_path: Path) -> None:
    """Its cable is pulled: no packet, no reset. The others name its rank; it names the one with the store."""
    flags = ["--data", str(text), *SMALL, *LONG, "--timeout", "20", "--out", "run@"]
    with network(3) as hosts:
        commands = worlds_of(hosts, static(hosts), flags)
        commands = [[word.replace("@", str(number)) for word in command] for number, command in enumerate(commands)]
        with started(commands, tmp_path, GLOO_SOCKET_IFNAME=WIRE) as logs:
            wait_until(lambda: b"step 10/" in logs[0].read_bytes(), "some steps")
            hosts.cut(1)
            for number, log in enumerate(logs):
                told = [
                    b"overtone: rank %d" % number,
                    b"rank 1 did not answer" if number != 1 else b"rank 0 did not answer",
                ]
                wait_until(
                    lambda log=log, told=told: all(words in log.read_bytes() for words in told), f"{log}: {told}"
                )


@pytest.mark.slow
def test_two_worlds_may_not_share_a_directory_on_a_host_without_rank_0(text: Path, tmp_path: Path) -> None:
    """Rank 1 of both is on the same host, with the same --out: the second world is refused as a whole."""
    flags = ["--data", str(text), *SMALL, *LONG, "--out"]
    with network(3) as hosts:

        def world(zero: int, port: str, mine: str) -> list[list[str]]:
            where = ["--master-addr", address(zero), "--master-port", port]
            form = {zero: ["--node-rank", "0", *where], 2: ["--node-rank", "1", *where]}
            return [
                in_host(hosts, host, TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", *words,
                        "-m", "overtone", "train", *flags, mine if host == zero else "shared")
                for host, words in form.items()
            ]  # fmt: skip

        with started(world(0, PORT, "x"), tmp_path, GLOO_SOCKET_IFNAME=WIRE) as first:
            wait_until(lambda: b"step 10/" in first[0].read_bytes(), "some steps of the first world")
            folder = tmp_path / "second"
            folder.mkdir()
            (folder / "shared").symlink_to(tmp_path / "shared")
            with started(world(1, "29501", "y"), folder, GLOO_SOCKET_IFNAME=WIRE) as second:
                for log in second:
                    wait_until(lambda log=log: b"in use by a live run" in log.read_bytes(), f"{log} to say so")
            before = first[0].read_bytes().count(b"step ")
            wait_until(lambda: first[0].read_bytes().count(b"step ") > before, "the first world to go on")
