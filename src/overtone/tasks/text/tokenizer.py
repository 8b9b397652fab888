"""Tokenizers: a token is a byte, or a subword from a tokenizer.json. Documents become one long tensor of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from overtone.errors import TaskError
from overtone.tasks.sources import check_tokenizer_file, first_line, require
from overtone.tasks.text.byte_model import BYTES

PIECE = 1 << 20  # characters that the library gets at once: it needs some hundred bytes of memory for every token
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")  # names of the token that ends a document


@dataclass(frozen=True)
class Document:
    """The text of a file, or of a row of a dataset."""

    text: bytes
    name: str


class Tokenizer(Protocol):
    """Makes tokens of documents, and text of tokens."""

    vocab_size: int
    eos_token_id: int | None  # the token that ends a document
    dtype: torch.dtype  # the smallest that holds a token

    def encode(self, document: Document) -> Tensor:
        """Return the tokens of a document, without one that ends it."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of these tokens."""
        ...

    def save(self, folder: Path) -> None:
        """Write the tokenizer into the folder of a model, in the form of the transformers library."""
        ...


class ByteTokenizer:
    """A token is a byte, and its number is the byte's value."""

    vocab_size: int = BYTES
    eos_token_id: int | None = None
    dtype: torch.dtype = torch.uint8

    def encode(self, document: Document) -> Tensor:
        """Return the bytes of the document. They need not be UTF-8."""
        return torch.frombuffer(bytearray(document.text), dtype=torch.uint8) if document.text else empty_tokens(self)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text; bytes that are not UTF-8 become replacement characters."""
        return bytes(tokens).decode(errors="replace")

    def save(self, folder: Path) -> None:
        """Write nothing: there is nothing to know about bytes."""


class SubwordTokenizer:
    """Tokens of a tokenizer.json of the tokenizers library."""

    def __init__(self, file: Path) -> None:
        self.file = file
        library = require("tokenizers", f"tokenizer {file}")
        check_tokenizer_file(file)
        try:
            self._tokenizer = library.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises the base class itself
            raise TaskError(f"tokenizer {file}: {first_line(error)}; give a tokenizer.json") from error
        # A file may ask for texts to be cut at some length or padded to it. That is meant for single sentences.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        token_ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        if not token_ids:
            raise TaskError(f"tokenizer {file}: has no tokens; train it first")
        self.vocab_size = max(token_ids.values()) + 1  # not len(): numbers may be left out
        self.eos_token = next((name for name in END_TOKENS if name in token_ids), None)
        self.eos_token_id = None if self.eos_token is None else token_ids[self.eos_token]
        self.dtype = torch.uint16 if self.vocab_size <= 1 << 16 else torch.int32

    def encode(self, document: Document) -> Tensor:
        """Return the tokens of a document, which must be UTF-8."""
        try:
            text = document.text.decode()
        except UnicodeDecodeError as error:
            raise TaskError(
                f"data {document.name}: byte {error.start} is not UTF-8, which a tokenizer needs; "
                "convert or remove the file, or train on bytes without --tokenizer"
            ) from error
        found = [self._tokenizer.encode(piece, add_special_tokens=False).ids for piece in split_at_lines(text)]
        return torch.cat([torch.tensor(ids, dtype=torch.int64) for ids in found]).to(self.dtype)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text, with the names of special tokens."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def save(self, folder: Path) -> None:
        """Write the files that ``AutoTokenizer.from_pretrained(folder)`` loads."""
        library = require("transformers", f"tokenizer {self.file}")
        fast = library.PreTrainedTokenizerFast(tokenizer_object=self._tokenizer, eos_token=self.eos_token)
        fast.save_pretrained(folder)


def load_tokenizer(file: Path | None) -> Tokenizer:
    """Return the tokenizer in a file, or the one of bytes if there is no file."""
    return ByteTokenizer() if file is None else SubwordTokenizer(file)


def split_at_lines(text: str) -> list[str]:
    """Split a text into pieces of at least `PIECE` characters; each but the last ends with a newline."""
    found = []
    start = 0
    while start < len(text):
        newline = text.find("\n", start + PIECE)
        stop = len(text) if newline < 0 else newline + 1
        found.append(text[start:stop])
        start = stop
    return found or [""]


def encode_documents(
    documents: Iterable[Document], tokenizer: Tokenizer, *, enough: int | None = None
) -> tuple[Tensor, int]:
    """Return the tokens of all documents, (n,), and the bytes of text that they stand for.

    The token that ends a document follows each, if the tokenizer has one. With ``enough``, no further document is read
    once there are more tokens than that.
    """
    ending = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    end = torch.tensor(ending, dtype=tokenizer.dtype)
    parts = [empty_tokens(tokenizer)]
    tokens = text_bytes = 0
    for document in documents:
        parts += [tokenizer.encode(document), end]
        tokens += parts[-2].numel() + end.numel()
        text_bytes += len(document.text)
        if enough is not None and tokens > enough:
            break
    return torch.cat(parts), text_bytes


def empty_tokens(tokenizer: Tokenizer) -> Tensor:
    """Return a tensor of no tokens, of the tokenizer's type."""
    return torch.empty(0, dtype=tokenizer.dtype)
