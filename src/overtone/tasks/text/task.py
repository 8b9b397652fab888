"""The language task: a causal language model learns to predict the next token of a text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overtone.errors import TaskError, visible
from overtone.tasks.options import Language, TaskOptions
from overtone.tasks.sharding import Feed, dice_for
from overtone.tasks.sources import refuse_huge_model
from overtone.tasks.task import Task, Tensors, save_weights
from overtone.tasks.text.byte_model import BYTES, ByteTransformer, ModelSize
from overtone.tasks.text.hf_models import causal_lm
from overtone.tasks.text.stream import Stream, StreamFeed
from overtone.tasks.text.tokenizer import Alphabet, alphabet_for
from overtone.tasks.text.windows import NoText, Text, load_text

PROMPT, CONTINUED, TEMPERATURE = 32, 120, 0.8  # of a sample of what the model writes


class Architecture(Protocol):
    """A model to build, to call and to save."""

    @property
    def name(self) -> str: ...

    @property
    def vocabulary(self) -> int: ...

    def build(self) -> nn.Module: ...

    def logits(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """(batch, time) to (batch, time, vocabulary)."""
        ...

    def save(self, model: nn.Module, folder: Path) -> None: ...


@dataclass(frozen=True)
class ByteModel:
    """The preset "byte", which needs no library but torch."""

    size: ModelSize
    name: str = "byte"
    vocabulary: int = BYTES

    def build(self) -> nn.Module:
        if torch.get_default_device().type != "meta":  # where nothing takes any room
            refuse_huge_model(self.size.parameters, self.name)
        return ByteTransformer(self.size)

    def logits(self, model: nn.Module, tokens: Tensor) -> Tensor:
        found: Tensor = model(tokens)
        return found

    def save(self, model: nn.Module, folder: Path) -> None:
        save_weights(model, folder)
        (folder / "model.json").write_text(json.dumps(asdict(self.size), indent=2) + "\n")


class LanguageTask(Task):
    """Windows of tokens; the loss is the mean cross entropy of each next token, in nats."""

    unit = "tokens"
    keys = None  # a window's place in the text is its number

    def __init__(
        self, architecture: Architecture, alphabet: Alphabet, text: Text | Stream | NoText, size: Language, windows: int
    ) -> None:
        self.architecture = architecture
        self.alphabet = alphabet
        self.text = text
        self.name = text.name
        self.context = size.context
        self.train = text.samples(size.context)
        self._valid = text.validation(context=size.context, windows=windows)
        self.valid = Tensors(self._valid)

    def model(self) -> nn.Module:
        return self.architecture.build()

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        logits = self.architecture.logits(model, batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    def summary(self, means: Mapping[str, float]) -> dict[str, float]:
        """Perplexity is per token; bits per byte of text do not depend on what a token is."""
        loss = means["loss"]
        perplexity = math.inf if loss > 700 else math.exp(loss)  # exp(710) is past the largest float
        bits = loss / self.text.bytes_per_token / math.log(2)
        return {**means, "perplexity": perplexity, "bits_per_byte": bits}

    def units(self) -> int:
        return self.context

    def feed(self, rank: int, replicas: int, *, batch: int, seed: int, skew: float) -> Feed:
        if isinstance(self.text, Stream):
            if skew:
                raise TaskError(f"skew={skew}: a stream is read in its own order; use 0, or data that is not hub:")
            return StreamFeed(self.text, rank, replicas, batch=batch, seed=seed)
        return super().feed(rank, replicas, batch=batch, seed=seed, skew=skew)

    @torch.no_grad()
    def sample(self, model: nn.Module) -> str:
        """The first tokens of the validation text, and how the model goes on from there."""
        if not len(self._valid):
            return ""
        tokens: list[int] = self._valid[0, : min(PROMPT, self.context)].tolist()
        device = next(model.parameters()).device
        dice = dice_for("sample")
        training = model.training
        model.eval()
        try:
            for _ in range(CONTINUED):
                window = torch.tensor([tokens[-self.context :]], device=device)
                # A model may have room for more tokens than there are.
                logits = self.architecture.logits(model, window)[0, -1, : self.alphabet.size].float().cpu()
                if not logits.isfinite().all():
                    break  # a model that has diverged says nothing
                chances = torch.softmax(logits / TEMPERATURE, dim=0)
                tokens.append(int(torch.multinomial(chances, 1, generator=dice)))
        finally:
            model.train(training)
        return visible(self.alphabet.decode(tokens))

    def export(self, model: nn.Module, folder: Path) -> None:
        self.architecture.save(model, folder)
        self.alphabet.save(folder)

    def about(self) -> dict[str, object]:
        return {
            **super().about(),
            "task": "language",
            "model": self.architecture.name,
            "vocabulary": self.architecture.vocabulary,
            "context": self.context,
            **self.text.about(),
        }


def task(options: TaskOptions) -> Task:
    size = options.language
    alphabet = alphabet_for(size.tokenizer)
    # Without data and tokenizer nothing says how many tokens there are: the model's own number.
    vocabulary = None if options.data == "none" and size.tokenizer is None else alphabet.size
    name = options.model or "byte"
    architecture = (
        _byte_model(size) if name == "byte" else causal_lm(name, size, vocabulary=vocabulary, end=alphabet.end)
    )
    return LanguageTask(architecture, alphabet, open_text(options, alphabet), size, options.valid_samples)


def open_text(options: TaskOptions, alphabet: Alphabet) -> Text | Stream | NoText:
    """What ``options.data`` names; docs/tasks.md lists the forms."""
    context = options.language.context
    if options.data == "none":
        return NoText()
    if options.data is not None and options.data.startswith("hub:"):
        return Stream(options.data, alphabet, context=context, windows=options.valid_samples)
    return load_text(options.data, alphabet, context=context)


def _byte_model(size: Language) -> Architecture:
    if size.tokenizer is not None:
        raise TaskError(f"model byte: predicts bytes, not the tokens of {size.tokenizer}; use one such as gpt2-30m")
    own = ModelSize()
    return ByteModel(
        ModelSize(size.width or own.width, size.layers or own.layers, size.heads or own.heads, size.context)
    )
