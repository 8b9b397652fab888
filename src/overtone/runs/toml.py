"""Configuration in files: TOML into dataclasses and back.

A key is the name of a flag. It stands at the top of the file or in the table of its group; `toml` writes tables.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import tomllib
import types
import typing
from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from overtone.errors import ConfigError, OvertoneError, printable
from overtone.runs.config import Run

T = TypeVar("T")

RETIRED = ("port",)  # keys that earlier versions wrote and this version ignores
RENAMED = {"outer_lr": "lr"}  # former names of keys and flags: files, flags and run logs may still use them
INHERITED = "OVERTONE_CONFIG"  # the variable in which a launcher hands the whole configuration to its replicas


def load(path: Path, base: T) -> T:
    """``base`` with the values of the file."""
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"config {path}: not a file; give a TOML file")
        text = path.read_bytes().decode()
    except OSError as error:
        raise ConfigError(f"config {path}: {error.strerror}; give a TOML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"config {path}: byte {error.start} is not UTF-8; give a TOML file") from error
    return updated(base, parsed(text, f"config {path}"), str(path))


def parsed(text: str, where: str) -> dict[str, Any]:
    """The TOML text as a dictionary. A text that is not TOML is refused in one line."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply; no setting is") from None
    except ValueError as error:  # not TOML, or a number of more digits than Python reads
        raise ConfigError(f"{where}: not TOML: {error}") from error


def inherited(base: T) -> T | None:
    """``base`` with the values that a launcher handed to this process; None if no launcher did."""
    text = os.environ.get(INHERITED)
    if text is None:
        return None
    try:
        return updated(base, parsed(text, INHERITED), INHERITED)
    except OvertoneError as error:
        raise ConfigError(f"{error}. A launcher sets {INHERITED} for its replicas; unset it to start a run") from error


def updated(base: T, values: Mapping[str, Any], where: str) -> T:
    """``base`` with these values. An unknown key, a key in the wrong table or a value of the wrong type is refused."""
    places = dict(_places(base))
    tables = {table for table, *_ in places.values() if table}
    for key, value in with_new_names(values, where).items():
        if isinstance(value, Mapping):
            if key not in tables:
                raise ConfigError(f"{where}: table [{key}]: unknown{_nearest(key, tables)}; there are {_list(tables)}")
            for inner, leaf in with_new_names(value, f"{where}: [{key}]").items():
                base = _put(base, places, inner, leaf, f"{where}: [{key}]", key)
        else:
            base = _put(base, places, key, value, where, None)
    return base


def with_new_names(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The same values with the present name of every key that had another name in an earlier version."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        present = RENAMED.get(name, name)
        if present in found:
            raise ConfigError(f"{where}: {key}: given twice; {present} is enough")
        found[present] = value
    return found


def toml(config: object) -> str:
    """The whole configuration as TOML, one table per group. Values that are None are left out."""
    top: list[str] = []
    tables: dict[str, list[str]] = {}
    for key, (table, path, _) in _places(config):
        value = _plain(_value(config, path))
        if value is not None:
            line = f"{key} = {'inf' if value == math.inf else _quoted(value, key)}"
            (tables.setdefault(table, []) if table else top).append(line)
    parts = ["\n".join(top), *(f"[{table}]\n" + "\n".join(lines) for table, lines in tables.items())]
    return "\n\n".join(part for part in parts if part) + "\n"


def _quoted(value: Any, key: str) -> str:
    """The value as TOML. JSON writes numbers, booleans and texts in the same way, except for the character DEL."""
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"{key}={printable(str(value))}: not UTF-8, as a configuration file must be; rename it"
        ) from None
    return text


def absolute(config: Run) -> Run:
    """The same with absolute paths, so that the configuration can be read from any directory later."""
    found = {
        key: str(Path(value).resolve())
        for key, value in flat(config).items()
        if key in ("task", "model", "data", "tokenizer") and value is not None and Path(value).exists()
    }
    return replace(updated(config, found, "config"), out=None)


def flat(config: object, *, leave_out: Container[str] = ()) -> dict[str, Any]:
    """Every key and its value, as JSON can hold them."""
    return {key: _plain(_value(config, path)) for key, (_, path, _) in _places(config) if key not in leave_out}


def flags(config: object, base: object) -> list[str]:
    """The flags that make ``config`` out of ``base``."""
    before, words = flat(base), []
    for key, value in flat(config).items():
        name = key.replace("_", "-")
        if value is None or value == before[key]:
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif str(value).startswith("-"):
            words.append(f"--{name}={value}")
        else:
            words += [f"--{name}", str(value)]
    return words


def _value(config: object, path: tuple[str, ...]) -> Any:
    for name in path:
        config = getattr(config, name)
    return config


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


Place = tuple[str, tuple[str, ...], Any]  # where a key belongs: its table, the path of attributes to it, its type


def _places(config: object, table: str = "", path: tuple[str, ...] = ()) -> Iterator[tuple[str, Place]]:
    """Every key of a dataclass and of the dataclasses in its fields."""
    hints = get_type_hints(type(config))
    for f in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            yield from _places(value, f.metadata.get("table", f.name), (*path, f.name))
        else:
            yield f.name, (table, (*path, f.name), hints[f.name])


def _put(base: T, places: Mapping[str, Place], key: str, value: Any, where: str, table: str | None) -> T:
    if key in RETIRED:
        return base
    if key not in places:
        raise ConfigError(f"{where}: {key}: unknown{_nearest(key, places)}")
    home, path, hint = places[key]
    if table is not None and home != table:
        raise ConfigError(f"{where}: {key}: belongs {f'to [{home}]' if home else 'to the top, above all tables'}")
    return _replaced(base, path, _converted(value, hint, f"{where}: {key}"))


def _replaced(base: T, path: tuple[str, ...], value: Any) -> T:
    name, *rest = path
    inner = _replaced(getattr(base, name), tuple(rest), value) if rest else value
    return dataclasses.replace(base, **{name: inner})  # type: ignore[type-var]


def _converted(value: Any, hint: Any, what: str) -> Any:
    """The value in the type of its field. A value of another type is refused."""
    kinds = get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    for kind in kinds:
        if get_origin(kind) is Literal and value in get_args(kind):
            return value
        if isinstance(value, str) and kind in (str, Path) and "\0" in value:
            raise ConfigError(
                f"{what} = {json.dumps(value)}: holds a NUL character, which no file name may; leave it out"
            )
        if kind is Path and isinstance(value, str):
            if not value:
                raise ConfigError(f'{what} = "": empty; give a path, or leave it out')
            return Path(value)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value) if abs(value) < 10**300 else math.inf if value > 0 else -math.inf
        if isinstance(kind, type) and isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return value
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path"}
    rule = " or ".join(
        _list(get_args(kind)) if get_origin(kind) is Literal else words[kind]
        for kind in kinds
        if kind in words or get_origin(kind) is Literal
    )
    said = json.dumps(value, default=str)
    raise ConfigError(f"{what} = {said if len(said) <= 200 else f'{said[:200]}…'}: must be {rule}")


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f"; did you mean {close[0]}?" if close else ""


def _list(names: Any) -> str:
    return ", ".join(map(str, sorted(names)))
