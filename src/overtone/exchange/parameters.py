"""Which parameters of a model are exchanged, under which names, and what makes a model unfit for it, now or later."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from overtone.errors import ModelError
from overtone.exchange.signals import Signal

ADVICE = "lower the learning rate or clip the gradient, and go on from a checkpoint"
# By name, since only transports may import torch.distributed. What each does behind a replica's back:
WRAPPERS = {
    "DistributedDataParallel": "averages every gradient by itself, uncounted",
    "FullyShardedDataParallel": "holds a shard of the weights on each rank",
    "FSDPModule": "holds a shard of the weights on each rank",
}
OPTIMISERS = {
    "ZeroRedundancyOptimizer": "broadcasts weights between ranks by itself",
    "PostLocalSGDOptimizer": "averages weights between ranks by itself",
}
SHARDED_TENSOR = "DTensor"


class Parameters:
    """A model's parameters by name, tied ones once. Those that require a gradient now are exchanged."""

    def __init__(self, model: nn.Module, inner: torch.optim.Optimizer) -> None:
        _refuse_other_things(model, inner)
        _refuse_wrappers(model, inner)
        self._model, self._inner = model, inner
        self.all = _named(model)
        self.trainable = {name: p for name, p in self.all.items() if p.requires_grad}
        for name, p in self.all.items():
            if why := unfit(p):
                raise ModelError(f"parameter {name}: {why}")
        _refuse_aliases(self.all)
        self._shapes = {name: p.shape for name, p in self.all.items()}
        self._refuse_unfit_for_exchange()
        self._held = _held(inner)
        self._refuse_foreign()

    def _refuse_unfit_for_exchange(self) -> None:
        """Frozen parameters may be of any type: they are broadcast once, as bytes, and never exchanged."""
        if not self.trainable:
            raise ModelError("model: no parameter requires a gradient, so there is nothing to train or exchange")
        for name, p in self.trainable.items():
            if not p.is_floating_point() or p.element_size() == 1:  # nothing adds up in eight bits
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
                "inner: the optimiser holds none of the model's parameters; build it from this model's own"
            )
        foreign = self._held.keys() - {id(p) for p in self.all.values()}
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

    @property
    def frozen(self) -> list[Tensor]:
        """Those that are not exchanged."""
        return [p.detach() for name, p in self.all.items() if name not in self.trainable]

    def changed(self, model: nn.Module, inner: torch.optim.Optimizer) -> str:
        """A complaint about parameters that are not those of the start: others would train unheard, and what is heard
        would go where nobody looks."""
        if model is not self._model or inner is not self._inner:
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
                "the inner optimiser holds other parameters than when the Replica was built; build a new Replica after "
                "add_param_group()"
            )
        return ""

    def not_finite(self, signal: Signal, step: int, replicas: int) -> str:
        """Why the signal cannot be sent, if it has infinities or would overflow on the way: the parameter, and what to
        do about it. Norms that are small enough tell in one fast pass that all is well."""
        plus, minus = signal.sources()
        norms = [_norm32(tensor).to(plus[0].device) for tensor in (plus if minus is None else minus)]
        # A drift is the difference of two such tensors, and those of all replicas will be summed.
        most = torch.finfo(torch.float32).max / (2 * replicas)
        if bool((torch.stack(norms) <= most).all()):  # NaN is not
            return ""
        tensors = plus if minus is None else [a.float() - b.float() for a, b in zip(plus, minus, strict=True)]
        squares = sum(float(torch.linalg.vector_norm(t, dtype=torch.float64)) ** 2 for t in tensors)
        if math.sqrt(squares) <= most:
            return ""
        kind = type(signal).__name__.lower()
        for name, tensor in zip(self.trainable, tensors, strict=True):
            bad = int((~torch.isfinite(tensor)).sum())
            if bad:
                share = f"{bad} of {tensor.numel()} values"
                return f"the {kind} of parameter {name} has {share} that are not finite at step {step}; {ADVICE}"
        return f"the {kind} is too large for a sum of {replicas} in fp32 at step {step}; {ADVICE}"

    def overflowing_sum(self, index: int | None, signal: Signal, step: int) -> str:
        """Of which parameter everybody's signal is finite and their sum is not (None: of a buffer)."""
        what = "the changes of a buffer" if index is None else f"the {type(signal).__name__.lower()}s of parameter "
        name = "" if index is None else list(self.trainable)[index]
        return f"{what}{name} are finite on every rank, but their sum is not at step {step}; {ADVICE}"

    def overflow(self, index: int, step: int) -> str:
        """Which parameter's residual outgrew fp32, and what to do about it."""
        name = list(self.trainable)[index]
        return f"the residual of parameter {name} is not finite any more at step {step}; {ADVICE}"


