"""The inner optimizers that a run can choose, and the schedule of their learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from overtone.errors import ConfigError
from overtone.runs.config import Training


def build(model: nn.Module, training: Training) -> torch.optim.Optimizer:
    """The inner optimizer of the configuration, for the trainable parameters of the model."""
    return INNER[training.inner](model, training)


def _adamw(model: nn.Module, training: Training) -> torch.optim.Optimizer:
    return _adamw_of([p for p in model.parameters() if p.requires_grad], training)


def _adamw_of(parameters: list[nn.Parameter], training: Training) -> torch.optim.Optimizer:
    # One pass over all values instead of a dozen: on a CPU a step takes a seventh of the time.
    return torch.optim.AdamW(
        parameters, lr=training.inner_lr, betas=(0.9, 0.95), weight_decay=training.weight_decay, fused=True
    )


def _sgd(model: nn.Module, training: Training) -> torch.optim.Optimizer:
    trainable = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(
        trainable, lr=training.inner_lr, momentum=0.9, nesterov=True, weight_decay=training.weight_decay
    )


def _muon(model: nn.Module, training: Training) -> torch.optim.Optimizer:
    """Muon for the matrices; AdamW for everything else, embeddings and the output layer of a language model included,
    as Muon's authors advise. Muon's step is scaled to the usual size of AdamW's: one learning rate serves both."""
    if not hasattr(torch.optim, "Muon"):
        raise ConfigError(
            f"inner=muon: torch {torch.__version__} has no Muon; use torch 2.9 or later, or --inner adamw"
        )
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
    return CombinedOptimizer(muon, _adamw_of(others, training)) if others else muon


INNER: dict[str, Callable[[nn.Module, Training], torch.optim.Optimizer]] = {
    "adamw": _adamw, "sgd": _sgd, "muon": _muon,
}  # fmt: skip


# How many vectors of the weights' length each optimizer keeps. Muon keeps two for the parameters that AdamW trains.
INNER_STATES = {"adamw": 2, "sgd": 1, "muon": 1}


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers that act as one. Each has its own parameters."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([dict(group) for part in parts for group in part.param_groups], {})
        self._join()

    def _join(self) -> None:
        # The same dictionaries as in the parts: a learning rate that is set here is set in the part.
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
    """The learning rate as a function of the step alone: there is no state to save."""

    def __init__(self, training: Training) -> None:
        self.warmup = training.resolved().warmup or 0
        self.steps = training.steps
        self.peak = training.inner_lr
        self.after = AFTER[training.schedule]

    def rate(self, step: int) -> float:
        """The learning rate of the step that follows ``step`` earlier ones: linear warm-up, then the chosen shape."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        return self.peak * self.after(min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup)))

    def set(self, inner: torch.optim.Optimizer, step: int) -> None:
        """Set the learning rate of all parameter groups for the step that follows ``step`` earlier ones."""
        for group in inner.param_groups:
            group["lr"] = self.rate(step)


def _cosine(done: float) -> float:
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def _wsd(done: float) -> float:
    return min(1.0, 5 * (1 - done))


# The shapes after the warm-up: from the share of the steps that is done to a share of the peak learning rate.
AFTER: dict[str, Callable[[float], float]] = {"cosine": _cosine, "wsd": _wsd, "constant": lambda _: 1.0}
