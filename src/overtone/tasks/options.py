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
    """First layers of a ResNet preset. small: a 3x3 convolution, for images of about 32 pixels. full: a 7x7 convolution
    and pooling, for images of about 224 pixels."""
    side: int | None = None
    """Resize all images to this height and width in pixels. By default images keep their size, and all must have the
    same."""
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
    """The name of a preset (byte, gpt2-1m, llama-30m, resnet-18 …; an unknown name lists all of them), or the path of a
    config.json or of a folder with one. By default byte for language and resnet-tiny for images."""
    data: str | None = None
    """A file, a folder, or hub:NAME for a stream from the Hugging Face hub. By default data that needs no download: the
    sources of Python's standard library for language, scikit-learn's digits for images."""
    skew: float = 0.0
    """How the samples are divided among the replicas. 0: at random. 1: sorted by label, or by place in the text.
    Between 0 and 1: that share of the samples is sorted."""
    valid_samples: int = 256
    """Number of validation samples: windows of text, or images."""
    language: Language = field(default_factory=Language)
    image: Image = field(default_factory=Image)

    def __post_init__(self) -> None:
        check(self, TASK_LIMITS, TaskError)
        for name in ("task", "model", "data"):
            if getattr(self, name) == "":
                raise TaskError(f"{name}='': empty; give a name or a path, or leave it out")
