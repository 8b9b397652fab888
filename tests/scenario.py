"""What many tests share: a model with everything awkward in it, data per rank, and every method with small numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import overtone
from overtone import Cluster, Method, Replica

EVERY = 3
SMALL = {"every": EVERY, "keep": 300}


def small(row: Callable[..., Method]) -> Method:
    """A row of the table with rounds and messages short enough for a test."""
    return row(**{name: value for name, value in SMALL.items() if name in inspect.signature(row).parameters})


def first(**options: object) -> Method:
    """Decoupled with the numbers of the first version and these options. Its histories prove that the arithmetic stays
    as it was; the numbers of today's defaults may change."""
    return overtone.decoupled(**{**SMALL, "preset": "first", **options})  # type: ignore[arg-type]


# Every row of the table, and rows whose rounds meet or overlap in another way. Each must pass the same tests.
METHODS = {
    **{name: small(row) for name, row in overtone.METHODS.items()},
    # Not "auto": that would depend on the number of replicas.
    "decoupled": first(exchange="gathered"),
    "decoupled, sharded": first(exchange="sharded", keep_down=700),
    "decoupled, delayed": first(delay=2),
    "decoupled, sharded, delayed": first(exchange="sharded", delay=EVERY),
    "decoupled_hadamard": first(transform="hadamard"),
    "decoupled, turning": first(transform="turning", exchange="gathered"),
    "decoupled, turning, sharded, delayed": first(transform="turning", exchange="sharded", delay=2, momentum=0.7),
    "decoupled, thin": first(chunk=128, plain_keep=512, exchange="gathered"),
    "decoupled, first rounds, delayed": first(
        first_rounds=1, first_keep=900, exchange="sharded", delay=1, momentum=0.7
    ),
    "decoupled, budget": first(keep=None, budget="10kB", exchange="gathered"),
    "decoupled, sharded, budget, delayed": first(keep=None, budget="10kB", exchange="sharded", delay=2, momentum=0.7),
    "decoupled, today": overtone.decoupled(**SMALL, exchange="gathered"),
    "decoupled, today, sharded, delayed": overtone.decoupled(**SMALL, exchange="sharded", delay=2),
    "diloco, delayed": overtone.diloco(every=EVERY, delay=1),
    "published, delayed": overtone.published(**SMALL, delay=EVERY),
}
SPEAKING = {name: method for name, method in METHODS.items() if method.every is not None}
CONSENSUS = {name: method for name, method in METHODS.items() if method.consensus}


class Awkward(nn.Module):
    """0-d to 5-d tensors, prime sizes, a tied matrix, a frozen one, an unused one, BatchNorm, a constant mask."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 7, 3, bias=False)
        self.norm = nn.BatchNorm2d(7)
        self.up = nn.Linear(7 * 36, 67)
        self.square = nn.Linear(67, 67, bias=False)
        self.tied = nn.Linear(67, 67, bias=False)
        self.tied.weight = self.square.weight
        self.frozen = nn.Linear(67, 67, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3, 2))
        self.five = nn.Parameter(torch.randn(2, 3, 1, 5, 7) * 0.1)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.down = nn.Linear(67, 10)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x))).flatten(1)
        x = torch.tanh(self.up(x))
        x = torch.tanh(self.tied(torch.tanh(self.square(x))) + self.frozen(x))
        return self.gain * self.down(x) + self.five.mean() + self.five.square().sum() * 0.01


def build(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(17 + rank)  # ranks start apart: joining must bring them together
    model = Awkward()
    trainable = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(trainable, lr=3e-3)


def batches(rank: int, size: int = 12) -> Iterator[tuple[Tensor, Tensor]]:
    """Noisy images of ten patterns, a stream per rank."""
    patterns = torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    dice = torch.Generator().manual_seed(1000 + rank)
    while True:
        y = torch.randint(10, (size,), generator=dice)
        yield patterns[y] + 0.5 * torch.randn(size, 1, 8, 8, generator=dice), y


def backward(replica: Replica, batch: tuple[Tensor, Tensor]) -> float:
    replica.inner.zero_grad()
    loss = F.cross_entropy(replica.model(batch[0]), batch[1])
    loss.backward()
    return float(loss.detach())


def run_cluster(method: Method, replicas: int, steps: int, **options: object) -> Cluster:
    """The scenario in the simulator, `finish` included."""
    cluster = Cluster(build, method, replicas=replicas, **options)
    streams = [batches(rank) for rank in range(replicas)]
    for _ in range(steps):
        for replica in cluster.turns():
            backward(replica, next(streams[replica.transport.rank]))
        cluster.step()
    cluster.finish()
    return cluster


def run_replica(method: Method, steps: int) -> Replica:
    """The same scenario in a world of real processes, from one of them."""
    import torch.distributed as dist

    rank = dist.get_rank()
    replica = Replica(*build(rank), method)
    stream = batches(rank)
    for _ in range(steps):
        backward(replica, next(stream))
        replica.step()
    replica.finish()
    return replica


def weights(replica: Replica) -> dict[str, Tensor]:
    """Parameters and buffers, copied."""
    return {name: tensor.clone() for name, tensor in replica.model.state_dict().items()}


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(
        (float((a[n].double() - b[n].double()).nan_to_num(0.0).abs().max()) for n in a if a[n].numel()), default=0.0
    )
