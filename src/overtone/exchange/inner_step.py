"""The step of the inner optimizer, with clipping, a `GradScaler` or a closure around it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import nn

from overtone.errors import ModelError

Closure = Callable[[], float]


@dataclass(frozen=True)
class InnerStep:
    """One inner step and its options. Some methods take it only after a round has replaced the gradients."""

    inner: torch.optim.Optimizer
    parameters: Sequence[nn.Parameter]
    clip: float | None = None
    scaler: torch.amp.GradScaler | None = None
    closure: Closure | None = None

    def __post_init__(self) -> None:
        if self.clip is not None and not _above_zero(self.clip):
            raise ModelError(
                f"clip={self.clip!r}: the largest gradient norm allowed, a number above 0; leave it out not to clip"
            )
        if self.closure is not None and (self.clip is not None or self.scaler is not None):
            raise ModelError("closure: it computes its own gradients; clip and scale inside it")

    @property
    def scale(self) -> float:
        """The loss scale by which the present gradients are multiplied."""
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    def must_wait(self, method: str) -> None:
        """Refuse options that cannot work when the gradients are exchanged before the inner step."""
        if self.closure is not None:
            raise ModelError(f"closure: {method} exchanges gradients before the inner step; a closure would undo that")
        if self.scaler is not None and _is_unscaled(self.scaler, self.inner):
            raise ModelError(
                f"scaler: was unscaled before the exchange, so {method} would not see on one rank that another "
                "overflowed; leave out scaler.unscale_() and pass step(scaler=scaler, clip=...)"
            )

    @property
    def may_overflow(self) -> bool:
        """True under a `GradScaler`: it expects overflows, and skips the step after one."""
        return self.scaler is not None and self.scaler.is_enabled()

    def skip(self) -> None:
        """Skip the step on this rank too, because the gradient of some rank overflowed."""
        if not self.may_overflow:
            return
        # An infinity for this rank's scaler to find: it then lowers its scale, and all ranks keep the same scale.
        some = next(p for group in self.inner.param_groups for p in group["params"] if p.numel())
        some.grad = torch.full_like(some, math.inf)
        self.take()

    def take(self) -> None:
        """Take the step."""
        if self.closure is not None:
            self.inner.step(self.closure)
            return
        if self.clip is not None:
            # A norm means nothing under a loss scale. `unscale_` fails if the user has called it already.
            if self.scaler is not None and not _is_unscaled(self.scaler, self.inner):
                self.scaler.unscale_(self.inner)
            nn.utils.clip_grad_norm_(self.parameters, self.clip)
        if self.scaler is not None:
            self.scaler.step(self.inner)
        else:
            self.inner.step()


def _above_zero(value: object) -> bool:
    return isinstance(value, Real | torch.Tensor) and float(value) > 0


def _is_unscaled(scaler: torch.amp.GradScaler, inner: torch.optim.Optimizer) -> bool:
    if not scaler.is_enabled():
        return False
    # There is no public way to ask. Every torch since 1.6 keeps the answer here.
    stage = scaler._per_optimizer_states[id(inner)]["stage"]
    return bool(getattr(stage, "name", "") == "UNSCALED")
