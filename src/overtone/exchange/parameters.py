"""The parameters of a model: which are exchanged, under which names, and whether they still can be exchanged."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from overtone.errors import ModelError
from overtone.exchange.model_checks import refuse_aliases, refuse_other_things, refuse_wrappers, unfit
from overtone.exchange.signals import Sources

ADVICE = "lower the learning rate or clip the gradient, and go on from a checkpoint"


class Parameters:
    """A model's parameters by name. Tied parameters appear once.

    The parameters that require a gradient at this moment are exchanged.
    """

    def __init__(self, model: nn.Module, inner: torch.optim.Optimizer) -> None:
        refuse_other_things(model, inner)
        refuse_wrappers(model, inner)
        self._model, self._inner = model, inner
        self.replaced = False  # the replica was given another model or optimizer
        self.all = _named(model)
        self.trainable = {name: p for name, p in self.all.items() if p.requires_grad}
        self.exchanged = list(self.trainable.values())
        for name, p in self.all.items():
            if why := unfit(p):
                raise ModelError(f"parameter {name}: {why}")
        refuse_aliases(self.all)
        self._shapes = {name: p.shape for name, p in self.all.items()}
        self._refuse_unfit_for_exchange()
        self._held = _held(inner)
        self._refuse_foreign()

    def _refuse_unfit_for_exchange(self) -> None:
        """Refuse a model without trainable values, or with trainable parameters of a type that cannot be averaged.

        Frozen parameters may be of any type: they are broadcast once, as bytes, and never exchanged.
        """
        if not self.trainable:
            raise ModelError("model: no parameter requires a gradient, so there is nothing to train or exchange")
        for name, p in self.trainable.items():
            if not p.is_floating_point() or p.element_size() == 1:  # eight bits are too few for sums
                raise ModelError(
                    f"parameter {name}: is {p.dtype}; only real floating-point numbers can be exchanged, of 16 bits or "
                    "more: convert it, or freeze it"
                )
        if not any(p.numel() for p in self.trainable.values()):
            raise ModelError(
                f"model: its {len(self.trainable)} trainable parameters have no values (a size is 0), so there is "
                "nothing to train or exchange"
            )

    def _refuse_foreign(self) -> None:
        if not any(id(p) in self._held for p in self.trainable.values()):
            raise ModelError(
                "inner: the optimizer holds none of the model's parameters; build it from this model's own"
            )
        foreign = self._held.keys() - {id(p) for p in self.all.values()}
        if foreign:
            raise ModelError(
                f"inner: {len(foreign)} of its parameters are not the model's, so other replicas would never hear of "
                "them; make them part of the model"
            )

    @property
    def tensors(self) -> list[Tensor]:
        """The exchanged parameters, detached, for reading and writing."""
        return [p.detach() for p in self.exchanged]

    @property
    def frozen(self) -> list[Tensor]:
        """The parameters that are not exchanged, detached."""
        return [p.detach() for name, p in self.all.items() if name not in self.trainable]

    def changed(self) -> str:
        """How the parameters differ from those at the start, as an error text. Empty if they do not.

        New parameters would train without being exchanged, and the answers of a round would go into old parameters that
        the model does not use any more.
        """
        if self.replaced:
            return "model or inner was replaced by another after the Replica was built; build a new Replica"
        changed = _changed(self.all, _named(self._model))
        if changed:
            return f"parameter {changed}"
        for name, p in self.all.items():
            if p.shape != self._shapes[name]:
                was = tuple(self._shapes[name])
                return f"parameter {name} is {tuple(p.shape)} and was {was}; build a new Replica for another model"
            if p.requires_grad and name not in self.trainable:
                return f"parameter {name} became trainable after the Replica was built; unfreeze it before"
        if _held(self._inner).keys() != self._held.keys():
            return (
                "the inner optimizer holds other parameters than when the Replica was built; build a new Replica after "
                "add_param_group()"
            )
        return ""

    def not_finite(self, sources: Sources, what: str, step: int, replicas: int) -> str:
        """Why the signal cannot be sent: it is not finite, or the sum over all replicas could overflow. Else empty.

        The text names the parameter and a way out. ``sources`` are those of `Signal`; ``what`` is the signal's name.
        """
        # The fast test, in one pass: if all norms are small enough, the signal is finite.
        plus, minus = sources.plus, sources.minus
        norms = [_norm32(tensor).to(plus[0].device) for tensor in (plus if minus is None else minus)]
        # A drift is the difference of two such tensors, and the drifts of all replicas will be summed.
        most = torch.finfo(torch.float32).max / (2 * replicas)
        if bool((torch.stack(norms) <= most).all()):  # false if a norm is NaN
            return ""
        tensors = plus if minus is None else [a.float() - b.float() for a, b in zip(plus, minus, strict=True)]
        # The exact test in fp64: large weights alone are no reason to refuse a small drift.
        squares = sum(float(torch.linalg.vector_norm(t, dtype=torch.float64)) ** 2 for t in tensors)
        if math.sqrt(squares) <= most:
            return ""
        for name, tensor in zip(self.trainable, tensors, strict=True):
            bad = int((~torch.isfinite(tensor)).sum())
            if bad:
                share = f"{bad} of {tensor.numel()} values"
                return f"the {what} of parameter {name} has {share} that are not finite at step {step}; {ADVICE}"
        return f"the {what} is too large for a sum of {replicas} in fp32 at step {step}; {ADVICE}"

    def overflowing_sum(self, index: int | None, what: str, step: int) -> str:
        """The error text for a sum that is not finite, though the signals of all replicas are.

        ``index`` is the parameter; None stands for a buffer.
        """
        named = "" if index is None else list(self.trainable)[index]
        told = f"the {what}s of parameter {named}" if named else "the changes of a buffer"
        return f"{told} are finite on every rank, but their sum is not at step {step}; {ADVICE}"

    def overflow(self, index: int, step: int) -> str:
        """The error text for a parameter whose residual has become too large for fp32."""
        name = list(self.trainable)[index]
        return f"the residual of parameter {name} is not finite any more at step {step}; {ADVICE}"


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    return {plain_name(name): p for name, p in model.named_parameters()}


def _held(inner: torch.optim.Optimizer) -> dict[int, nn.Parameter]:
    """An optimizer's parameters by their `id`. The parameters are kept too, so that Python cannot reuse an `id`."""
    return {id(p): p for group in inner.param_groups for p in group["params"]}


