"""Rules turn a replica's signal into something to send (*propose*), and what was heard into an answer (*absorb*).

A rule is frozen numbers; what it remembers is a `State` of vectors, all in the coefficient domain of the method's
codec. Every rule works value by value, so a round hands it one slab after the other: its state, its signal. The
transform is linear and orthonormal, so anchor, momentum and residual may live there: sent coefficients are simply taken
out of the residual, and the anchor only ever changes by elementwise operations in a fixed order. No matrix product and
no fused multiply-add touches it, hence it stays bit-identical on every replica.

Symbols: Θ anchor, M momentum, E residual, G signal (drift or gradient), u what was heard (the mean of what was sent);
η lr, μ momentum, β decay, λ carry, α release.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from overtone.codec import Part
from overtone.coding.layout import Reading
from overtone.errors import MethodError

State = dict[str, Tensor]
Encode = Callable[[Tensor], Part]  # sends what it is given; returns what the receivers will decode


class Rule(ABC):
    """What `Replica` needs of a rule. ``state["anchor"]`` exists exactly if the rule works on weights."""

    shared: ClassVar[tuple[str, ...]] = ()  # vectors of the state that are the same on every replica, for newcomers
    consensus: ClassVar[bool] = True  # the anchor is the same on every replica after every round
    over_senders: ClassVar[bool] = False  # a coefficient is averaged over the replicas that sent it, not over all

    @abstractmethod
    def begin(self, weights: Tensor, *, lossless: bool) -> State:
        """The state before the first round; ``weights`` are the coefficients of the initial weights."""

    @abstractmethod
    def propose(self, state: State, signal: Reading, encode: Encode) -> Part:
        """Send something of the signal through ``encode``; what was sent, as the receivers decode it."""

    @abstractmethod
    def withdraw(self, state: State, sent: Part) -> bool:
        """Nobody heard ``sent``, so it is still owed. True if the signal of that round stays in the state: it must not
        be read again."""

    @abstractmethod
    def absorb(self, state: State, heard: Tensor) -> Tensor:
        """Coefficients of what to write back: the next weights, or the gradient to step with."""

    def settle(self, answer: Tensor) -> Tensor:
        """Last touch to each tensor of the answer, back in the weight domain."""
        return answer

    def close(self, state: State) -> None:  # noqa: B027 (most rules have nothing to close)
        """The last round is over: drop what is not owed to the anchor any more."""


def outer_step(anchor: Tensor, momentum: Tensor | None, heard: Tensor, *, lr: float, mu: float) -> None:
    """M ← μ·M + u;  Θ ← Θ − η·(u + μ·M), in place. Nesterov as in ``torch.optim.SGD``: tests/test_equivalence.py.

    Written as single elementwise operations: ``alpha=`` or a fused kernel would round differently elsewhere.
    """
    if momentum is None:
        anchor.sub_(heard.mul(lr))
        return
    momentum.mul_(mu).add_(heard)
    anchor.sub_(momentum.mul(mu).add_(heard).mul_(lr))


def carried(anchor: Tensor, residual: Tensor | None, carry: float) -> Tensor:
    """Θ − λ·E: where the replica's own weights start the next round."""
    if residual is None or carry == 0.0:
        return anchor
    return anchor.sub(residual.mul(carry))


@dataclass(frozen=True)
class Mean(Rule):
    """u = mean of the signals, used as it is: plain data parallelism."""

    def begin(self, weights: Tensor, *, lossless: bool) -> State:  # noqa: ARG002
        return {}

    def propose(self, state: State, signal: Reading, encode: Encode) -> Part:  # noqa: ARG002
        return encode(signal.tensor())

    def withdraw(self, state: State, sent: Part) -> bool:  # noqa: ARG002
        return False

    def absorb(self, state: State, heard: Tensor) -> Tensor:  # noqa: ARG002
        return heard


@dataclass(frozen=True)
class DeMo(Rule):
    """Decoupled momentum on gradients (arXiv 2411.19870), one exchange per step:

        M ← β·M + G;   send S = T_k(M);   M ← M − α·S;   step with sign(D⁻¹ u)

    where u averages each coefficient over the replicas that sent it. Equals the transcription in
    tests/test_transcriptions.py. The reference scales G by the learning rate; at a constant one the sign undoes it.
    """

    decay: float = 0.999
    release: float = 1.0

    over_senders = True

    def __post_init__(self) -> None:
        _within("decay", self.decay, 0.0, 1.0)
        _within("release", self.release, 0.0, 1.0, above=True)

    def begin(self, weights: Tensor, *, lossless: bool) -> State:  # noqa: ARG002
        return {"momentum": torch.zeros_like(weights)}

    def propose(self, state: State, signal: Reading, encode: Encode) -> Part:
        return _accumulate_and_send(state["momentum"], signal, encode, self.decay, self.release)

    def withdraw(self, state: State, sent: Part) -> bool:
        sent.add_to(state["momentum"], self.release)
        return True

    def absorb(self, state: State, heard: Tensor) -> Tensor:  # noqa: ARG002
        return heard

    def settle(self, answer: Tensor) -> Tensor:
        return answer.sign_()


