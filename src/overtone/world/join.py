"""How the processes of a world find each other: with a word about who is missing, and not for ever.

Replicas that `overtone train` started on this machine meet in a file; those of torchrun through its store.
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

MEETING = "OVERTONE_MEETING"  # the file in which the replicas of a launcher of ours meet


@dataclass(frozen=True)
class Place:
    """This process's place in the world, as its launcher says."""

    rank: int
    size: int

    @classmethod
    def from_environment(cls) -> Place:
        rank, size = whole_number("RANK"), whole_number("WORLD_SIZE")
        if rank >= size:
            raise EnvironmentVariableError(
                f"RANK={rank}, WORLD_SIZE={size}: ranks go from 0 to the size less 1; use torchrun"
            )
        return cls(rank, size)


def whole_number(name: str, default: int | None = None) -> int:
    """What a launcher says in the environment; anybody may have set it."""
    told = os.environ.get(name, "" if default is None else str(default))
    if not (told.isascii() and told.isdigit() and len(told) < 20):
        raise EnvironmentVariableError(
            f"{name}={shortened(told)}: a whole number in the environment, which torchrun sets; unset it"
        )
    return int(told)


def check_environment() -> None:
    """Refuse words where numbers belong, before anybody reads them."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        whole_number(name, 0)


def connect(timeout: float | None = None) -> Solo | Torch:
    """The world this process was started in: the default process group if there is one, else a world of one.

    Under ``torchrun`` the group is created here, on gloo, if the user's script has not made one: messages are small and
    packed on the CPU, and TCP is what joins distant machines. Initialise NCCL yourself for a fast local network.
    ``timeout`` is how many seconds to wait for a peer that does not answer, in joining and in every exchange; by
    default it follows from how long rounds take, and is ten minutes at least.
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
        """All of it waits in native code, for the store and for peers."""
        store = _meet(place)
        board.store = store
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
    """The group's threads end before the interpreter does: one that frees a tensor later aborts the process."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _meet(place: Place) -> Any:
    if path := os.environ.get(MEETING):
        return dist.FileStore(path, place.size)  # type: ignore[attr-defined]
    store, *_ = next(dist.rendezvous("env://", timeout=FOREVER))  # type: ignore[attr-defined]
    return store
