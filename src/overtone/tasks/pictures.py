"""Labelled pictures from where people keep them: folders of images, saved `datasets`, npz and IDX files.

Arrays are held in memory as they are; images are decoded when they are asked for. What lacks a validation part has a
tenth of each class held out, the same one on every start.

Shapes: raw pictures are (n, channels, height, width), of bytes, or of float32 if that is what the file has; batches
have the same shape and are float32.
"""

from __future__ import annotations

import gzip
import math
import struct
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from overtone import fingerprint
from overtone.tasks.deal import TaskError, dice_for

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
HELD_OUT = ("valid", "val", "validation", "test")  # what people call the part that is not trained on, best first
SURVEYED = 512  # images that a lazy source is judged by: their size, their colours, their mean
MOST_CLASSES = 65_536  # beyond this a column of labels is more likely one of identities
FORMS = (
    "give a folder of images with one subfolder per class, a folder written by datasets' save_to_disk, an .npz with "
    "x_train, y_train, x_test, y_test, or a folder of IDX files"
)


@dataclass(frozen=True)
class Form:
    """What every picture of the data looks like."""

    channels: int
    height: int
    width: int
    resize: bool  # pictures of another size are made this size; else they are refused

    @property
    def size(self) -> str:
        return f"{self.height}x{self.width}"


class Source(ABC):
    """Labelled pictures that can be asked for by number."""

    labels: Tensor  # (n,) int64
    slow: bool

    @abstractmethod
    def form(self, side: int | None) -> Form: ...

    @abstractmethod
    def raw(self, rows: Tensor, form: Form) -> Tensor:
        """(rows, channels, height, width), uint8 or float32."""

    @abstractmethod
    def pick(self, rows: Tensor) -> Source: ...

    @abstractmethod
    def stamp(self) -> bytes:
        """Eight bytes that differ when the data do."""


class Arrays(Source):
    """Pictures in memory."""

    slow = False

    def __init__(self, pixels: Tensor, labels: Tensor) -> None:
        self.pixels = pixels
        self.labels = labels

    def form(self, side: int | None) -> Form:
        _, channels, height, width = self.pixels.shape
        return Form(channels, height, width, resize=side is not None)

    def raw(self, rows: Tensor, form: Form) -> Tensor:  # noqa: ARG002
        return self.pixels[rows]

    def pick(self, rows: Tensor) -> Arrays:
        return Arrays(self.pixels[rows], self.labels[rows])

    def stamp(self) -> bytes:
        return fingerprint.of_tensors([self.pixels, self.labels]) if len(self.labels) else bytes(8)


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
        for row in spread(len(self.labels), SURVEYED).tolist():
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
            decoded = decoded.resize(wanted, needed("PIL.Image").Resampling.BILINEAR)
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
        try:
            found: PilImage = needed("PIL.Image").open(self.root / self.names[row])
        except Exception as error:  # as above
            raise _unreadable(self.title(row), error) from error
        return found

    def title(self, row: int) -> str:
        return str(self.root / self.names[row])

    def pick(self, rows: Tensor) -> Files:
        return Files(self.root, [self.names[row] for row in rows.tolist()], self.labels[rows])

    def stamp(self) -> bytes:
        sizes = (f"{name} {(self.root / name).stat().st_size}" for name in self.names)
        return fingerprint.of_bytes(fingerprint.of_text("\n".join(sizes)) + self.labels.numpy().tobytes())


