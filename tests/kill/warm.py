"""Starts `overtone train` again and again without paying for the imports each time (nine of ten seconds).

A warm process has imported everything and does nothing else. For each start it forks a launcher, and the launcher forks
its replicas beforehand, while it has a single thread; from there on all is as ever: the same command line, the same
process tree, environments, sessions, sockets and signals. tests/test_resume.py also starts some runs cold, as a user
does, and expects the same bits.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from typing import Any

MOST = 1 << 18  # bytes of a request


def serve(requests: socket.socket) -> dict[str, Any] | None:
    """Fork a launcher for each request and report how each ended. Returns the request in the forked process."""
    awake, waker = os.pipe()
    os.set_blocking(waker, False)
    os.set_blocking(awake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker)
    while True:
        ready, *_ = select.select([requests, awake], [], [])
        if awake in ready:
            os.read(awake, 4096)
            for pid, status in ended():
                requests.send(json.dumps({"pid": pid, "status": os.waitstatus_to_exitcode(status)}).encode())
        if requests in ready:
            data, fds, *_ = socket.recv_fds(requests, MOST, 1)
            if not data:
                return None
            if not (pid := os.fork()):
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for fd in (awake, waker):
                    os.close(fd)
                requests.close()
                os.setsid()
                for stream in (1, 2):
                    os.dup2(fds[0], stream)
                os.close(fds[0])
                return dict(json.loads(data))
            os.close(fds[0])
            requests.send(json.dumps({"started": pid}).encode())


def ended() -> list[tuple[int, int]]:
    found = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if not pid:
            return found
        found.append((pid, status))


class Forked(subprocess.Popen[bytes]):
    """What the launcher starts: a process that was forked beforehand gets arguments, environment and session."""

    waiting: list[tuple[int, socket.socket]] = []  # noqa: RUF012

    def _execute_child(self, args: Any, *rest: Any) -> None:
        env = rest[5]
        self.pid, line = self.waiting.pop(0)
        self._child_created = True
        line.sendall(json.dumps({"args": list(args), "env": env}).encode())
        line.close()


def fork_replicas(count: int) -> dict[str, Any] | None:
    """Forks that wait for what to do. None in the launcher; in a replica, what it is to do."""
    for _ in range(count):
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if not (pid := os.fork()):
            mine.close()
            for _, line in Forked.waiting:
                line.close()
            job = theirs.recv(MOST)
            theirs.close()
            if not job:
                os._exit(0)  # not needed: the launcher is gone, or has other plans
            os.setsid()
            return dict(json.loads(job))
        theirs.close()
        Forked.waiting.append((pid, mine))
    return None


def become(request: dict[str, Any]) -> None:
    """`overtone …` in this process, as a launcher or as one of its replicas."""
    import sitecustomize as moments

    from overtone.runs.launch import supervisor

    os.chdir(request["cwd"])
    if request["file_limit"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_limit"], request["file_limit"]))
    os.environ.update(request["env"])
    supervisor.Popen = Forked  # type: ignore[misc]
    sys.argv = ["overtone", *request["args"]]
    if job := fork_replicas(request["replicas"]):
        os.environ.clear()
        os.environ.update(job["env"])
        sys.argv = ["overtone", *job["args"][job["args"].index("overtone") + 1 :]]
        Forked.waiting.clear()
        moments.arm()
    elif not request["replicas"]:
        moments.arm()  # a run of one replica has no launcher
    from overtone.cli import main

    main()


if __name__ == "__main__":
    import torch
    import torch._dynamo  # every optimizer loads it
    import torch.utils.tensorboard

    for name in ("cli.train", "runs.launch", "runs.open_run", "tasks.text.task", *sys.argv[2:]):
        importlib.import_module(f"overtone.{name}")
    torch.set_num_threads(1)
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.send(b"{}")
    if request := serve(channel):
        become(request)
