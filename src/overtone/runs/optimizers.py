"""The inner optimisers that a run can choose, and how their learning rate moves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from overtone.errors import ConfigError
from overtone.runs.config import Training


def build(model: nn.Module, training: Training) -> torch.optim.Optimizer:
    return INNER[training.inner](model, training)


def _adamw(model: nn.Module, training: Training) -> torch.optim.Optimizer:
    return _adamw_of([p for p in model.parameters() if p.requires_grad], training)


def _adamw_of(parameters: list[nn.Parameter], training: Training) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=training.inner_lr, betas=(0.9, 0.95), weight_decay=training.weight_decay)


def _sgd(model: nn.Module, training: Training) -> torch.optim.Optimizer:
    trainable = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(
        trainable, lr=training.inner_lr, momentum=0.9, nesterov=True, weight_decay=training.weight_decay
    )


def _muon(model: nn.Module, training: Training) -> torch.optim.Optimizer:
    """Muon for the matrices, AdamW for all else, among it embeddings and a language model's output, as its authors
    advise. The step is scaled to AdamW's usual size, so that one learning rate serves both."""
    if not hasattr(torch.optim, "Muon"):
        raise ConfigError(f"inner=muon: torch {torch.__version__} has none; 2.9 and later do")
    ends = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None:
        ends.add(id(head.weight))
    trainable = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trainable if p.ndim == 2 and id(p) not in ends]
    others = [p for p in trainable if p.ndim != 2 or id(p) in ends]
    if not matrices:
        return _adamw_of(others, training)
    muon = torch.optim.Muon(
        matrices, lr=training.inner_lr, weight_decay=training.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    return Together(muon, _adamw_of(others, training)) if others else muon


INNER: dict[str, Callable[[nn.Module, Training], torch.optim.Optimizer]] = {
    "adamw": _adamw, "sgd": _sgd, "muon": _muon,
}  # fmt: skip


INNER_STATES = {"adamw": 2, "sgd": 1, "muon": 1}  # vectors as long as the weights that each keeps, mostly


class Together(torch.optim.Optimizer):
    """Several optimisers, each with parameters of its own, as one."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([dict(group) for part in parts for group in part.param_groups], {})
        self._join()

    def _join(self) -> None:
        # The very same groups: who sets a learning rate here sets it there.
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = closure() if closure is not None else None
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for part, saved in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(saved)
        self._join()


class Schedule:
    """The learning rate as a function of the step and nothing else: there is no state to lose."""

    def __init__(self, training: Training) -> None:
        self.warmup = training.resolved().warmup or 0
        self.steps = training.steps
        self.peak = training.inner_lr
        self.after = AFTER[training.schedule]

    def rate(self, step: int) -> float:
        """For the step that follows ``step`` earlier ones: linear warm-up, then the chosen shape."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        return self.peak * self.after(min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup)))

    def set(self, inner: torch.optim.Optimizer, step: int) -> None:
        for group in inner.param_groups:
            group["lr"] = self.rate(step)


def _cosine(done: float) -> float:
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def _wsd(done: float) -> float:
    return min(1.0, 5 * (1 - done))


AFTER: dict[str, Callable[[float], float]] = {"cosine": _cosine, "wsd": _wsd, "constant": lambda _: 1.0}
