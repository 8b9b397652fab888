"""Where a method's signal is read, and where the answer goes: the gradient, the drift of the weights, or nothing.

A signal is bound to one replica's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

Settle = Callable[[Tensor], Tensor]


class Signal(Protocol):
    """One replica's signal. ``inner_first``: the inner optimiser steps before the round, not after it."""

    inner_first: bool

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None: ...

    def begin(self) -> None:
        """The weights are now where the first round starts."""
        ...

    def sources(self) -> tuple[list[Tensor], list[Tensor] | None]:
        """The signal is the first tensors, less the second if there are any."""
        ...

    def present(self) -> list[bool]:
        """Which parameters have a signal now, to be told to the others; empty if all always have one."""
        ...

    def targets(self) -> list[Tensor]:
        """Where to write the rule's answer; to be followed by `wrote`."""
        ...

    def wrote(self, targets: list[Tensor], settle: Settle, *, present: Sequence[bool] = (), scale: float = 1.0) -> None:
        """The answer is in the targets; ``present`` says which parameters had a signal on any replica, ``scale`` is the
        loss scale that gradients carry."""
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

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.start: list[Tensor] = []

    @property
    def weights(self) -> list[Tensor]:
        # Asked for each time: `model.to(...)` and the like give a parameter new storage.
        return [p.detach() for p in self.parameters]

    def begin(self) -> None:
        self.start = [w.clone() for w in self.weights]

    def sources(self) -> tuple[list[Tensor], list[Tensor] | None]:
        return self.start, self.weights

    def present(self) -> list[bool]:
        return []

    def targets(self) -> list[Tensor]:
        return self.weights

    def wrote(
        self,
        targets: list[Tensor],
        settle: Settle,
        *,
        present: Sequence[bool] = (),  # noqa: ARG002
        scale: float = 1.0,  # noqa: ARG002
    ) -> None:
        for start, weight in zip(self.start, targets, strict=True):
            settle(weight)
            start.copy_(weight)

    def state(self) -> list[Tensor]:
        return self.start


class Gradient:
    """The gradient that backward left in the parameters; the answer replaces it, then the inner optimiser steps."""

    inner_first = False

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)

    def begin(self) -> None:
        pass

    def sources(self) -> tuple[list[Tensor], list[Tensor] | None]:
        return [_dense_gradient(p) for p in self.parameters], None

    def present(self) -> list[bool]:
        return [p.grad is not None for p in self.parameters]

    def targets(self) -> list[Tensor]:
        return [_place_for(p) for p in self.parameters]

    def wrote(self, targets: list[Tensor], settle: Settle, *, present: Sequence[bool] = (), scale: float = 1.0) -> None:
        for p, answer, somebody_had_one in zip(self.parameters, targets, present, strict=True):
            settle(answer)
            if scale != 1.0:
                answer.mul_(scale)
            # Unused on every replica: optimisers skip it, as they would without any exchange. A gradient of zeros is
            # another thing: momentum and weight decay go on. (A rule may answer from what it remembers, too.)
            if not somebody_had_one and not bool(answer.any()):
                p.grad = None
            elif answer is not p.grad:
                p.grad = answer.to(p.dtype)

    def state(self) -> list[Tensor]:
        return []


class Silence:
    """No signal: the replica never speaks."""

    inner_first = True

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        pass

    def begin(self) -> None:
        pass

    def sources(self) -> tuple[list[Tensor], list[Tensor] | None]:
        return [], None

    def present(self) -> list[bool]:
        return []

    def targets(self) -> list[Tensor]:
        return []

    def wrote(self, targets: list[Tensor], settle: Settle, *, present: Sequence[bool] = (), scale: float = 1.0) -> None:
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
