"""What a token is: a byte, or a subword of a tokenizer; and how documents become tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from overtone.errors import TaskError
from overtone.tasks.sources import first_line, needs, refuse_no_tokenizer
from overtone.tasks.text.byte_model import BYTES

PIECE = 1 << 20  # bytes that a tokenizer gets at once; it holds some hundred bytes of notes for every token
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")  # what tokenizers call the end of a document


@dataclass(frozen=True)
class Document:
    """A file, or a row of a dataset."""

    text: bytes
    name: str


class Alphabet(Protocol):
    """What a token is."""

    size: int
    end: int | None  # the token that ends a document
    dtype: torch.dtype

    def encode(self, document: Document) -> Tensor: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def save(self, folder: Path) -> None:
        """Into the folder of a model for the transformers library."""
        ...


class Bytes:
    """A token is a byte."""

    size: int = BYTES
    end: int | None = None
    dtype: torch.dtype = torch.uint8

    def encode(self, document: Document) -> Tensor:
        return torch.frombuffer(bytearray(document.text), dtype=torch.uint8) if document.text else no_tokens(self)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def save(self, folder: Path) -> None:
        """Nothing: a token's number is the byte."""


class Subwords:
    """Tokens of a `tokenizers` file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        library = needs("tokenizers", f"tokenizer {file}")
        refuse_no_tokenizer(file)
        try:
            self._tokenizer = library.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises the base class itself
            raise TaskError(f"tokenizer {file}: {first_line(error)}; give a tokenizer.json") from error
        # A file may say that texts are to be cut at some length or filled up to it: right for single sentences only.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        numbers: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not numbers:
            raise TaskError(f"tokenizer {file}: has no tokens; train it first")
        self.size = max(numbers.values()) + 1
        self.end_text = next((name for name in ENDS if name in numbers), None)
        self.end = None if self.end_text is None else numbers[self.end_text]
        self.dtype = torch.uint16 if self.size <= 1 << 16 else torch.int32

    def encode(self, document: Document) -> Tensor:
        try:
            text = document.text.decode()
        except UnicodeDecodeError as error:
            raise TaskError(
                f"data {document.name}: byte {error.start} is not UTF-8, which a tokenizer needs; "
                "convert or remove the file, or train on bytes without --tokenizer"
            ) from error
        found = [self._tokenizer.encode(piece, add_special_tokens=False).ids for piece in pieces(text)]
        return torch.cat([torch.tensor(ids, dtype=torch.int64) for ids in found]).to(self.dtype)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def save(self, folder: Path) -> None:
        library = needs("transformers", f"tokenizer {self.file}")
        library.PreTrainedTokenizerFast(tokenizer_object=self._tokenizer, eos_token=self.end_text).save_pretrained(
            folder
        )


def alphabet_for(tokenizer: Path | None) -> Alphabet:
    return Bytes() if tokenizer is None else Subwords(tokenizer)


def pieces(text: str) -> list[str]:
    """The text in pieces of about a million characters that end with a line, or as one where lines are longer."""
    found = []
    start = 0
    while start < len(text):
        newline = text.find("\n", start + PIECE)
        stop = len(text) if newline < 0 else newline + 1
        found.append(text[start:stop])
        start = stop
    return found or [""]


def encoded(documents: Iterable[Document], alphabet: Alphabet, *, enough: int | None = None) -> tuple[Tensor, int]:
    """The tokens of documents, each ended by its token where there is one, and how many bytes of text they are.
    Whole documents are read until there are more than ``enough`` tokens."""
    end = no_tokens(alphabet) if alphabet.end is None else torch.tensor([alphabet.end], dtype=alphabet.dtype)
    parts = [no_tokens(alphabet)]
    count = length = 0
    for document in documents:
        parts += [alphabet.encode(document), end]
        count += parts[-2].numel() + end.numel()
        length += len(document.text)
        if enough is not None and count > enough:
            break
    return torch.cat(parts), length


def no_tokens(alphabet: Alphabet) -> Tensor:
    return torch.empty(0, dtype=alphabet.dtype)
