"""How functions are compiled by numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile a function with numba."""
    # No fastmath: it would round differently from torch.
    try:
        return cast(F, numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:  # no place for the cache: the installation is read-only and there is no home directory
        return cast(F, numba.njit(nogil=True)(function))
