"""Inside a replica: it trains, and reports its failure to the launcher that started it, ours or torchrun."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from overtone.common import machine_errors
from overtone.errors import OvertoneError, RelayedError, printable
from overtone.runs.config import Run
from overtone.runs.stop_signals import listening
from overtone.world.join import connect, whole_number

T = TypeVar("T")

# Variables of the environment by which our launcher and its replicas know each other.
SPAWNED = "OVERTONE_SPAWNED"  # the process id of the launcher
NOTE = "OVERTONE_NOTE"  # the file in which a replica leaves a note on how it ended
TORCHRUN = "TORCHELASTIC_RUN_ID"  # torchrun sets it


def is_replica() -> bool:
    """True if this process is a replica of a world already: of our launcher, or of torchrun."""
    return is_ours() or TORCHRUN in os.environ


def is_ours() -> bool:
    """True if our launcher started this process as a replica."""
    return SPAWNED in os.environ


def threads_of(config: Run, replicas: int) -> int:
    """CPU threads of each replica if so many of them share this machine."""
    return config.threads or max(1, (os.cpu_count() or 1) // 2 // replicas)


def one_replica(config: Run, *, resume: bool) -> None:
    """Train as one replica."""
    from overtone.runs.open_run import open_run  # the launcher does not need it, and it takes a while to import

    if config.threads or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_of(config, whole_number("LOCAL_WORLD_SIZE", 1)))

    def work() -> None:
        transport = connect(config.timeout)  # first of all: from here on, this replica can tell the others of a failure
        try:
            warn_of_open_rendezvous()
            open_run(config, transport, resume=resume, stop=stop).run()
        except Exception as error:
            transport.leave(message_of(error))
            raise

    # Under our launcher a repeated signal means nothing: the launcher passes signals on that this process may have
    # received already, and a second signal to the launcher makes it kill all replicas.
    with listening(repeats=not is_ours()) as stop:
        in_world(work)
        if is_replica():
            _end(0)  # inside `listening`: a late signal finds a handler that knows that nothing is left to stop


def one_member(config: Run) -> None:
    """Train as one member of a run in a store."""
    from overtone.runs.open_stored import open_stored

    if config.threads or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_of(config, 1))
    show_log("overtone.swarm")
    with listening() as stop:
        open_stored(config, stop=stop).run()


def show_log(name: str) -> None:
    """Print what a part of overtone logs for people, a line each."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("overtone: %(message)s"))
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def in_world(work: Callable[[], T]) -> T:
    """Do the work of one replica. If it fails, the launcher prints the reason; under torchrun this process does."""
    _die_with_parent()
    try:
        with machine_errors.in_words():
            result = work()
    except Exception as error:
        if not is_replica():
            raise
        report_failure(error)
        if not isinstance(error, OvertoneError):
            traceback.print_exc()
        elif not is_ours():
            say(with_rank(os.environ["RANK"], str(error)))
        _end(error.status if isinstance(error, OvertoneError) else 1)
    except SystemExit as stop:
        if is_replica():
            _leave_note(saved=getattr(stop, "saved", False))
            _end(stop.code if isinstance(stop.code, int) else 1)
        raise
    return result


def _end(status: int) -> NoReturn:
    """End this process at once. An ordinary exit would wait for the threads of a process group whose peers are gone, or
    be aborted by them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _die_with_parent() -> None:
    """Let the kernel end this replica when its launcher ends. Otherwise the replica would train on unseen and keep the
    lock of the run's directory."""
    if is_ours() and sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != whole_number(SPAWNED):  # the launcher ended before the line above
            sys.exit(1)


# -- what the launcher hears ---------------------------------------------------------------------------------------


def report_failure(error: BaseException) -> None:
    """Leave the reason of the failure where the launcher looks for it: ours, or torchrun."""
    if NOTE in os.environ:
        status = error.status if isinstance(error, OvertoneError) else 1
        _leave_note(message=message_of(error), relayed=isinstance(error, RelayedError), status=status)
    elif path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": message_of(error), "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": message}))


def _leave_note(**note: Any) -> None:
    """Write the note for our launcher, if it started this process."""
    if path := os.environ.get(NOTE):
        Path(path).write_text(json.dumps(note))


def message_of(error: BaseException) -> str:
    """The error in one line. An error that is not overtone's own is named by its class too."""
    return str(error) if isinstance(error, OvertoneError) else printable(f"{type(error).__name__}: {error}")


def with_rank(rank: object, message: str) -> str:
    """The message of a replica, with its rank in front exactly once."""
    return f"rank {rank}: {message.removeprefix(f'rank {rank}: ')}"


def say(message: str) -> None:
    """Print one line for the user."""
    print(f"overtone: {message}", file=sys.stderr, flush=True)


# -- torchrun's rendezvous -----------------------------------------------------------------------------------------


def warn_of_open_rendezvous() -> None:
    """Print one line on each host if the torchrun around this process unpickles data that strangers may write."""
    if os.environ.get("LOCAL_RANK") == "0" and _rendezvous_is_open():
        say(
            "warning: torchrun's c10d rendezvous listens on all interfaces of this host and unpickles what "
            "anybody writes there: whoever reaches its port runs code as you. Use the static form (--nnodes N "
            "--node-rank I --master-addr HOST --master-port P), on one host `overtone train --replicas K`; SECURITY.md"
        )


def _rendezvous_is_open() -> bool:
    """True if torchrun started this process with a rendezvous that unpickles.

    No variable that torchrun sets says so. Its command line does, and so do the PET_ variables that replace its flags.
    """
    if is_ours() or TORCHRUN not in os.environ:
        return False
    words = [
        *_command_of(os.getppid()),
        *(f"--{name[4:]}={value}" for name, value in os.environ.items() if name.startswith("PET_")),
    ]
    flags = " ".join(words).lower().replace("_", "-")
    unpickles = re.search(r"--rdzv-b\S*[ =](c10d|etcd-v2)\b", flags) or "--standalone" in flags
    return bool(unpickles) and "store-type=file" not in flags


def _command_of(process: int) -> list[str]:
    """The command line of a process; empty if there is no /proc, or if it may not be read."""
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return []
