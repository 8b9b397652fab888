"""Random states that belong to one replica of many in a process."""

from __future__ import annotations

import random

import torch
from torch import Tensor


class Randomness:
    """One replica's random states, swapped in for its turn."""

    def __init__(self, seed: int) -> None:
        with torch.random.fork_rng(devices=_gpus()):
            torch.manual_seed(seed)
            self.torch = torch.get_rng_state()
            self.cuda = torch.cuda.get_rng_state_all() if _gpus() else []
        self.python = random.Random(seed).getstate()

    def __enter__(self) -> None:
        self.outside = (
            torch.get_rng_state(),
            torch.cuda.get_rng_state_all() if _gpus() else [],
            random.getstate(),
        )
        self._set(self.torch, self.cuda, self.python)

    def __exit__(self, *exc: object) -> None:
        self.torch, self.python = torch.get_rng_state(), random.getstate()
        self.cuda = torch.cuda.get_rng_state_all() if _gpus() else []
        self._set(*self.outside)

    @staticmethod
    def _set(cpu: Tensor, gpus: list[Tensor], python: tuple[object, ...]) -> None:
        torch.set_rng_state(cpu)
        random.setstate(python)
        if gpus:
            torch.cuda.set_rng_state_all(gpus)


def _gpus() -> list[int]:
    return list(range(torch.cuda.device_count()))
