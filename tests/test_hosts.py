"""Two hosts under torchrun with directories and paths of their own: a run shares nothing but the wire."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from overtone.runs import log
from overtone.runs.checkpoint.index import present
from overtone.runs.export import export

SMALL = ["--every", "5", "--width", "32", "--layers", "1", "--heads", "2", "--checkpoint-every", "5"]


@pytest.fixture
def hosts(tmp_path: Path) -> list[Path]:
    found = [tmp_path / "here", tmp_path / "there"]
    for number, host in enumerate(found):
        host.mkdir()
        (host / f"text{number}.txt").write_text("".join(f"{i} and {i + 1} make {2 * i + 1}; " for i in range(2000)))
    return found


def train(hosts: list[Path], *arguments: str) -> list[tuple[int, str]]:
    """The same command on each host, «@» being its number; exit status and what it said."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    started = []
    for number, host in enumerate(hosts):
        world = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(number)]
        world += ["--master-addr", "localhost", "--master-port", port, "-m", "overtone", "train"]
        command = [str(Path(sys.executable).with_name("torchrun")), *world]
        command += [argument.replace("@", str(number)) for argument in arguments]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen(command, cwd=host, env=env, stderr=subprocess.PIPE, text=True))
    return [(process.returncode, said) for process in started for said in [process.communicate(timeout=300)[1]]]


@pytest.mark.slow
def test_a_run_over_two_hosts_is_resumed_and_exported(hosts: list[Path], tmp_path: Path) -> None:
    for arguments in (
        ["--steps", "12", "--data", "text@.txt", "--out", "run", *SMALL],
        ["--resume", "run", "--steps", "20"],
    ):
        ended = train(hosts, *arguments)
        assert [status for status, _ in ended] == [0, 0], ended
    for rank, host in enumerate(hosts):
        assert {who for _, who, _ in present(host / "run" / "checkpoints")} == {rank}
    finish = log.last(hosts[0] / "run", "finish")
    assert finish is not None
    step, metrics = export(hosts[0] / "run", tmp_path / "exported")
    assert step == 20
    assert metrics["loss"] == pytest.approx(finish["metrics"]["loss"], rel=1e-6)
    assert not (hosts[1] / "run" / log.NAME).exists()  # one voice, one log


@pytest.mark.slow
def test_what_one_host_lacks_ends_the_run_on_all(hosts: list[Path]) -> None:
    (hosts[1] / "text1.txt").unlink()
    here, there = train(hosts, "--steps", "12", "--data", "text@.txt", "--out", "run", *SMALL)
    assert here[0] != 0
    assert there[0] != 0
    assert "overtone: rank 1: data text1.txt: no such file" in there[1]
    assert "overtone: rank 0: rank 1: data text1.txt: no such file" in here[1]
    assert not (hosts[0] / "run").exists()
