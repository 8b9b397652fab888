"""Helpers that all sources of data share: optional libraries, paths, and the names of training and validation parts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from overtone.common.limits import refuse_beyond_memory
from overtone.errors import TaskError

VALIDATION_NAMES = ("validation", "valid", "val", "dev", "test")  # the first of these that exists is used


def require(library: str, purpose: str) -> Any:
    """Import a library that only some tasks need, at the moment it is needed."""
    try:
        return import_module(library)
    except ImportError as error:
        raise TaskError(f"{purpose}: needs {error.name or library}; pip install 'overtone[train]'") from error


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the name of its class if it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def refuse_huge_model(parameters: int, name: str) -> None:
    """Refuse a model that this machine's memory cannot hold."""
    # With a GPU only the weights are ever in this memory; without one, also gradients and some optimizer state.
    bytes_each = 4 if torch.cuda.is_available() else 12
    what = f"model {name}: {parameters:,} parameters"
    refuse_beyond_memory(bytes_each * parameters, what, "use a smaller one, or --dry-run to see its cost", TaskError)


def existing_path(data: str, way_out: str) -> Path:
    """Return the path of a file or folder that exists."""
    path = Path(data)
    if not path.exists():
        raise TaskError(f"data {data}: no such file or folder; {way_out}")
    if not (path.is_file() or path.is_dir()):  # a device or a pipe has no end: reading it would fill the memory
        raise TaskError(f"data {data}: neither a file nor a folder; {way_out}")
    return path


def check_tokenizer_file(file: Path) -> None:
    """Refuse a tokenizer file that does not exist."""
    if not file.is_file():
        raise TaskError(f"tokenizer {file}: no such file; give a tokenizer.json of the tokenizers library")


def part_folders(root: Path) -> tuple[Path | None, Path | None]:
    """Return the subfolders with training data and with validation data; None for one that does not exist."""
    train = root / "train"
    valid = next((root / name for name in VALIDATION_NAMES if (root / name).is_dir()), None)
    return train if train.is_dir() else None, valid


def choose_splits(splits: Collection[str], wanted: str | None, data: str) -> tuple[str, str | None]:
    """Return the names of the training split and of the validation split of a dataset.

    The training split is ``wanted``, or "train", or the only split. The validation split is None if there is none.
    """
    train = wanted or ("train" if "train" in splits or len(splits) != 1 else next(iter(splits)))
    if train not in splits:
        raise TaskError(f"data {data}: has no split {train!r}; its splits are {', '.join(splits)}")
    return train, next((name for name in VALIDATION_NAMES if name in splits and name != train), None)


def is_saved_dataset(folder: Path) -> bool:
    """Whether the datasets library wrote this folder."""
    return any((folder / file).is_file() for file in ("dataset_dict.json", "state.json"))


def load_saved_dataset(folder: Path) -> Mapping[str, Any]:
    """Return the splits of a dataset that ``save_to_disk`` wrote, by name. A dataset without splits is all "train"."""
    library = require("datasets", f"data {folder}")
    try:
        saved = library.load_from_disk(str(folder))
    except Exception as error:  # a damaged folder raises many kinds of errors, a dataset without rows IndexError
        raise TaskError(
            f"data {folder}: empty or damaged ({type(error).__name__}: {first_line(error)}); "
            "save it again with save_to_disk"
        ) from error
    return saved if isinstance(saved, dict) else {"train": saved}
