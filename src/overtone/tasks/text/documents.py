"""Documents from where people keep them: a text, a folder of texts, a saved dataset. A part is for validation."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overtone.common.limits import refuse_beyond_memory
from overtone.errors import TaskError
from overtone.tasks.sources import existing, is_saved, load_saved, named_splits, parts_below
from overtone.tasks.text.tokenizer import Alphabet, Document

FORMS = "give a text, a folder of texts, or hub:NAME"


@dataclass(frozen=True)
class Documents:
    """Training and validation documents, before they are tokens."""

    train: list[Document]
    valid: list[Document]
    name: str


def open_documents(data: str | None, alphabet: Alphabet) -> Documents:
    if data is None:
        return _standard_library()
    path = existing(data, FORMS)
    if path.is_dir():
        return _saved(path, alphabet) if is_saved(path) else _folder(path)
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
    train, valid = parts_below(root)
    if train is not None and valid is not None:
        return Documents(_texts_below(train), _texts_below(valid), root.resolve().name)
    found = _texts_below(root)
    return Documents(*(_every_tenth(found) if len(found) >= 10 else _cut(found)), root.resolve().name)


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
        size = path.stat().st_size
        refuse_beyond_memory(
            2 * size, f"data {path}: read whole", "give a smaller text, or hub:FOLDER to stream it", TaskError
        )
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


def _saved(root: Path, alphabet: Alphabet) -> Documents:
    """A dataset that the datasets library saved: its splits, or of a single one the last tenth of the rows."""
    splits = load_saved(root)
    first, held = named_splits(splits, None, str(root))
    rows = splits[first]
    cut = len(rows) * 9 // 10
    parts = (rows.select(range(cut)), rows.select(range(cut, len(rows)))) if held is None else (rows, splits[held])
    train, valid = (list(rows_of(part, alphabet, str(root))) for part in parts)
    return Documents(train, valid, root.resolve().name)


def rows_of(dataset: Iterable[Mapping[str, Any]], alphabet: Alphabet, name: str) -> Iterator[Document]:
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
