"""The models and data of the study, and how long each is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import tokenizers

from cells import found
from overtone.report.comparison import Comparison
from overtone.runs.config import Training
from overtone.tasks import Image, Language, TaskOptions
from overtone.tasks.text.documents import open_documents
from overtone.tasks.text.tokenizer import ByteTokenizer

EVERY, REPLICAS = 10, 4
VOCABULARY = 1024


@dataclass(frozen=True)
class Setting:
    """A model on its data. ``steps`` are those of each replica if there are four of them."""

    name: str
    about: str
    task: TaskOptions
    training: Training

    def at(self, replicas: int) -> Comparison:
        """A comparison with the same number of samples in all, whatever the number of replicas."""
        steps = self.training.steps * REPLICAS // replicas
        return Comparison(
            every=EVERY,
            replicas=replicas,
            task=self.task,
            training=replace(self.training, steps=steps),
            eval_every=max(EVERY, steps // 4),
            log_every=100,
        )


def settings(place: Path, runs: Path) -> dict[str, Setting]:
    """All settings whose data is there, by name."""
    return {setting.name: setting for setting in _settings(place, runs)}


def _settings(place: Path, runs: Path) -> Iterator[Setting]:
    small = TaskOptions(valid_samples=512, language=Language(width=128, layers=2, heads=4))
    training = Training(steps=3000, batch=4)
    yield Setting("library", "byte transformer, 0.44 M parameters, standard library", small, training)
    if text := found(place, "kjv.txt"):
        yield Setting(
            "bible", "byte transformer, 0.44 M parameters, King James Bible", replace(small, data=text), training
        )
    if images := found(place, "cifar10_small.npz"):
        task = TaskOptions(
            task="image", model="resnet-mini", data=images, valid_samples=2000, image=Image(flip=True, crop=2)
        )
        shorter = Training(steps=3000, batch=8)
        yield Setting("images", "ResNet, 0.65 M parameters, CIFAR-10, small", task, shorter)
    faster = replace(training, precision="bf16", inner_lr=5e-4)  # the best of the grid for DiLoCo
    for name, width, heads, size in (("llama", 256, 4, "3.7"), ("wide", 448, 7, "10.5")):
        language = Language(width=width, layers=4, heads=heads, tokenizer=_tokenizer(runs))
        yield Setting(
            name,
            f"Llama, {size} M parameters, BPE of {VOCABULARY} tokens, standard library",
            TaskOptions(model="llama-1m", valid_samples=512, language=language),
            faster,
        )


@cache
def _tokenizer(runs: Path) -> Path:
    """A byte-level BPE, trained once on the training part of the text."""
    file = runs / f"bpe-{VOCABULARY}.json"
    if not file.exists():
        runs.mkdir(parents=True, exist_ok=True)
        made = tokenizers.ByteLevelBPETokenizer()
        texts = (document.text.decode() for document in open_documents(None, ByteTokenizer()).train)
        made.train_from_iterator(texts, vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], show_progress=False)
        made.save(str(file))
    return file
