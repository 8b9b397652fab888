"""Writes the checkpoints of one replica in the background while training continues. An old checkpoint is deleted only
after all replicas have confirmed that a newer one is complete."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overtone.runs.checkpoint import format
from overtone.runs.checkpoint.index import AllGather, CheckpointId, file_of, listed, present


class CheckpointWriter:
    """A training step waits only for a copy in memory; a thread writes the copy to the disk."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        replicas: int,
        *,
        keep: int,
        all_gather: AllGather,
        on_complete: Callable[[CheckpointId], None],
    ) -> None:
        self.folder = folder
        self.rank = rank
        self.replicas = replicas
        self.keep = keep  # complete checkpoints to keep
        self.all_gather = all_gather
        self.on_complete = on_complete  # called for every checkpoint that is complete on all ranks
        self._copies: dict[str, Tensor] = {}  # kept from one checkpoint to the next: allocating memory is slow
        self._thread: threading.Thread | None = None
        self._writing: CheckpointId | None = None
        self._error: BaseException | None = None

    def save(self, step: int, tree: Any, *, final: bool) -> None:
        """Begin to save; return as soon as training may change the tensors again. A collective, since it first waits
        for the checkpoint before."""
        self.wait()
        tensors: dict[str, Tensor] = {}
        flat = format.flatten(tree, tensors)
        self._copies = {name: _copy(tensor, self._copies.get(name)) for name, tensor in tensors.items()}
        self._writing = CheckpointId(step, final, self.replicas)
        path = file_of(self.folder, self._writing, self.rank)
        self._thread = threading.Thread(target=self._write, args=(path, flat), name="checkpoint")
        self._thread.start()

    def _write(self, path: Path, flat: Any) -> None:
        try:
            format.write(path, flat, self._copies)
        except BaseException as error:  # `check` raises it in the thread that can act on it
            self._error = error

    def check(self) -> None:
        """Raise the error of the background thread, if it had one."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Wait until the checkpoint under way is complete on every rank, then delete those that are too old. A
        collective if a checkpoint is under way, and all ranks begin them at the same steps."""
        if self._thread is None or self._writing is None:
            return
        self._thread.join()
        self._thread = None
        self.check()
        self.all_gather("saved")
        self.on_complete(self._writing)
        self.prune(self._writing)

    def prune(self, newest: CheckpointId) -> None:
        """Keep ``newest``, which is complete, and the ``keep - 1`` before it; delete older ones. Newer files stay:
        other ranks may be writing the next checkpoint already."""
        older = sorted({checkpoint for checkpoint, *_ in present(self.folder) if checkpoint < newest})
        expired = set(older[: len(older) - self.keep + 1])
        self._delete(lambda checkpoint: checkpoint in expired)

    def delete_after(self, newest: CheckpointId | None) -> None:
        """Delete what an interrupted run left: checkpoints newer than ``newest``, from which this run continues (None:
        from the beginning), and half-written files. No rank writes before all have done this."""
        for place in listed(self.folder):
            for path in listed(place):
                if path.name.startswith("."):  # temporary files, ours or those of safetensors
                    path.unlink(missing_ok=True)
            with suppress(OSError):  # it holds files
                place.rmdir()
        self._delete(lambda checkpoint: newest is None or checkpoint > newest)

    def _delete(self, chosen: Callable[[CheckpointId], bool]) -> None:
        gone = [(rank, path) for checkpoint, rank, path in present(self.folder) if chosen(checkpoint)]
        for rank, path in gone:
            if rank % self.replicas == self.rank:  # includes the files of ranks that no longer exist
                path.unlink(missing_ok=True)
        for folder in {path.parent for _, path in gone}:
            with suppress(OSError):  # not empty: the last rank to delete its file removes the folder
                folder.rmdir()


def _copy(tensor: Tensor, into: Tensor | None) -> Tensor:
    """A copy in main memory, into the memory of the last copy if it fits."""
    source = tensor.detach()
    if into is None or into.shape != source.shape or into.dtype != source.dtype:
        into = torch.empty(source.shape, dtype=source.dtype)
    return into.copy_(source)
