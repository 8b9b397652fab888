"""Documents from a text file, a folder of texts, or a saved dataset; a part of them is for validation."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overtone.common.limits import refuse_beyond_memory
from overtone.errors import TaskError
from overtone.tasks.sources import choose_splits, existing_path, is_saved_dataset, load_saved_dataset, part_folders
from overtone.tasks.text.tokenizer import Document, Tokenizer


@dataclass(frozen=True)
class Documents:
    """Training and validation documents, before they become tokens."""

    train: list[Document]
    valid: list[Document]
    name: str


def open_documents(data: str | None, tokenizer: Tokenizer) -> Documents:
    """Read all documents at a path; those of the standard library for None."""
    if data is None:
        return _standard_library()
    path = existing_path(data, "give a text, a folder of texts, or hub:NAME")
    if path.is_dir():
        return _saved_dataset(path, tokenizer) if is_saved_dataset(path) else _folder(path)
    document = _read(path, path.name)
    if len(document.text) < 2:
        raise TaskError(f"data {data}: {len(document.text)} bytes; give a text of at least a few kilobytes")
    return Documents(*_cut_last_tenth([document]), path.name)


def _standard_library() -> Documents:
    """Python's own sources: they are on every machine, and about 10 MB without their tests.

    Every tenth file is for validation. The bytes depend on the Python version.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__"}
    files = sorted(p for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts))
    if not files:
        raise TaskError(f"the standard library has no sources below {root}; give a text with --data FILE")
    return Documents(*_take_every_tenth([_read(p, str(p)) for p in files]), "standard library")


def _folder(root: Path) -> Documents:
    """Every file below a folder.

    If there are subfolders for training and validation, these are the two parts. Otherwise every tenth file is for
    validation, or the last tenth of the bytes if there are fewer than ten files.
    """
    train, valid = part_folders(root)
    if train is not None and valid is not None:
        return Documents(_texts_below(train), _texts_below(valid), root.resolve().name)
    found = _texts_below(root)
    return Documents(*(_take_every_tenth(found) if len(found) >= 10 else _cut_last_tenth(found)), root.resolve().name)


def _texts_below(root: Path) -> list[Document]:
    def hidden(path: Path) -> bool:
        return any(part.startswith(".") for part in path.relative_to(root).parts)

    files = [path for path in root.rglob("*") if path.is_file() and not hidden(path)]
    # In the order of the names, not of the file system: every replica must read the same text.
    found = [_read(path, str(path)) for path in sorted(files, key=lambda path: path.relative_to(root).as_posix())]
    if not any(document.text for document in found):
        raise TaskError(f"data {root}: {len(found)} files and no text in them; give a folder with text files")
    return found


def _read(path: Path, name: str) -> Document:
    try:
        size = path.stat().st_size
        # Twice its size: the bytes, and a tensor of them.
        refuse_beyond_memory(
            2 * size, f"data {path}: read whole", "give a smaller text, or hub:FOLDER to stream it", TaskError
        )
        return Document(path.read_bytes(), name)
    except OSError as error:
        raise TaskError(f"data {path}: {error.strerror or error}; give a text that can be read") from error


def _take_every_tenth(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    return [d for i, d in enumerate(documents) if i % 10], documents[::10]


def _cut_last_tenth(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """The last tenth of the bytes is for validation; the document at the border is cut in two."""
    left = sum(len(document.text) for document in documents) * 9 // 10
    for i, document in enumerate(documents):
        if left < len(document.text):
            text = document.text
            # Not inside a character: UTF-8 has at most three continuation bytes (10xxxxxx) in a row.
            for _ in range(3):
                left += left < len(text) and text[left] & 0xC0 == 0x80
            head, tail = Document(text[:left], document.name), Document(text[left:], document.name)
            return [*documents[:i], head], [tail, *documents[i + 1 :]]
        left -= len(document.text)
    return documents, []


def _saved_dataset(root: Path, tokenizer: Tokenizer) -> Documents:
    """A dataset that ``save_to_disk`` wrote: its splits, or the last tenth of the rows if it has only one."""
    splits = load_saved_dataset(root)
    train_name, valid_name = choose_splits(splits, None, str(root))
    rows = splits[train_name]
    cut = len(rows) * 9 // 10
    if valid_name is None:
        parts = rows.select(range(cut)), rows.select(range(cut, len(rows)))
    else:
        parts = rows, splits[valid_name]
    train, valid = (list(row_documents(part, tokenizer, str(root))) for part in parts)
    return Documents(train, valid, root.resolve().name)


def row_documents(dataset: Iterable[Mapping[str, Any]], tokenizer: Tokenizer, name: str) -> Iterator[Document]:
    """Yield the text of each row as a document.

    Rows seldom end with a newline, so one is added, unless the tokenizer has a token that separates documents.
    """
    column = None
    for row in dataset:
        column = column or _text_column(row, name)
        text = row[column]
        if text is not None:  # None is an empty row
            if not isinstance(text, str):
                raise TaskError(f"data {name}: column {column!r} holds {type(text).__name__}; it must be text")
            yield Document((text if tokenizer.eos_token_id is not None else text + "\n").encode(), name)


def _text_column(row: Mapping[str, Any], name: str) -> str:
    texts = [column for column, value in row.items() if isinstance(value, str)]
    if "text" in row:
        return "text"
    if len(texts) != 1:
        raise TaskError(
            f"data {name}: {len(texts)} of its columns ({', '.join(row)}) hold text, and none is called text; "
            "keep one of them, or rename one to text"
        )
    return texts[0]
