"""Nests of dictionaries, lists, numbers and tensors, taken apart into plain JSON and named tensors, and put together.

Nothing here can execute what it reads: JSON gives numbers and texts, the tensors are raw numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from overtone.errors import StateError


def apart(tree: Any, tensors: dict[str, Tensor], name: str = "") -> Any:
    """The tree with every tensor replaced by its name; the tensors themselves, by name, into ``tensors``."""
    if isinstance(tree, Tensor) and tree.is_complex():  # as pairs: safetensors does not know every complex type
        tensors[name] = torch.view_as_real(tree.detach().resolve_conj())
        return {"complex": name}
    if isinstance(tree, Tensor):
        tensors[name] = tree
        return {"tensor": name}
    if isinstance(tree, Mapping):  # as pairs: JSON would turn keys that are numbers into texts
        return {"map": [[key, apart(value, tensors, _below(name, key))] for key, value in tree.items()]}
    if isinstance(tree, list | tuple):
        kind = "list" if isinstance(tree, list) else "tuple"
        return {kind: [apart(value, tensors, _below(name, i)) for i, value in enumerate(tree)]}
    if isinstance(tree, bool | int | float | str | None):
        return tree
    raise StateError(f"{name}: a {type(tree).__name__} cannot be saved; only numbers, texts, tensors and nests of them")


def together(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `apart` took apart."""
    if not isinstance(tree, dict):
        return tree
    ((kind, value),) = tree.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "complex":
        return torch.view_as_complex(tensors[value])
    if kind == "map":
        return {key: together(inner, tensors) for key, inner in value}
    parts = [together(inner, tensors) for inner in value]
    return parts if kind == "list" else tuple(parts)


def _below(name: str, key: object) -> str:
    return f"{name}.{key}" if name else str(key)
