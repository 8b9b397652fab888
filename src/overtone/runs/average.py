"""The average of replicas that share no anchor: a model nobody holds, and how far each is from it."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


@torch.no_grad()
def flat(model: nn.Module) -> Tensor:  # (weights and statistics,) float32
    """All parameters, then all floating buffers."""
    return torch.cat([tensor.detach().float().flatten() for tensor in _floating(model)])


def share_of(model: nn.Module, replicas: int) -> Tensor:
    """What a replica adds to the mean: divided first, so that the sum overflows nowhere."""
    return flat(model) / replicas


def mean_of(total: Tensor) -> Tensor:
    """What the shares add up to. A mask of the lowest float stays one, whatever rounding did."""
    limits = torch.finfo(total.dtype)
    return total.clamp(limits.min, limits.max)


@torch.no_grad()
def with_values(model: nn.Module, values: Tensor) -> nn.Module:
    """A copy of ``model`` that holds these, in the order of `flat`; counters stay as they are."""
    other = copy.deepcopy(model)
    tensors = _floating(other)
    for tensor, part in zip(tensors, values.split([t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
    return other


@torch.no_grad()
def drift_of(model: nn.Module, mean: Tensor) -> float:
    """The distance of the parameters to their mean, relative to the mean's norm."""
    count = sum(p.numel() for p in model.parameters())
    return float((flat(model)[:count] - mean[:count]).norm() / mean[:count].norm())


def _floating(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *(buffer for buffer in model.buffers() if buffer.is_floating_point())]
