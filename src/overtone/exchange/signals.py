"""Where a method's signal is measured, and where the answer goes: the gradient, the drift of the weights, or nothing.

A signal is bound to one replica's parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from overtone.errors import MethodError


@dataclass(frozen=True)
class Sources:
    """Where a signal is measured, and where the answer goes: it is ``plus``, less ``minus`` if there is one."""

    plus: Sequence[Tensor]
    minus: Sequence[Tensor] | None = None
    targets: Sequence[Tensor] = ()  # the rule's answer is written here, and handed to `Signal.answer`
    present: Sequence[bool] = ()  # which parameters have a signal, to be sent to the others; empty if all always have
    measured_at: Sequence[Tensor] | None = None  # a copy of the weights, if local steps may follow before the answer


class Tensors(Protocol):
    """The tensors that are exchanged; `Parameters` are such."""

    exchanged: list[nn.Parameter]

    @property
    def tensors(self) -> list[Tensor]: ...


class Signal(Protocol):
    """One replica's signal."""

    inner_first: bool  # the inner optimizer steps before the round, not after it
    keeps_start: bool  # it remembers a copy of the weights
    tells_presence: bool  # a parameter may have no signal, and the others must know

    def __init__(self, parameters: Tensors) -> None: ...

    def begin(self) -> None:
        """The next drift is measured from the weights as they are now."""
        ...

    def measure(self, *, overlapped: bool = False) -> Sources:
        """The tensors to measure the signal from. ``overlapped``: local steps may follow before the answer."""
        ...

    def answer(self, sources: Sources, *, present: Sequence[bool] = (), scale: float = 1.0) -> None:
        """The answer is in the targets. ``present`` says which parameters had a signal on any replica, ``scale`` is the
        loss scale that gradients carry."""
        ...

    def restart(self, sources: Sources) -> None:
        """The signal is in the rule's state, but no answer will come: measure on from where it was measured."""
        ...

    def state(self) -> list[Tensor]:
        """What must be saved to go on in the middle of a round."""
        ...


class Drift:
    """Start of the round minus where the weights are now (the papers' pseudo-gradient, or outer gradient).

    The start is kept in the weights' own type: measured against it, weights that did not move have no drift, also when
    bf16 weights are a coarse image of an fp32 anchor.
    """

    inner_first = True
    keeps_start = True
    tells_presence = False

    def __init__(self, parameters: Tensors) -> None:
        self.parameters = parameters
        self.start: list[Tensor] = []

    def begin(self) -> None:
        self.start = [w.clone() for w in self.parameters.tensors]

    def measure(self, *, overlapped: bool = False) -> Sources:
        weights = self.parameters.tensors
        if not overlapped:
            return Sources(self.start, weights, weights)
        answers = [torch.empty_like(weight, dtype=torch.float32) for weight in weights]
        return Sources(self.start, weights, answers, measured_at=[weight.clone() for weight in weights])

    def answer(self, sources: Sources, *, present: Sequence[bool] = (), scale: float = 1.0) -> None:  # noqa: ARG002
        if sources.measured_at is None:
            for start, weight in zip(self.start, sources.targets, strict=True):
                start.copy_(weight)
            return
        # Local steps lie between: the weights move by a shift, so that these steps stay. The start moves by the same
        # shift, so that they are the next drift.
        pairs = zip(sources.measured_at, sources.targets, strict=True)
        shifts = [answer.sub_(was) for was, answer in pairs]
        self.restart(sources)
        for start, weight, shift in zip(self.start, self.parameters.tensors, shifts, strict=True):
            weight.add_(shift)
            start.add_(shift)

    def restart(self, sources: Sources) -> None:
        if sources.measured_at is None:
            self.begin()
        else:
            self.start = [weight.clone() for weight in sources.measured_at]

    def state(self) -> list[Tensor]:
        return self.start


class Gradient:
    """The gradient that backward left in the parameters; the answer replaces it, then the inner optimizer steps."""

    inner_first = False
    keeps_start = False
    tells_presence = True

    def __init__(self, parameters: Tensors) -> None:
        self.parameters = parameters

    def begin(self) -> None:
        pass

    def measure(self, *, overlapped: bool = False) -> Sources:
        if overlapped:
            raise MethodError("gradients are exchanged before the inner step, so no local step can lie between")
        parameters = self.parameters.exchanged
        present = [p.grad is not None for p in parameters]
        return Sources([_dense_gradient(p) for p in parameters], None, [_place_for(p) for p in parameters], present)

    def answer(self, sources: Sources, *, present: Sequence[bool] = (), scale: float = 1.0) -> None:
        for p, answer, somebody_had_one in zip(self.parameters.exchanged, sources.targets, present, strict=True):
            if scale != 1.0:
                answer.mul_(scale)
            # Unused on every replica: optimizers skip it, as they would without any exchange. A gradient of zeros is
            # another thing: momentum and weight decay go on. (A rule may answer from what it remembers, too.)
            if not somebody_had_one and not bool(answer.any()):
                p.grad = None
            elif answer is not p.grad:
                p.grad = answer.to(p.dtype)

    def restart(self, sources: Sources) -> None:
        pass

    def state(self) -> list[Tensor]:
        return []


class Silence:
    """No signal: the replica never sends anything."""

    inner_first = True
    keeps_start = False
    tells_presence = False

    def __init__(self, parameters: Tensors) -> None:
        pass

    def begin(self) -> None:
        pass

    def measure(self, *, overlapped: bool = False) -> Sources:  # noqa: ARG002
        return Sources(())

    def answer(self, sources: Sources, *, present: Sequence[bool] = (), scale: float = 1.0) -> None:
        pass

    def restart(self, sources: Sources) -> None:
        pass

    def state(self) -> list[Tensor]:
        return []


def _dense_gradient(p: nn.Parameter) -> Tensor:
    if p.grad is None:
        return torch.zeros_like(p, memory_format=torch.contiguous_format)
    return p.grad.detach().to_dense() if p.grad.is_sparse else p.grad.detach()


def _place_for(p: nn.Parameter) -> Tensor:
    """Where to put an answer: the gradient itself if it is dense and exact enough, else a new fp32 tensor."""
    if p.grad is not None and p.grad.dtype == torch.float32 and not p.grad.is_sparse:
        return p.grad.detach() if p.grad.requires_grad else p.grad
    return torch.empty(p.shape, dtype=torch.float32, device=p.device)
