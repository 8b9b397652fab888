"""A set of labelled pictures: found at a path, with a part for validation, and measured to be normalised.

What lacks a validation part has a tenth of each class held out, the same one on every start.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from overtone.errors import TaskError
from overtone.tasks.image.arrays import digits, idx, idx_file, npz
from overtone.tasks.image.augment import Look, look_of
from overtone.tasks.image.files import folder, saved
from overtone.tasks.image.source import FORMS, Arrays, Form, Parts, Source
from overtone.tasks.sharding import dice_for
from overtone.tasks.sources import existing, is_saved


@dataclass(frozen=True)
class Pictures:
    """Pictures to train on and to validate with."""

    name: str
    train: Source
    valid: Source
    classes: tuple[str, ...]
    form: Form
    look: Look


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
        return "digits", digits(side)
    if data.startswith("hub:"):
        raise TaskError(
            f"data {data}: images are not streamed from the hub; download them once with "
            f"datasets.load_dataset({data[4:]!r}).save_to_disk(FOLDER) and give the folder"
        )
    path = existing(data, FORMS)
    name = path.resolve().name
    if path.is_dir():
        if is_saved(path):
            return name, saved(path)
        if idx_file(path, "train-images") is not None:
            return name, idx(path, side)
        return name, folder(path)
    if path.suffix != ".npz":
        raise TaskError(f"data {data}: not a form of pictures that is known; {FORMS}")
    return name, npz(path, side)


def _nothing(side: int) -> Pictures:
    empty = Arrays(torch.empty(0, 3, side, side, dtype=torch.uint8), torch.empty(0, dtype=torch.int64))
    look = Look(1 / 255, torch.full((3,), 0.5), torch.full((3,), 0.5))
    return Pictures("no data", empty, empty, tuple(map(str, range(1000))), Form(3, side, side, resize=True), look)


def hold_out(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Nine tenths and one tenth of the rows: shuffled, put in the order of their labels, and every tenth taken."""
    mixed = torch.randperm(len(labels), generator=dice_for("hold out", len(labels)))
    by_label = mixed[torch.sort(labels[mixed], stable=True).indices]
    held = torch.zeros(len(labels), dtype=torch.bool)
    held[by_label[min(5, len(labels) - 1) :: 10]] = True
    return torch.nonzero(~held).flatten(), torch.nonzero(held).flatten()
