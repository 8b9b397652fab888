"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Mapping


def human_bytes(count: float) -> str:
    """Three digits and a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def metrics_line(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in metrics.items())
