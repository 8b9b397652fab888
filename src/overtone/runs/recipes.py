"""Named configurations: `overtone train --recipe NAME`. A flag may change each of their values.

The two recipes of the paper (arXiv 2510.03371) follow its text and its authors' code: chunks of 64, 32 coefficients of
each, a round every 128 steps, outer learning rate 0.7, decay 0.9, inner AdamW at 4e-4 with weight decay 0.1, clipping
at 1, 500 steps of warm-up, 512 samples a step in all, C4 at 1024 tokens and ImageNet at 224 pixels. They need GPUs and
the data; `--dry-run` shows their cost. The paper leaves the size of the models and the number of replicas open: these
are our choice. The miniatures run on two CPU cores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from overtone.runs.config import MethodChoice, Run, Training
from overtone.tasks.options import Image, Language, TaskOptions

PAPER = Training(
    steps=16_000, batch=32, accumulate=4, inner_lr=4e-4, warmup=500, clip=1.0, weight_decay=0.1, precision="bf16"
)


def paper_language() -> Run:
    """The paper's first experiment: GPT-NeoX of 160 M parameters on C4."""
    return Run(
        choice=MethodChoice("published", every=128),
        replicas=4,
        task=TaskOptions(
            task="language",
            model="gpt-neox-160m",
            data="hub:allenai/c4:en",
            valid_samples=1024,
            language=Language(context=1024),
        ),
        training=PAPER,
    )


def paper_image() -> Run:
    """The paper's second experiment: ResNet-50 on ImageNet."""
    return Run(
        choice=MethodChoice("published", every=128),
        replicas=4,
        task=TaskOptions(
            task="image",
            model="resnet-50",
            data="imagenet",
            valid_samples=50_000,
            image=Image(stem="full", side=224, flip=True, crop=16),
        ),
        training=replace(PAPER, steps=88_000),
    )


def mini_language() -> Run:
    """The first experiment in miniature, for two CPU cores: GPT-NeoX on the standard library's sources."""
    return Run(
        choice=MethodChoice("decoupled", every=10),
        replicas=2,
        task=TaskOptions(task="language", model="gpt-neox-1m", language=Language(context=64)),
        training=Training(steps=300, batch=8, inner_lr=2e-3),
    )


def mini_image() -> Run:
    """The second experiment in miniature, for two CPU cores: a small ResNet on handwritten digits."""
    return Run(
        choice=MethodChoice("decoupled", every=10),
        replicas=2,
        task=TaskOptions(task="image", model="resnet-tiny", image=Image(stem="small", crop=1)),
        training=Training(steps=200, batch=32, inner_lr=2e-3),
    )


RECIPES: dict[str, Callable[[], Run]] = {
    "paper-language": paper_language,
    "paper-image": paper_image,
    "mini-language": mini_language,
    "mini-image": mini_image,
}
