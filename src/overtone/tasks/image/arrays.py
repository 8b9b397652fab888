"""Labelled pictures as arrays, held in memory: scikit-learn's digits, npz files, IDX files (MNIST's form)."""

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
from overtone.tasks.image.source import Arrays, Parts, are_bytes, checked_labels
from overtone.tasks.sources import needs

RESIZED = 1024  # pictures at a time


def digits(side: int | None) -> Parts:
    bunch = needs("sklearn.datasets", "task image").load_digits()
    images = np.rint(bunch.images * (255 / 16)).astype(np.uint8)  # its greys are 0 to 16
    return _in_memory((images, bunch.target), None, side, "digits")


def npz(path: Path, side: int | None) -> Parts:
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


def idx(folder: Path, side: int | None) -> Parts:
    parts = []
    for part in ("train", "t10k"):
        images, labels = idx_file(folder, f"{part}-images"), idx_file(folder, f"{part}-labels")
        if images is None and labels is None:
            continue
        if images is None or labels is None:
            missing = "images" if images is None else "labels"
            raise TaskError(f"data {folder}: no {part}-{missing}* file; images and labels come in pairs")
        parts.append((read_idx(images, dimensions=(3, 4)), read_idx(labels, dimensions=(1,))))
    return _in_memory(parts[0], parts[1] if len(parts) > 1 else None, side, str(folder))


def idx_file(folder: Path, start: str) -> Path | None:
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
    elif x.dtype.kind in "iub" and are_bytes(x):
        x = x.astype(np.uint8)
    else:
        raise TaskError(f"{where}: pixels of type {x.dtype}; use floating numbers, or whole ones from 0 to 255")
    pixels = torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2)))
    return Arrays(pixels if side is None else resized(pixels, side), labels)


def resized(pixels: Tensor, side: int) -> Tensor:
    """(n, channels, side, side): bilinear, and averaged over what a smaller picture's pixels cover."""
    if pixels.shape[2:] == (side, side):
        return pixels
    count, channels = pixels.shape[:2]
    room = (count * pixels.element_size() + 4 * min(count, RESIZED)) * channels * side * side
    refuse_beyond_memory(room, f"side={side}: {count} images of that size", "use a smaller side", TaskError)
    made = []
    for part in pixels.split(RESIZED):
        small = F.interpolate(part.float(), size=(side, side), mode="bilinear", align_corners=False, antialias=True)
        made.append(small if pixels.is_floating_point() else small.round().clamp(0, 255).to(torch.uint8))
    return torch.cat(made)
