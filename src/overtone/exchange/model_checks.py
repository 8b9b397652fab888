"""Which models and optimizers cannot be exchanged, and why: asked once, when a replica is built."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from overtone.errors import ModelError

# By name, since only transports may import torch.distributed. What each does behind a replica's back:
WRAPPERS = {
    "DistributedDataParallel": "averages every gradient by itself, uncounted",
    "FullyShardedDataParallel": "holds a shard of the weights on each rank",
    "FSDPModule": "holds a shard of the weights on each rank",
}
OPTIMIZERS = {
    "ZeroRedundancyOptimizer": "broadcasts weights between ranks by itself",
    "PostLocalSGDOptimizer": "averages weights between ranks by itself",
}
SHARDED_TENSOR = "DTensor"


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


def refuse_other_things(model: object, inner: object) -> None:
    if not isinstance(model, nn.Module):
        raise ModelError(f"model={model!r}: give the torch.nn.Module to train")
    if not hasattr(inner, "param_groups") or not callable(getattr(inner, "step", None)):
        raise ModelError(f"inner={inner!r}: give the model's torch.optim.Optimizer, such as AdamW(model.parameters())")


def refuse_wrappers(model: nn.Module, inner: torch.optim.Optimizer) -> None:
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
    for kind in _torch_classes(inner) & OPTIMIZERS.keys():
        raise ModelError(f"inner: is a {kind}, which {OPTIMIZERS[kind]}; pass the plain optimizer")


def _torch_classes(thing: object) -> set[str]:
    """The names of torch's own classes that a thing is of."""
    return {kind.__name__ for kind in type(thing).__mro__ if kind.__module__.startswith("torch.")}


def refuse_aliases(named: Mapping[str, nn.Parameter]) -> None:
    """Two parameters with one memory: their drift would count twice. (Tied ones are one parameter, and fine.)"""
    places: dict[tuple[torch.device, int], str] = {}
    for name, p in named.items():
        if p.numel() and (other := places.setdefault((p.device, p.data_ptr()), name)) != name:
            raise ModelError(
                f"parameters {other} and {name}: share their memory, but are not one parameter; tie them by assigning "
                "the same nn.Parameter to both"
            )
