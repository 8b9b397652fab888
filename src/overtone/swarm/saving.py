"""What a saved state keeps of a run in a store, and how a member goes on from it.

The shared state is that of the store. What the saved state owed is owed again, as far as no commit has counted it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from overtone.errors import StateError, StoreError, shortened
from overtone.exchange import flight
from overtone.exchange.description import Description, compare_saved
from overtone.ledger import Ledger
from overtone.swarm.follower import Follower
from overtone.swarm.store import Store

log = logging.getLogger(__name__)


def saved(store: Store, run: bytes, mark: str, posted: int) -> dict[str, Any]:
    """What a saved state must know of the store, beside the exchange state. ``run`` is its id, ``mark`` is the seal of
    the message that was posted last, and ``posted`` how many units it told."""
    process = store.process
    return {
        "name": store.name,
        "number": process.number,
        "session": process.session,
        "seal": mark,
        "used": store.used,
        "posted": posted,
        "run": run.hex(),
    }


def restore(follower: Follower, store: Store, saved: Mapping[str, Any], description: Description) -> None:
    """Owe again what a saved state owed. The model must have the weights that were saved with the state."""
    compare_saved(saved.get("about", {}), description)
    exchanger = follower.exchanger
    try:
        told = saved["store"]
        if told["name"] != store.name:
            raise StateError(
                f"saved state: of the member {told['name']}, this is {store.name}; open the store under its "
                "name, or go on without the saved state"
            )
        if told["run"] != (run := follower.archive.about.run.hex()):
            raise StateError(
                f"saved state: of the run {told['run']}, that in {store.url} is {run}; open the store of that run, or "
                "go on without the saved state"
            )
        used = int(told["used"])
        counted, spoken, present = _since_saved(follower, int(saved["counts"]["rounds"]), told)
        if saved.get("flight") is not None:
            measured = list(saved["flight"]["measured_at"])
            if counted:
                used -= int(told["posted"])
            else:
                saved = flight.take_back(saved, exchanger)
            saved = {**saved, "signal": measured}
        layout, steps = exchanger.layout, int(saved["counts"]["steps"])
        begin = layout.read(saved["signal"], layout.empty(exchanger.device)).clone()
        now = layout.read(exchanger.parameters.tensors, layout.empty(exchanger.device))
        owed = saved["state"]["residual"] + (begin - now)
        ledger = Ledger()
        ledger.load_state_dict(saved["ledger"])
        costs = [(store.ledger.counts[phase], before) for phase, before in ledger.counts.items()]
        if owed.shape != exchanger.state.tensors["residual"].shape or not bool(torch.isfinite(owed).all()):
            raise ValueError("a residual that is not this model's")
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, StateError | StoreError):
            raise
        raise StateError(f"saved state: incomplete or damaged ({shortened(error)})") from error
    if spoken:
        log.warning("saved state: this member has sent a later message, which counted; what was owed is dropped")
        owed.zero_()
    for cost, before in costs:  # what it has cost to come back is in the ledger already
        cost.add(before)
    exchanger.state.tensors["residual"].copy_(owed)
    exchanger.state.steps = exchanger.state.steps_at_round = steps
    store.used = 0 if spoken or not present else max(0, used)
    exchanger.show(exchanger.method.rule.place(exchanger.state.tensors))


def _since_saved(follower: Follower, index: int, told: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    """What the commits from a round on say of the member whose state was saved: whether the message that was on
    its way has counted, whether a later one has, and whether it was a member all the time. If a commit is not there
    any more, a later message may have counted."""
    counted, spoken, present = False, False, True
    member = int(told["number"])
    for other in range(index, follower.index):
        commit = follower.archive.commit(other)
        if commit is None:
            return counted, True, False
        if member not in commit.left_out:
            # Of any of its processes: one that came in between may have started from the same state, and sent it.
            seals = {one.seal for one in commit.messages if one.number == member}
            counted |= told["seal"] in seals
            spoken |= bool(seals - {told["seal"]})
        present &= any(one.number == member for one in commit.members)
    return counted, spoken, present
