"""Labelled images as arrays in memory: scikit-learn's digits, npz files, and IDX files (the form of MNIST)."""

from __future__ import annotations

import gzip
import math
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from overtone.common.limits import refuse_beyond_memory
from overtone.errors import TaskError
from overtone.tasks.image.source import ArraySource, Splits, check_labels, fits_bytes
from overtone.tasks.sources import require

RESIZED_AT_ONCE = 1024  # images, as float32

Labelled = tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]  # images and labels


def load_digits(side: int | None) -> Splits:
    """Load the 1797 digits of 8 × 8 pixels that come with scikit-learn."""
    bunch = require("sklearn.datasets", "task image").load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)  # scikit-learn has greys from 0 to 16
    return _in_memory((images, bunch.target), None, side, "digits")


def load_npz(path: Path, side: int | None) -> Splits:
    """Load x_train, y_train and, if they are there, x_test, y_test; or x and y. Channels come last."""
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    try:
        with np.load(path, allow_pickle=False) as archive:
            files = list(archive.files)
            for name in ("x_train", "y_train", "x_test", "y_test", "x", "y"):
                if name in files:
                    arrays[name] = archive[name]
    except (OSError, ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise TaskError(f"data {path}: not a readable .npz of plain arrays ({error}); write it again") from error
    if {"x_train", "y_train"} <= arrays.keys() and ("x_test" in arrays) == ("y_test" in arrays):
        test = (arrays["x_test"], arrays["y_test"]) if "x_test" in arrays else None
        return _in_memory((arrays["x_train"], arrays["y_train"]), test, side, str(path))
    if {"x", "y"} <= arrays.keys():
        return _in_memory((arrays["x"], arrays["y"]), None, side, str(path))
    raise TaskError(
        f"data {path}: has {', '.join(files) or 'no arrays'}; name them x_train, y_train, x_test, y_test, or x and y"
    )


def load_idx(folder: Path, side: int | None) -> Splits:
    """Load the files train-images*, train-labels* and, if they are there, t10k-images*, t10k-labels*."""
    parts = []
    for part in ("train", "t10k"):
        images, labels = find_idx_file(folder, f"{part}-images"), find_idx_file(folder, f"{part}-labels")
        if images is None and labels is None:
            continue
        if images is None or labels is None:
            missing = "images" if images is None else "labels"
            raise TaskError(f"data {folder}: no {part}-{missing}* file; images and labels come in pairs")
        parts.append((read_idx(images, dimensions=(3, 4)), read_idx(labels, dimensions=(1,))))
    return _in_memory(parts[0], parts[1] if len(parts) > 1 else None, side, str(folder))


def find_idx_file(folder: Path, start: str) -> Path | None:
    """Return the file whose name begins so, if there is one."""
    found = sorted(path for path in folder.glob(f"{start}*") if path.is_file())
    return found[0] if found else None  # sorted: a plain file comes before the same file with .gz


def read_idx(path: Path, *, dimensions: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the array in an IDX file, which may be gzipped.

    The form: two zero bytes, the type (8: bytes), the number of dimensions, the size of each as a big-endian 32-bit
    number, then the values.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise TaskError(f"data {path}: cannot be read ({error}); download it again") from error
    start = content[:4]
    if len(start) < 4 or start[:3] != b"\0\0\x08" or start[3] not in dimensions:
        wanted = " or ".join(f"0000080{d}" for d in dimensions)
        raise TaskError(
            f"data {path}: starts with {start.hex() or 'nothing'}, but an IDX file of bytes starts with {wanted}; "
            "download it again"
        )
    body = 4 + 4 * start[3]
    shape = struct.unpack(f">{start[3]}I", content[4:body]) if len(content) >= body else (1 << 32,)
    if len(content) - body != math.prod(shape):
        raise TaskError(
            f"data {path}: {len(content)} bytes, but its header says {body} + {math.prod(shape)}; download it again"
            if len(content) >= body
            else f"data {path}: ends within its header, after {len(content)} bytes; download it again"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=body).reshape(shape)


def _in_memory(train: Labelled, test: Labelled | None, side: int | None, where: str) -> Splits:
    first = _arrays(*train, side, f"data {where}, training part")
    if test is None:
        return Splits(first, None)
    second = _arrays(*test, side, f"data {where}, validation part")
    a, b = first.pixels, second.pixels
    if a.shape[1:] != b.shape[1:] or a.dtype != b.dtype:
        raise TaskError(
            f"data {where}: training images are {a.dtype} of shape {tuple(a.shape[1:])}, validation images "
            f"{b.dtype} of shape {tuple(b.shape[1:])}; use one type of pixels, and --side to resize"
        )
    return Splits(first, second)


def _arrays(x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], side: int | None, where: str) -> ArraySource:
    if x.ndim == 3:
        x = x[..., None]
    if x.ndim != 4 or not 1 <= x.shape[3] <= 4 or 0 in x.shape:
        raise TaskError(
            f"{where}: images of shape {x.shape}; use (n, height, width) or (n, height, width, channels) with 1 to 4 "
            "channels, which come last"
        )
    labels = check_labels(y, where)
    if len(x) != len(labels):
        raise TaskError(f"{where}: {len(x)} images, but {len(labels)} labels; give one label for each image")
    if x.dtype.kind == "f":
        if not np.isfinite(x).all():
            raise TaskError(f"{where}: some pixels are not finite; remove infinities and NaNs")
        x = x.astype(np.float32)
    elif x.dtype.kind in "iub" and fits_bytes(x):
        x = x.astype(np.uint8)
    else:
        raise TaskError(f"{where}: pixels of type {x.dtype}; use floating numbers, or whole ones from 0 to 255")
    pixels = torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2)))
    return ArraySource(pixels if side is None else resize_images(pixels, side), labels)


def resize_images(pixels: Tensor, side: int) -> Tensor:
    """Return images of (n, channels, side, side): bilinear, with antialiasing, as Pillow does it for image files."""
    if pixels.shape[2:] == (side, side):
        return pixels
    count, channels = pixels.shape[:2]
    memory = (count * pixels.element_size() + 4 * min(count, RESIZED_AT_ONCE)) * channels * side * side
    refuse_beyond_memory(memory, f"side={side}: {count} images of that size", "use a smaller side", TaskError)
    made = []
    for part in pixels.split(RESIZED_AT_ONCE):
        small = F.interpolate(part.float(), size=(side, side), mode="bilinear", align_corners=False, antialias=True)
        made.append(small if pixels.is_floating_point() else small.round().clamp(0, 255).to(torch.uint8))
    return torch.cat(made)
