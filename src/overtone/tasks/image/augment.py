"""Images as a model sees them: normalized, and for training mirrored and shifted at random.

Batches have the shape of raw images, (n, channels, height, width), and are float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from overtone.common.limits import refuse_beyond_memory
from overtone.errors import TaskError
from overtone.tasks.image.source import ImageShape, Source, survey_rows


@dataclass(frozen=True)
class Normalization:
    """Makes a model's input of raw pixels: (raw · scale − mean) / std, per channel."""

    scale: float
    mean: Tensor  # (channels,)
    std: Tensor

    def apply(self, raw: Tensor) -> Tensor:
        """Return raw images, normalized, as float32."""
        x = raw.to(torch.float32) * self.scale
        return (x - self.mean.view(-1, 1, 1)) / self.std.view(-1, 1, 1)


class ImageSamples:
    """Samples of a source: normalized images and their labels; with a generator also mirrored and shifted."""

    def __init__(
        self, source: Source, shape: ImageShape, normalization: Normalization, *, flip: bool = False, crop: int = 0
    ) -> None:
        if crop and crop >= min(shape.height, shape.width):
            # A larger shift could leave nothing of an image.
            raise TaskError(f"crop={crop}: must be less than the images' side ({shape.size}); use a smaller crop")
        self.source = source
        self.shape = shape
        self.normalization = normalization
        self.flip = flip
        self.crop = crop
        self.slow = source.slow

    def __len__(self) -> int:
        return len(self.source.labels)

    def batch(self, rows: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Return images and labels, (n, channels, height, width) and (n,). Without a generator nothing is random."""
        raw = self.source.raw(rows, self.shape)
        if generator is not None and self.flip:
            raw = flip_images(raw, torch.rand(len(raw), generator=generator) < 0.5)
        if generator is not None and self.crop:
            by = torch.randint(-self.crop, self.crop + 1, (len(raw), 2), generator=generator)
            raw = shift_images(raw, by, self.crop)
        return self.normalization.apply(raw), self.source.labels[rows]


def flip_images(raw: Tensor, which: Tensor) -> Tensor:
    """Mirror the images, left to right, for which ``which`` (n,) is true."""
    return torch.where(which.view(-1, 1, 1, 1), raw.flip(-1), raw)


def shift_images(raw: Tensor, by: Tensor, most: int) -> Tensor:
    """Move image i down and right by the two numbers in ``by[i]``, each at most ``most``; zeros (black) move in."""
    n, channels, height, width = raw.shape
    padded = F.pad(raw, (most, most, most, most))
    down = (most - by[:, 0, None] + torch.arange(height)).view(n, 1, height, 1)
    right = (most - by[:, 1, None] + torch.arange(width)).view(n, 1, 1, width)
    return padded[torch.arange(n).view(n, 1, 1, 1), torch.arange(channels).view(1, channels, 1, 1), down, right]


def measure_normalization(train: Source, shape: ImageShape) -> Normalization:
    """Measure each channel's mean and standard deviation over the training images, or over some of a slow source."""
    rows, at_once = survey_rows(train), 16 if train.slow else 1024
    memory = 16 * min(len(rows), at_once) * shape.channels * shape.height * shape.width  # float64: x and x * x
    refuse_beyond_memory(memory, f"images of {shape.size}: to measure some of them", "give a smaller --side", TaskError)
    total, squares = torch.zeros(2, shape.channels, dtype=torch.float64)
    scale = 1.0
    for part in rows.split(at_once):
        raw = train.raw(part, shape)
        scale = 1.0 if raw.is_floating_point() else 1 / 255
        x = raw.to(torch.float64)
        total += x.sum((0, 2, 3))  # exact for bytes, so the same in any order
        squares += (x * x).sum((0, 2, 3))
    pixels = len(rows) * shape.height * shape.width
    mean = total / pixels
    std = (squares / pixels - mean * mean).clamp(min=0).sqrt()
    std[std <= 1e-6 * mean.abs()] = 1 / scale  # a constant channel becomes zeros, not NaN or noise
    return Normalization(scale, (mean * scale).float(), (std * scale).float())
