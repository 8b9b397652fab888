"""Real processes over real sockets: spawn N ranks on gloo, run a function in each, collect what they return."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _rank(rank: int, size: int, folder: str, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    try:
        result = {"value": job(*args)}
    except BaseException as error:
        result = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    torch.save(result, f"{folder}/result{rank}")
    dist.destroy_process_group()


def run(
    job: Callable[..., Any], *args: Any, size: int, folder: Path, last: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """``job(*args)`` on every rank; per rank {"value": …}, {"error": …, "trace": …}, or {"died": signal}. ``last`` is
    environment that the last rank has from its start, before it imports torch."""
    context = mp.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(rank, size, str(folder), job, args)) for rank in range(size)]
    for rank, process in enumerate(ranks):
        with mock.patch.dict(os.environ, last or {} if rank == size - 1 else {}):
            process.start()
    for process in ranks:
        process.join(timeout=300)
        if process.is_alive():  # a rank that hangs is a failed test, not a hung one
            process.kill()
            process.join()
    found = []
    for rank, process in enumerate(ranks):
        path = folder / f"result{rank}"
        found.append(torch.load(path, weights_only=False) if path.exists() else {"died": process.exitcode})
    return found
