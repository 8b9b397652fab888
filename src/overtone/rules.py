"""A rule turns a replica's signal into coefficients to send (*accumulate*, *sent*), and the mean of all sent
coefficients into an answer (*absorb*).

A rule is a set of frozen numbers. Its memory is a `State` of vectors, all in the coefficient domain of the method's
codec. Every rule works value by value, so a round gives it one slab after the other, with that slab's state and signal.

The transform is linear and orthonormal, so anchor, momentum and residual can be kept as coefficients. Sent coefficients
are subtracted from the residual. The anchor changes only by elementwise operations in a fixed order. No matrix product
and no fused multiply-add changes it, so it stays bit-identical on every replica.

Symbols: Θ anchor, M momentum, E residual, G signal (drift or gradient), u mean of the coefficients that all replicas
sent; η lr, μ momentum, β decay, λ carry, α release.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from overtone.codec import Decoded
from overtone.coding.kernels import in_torch
from overtone.coding.kernels.in_torch import OuterStep
from overtone.coding.layout import SlabSignal, SlabTarget
from overtone.coding.pages import zeros
from overtone.errors import MethodError

State = dict[str, Tensor]

MOST_LR = 1e6
GAIN = 3.5  # by which the anchor moves in the end, in drifts, if no `lr` is given
MOST_STEP = 1.0  # by which it moves in one round, in residuals: more makes it swing


class Rule(ABC):
    """The interface between a round and a rule. ``state["anchor"]`` exists exactly if the rule works on weights."""

    # The vectors of the state that are the same on every replica. A newcomer copies them from a peer.
    shared: ClassVar[tuple[str, ...]] = ()
    consensus: ClassVar[bool] = True  # the anchor is the same on every replica after every round
    takes_sign: ClassVar[bool] = False  # only the sign of the answer is used, after the inverse transform
    over_senders: ClassVar[bool] = False  # a coefficient is averaged over the replicas that sent it, not over all

    @abstractmethod
    def begin(self, weights: Tensor, *, lossless: bool) -> State:
        """Make the state before the first round. ``weights`` are the coefficients of the initial weights."""

    @abstractmethod
    def accumulate(self, state: State, signal: SlabSignal) -> Tensor:
        """Add the signal to the state, and return the coefficients from which the codec selects.

        The codec does not change them.
        """

    def sent(self, state: State, decoded: Decoded) -> None:  # noqa: B027 (most simple rules keep nothing)
        """Remove the sent values from the residual. ``decoded`` is exactly what receivers decode from the message."""

    def withdraw(self, state: State, decoded: Decoded) -> bool:  # noqa: ARG002
        """Put the sent values back into the residual, because no receiver counted them.

        Returns True if the signal of that round stays in the state. It must then not be measured again.
        """
        return False

    @abstractmethod
    def absorb(self, state: State, mean: Tensor, target: SlabTarget) -> None:
        """Update the state with the mean of all payloads, and write the answer from its coefficients.

        The answer is the new value of the weights at which the signal was measured, or the gradient to step with. The
        memory of ``mean`` may be used for it.
        """

    def place(self, state: State) -> Tensor:
        """The coefficients of the weights from which this replica starts the next round."""
        return state["anchor"]

    def draining(self) -> Rule | None:
        """The rule of the draining messages, which move the residuals into the anchor. None if there is no residual."""
        return None

    def among(self, replicas: int, share: float) -> Rule:  # noqa: ARG002
        """The rule for a round of so many replicas, whose messages take this share of a residual's energy."""
        return self

    def close(self, state: State) -> None:  # noqa: B027 (most rules have nothing to close)
        """End the last round: remove from the residual all that the anchor is not owed any more."""


@dataclass(frozen=True)
class Mean(Rule):
    """Plain data parallelism: the answer is u, the mean of the signals."""

    def begin(self, weights: Tensor, *, lossless: bool) -> State:  # noqa: ARG002
        return {}

    def accumulate(self, state: State, signal: SlabSignal) -> Tensor:  # noqa: ARG002
        return signal.coefficients()

    def absorb(self, state: State, mean: Tensor, target: SlabTarget) -> None:  # noqa: ARG002
        target.write(mean)


