"""How the processes of a run join each other. A process that waits logs the missing ranks, and stops at a time-out.

Replicas that `overtone train` started on this machine meet through a file; replicas of torchrun meet through its store.
"""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from overtone.errors import EnvironmentVariableError, PeerError, shortened
from overtone.transport import Solo
from overtone.world.board import Board
from overtone.world.process_group import FOREVER, Torch
from overtone.world.watchdog import Watchdog

MEETING = "OVERTONE_MEETING"  # names the file through which replicas meet that our own launcher started


@dataclass(frozen=True)
class Place:
    """The rank of this process and the size of the world, as the launcher set them."""

    rank: int
    size: int

    @classmethod
    def from_environment(cls) -> Place:
        """Read ``RANK`` and ``WORLD_SIZE``."""
        rank, size = whole_number("RANK"), whole_number("WORLD_SIZE")
        if rank >= size:
            raise EnvironmentVariableError(
                f"RANK={rank}, WORLD_SIZE={size}: ranks go from 0 to the size less 1; use torchrun"
            )
        return cls(rank, size)


def whole_number(name: str, default: int | None = None) -> int:
    """A whole number from an environment variable. It is checked, because any program may have set it."""
    told = os.environ.get(name, "" if default is None else str(default))
    # `int` alone would accept signs, spaces, underscores and digits of other scripts.
    if not (told.isascii() and told.isdigit() and len(told) < 20):
        raise EnvironmentVariableError(
            f"{name}={shortened(told)}: a whole number in the environment, which torchrun sets; unset it"
        )
    return int(told)


def check_environment() -> None:
    """Refuse a launcher's variables that are no numbers, before other code reads them."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        whole_number(name, 0)


def connect(timeout: float | None = None) -> Solo | Torch:
    """The transport for the world of this process: the default process group if there is one, else a world of one.

    Under ``torchrun``, the group is created here, on gloo, if the user's script has not made one: messages are small
    and packed on the CPU, and distant machines are connected by TCP. Initialize NCCL yourself for a fast local network.
    ``timeout`` is the number of seconds to wait for a peer that does not answer, in joining and in every exchange. By
    default it follows from the duration of rounds, and is ten minutes at least.
    """
    if not dist.is_available():
        return Solo()
    if not dist.is_initialized():
        if MEETING not in os.environ and not dist.is_torchelastic_launched():
            if whole_number("WORLD_SIZE", 1) > 1:
                raise PeerError(
                    f"WORLD_SIZE={os.environ['WORLD_SIZE']}, but there is no process group and this is not torchrun: "
                    "each process would train by itself. Use torchrun, or call init_process_group() first"
                )
            return Solo()
        _join(Place.from_environment(), timeout)
    return Torch(timeout=timeout)


def _join(place: Place, timeout: float | None) -> None:
    board = Board(None, "joining", place.rank, place.size)
    watchdog = Watchdog(board, timeout)
    limit = watchdog.limit()

    def met() -> None:
        """Meet all peers. Every call here waits in native code, for the store or for peers."""
        store = _meet(place)
        board.store = store
        # The store outlives a restart of torchrun: notes of the processes before it must not count.
        board.name += os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
        board.arrive()
        dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.size, timeout=FOREVER)

    atexit.register(_part)
    try:
        watchdog.call(met, limit, board.missing, "joining")
    except PeerError:
        raise
    except RuntimeError as error:
        raise PeerError(f"rank {place.rank} of {place.size}: could not join the others ({error})") from error


def _part() -> None:
    """End the threads of the group before the interpreter ends.

    A thread that frees a tensor after that would abort the process.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def _meet(place: Place) -> Any:
    if path := os.environ.get(MEETING):
        return dist.FileStore(path, place.size)  # type: ignore[attr-defined]
    store, *_ = next(dist.rendezvous("env://", timeout=FOREVER))  # type: ignore[attr-defined]
    return store
