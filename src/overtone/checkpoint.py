"""Checkpoints: everything of every replica, to go on bit for bit.

Each replica writes a file of its own, so that nothing of it crosses the network: tensors in `safetensors`, all else as
JSON in the file's header. A file is written beside, flushed to the disk and renamed; a checkpoint is complete when the
files of all its replicas are there. An older one is deleted only after all replicas have told that a newer one is
complete. Reading executes nothing.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from overtone import fingerprint, nest
from overtone.errors import OvertoneError, StateError
from overtone.replica import Replica

FORMAT = 1
Tell = Callable[[Any], Sequence[Any]]  # my word to all, and everybody's in the order of ranks


class CheckpointError(OvertoneError, RuntimeError):
    """A checkpoint that cannot be written or read."""


@dataclass(frozen=True, order=True)
class Mark:
    """Which checkpoint: its step, and of how many replicas."""

    step: int
    replicas: int


def file_of(folder: Path, mark: Mark, rank: int) -> Path:
    return folder / f"step-{mark.step:08d}" / f"replica-{rank}-of-{mark.replicas}.safetensors"


def _present(folder: Path) -> Iterator[tuple[Mark, int, Path]]:
    """Every replica's file that is there."""
    for place in _listed(folder):
        step = re.fullmatch(r"step-(\d+)", place.name)
        for path in _listed(place) if step else []:
            who = re.fullmatch(r"replica-(\d+)-of-(\d+)\.safetensors", path.name)
            if step and who:
                yield Mark(int(step[1]), int(who[2])), int(who[1]), path


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:  # none yet, or another rank has just removed it
        return []


def complete(folder: Path) -> list[Mark]:
    """The checkpoints in this folder with a file of each replica, oldest first."""
    found: dict[Mark, set[int]] = {}
    for mark, rank, _ in _present(folder):
        found.setdefault(mark, set()).add(rank)
    return sorted(mark for mark, ranks in found.items() if ranks >= set(range(mark.replicas)))


def usable(folder: Path, rank: int, replicas: int) -> list[Mark]:
    """What this rank could go on from: its own file is enough, unless the number of replicas changes."""
    own = {mark for mark, who, _ in _present(folder) if who == rank and mark.replicas == replicas}
    return sorted(own | set(complete(folder)))


def newest_common(folder: Path, rank: int, replicas: int, *, begun: int, tell: Tell) -> Mark | None:
    """The newest checkpoint that every rank can go on from. None if there never was a complete one: the run had
    ``begun`` to write at most its first."""
    mine = [[mark.step, mark.replicas] for mark in usable(folder, rank, replicas)]
    heard = tell(mine)
    common = set.intersection(*({Mark(*pair) for pair in marks} for marks in heard))
    if not common:
        if begun <= 1:
            return None
        without = [str(r) for r, marks in enumerate(heard) if not marks]
        who = f"; ranks {', '.join(without)} have none at all" if without else ""
        raise CheckpointError(
            f"{folder}: no complete checkpoint that all {replicas} replicas can go on from{who}. Another number of "
            "replicas needs the files of all old ones in one place; or start a new run"
        )
    return max(common)


def read(path: Path) -> Any:
    """One replica's tree; refused, naming file and reason, if it is not whole."""
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            header = (file.metadata() or {}).get("overtone")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file; the checkpoint is not complete") from error
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise _damaged(path, str(error)) from error
    if header is None:
        raise CheckpointError(f"{path}: not a checkpoint of overtone")
    try:
        said = json.loads(header)
        if said["format"] != FORMAT:
            raise CheckpointError(f"{path}: format {said['format']}; this version of overtone reads {FORMAT}")
        if said["fingerprint"] != _fingerprint(said["tree"], tensors):
            raise _damaged(path, "it does not hold what was written")
        return nest.together(said["tree"], tensors)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise _damaged(path, f"its header cannot be read: {error!r}") from error


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path}: damaged ({why}). Delete {path.parent} to go on from the checkpoint before it")


def _fingerprint(tree: Any, tensors: dict[str, Tensor]) -> str:
    """Of all there is: the tree as it is written, which names every tensor, and the tensors."""
    words = fingerprint.of_text(json.dumps([tree, sorted(tensors)]))
    return (words + fingerprint.of_tensors(tensors[name] for name in sorted(tensors))).hex()


