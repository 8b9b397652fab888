"""The signals that a method can measure and exchange: the gradient, the drift of the weights, or nothing.

A signal belongs to one replica's parameters. It knows where to measure, and where to write the answer of a round.
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
    """The tensors from which a signal is measured, and the targets of the answer.

    The signal is ``plus`` minus ``minus``, or ``plus`` alone if ``minus`` is None.
    """

    plus: Sequence[Tensor]
    minus: Sequence[Tensor] | None = None
    targets: Sequence[Tensor] = ()  # the rule's answer is written here; then `Signal.answer` is called
    present: Sequence[bool] = ()  # for each parameter: it has a signal; empty if all parameters always have one
    measured_at: Sequence[Tensor] | None = None  # a copy of the weights, if local steps may follow before the answer


class Tensors(Protocol):
    """The exchanged tensors. `Parameters` implements this."""

    exchanged: list[nn.Parameter]

    @property
    def tensors(self) -> list[Tensor]:
        """The same, detached, for reading and writing."""
        ...


class Signal(Protocol):
    """One replica's signal."""

    inner_first: bool  # the inner optimizer steps before the round, not after it
    keeps_start: bool  # the signal keeps a copy of the weights
    tells_presence: bool  # a parameter may have no signal, and messages tell the peers so

    def __init__(self, parameters: Tensors) -> None: ...

    def begin(self) -> None:
        """Measure the next drift from the present weights."""
        ...

    def measure(self, *, overlapped: bool = False) -> Sources:
        """The tensors to measure the signal from. ``overlapped``: local steps may follow before the answer."""
        ...

    def standing(self) -> Sources:
        """As `measure`, but of a replica that sends nothing: the answer moves where its drift begins, and the weights
        with it."""
        ...

    def answer(self, sources: Sources, *, present: Sequence[bool] = (), scale: float = 1.0) -> None:
        """Use the answer, which is now in the targets.

        ``present`` tells for each parameter if it had a signal on at least one replica. ``scale`` is the loss scale by
        which gradients are multiplied.
        """
        ...

    def restart(self, sources: Sources) -> None:
        """Measure the next drift from the point of the last measurement.

        This is for a refused round: its signal is in the rule's state already, but no answer will come.
        """
        ...

    def state(self) -> list[Tensor]:
        """The tensors that a checkpoint needs to continue between two rounds."""
        ...


class Drift:
    """The weights at the start of the round minus the weights now (in papers: pseudo-gradient, or outer gradient).

    The start is kept in the type of the weights. So weights that did not change have no drift, even if bf16 weights are
    only a rounded copy of an fp32 anchor.
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
        # The answer must not go into the weights themselves: local steps change them meanwhile.
        answers = [torch.empty_like(weight, dtype=torch.float32) for weight in weights]
        return Sources(self.start, weights, answers, measured_at=[weight.clone() for weight in weights])

    def standing(self) -> Sources:
        answers = [torch.empty_like(weight, dtype=torch.float32) for weight in self.start]
        return Sources(self.start, self.start, answers, measured_at=self.start)

    def answer(self, sources: Sources, *, present: Sequence[bool] = (), scale: float = 1.0) -> None:  # noqa: ARG002
        if sources.measured_at is None:
            for start, weight in zip(self.start, sources.targets, strict=True):
                start.copy_(weight)
            return
        # Local steps were taken since the measurement. The weights move by a shift, so that these steps are kept. The
        # start moves by the same shift, so that these steps become the next drift.
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
    """The gradient of the last backward pass. The answer replaces it, and then the inner optimizer steps."""

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

    def standing(self) -> Sources:
        raise MethodError("gradients are exchanged at every step: nobody can send nothing")

    def answer(self, sources: Sources, *, present: Sequence[bool] = (), scale: float = 1.0) -> None:
        for p, answer, somebody_had_one in zip(self.parameters.exchanged, sources.targets, present, strict=True):
            if scale != 1.0:
                answer.mul_(scale)
            # The parameter was unused on every replica: the optimizer shall skip it, as it would without any exchange.
            # A gradient of zeros would not do: momentum and weight decay would still change the weights. But a rule
            # with a momentum may have an answer even if no replica had a gradient.
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

    def standing(self) -> Sources:
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
    """The target of an answer: the gradient itself if it is dense and fp32, else a new fp32 tensor."""
    if p.grad is not None and p.grad.dtype == torch.float32 and not p.grad.is_sparse:
        return p.grad.detach() if p.grad.requires_grad else p.grad
    return torch.empty(p.shape, dtype=torch.float32, device=p.device)
