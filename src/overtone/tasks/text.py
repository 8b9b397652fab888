"""Text: where it comes from, what its tokens are, and how it becomes windows of them.

A window is ``context + 1`` tokens, the last one only a target; windows start ``context`` tokens apart, so that every
token is a target once. A text that fits in memory is one long tensor of tokens.
"""

from __future__ import annotations

import sysconfig
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from overtone import fingerprint
from overtone.tasks.byte_transformer import BYTES
from overtone.tasks.deal import TaskError, dice_for
from overtone.tasks.options import TaskOptions

PIECE = 1 << 20  # bytes that a tokenizer gets at once; it holds some hundred bytes of notes for every token
BLOCK = 1024  # windows of a stream that are shuffled together
ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")  # what tokenizers call the end of a document
VALID = ("validation", "valid", "val", "dev", "test")  # what a validation part is called, the likeliest first


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
        return torch.frombuffer(bytearray(document.text), dtype=torch.uint8) if document.text else _no_tokens(self)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def save(self, folder: Path) -> None:
        """Nothing: a token's number is the byte."""


class Subwords:
    """Tokens of a `tokenizers` file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        library = needs("tokenizers", f"tokenizer {file}")
        if not file.is_file():
            raise TaskError(f"tokenizer {file}: no such file; give a tokenizer.json of the tokenizers library")
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
            raise TaskError(
                f"data {self.name}: {self.valid.numel()} validation tokens, context={context} needs {context + 1}; "
                "use more text or a shorter context"
            )
        starts = torch.linspace(0, room, min(windows, room + 1)).long().clamp_max(room)  # fp32 may overshoot
        return at_starts(self.valid, starts, context)

    def samples(self, context: int) -> Windows:
        return Windows(self.train, context)

    def about(self) -> dict[str, object]:
        return {
            "data": self.name,
            "train_tokens": self.train.numel(),
            "valid_tokens": self.valid.numel(),
            "bytes_per_token": self.bytes_per_token,
            "fingerprint": fingerprint.of_tensors([self.train, self.valid]).hex(),
        }


class NoText:
    """For dry runs: the model without anything to train it on."""

    bytes_per_token = 1.0

    def validation(self, *, context: int, windows: int) -> Tensor:  # noqa: ARG002
        return torch.empty(0, context + 1, dtype=torch.int64)

    def samples(self, context: int) -> Windows:
        return Windows(torch.empty(0, dtype=torch.uint8), context)

    def about(self) -> dict[str, object]:
        return {"data": "none"}


@dataclass(frozen=True)
class Documents:
    """Training and validation documents, before they are tokens."""

    train: list[Document]
    valid: list[Document]
    name: str


def open_text(options: TaskOptions, alphabet: Alphabet) -> Text | Stream | NoText:
    """What ``options.data`` names; docs/tasks.md lists the forms."""
    context = options.language.context
    if options.data == "none":
        return NoText()
    if options.data is not None and options.data.startswith("hub:"):
        return Stream(options.data, alphabet, context=context, windows=options.valid_samples)
    return load_text(options.data, alphabet, context=context)


def load_text(data: str | None, alphabet: Alphabet, *, context: int) -> Text:
    """The standard library's sources (None), a text file, a folder of them, or a dataset that was saved to disk."""
    documents = _documents(data, alphabet)
    train, valid = (_joined(part, alphabet) for part in (documents.train, documents.valid))
    if train.numel() <= context:
        raise TaskError(
            f"data {documents.name}: {train.numel()} training tokens, a window of context={context} needs "
            f"{context + 1}; use more text or a shorter context"
        )
    length = sum(len(document.text) for document in documents.valid)
    return Text(train, valid, documents.name, length / max(valid.numel(), 1))


def _joined(documents: Iterable[Document], alphabet: Alphabet) -> Tensor:
    return torch.cat([_no_tokens(alphabet), *(ended(alphabet.encode(document), alphabet) for document in documents)])


def ended(tokens: Tensor, alphabet: Alphabet) -> Tensor:
    """With the token that ends a document, where there is one."""
    return tokens if alphabet.end is None else torch.cat([tokens, torch.tensor([alphabet.end], dtype=tokens.dtype)])


def _no_tokens(alphabet: Alphabet) -> Tensor:
    return torch.empty(0, dtype=alphabet.dtype)