class Saved(Lazy):
    """Rows of one split of a saved dataset."""

    def __init__(self, path: Path, table: Any, column: str, labels: Tensor, rows: Tensor) -> None:
        self.path = path
        self.table = table
        self.column = column
        self.labels = labels
        self.rows = rows  # the table's own numbers of these rows

    def open(self, row: int) -> PilImage:
        pil = needed("PIL.Image")
        try:
            found = self.table[int(self.rows[row])][self.column]
            if isinstance(found, pil.Image):
                return found  # type: ignore[no-any-return]
            array = np.asarray(found)
        except Exception as error:  # as above
            raise _unreadable(self.title(row), error) from error
        grey = array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 1)
        if array.dtype.kind not in "iu" or not (grey or array.shape[2:] == (3,)) or not _are_bytes(array):
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
        sizes = sorted(f"{p.relative_to(self.path).as_posix()} {p.stat().st_size}" for p in self.path.rglob("*.arrow"))
        return fingerprint.of_bytes(fingerprint.of_text("\n".join(sizes)) + self.labels.numpy().tobytes())


# -- batches ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """How raw pictures become a model's input: (raw · scale − mean) / std, per channel."""

    scale: float
    mean: Tensor  # (channels,)
    std: Tensor

    def normalised(self, raw: Tensor) -> Tensor:
        x = raw.to(torch.float32) * self.scale
        return (x - self.mean.view(-1, 1, 1)) / self.std.view(-1, 1, 1)


class Shown:
    """Samples: pictures normalised, and if there are dice, mirrored and shifted by them."""

    def __init__(self, source: Source, form: Form, look: Look, *, flip: bool = False, crop: int = 0) -> None:
        if crop and crop >= min(form.height, form.width):
            raise TaskError(f"crop={crop}: less than the images' side ({form.size}), or nothing of them may be left")
        self.source = source
        self.form = form
        self.look = look
        self.flip = flip
        self.crop = crop
        self.slow = source.slow

    def __len__(self) -> int:
        return len(self.source.labels)

    def batch(self, rows: Tensor, dice: torch.Generator | None) -> tuple[Tensor, Tensor]:
        raw = self.source.raw(rows, self.form)
        if dice is not None and self.flip:
            raw = mirrored(raw, torch.rand(len(raw), generator=dice) < 0.5)
        if dice is not None and self.crop:
            by = torch.randint(-self.crop, self.crop + 1, (len(raw), 2), generator=dice)
            raw = shifted(raw, by, self.crop)
        return self.look.normalised(raw), self.source.labels[rows]


def mirrored(raw: Tensor, which: Tensor) -> Tensor:
    """Left and right change places in the pictures where ``which`` (n,) is true."""
    return torch.where(which.view(-1, 1, 1, 1), raw.flip(-1), raw)


def shifted(raw: Tensor, by: Tensor, most: int) -> Tensor:
    """Picture i moved by ``by[i]`` pixels, down and to the right, each at most ``most``; zeros (black) move in."""
    n, channels, height, width = raw.shape
    padded = F.pad(raw, (most, most, most, most))
    down = (most - by[:, 0, None] + torch.arange(height)).view(n, 1, height, 1)
    right = (most - by[:, 1, None] + torch.arange(width)).view(n, 1, 1, width)
    return padded[torch.arange(n).view(n, 1, 1, 1), torch.arange(channels).view(1, channels, 1, 1), down, right]


# -- loading ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pictures:
    """Pictures to train on and to validate with."""

    name: str
    train: Source
    valid: Source
    classes: tuple[str, ...]
    form: Form
    look: Look


@dataclass(frozen=True)
class Parts:
    """What a loader finds; no ``valid`` asks for a part of ``train`` to be held out."""

    train: Source
    valid: Source | None
    classes: tuple[str, ...] | None = None  # their names, if they have any


def load_pictures(data: str | None, side: int | None) -> Pictures:
    """The pictures at a path; scikit-learn's digits for None. "none" is no data at all, but the shape of ImageNet's:
    enough to build a model from."""
    if data == "none":
        return _nothing(side or 224)
    name, parts = _found(data, side)
    train, valid = parts.train, parts.valid
    if len(train.labels.unique()) < 2:
        raise TaskError(f"data {name}: all training images have label {int(train.labels[0])}; at least two classes")
    classes = parts.classes or tuple(map(str, range(int(train.labels.max()) + 1)))
    if valid is None:
        kept, held = hold_out(train.labels)
        train, valid = train.pick(kept), train.pick(held)
    if len(valid.labels) == 0:
        raise TaskError(f"data {name}: no validation images; add some, or leave that part out to have it held out")
    if int(valid.labels.max()) >= len(classes):
        raise TaskError(
            f"data {name}: label {int(valid.labels.max())} among the validation images, but the training labels go to "
            f"{len(classes) - 1}; a class that is not trained on cannot be recognised"
        )
    form = train.form(side)
    return Pictures(name, train, valid, classes, form, look_of(train, form))