def write(path: Path, tree: Any, tensors: dict[str, Tensor]) -> None:
    """``tree`` is what `nest.apart` left; whole or not at all."""
    beside = path.with_name(f".{path.name}.tmp")
    said = {"format": FORMAT, "fingerprint": _fingerprint(tree, tensors), "tree": tree}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        safetensors.torch.save_file(tensors, str(beside), metadata={"overtone": json.dumps(said)})
        _flush(beside)
        beside.replace(path)
        _flush(path.parent)
        _flush(path.parent.parent)
    except (OSError, safetensors.SafetensorError) as error:
        beside.unlink(missing_ok=True)
        raise CheckpointError(
            f"{path}: cannot be written ({error}); free some space, then --resume. Earlier checkpoints are intact"
        ) from error


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Saver:
    """One replica's side of checkpointing. The step waits for a copy in memory only; a thread writes it."""

    def __init__(self, folder: Path, rank: int, replicas: int, *, keep: int, tell: Tell) -> None:
        self.folder = folder
        self.rank = rank
        self.replicas = replicas
        self.keep = keep
        self.tell = tell
        self._copies: dict[str, Tensor] = {}  # kept from one checkpoint to the next: fresh memory costs thrice as much
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, step: int, tree: Any) -> None:
        """Begin to save; returns as soon as training may go on."""
        self.settle()
        tensors: dict[str, Tensor] = {}
        plain = nest.apart(tree, tensors)
        self._copies = {name: _copy(tensor, self._copies.get(name)) for name, tensor in tensors.items()}
        path = file_of(self.folder, Mark(step, self.replicas), self.rank)
        self._writer = threading.Thread(target=self._write, args=(path, plain), name="checkpoint")
        self._writer.start()

    def _write(self, path: Path, plain: Any) -> None:
        try:
            write(path, plain, self._copies)
        except BaseException as error:  # told by `check`, in the thread that can act on it
            self._error = error

    def check(self) -> None:
        """Raise what went wrong in the background."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def settle(self) -> None:
        """Wait until the last checkpoint is complete on every rank, then delete what is older than those to keep."""
        if self._writer is None:
            return
        self._writer.join()
        self._writer = None
        self.check()
        self.tell("saved")
        self._prune()

    def _prune(self) -> None:
        marks = sorted({mark for mark, *_ in _present(self.folder)})
        self._delete(lambda mark: mark in marks[: -self.keep])

    def forget_after(self, step: int) -> None:
        """Delete what a run that was cut off left beyond the step that is gone on from, and what it had half written.
        Nobody writes before all have done this."""
        for place in _listed(self.folder):
            for path in _listed(place) if place.is_dir() else []:
                if path.name.startswith("."):  # ours, or of the library, which writes beside as well
                    path.unlink(missing_ok=True)
            with suppress(OSError):  # it holds files
                place.rmdir()
        self._delete(lambda mark: mark.step > step)

    def _delete(self, chosen: Callable[[Mark], bool]) -> None:
        gone = [(rank, path) for mark, rank, path in _present(self.folder) if chosen(mark)]
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


def tree_of(replica: Replica) -> dict[str, Any]:
    """Model, inner optimiser and exchange state of a replica; tensors are references."""
    return {
        "model": {**replica.parameters.all, **replica.buffers.named()},
        "inner": replica.inner.state_dict(),
        "replica": replica.state_dict(),
    }


@torch.no_grad()
def restore(replica: Replica, tree: Mapping[str, Any]) -> None:
    """The exchange state first: it refuses a state of another model or method before anything is touched."""
    replica.load_state_dict(tree["replica"])
    for name, tensor in {**replica.parameters.all, **replica.buffers.named()}.items():
        tensor.copy_(tree["model"][name])
    try:
        replica.inner.load_state_dict(tree["inner"])
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"the inner optimiser's saved state does not fit this one ({error!r})") from error


def blend(trees: Sequence[Any], *, consensus: bool, rank: int) -> Any:
    """What replica ``rank`` starts from when their number has changed; ``trees`` are those of all old replicas.

    With consensus every floating tensor becomes its mean over the old replicas: what they share already (anchor,
    momentum, statistics) stays as it is to the bit, and what is private (residual, weights, inner moments) is folded
    together, so that the mean of all replicas' weights, and all that is still owed to the anchor, survives. Without
    consensus there is nothing to keep together: the new replica goes on from the old one of the same rank, modulo K.
    """
    own = trees[rank % len(trees)]
    return _mean(list(trees)) if consensus else own


def _mean(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        if not first.is_floating_point() or all(torch.equal(first, other) for other in values[1:]):
            return first
        total = first.to(torch.float64, copy=True)
        for other in values[1:]:
            total += other
        return total.div_(len(values)).to(first.dtype)
    if isinstance(first, dict):
        if any(value.keys() != first.keys() for value in values):
            raise StateError("the old replicas' states have different parts and cannot be folded together")
        return {key: _mean([value[key] for value in values]) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(_mean(list(part)) for part in zip(*values, strict=True))
    return first
