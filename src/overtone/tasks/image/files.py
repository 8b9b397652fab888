"""Labelled images that are decoded when they are used: folders of image files, and saved datasets."""

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
from overtone.tasks.image.source import DATA_FORMS, ImageShape, Source, Splits, check_labels, fits_bytes, survey_rows
from overtone.tasks.sources import choose_splits, load_saved_dataset, part_folders, require

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


class LazySource(Source):
    """Images that are decoded when they are used."""

    slow = True

    @abstractmethod
    def open(self, row: int) -> PilImage:
        """Return an image that Pillow may still have to decode."""

    @abstractmethod
    def name_of(self, row: int) -> str:
        """Return the name of an image for messages."""

    def shape(self, side: int | None) -> ImageShape:
        """Return one channel if all surveyed images are grey, else three. Other images are converted to that."""
        grey, first, size = True, "", (0, 0)
        for row in survey_rows(self).tolist():
            with self._opened(row) as image:
                grey = grey and image.mode in ("1", "L", "LA")
                size = size if first else image.size
                first = first or self.name_of(row)
                if image.size != size and side is None:
                    raise self._wrong_size(row, image, f"{first} is {size[1]}x{size[0]}")
        height, width = (size[1], size[0]) if side is None else (side, side)
        return ImageShape(1 if grey else 3, height, width, resize=side is not None)

    def raw(self, rows: Tensor, shape: ImageShape) -> Tensor:
        """Return these images, decoded and, if the shape allows it, resized: (n, channels, height, width) uint8."""
        return torch.stack([self._decoded(row, shape) for row in rows.tolist()])

    def _decoded(self, row: int, shape: ImageShape) -> Tensor:
        wanted = (shape.width, shape.height)  # Pillow's order
        with self._opened(row) as image:
            if image.size != wanted and not shape.resize:
                raise self._wrong_size(row, image, f"others are {shape.size}")
            try:
                decoded = image.convert("L" if shape.channels == 1 else "RGB")
            except Exception as error:  # Pillow's plugins raise many kinds of errors at a damaged file
                raise _unreadable(self.name_of(row), error) from error
        if decoded.size != wanted:
            decoded = decoded.resize(wanted, _pillow().Resampling.BILINEAR)
        array = torch.from_numpy(np.array(decoded))
        return array.view(shape.height, shape.width, shape.channels).permute(2, 0, 1)

    def _opened(self, row: int) -> PilImage:
        image = self.open(row)
        if image.mode.startswith(("I", "F")):  # Pillow would clip these pixels to 255
            raise TaskError(f"{self.name_of(row)}: pixels of mode {image.mode}; use images of 8 bits per colour")
        return image

    def _wrong_size(self, row: int, image: PilImage, others: str) -> TaskError:
        return TaskError(
            f"{self.name_of(row)}: {image.height}x{image.width}, but {others}; give --side to resize all to one size"
        )


class FileSource(LazySource):
    """Image files below a folder."""

    def __init__(self, root: Path, names: Sequence[str], labels: Tensor) -> None:
        self.root = root
        self.names = names  # relative to the root, so that the fingerprint is the same on another machine
        self.labels = labels

    def open(self, row: int) -> PilImage:
        """Open an image file."""
        pil = _pillow()
        try:
            found: PilImage = pil.open(self.root / self.names[row])
        except Exception as error:  # Pillow's plugins raise many kinds
            raise _unreadable(self.name_of(row), error) from error
        return found

    def name_of(self, row: int) -> str:
        """Return the path of an image."""
        return str(self.root / self.names[row])

    def select(self, rows: Tensor) -> FileSource:
        """Return a source of only these files."""
        return FileSource(self.root, [self.names[row] for row in rows.tolist()], self.labels[rows])

    def fingerprint(self) -> bytes:
        """Return a fingerprint of names, sizes and labels."""
        return _fingerprint_files(self.root, self.names, self.labels)


class DatasetSource(LazySource):
    """Rows of one split of a saved dataset."""

    def __init__(self, path: Path, table: Any, column: str, labels: Tensor, rows: Tensor) -> None:
        self.path = path
        self.table = table
        self.column = column
        self.labels = labels
        self.rows = rows  # the numbers of these rows in the table

    def open(self, row: int) -> PilImage:
        """Return the image in a row, which may be stored as an image or as an array."""
        pil = _pillow()
        try:
            found = self.table[int(self.rows[row])][self.column]
            if isinstance(found, pil.Image):
                return found  # type: ignore[no-any-return]
            array = np.asarray(found)
        except Exception as error:  # Pillow's plugins raise many kinds
            raise _unreadable(self.name_of(row), error) from error
        grey = array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 1)
        if array.dtype.kind not in "iu" or not (grey or array.shape[2:] == (3,)) or not fits_bytes(array):
            raise TaskError(
                f"{self.name_of(row)}: {array.dtype} of shape {array.shape}; store images, or arrays of whole numbers "
                "from 0 to 255 of shape (height, width) or (height, width, 1 or 3)"
            )
        made: PilImage = pil.fromarray(array.astype(np.uint8).reshape(array.shape[:2] if grey else array.shape))
        return made

    def name_of(self, row: int) -> str:
        """Return the path of the dataset, the row and the column."""
        return f"{self.path}, row {int(self.rows[row])} of column {self.column}"

    def select(self, rows: Tensor) -> DatasetSource:
        """Return a source of only these rows."""
        return DatasetSource(self.path, self.table, self.column, self.labels[rows], self.rows[rows])

    def fingerprint(self) -> bytes:
        """Return a fingerprint of the dataset's files and the labels."""
        names = sorted(path.relative_to(self.path).as_posix() for path in self.path.rglob("*.arrow"))
        return _fingerprint_files(self.path, names, self.labels)