def _found(data: str | None, side: int | None) -> tuple[str, Parts]:
    if data is None:
        return "digits", _digits(side)
    if data.startswith("hub:"):
        raise TaskError(
            f"data {data}: images are not streamed from the hub; download them once with "
            f"datasets.load_dataset({data[4:]!r}).save_to_disk(FOLDER) and give the folder"
        )
    path = Path(data)
    if not path.exists():
        raise TaskError(f"data {data}: no such file or folder; {FORMS}")
    if path.is_dir():
        if any((path / file).is_file() for file in ("dataset_dict.json", "state.json")):
            return path.name, _saved(path)
        if _idx_file(path, "train-images") is not None:
            return path.name, _idx(path, side)
        return path.name, _folder(path)
    if path.suffix != ".npz":
        raise TaskError(f"data {data}: not a form of pictures that is known; {FORMS}")
    return path.name, _npz(path, side)


def _nothing(side: int) -> Pictures:
    empty = Arrays(torch.empty(0, 3, side, side, dtype=torch.uint8), torch.empty(0, dtype=torch.int64))
    look = Look(1 / 255, torch.full((3,), 0.5), torch.full((3,), 0.5))
    return Pictures("none", empty, empty, tuple(map(str, range(1000))), Form(3, side, side, resize=True), look)


def _digits(side: int | None) -> Parts:
    bunch = needed("sklearn.datasets").load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)  # its greys are 0 to 16
    return _in_memory((images, bunch.target), None, side, "digits")


