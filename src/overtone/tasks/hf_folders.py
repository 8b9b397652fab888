"""Folders in the form of the transformers library, for both built-in tasks: read a config, write a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from overtone.errors import TaskError
from overtone.tasks.sources import first_line, require


def read_config(path: Path) -> Any:
    """Read a config.json, or the one in a folder. No code beside it is run, and nothing is downloaded."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise TaskError(f"model {path}: a folder without config.json; give a preset, a config.json or its folder")
    library = require("transformers", f"model {path}")
    try:
        return library.AutoConfig.from_pretrained(str(file), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # no JSON, no model_type, a model_type that only its own code knows, wrong values
        raise TaskError(
            f"model {file}: not a config that transformers knows ({first_line(error)}); correct it or give another"
        ) from error


def save_pretrained(model: Any, folder: Path) -> None:
    """Write a model of the transformers library into ``folder``, without a progress bar."""
    with _no_progress_bar():
        model.save_pretrained(str(folder))


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Hide the library's progress bar, which would appear in the middle of overtone's own output."""
    logging = require("transformers.utils.logging", "export")
    shown = logging.is_progress_bar_enabled()
    if shown:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
