"""Where a method's signal is measured, and where the answer goes: the gradient, the drift of the weights, or nothing.

A signal is bound to one replica's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

Finalize = Callable[[Tensor], Tensor]
Sources = tuple[Sequence[Tensor], Sequence[Tensor] | None]  # the signal is the first tensors, less the second


class Tensors(Protocol):
    """The tensors that are exchanged; `Parameters` are such."""

    @property
    def exchanged(self) -> list[nn.Parameter]: ...

    @property
    def tensors(self) -> list[Tensor]: ...


class Signal(Protocol):
    """One replica's signal. ``inner_first``: the inner optimizer steps before the round, not after it. ``keeps_start``:
    it remembers a copy of the weights."""

    inner_first: bool
    keeps_start: bool

    def __init__(self, parameters: Tensors) -> None: ...

    def begin(self) -> None:
        """The next drift is measured from the weights as they are now."""
        ...

    def sources(self) -> Sources:
        """The tensors that the signal is measured from."""
        ...

    def present(self) -> list[bool]:
        """Which parameters have a signal now, to be sent to the others; empty if all always have one."""
        ...

    def targets(self, measured_at: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Where to write the rule's answer; to be followed by `wrote`. ``measured_at`` are the weights at which the
        signal was measured, if there were local steps since."""
        ...

    def wrote(
        self,
        targets: list[Tensor],
        finalize: Finalize,
        *,
        measured_at: Sequence[Tensor] | None = None,
        present: Sequence[bool] = (),
        scale: float = 1.0,
    ) -> None:
        """The answer is in the targets. ``present`` says which parameters had a signal on any replica, ``scale`` is the
        loss scale that gradients carry."""
        ...

    def restart(self, measured_at: Sequence[Tensor] | None = None) -> None:
        """The signal is in the rule's state, but no answer will come: measure from where it was measured last."""
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

    def __init__(self, parameters: Tensors) -> None:
        self.parameters = parameters
        self.start: list[Tensor] = []

    def begin(self) -> None:
        self.start = [w.clone() for w in self.parameters.tensors]

    def sources(self) -> Sources:
        return self.start, self.parameters.tensors

    def present(self) -> list[bool]:
        return []

    def targets(self, measured_at: Sequence[Tensor] | None = None) -> list[Tensor]:
        if measured_at is None:
            return self.parameters.tensors
        return [torch.empty_like(weight, dtype=torch.float32) for weight in measured_at]

    def wrote(
        self,
        targets: list[Tensor],
        finalize: Finalize,
        *,
        measured_at: Sequence[Tensor] | None = None,
        present: Sequence[bool] = (),  # noqa: ARG002
        scale: float = 1.0,  # noqa: ARG002
    ) -> None:
        if measured_at is None:
            for start, weight in zip(self.start, targets, strict=True):
                finalize(weight)
                start.copy_(weight)
            return
        # Local steps lie between: the weights move by a shift, so that these steps stay; so does the start, so that
        # they are the next drift.
        for start, weight, was, answer in zip(self.start, self.parameters.tensors, measured_at, targets, strict=True):
            shift = finalize(answer).sub_(was)
            weight.add_(shift)
            start.copy_(was).add_(shift)

    def restart(self, measured_at: Sequence[Tensor] | None = None) -> None:
        if measured_at is None:
            self.begin()
        else:
            self.start = [weight.clone() for weight in measured_at]

    def state(self) -> list[Tensor]:
        return self.start


class Gradient:
    """The gradient that backward left in the parameters; the answer replaces it, then the inner optimizer steps."""

    inner_first = False
    keeps_start = False

    def __init__(self, parameters: Tensors) -> None:
        self.parameters = parameters

    def begin(self) -> None:
        pass

    def sources(self) -> Sources:
        return [_dense_gradient(p) for p in self.parameters.exchanged], None

    def present(self) -> list[bool]:
        return [p.grad is not None for p in self.parameters.exchanged]

    def targets(self, measured_at: Sequence[Tensor] | None = None) -> list[Tensor]:  # noqa: ARG002
        return [_place_for(p) for p in self.parameters.exchanged]

    def wrote(
        self,
        targets: list[Tensor],
        finalize: Finalize,
        *,
        measured_at: Sequence[Tensor] | None = None,  # noqa: ARG002
        present: Sequence[bool] = (),
        scale: float = 1.0,
    ) -> None:
        for p, answer, somebody_had_one in zip(self.parameters.exchanged, targets, present, strict=True):
            finalize(answer)
            if scale != 1.0:
                answer.mul_(scale)
            # Unused on every replica: optimizers skip it, as they would without any exchange. A gradient of zeros is
            # another thing: momentum and weight decay go on. (A rule may answer from what it remembers, too.)
            if not somebody_had_one and not bool(answer.any()):
                p.grad = None
            elif answer is not p.grad:
                p.grad = answer.to(p.dtype)

    def restart(self, measured_at: Sequence[Tensor] | None = None) -> None:
        pass

    def state(self) -> list[Tensor]:
        return []


class Silence:
    """No signal: the replica never sends anything."""

    inner_first = True
    keeps_start = False

    def __init__(self, parameters: Tensors) -> None:
        pass

    def begin(self) -> None:
        pass

    def sources(self) -> Sources:
        return [], None

    def present(self) -> list[bool]:
        return []

    def targets(self, measured_at: Sequence[Tensor] | None = None) -> list[Tensor]:  # noqa: ARG002
        return []

    def wrote(
        self,
        targets: list[Tensor],
        finalize: Finalize,
        *,
        measured_at: Sequence[Tensor] | None = None,
        present: Sequence[bool] = (),
        scale: float = 1.0,
    ) -> None:
        pass

    def restart(self, measured_at: Sequence[Tensor] | None = None) -> None:
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
