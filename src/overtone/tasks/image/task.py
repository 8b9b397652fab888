"""Image classification: a Hugging Face ResNet, or another model by its config, on labelled pictures."""

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
    ResNetForImageClassification,
)

from overtone.coding import fingerprint
from overtone.errors import TaskError
from overtone.tasks.hf_folders import read_config, save_pretrained
from overtone.tasks.image.augment import Shown
from overtone.tasks.image.dataset import Pictures, load_pictures
from overtone.tasks.image.small_resnet import SmallResNetConfig, SmallResNetForImageClassification
from overtone.tasks.image.source import spread
from overtone.tasks.options import TaskOptions
from overtone.tasks.sources import refuse_huge_model
from overtone.tasks.task import Batch, Task

# Two ways to load an exported small stem: with overtone imported it is known by name; without, the folder brings its
# own code. The registration is not in small_resnet.py, as the copy in a folder would then register itself too.
AutoConfig.register(SmallResNetConfig.model_type, SmallResNetConfig, exist_ok=True)
AutoModelForImageClassification.register(SmallResNetConfig, SmallResNetForImageClassification, exist_ok=True)
SmallResNetConfig.register_for_auto_class()
SmallResNetForImageClassification.register_for_auto_class("AutoModelForImageClassification")


@dataclass(frozen=True)
class Size:
    """A ResNet's numbers: of the stem, and of each stage."""

    stem: int
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    block: str


PRESETS = {
    "resnet-tiny": Size(16, (16, 32, 64), (1, 1, 1), "basic"),
    "resnet-18": Size(64, (64, 128, 256, 512), (2, 2, 2, 2), "basic"),
    "resnet-34": Size(64, (64, 128, 256, 512), (3, 4, 6, 3), "basic"),
    "resnet-50": Size(64, (256, 512, 1024, 2048), (3, 4, 6, 3), "bottleneck"),
    "resnet-101": Size(64, (256, 512, 1024, 2048), (3, 4, 23, 3), "bottleneck"),
}
STEMS: dict[str, tuple[type[ResNetConfig], type[ResNetForImageClassification]]] = {
    "small": (SmallResNetConfig, SmallResNetForImageClassification),
    "full": (ResNetConfig, ResNetForImageClassification),
}


def task(options: TaskOptions) -> ImageTask:
    return ImageTask(options)


class ImageTask(Task):
    """Pictures and a classifier for them. With data "none" there are no samples, but a model of ImageNet's shape."""

    unit = "images"
    train: Shown
    valid: Shown

    def __init__(self, options: TaskOptions) -> None:
        image = options.image
        self.config = config_for(options.model or "resnet-tiny", image.stem)  # first: a typo need not wait for data
        self.pictures = load_pictures(options.data, image.side)
        fit(self.config, self.pictures)
        if options.model not in (None, *PRESETS) and torch.get_default_device().type != "meta":
            with torch.device("meta"):
                refuse_huge_model(sum(p.numel() for p in self.model().parameters()), str(options.model))
        found = self.pictures
        self.name = found.name
        self.train = Shown(found.train, found.form, found.look, flip=image.flip, crop=image.crop)
        some = found.valid.pick(spread(len(found.valid.labels), options.valid_samples))
        self.valid = Shown(some, found.form, found.look)
        self.keys = found.train.labels

    def model(self) -> nn.Module:
        # A copy of the config for each model: from_config writes into it.
        made: nn.Module = AutoModelForImageClassification.from_config(_copy(self.config))
        return made

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        pixels, labels = batch
        return F.cross_entropy(model(pixel_values=pixels).logits, labels)

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        """The loss and the fraction of images whose class is the likeliest, and is among the five likeliest."""
        pixels, labels = batch
        with torch.no_grad():
            logits = model(pixel_values=pixels).logits.float()
        means = {"loss": float(F.cross_entropy(logits, labels))}
        means["top1"] = float((logits.argmax(1) == labels).float().mean())
        if len(self.pictures.classes) > 5:  # else all of them are among the five
            means["top5"] = float((logits.topk(5).indices == labels[:, None]).any(1).float().mean())
        return means

    def export(self, model: nn.Module, folder: Path) -> None:
        """A folder that ``AutoModelForImageClassification.from_pretrained`` loads, and ``AutoImageProcessor`` too: it
        holds the pictures' size, mean and deviation. The small stem needs ``trust_remote_code=True`` (its code is in
        the folder), or overtone.tasks.image imported."""
        if not isinstance(model, PreTrainedModel):
            raise TaskError(f"export: {type(model).__name__} is not a Hugging Face model; give what task.model() made")
        folder.mkdir(parents=True, exist_ok=True)
        save_pretrained(model, folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(preprocessing(self.pictures), indent=2) + "\n")

    def about(self) -> dict[str, object]:
        form = self.pictures.form
        return super().about() | {
            "task": "image",
            "classes": len(self.pictures.classes),
            "channels": form.channels,
            "side": form.height if form.height == form.width else form.size,
            "fingerprint": fingerprint.of_bytes(self.pictures.train.stamp() + self.valid.source.stamp()).hex(),
        }


def config_for(model: str, stem: str) -> PretrainedConfig:
    """Of a preset, with this stem; or the config in a file or folder, which has its own stem."""
    if model in PRESETS:
        size = PRESETS[model]
        return STEMS[stem][0](
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


def fit(config: PretrainedConfig, pictures: Pictures) -> None:
    """The data decide the number of classes and of channels, whatever a config says. A config that is made for images
    of one size must have got them."""
    config.id2label = dict(enumerate(pictures.classes))
    config.label2id = {name: label for label, name in enumerate(pictures.classes)}
    form = pictures.form
    if hasattr(config, "num_channels"):
        config.num_channels = form.channels
    elif form.channels != 3:
        raise TaskError(f"model {config.model_type}: takes three channels, but the images have {form.channels}")
    made_for = getattr(config, "image_size", None)
    sides = (made_for, made_for) if isinstance(made_for, int) else made_for
    if sides is not None and tuple(sides) != (form.height, form.width):
        way = f"give --side {made_for}" if isinstance(made_for, int) else "change it"
        raise TaskError(f"model {config.model_type}: image_size={made_for}, but the images are {form.size}; {way}")


def preprocessing(pictures: Pictures) -> dict[str, Any]:
    """What was done to the pictures, as an image processor of transformers reads it."""
    form, look = pictures.form, pictures.look
    return {
        "image_processor_type": "ViTImageProcessor",  # resizes, scales and normalises, and nothing else
        "do_resize": form.resize,
        "size": {"height": form.height, "width": form.width},
        "resample": 2,  # Pillow's number for bilinear
        "do_rescale": look.scale != 1.0,
        "rescale_factor": look.scale,
        "do_normalize": True,
        "image_mean": look.mean.tolist(),
        "image_std": look.std.tolist(),
    }


def _copy(config: PretrainedConfig) -> PretrainedConfig:
    return type(config).from_dict(config.to_dict())