@dataclass(frozen=True)
class DeMo(Rule):
    """Decoupled momentum on gradients (arXiv 2411.19870), one exchange per step:

        M ← β·M + G;   send S = T_k(M);   M ← M − α·S;   step with sign(D⁻¹ u)

    where u averages each coefficient over the replicas that sent it. Equals the transcription in
    tests/test_transcriptions.py. The reference scales G by the learning rate. If that is constant, the sign removes the
    factor again.
    """

    decay: float = 0.999
    release: float = 1.0

    takes_sign = True
    over_senders = True

    def __post_init__(self) -> None:
        _within("decay", self.decay, 0.0, 1.0)
        _within("release", self.release, 0.0, 1.0, above=True)

    def begin(self, weights: Tensor, *, lossless: bool) -> State:  # noqa: ARG002
        return {"momentum": zeros(len(weights), weights.device)}

    def accumulate(self, state: State, signal: SlabSignal) -> Tensor:
        return signal.into(state["momentum"], keep=self.decay)

    def sent(self, state: State, decoded: Decoded) -> None:
        decoded.add_to(state["momentum"], -self.release)

    def withdraw(self, state: State, decoded: Decoded) -> bool:
        decoded.add_to(state["momentum"], self.release)
        return True

    def absorb(self, state: State, mean: Tensor, target: SlabTarget) -> None:  # noqa: ARG002
        target.write(mean)


@dataclass(frozen=True)
class Outer(Rule):
    """The outer rule of most methods: error feedback, carry and a shared Nesterov momentum.

        E ← β·E + G;   send c = C(E);   E ← E − α·C⁻¹(c)
        u = mean over all replicas of C⁻¹(c);   M ← μ·M + u;   Θ ← Θ − η·(u + μ·M);   weights ← Θ − λ·E

    With a lossless codec and without carry, this is DiLoCo (tests/test_equivalence.py). With μ = 0, λ = 0 and β < 1, it
    is the error feedback of SparseLoCo. With carry 1, the unsent part of the drift stays in the replica's own weights.

    If ``lr`` is None, it follows from the round. A message takes a share δ of a residual, and 1 − β of it fades. With
    η = (1 − μ)·g·(1 + (1 − β)/δ), the anchor moves in the end by g times the mean of the drifts, what has faded
    included. The gain g is that of a usual Nesterov step, η/(1 − μ). A replica alone has nobody to be pulled to:
    β = η = 1.
    """

    lr: float | None
    momentum: float
    decay: float = 1.0
    carry: float = 0.0
    release: float = 1.0

    shared = ("anchor", "momentum")

    def __post_init__(self) -> None:
        if self.lr is not None:
            _check_lr(self.lr)
        _within("momentum", self.momentum, 0.0, 1.0, below=True)
        _within("decay", self.decay, 0.0, 1.0)
        _within("carry", self.carry, 0.0, 1.0)
        _within("release", self.release, 0.0, 1.0, above=True)

    def begin(self, weights: Tensor, *, lossless: bool) -> State:
        state = {"anchor": weights}
        if self.momentum:
            state["momentum"] = zeros(len(weights), weights.device)
        if not (lossless and self.release == 1.0):  # otherwise every round sends the whole drift: no residual
            state["residual"] = zeros(len(weights), weights.device)
        return state

    def accumulate(self, state: State, signal: SlabSignal) -> Tensor:
        if "residual" not in state:  # lossless: the drift is sent in full, and nothing has to be added up
            return signal.coefficients()
        return signal.into(state["residual"], keep=self.decay)

    def sent(self, state: State, decoded: Decoded) -> None:
        if "residual" in state:
            decoded.add_to(state["residual"], -self.release)

    def withdraw(self, state: State, decoded: Decoded) -> bool:
        if "residual" not in state:
            return False
        decoded.add_to(state["residual"], self.release)
        return True

    def among(self, replicas: int, share: float) -> Outer:
        if self.lr is not None:
            return self
        if replicas == 1:
            return replace(self, lr=1.0, decay=1.0)
        lr = min(GAIN * (1.0 + (1.0 - self.decay) / share), MOST_STEP / share) * (1.0 - self.momentum)
        # Rounded: it moves the anchor, which must be the same on machines whose logarithms differ in the last bit.
        return replace(self, lr=max(1, round(64 * lr)) / 64)

    def absorb(self, state: State, mean: Tensor, target: SlabTarget) -> None:
        assert self.lr is not None, "a round asks for the rule `among` its replicas"
        momentum = state["momentum"] if self.momentum else None
        residual = state.get("residual")
        target.outer_step(OuterStep(state["anchor"], momentum, residual, mean, self.lr, self.momentum, self.carry))

    def place(self, state: State) -> Tensor:
        return in_torch.carried(state["anchor"], state.get("residual"), self.carry)

    def draining(self) -> Outer:
        """The same rule with lr 1 and no momentum: every message moves the anchor towards the mean of the replicas."""
        return replace(self, lr=1.0, momentum=0.0, decay=1.0, carry=1.0, release=1.0)

    def close(self, state: State) -> None:
        """E ← λ·E: only the part of the residual that is in the replica's own weights is still owed."""
        if "residual" in state:
            state["residual"].mul_(self.carry)