def _npz(path: Path, side: int | None) -> Parts:
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    try:
        with np.load(path, allow_pickle=False) as archive:
            files = list(archive.files)
            for name in ("x_train", "y_train", "x_test", "y_test", "x", "y"):
                if name in files:
                    arrays[name] = archive[name]
    except (OSError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise TaskError(f"data {path}: not a readable .npz of plain arrays ({error}); write it anew") from error
    if {"x_train", "y_train"} <= arrays.keys() and ("x_test" in arrays) == ("y_test" in arrays):
        test = (arrays["x_test"], arrays["y_test"]) if "x_test" in arrays else None
        return _in_memory((arrays["x_train"], arrays["y_train"]), test, side, str(path))
    if {"x", "y"} <= arrays.keys():
        return _in_memory((arrays["x"], arrays["y"]), None, side, str(path))
    raise TaskError(
        f"data {path}: has {', '.join(files) or 'no arrays'}; name them x_train, y_train, x_test, y_test, or x and y"
    )


def _idx(folder: Path, side: int | None) -> Parts:
    parts = []
    for part in ("train", "t10k"):
        images, labels = _idx_file(folder, f"{part}-images"), _idx_file(folder, f"{part}-labels")
        if images is None and labels is None:
            continue
        if images is None or labels is None:
            missing = "images" if images is None else "labels"
            raise TaskError(f"data {folder}: no {part}-{missing}* file; images and labels come in pairs")
        parts.append((read_idx(images, dimensions=(3, 4)), read_idx(labels, dimensions=(1,))))
    return _in_memory(parts[0], parts[1] if len(parts) > 1 else None, side, str(folder))


def _idx_file(folder: Path, start: str) -> Path | None:
    found = sorted(path for path in folder.glob(f"{start}*") if path.is_file())
    return found[0] if found else None  # a plain file comes before the same with .gz


def read_idx(path: Path, *, dimensions: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The array in an IDX file: two zero bytes, the type (8: bytes), the number of dimensions, each as a big-endian
    32-bit number, then the values."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise TaskError(f"data {path}: cannot be read ({error}); download it again") from error
    start = content[:4]
    if len(start) < 4 or start[:3] != b"\0\0\x08" or start[3] not in dimensions:
        wanted = " or ".join(f"0000080{d}" for d in dimensions)
        raise TaskError(f"data {path}: starts with {start.hex() or 'nothing'}, an IDX file of bytes with {wanted}")
    body = 4 + 4 * start[3]
    shape = struct.unpack(f">{start[3]}I", content[4:body]) if len(content) >= body else (1 << 32,)
    if len(content) - body != math.prod(shape):
        raise TaskError(
            f"data {path}: {len(content)} bytes, but its header says {body} + {math.prod(shape)}; download it again"
            if len(content) >= body
            else f"data {path}: ends within its header, after {len(content)} bytes; download it again"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=body).reshape(shape)


Labelled = tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]


def _in_memory(train: Labelled, test: Labelled | None, side: int | None, where: str) -> Parts:
    first = _arrays(*train, side, f"data {where}, training part")
    if test is None:
        return Parts(first, None)
    second = _arrays(*test, side, f"data {where}, validation part")
    ours, theirs = first.pixels, second.pixels
    if ours.shape[1:] != theirs.shape[1:] or ours.dtype != theirs.dtype:
        raise TaskError(
            f"data {where}: training images are {ours.dtype} of shape {tuple(ours.shape[1:])}, validation images "
            f"{theirs.dtype} of shape {tuple(theirs.shape[1:])}; give --side to resize, and the same kind of pixels"
        )
    return Parts(first, second)


def _arrays(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], side: int | None, where: str) -> Arrays:
    if x.ndim == 3:
        x = x[..., None]
    if x.ndim != 4 or not 1 <= x.shape[3] <= 4 or 0 in x.shape:
        raise TaskError(
            f"{where}: images of shape {x.shape}; use (n, height, width) or (n, height, width, channels) with 1 to 4 "
            "channels, which come last"
        )
    labels = checked_labels(y, where)
    if len(x) != len(labels):
        raise TaskError(f"{where}: {len(x)} images, but {len(labels)} labels; one label for each image")
    if x.dtype.kind == "f":
        if not np.isfinite(x).all():
            raise TaskError(f"{where}: pixels that are not finite; remove the infinities and NaNs")
        x = x.astype(np.float32)
    elif x.dtype.kind in "iub" and _are_bytes(x):
        x = x.astype(np.uint8)
    else:
        raise TaskError(f"{where}: pixels of type {x.dtype}; use floating numbers, or whole ones from 0 to 255")
    pixels = torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2)))
    return Arrays(pixels if side is None else resized(pixels, side), labels)


def resized(pixels: Tensor, side: int) -> Tensor:
    """(n, channels, side, side): bilinear, and averaged over what a smaller picture's pixels cover."""
    if pixels.shape[2:] == (side, side):
        return pixels
    made = []
    for part in pixels.split(1024):
        small = F.interpolate(part.float(), size=(side, side), mode="bilinear", align_corners=False, antialias=True)
        made.append(small if pixels.is_floating_point() else small.round().clamp(0, 255).to(torch.uint8))
    return torch.cat(made)


def _folder(root: Path) -> Parts:
    train = root / "train" if (root / "train").is_dir() else root
    classes = tuple(sorted(path.name for path in train.iterdir() if path.is_dir() and not path.name.startswith(".")))
    if not classes:
        raise TaskError(f"data {train}: no subfolders; {FORMS}")
    if len(classes) < 2:
        raise TaskError(f"data {train}: one class, {classes[0]}; at least two subfolders, each with a class's images")
    first = _files(train, classes)
    for label, name in enumerate(classes):
        if not bool((first.labels == label).any()):
            raise TaskError(f"data {train / name}: no images; add some ({', '.join(SUFFIXES)}) or remove the folder")
    held = next((root / name for name in HELD_OUT if (root / name).is_dir()), None) if train != root else None
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


