"""Text that fits in memory: one long tensor of tokens, in windows.

A window is ``context + 1`` tokens, the last one only a target; windows start ``context`` tokens apart, so that every
token is a target once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from overtone.coding import fingerprint
from overtone.errors import TaskError
from overtone.tasks.text.documents import open_documents
from overtone.tasks.text.tokenizer import Alphabet, encoded


class Windows:
    """Samples that are windows of a long tensor: number j begins at token ``j * context``."""

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.tokens = tokens
        self.context = context

    def __len__(self) -> int:
        return max(self.tokens.numel() - 1, 0) // self.context

    def batch(self, rows: Tensor, dice: torch.Generator | None) -> Tensor:  # noqa: ARG002
        """(len(rows), context + 1) int64."""
        return at_starts(self.tokens, rows * self.context, self.context)


def at_starts(tokens: Tensor, starts: Tensor, context: int) -> Tensor:
    return tokens[starts.unsqueeze(1) + torch.arange(context + 1)].long()


@dataclass(frozen=True)
class Text:
    """Training and validation tokens."""

    train: Tensor  # (n,)
    valid: Tensor
    name: str
    bytes_per_token: float = 1.0  # of the validation part

    def validation(self, *, context: int, windows: int) -> Tensor:
        """(windows, context + 1) int64, evenly spaced over the validation tokens: the same for everybody."""
        room = self.valid.numel() - context - 1
        if room < 0:
            raise too_short(self.name, "validation", self.valid, context)
        starts = torch.linspace(0, room, min(windows, room + 1)).long().clamp_max(room)  # fp32 may overshoot
        return at_starts(self.valid, starts, context)

    def samples(self, context: int) -> Windows:
        return Windows(self.train, context)

    def about(self) -> dict[str, object]:
        return {
            "train_tokens": self.train.numel(),
            "valid_tokens": self.valid.numel(),
            "bytes_per_token": self.bytes_per_token,
            "fingerprint": fingerprint.of_tensors([self.train, self.valid]).hex(),
        }


class NoText:
    """For dry runs: the model without anything to train it on."""

    name = "no data"
    bytes_per_token = 1.0

    def validation(self, *, context: int, windows: int) -> Tensor:  # noqa: ARG002
        return torch.empty(0, context + 1, dtype=torch.int64)

    def samples(self, context: int) -> Windows:
        return Windows(torch.empty(0, dtype=torch.uint8), context)

    def about(self) -> dict[str, object]:
        return {}


def load_text(data: str | None, alphabet: Alphabet, *, context: int) -> Text:
    """The standard library's sources (None), a text file, a folder of them, or a dataset that was saved to disk."""
    documents = open_documents(data, alphabet)
    train, _ = encoded(documents.train, alphabet)
    valid, length = encoded(documents.valid, alphabet)
    if train.numel() <= context:
        raise too_short(documents.name, "training", train, context)
    return Text(train, valid, documents.name, length / max(valid.numel(), 1))


def too_short(name: str, part: str, tokens: Tensor, context: int) -> TaskError:
    return TaskError(
        f"data {name}: {tokens.numel()} {part} tokens, a window of context={context} needs {context + 1}; "
        "use more text or a shorter context"
    )
