"""Labelled pictures that are decoded when they are asked for: folders of image files, and saved datasets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from overtone.coding import fingerprint
from overtone.errors import TaskError
from overtone.tasks.image.source import FORMS, Form, Parts, Source, are_bytes, checked_labels, surveyed
from overtone.tasks.sources import load_saved, named_splits, needs, parts_below

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


class Lazy(Source):
    """Pictures that are decoded when they are asked for."""

    slow = True  # so that batches are fetched ahead

    @abstractmethod
    def open(self, row: int) -> PilImage: ...

    @abstractmethod
    def title(self, row: int) -> str:
        """How to call this picture in a message."""

    def form(self, side: int | None) -> Form:
        """Grey if all surveyed images are, else of three colours; later images are converted to that."""
        grey, first, size = True, "", (0, 0)
        for row in surveyed(self).tolist():
            with self._opened(row) as picture:
                grey = grey and picture.mode in ("1", "L", "LA")
                size = size if first else picture.size
                first = first or self.title(row)
                if picture.size != size and side is None:
                    raise self._misfit(row, picture, f"{first} is {size[1]}x{size[0]}")
        height, width = (size[1], size[0]) if side is None else (side, side)
        return Form(1 if grey else 3, height, width, resize=side is not None)

    def raw(self, rows: Tensor, form: Form) -> Tensor:
        return torch.stack([self._decoded(row, form) for row in rows.tolist()])

    def _decoded(self, row: int, form: Form) -> Tensor:
        wanted = (form.width, form.height)  # Pillow's order
        with self._opened(row) as picture:
            if picture.size != wanted and not form.resize:
                raise self._misfit(row, picture, f"others are {form.size}")
            try:
                decoded = picture.convert("L" if form.channels == 1 else "RGB")
            except Exception as error:  # Pillow's plugins raise what they like at a broken file
                raise _unreadable(self.title(row), error) from error
        if decoded.size != wanted:
            decoded = decoded.resize(wanted, _pillow().Resampling.BILINEAR)
        array = torch.from_numpy(np.array(decoded))
        return array.view(form.height, form.width, form.channels).permute(2, 0, 1)

    def _opened(self, row: int) -> PilImage:
        picture = self.open(row)
        if picture.mode.startswith(("I", "F")):  # Pillow would clip them to 255
            raise TaskError(f"{self.title(row)}: pixels of mode {picture.mode}; use images of 8 bits per colour")
        return picture

    def _misfit(self, row: int, picture: PilImage, others: str) -> TaskError:
        return TaskError(
            f"{self.title(row)}: {picture.height}x{picture.width}, but {others}; give --side to resize all to one size"
        )


class Files(Lazy):
    """Image files."""

    def __init__(self, root: Path, names: Sequence[str], labels: Tensor) -> None:
        self.root = root
        self.names = names  # relative to the root, so that two machines' stamps agree
        self.labels = labels

    def open(self, row: int) -> PilImage:
        pil = _pillow()
        try:
            found: PilImage = pil.open(self.root / self.names[row])
        except Exception as error:  # as above
            raise _unreadable(self.title(row), error) from error
        return found

    def title(self, row: int) -> str:
        return str(self.root / self.names[row])

    def pick(self, rows: Tensor) -> Files:
        return Files(self.root, [self.names[row] for row in rows.tolist()], self.labels[rows])

    def stamp(self) -> bytes:
        return _stamp(self.root, self.names, self.labels)


class Saved(Lazy):
    """Rows of one split of a saved dataset."""

    def __init__(self, path: Path, table: Any, column: str, labels: Tensor, rows: Tensor) -> None:
        self.path = path
        self.table = table
        self.column = column
        self.labels = labels
        self.rows = rows  # the table's own numbers of these rows

    def open(self, row: int) -> PilImage:
        pil = _pillow()
        try:
            found = self.table[int(self.rows[row])][self.column]
            if isinstance(found, pil.Image):
                return found  # type: ignore[no-any-return]
            array = np.asarray(found)
        except Exception as error:  # as above
            raise _unreadable(self.title(row), error) from error
        grey = array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 1)
        if array.dtype.kind not in "iu" or not (grey or array.shape[2:] == (3,)) or not are_bytes(array):
            raise TaskError(
                f"{self.title(row)}: {array.dtype} of shape {array.shape}; store images, or arrays of whole numbers "
                "from 0 to 255 of shape (height, width) or (height, width, 1 or 3)"
            )
        made: PilImage = pil.fromarray(array.astype(np.uint8).reshape(array.shape[:2] if grey else array.shape))
        return made

    def title(self, row: int) -> str:
        return f"{self.path}, row {int(self.rows[row])} of column {self.column}"

    def pick(self, rows: Tensor) -> Saved:
        return Saved(self.path, self.table, self.column, self.labels[rows], self.rows[rows])

    def stamp(self) -> bytes:
        names = sorted(path.relative_to(self.path).as_posix() for path in self.path.rglob("*.arrow"))
        return _stamp(self.path, names, self.labels)


def folder(root: Path) -> Parts:
    train, held = parts_below(root)
    if train is None:  # then a folder called test is a class like others
        train, held = root, None
    classes = tuple(sorted(path.name for path in train.iterdir() if path.is_dir() and not path.name.startswith(".")))
    if not classes:
        raise TaskError(f"data {train}: no subfolders; {FORMS}")
    if len(classes) < 2:
        raise TaskError(f"data {train}: one class, {classes[0]}; at least two subfolders, each with a class's images")
    first = _files(train, classes)
    for label, name in enumerate(classes):
        if not bool((first.labels == label).any()):
            raise TaskError(f"data {train / name}: no images; add some ({', '.join(SUFFIXES)}) or remove the folder")
    if held is None:
        return Parts(first, None, classes)
    for path in sorted(held.iterdir()):
        if path.is_dir() and not path.name.startswith(".") and path.name not in classes:
            raise TaskError(f"data {path}: class {path.name} is not in {train}; the same subfolders in both")
    return Parts(first, _files(held, classes), classes)


def _files(root: Path, classes: Sequence[str]) -> Files:
    def images(name: str) -> Iterator[str]:
        for path in (root / name).rglob("*"):
            if path.suffix.lower() in SUFFIXES and path.is_file():
                yield path.relative_to(root).as_posix()

    found = [(name, label) for label, folder in enumerate(classes) for name in sorted(images(folder))]
    return Files(root, [name for name, _ in found], torch.tensor([label for _, label in found], dtype=torch.int64))


def saved(path: Path) -> Parts:
    splits = load_saved(path)
    train, held = named_splits(splits, None, str(path))
    if not (path / "dataset_dict.json").is_file():  # no splits: its files are not in a folder of that name
        rows, classes = _rows(path, splits[train])
        return Parts(rows, None, classes)
    rows, classes = _rows(path / train, splits[train])
    return Parts(rows, None if held is None else _rows(path / held, splits[held])[0], classes)


def _rows(path: Path, table: Any) -> tuple[Saved, tuple[str, ...] | None]:
    """The rows, and the names of their classes if the dataset has them."""
    image, label = _columns(path, table)
    table = table.with_format(None)
    labels = table.select_columns([label])[:][label]
    if None in labels:
        raise TaskError(f"data {path}: row {labels.index(None)} has no label; remove it")
    names = getattr(table.features[label], "names", None)
    found = checked_labels(np.asarray(labels), f"data {path}, column {label}", below=names and len(names))
    rows = Saved(path, table.select_columns([image]), image, found, torch.arange(len(found)))
    return rows, None if names is None else tuple(names)


def _columns(path: Path, table: Any) -> tuple[str, str]:
    """The columns of images and labels: by their type, and by their name where the type leaves it open."""
    types = {name: type(feature).__name__ for name, feature in table.features.items()}
    image = _best(types, "Image", ("image", "img", "pixels", "x"))
    label = _best(types, "ClassLabel", ("label", "labels", "fine_label", "y"))
    if image is None or label is None:
        lacking = "images (image, img, pixels or x)" if image is None else "labels (label, labels, fine_label or y)"
        raise TaskError(f"data {path}: no column of {lacking} among {', '.join(types)}; rename one")
    return image, label


def _best(types: dict[str, str], wanted: str, names: tuple[str, ...]) -> str | None:
    of_type = [name for name, kind in types.items() if kind == wanted]
    candidates = of_type or [name for name in names if name in types]
    return next((name for name in names if name in candidates), candidates[0] if candidates else None)


def _stamp(root: Path, names: Sequence[str], labels: Tensor) -> bytes:
    """Of names, sizes and labels: reading every picture would take as long as an epoch."""
    sizes = "\n".join(f"{name} {(root / name).stat().st_size}" for name in names)
    return fingerprint.of_bytes(fingerprint.of_text(sizes) + labels.numpy().tobytes())


def _unreadable(title: str, error: Exception) -> TaskError:
    return TaskError(f"{title}: not a readable image ({type(error).__name__}: {error}); replace or remove it")


def _pillow() -> Any:
    return needs("PIL.Image", "task image")
