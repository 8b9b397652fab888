"""The exchange state of a replica. A restart continues from all of it, a newcomer from the shared part of a peer's."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from overtone.errors import OvertoneError, StateError, shortened
from overtone.exchange.buffers import Buffers
from overtone.exchange.control import Control
from overtone.exchange.description import Description, compare_saved
from overtone.exchange.message import NOBODY
from overtone.exchange.signals import Signal
from overtone.ledger import Ledger
from overtone.rules import State

COUNTS = ("steps", "rounds", "steps_at_round")


@dataclass
class ExchangeState:
    """All that a replica keeps between rounds. The handshake makes it; `save` and `restore` write and read it."""

    run: bytes = NOBODY  # the id of this run; all replicas agree on it in the handshake
    tensors: State = field(default_factory=dict)  # the rule's state: anchor, momentum, residual, as flat coefficients
    pattern: State = field(default_factory=dict)  # the pattern's state, if it has any
    steps: int = 0  # local steps since the beginning
    rounds: int = 0
    steps_at_round: int = 0  # value of `steps` when the last round started
    control: Control | None = None  # the controller's state, if `keep` is controlled
    under_way: bool = False  # a round has started and not finished
    broken: str = ""  # why no further round is possible

    def counts(self) -> dict[str, int]:
        """The counters of a saved state, by name."""
        return {name: getattr(self, name) for name in COUNTS}


def save(
    state: ExchangeState, description: Description, signal: Signal, buffers: Buffers, ledger: Ledger
) -> dict[str, Any]:
    """The saved form of a state. Tensors are references. A round in flight is saved apart (exchange/flight.py)."""
    if state.broken:
        raise StateError(f"state_dict: {state.broken}")
    saved = {
        "about": dict(description),
        "counts": state.counts(),
        "state": dict(state.tensors),
        "signal": list(signal.state()),
        "buffers": list(buffers.shared),
        "ledger": ledger.state_dict(),
    }
    if state.control is not None:
        saved["control"] = asdict(state.control)
    return {**saved, "pattern": dict(state.pattern)} if state.pattern else saved


def restore(
    state: ExchangeState,
    saved: Mapping[str, Any],
    description: Description,
    signal: Signal,
    buffers: Buffers,
    ledger: Ledger,
) -> None:
    """Load a saved state into ``state``, signal, buffers and ledger. Nothing is changed unless all of it fits."""
    try:
        compare_saved(saved.get("about", {}), description)
        pairs = _pairs(state, saved, signal, buffers)
        counts = {name: int(saved["counts"][name]) for name in COUNTS}
        if not 0 <= counts["steps_at_round"] <= counts["steps"] or counts["rounds"] < 0:
            raise ValueError(f"counts {counts}")
        control = None if state.control is None else Control.restored(saved["control"])
        Ledger().load_state_dict(saved["ledger"])  # a trial on a spare ledger, which raises if the counts are damaged
        if unknown := set(saved["ledger"]) - set(ledger.counts):
            raise ValueError(f"phases {sorted(unknown)} of the ledger")
    except OvertoneError:
        raise
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        why = shortened(error)
        raise StateError(f"saved state: incomplete or damaged ({why}); load one that state_dict() made") from error
    # All checks have passed, and nothing was changed before this line.
    for mine, theirs in pairs:
        mine.copy_(theirs)
    for name, count in counts.items():
        setattr(state, name, count)
    state.control = control
    ledger.load_state_dict(saved["ledger"])
    state.broken, state.under_way = "", False


def _pairs(
    state: ExchangeState, saved: Mapping[str, Any], signal: Signal, buffers: Buffers
) -> list[tuple[Tensor, Tensor]]:
    """Pairs of a tensor to write into and the saved tensor for it, with their shapes compared."""
    pairs = [(tensor, saved["state"][name]) for name, tensor in state.tensors.items()]
    pairs += [(tensor, saved["pattern"][name]) for name, tensor in state.pattern.items()]
    pairs += zip(signal.state(), saved["signal"], strict=True)
    pairs += zip(buffers.shared, saved["buffers"], strict=True)
    for mine, theirs in pairs:
        if mine.shape != theirs.shape:
            raise ValueError(f"a tensor of shape {tuple(theirs.shape)} where {tuple(mine.shape)} belongs")
    return pairs


@dataclass(frozen=True)
class Shared:
    """The state that a newcomer takes over from a peer."""

    tensors: list[Tensor]
    # The inner optimizer's state, if the weights serve as the anchor: they stay equal only if it is equal too.
    inner: dict[str, Any] | None
    counts: dict[str, int]
    control: Control | None = None

    @property
    def size(self) -> int:
        """The bytes of all tensors."""
        return _bytes_of([self.tensors, self.inner or {}])


def share(
    state: ExchangeState, names: Sequence[str], anchor: Sequence[Tensor], buffers: Buffers, inner: torch.optim.Optimizer
) -> Shared:
    """The shared part of a replica: anchor (or the weights if they serve as the anchor), the rule's shared vectors
    (``names``), buffers and counts."""
    return Shared(
        tensors=shared_tensors(state, names, anchor, buffers),
        inner=None if "anchor" in state.tensors else inner.state_dict(),
        counts=state.counts(),
        control=None if state.control is None else state.control.of_all,
    )


def adopt(
    state: ExchangeState,
    shared: Shared,
    names: Sequence[str],
    anchor: Sequence[Tensor],
    buffers: Buffers,
    inner: torch.optim.Optimizer,
) -> None:
    """Continue from a peer's `share`. Private vectors stay: a newcomer's residual is empty, and a replica that returns
    still owes what it owed."""
    for mine, theirs in zip(shared_tensors(state, names, anchor, buffers), shared.tensors, strict=True):
        mine.copy_(theirs)
    if shared.inner is not None:
        # A copy: in the simulator, the state would otherwise share its tensors with the peer's optimizer.
        inner.load_state_dict(copy.deepcopy(shared.inner))
    buffers.put(buffers.shared)
    for name, count in shared.counts.items():
        setattr(state, name, count)
    state.control = shared.control


def shared_tensors(
    state: ExchangeState, names: Sequence[str], anchor: Sequence[Tensor], buffers: Buffers
) -> list[Tensor]:
    """The tensors of `share` and `adopt`, in one order for both."""
    also = [state.tensors[name] for name in names if name in state.tensors and name != "anchor"]
    return [*anchor, *also, *buffers.shared, *buffers.counter_tensors()]


def _bytes_of(tree: object) -> int:
    """The bytes of all tensors in nested containers."""
    if isinstance(tree, Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, Mapping):
        return sum(map(_bytes_of, tree.values()))
    return sum(map(_bytes_of, tree)) if isinstance(tree, list | tuple) else 0
