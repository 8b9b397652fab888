"""What .ci/package asks of an installed overtone. Run with the Python of an empty environment, far from the source."""

from __future__ import annotations

import importlib.util
import sys
from importlib import metadata
from pathlib import Path


def library() -> None:
    """torch is enough to train."""
    import overtone

    assert Path(sys.prefix) in Path(overtone.__file__).parents, f"not the installed one: {overtone.__file__}"
    assert metadata.version("overtone") == overtone.__version__
    for name in ("tyro", "rich", "numba", "transformers"):
        assert importlib.util.find_spec(name) is None, f"{name}: the library alone does not need it"
    import torch

    model = torch.nn.Linear(70, 70)
    inner = torch.optim.AdamW(model.parameters())
    replica = overtone.Replica(model, inner, overtone.decoupled(every=2))
    for _ in range(4):
        model(torch.ones(2, 70)).square().mean().backward()
        replica.step()
        inner.zero_grad()
    replica.finish()
    assert replica.rounds >= 2


def page(file: str) -> None:
    """The page has its template, style, scripts and Chart.js; the licences are in the wheel."""
    text = Path(file).read_text()
    for part in ("<!doctype html", "Chart.js v", "prefers-color-scheme", "window.overtone"):
        assert part.lower() in text.lower(), f"{part}: not in the page"
    kept = metadata.files("overtone") or []
    licences = [path for path in kept if "licenses" in path.parts]
    assert any(path.name == "LICENSE" for path in licences), licences
    assert any("chart" in path.name.lower() for path in licences), licences


if __name__ == "__main__":
    {"library": library, "page": page}[sys.argv[1]](*sys.argv[2:])
