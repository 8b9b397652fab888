"""Which parameters of a model are exchanged, under which names, and what makes a model unfit for it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from overtone.errors import ModelError
from overtone.signals import Signal

ADVICE = "lower the learning rate or clip the gradient, and go on from a checkpoint"


class Parameters:
    """A model's parameters by name, tied ones once. Those that require a gradient now are exchanged."""

    def __init__(self, model: nn.Module, inner: torch.optim.Optimizer) -> None:
        self.all = {plain_name(name): p for name, p in model.named_parameters()}
        self.trainable = {name: p for name, p in self.all.items() if p.requires_grad}
        if not self.trainable:
            raise ModelError("model: no parameter requires a gradient, so there is nothing to train or exchange")
        for name, p in self.all.items():
            if p.is_meta:
                raise ModelError(f"parameter {name}: on the meta device; give it values before building the Replica")
            if not p.is_floating_point():
                raise ModelError(f"parameter {name}: is {p.dtype}; only real floating-point numbers can be exchanged")
        held = {id(p) for group in inner.param_groups for p in group["params"]}
        if not any(id(p) in held for p in self.trainable.values()):
            raise ModelError(
                "inner: the optimiser holds none of the model's parameters; build it from this model's own"
            )
        foreign = held - {id(p) for p in self.all.values()}
        if foreign:
            raise ModelError(
                f"inner: {len(foreign)} of its parameters are not the model's, so other replicas would never hear of "
                "them; make them part of the model"
            )

    @property
    def exchanged(self) -> list[nn.Parameter]:
        return list(self.trainable.values())

    @property
    def tensors(self) -> list[Tensor]:
        """The exchanged parameters, detached: to read and to write."""
        return [p.detach() for p in self.trainable.values()]

    def thawed(self) -> str:
        """A complaint about a parameter that was frozen when the replica was built and trains now, unheard."""
        for name, p in self.all.items():
            if p.requires_grad and name not in self.trainable:
                return f"parameter {name} became trainable after the Replica was built; unfreeze it before"
        return ""

    def not_finite(self, signal: Signal, step: int) -> str:
        """Why the signal cannot be sent, if it has infinities or would overflow on the way: the parameter, and what to
        do about it. Norms that fit fp32 tell in one fast pass that all is well."""
        plus, minus = signal.sources()
        norms = [_norm32(tensor).to(plus[0].device) for tensor in (plus if minus is None else minus)]
        if bool(torch.isfinite(torch.stack(norms)).all()):
            return ""
        tensors = plus if minus is None else [a.float() - b.float() for a, b in zip(plus, minus, strict=True)]
        squares = sum(float(torch.linalg.vector_norm(t, dtype=torch.float64)) ** 2 for t in tensors)
        if math.sqrt(squares) <= torch.finfo(torch.float32).max:  # NaN is not
            return ""
        kind = type(signal).__name__.lower()
        for name, tensor in zip(self.trainable, tensors, strict=True):
            bad = int((~torch.isfinite(tensor)).sum())
            if bad:
                share = f"{bad} of {tensor.numel()} values"
                return f"the {kind} of parameter {name} has {share} that are not finite at step {step}; {ADVICE}"
        return f"the {kind} is too large for fp32 at step {step}; {ADVICE}"

    def overflow(self, index: int, step: int) -> str:
        """Which parameter's residual outgrew fp32, and what to do about it."""
        name = list(self.trainable)[index]
        return f"the residual of parameter {name} is not finite any more at step {step}; {ADVICE}"


def plain_name(name: str) -> str:
    """The name without what `torch.compile` puts before it, so that compiled and plain replicas can meet."""
    return name.replace("_orig_mod.", "")


def _norm32(tensor: Tensor) -> Tensor:
    narrow = tensor.element_size() < 4  # in their own type the norms of ordinary tensors overflow
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float32 if narrow else None)
    return norm.to(torch.float32)
