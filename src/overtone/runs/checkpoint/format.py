"""The file format of checkpoints: everything of one replica, so that a run can continue bit for bit.

Each replica writes a file of its own; no checkpoint data crosses the network. Tensors are stored by `safetensors`,
everything else as JSON in the header of the file. A file is first written under a temporary name, then flushed to the
disk and renamed. A checkpoint is complete when the files of all its replicas exist. Reading never executes code: JSON
gives numbers and texts, safetensors gives raw numbers.
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

FORMAT = 1
IN_FLIGHT = "replica.flight."
FOLDED = ("model.", "inner.", "replica.")  # tensors with these prefixes are averaged when the replica count changes


# -- trees of tensors ------------------------------------------------------------------------------------------------


def flatten(tree: Any, tensors: dict[str, Tensor], name: str = "") -> Any:
    """The tree as JSON, with the name of each tensor in its place. The tensors go into ``tensors``, by name."""
    if isinstance(tree, Tensor) and tree.is_complex():  # as pairs: safetensors does not know every complex type
        tensors[name] = torch.view_as_real(tree.detach().resolve_conj())
        return {"complex": name}
    if isinstance(tree, Tensor):
        tensors[name] = tree
        return {"tensor": name}
    if isinstance(tree, Mapping):  # as pairs: JSON would turn keys that are numbers into texts
        return {"map": [[key, flatten(value, tensors, _below(name, key))] for key, value in tree.items()]}
    if isinstance(tree, list | tuple):
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [flatten(value, tensors, _below(name, i)) for i, value in enumerate(tree)]}
    if isinstance(tree, bool | int | float | str | None):
        return tree
    raise StateError(
        f"{name}: a {type(tree).__name__} cannot be saved; use numbers, texts, tensors, and dicts and lists of them"
    )


def unflatten(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `flatten`."""
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "complex":
        return torch.view_as_complex(tensors[value])
    if kind == "map":
        return {key: unflatten(inner, tensors) for key, inner in value}
    parts = [unflatten(inner, tensors) for inner in value]
    return parts if kind == "list" else tuple(parts)


def _below(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)


# -- one file --------------------------------------------------------------------------------------------------------