@dataclass(frozen=True)
class Outer(Rule):
    """The one outer rule behind most methods: error feedback, carry and a shared Nesterov momentum.

        E ← β·E + G;   send c = C(E);   E ← E − α·C⁻¹(c)
        u = mean of what was heard;   M ← μ·M + u;   Θ ← Θ − η·(u + μ·M);   weights ← Θ − λ·E

    Lossless and without carry this is DiLoCo (tests/test_equivalence.py); with μ = 0, λ = 0, β < 1 it is the error
    feedback of SparseLoCo. With carry 1 the unsent part of the drift stays in the replica's own weights.
    """

    lr: float
    momentum: float
    decay: float = 1.0
    carry: float = 0.0
    release: float = 1.0

    shared = ("anchor", "momentum")

    def __post_init__(self) -> None:
        _within("lr", self.lr, 0.0, 10.0, above=True, what="the outer learning rate, usually 0.5 to 1, ")
        _within("momentum", self.momentum, 0.0, 1.0, below=True)
        _within("decay", self.decay, 0.0, 1.0)
        _within("carry", self.carry, 0.0, 1.0)
        _within("release", self.release, 0.0, 1.0, above=True)

    def begin(self, weights: Tensor, *, lossless: bool) -> State:
        state = {"anchor": weights}
        if self.momentum:
            state["momentum"] = torch.zeros_like(weights)
        if not (lossless and self.release == 1.0):  # otherwise every round sends all there is
            state["residual"] = torch.zeros_like(weights)
        return state

    def propose(self, state: State, signal: Reading, encode: Encode) -> Part:
        if "residual" not in state:
            return encode(signal.tensor())
        return _accumulate_and_send(state["residual"], signal, encode, self.decay, self.release)

    def withdraw(self, state: State, sent: Part) -> bool:
        if "residual" not in state:
            return False
        sent.add_to(state["residual"], self.release)
        return True

    def absorb(self, state: State, heard: Tensor) -> Tensor:
        momentum = state["momentum"] if self.momentum else None
        outer_step(state["anchor"], momentum, heard, lr=self.lr, mu=self.momentum)
        return carried(state["anchor"], state.get("residual"), self.carry)

    def close(self, state: State) -> None:
        """E ← λ·E: only what is in the replica's own weights is still owed."""
        if "residual" in state:
            state["residual"].mul_(self.carry)


@dataclass(frozen=True)
class Published(Rule):
    """The paper authors' rule as in their code (arXiv 2510.03371), kept as a baseline. All of it private but u:

        M_i ← d·M_i + G_i;   send S_i = T_k(M_i);   M_i ← M_i − S_i
        u = mean of each coefficient over its senders;   M_i ← M_i + u;   Θ_i ← Θ_i − η·(G_i + d·M_i)

    Every replica keeps an anchor of its own and nothing pulls them together: there is no consensus.
    Equals the transcription in tests/test_transcriptions.py.
    """

    lr: float = 0.7
    decay: float = 0.9

    consensus = False
    over_senders = True

    def __post_init__(self) -> None:
        _within("lr", self.lr, 0.0, 10.0, above=True, what="the outer learning rate, usually 0.5 to 1, ")
        _within("decay", self.decay, 0.0, 1.0)

    def begin(self, weights: Tensor, *, lossless: bool) -> State:  # noqa: ARG002
        return {"anchor": weights, "momentum": torch.zeros_like(weights), "drift": torch.zeros_like(weights)}

    def propose(self, state: State, signal: Reading, encode: Encode) -> Part:
        signal.into(state["drift"])
        return _accumulate_and_send(state["momentum"], signal, encode, self.decay, 1.0)

    def withdraw(self, state: State, sent: Part) -> bool:
        sent.add_to(state["momentum"])
        return True

    def absorb(self, state: State, heard: Tensor) -> Tensor:
        momentum = state["momentum"].add_(heard)
        state["anchor"].sub_(momentum.mul(self.decay).add_(state["drift"]).mul_(self.lr))
        return state["anchor"]


def _accumulate_and_send(store: Tensor, signal: Reading, encode: Encode, decay: float, release: float) -> Part:
    """store ← decay · store + signal, then less ``release`` of what was really sent."""
    sent = encode(signal.into(store, keep=decay))
    sent.add_to(store, -release)
    return sent


def _within(
    name: str, value: float, low: float, high: float, *, above: bool = False, below: bool = False, what: str = ""
) -> None:
    """Refuse what is no number, and a number outside [low, high]; ``above`` and ``below`` exclude the ends."""
    brackets = f"{'(' if above else '['}{low:g}, {high:g}{')' if below else ']'}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MethodError(f"{name}={value!r}: {what}must be a number in {brackets}")
    if not (low < value if above else low <= value) or not (value < high if below else value <= high):
        raise MethodError(f"{name}={value}: {what}must lie in {brackets}")
