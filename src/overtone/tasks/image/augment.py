"""Raw pictures as a model sees them: normalised, and for training mirrored and shifted.

Batches have the shape of raw pictures, (n, channels, height, width), and are float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from overtone.common.limits import refuse_beyond_memory
from overtone.errors import TaskError
from overtone.tasks.image.source import Form, Source, surveyed


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


def look_of(train: Source, form: Form) -> Look:
    """The mean and deviation of each channel over the training pictures, or over a sample of those to be decoded."""
    rows, at_once = surveyed(train), 16 if train.slow else 1024
    room = 16 * min(len(rows), at_once) * form.channels * form.height * form.width
    refuse_beyond_memory(room, f"images of {form.size}: to measure some of them", "give a smaller --side", TaskError)
    total, squares = torch.zeros(2, form.channels, dtype=torch.float64)
    scale = 1.0
    for part in rows.split(at_once):
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
