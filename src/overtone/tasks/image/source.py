"""Labelled images that can be fetched by number, wherever they come from.

Shapes: raw images are (n, channels, height, width), of bytes, or of float32 if the file has floating pixels.
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

MAX_CLASSES = 65_536  # a column with more values is more likely one of identifiers than of labels
SURVEY_SIZE = 512  # images of a slow source that are decoded to find its size, colours and mean
DATA_FORMS = (
    "give a folder of images with one subfolder per class, a folder written by datasets' save_to_disk, an .npz with "
    "x_train, y_train, x_test, y_test, or a folder of IDX files"
)


@dataclass(frozen=True)
class ImageShape:
    """The shape that all images of a dataset have."""

    channels: int
    height: int
    width: int
    resize: bool  # images of another size are resized to this one; otherwise they are refused

    @property
    def size(self) -> str:
        """Height and width, for messages."""
        return f"{self.height}x{self.width}"


class Source(ABC):
    """Labelled images that can be fetched by number."""

    labels: Tensor  # (n,) int64
    slow: bool  # images have to be decoded, so batches are fetched ahead

    @abstractmethod
    def shape(self, side: int | None) -> ImageShape:
        """Return the shape of all images: ``side`` by ``side`` pixels, or the size that they have."""

    @abstractmethod
    def raw(self, rows: Tensor, shape: ImageShape) -> Tensor:
        """Return these images, (len(rows), channels, height, width), uint8 or float32."""

    @abstractmethod
    def select(self, rows: Tensor) -> Source:
        """Return a source of only these images."""

    @abstractmethod
    def fingerprint(self) -> bytes:
        """Return eight bytes that are different for different data."""


class ArraySource(Source):
    """Images in memory."""

    slow = False

    def __init__(self, pixels: Tensor, labels: Tensor) -> None:
        self.pixels = pixels
        self.labels = labels

    def shape(self, side: int | None) -> ImageShape:
        """Return the shape of the array. Its images were resized when they were loaded."""
        _, channels, height, width = self.pixels.shape
        return ImageShape(channels, height, width, resize=side is not None)

    def raw(self, rows: Tensor, shape: ImageShape) -> Tensor:  # noqa: ARG002
        """Return these images as they are."""
        return self.pixels[rows]

    def select(self, rows: Tensor) -> ArraySource:
        """Return a source with a copy of these images."""
        return ArraySource(self.pixels[rows], self.labels[rows])

    def fingerprint(self) -> bytes:
        """Return the fingerprint of all pixels and labels."""
        return fingerprint.of_tensors([self.pixels, self.labels]) if len(self.labels) else bytes(8)


@dataclass(frozen=True)
class Splits:
    """Training and validation images, as a loader finds them."""

    train: Source
    valid: Source | None  # None: a part of `train` is to be held out
    classes: tuple[str, ...] | None = None  # names of the classes, if the data has names


def check_labels(values: np.ndarray[Any, Any], where: str, *, below: int | None = None) -> Tensor:
    """Return labels as (n,) int64, from (n,) or (n, 1) whole numbers of any type."""
    if values.ndim == 2 and values.shape[1] == 1:  # the form of Keras
        values = values[:, 0]
    if values.size == 0:
        raise TaskError(f"{where}: has no labelled images; add some")
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise TaskError(
            f"{where}: labels are {values.dtype} of shape {values.shape}; give one whole number for each image"
        )
    if not 0 <= int(values.min()) <= int(values.max()) < (below or MAX_CLASSES):
        raise TaskError(
            f"{where}: labels from {values.min()} to {values.max()}; number the classes from 0 to at most "
            f"{(below or MAX_CLASSES) - 1}"
        )
    return torch.from_numpy(values.astype(np.int64))


def fits_bytes(array: np.ndarray[Any, Any]) -> bool:
    """Whether there are values, and all are from 0 to 255."""
    return array.size > 0 and bool(array.min() >= 0 and array.max() <= 255)


def survey_rows(source: Source) -> Tensor:
    """Return the rows that are looked at to describe a source: all of a fast one, some of a slow one."""
    return evenly_spaced(len(source.labels), SURVEY_SIZE if source.slow else len(source.labels))


def evenly_spaced(size: int, most: int) -> Tensor:
    """Return at most ``most`` of the numbers 0 to size − 1, evenly spaced."""
    count = min(size, most)
    return torch.arange(count) * size // max(count, 1)
