"""Labelled pictures that can be asked for by number, wherever they come from.

Shapes: raw pictures are (n, channels, height, width), of bytes, or of float32 if that is what the file has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from overtone.coding import fingerprint
from overtone.errors import TaskError

MOST_CLASSES = 65_536  # beyond this a column of labels is more likely one of identities
FORMS = (
    "give a folder of images with one subfolder per class, a folder written by datasets' save_to_disk, an .npz with "
    "x_train, y_train, x_test, y_test, or a folder of IDX files"
)
SURVEYED = 512  # images that a slow source is judged by: their size, their colours, their mean


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


@dataclass(frozen=True)
class Parts:
    """What a loader finds; no ``valid`` asks for a part of ``train`` to be held out."""

    train: Source
    valid: Source | None
    classes: tuple[str, ...] | None = None  # their names, if they have any


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


def are_bytes(array: np.ndarray[Any, Any]) -> bool:
    return array.size > 0 and bool(array.min() >= 0 and array.max() <= 255)


def surveyed(source: Source) -> Tensor:
    """The rows that a source is judged by: all of them if they are at hand, else some of them."""
    return spread(len(source.labels), SURVEYED if source.slow else len(source.labels))


def spread(size: int, most: int) -> Tensor:
    """At most ``most`` of the numbers 0 to size − 1, evenly spaced."""
    count = min(size, most)
    return torch.arange(count) * size // max(count, 1)
