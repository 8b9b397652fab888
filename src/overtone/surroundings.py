"""What the environment says of a world of processes, checked before it is believed: anybody may have set it."""

from __future__ import annotations

import os

from overtone.config import ConfigError

NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
MOST = 1 << 20


def check() -> None:
    """Refuse words where numbers belong, before anybody reads them."""
    for name in NUMBERS:
        _number(name, 0)


def local_rank(default: int) -> int:
    return _number("LOCAL_RANK", default)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 8 and int(text) <= MOST):
        raise ConfigError(f"{name}={text!r}: a whole number in the environment, which torchrun sets; unset it")
    return int(text)