class File:
    """The file of one replica. Opening checks the whole file and raises `CheckpointError` if it is not sound; tensors
    are read when they are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._instead: dict[str, Tensor] = {}  # tensors that are not those on the disk
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
            self.flat = said["tree"]
            if said["fingerprint"] != stamp(self.flat, self.names, self.tensor):
                raise damaged(path, "it does not hold what was written")
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise damaged(path, f"its header cannot be read: {shortened(error)}") from error

    def tensor(self, name: str) -> Tensor:
        """One tensor, read from the disk."""
        if name in self._instead:
            return self._instead[name]
        found: Tensor = self._file.get_tensor(name)
        return found

    def settle(self, take_back: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """If a round was in flight, take it back, so that its message is owed again. The file itself does not change.

        ``take_back`` does that to the state of a replica.
        """
        if not any(name.startswith(IN_FLIGHT) for name in self.names):
            return
        tree = self.tree()
        with reading(self.path, "round in flight"):
            settled = {**tree, "replica": take_back(tree["replica"])}
        self._instead = {}
        self.flat = flatten(settled, self._instead)
        self.names = sorted(self._instead)

    def tree(self, tensor: Callable[[str], Tensor] | None = None) -> dict[str, Any]:
        """The whole tree. ``tensor`` gives a tensor by its name; by default it is read from this file."""
        with reading(self.path, "header"):
            tree = unflatten(self.flat, {name: (tensor or self.tensor)(name) for name in self.names})
            if not isinstance(tree, dict):
                raise TypeError(f"a {type(tree).__name__} in place of a tree")
            return tree


def damaged(path: Path, why: str) -> CheckpointError:
    """The error for a file that is not sound, with the way out."""
    return CheckpointError(f"{path}: damaged ({why}). Delete {path.parent} to go on from the checkpoint before it")


@contextmanager
def reading(path: Path, part: str) -> Iterator[None]:
    """Turn any error inside into a `CheckpointError` that names the file and the part. A correct fingerprint does not
    prove that the values make sense: whoever writes a file can also compute its fingerprint."""
    try:
        yield
    except OvertoneError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise damaged(path, f"its {part} cannot be read: {shortened(error)}") from error


def read(path: Path) -> dict[str, Any]:
    """The tree of one replica."""
    return File(path).tree()


def stamp(flat: Any, names: Sequence[str], tensor: Callable[[str], Tensor]) -> str:
    """A fingerprint of the whole content: the flattened tree as JSON, and the tensors."""
    words = fingerprint.of_text(json.dumps([flat, names]))
    return (words + fingerprint.of_tensors(tensor(name) for name in names)).hex()


def write(path: Path, flat: Any, tensors: dict[str, Tensor]) -> None:
    """Write a flattened tree and its tensors. The file appears under ``path`` complete or not at all."""
    beside = path.with_name(f".{path.name}.tmp")
    said = {"format": FORMAT, "fingerprint": stamp(flat, sorted(tensors), tensors.__getitem__), "tree": flat}
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


# -- the replica's part of the tree ----------------------------------------------------------------------------------


def tree_of(replica: Replica) -> dict[str, Any]:
    """Model, inner optimizer and exchange state of a replica. The tensors are references, not copies."""
    return {
        "model": {**replica.parameters.all, **replica.buffers.named()},
        "inner": replica.inner.state_dict(),
        "replica": replica.state_dict(),
    }


@torch.no_grad()
def restore(replica: Replica, tree: Mapping[str, Any]) -> None:
    """Load what `tree_of` saved. The exchange state comes first: it refuses the state of another model or method
    before anything has changed. Over a store it comes last: what this replica owes follows from its saved weights."""
    stored = "store" in tree["replica"]
    if not stored:
        replica.load_state_dict(tree["replica"])
    mine = {**replica.parameters.all, **replica.buffers.named()}
    for name, tensor in mine.items():
        if tree["model"][name].shape != tensor.shape:
            raise StateError(f"model: {name} is {tuple(tree['model'][name].shape)} in the saved state")
    for name, tensor in mine.items():
        tensor.copy_(tree["model"][name])
    # An optimizer's state includes its options (weight decay and so on). The options of this run win.
    options = [{key: value for key, value in g.items() if key != "params"} for g in replica.inner.param_groups]
    try:
        replica.inner.load_state_dict(tree["inner"])
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise StateError(f"the inner optimizer's saved state does not fit this one ({shortened(error)})") from error
    for group, own in zip(replica.inner.param_groups, options, strict=True):
        group.update(own)
    if stored:
        replica.load_state_dict(tree["replica"])


# -- another number of replicas --------------------------------------------------------------------------------------


def fold(
    paths: Sequence[Path],
    *,
    consensus: bool,
    rank: int,
    take_back: Callable[[dict[str, Any]], dict[str, Any]] = lambda state: state,
) -> dict[str, Any]:
    """The tree from which replica ``rank`` starts if the number of replicas has changed. ``paths`` are the files of all
    old replicas. ``take_back`` takes a round that was in flight out of the state of one of them.

    With consensus, every floating tensor of model, inner optimizer and exchange state becomes its mean over the old
    replicas. Tensors that the replicas share (anchor, momentum, statistics) stay the same to the bit. Private tensors
    (residual, weights, inner moments) are averaged, so the mean of all weights and of all residuals is preserved.
    Everything else is taken from old rank ``rank % K``. Without consensus, the whole tree is.
    """
    if not consensus:
        return read(paths[rank % len(paths)])
    files = [File(path) for path in paths]
    own = files[rank % len(files)]
    for file in files:
        file.settle(take_back)
    for file in files:
        if odd := {name for name in set(file.names) ^ set(own.names) if name.startswith(FOLDED)}:
            raise StateError(f"{file.path}: {min(odd)} is not in every old replica's state; they cannot be folded")

    def folded(name: str) -> Tensor:
        return _mean(file.tensor(name) for file in files) if name.startswith(FOLDED) else own.tensor(name)

    return own.tree(folded)


def _mean(values: Iterator[Tensor]) -> Tensor:
    """The mean in float64. Equal tensors are returned as they are: a sum could round them."""
    first = next(values)
    if not first.is_floating_point():
        return first
    total, count, equal = first.double(), 1, True
    for other in values:
        equal = equal and torch.equal(first, other)
        total, count = total + other, count + 1
    return first if equal else (total / count).to(first.dtype)
