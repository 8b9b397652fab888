"""The image task: a ResNet of the transformers library, or another model by its config, learns to classify images."""

# mypy: allow-untyped-calls
# (transformers leaves its constructors without types)

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    PretrainedConfig,
    PreTrainedModel,
    ResNetConfig,
)

from overtone.coding import fingerprint
from overtone.errors import TaskError
from overtone.tasks.hf_folders import read_config, save_pretrained
from overtone.tasks.image.augment import ImageSamples
from overtone.tasks.image.dataset import ImageDataset, load_images
from overtone.tasks.image.small_resnet import SmallResNetConfig, SmallResNetForImageClassification
from overtone.tasks.image.source import evenly_spaced
from overtone.tasks.options import TaskOptions
from overtone.tasks.sources import refuse_huge_model
from overtone.tasks.task import Batch, Task

# There are two ways to load an exported model with the small stem. With overtone imported its type is known by name;
# without, the folder brings its own code. The registration is not in small_resnet.py: the copy in an exported folder
# would register itself too.
AutoConfig.register(SmallResNetConfig.model_type, SmallResNetConfig, exist_ok=True)
AutoModelForImageClassification.register(SmallResNetConfig, SmallResNetForImageClassification, exist_ok=True)
SmallResNetConfig.register_for_auto_class()
SmallResNetForImageClassification.register_for_auto_class("AutoModelForImageClassification")


@dataclass(frozen=True)
class ResNetSize:
    """Sizes of a ResNet: channels of the stem, channels and blocks of each stage, kind of block."""

    stem: int
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    block: str


PRESETS = {
    "resnet-tiny": ResNetSize(16, (16, 32, 64), (1, 1, 1), "basic"),
    "resnet-mini": ResNetSize(16, (16, 64, 128), (1, 2, 2), "basic"),
    "resnet-18": ResNetSize(64, (64, 128, 256, 512), (2, 2, 2, 2), "basic"),
    "resnet-34": ResNetSize(64, (64, 128, 256, 512), (3, 4, 6, 3), "basic"),
    "resnet-50": ResNetSize(64, (256, 512, 1024, 2048), (3, 4, 6, 3), "bottleneck"),
    "resnet-101": ResNetSize(64, (256, 512, 1024, 2048), (3, 4, 23, 3), "bottleneck"),
}
STEMS: dict[str, type[ResNetConfig]] = {"small": SmallResNetConfig, "full": ResNetConfig}


def task(options: TaskOptions) -> ImageTask:
    """Build the image task that the options describe."""
    return ImageTask(options)


class ImageTask(Task):
    """Labelled images and a classifier. With data "none" there are no samples, but a model for ImageNet's shape."""

    unit = "images"
    train: ImageSamples
    valid: ImageSamples

    def __init__(self, options: TaskOptions) -> None:
        image = options.image
        self.config = load_config(options.model or "resnet-tiny", image.stem)  # first: a typo need not wait for data
        self.dataset = load_images(options.data, image.side)
        adapt_config(self.config, self.dataset)
        if options.model not in (None, *PRESETS) and torch.get_default_device().type != "meta":
            with torch.device("meta"):
                refuse_huge_model(sum(p.numel() for p in self.model().parameters()), str(options.model))
        data = self.dataset
        self.name = data.name
        self.train = ImageSamples(data.train, data.shape, data.normalization, flip=image.flip, crop=image.crop)
        some = data.valid.select(evenly_spaced(len(data.valid.labels), options.valid_samples))
        self.valid = ImageSamples(some, data.shape, data.normalization)
        self.keys = data.train.labels

    def model(self) -> nn.Module:
        """Return a new model with random weights."""
        # Each model gets a copy of the config: from_config writes into it.
        made: nn.Module = AutoModelForImageClassification.from_config(_copy(self.config))
        return made

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross entropy of the batch."""
        pixels, labels = batch
        return F.cross_entropy(model(pixel_values=pixels).logits, labels)

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        """Return the loss, and the fraction of images whose class is the likeliest (top1) or among five (top5)."""
        pixels, labels = batch
        with torch.no_grad():
            logits = model(pixel_values=pixels).logits.float()
        means = {"loss": float(F.cross_entropy(logits, labels))}
        means["top1"] = float((logits.argmax(1) == labels).float().mean())
        if len(self.dataset.classes) > 5:  # with fewer classes top5 would always be 1
            means["top5"] = float((logits.topk(5).indices == labels[:, None]).any(1).float().mean())
        return means

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write a folder that ``AutoModelForImageClassification`` and ``AutoImageProcessor`` load.

        The processor gets the images' size, mean and standard deviation. A model with the small stem loads with
        ``trust_remote_code=True`` (its code is in the folder), or after importing overtone.tasks.image.
        """
        if not isinstance(model, PreTrainedModel):
            raise TaskError(
                f"export: {type(model).__name__} is not a model of the transformers library; give one that "
                "task.model() returned"
            )
        folder.mkdir(parents=True, exist_ok=True)
        save_pretrained(model, folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor_config(self.dataset), indent=2) + "\n")

    def about(self) -> dict[str, object]:
        """Return facts for the run log."""
        shape = self.dataset.shape
        data = self.dataset.train.fingerprint() + self.valid.source.fingerprint()
        return super().about() | {
            "task": "image",
            "classes": len(self.dataset.classes),
            "channels": shape.channels,
            "side": shape.height if shape.height == shape.width else shape.size,
            "fingerprint": fingerprint.of_bytes(data).hex(),
        }


