"""`demo` and `published` against plain transcriptions of their formulas, written without any of overtone's parts."""

import math

import pytest
import torch
import torch.nn.functional as F
from scipy.fft import dctn, idctn
from torch import Tensor, nn

import overtone
from overtone import Cluster

SHAPES = [(128, 64), (64, 192), (9,)]  # two matrices of whole chunks, and a vector, which travels whole


class Tensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(s) * 0.2) for s in SHAPES)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.weights
        return torch.tanh(torch.tanh(x @ a) @ b)[:, :9] * c


def gradients(model: Tensors, step: int, rank: int) -> list[Tensor]:
    x = torch.randn(8, 128, generator=torch.Generator().manual_seed(1000 * step + rank))
    loss = F.mse_loss(model(x), x[:, :9].cos())
    return list(torch.autograd.grad(loss, list(model.parameters())))


def chunks_of(matrix: Tensor) -> Tensor:
    """(rows, cols) to (chunks, 64, 64)."""
    rows, cols = matrix.shape
    return matrix.view(rows // 64, 64, cols // 64, 64).transpose(1, 2).reshape(-1, 64, 64)


def matrix_of(chunks: Tensor, shape: tuple[int, ...]) -> Tensor:
    rows, cols = shape
    return chunks.view(rows // 64, cols // 64, 64, 64).transpose(1, 2).reshape(rows, cols)


def dct(x: Tensor) -> Tensor:
    return torch.from_numpy(dctn(x.numpy(), axes=(1, 2), norm="ortho"))


def idct(x: Tensor) -> Tensor:
    return torch.from_numpy(idctn(x.numpy(), axes=(1, 2), norm="ortho"))


def strongest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k strongest coefficients of each chunk (others zero), and where they are."""
    flat = x.reshape(len(x), -1)
    where = torch.zeros_like(flat, dtype=torch.bool)
    where.scatter_(1, flat.abs().topk(k, dim=1).indices, True)
    return torch.where(where, flat, 0.0).view_as(x), where.view_as(x)


def share(momenta: list[Tensor], k: int) -> Tensor:
    """Take the strongest coefficients out of every momentum, in place; their mean over the senders, as a tensor."""
    if momenta[0].ndim == 1:
        mean = torch.stack(momenta).mean(0)
        for m in momenta:
            m.zero_()
        return mean
    total = count = torch.zeros(1)
    for m in momenta:
        sent, where = strongest(dct(chunks_of(m)), k)
        m -= matrix_of(idct(sent), m.shape)
        total, count = total + sent, count + where
    return matrix_of(idct(total / count.clamp_min(1)), momenta[0].shape)


def cluster_of(method: overtone.Method, replicas: int, lr: float) -> Cluster:
    def build(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Tensors()
        return model, torch.optim.SGD(model.parameters(), lr=lr)

    return Cluster(build, method, replicas=replicas)


def train(cluster: Cluster, steps: int) -> None:
    for step in range(steps):
        for replica in cluster.turns():
            for p, g in zip(
                replica.model.parameters(), gradients(replica.model, step, replica.transport.rank), strict=True
            ):
                p.grad = g
        cluster.step()


@pytest.mark.parametrize("replicas", [2, 3])
def test_demo(replicas: int) -> None:
    lr, decay, k, steps = 1e-3, 0.9, 32, 12
    cluster = cluster_of(overtone.demo(keep=k, decay=decay), replicas, lr)
    train(cluster, steps)

    model = Tensors()
    momenta = [[torch.zeros(s) for s in SHAPES] for _ in range(replicas)]
    for step in range(steps):
        for rank in range(replicas):
            for m, g in zip(momenta[rank], gradients(model, step, rank), strict=True):
                m.mul_(decay).add_(lr * g)  # the reference scales by the learning rate
        for i, p in enumerate(model.parameters()):
            p.data.sub_(lr * share([m[i] for m in momenta], k).sign())
    for replica in cluster.replicas:
        for ours, theirs in zip(replica.parameters.tensors, model.parameters(), strict=True):
            # Every step is ±lr. A sum that is zero but for rounding may take either sign: allow a handful of those.
            apart = (ours - theirs.detach()).abs()
            assert float((apart > 1e-6).float().mean()) < 1e-3
            assert float(apart.max()) <= 2.1 * lr * math.ceil(steps / 4)


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("decay", [0.9, 0.5])
def test_published(replicas: int, decay: float) -> None:
    inner_lr, lr, k, every, rounds = 0.5, 0.7, 32, 4, 4
    cluster = cluster_of(overtone.published(every=every, keep=k, lr=lr, decay=decay), replicas, inner_lr)
    train(cluster, every * rounds)

    models = [Tensors() for _ in range(replicas)]
    anchors = [[p.detach().clone() for p in model.parameters()] for model in models]
    momenta = [[torch.zeros(s) for s in SHAPES] for _ in range(replicas)]
    for index in range(rounds):
        drifts = []
        for rank, model in enumerate(models):
            for step in range(index * every, (index + 1) * every):
                for p, g in zip(model.parameters(), gradients(model, step, rank), strict=True):
                    p.data.sub_(inner_lr * g)
            drifts.append([a - p.detach() for a, p in zip(anchors[rank], model.parameters(), strict=True)])
        for i in range(len(SHAPES)):
            for rank in range(replicas):
                momenta[rank][i].mul_(decay).add_(drifts[rank][i])
            heard = share([m[i] for m in momenta], k)
            for rank in range(replicas):
                momenta[rank][i] += heard
                anchors[rank][i] -= lr * (drifts[rank][i] + decay * momenta[rank][i])
        for rank, model in enumerate(models):
            for p, a in zip(model.parameters(), anchors[rank], strict=True):
                p.data.copy_(a)
    for replica, model in zip(cluster.replicas, models, strict=True):
        for ours, theirs in zip(replica.model.parameters(), model.parameters(), strict=True):
            assert torch.allclose(ours, theirs, atol=3e-6)  # four rounds through an fp32 transform
    assert cluster.replicas[0].fingerprint != cluster.replicas[1].fingerprint  # they drift, as published
