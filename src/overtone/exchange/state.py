"""A replica's exchange state, to go on from: all of it after a stop, or the shared part of it as a newcomer."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from overtone.errors import OvertoneError, StateError, shortened
from overtone.exchange import agreement

if TYPE_CHECKING:
    from overtone.replica import Replica

COUNTS = ("steps", "rounds", "steps_at_round")


def save(replica: Replica) -> dict[str, Any]:
    if replica.proposing:
        raise StateError("state_dict: in the middle of a round nothing is settled; save after it")
    _refuse_at_anchor(replica, "state_dict", "save")
    replica.refuse_changes("state_dict")
    return {
        "about": dict(replica.about),
        "counts": {name: getattr(replica, name) for name in COUNTS},
        "state": dict(replica.state),
        "signal": list(replica.signal.state()),
        "buffers": list(replica.buffers.shared),
        "ledger": replica.transport.ledger.state_dict(),
    }


def restore(replica: Replica, saved: Mapping[str, Any]) -> None:
    """Nothing is touched unless all of it fits."""
    _refuse_at_anchor(replica, "load_state_dict", "load")
    replica.refuse_changes("load_state_dict")
    try:
        agreement.compare_saved(saved.get("about", {}), replica.about)
        pairs = [(tensor, saved["state"][name]) for name, tensor in replica.state.items()]
        pairs += _paired(replica.signal.state(), saved["signal"])
        pairs += _paired(replica.buffers.shared, saved["buffers"])
        counts = {name: int(saved["counts"][name]) for name in COUNTS}
        if not 0 <= counts["steps_at_round"] <= counts["steps"] or counts["rounds"] < 0:
            raise ValueError(f"counts {counts}")
        ledger = saved["ledger"]
        type(replica.transport.ledger)().load_state_dict(ledger)  # a trial, on one that nobody needs
        if unknown := set(ledger) - set(replica.transport.ledger.counts):
            raise ValueError(f"phases {sorted(unknown)} of the ledger")
        for mine, theirs in pairs:
            if mine.shape != theirs.shape:
                raise ValueError(f"a tensor of shape {tuple(theirs.shape)} where {tuple(mine.shape)} belongs")
    except OvertoneError:
        raise
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        why = shortened(error)
        raise StateError(f"saved state: incomplete or damaged ({why}); load one that state_dict() made") from error
    for mine, theirs in pairs:
        mine.copy_(theirs)
    for name, count in counts.items():
        setattr(replica, name, count)
    replica.transport.ledger.load_state_dict(ledger)
    replica.broken = ""


def _refuse_at_anchor(replica: Replica, verb: str, do: str) -> None:
    if replica.showing_anchor:
        raise StateError(
            f"{verb}: inside `with replica.anchor()` the weights are not the replica's own; {do} after leaving it"
        )


def share(replica: Replica) -> dict[str, Any]:
    """What a newcomer takes over: the anchor, what else the rule shares, buffers, counts.

    Where the weights serve as anchor (gradient methods) they follow from the inner optimiser, so its state goes along.
    """
    return {
        "tensors": _shared_tensors(replica),
        "inner": None if "anchor" in replica.state else replica.inner.state_dict(),
        "counts": {name: getattr(replica, name) for name in COUNTS},
    }


def adopt(replica: Replica, shared: Mapping[str, Any]) -> None:
    """Go on from a peer's `share` with nothing left to say of one's own: the residual is empty."""
    for vector in replica.state.values():
        vector.zero_()
    for mine, theirs in zip(_shared_tensors(replica), shared["tensors"], strict=True):
        mine.copy_(theirs)
    if shared["inner"] is not None:
        replica.inner.load_state_dict(copy.deepcopy(shared["inner"]))
    replica.buffers.put(replica.buffers.shared)
    if "anchor" in replica.state:
        replica.show(replica.state["anchor"])
    for name, count in shared["counts"].items():
        setattr(replica, name, count)


def _shared_tensors(replica: Replica) -> list[Tensor]:
    also = [replica.state[name] for name in replica.method.rule.shared if name in replica.state and name != "anchor"]
    return [*replica.anchor_tensors(), *also, *replica.buffers.shared, *replica.buffers.counter_tensors()]


def _paired(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(mine, theirs, strict=True))
