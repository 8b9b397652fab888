"""What replicas must agree on, and how a disagreement is told: by naming the ranks and the difference."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import Tensor

from overtone.coding import fingerprint
from overtone.errors import MismatchError, StateError, printable
from overtone.exchange.buffers import Buffers
from overtone.exchange.message import VERSION, Header, Kind
from overtone.methods import Method
from overtone.version import __version__


def introduction(method: Method, parameters: Mapping[str, Tensor], buffers: Buffers, refused: str) -> dict[str, object]:
    """Everything that must be equal on all replicas before the first step, flat: one key, one printable value."""
    private = "" if buffers.policy == "shared" else f", {buffers.policy}"
    about: dict[str, object] = {"overtone": __version__, "wire": VERSION, **method.numbers()}
    about["parameters"] = len(parameters)
    about["order of parameters"] = fingerprint.of_text("\n".join(parameters)).hex()
    about |= {f"parameter {n}": _outline(t) + ("" if t.requires_grad else ", frozen") for n, t in parameters.items()}
    about |= {f"buffer {n}": _outline(t) + private for n, t in buffers.named().items()}
    about["refused"] = refused
    return about


def schema_of(about: dict[str, object]) -> bytes:
    """Eight bytes for an introduction; rides in every message."""
    return fingerprint.of_text(json.dumps(about))


def compare_introductions(introductions: Mapping[int, bytes]) -> None:
    """Refuse replicas that introduced themselves differently; maps rank to what it said."""
    abouts = {rank: _read_introduction(rank, raw) for rank, raw in introductions.items()}
    differences = [
        f"{printable(key)}: {_camps({rank: about.get(key, 'absent') for rank, about in abouts.items()})}"
        for key in _differing(list(abouts.values()))
    ]
    if differences:
        raise MismatchError(
            f"replicas do not match: {_first(differences)}. Start every rank with the same model, method and version"
        )


def _read_introduction(rank: int, raw: bytes) -> dict[str, object]:
    try:
        about = json.loads(raw)
    except (RecursionError, ValueError) as error:
        raise MismatchError(f"introduction of rank {rank}: cannot be read ({error!r})") from error
    if not isinstance(about, dict):
        raise MismatchError(f"introduction of rank {rank}: not an object of names and values")
    return about


def compare_saved(saved: Mapping[str, object], here: Mapping[str, object]) -> None:
    """Refuse a saved state of another model or method. Versions may differ: the state's form is what counts."""
    keys = [key for key in _differing([saved, here]) if key not in ("overtone", "wire", "refused")]
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


NOT_AS_SENT = "They were broadcast and did not arrive as sent: suspect network or memory of the odd one out"
APART = "The replicas no longer train one model: restart all of them from one checkpoint"
UNLIKE_HOSTS = (
    "Each host works them out with its own inner optimiser, so unlike hosts are the likely cause: another type of CPU "
    "or another build of a library rounds differently, and would again after a restart. Use like hosts, or a method "
    "whose anchor does not depend on that, such as decoupled() or diloco(); on like hosts restart from one checkpoint"
)


def compare_initial_weights(ranks: Sequence[int], prints: Sequence[bytes]) -> None:
    _compare("the initial weights", dict(zip(ranks, prints, strict=True)), NOT_AS_SENT)


def compare_last_weights(prints: Mapping[int, bytes]) -> None:
    _compare("the last weights", prints, NOT_AS_SENT)


def compare_anchors(index: int, prints: Mapping[int, bytes], *, of_weights: bool) -> None:
    """``of_weights``: the weights serve as anchor, and every host works them out for itself."""
    what = f"round {index}: the anchors that the replicas start it from"
    _compare(what, prints, UNLIKE_HOSTS if of_weights else APART)


def compare_progress(index: int, headers: Sequence[Header]) -> None:
    """Refuse a round between replicas that took different numbers of steps, or of which some are finishing."""
    where = {header.sender: f"{header.kind.name.lower()} after {header.steps} steps" for header in headers}
    stages = {Kind.ABSTAIN: Kind.ROUND}  # an abstention is a round's answer
    if len({(header.steps, stages.get(header.kind, header.kind)) for header in headers}) > 1:
        way_out = "Give every replica the same number of batches, and finish() all of them"
        raise MismatchError(f"round {index}: replicas are at different steps: {_camps(where)}. {way_out}")


def compare_counters(index: int, prints: Mapping[int, bytes], names: Sequence[str]) -> None:
    way_out = 'Make them equal on all replicas, or build the Replica with buffers="private"'
    _compare(f"round {index}: the integer buffers ({', '.join(names)})", prints, way_out)


def _compare(what: str, prints: Mapping[int, bytes], way_out: str) -> None:
    """Refuse replicas that hold different numbers; maps rank to fingerprint."""
    if len(set(prints.values())) > 1:
        camps = _camps({rank: value.hex() for rank, value in prints.items()})
        raise MismatchError(f"{what} differ: {camps}. {way_out}")


def _outline(tensor: Tensor) -> str:
    return f"{'x'.join(map(str, tensor.shape)) or 'scalar'} {str(tensor.dtype).removeprefix('torch.')}"


def _camps(values: Mapping[int, object]) -> str:
    """'10 on ranks 0, 1; 20 on rank 2'."""
    camps: dict[str, list[int]] = defaultdict(list)
    for rank, value in values.items():
        camps[printable(str(value))].append(rank)
    return "; ".join(
        f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" for value, ranks in camps.items()
    )
