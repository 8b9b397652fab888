"""Text that fits in memory: one long tensor of tokens, cut into windows.

A window is ``context + 1`` tokens; the last one is only a target. Windows start ``context`` tokens apart, so that every
token but the first is a target once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from overtone.coding import fingerprint
from overtone.errors import TaskError
from overtone.tasks.text.documents import open_documents
from overtone.tasks.text.tokenizer import Tokenizer, encode_documents


class Windows:
    """Samples that are windows of a long tensor: number j begins at token ``j * context``."""

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.tokens = tokens
        self.context = context

    def __len__(self) -> int:
        return max(self.tokens.numel() - 1, 0) // self.context

    def batch(self, rows: Tensor, generator: torch.Generator | None) -> Tensor:  # noqa: ARG002
        """Return windows, (len(rows), context + 1) int64."""
        return windows_at(self.tokens, rows * self.context, self.context)


def windows_at(tokens: Tensor, starts: Tensor, context: int) -> Tensor:
    """Return the windows that begin at these tokens, (len(starts), context + 1) int64."""
    return tokens[starts.unsqueeze(1) + torch.arange(context + 1)].long()


@dataclass(frozen=True)
class Text:
    """Training and validation tokens in memory."""

    train: Tensor  # (n,)
    valid: Tensor
    name: str
    bytes_per_token: float = 1.0  # of the validation part

    def validation(self, *, context: int, windows: int) -> Tensor:
        """Return (windows, context + 1) int64, evenly spaced over the validation tokens: the same on every replica."""
        last = self.valid.numel() - context - 1
        if last < 0:
            raise too_few_tokens(self.name, "validation", self.valid, context)
        starts = torch.linspace(0, last, min(windows, last + 1)).long().clamp_max(last)  # fp32 may overshoot
        return windows_at(self.valid, starts, context)

    def samples(self, context: int) -> Windows:
        """Return the training windows."""
        return Windows(self.train, context)

    def about(self) -> dict[str, object]:
        """Return facts for the run log."""
        return {
            "train_tokens": self.train.numel(),
            "valid_tokens": self.valid.numel(),
            "bytes_per_token": self.bytes_per_token,
            "fingerprint": fingerprint.of_tensors([self.train, self.valid]).hex(),
        }


class NoText:
    """The data "none", for dry runs: there is a model, but nothing to train it on."""

    name = "no data"
    bytes_per_token = 1.0

    def validation(self, *, context: int, windows: int) -> Tensor:  # noqa: ARG002
        """Return no windows, (0, context + 1)."""
        return torch.empty(0, context + 1, dtype=torch.int64)

    def samples(self, context: int) -> Windows:
        """Return no windows."""
        return Windows(torch.empty(0, dtype=torch.uint8), context)

    def about(self) -> dict[str, object]:
        """Return no facts."""
        return {}


def load_text(data: str | None, tokenizer: Tokenizer, *, context: int) -> Text:
    """Load a text file, a folder of texts, a dataset that was saved to disk, or the standard library's sources (None).

    The text must have at least one training window.
    """
    documents = open_documents(data, tokenizer)
    train, _ = encode_documents(documents.train, tokenizer)
    valid, valid_bytes = encode_documents(documents.valid, tokenizer)
    if train.numel() <= context:
        raise too_few_tokens(documents.name, "training", train, context)
    return Text(train, valid, documents.name, valid_bytes / max(valid.numel(), 1))


def too_few_tokens(name: str, part: str, tokens: Tensor, context: int) -> TaskError:
    """Return the error for a text that does not fill one window."""
    return TaskError(
        f"data {name}: {tokens.numel()} {part} tokens, but a window of context={context} needs {context + 1}; "
        "use more text or a shorter context"
    )