def _saved(path: Path) -> Parts:
    datasets = needed("datasets")
    try:
        found = datasets.load_from_disk(str(path))
    except Exception as error:  # a broken folder shows itself in as many ways as it has files
        raise TaskError(f"data {path}: not a readable saved dataset ({error}); save it anew") from error
    if not isinstance(found, datasets.DatasetDict):
        rows, classes = _rows(path, found)
        return Parts(rows, None, classes)
    if "train" not in found:
        raise TaskError(f"data {path}: its splits are {', '.join(found)}; one called train is needed")
    rows, classes = _rows(path / "train", found["train"])
    held = next((name for name in HELD_OUT if name in found), None)
    return Parts(rows, None if held is None else _rows(path / held, found[held])[0], classes)


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


# -- what all of them need ----------------------------------------------------------------------------------------


def checked_labels(values: np.ndarray[Any, Any], where: str, *, below: int | None = None) -> Tensor:
    """(n,) int64, from (n,) or (n, 1) whole numbers of any kind."""
    if values.ndim == 2 and values.shape[1] == 1:  # as Keras has them
        values = values[:, 0]
    if values.size == 0:
        raise TaskError(f"{where}: no labelled images in it")
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise TaskError(f"{where}: labels are {values.dtype} of shape {values.shape}; one whole number for each image")
    if not 0 <= int(values.min()) <= int(values.max()) < (below or MOST_CLASSES):
        raise TaskError(
            f"{where}: labels from {values.min()} to {values.max()}; number the classes from 0 to at most "
            f"{(below or MOST_CLASSES) - 1}"
        )
    return torch.from_numpy(values.astype(np.int64))


def hold_out(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Nine tenths and one tenth of the rows: shuffled, put in the order of their labels, and every tenth taken."""
    mixed = torch.randperm(len(labels), generator=dice_for("hold out", len(labels)))
    by_label = mixed[torch.sort(labels[mixed], stable=True).indices]
    held = torch.zeros(len(labels), dtype=torch.bool)
    held[by_label[min(5, len(labels) - 1) :: 10]] = True
    return torch.nonzero(~held).flatten(), torch.nonzero(held).flatten()


def spread(size: int, most: int) -> Tensor:
    """At most ``most`` of the numbers 0 to size − 1, evenly spaced."""
    count = min(size, most)
    return torch.arange(count) * size // max(count, 1)


def look_of(train: Source, form: Form) -> Look:
    """The mean and deviation of each channel over the training pictures, or over a sample of those to be decoded."""
    rows = spread(len(train.labels), SURVEYED if train.slow else len(train.labels))
    total, squares = torch.zeros(2, form.channels, dtype=torch.float64)
    scale = 1.0
    for part in rows.split(16 if train.slow else 1024):
        raw = train.raw(part, form)
        scale = 1.0 if raw.is_floating_point() else 1 / 255
        x = raw.to(torch.float64)
        total += x.sum((0, 2, 3))  # exact for bytes, and so the same in any order
        squares += (x * x).sum((0, 2, 3))
    pixels = len(rows) * form.height * form.width
    mean = total / pixels
    std = (squares / pixels - mean * mean).clamp(min=0).sqrt()
    std[std <= 1e-6 * mean.abs()] = 1 / scale  # a channel that never varies becomes zeros, not NaN or noise
    return Look(scale, (mean * scale).float(), (std * scale).float())


def needed(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise TaskError(f"task image: needs {error.name or module}; pip install 'overtone[train]'") from error


def _unreadable(title: str, error: Exception) -> TaskError:
    return TaskError(f"{title}: not a readable image ({type(error).__name__}: {error}); replace or remove it")


def _are_bytes(array: np.ndarray[Any, Any]) -> bool:
    return array.size > 0 and bool(array.min() >= 0 and array.max() <= 255)
