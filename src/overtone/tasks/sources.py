"""What all sources of data share: the libraries that read them, and how people name their parts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from overtone.common.limits import refuse_beyond_memory
from overtone.errors import TaskError

VALID = ("validation", "valid", "val", "dev", "test")  # what a validation part is called, the likeliest first


def needs(library: str, purpose: str) -> Any:
    """A library that only some tasks use, when it is used."""
    try:
        return import_module(library)
    except ImportError as error:
        raise TaskError(f"{purpose}: needs {error.name or library}; pip install 'overtone[train]'") from error


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def refuse_huge_model(parameters: int, name: str) -> None:
    """Weights alone where the rest lies on a GPU; on the CPU gradients and a state beside them."""
    held = 4 if torch.cuda.is_available() else 12
    what = f"model {name}: {parameters:,} parameters"
    refuse_beyond_memory(held * parameters, what, "use a smaller one, or --dry-run to see its cost", TaskError)


def existing(data: str, forms: str) -> Path:
    """The file or folder that was named. A device or a pipe has no end: reading it would fill the memory."""
    path = Path(data)
    if not path.exists():
        raise TaskError(f"data {data}: no such file or folder; {forms}")
    if not (path.is_file() or path.is_dir()):
        raise TaskError(f"data {data}: neither a file nor a folder; {forms}")
    return path


def refuse_no_tokenizer(file: Path) -> None:
    if not file.is_file():
        raise TaskError(f"tokenizer {file}: no such file; give a tokenizer.json of the tokenizers library")


def parts_below(root: Path) -> tuple[Path | None, Path | None]:
    """The subfolders of training and of validation data, where there are such."""
    train = root / "train"
    valid = next((root / name for name in VALID if (root / name).is_dir()), None)
    return train if train.is_dir() else None, valid


def named_splits(splits: Collection[str], wanted: str | None, data: str) -> tuple[str, str | None]:
    """Which of a dataset's splits is for training (``wanted``, or train, or the only one there is), and which is for
    validation, if one is."""
    train = wanted or ("train" if "train" in splits or len(splits) != 1 else next(iter(splits)))
    if train not in splits:
        raise TaskError(f"data {data}: no split {train!r}; there are {', '.join(splits)}")
    return train, next((name for name in VALID if name in splits and name != train), None)


def is_saved(folder: Path) -> bool:
    """The datasets library wrote this folder."""
    return any((folder / file).is_file() for file in ("dataset_dict.json", "state.json"))


def load_saved(folder: Path) -> Mapping[str, Any]:
    """The splits of a dataset that was saved to disk, by name; one without splits is all for training."""
    library = needs("datasets", f"data {folder}")
    try:
        saved = library.load_from_disk(str(folder))
    except Exception as error:  # a broken folder shows itself in as many ways as it has files; IndexError: no rows
        raise TaskError(
            f"data {folder}: empty or damaged ({type(error).__name__}: {first_line(error)}); "
            "save it again with save_to_disk"
        ) from error
    return saved if isinstance(saved, dict) else {"train": saved}
