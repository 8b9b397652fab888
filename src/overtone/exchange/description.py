"""The description of a replica: method, model and version.

It must be equal on all replicas before the first step, and equal to that of a saved state that a replica loads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from torch import Tensor

from overtone.coding import fingerprint
from overtone.errors import MismatchError, StateError, printable
from overtone.exchange.buffers import Buffers
from overtone.exchange.consensus import camps
from overtone.exchange.message import VERSION
from overtone.methods import Method
from overtone.version import __version__

Description = dict[str, object]

# These do not change the meaning of a saved state: the version, the policy for refused messages, how messages meet,
# and when their answer is absorbed.
NO_MATTER = ("overtone", "wire", "refused", "exchange", "keep_down", "delay")


def describe(method: Method, parameters: Mapping[str, Tensor], buffers: Buffers, refused: str) -> Description:
    """Method, model and version as a flat table of printable values."""
    private = "" if buffers.policy == "shared" else f", {buffers.policy}"
    about: Description = {"overtone": __version__, "wire": VERSION, **method.numbers()}
    about["parameters"] = len(parameters)
    # Payloads have no names: two models with the same parameters in another order must not match.
    about["order of parameters"] = fingerprint.of_text("\n".join(parameters)).hex()
    about |= {f"parameter {n}": _outline(t) + ("" if t.requires_grad else ", frozen") for n, t in parameters.items()}
    about |= {f"buffer {n}": _outline(t) + private for n, t in buffers.named().items()}
    about["refused"] = refused
    return about


def schema_of(description: Description) -> bytes:
    """The fingerprint of a description. It is part of every message."""
    return fingerprint.of_text(json.dumps(description))


def compare_descriptions(described: Mapping[int, bytes]) -> None:
    """Refuse replicas with different descriptions. ``described`` maps each rank to its description."""
    abouts = {rank: _read(rank, raw) for rank, raw in described.items()}
    differences = [
        f"{printable(key)}: {camps({rank: about.get(key, 'absent') for rank, about in abouts.items()})}"
        for key in _differing(list(abouts.values()))
    ]
    if differences:
        raise MismatchError(
            f"replicas do not match: {_first(differences)}. Start every rank with the same model, method and version"
        )


def _read(rank: int, raw: bytes) -> Description:
    try:
        about = json.loads(raw)
    except (RecursionError, ValueError) as error:  # a hostile peer can nest JSON too deeply for the parser
        raise MismatchError(f"handshake of rank {rank}: its description cannot be read ({error!r})") from error
    if not isinstance(about, dict):
        raise MismatchError(f"handshake of rank {rank}: its description is not an object of names and values")
    return about


def compare_described(what: str, theirs: Mapping[str, object], here: Mapping[str, object]) -> None:
    """Refuse to take part in something that was described otherwise. ``what`` it is, in words."""
    differences = [
        f"{printable(key)}: {printable(str(theirs.get(key, 'absent')))} there, {here.get(key, 'absent')} here"
        for key in _differing([theirs, here])
    ]
    if differences:
        raise MismatchError(
            f"{what} does not match: {_first(differences)}. Use the same model, method and version, or another place"
        )


def compare_saved(saved: Mapping[str, object], here: Mapping[str, object]) -> None:
    """Refuse a saved state of another model or method. The version may differ, as long as the state fits."""
    keys = [key for key in _differing([saved, here]) if key not in NO_MATTER]
    differences = [
        f"{key}: {saved.get(key, 'absent')} in the saved state, {here.get(key, 'absent')} here" for key in keys
    ]
    if differences:
        raise StateError(f"saved state: of another replica: {_first(differences)}. Build the same model and method")


def _differing(abouts: Sequence[Mapping[str, object]]) -> list[str]:
    keys = dict.fromkeys(key for about in abouts for key in about)
    return [key for key in keys if len({json.dumps(about.get(key, "absent")) for about in abouts}) > 1]


def _first(differences: Sequence[str], most: int = 3) -> str:
    more = f" (and {len(differences) - most} more)" if len(differences) > most else ""
    return "; ".join(differences[:most]) + more


def _outline(tensor: Tensor) -> str:
    return f"{'x'.join(map(str, tensor.shape)) or 'scalar'} {str(tensor.dtype).removeprefix('torch.')}"