def load_image_folder(root: Path) -> Splits:
    """Find the image files below a folder: a subfolder for each class, or such folders in "train" and "validation"."""
    train, held = part_folders(root)
    if train is None:  # then a folder called "test" is a class like any other
        train, held = root, None
    classes = tuple(sorted(path.name for path in train.iterdir() if path.is_dir() and not path.name.startswith(".")))
    if not classes:
        raise TaskError(f"data {train}: no subfolders; {DATA_FORMS}")
    if len(classes) < 2:
        raise TaskError(f"data {train}: only one class, {classes[0]}; give at least two subfolders with images")
    first = _find_files(train, classes)
    for label, name in enumerate(classes):
        if not bool((first.labels == label).any()):
            raise TaskError(f"data {train / name}: no images; add some ({', '.join(SUFFIXES)}) or remove the folder")
    if held is None:
        return Splits(first, None, classes)
    for path in sorted(held.iterdir()):
        if path.is_dir() and not path.name.startswith(".") and path.name not in classes:
            raise TaskError(f"data {path}: class {path.name} is not in {train}; use the same subfolders in both")
    return Splits(first, _find_files(held, classes), classes)


def _find_files(root: Path, classes: Sequence[str]) -> FileSource:
    def images(name: str) -> Iterator[str]:
        for path in (root / name).rglob("*"):
            if path.suffix.lower() in SUFFIXES and path.is_file():
                yield path.relative_to(root).as_posix()

    found = [(name, label) for label, folder in enumerate(classes) for name in sorted(images(folder))]
    return FileSource(root, [name for name, _ in found], torch.tensor([label for _, label in found], dtype=torch.int64))


def load_saved_images(path: Path) -> Splits:
    """Load the splits of a dataset that ``save_to_disk`` wrote."""
    splits = load_saved_dataset(path)
    train, held = choose_splits(splits, None, str(path))
    if not (path / "dataset_dict.json").is_file():  # without splits its files are not in a folder of that name
        rows, classes = _dataset_rows(path, splits[train])
        return Splits(rows, None, classes)
    rows, classes = _dataset_rows(path / train, splits[train])
    return Splits(rows, None if held is None else _dataset_rows(path / held, splits[held])[0], classes)


def _dataset_rows(path: Path, table: Any) -> tuple[DatasetSource, tuple[str, ...] | None]:
    """Return the rows, and the names of their classes if the dataset has names."""
    image, label = _columns(path, table)
    table = table.with_format(None)
    labels = table.select_columns([label])[:][label]
    if None in labels:
        raise TaskError(f"data {path}: row {labels.index(None)} has no label; remove it")
    names = getattr(table.features[label], "names", None)
    found = check_labels(np.asarray(labels), f"data {path}, column {label}", below=names and len(names))
    rows = DatasetSource(path, table.select_columns([image]), image, found, torch.arange(len(found)))
    return rows, None if names is None else tuple(names)


def _columns(path: Path, table: Any) -> tuple[str, str]:
    """Return the columns of images and of labels: found by type, and by name if the type does not decide."""
    types = {name: type(feature).__name__ for name, feature in table.features.items()}
    image = _choose_column(types, "Image", ("image", "img", "pixels", "x"))
    label = _choose_column(types, "ClassLabel", ("label", "labels", "fine_label", "y"))
    if image is None or label is None:
        lacking = "images (image, img, pixels or x)" if image is None else "labels (label, labels, fine_label or y)"
        raise TaskError(f"data {path}: no column of {lacking} among {', '.join(types)}; rename one")
    return image, label


def _choose_column(types: dict[str, str], wanted: str, names: tuple[str, ...]) -> str | None:
    of_type = [name for name, kind in types.items() if kind == wanted]
    candidates = of_type or [name for name in names if name in types]
    return next((name for name in names if name in candidates), candidates[0] if candidates else None)


def _fingerprint_files(root: Path, names: Sequence[str], labels: Tensor) -> bytes:
    """Return a fingerprint of names, sizes and labels: to read every image would take as long as an epoch."""
    sizes = "\n".join(f"{name} {(root / name).stat().st_size}" for name in names)
    return fingerprint.of_bytes(fingerprint.of_text(sizes) + labels.numpy().tobytes())


def _unreadable(name: str, error: Exception) -> TaskError:
    return TaskError(f"{name}: not a readable image ({type(error).__name__}: {error}); replace or remove it")


def _pillow() -> Any:
    return require("PIL.Image", "task image")
