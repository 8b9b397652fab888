"""What a run in a store says of itself beside model and method: the configuration that all members train with.

The founder puts it into the object `run`. Whoever comes later, as a trainer or to look, builds the same task from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overtone.runs import toml
from overtone.runs.config import Run

# Options of one host alone. All others are the same for all members.
OF_A_HOST = ("out", "device", "threads", "timeout", "replicas")


def settings_of(config: Run, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as a store keeps it. ``fixed`` are facts of the data that must be the same for all members."""
    told = toml.flat(toml.absolute(config), leave_out=OF_A_HOST)
    return {"config": {key: value for key, value in told.items() if value is not None}, "fixed": dict(fixed)}


def config_of(settings: Mapping[str, Any], where: str, base: Run | None = None) -> Run:
    """``base`` with the configuration that a store keeps. ``where`` names the store in errors."""
    config = settings.get("config")
    return toml.updated(base or Run(), config if isinstance(config, Mapping) else {}, where)
