"""Folders of the transformers library: a config to read, a model to write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from overtone.errors import TaskError
from overtone.tasks.sources import first_line, needs


def read_config(path: Path) -> Any:
    """From a config.json or a folder with one. No code that may lie beside it is run, and nothing is downloaded."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise TaskError(f"model {path}: a folder without config.json; give a preset, a config.json or its folder")
    library = needs("transformers", f"model {path}")
    try:
        return library.AutoConfig.from_pretrained(str(file), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # no JSON, no model_type, a model_type that only its own code knows, wrong values
        raise TaskError(
            f"model {file}: not a config that transformers knows ({first_line(error)}); mend it or give another"
        ) from error


def save_pretrained(model: Any, folder: Path) -> None:
    with _no_bar():
        model.save_pretrained(str(folder))


@contextmanager
def _no_bar() -> Iterator[None]:
    """A bar that is full at once says nothing, and it would stand in the middle of what overtone prints."""
    logging = needs("transformers.utils.logging", "export")
    shown = logging.is_progress_bar_enabled()
    if shown:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