@dataclass(frozen=True)
class Published(Rule):
    """The rule of the paper's authors as in their code (arXiv 2510.03371), kept as a baseline. Only u is shared:

        M_i ← d·M_i + G_i;   send S_i = T_k(M_i);   M_i ← M_i − S_i
        u = mean of each coefficient over its senders;   M_i ← M_i + u;   Θ_i ← Θ_i − η·(G_i + d·M_i)

    Every replica keeps an anchor of its own, and nothing makes these anchors equal again: there is no consensus.
    Equals the transcription in tests/test_transcriptions.py.
    """

    lr: float = 0.7
    decay: float = 0.9

    consensus = False
    over_senders = True

    def __post_init__(self) -> None:
        _check_lr(self.lr)
        _within("decay", self.decay, 0.0, 1.0)

    def begin(self, weights: Tensor, *, lossless: bool) -> State:  # noqa: ARG002
        return {
            "anchor": weights,
            "momentum": zeros(len(weights), weights.device),
            "drift": zeros(len(weights), weights.device),
        }

    def accumulate(self, state: State, signal: SlabSignal) -> Tensor:
        # Kept until `absorb`, whose step uses the replica's own drift beside the mean.
        signal.into(state["drift"])
        return signal.into(state["momentum"], keep=self.decay)

    def sent(self, state: State, decoded: Decoded) -> None:
        decoded.add_to(state["momentum"], -1.0)

    def withdraw(self, state: State, decoded: Decoded) -> bool:
        decoded.add_to(state["momentum"])
        return True

    def absorb(self, state: State, mean: Tensor, target: SlabTarget) -> None:
        # The authors' code adds the mean to the private momentum, so the replicas' momenta stay different.
        momentum = state["momentum"].add_(mean)
        state["anchor"].sub_(momentum.mul(self.decay).add_(state["drift"]).mul_(self.lr))
        target.write(state["anchor"])


def _check_lr(lr: float) -> None:
    _within("lr", lr, 0.0, MOST_LR, above=True, what="the outer learning rate, usually 0.5 to 10, ")


def _within(
    name: str, value: float, low: float, high: float, *, above: bool = False, below: bool = False, what: str = ""
) -> None:
    """Refuse a value that is no number, or lies outside [low, high]. ``above`` and ``below`` exclude the ends."""
    brackets = f"{'(' if above else '['}{low:g}, {high:g}{')' if below else ']'}"
    if isinstance(value, bool) or not isinstance(value, int | float):  # a bool is an int for Python
        raise MethodError(f"{name}={value!r}: {what}must be a number in {brackets}")
    # Written as "not inside" instead of "outside": NaN fails every comparison, and is refused too.
    if not (low < value if above else low <= value) or not (value < high if below else value <= high):
        raise MethodError(f"{name}={value}: {what}must lie in {brackets}")
