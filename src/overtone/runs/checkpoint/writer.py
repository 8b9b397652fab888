"""One replica's side of writing checkpoints, beside the training. An older one is deleted only after all replicas have
told that a newer one is complete."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overtone.runs.checkpoint import format
from overtone.runs.checkpoint import tree as nest
from overtone.runs.checkpoint.index import Mark, Tell, file_of, listed, present


class Saver:
    """The step waits for a copy in memory only; a thread writes it."""

    def __init__(
        self, folder: Path, rank: int, replicas: int, *, keep: int, tell: Tell, told: Callable[[Mark], None]
    ) -> None:
        self.folder = folder
        self.rank = rank
        self.replicas = replicas
        self.keep = keep
        self.tell = tell
        self.told = told  # hears of every checkpoint that is complete
        self._copies: dict[str, Tensor] = {}  # kept from one checkpoint to the next: fresh memory is slow
        self._writer: threading.Thread | None = None
        self._writing: Mark | None = None
        self._error: BaseException | None = None

    def save(self, step: int, tree: Any, *, final: bool) -> None:
        """Begin to save; returns as soon as training may go on."""
        self.settle()
        tensors: dict[str, Tensor] = {}
        plain = nest.apart(tree, tensors)
        self._copies = {name: _copy(tensor, self._copies.get(name)) for name, tensor in tensors.items()}
        self._writing = Mark(step, final, self.replicas)
        path = file_of(self.folder, self._writing, self.rank)
        self._writer = threading.Thread(target=self._write, args=(path, plain), name="checkpoint")
        self._writer.start()

    def _write(self, path: Path, plain: Any) -> None:
        try:
            format.write(path, plain, self._copies)
        except BaseException as error:  # told by `check`, in the thread that can act on it
            self._error = error

    def check(self) -> None:
        """Raise what went wrong in the background."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def settle(self) -> None:
        """Wait until the last checkpoint is complete on every rank, then delete what is older than those to keep."""
        if self._writer is None or self._writing is None:
            return
        self._writer.join()
        self._writer = None
        self.check()
        self.tell("saved")
        self.told(self._writing)
        self.prune(self._writing)

    def prune(self, newest: Mark) -> None:
        """Keep this one, which is complete, and as many before it as are to be kept. Others may be writing a newer one
        already."""
        older = sorted({mark for mark, *_ in present(self.folder) if mark < newest})
        doomed = set(older[: len(older) - self.keep + 1])
        self._delete(lambda mark: mark in doomed)

    def forget_after(self, newest: Mark | None) -> None:
        """Delete what a run that was cut off left beyond the checkpoint that is gone on from (None: the beginning), and
        what it had half written. Nobody writes before all have done this."""
        for place in listed(self.folder):
            for path in listed(place):
                if path.name.startswith("."):  # ours, or of the library, which writes beside as well
                    path.unlink(missing_ok=True)
            with suppress(OSError):  # it holds files
                place.rmdir()
        self._delete(lambda mark: newest is None or mark > newest)

    def _delete(self, chosen: Callable[[Mark], bool]) -> None:
        gone = [(rank, path) for mark, rank, path in present(self.folder) if chosen(mark)]
        for rank, path in gone:
            if rank % self.replicas == self.rank:  # also those of ranks that are no more
                path.unlink(missing_ok=True)
        for folder in {path.parent for _, path in gone}:
            with suppress(OSError):  # the last rank to leave removes it
                folder.rmdir()


def _copy(tensor: Tensor, into: Tensor | None) -> Tensor:
    """In main memory and of its own, so that training may go on changing the original."""
    source = tensor.detach()
    if into is None or into.shape != source.shape or into.dtype != source.dtype:
        into = torch.empty(source.shape, dtype=source.dtype)
    return into.copy_(source)