def load_config(model: str, stem: str) -> PretrainedConfig:
    """Return the config of a preset with this stem, or the one in a file or folder, which has its own stem."""
    if model in PRESETS:
        size = PRESETS[model]
        return STEMS[stem](
            embedding_size=size.stem,
            hidden_sizes=list(size.widths),
            depths=list(size.depths),
            layer_type=size.block,
        )
    path = Path(model)
    if not path.exists():
        near = difflib.get_close_matches(model, PRESETS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise TaskError(f"model {model!r}: unknown; {hint}There are {', '.join(PRESETS)}, or give a local config.json")
    config: PretrainedConfig = read_config(path)
    if type(config) not in AutoModelForImageClassification._model_mapping:
        raise TaskError(
            f"model {path}: model_type {config.model_type} does not classify images; use one that "
            "AutoModelForImageClassification knows"
        )
    return config


def adapt_config(config: PretrainedConfig, dataset: ImageDataset) -> None:
    """Set the number of classes and channels to those of the data. Refuse a config for images of another size."""
    config.id2label = dict(enumerate(dataset.classes))
    config.label2id = {name: label for label, name in enumerate(dataset.classes)}
    shape = dataset.shape
    if hasattr(config, "num_channels"):
        config.num_channels = shape.channels
    elif shape.channels != 3:
        raise TaskError(
            f"model {config.model_type}: takes three channels, but the images have {shape.channels}; use another "
            "model, or colour images"
        )
    made_for = getattr(config, "image_size", None)
    sides = (made_for, made_for) if isinstance(made_for, int) else made_for
    if sides is not None and tuple(sides) != (shape.height, shape.width):
        way = f"give --side {made_for}" if isinstance(made_for, int) else "change it"
        raise TaskError(f"model {config.model_type}: image_size={made_for}, but the images are {shape.size}; {way}")


def preprocessor_config(dataset: ImageDataset) -> dict[str, Any]:
    """Return how images were resized and normalized, in the form that an image processor of transformers reads."""
    shape, normalization = dataset.shape, dataset.normalization
    return {
        "image_processor_type": "ViTImageProcessor",  # resizes, scales and normalizes, and nothing else
        "do_resize": shape.resize,
        "size": {"height": shape.height, "width": shape.width},
        "resample": 2,  # Pillow's number for bilinear
        "do_rescale": normalization.scale != 1.0,
        "rescale_factor": normalization.scale,
        "do_normalize": True,
        "image_mean": normalization.mean.tolist(),
        "image_std": normalization.std.tolist(),
    }


def _copy(config: PretrainedConfig) -> PretrainedConfig:
    return type(config).from_dict(config.to_dict())
