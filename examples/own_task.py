"""A task of your own: two half moons of points, told apart by a small network.

overtone train --task examples/own_task.py --replicas 2 --steps 60 --every 10
"""

import torch
from torch import Tensor, nn

from overtone.tasks import Task, TaskOptions, Tensors


class Moons(Task):
    name = "two moons"

    def __init__(self, valid_samples: int) -> None:
        self.train = Tensors(*moons(4096, seed=0))
        self.valid = Tensors(*moons(valid_samples, seed=1))
        self.keys = self.train.columns[1]  # --skew 1 gives each of two replicas one moon only

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def measure(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, float]:
        right = model(batch[0]).argmax(1) == batch[1]
        return {"loss": float(self.loss(model, batch)), "accuracy": float(right.float().mean())}


def moons(count: int, seed: int) -> tuple[Tensor, Tensor]:  # (count, 2) and (count,)
    generator = torch.Generator().manual_seed(seed)  # the same points on every replica; overtone divides them
    angle, label = torch.rand(count, generator=generator) * torch.pi, torch.arange(count) % 2
    moon = torch.stack([angle.cos(), angle.sin()], dim=1)
    points = torch.where(label[:, None] == 0, moon, torch.tensor([1.0, 0.5]) - moon)
    return points + 0.1 * torch.randn(count, 2, generator=generator), label


def task(options: TaskOptions) -> Task:
    return Moons(options.valid_samples)
