"""A model without code: parameters and buffers of the shapes and names that a description tells (wire.md, section 7).

Whoever only checks a run needs no more. Nothing of the task has to be there, and nothing of it runs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from overtone.errors import WireError, shortened
from overtone.exchange.description import Description

_TYPES = {str(kind).removeprefix("torch."): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}


def outline(description: Description) -> nn.Module:
    """A model of zeros with the same description. Raises `WireError` if it makes no sense."""
    model = nn.Module()
    for name, told in description.items():
        kind, _, path = name.partition(" ")
        if kind not in ("parameter", "buffer"):
            continue
        *modules, leaf = path.split(".")
        try:
            tensor, words = _tensor(str(told))
            module = _module(model, modules)
            if kind == "buffer":
                module.register_buffer(leaf, tensor)
            else:
                module.register_parameter(leaf, nn.Parameter(tensor, requires_grad="frozen" not in words))
        except (KeyError, RuntimeError, ValueError) as error:
            raise WireError(
                f"description: {name} is {shortened(told)}, which cannot be ({shortened(error)})"
            ) from error
    return model


def _module(model: nn.Module, names: list[str]) -> nn.Module:
    """The module of this path, which is made if it is not there."""
    for name in names:
        if name not in dict(model.named_children()):
            model.add_module(name, nn.Module())
        model = model.get_submodule(name)
    return model


def _tensor(told: str) -> tuple[Tensor, list[str]]:
    """Zeros of a shape and type such as "3x67 float32", and the words after it."""
    first, *words = told.split(", ")
    shape, _, kind = first.partition(" ")
    sizes = [] if shape == "scalar" else [int(size) for size in shape.split("x")]
    return torch.zeros(sizes, dtype=_TYPES[kind]), words
