"""What may be said about a task, as flags and in files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from overtone.common.limits import SIZES, Limit, check
from overtone.errors import TaskError

MOST_SIDE = 1 << 14


@dataclass(frozen=True)
class Language:
    """The language task."""

    context: int = 64
    """Tokens of a window."""
    tokenizer: Path | None = None
    """A `tokenizers` file (tokenizer.json); bytes by default."""
    width: int | None = None
    """Of the transformer, in place of the preset's own."""
    layers: int | None = None
    """Likewise."""
    heads: int | None = None
    """Likewise."""

    def __post_init__(self) -> None:
        check(self, SIZES, TaskError)


IMAGE = {
    "side": Limit("pixels of an image's side", 1, MOST_SIDE),
    "crop": Limit("pixels to shift training images by", 0, MOST_SIDE),
}


@dataclass(frozen=True)
class Image:
    """The image task."""

    stem: Literal["small", "full"] = "small"
    """small: a 3x3 convolution, for images of about 32 pixels; full: 7x7 and pooling, for 224."""
    side: int | None = None
    """Resize images to this many pixels; by default they must be of one size."""
    flip: bool = False
    """Mirror half of the training images."""
    crop: int = 0
    """Shift training images by up to this many pixels each way."""

    def __post_init__(self) -> None:
        check(self, IMAGE, TaskError)


TASK = {
    "skew": Limit("the share of the samples that is dealt in order", 0, 1),
    "valid_samples": Limit("validation windows or images", 1, 10**9),
}


@dataclass(frozen=True)
class TaskOptions:
    """What to train, on what."""

    task: str = "language"
    """language, image, or the path of a Python file with a task of your own."""
    model: str | None = None
    """A preset (byte, gpt2-1m, llama-30m, resnet-18 …; an unknown name lists them) or a local config.json."""
    data: str | None = None
    """A file or folder, or hub:NAME to stream from the hub; by default one that needs no download."""
    skew: float = 0.0
    """0: shards dealt at random; 1: sorted, by label or by place in the text; between: a mixture."""
    valid_samples: int = 256
    """Validation windows or images."""
    language: Language = field(default_factory=Language)
    image: Image = field(default_factory=Image)

    def __post_init__(self) -> None:
        check(self, TASK, TaskError)
        for name in ("task", "model", "data"):
            if getattr(self, name) == "":
                raise TaskError(f"{name}='': empty; give a name or a path, or leave it out")
