"""Starts the replicas of a run on this machine, on torch's own elastic launcher, and speaks for those that fail.

Only what starts or joins a world of processes touches `torch.distributed`: this module and the transports.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from overtone import rundir, settings
from overtone.config import ConfigError, Run
from overtone.errors import OvertoneError
from overtone.upkeep import STOPPING, heeded, listening

T = TypeVar("T")

SPAWNED = "OVERTONE_SPAWNED"  # for replicas that this module started: its process
PATIENCE = 600  # seconds that replicas have to save before they are killed


class ReplicaError(OvertoneError, RuntimeError):
    """A replica of the run failed; its own words."""


def is_replica() -> bool:
    """This process is one of a world already: ours, or that of an outer torchrun."""
    return "TORCHELASTIC_RUN_ID" in os.environ


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
    folder = config.out or rundir.fresh(config.choice.method)
    if not resume:
        rundir.refuse_used(folder)
    rundir.refuse_busy(folder)
    os.environ[settings.TOLD] = settings.toml(replace(config, out=folder))
    arguments = ["train", "--resume", str(folder)] if resume else ["train"]
    threads = threads_of(config, config.replicas)
    try:
        spawn(arguments, replicas=config.replicas, threads=threads, port=config.port)
    finally:
        del os.environ[settings.TOLD]


def threads_of(config: Run, replicas: int) -> int:
    return config.threads or max(1, (os.cpu_count() or 1) // 2 // replicas)


def one_replica(config: Run, *, resume: bool) -> None:
    """Be one of them."""
    from overtone.session import Session  # the launcher itself has no need of it

    if config.threads or "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_of(config, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    with listening() as asked:
        in_world(lambda: Session(config, resume=resume, asked=asked).run())


def in_world(work: Callable[[], T]) -> T:
    """One replica's work. Its failure is left for the launcher to tell, or told with the rank's name."""
    _die_with_parent()
    try:
        result = work()
    except Exception as error:
        if not is_replica():
            raise
        confess(error)
        if not isinstance(error, OvertoneError):
            traceback.print_exc()
        elif not is_ours():
            print(f"overtone: rank {os.environ['RANK']}: {error}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)  # an ordinary exit may be aborted by the threads of a process group that has lost its peers
    except SystemExit:
        _leave()
        raise
    _leave()
    return result


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def spawn(arguments: Sequence[str], *, replicas: int, threads: int, port: int) -> None:
    """``python -m overtone …`` as each of K replicas, until all are done. What one of them died of is raised here."""
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed"):  # each has a level of its own; what matters is told below
            logging.getLogger(name).setLevel(logging.CRITICAL)
    if port:
        _refuse_taken(port)
    os.environ[SPAWNED] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # no need to find out the host's own name
    later = {  # than the oldest torch that this package takes
        "shutdown_timeout": PATIENCE,
        "signals_to_handle": ",".join(number.name for number in heeded()),
    }
    known = {field.name for field in fields(LaunchConfig)}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=replicas,
        rdzv_backend="c10d",
        rdzv_endpoint=f"localhost:{port}",
        run_id=f"overtone-{os.getpid()}",
        max_restarts=0,
        monitor_interval=0.1,
        local_addr="localhost",
        **{name: value for name, value in later.items() if name in known},  # type: ignore[arg-type]
    )
    try:
        elastic_launch(config, sys.executable)("-m", "overtone", *arguments)
    except ChildFailedError as error:
        if all(map(_was_stopped, error.failures.values())):  # a replica was asked to stop, and all did
            told = max(failure.exitcode for failure in error.failures.values())
            sys.exit(told if told > 0 else 128 + signal.SIGTERM)
        raise ReplicaError(_in_words(error.failures)) from None
    except SignalException as stop:
        sys.exit(128 + stop.sigval)
    finally:
        del os.environ[SPAWNED]


def _refuse_taken(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("localhost", port))
        except OSError as error:
            raise ConfigError(f"port={port}: {error.strerror}; choose another, or 0 for any free one") from error


def _in_words(failures: dict[int, ProcessFailure]) -> str:
    """The failure that the others follow from: a replica that was killed, else the first that says more than that the
    others are gone. The launcher itself ends the rest with SIGTERM."""
    rank, failure = min(failures.items(), key=lambda item: (_is_consequence(item[1]), item[1].timestamp, item[0]))
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        return f"rank {rank} was killed by {name}, and the others stopped; --resume goes on from the last checkpoint"
    return f"rank {rank}: {_message(failure)}"


def _message(failure: ProcessFailure) -> str:
    said: object = failure.message  # what `confess` wrote, or torch's own words
    return str(said["message"]) if isinstance(said, dict) else str(said)


def _was_stopped(failure: ProcessFailure) -> bool:
    """It had nothing against it: asked by a signal, perhaps the launcher's own, which ends the rest when one fails."""
    return failure.exitcode in {128 + number for number in STOPPING} | {-signal.SIGTERM}


def _is_consequence(failure: ProcessFailure) -> bool:
    """Ended by the launcher, cut off, or told by another rank."""
    return _was_stopped(failure) or re.match(r"rank \d+: |.*the exchange broke off", _message(failure)) is not None


# -- in a replica ----------------------------------------------------------------------------------------------------


def _die_with_parent() -> None:
    """Without its launcher a replica would train on unseen and hold the run's directory: the kernel ends it instead."""
    if is_ours() and sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != int(os.environ[SPAWNED]):  # it died before this line
            sys.exit(1)


def confess(error: BaseException) -> None:
    """Leave the reason where the launcher looks for it."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        words = str(error) if isinstance(error, OvertoneError) else f"{type(error).__name__}: {error}"
        said = {"message": words, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": said}))