def _documents(data: str | None, alphabet: Alphabet) -> Documents:
    if data is None:
        return _standard_library()
    path = Path(data)
    if not path.exists():
        raise TaskError(f"data {data}: no such file or folder; give a text, a folder of texts, or hub:NAME")
    if path.is_dir():
        saved = (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()
        return _from_disk(path, alphabet) if saved else _folder(path)
    document = _read(path, path.name)
    if len(document.text) < 2:
        raise TaskError(f"data {data}: {len(document.text)} bytes; give a text of at least a few kilobytes")
    return Documents(*_cut([document]), path.name)


def _standard_library() -> Documents:
    """On every machine, about 10 MB without its tests; the bytes depend on the Python version. Every tenth file is for
    validation."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__"}
    files = sorted(p for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts))
    if not files:
        raise TaskError(f"the standard library has no sources below {root}; give a text with --data FILE")
    return Documents(*_every_tenth([_read(p, str(p)) for p in files]), "standard library")


def _folder(root: Path) -> Documents:
    """Every file below a folder. Its parts are the subfolders train and validation, if it has them; else every tenth
    file is for validation, or of fewer than ten files the last tenth of the bytes."""
    valid = next((root / name for name in VALID if (root / name).is_dir()), None)
    if (root / "train").is_dir() and valid is not None:
        return Documents(_texts_below(root / "train"), _texts_below(valid), root.name)
    found = _texts_below(root)
    return Documents(*(_every_tenth(found) if len(found) >= 10 else _cut(found)), root.name)


def _texts_below(root: Path) -> list[Document]:
    def hidden(path: Path) -> bool:
        return any(part.startswith(".") for part in path.relative_to(root).parts)

    files = [path for path in root.rglob("*") if path.is_file() and not hidden(path)]
    found = [_read(path, str(path)) for path in sorted(files, key=lambda path: path.relative_to(root).as_posix())]
    if not any(document.text for document in found):
        raise TaskError(f"data {root}: {len(found)} files and no text in them; give a folder with text files")
    return found


def _read(path: Path, name: str) -> Document:
    try:
        return Document(path.read_bytes(), name)
    except OSError as error:
        raise TaskError(f"data {path}: {error.strerror or error}; give readable text") from error


def _every_tenth(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    return [d for i, d in enumerate(documents) if i % 10], documents[::10]


def _cut(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """The last tenth of the bytes is for validation; the document on the border is cut in two."""
    left = sum(len(document.text) for document in documents) * 9 // 10
    for i, document in enumerate(documents):
        if left < len(document.text):
            text = document.text
            for _ in range(3):  # not within a character: UTF-8 has at most three bytes of the form 10......
                left += left < len(text) and text[left] & 0xC0 == 0x80
            head, tail = Document(text[:left], document.name), Document(text[left:], document.name)
            return [*documents[:i], head], [tail, *documents[i + 1 :]]
        left -= len(document.text)
    return documents, []


def _from_disk(root: Path, alphabet: Alphabet) -> Documents:
    """A dataset that the datasets library saved: its splits, or of a single one the last tenth of the rows."""
    library = needs("datasets", f"data {root}")
    try:
        saved = library.load_from_disk(str(root))
    except Exception as error:  # an IndexError, for one, if it has no rows
        raise TaskError(
            f"data {root}: empty or damaged ({type(error).__name__}: {first_line(error)}); "
            "save it again with save_to_disk"
        ) from error
    splits = saved if isinstance(saved, dict) else {"train": saved}
    train, valid = _named_splits(splits, None, str(root))
    if valid is None:
        cut = len(train) * 9 // 10
        train, valid = train.select(range(cut)), train.select(range(cut, len(train)))
    return Documents(list(_rows(train, alphabet, str(root))), list(_rows(valid, alphabet, str(root))), root.name)


def _named_splits(splits: Mapping[str, Any], wanted: str | None, name: str) -> tuple[Any, Any | None]:
    """The training split, and the validation split if there is one."""
    train = wanted or ("train" if "train" in splits or len(splits) != 1 else next(iter(splits)))
    if train not in splits:
        raise TaskError(f"data {name}: no split {train!r}; there are {', '.join(splits)}")
    valid = next((split for split in VALID if split in splits and split != train), None)
    return splits[train], None if valid is None else splits[valid]


def _rows(dataset: Iterable[Mapping[str, Any]], alphabet: Alphabet, name: str) -> Iterator[Document]:
    """A row's text is a document. Rows seldom end with a newline: one keeps them apart where no token does."""
    column = None
    for row in dataset:
        column = column or _text_column(row, name)
        text = row[column]
        if text is not None:  # an empty row
            if not isinstance(text, str):
                raise TaskError(f"data {name}: column {column!r} holds {type(text).__name__}; it must be text")
            yield Document((text if alphabet.end is not None else text + "\n").encode(), name)


def _text_column(row: Mapping[str, Any], name: str) -> str:
    texts = [column for column, value in row.items() if isinstance(value, str)]
    if "text" in row:
        return "text"
    if len(texts) != 1:
        raise TaskError(
            f"data {name}: {len(texts)} of its columns ({', '.join(row)}) are text and none is called text; "
            "keep one, or call one so"
        )
    return texts[0]


class Stream:
    """A dataset that is read as it is trained on.

    ``hub:NAME``, ``hub:NAME:CONFIG``, ``hub:NAME@SPLIT`` or ``hub:NAME:CONFIG@SPLIT``, where NAME is a dataset of the
    Hugging Face hub or a local folder of .jsonl, .txt, .csv or .parquet files. Validation windows are the first of its
    validation or test split; without one, of the first documents of the stream, and training skips these documents
    (and others with the same text: told apart by what they say, not by place, which depends on who reads what).
    """

    def __init__(self, data: str, alphabet: Alphabet, *, context: int, windows: int) -> None:
        self.name = data
        self.alphabet = alphabet
        self.context = context
        self._dataset, held_split = self._open()
        self.held: set[bytes] = set()
        parts = [_no_tokens(alphabet)]
        length = count = 0
        for document in self.documents(self._dataset if held_split is None else held_split):
            parts.append(ended(alphabet.encode(document), alphabet))
            length += len(document.text)
            count += parts[-1].numel()
            if held_split is None:
                self.held.add(fingerprint.of_bytes(document.text))
            if count > windows * context:
                break
        self._valid = Windows(torch.cat(parts), context)
        self.bytes_per_token = length / max(self._valid.tokens.numel(), 1)

    def validation(self, *, context: int, windows: int) -> Tensor:
        if not len(self._valid):
            raise TaskError(
                f"data {self.name}: {self._valid.tokens.numel()} validation tokens, context={context} needs "
                f"{context + 1}; use more text or a shorter context"
            )
        return self._valid.batch(torch.arange(min(windows, len(self._valid))), None)

    def samples(self, context: int) -> Windows:
        """None that could be asked for by number."""
        return Windows(_no_tokens(self.alphabet), context)

    def about(self) -> dict[str, object]:
        return {
            "data": self.name,
            "train_tokens": None,
            "valid_tokens": self._valid.tokens.numel(),
            "bytes_per_token": self.bytes_per_token,
        }

    def _open(self) -> tuple[Any, Any | None]:
        library = needs("datasets", f"data {self.name}")
        name, config, split = self.name.removeprefix("hub:"), None, None
        if not Path(name).exists():
            name, _, split = name.partition("@")
            name, _, config = name.partition(":")
        if Path(name).is_file():
            raise TaskError(f"data {self.name}: a file; give hub: and its folder, or the file without hub:")
        where = str(Path(name).resolve()) if Path(name).exists() else name
        try:
            splits = library.load_dataset(where, config or None, streaming=True)
        except Exception as error:  # of a dozen libraries below: all mean that the data cannot be had
            raise TaskError(
                f"data {self.name}: {first_line(error)}; check the name and the connection, "
                "or give a local folder (hub:FOLDER)"
            ) from error
        return _named_splits(splits, split or None, self.name)

    def documents(self, dataset: Any) -> Iterator[Document]:
        rows = _rows(dataset, self.alphabet, self.name)
        while True:
            try:
                document = next(rows, None)
            except TaskError:
                raise
            except Exception as error:
                raise TaskError(f"data {self.name}: {first_line(error)}; the stream cannot be read further") from error
            if document is None:
                return
            yield document

    def share(self, rank: int, replicas: int, epoch: int) -> Any:
        """One replica's part of the documents: its own files if they can be dealt evenly, else one row of K."""
        library = needs("datasets.distributed", f"data {self.name}")
        # Each has iterables of its own, also in one process: test_a_stream_resumes_exactly takes from several in turns.
        dataset = library.split_dataset_by_node(self._dataset, rank=rank, world_size=replicas)
        dataset.set_epoch(epoch)
        return dataset


@dataclass(frozen=True)
class Block:
    """Windows of a stream that are shuffled together."""

    epoch: int
    number: int
    source: Mapping[str, Any] | None  # the dataset's own state before the block; None: the beginning
    windows: Windows
    order: Tensor


class StreamFeed:
    """Endless batches of one replica's share of a stream.

    Blocks of whole documents, about `BLOCK` windows, are read and their windows shuffled; what is left of a block and
    fills no window is dropped. The datasets library's own shuffle buffer is not used because its content is lost on
    resuming. Here a block follows from the dataset's state at its beginning, so that resuming is exact: the block is
    read again. The next block is read while the model computes. At the end the stream begins again, with its files in
    another order. A state of another number of replicas begins anew, with the new shares.
    """

    def __init__(self, stream: Stream, rank: int, replicas: int, *, batch: int, seed: int) -> None:
        self.stream = stream
        self.rank = rank
        self.replicas = replicas
        self.batch = batch
        self.seed = seed
        self._pool = ThreadPoolExecutor(1)
        self._ahead: Future[Block] | None = None
        self._block: Block | None = None
        self._taken = 0
        self._open: list[Iterator[Document]] = []  # the one that is being read
        # Closed before the interpreter takes the libraries apart: their generators complain otherwise.
        weakref.finalize(self, self._open.clear)
        self._begin(0, None)

    def next(self) -> Tensor:
        """(batch, context + 1) int64."""
        found: list[Tensor] = []
        left = self.batch
        while left:
            if self._block is None or self._taken == len(self._block.order):
                self._turn(self._block)
                continue
            rows = self._block.order[self._taken : self._taken + left]
            found.append(self._block.windows.batch(rows, None))
            self._taken += len(rows)
            left -= len(rows)
        return torch.cat(found)

    def state_dict(self) -> dict[str, Any]:
        at = self._block
        return {
            "epoch": at.epoch if at else 0,
            "block": at.number if at else 0,
            "source": at.source if at else None,
            "taken": self._taken,
            "rank": self.rank,
            "replicas": self.replicas,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._ahead is not None:
            self._ahead.exception()  # waits: two readers would share one place
            self._ahead = None
        self._block, self._taken = None, 0
        if state["replicas"] != self.replicas:
            self._begin(0, None)
            return
        if state["rank"] != self.rank:
            raise TaskError(
                f"stream state of rank {state['rank']}: this is rank {self.rank}; each resumes from its own"
            )
        self._begin(int(state["epoch"]), state["source"])
        self._block = self._read(int(state["epoch"]), int(state["block"]))
        self._taken = int(state["taken"])

    def _turn(self, block: Block | None) -> None:
        """On to the next block, and have the one after it read."""
        if self._ahead is None:
            self._ahead = self._pool.submit(self._after, block)
        self._block, self._taken = self._ahead.result(), 0
        self._ahead = self._pool.submit(self._after, self._block)

    def _after(self, block: Block | None) -> Block:
        found = self._read(block.epoch, block.number + 1) if block else self._read(0, 0)
        if len(found.order):
            return found
        self._begin(found.epoch + 1, None)
        found = self._read(found.epoch + 1, 0)
        if not len(found.order):
            raise TaskError(
                f"data {self.stream.name}: replica {self.rank} of {self.replicas} has no window of "
                f"{self.stream.context + 1} training tokens; use more data, fewer replicas, fewer valid_samples or a "
                "split for validation"
            )
        return found

    def _begin(self, epoch: int, source: Mapping[str, Any] | None) -> None:
        self._share = self.stream.share(self.rank, self.replicas, epoch)
        self._source = source
        if source is not None:
            self._share.load_state_dict(source)
        self._open[:] = [self.stream.documents(self._share)]

    def _read(self, epoch: int, number: int) -> Block:
        before = self._source
        alphabet, context = self.stream.alphabet, self.stream.context
        parts = [_no_tokens(alphabet)]
        count = 0
        while count <= BLOCK * context and (document := next(self._open[0], None)) is not None:
            if fingerprint.of_bytes(document.text) not in self.stream.held:
                parts.append(ended(alphabet.encode(document), alphabet))
                count += parts[-1].numel()
        self._source = self._share.state_dict()
        windows = Windows(torch.cat(parts), context)
        dice = dice_for(self.seed, "stream", epoch, number, self.rank, self.replicas)
        return Block(epoch, number, before, windows, torch.randperm(len(windows), generator=dice))


def needs(library: str, purpose: str) -> Any:
    """A library that only some tasks use, when it is used."""
    try:
        return import_module(library)
    except ImportError as error:
        raise TaskError(f"{purpose}: needs {error.name}; pip install 'overtone[train]'") from error


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
