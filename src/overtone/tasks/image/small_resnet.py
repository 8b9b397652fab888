"""ResNet for small images: a 3×3 convolution at full resolution in place of the 7×7 one with stride and pooling.

This file travels with every exported model, so that ``AutoModelForImageClassification.from_pretrained(folder,
trust_remote_code=True)`` loads it where overtone is not installed. It therefore imports torch and transformers only.
"""

# mypy: allow-untyped-calls
# (transformers leaves its constructors without types)

from __future__ import annotations

from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification
from transformers.models.resnet.modeling_resnet import ResNetConvLayer


class SmallResNetConfig(ResNetConfig):
    """Sizes of a ResNet. In a config.json the stems are told apart by this model_type."""

    model_type = "overtone-small-resnet"


class SmallResNetForImageClassification(ResNetForImageClassification):
    """Hugging Face's ResNet, with the stem of He et al. (2015), section 4.2, for CIFAR."""

    config_class = SmallResNetConfig
    config: SmallResNetConfig

    def __init__(self, config: SmallResNetConfig) -> None:
        super().__init__(config)
        stem = self.resnet.embedder
        # The same names as in the full stem, so that weights of all later layers can be copied between the two.
        stem.embedder = ResNetConvLayer(
            config.num_channels, config.embedding_size, kernel_size=3, stride=1, activation=config.hidden_act
        )
        stem.pooler = nn.Identity()  # type: ignore[assignment]
        self.post_init()  # again, for the new stem: layers that have their initial weights keep them
