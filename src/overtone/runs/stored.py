"""What a run in a store says of itself beside model and method: the configuration that all members train with.

The founder puts it into the object `run`. Whoever comes later, as a trainer or to look, builds the same task from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from overtone.errors import ConfigError, shortened
from overtone.exchange.message import Seal
from overtone.runs import toml
from overtone.runs.config import Run, Saving, Stored
from overtone.swarm.bucket import Bucket
from overtone.swarm.founding import Founded, read_run

# Options of one host alone. Nobody else takes them over.
OF_A_HOST = (
    "out", "device", "threads", "timeout", "replicas",
    *(field.name for group in (Saving, Stored) for field in fields(group)),
)  # fmt: skip
# Paths, which may differ from host to host. What lies there is compared: the model by its schema, the data by its
# fingerprint.
PATHS = ("task", "model", "data", "tokenizer")


def settings_of(config: Run, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as a store keeps it. ``fixed`` are facts of the data that must be the same for all members."""
    told = toml.flat(toml.absolute(config), leave_out=OF_A_HOST)
    return {"config": {key: value for key, value in told.items() if value is not None}, "fixed": dict(fixed)}


def agreed_of(config: Run, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """What the configuration of a later member must have in common with that of the founder."""
    return {**toml.flat(config, leave_out=(*OF_A_HOST, *PATHS)), **fixed}


def config_of(settings: Mapping[str, Any], where: str, base: Run | None = None) -> Run:
    """``base`` with the configuration that a store keeps. ``where`` names the store in errors."""
    config = settings.get("config")
    return toml.updated(base or Run(), config if isinstance(config, Mapping) else {}, where)


def founded_in(url: str) -> Founded | None:
    """What the run in this store says of itself; None if there is no run yet."""
    return read_run(Bucket(url), Seal.with_key(None))


def inherited(url: str, base: Run) -> Run:
    """``base`` with the configuration of the run in this store, if there is one already."""
    found = founded_in(url)
    return base if found is None else config_of(found.settings, f"store {url}", base)


def refuse_other(url: str, config: Run) -> None:
    """Refuse options that were given and are not those of the run in the store. Early, before data are read."""
    found = founded_in(url)
    if found is None:
        return
    there, here = agreed_of(config_of(found.settings, f"store {url}"), {}), agreed_of(config, {})
    for key, value in here.items():
        if value != there[key]:
            flag, theirs = key.replace("_", "-"), "none" if there[key] is None else shortened(there[key])
            raise ConfigError(
                f"{flag}={value}: the run in {url} has {theirs}; leave --{flag} out, or begin another run "
                "in another place"
            )
