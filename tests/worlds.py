"""Real processes over real sockets: start N ranks on gloo, run a function in each, collect what they return.

Ranks are forks of a server that has imported torch and nothing has run in: a start costs a tenth of a second instead of
three. Such ranks share a hash seed and the order of their sets. A cold start has neither in common, as on real hosts.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PRELOADED = ("torch._dynamo", "torch.testing", "numba", "pytest", "hypothesis", "overtone")  # every optimizer: dynamo


def _rank(
    rank: int, size: int, folder: str, env: Mapping[str, str], job: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ.clear()  # a fork has the server's
    os.environ.update(env)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    try:
        result = {"value": job(*args)}
    except BaseException as error:
        result = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    torch.save(result, f"{folder}/result{rank}")
    dist.destroy_process_group()


def is_stopped(pid: int | None) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def run(
    job: Callable[..., Any],
    *args: Any,
    size: int,
    folder: Path,
    cold: bool = False,
    last: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """``job(*args)`` on every rank; per rank {"value": …}, {"error": …, "trace": …}, or {"died": signal}. ``last`` is
    environment that the last rank has from its start, before it imports torch: such a world starts cold."""
    context = mp.get_context("spawn" if cold or last else "forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    ranks = []
    for rank in range(size):
        env = {**os.environ, **(last or {} if rank == size - 1 else {})}
        ranks.append(context.Process(target=_rank, args=(rank, size, str(folder), env, job, args)))
        with mock.patch.dict(os.environ, env):
            ranks[-1].start()
    deadline = time.monotonic() + 500  # only there to end a hang, on however busy a machine
    while alive := [process for process in ranks if process.is_alive()]:
        # A rank that hangs is a failed test, not a hung one; one that froze itself on purpose has no more to say.
        if time.monotonic() > deadline or all(is_stopped(process.pid) for process in alive):
            for process in alive:
                process.kill()
        alive[0].join(timeout=0.1)
    found = []
    for rank, process in enumerate(ranks):
        path = folder / f"result{rank}"
        found.append(torch.load(path, weights_only=False) if path.exists() else {"died": process.exitcode})
    return found
