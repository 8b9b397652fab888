"""The options of a task, as flags on the command line and as keys in TOML files. Each string is a flag's help text."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from overtone.common.limits import SIZES, Limit, check
from overtone.errors import TaskError

MAX_SIDE = 1 << 14
TASK_LIMITS = {
    "skew": Limit("the share of the samples that is divided in order", 0, 1),
    "valid_samples": Limit("validation windows or images", 1, 10**9),
}
IMAGE_LIMITS = {
    "side": Limit("pixels of an image's side", 1, MAX_SIDE),
    "crop": Limit("pixels to shift training images by", 0, MAX_SIDE),
}


@dataclass(frozen=True)
class Language:
    """Options of the language task."""

    context: int = 64
    """Number of tokens in a window, which is one sample."""
    tokenizer: Path | None = None
    """A tokenizer.json of the tokenizers library. By default a token is a byte."""
    width: int | None = None
    """Width of the transformer. By default the preset's own."""
    layers: int | None = None
    """Number of transformer layers. By default the preset's own."""
    heads: int | None = None
    """Number of attention heads in each layer. By default the preset's own."""

    def __post_init__(self) -> None:
        check(self, SIZES, TaskError)


@dataclass(frozen=True)
class Image:
    """Options of the image task."""

    stem: Literal["small", "full"] = "small"
    """First layers of a ResNet. small: a 3x3 convolution, for about 32 pixels; full: 7x7 and pooling, for about 224."""
    side: int | None = None
    """Resize all images to this height and width in pixels. By default all must have one size already."""
    flip: bool = False
    """Mirror a random half of the training images."""
    crop: int = 0
    """Shift each training image at random, by up to this many pixels in each direction."""

    def __post_init__(self) -> None:
        check(self, IMAGE_LIMITS, TaskError)


@dataclass(frozen=True)
class TaskOptions:
    """The model to train, and the data to train it on."""

    task: str = "language"
    """The task: language, image, or the path of a Python file with a task of your own."""
    model: str | None = None
    """A preset (byte, gpt2-1m, resnet-18 …; an unknown name lists all) or a config.json. Default: byte, resnet-tiny."""
    data: str | None = None
    """A file, a folder, or hub:NAME to stream from the hub. By default Python's sources, or scikit-learn's digits."""
    skew: float = 0.0
    """Share of the samples that replicas get in order (by label, or by place in the text) and not at random."""
    valid_samples: int = 256
    """Number of validation samples: windows of text, or images."""
    language: Language = field(default_factory=Language)
    image: Image = field(default_factory=Image)

    def __post_init__(self) -> None:
        check(self, TASK_LIMITS, TaskError)
        for name in ("task", "model", "data"):
            if getattr(self, name) == "":
                raise TaskError(f"{name}='': empty; give a name or a path, or leave it out")
