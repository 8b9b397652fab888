"""A dataset of labelled images: found at a path, split for validation, and measured to be normalized.

Data without a validation part has a tenth of each class held out, the same images on every start.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from overtone.errors import TaskError
from overtone.tasks.image.arrays import find_idx_file, load_digits, load_idx, load_npz
from overtone.tasks.image.augment import Normalization, measure_normalization
from overtone.tasks.image.files import load_image_folder, load_saved_images
from overtone.tasks.image.source import DATA_FORMS, ArraySource, ImageShape, Source, Splits
from overtone.tasks.sharding import generator_for
from overtone.tasks.sources import existing_path, is_saved_dataset


@dataclass(frozen=True)
class ImageDataset:
    """Images to train on and images to validate with."""

    name: str
    train: Source
    valid: Source
    classes: tuple[str, ...]
    shape: ImageShape
    normalization: Normalization


def load_images(data: str | None, side: int | None) -> ImageDataset:
    """Load the images at a path, or scikit-learn's digits for None.

    "none" has no images, but the shape and number of classes of ImageNet: enough to build a model.
    """
    if data == "none":
        return _no_images(side or 224)
    name, splits = _load_splits(data, side)
    train, valid = splits.train, splits.valid
    if len(train.labels.unique()) < 2:
        raise TaskError(
            f"data {name}: all training images have label {int(train.labels[0])}; give at least two classes"
        )
    classes = splits.classes or tuple(map(str, range(int(train.labels.max()) + 1)))
    if valid is None:
        kept, held = hold_out(train.labels)
        train, valid = train.select(kept), train.select(held)
    if len(valid.labels) == 0:
        raise TaskError(
            f"data {name}: no validation images; add some, or remove the validation part to hold out a tenth"
        )
    if int(valid.labels.max()) >= len(classes):
        raise TaskError(
            f"data {name}: label {int(valid.labels.max())} among the validation images, but the training labels go to "
            f"{len(classes) - 1}; validate with classes that are trained on"
        )
    shape = train.shape(side)
    return ImageDataset(name, train, valid, classes, shape, measure_normalization(train, shape))


def _load_splits(data: str | None, side: int | None) -> tuple[str, Splits]:
    if data is None:
        return "digits", load_digits(side)
    if data.startswith("hub:"):
        raise TaskError(
            f"data {data}: images are not streamed from the hub; download them once with "
            f"datasets.load_dataset({data[4:]!r}).save_to_disk(FOLDER) and give the folder"
        )
    path = existing_path(data, DATA_FORMS)
    name = path.resolve().name
    if path.is_dir():
        if is_saved_dataset(path):
            return name, load_saved_images(path)
        if find_idx_file(path, "train-images") is not None:
            return name, load_idx(path, side)
        return name, load_image_folder(path)
    if path.suffix != ".npz":
        raise TaskError(f"data {data}: not a known form of image data; {DATA_FORMS}")
    return name, load_npz(path, side)


def _no_images(side: int) -> ImageDataset:
    empty = ArraySource(torch.empty(0, 3, side, side, dtype=torch.uint8), torch.empty(0, dtype=torch.int64))
    normalization = Normalization(1 / 255, torch.full((3,), 0.5), torch.full((3,), 0.5))
    classes = tuple(map(str, range(1000)))
    return ImageDataset("no data", empty, empty, classes, ImageShape(3, side, side, resize=True), normalization)


def hold_out(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return nine tenths and one tenth of the rows: shuffled, sorted by label, and every tenth taken."""
    shuffled = torch.randperm(len(labels), generator=generator_for("hold out", len(labels)))
    by_label = shuffled[torch.sort(labels[shuffled], stable=True).indices]
    held = torch.zeros(len(labels), dtype=torch.bool)
    held[by_label[min(5, len(labels) - 1) :: 10]] = True
    return torch.nonzero(~held).flatten(), torch.nonzero(held).flatten()
