"""Checks for models and optimizers that cannot be exchanged. They run once, when a replica is built."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from overtone.errors import ModelError

# The classes are given by name, because only transports may import torch.distributed. The texts say what each class
# does without the replica's knowledge.
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
    """Why a tensor's values cannot be read or written. Empty if they can."""
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
    """True if two indices may lead to one place in memory.

    The answer is exact for every tensor that views, transpositions and slices can make.
    """
    # From the smallest stride up: an axis is safe if its stride is beyond the reach of all smaller ones together.
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return tensor.numel() > 0
            reach += stride * (size - 1)
    return False


def refuse_other_things(model: object, inner: object) -> None:
    """Refuse a model that is no module, or an optimizer that is none."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"model={model!r}: give the torch.nn.Module to train")
    if not hasattr(inner, "param_groups") or not callable(getattr(inner, "step", None)):
        raise ModelError(f"inner={inner!r}: give the model's torch.optim.Optimizer, such as AdamW(model.parameters())")


def refuse_wrappers(model: nn.Module, inner: torch.optim.Optimizer) -> None:
    """Refuse classes that spread a model over ranks themselves.

    Replicas would average shards of different weights, or average gradients a second time.
    """
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
    """The names of torch's own classes among the classes of an object."""
    # A user's own class of the same name is no reason to refuse.
    return {kind.__name__ for kind in type(thing).__mro__ if kind.__module__.startswith("torch.")}


def refuse_aliases(named: Mapping[str, nn.Parameter]) -> None:
    """Refuse two parameters that share one memory: their drift would count twice.

    Tied parameters are one parameter, and are allowed.
    """
    places: dict[tuple[torch.device, int], str] = {}
    for name, p in named.items():
        if p.numel() and (other := places.setdefault((p.device, p.data_ptr()), name)) != name:
            raise ModelError(
                f"parameters {other} and {name}: share their memory, but are not one parameter; tie them by assigning "
                "the same nn.Parameter to both"
            )
