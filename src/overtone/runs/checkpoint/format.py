"""Checkpoints: everything of every replica, to go on bit for bit.

Each replica writes a file of its own, so that nothing of it crosses the network: tensors in `safetensors`, all else as
JSON in the file's header. A file is written beside, flushed to the disk and renamed; a checkpoint is complete when the
files of all its replicas are there. Reading executes nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from overtone.coding import fingerprint
from overtone.errors import CheckpointError, OvertoneError, StateError, shortened
from overtone.replica import Replica
from overtone.runs.checkpoint import tree as nest

FORMAT = 1
FOLDED = ("model.", "inner.", "replica.")  # tensors that become one when the number of replicas changes


# -- one file --------------------------------------------------------------------------------------------------------


class File:
    """One replica's file; refused, naming it and the reason, if it is not whole. Tensors are read when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = cast(Any, safetensors.safe_open(str(path), framework="pt"))  # untyped
            self.names = sorted(self._file.keys())
            header = (self._file.metadata() or {}).get("overtone")
        except FileNotFoundError as error:
            raise CheckpointError(f"{path}: no such file; the checkpoint is not complete") from error
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise damaged(path, str(error)) from error
        if header is None:
            raise CheckpointError(f"{path}: not a checkpoint of overtone")
        try:
            said = json.loads(header)
            if said["format"] != FORMAT:
                raise CheckpointError(f"{path}: format {said['format']}; this version of overtone reads {FORMAT}")
            self.tree = said["tree"]
            if said["fingerprint"] != stamp(self.tree, self.names, self.tensor):
                raise damaged(path, "it does not hold what was written")
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise damaged(path, f"its header cannot be read: {shortened(error)}") from error

    def tensor(self, name: str) -> Tensor:
        found: Tensor = self._file.get_tensor(name)
        return found

    def together(self, tensor: Callable[[str], Tensor] | None = None) -> Any:
        """The whole tree; ``tensor`` says where to take tensors from, if not from here."""
        with reading(self.path, "header"):
            tree = nest.together(self.tree, {name: (tensor or self.tensor)(name) for name in self.names})
            if not isinstance(tree, dict):
                raise TypeError(f"a {type(tree).__name__} where a tree belongs")
            return tree


def damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path}: damaged ({why}). Delete {path.parent} to go on from the checkpoint before it")


@contextmanager
def reading(path: Path, part: str) -> Iterator[None]:
    """A right stamp does not make a file sound: what it says of a part may be of any kind."""
    try:
        yield
    except OvertoneError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise damaged(path, f"its {part} cannot be read: {shortened(error)}") from error


def read(path: Path) -> Any:
    """One replica's tree."""
    return File(path).together()


def stamp(tree: Any, names: Sequence[str], tensor: Callable[[str], Tensor]) -> str:
    """A fingerprint of all there is: the tree as it is written, and the tensors."""
    words = fingerprint.of_text(json.dumps([tree, names]))
    return (words + fingerprint.of_tensors(tensor(name) for name in names)).hex()


def write(path: Path, tree: Any, tensors: dict[str, Tensor]) -> None:
    """``tree`` is what `nest.apart` left; whole or not at all."""
    beside = path.with_name(f".{path.name}.tmp")
    said = {"format": FORMAT, "fingerprint": stamp(tree, sorted(tensors), tensors.__getitem__), "tree": tree}
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


# -- a replica's part of it ------------------------------------------------------------------------------------------


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
    mine = {**replica.parameters.all, **replica.buffers.named()}
    for name, tensor in mine.items():
        if tree["model"][name].shape != tensor.shape:
            raise StateError(f"model: {name} is {tuple(tree['model'][name].shape)} in the saved state")
    for name, tensor in mine.items():
        tensor.copy_(tree["model"][name])
    # The optimiser brings its own numbers along; what this run was told counts.
    numbers = [{key: value for key, value in g.items() if key != "params"} for g in replica.inner.param_groups]
    try:
        replica.inner.load_state_dict(tree["inner"])
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise StateError(f"the inner optimiser's saved state does not fit this one ({shortened(error)})") from error
    for group, own in zip(replica.inner.param_groups, numbers, strict=True):
        group.update(own)


def blend(paths: Sequence[Path], *, consensus: bool, rank: int) -> Any:
    """What replica ``rank`` starts from when their number has changed; ``paths`` are the files of all old replicas.

    With consensus every floating tensor of model, inner optimiser and exchange becomes its mean over the old replicas:
    what they share already (anchor, momentum, statistics) stays as it is to the bit, and what is private (residual,
    weights, inner moments) is folded together, so that the mean of all replicas' weights, and all that is still owed to
    the anchor, survives. Without consensus there is nothing to keep together: the new replica goes on from the old one
    of the same rank, modulo K; so does all else of it in either case.
    """
    if not consensus:
        return read(paths[rank % len(paths)])
    files = [File(path) for path in paths]
    own = files[rank % len(files)]
    for file in files:
        if odd := {name for name in set(file.names) ^ set(own.names) if name.startswith(FOLDED)}:
            raise StateError(f"{file.path}: {min(odd)} is not in every old replica's state; they cannot be folded")

    def folded(name: str) -> Tensor:
        return _mean(file.tensor(name) for file in files) if name.startswith(FOLDED) else own.tensor(name)

    return own.together(folded)


def _mean(values: Iterator[Tensor]) -> Tensor:
    first = next(values)
    if not first.is_floating_point():
        return first
    total, count, equal = first.double(), 1, True
    for other in values:
        equal = equal and torch.equal(first, other)
        total, count = total + other, count + 1
    return first if equal else (total / count).to(first.dtype)