def _changed(before: Mapping[str, nn.Parameter], now: Mapping[str, nn.Parameter]) -> str:
    """Which parameter was replaced, added, removed or swapped, as an error text. Empty if there is none.

    The same parameters under new names are accepted. The same parameters with exchanged names are not.
    """
    if before.keys() == now.keys():
        swapped = next((name for name, p in now.items() if p is not before[name]), "")
        if swapped and {id(p) for p in now.values()} == {id(p) for p in before.values()}:
            return f"{swapped} changed its place with another after the Replica was built; build a new Replica"
    known, present = ({id(p) for p in named.values()} for named in (before, now))
    for name, p in now.items():
        if id(p) not in known and name in before:
            return (
                f"{name} was replaced by another after the Replica was built; write into it (load_state_dict without "
                "assign=True), or build a new Replica"
            )
        if id(p) not in known:
            return f"{name} was added after the Replica was built; build a new Replica for the larger model"
    for name, p in before.items():
        if id(p) not in present:
            return f"{name} was removed after the Replica was built; build a new Replica for the smaller model"
    return ""


def _norm32(tensor: Tensor) -> Tensor:
    narrow = tensor.element_size() < 4  # in a 16-bit type, the norm of an ordinary tensor can overflow
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float32 if narrow else None)
    return norm.to(torch.float32)


def plain_name(name: str) -> str:
    """The name without the prefix of `torch.compile`, so that compiled and plain models have the same names."""
    return name.replace("_orig_mod.", "")
