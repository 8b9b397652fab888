"""The language task: a causal language model learns to predict the next token of a text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overtone.errors import TaskError, visible
from overtone.tasks.options import Language, TaskOptions
from overtone.tasks.sharding import Feed, generator_for
from overtone.tasks.task import Task, Tensors
from overtone.tasks.text.byte_model import ByteModel, ModelSize
from overtone.tasks.text.hf_models import causal_lm
from overtone.tasks.text.stream import Stream, StreamFeed
from overtone.tasks.text.tokenizer import Tokenizer, load_tokenizer
from overtone.tasks.text.windows import NoText, Text, load_text

# Of the sample that a trained model writes: tokens given, tokens written, softmax temperature.
PROMPT, WRITTEN, TEMPERATURE = 32, 120, 0.8


class Architecture(Protocol):
    """A kind of language model: how to build, call and save one."""

    @property
    def name(self) -> str:
        """The name of the preset, or the path of its config."""
        ...

    @property
    def vocab_size(self) -> int:
        """The number of tokens that the model tells apart, at least those of the tokenizer."""
        ...

    def build(self) -> nn.Module:
        """Return a new model with random weights, on torch's default device."""
        ...

    def logits(self, model: nn.Module, tokens: Tensor) -> Tensor:
        """(batch, time) to (batch, time, vocab_size)."""
        ...

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write the model in a form that other programs load."""
        ...


class LanguageTask(Task):
    """Samples are windows of tokens; the loss is the mean cross entropy of each next token, in nats."""

    unit = "tokens"
    keys = None  # skewed shards are sorted by the window's number, which is its place in the text

    def __init__(
        self,
        architecture: Architecture,
        tokenizer: Tokenizer,
        text: Text | Stream | NoText,
        *,
        context: int,
        valid_windows: int,
    ) -> None:
        self.architecture = architecture
        self.tokenizer = tokenizer
        self.text = text
        self.name = text.name
        self.context = context
        self.train = text.samples(context)
        self._valid = text.validation(context=context, windows=valid_windows)
        self.valid = Tensors(self._valid)

    def model(self) -> nn.Module:
        """Return a new model with random weights."""
        return self.architecture.build()

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return the mean cross entropy of the batch, (n, context + 1) int64."""
        logits = self.architecture.logits(model, batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    def summary(self, means: Mapping[str, float]) -> dict[str, float]:
        """Add the perplexity per token, and bits per byte of text, which do not depend on the tokenizer."""
        loss = means["loss"]
        perplexity = math.inf if loss > 700 else math.exp(loss)  # exp(710) is past the largest float
        bits = loss / self.text.bytes_per_token / math.log(2)
        return {**means, "perplexity": perplexity, "bits_per_byte": bits}

    def units(self) -> int:
        """Return the number of tokens in a window."""
        return self.context

    def feed(self, rank: int, replicas: int, *, batch: int, seed: int, skew: float) -> Feed:
        """Return endless batches of windows: of this replica's shard, or of its part of a stream."""
        if isinstance(self.text, Stream):
            if skew:
                raise TaskError(f"skew={skew}: a stream is read in its own order; use 0, or data without hub:")
            return StreamFeed(self.text, rank, replicas, batch=batch, seed=seed)
        return super().feed(rank, replicas, batch=batch, seed=seed, skew=skew)

    @torch.no_grad()
    def sample(self, model: nn.Module) -> str:
        """Return the first tokens of the validation text and the model's continuation of them."""
        if not len(self._valid):
            return ""
        tokens: list[int] = self._valid[0, : min(PROMPT, self.context)].tolist()
        device = next(model.parameters()).device
        generator = generator_for("sample")
        training = model.training
        model.eval()
        try:
            for _ in range(WRITTEN):
                window = torch.tensor([tokens[-self.context :]], device=device)
                # The model's vocabulary may be larger than the tokenizer's.
                logits = self.architecture.logits(model, window)[0, -1, : self.tokenizer.vocab_size].float().cpu()
                if not logits.isfinite().all():
                    break  # the model has diverged, so there are no probabilities to draw from
                probabilities = torch.softmax(logits / TEMPERATURE, dim=0)
                tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        finally:
            model.train(training)
        return visible(self.tokenizer.decode(tokens))

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write the model and its tokenizer."""
        self.architecture.save(model, folder)
        self.tokenizer.save(folder)

    def about(self) -> dict[str, object]:
        """Return facts for the run log."""
        return {
            **super().about(),
            "task": "language",
            "model": self.architecture.name,
            "vocabulary": self.architecture.vocab_size,
            "context": self.context,
            **self.text.about(),
        }


def task(options: TaskOptions) -> Task:
    """Build the language task that the options describe."""
    size = options.language
    tokenizer = load_tokenizer(size.tokenizer)
    # Without data and tokenizer nothing says how many tokens there are: the model's own number is used.
    vocab_size = None if options.data == "none" and size.tokenizer is None else tokenizer.vocab_size
    name = options.model or "byte"
    architecture = (
        _byte_model(size)
        if name == "byte"
        else causal_lm(name, size, vocab_size=vocab_size, eos_token_id=tokenizer.eos_token_id)
    )
    text = open_text(options, tokenizer)
    return LanguageTask(architecture, tokenizer, text, context=size.context, valid_windows=options.valid_samples)


def open_text(options: TaskOptions, tokenizer: Tokenizer) -> Text | Stream | NoText:
    """Open the text that ``options.data`` names; docs/tasks.md lists the forms."""
    context = options.language.context
    if options.data == "none":
        return NoText()
    if options.data is not None and options.data.startswith("hub:"):
        return Stream(options.data, tokenizer, context=context, windows=options.valid_samples)
    return load_text(options.data, tokenizer, context=context)


def _byte_model(size: Language) -> Architecture:
    if size.tokenizer is not None:
        raise TaskError(
            f"model byte: predicts bytes, not the tokens of {size.tokenizer}; use another model, such as gpt2-30m"
        )
    own = ModelSize()
    return ByteModel(
        ModelSize(size.width or own.width, size.layers or own.layers, size.heads or own.heads, size.context)
    )