def unfit(tensor: Tensor) -> str:
    """Why a tensor's values cannot be read or written, if they cannot."""
    if nn.parameter.is_lazy(tensor):
        return "has no shape yet; run a batch through the model before building the Replica"
    if tensor.is_meta:
        return "on the meta device; give it values before building the Replica"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}; only dense tensors can be sent: use to_dense()"
    if _overlaps(tensor):
        return "several of its values share memory (expand()?), so it cannot be written; give it memory by clone()"
    return ""


def _overlaps(tensor: Tensor) -> bool:
    """Two indices may lead to one place. Exact for whatever views, transpositions and slices make of a tensor."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return tensor.numel() > 0
            reach += stride * (size - 1)
    return False


def _refuse_other_things(model: object, inner: object) -> None:
    if not isinstance(model, nn.Module):
        raise ModelError(f"model={model!r}: give the torch.nn.Module to train")
    if not hasattr(inner, "param_groups") or not callable(getattr(inner, "step", None)):
        raise ModelError(f"inner={inner!r}: give the model's torch.optim.Optimizer, such as AdamW(model.parameters())")


def _refuse_wrappers(model: nn.Module, inner: torch.optim.Optimizer) -> None:
    """What spreads a model over ranks by itself: replicas would average shards, or what was averaged before."""
    for name, module in model.named_modules():
        for wrapper in _torch_classes(module) & WRAPPERS.keys():
            where = f"module {name}" if name else "it"
            raise ModelError(
                f"model: {where} is wrapped in {wrapper}, which {WRAPPERS[wrapper]}; pass the plain module, whole on "
                "every rank"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if SHARDED_TENSOR in _torch_classes(tensor):
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            raise ModelError(
                f"{kind} {name}: is a {SHARDED_TENSOR}, spread over several ranks; pass the plain module, whole on "
                "every rank"
            )
    for kind in _torch_classes(inner) & OPTIMISERS.keys():
        raise ModelError(f"inner: is a {kind}, which {OPTIMISERS[kind]}; pass the plain optimiser")


def _torch_classes(thing: object) -> set[str]:
    """The names of torch's own classes that a thing is of."""
    return {kind.__name__ for kind in type(thing).__mro__ if kind.__module__.startswith("torch.")}


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    return {plain_name(name): p for name, p in model.named_parameters()}


def _held(inner: torch.optim.Optimizer) -> dict[int, nn.Parameter]:
    """An optimiser's parameters by identity; kept, so that no other can get the same one."""
    return {id(p): p for group in inner.param_groups for p in group["params"]}


def _refuse_aliases(named: Mapping[str, nn.Parameter]) -> None:
    """Two parameters with one memory: their drift would count twice. (Tied ones are one parameter, and fine.)"""
    places: dict[tuple[torch.device, int], str] = {}
    for name, p in named.items():
        if p.numel() and (other := places.setdefault((p.device, p.data_ptr()), name)) != name:
            raise ModelError(
                f"parameters {other} and {name}: share their memory, but are not one parameter; tie them by assigning "
                "the same nn.Parameter to both"
            )


def _changed(before: Mapping[str, nn.Parameter], now: Mapping[str, nn.Parameter]) -> str:
    """Which parameter is another object than before. New names alone make no other parameters; the same names in other
    places do."""
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


def plain_name(name: str) -> str:
    """The name without what `torch.compile` puts before it, so that compiled and plain replicas can meet."""
    return name.replace("_orig_mod.", "")


def _norm32(tensor: Tensor) -> Tensor:
    narrow = tensor.element_size() < 4  # in their own type the norms of ordinary tensors overflow
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float32 if narrow else None)
    return norm.to(torch.float32)
