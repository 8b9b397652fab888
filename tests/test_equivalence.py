"""Special cases that must reduce to something known, with the tolerance written down."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import overtone
import worlds
from overtone import Cluster, Method, Replica, Solo
from overtone.codec import Dense, TopK
from overtone.exchange.signals import Drift
from overtone.rules import Outer
from scenario import Awkward, backward, batches, build, largest_difference, run_cluster, weights
from whole import encode_all

ULPS = 4 * torch.finfo(torch.float32).eps  # torch's SGD may fuse a multiply with an add; we never do


def linear_cluster(method: Method, replicas: int = 3) -> Cluster:
    def make(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(70, 66), nn.Tanh(), nn.Linear(66, 3))
        return model, torch.optim.SGD(model.parameters(), lr=0.05)

    return Cluster(make, method, replicas=replicas)


def train(cluster: Cluster, steps: int) -> list[dict[str, Tensor]]:
    """The cluster's weights before each step, per replica 0; data depends on rank and step only."""
    for step in range(steps):
        for replica in cluster.turns():
            dice = torch.Generator().manual_seed(100 * step + replica.transport.rank)
            x = torch.randn(16, 70, generator=dice)
            replica.inner.zero_grad()
            F.mse_loss(replica.model(x), x[:, :3].sin()).backward()
        cluster.step()
    return [weights(replica) for replica in cluster.replicas]


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.9, 0.8), (1.0, 0.0)])
def test_lossless_outer_is_sgd_on_the_mean_drift(lr: float, momentum: float) -> None:
    every = 4
    cluster = linear_cluster(overtone.diloco(every=every, lr=lr, momentum=momentum))
    reference = copy.deepcopy(cluster.replicas[0].model)
    outer = torch.optim.SGD(reference.parameters(), lr=lr, momentum=momentum, nesterov=momentum > 0)
    for index in range(6):
        start = [p.clone() for p in reference.parameters()]
        ends = []
        for rank in range(3):
            local = copy.deepcopy(reference)
            inner = torch.optim.SGD(local.parameters(), lr=0.05)
            for step in range(index * every, (index + 1) * every):
                x = torch.randn(16, 70, generator=torch.Generator().manual_seed(100 * step + rank))
                inner.zero_grad()
                F.mse_loss(local(x), x[:, :3].sin()).backward()
                inner.step()
            ends.append(list(local.parameters()))
        for p, before, *after in zip(reference.parameters(), start, *ends, strict=True):
            drifts = [before - a.detach() for a in after]
            p.grad = (drifts[0] + drifts[1] + drifts[2]) / 3
        outer.step()
    found = train(cluster, 6 * every)
    for ours in found:
        assert largest_difference(ours, reference.state_dict()) <= ULPS * 4  # six rounds of rounding


def test_outer_step_is_sgd_to_the_last_bits() -> None:
    from overtone.coding.kernels.in_torch import outer_step

    dice = torch.Generator().manual_seed(0)
    anchor = torch.randn(1000, generator=dice)
    reference = nn.Parameter(anchor.clone())
    outer = torch.optim.SGD([reference], lr=0.7, momentum=0.9, nesterov=True)
    momentum = torch.zeros_like(anchor)
    for _ in range(20):
        heard = torch.randn(1000, generator=dice) * 0.1
        reference.grad = heard.clone()
        outer.step()
        outer_step(anchor, momentum, heard, lr=0.7, mu=0.9)
    assert torch.allclose(anchor, reference.detach(), rtol=20 * ULPS, atol=20 * ULPS)


def test_keeping_everything_is_dense_bit_for_bit() -> None:
    """No transform, nothing dropped, exact values: gathering all of it is DiLoCo, on every replica, to the bit."""
    dense = overtone.diloco(every=3, lr=0.9, momentum=0.8)
    gathered = replace(dense, name="gathered", codec=TopK(keep=4096, bits=32, transform="none"))
    for a, b in zip(train(linear_cluster(dense), 12), train(linear_cluster(gathered), 12), strict=True):
        assert largest_difference(a, b) == 0.0


@pytest.mark.parametrize("transform", ["dct", "hadamard", "random"])
def test_keeping_everything_through_a_transform_is_dense(transform: str) -> None:
    dense = overtone.diloco(every=3, lr=0.9, momentum=0.8)
    for carry in (0.0, 1.0):  # with nothing left unsent there is nothing to carry
        rule = Outer(lr=0.9, momentum=0.8, carry=carry)
        gathered = Method("gathered", Drift, 3, rule, TopK(keep=4096, bits=32, transform=transform))
        a, b = train(linear_cluster(dense), 12), train(linear_cluster(gathered), 12)
        assert largest_difference(a[0], b[0]) <= 2e-6  # four round trips through the transform in fp32


def test_decoupled_with_everything_kept_is_diloco() -> None:
    diloco = overtone.diloco(every=3, lr=0.9, momentum=0.8)
    decoupled = overtone.decoupled(every=3, keep=4096, plain_keep=4096, bits=32, lr=0.9, momentum=0.8)
    a, b = train(linear_cluster(diloco), 12), train(linear_cluster(decoupled), 12)
    assert largest_difference(a[0], b[0]) <= 2e-6


@pytest.mark.parametrize("codec", [Dense(), TopK(keep=4096, bits=32, transform="none"), TopK(keep=4096, bits=32)])
def test_one_lossless_replica_is_the_inner_optimizer_alone(codec: Dense | TopK) -> None:
    method = Method("one", Drift, 3, Outer(lr=1.0, momentum=0.0), codec)
    (ours, _), (model, _) = build(0), build(0)
    replica = Replica(ours, torch.optim.SGD(ours.parameters(), lr=0.05), method, Solo())
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    for a, b, _ in zip(batches(0), batches(0), range(10), strict=False):
        backward(replica, a)
        replica.step()
        inner.zero_grad()
        F.cross_entropy(model(b[0]), b[1]).backward()
        inner.step()
    replica.finish()
    # anchor − (anchor − weight) rounds once per round, the transform a little more; ten steps let that grow.
    assert largest_difference(weights(replica), model.state_dict()) <= 5e-6


@pytest.mark.parametrize("replicas", [2, 4])
def test_ddp_on_n_replicas_is_one_on_the_n_fold_batch(replicas: int) -> None:
    def make(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 3))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    cluster = Cluster(make, overtone.ddp(), replicas=replicas)
    model, inner = make(0)
    for step in range(15):
        x = torch.randn(replicas * 8, 20, generator=torch.Generator().manual_seed(step))
        for replica in cluster.turns():
            replica.inner.zero_grad()
            part = x[replica.transport.rank * 8 :][:8]
            F.mse_loss(replica.model(part), part[:, :3]).backward()
        cluster.step(clip=0.5)
        inner.zero_grad()
        F.mse_loss(model(x), x[:, :3]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        inner.step()
    # Sums in another order; AdamW divides by √v, which at first is as small as the gradient itself.
    assert largest_difference(weights(cluster.replicas[0]), model.state_dict()) <= 1e-5


def test_error_feedback_alone_is_sparse_loco() -> None:
    """μ = 0, λ = 0, β < 1, written out: e ← β·e + g, send its top-k, θ ← θ − mean."""
    method = overtone.sparse_loco(every=1, keep=64, bits=32)
    cluster = linear_cluster(method, replicas=2)
    layout, codec = cluster.replicas[0].exchanger.layout, method.codec
    theta = layout.read([p.detach() for p in cluster.replicas[0].model.parameters()], layout.empty(torch.device("cpu")))
    errors = [torch.zeros_like(theta) for _ in range(2)]
    reference = copy.deepcopy(cluster.replicas[0].model)
    for step in range(5):
        sent = []
        for rank in range(2):
            local = copy.deepcopy(reference)
            x = torch.randn(16, 70, generator=torch.Generator().manual_seed(100 * step + rank))
            F.mse_loss(local(x), x[:, :3].sin()).backward()
            moved = [p.detach() - 0.05 * p.grad for p in local.parameters()]  # type: ignore[operator]
            start = [p.detach() for p in reference.parameters()]
            drift = layout.read([a - b for a, b in zip(start, moved, strict=True)], torch.zeros_like(theta))
            errors[rank] = 0.95 * errors[rank] + drift
            _, dense = encode_all(codec, errors[rank], layout)
            errors[rank] = errors[rank] - dense
            sent.append(dense)
        theta = theta - (sent[0] + sent[1]) / 2
        layout.write(theta, [p.detach() for p in reference.parameters()])
    found = train(cluster, 5)
    assert largest_difference(found[0], reference.state_dict()) <= 1e-6


def test_tied_weights_are_sent_once() -> None:
    model = Awkward()
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1), overtone.decoupled(), Solo())
    assert replica.exchanger.layout.size == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert "tied.weight" not in replica.parameters.all


def test_carry_keeps_the_unsent_drift_in_the_weights() -> None:
    """With carry 1, decay 1 and one replica, weight = anchor − residual: no local progress is thrown away."""
    cluster = run_cluster(overtone.decoupled(every=3, keep=20, drain=0), replicas=1, steps=6)
    replica = cluster.replicas[0]
    assert float(replica.state.tensors["residual"].norm()) == 0.0  # finish() ended on the anchor
    cluster = Cluster(build, overtone.decoupled(every=3, keep=20), replicas=2)
    streams = [batches(rank) for rank in range(2)]
    for _ in range(6):
        for replica in cluster.turns():
            backward(replica, next(streams[replica.transport.rank]))
        cluster.step()
    for replica in cluster.replicas:
        mine = replica.exchanger.layout.read(
            replica.parameters.tensors, torch.zeros_like(replica.state.tensors["anchor"])
        )
        expected = replica.state.tensors["anchor"] - replica.state.tensors["residual"]
        assert torch.allclose(mine, expected, atol=1e-5)
        assert float(replica.state.tensors["residual"].norm()) > 0.0


# -- gradients that are zero, and gradients that are not there ---------------------------------------------------------


class Branches(nn.Module):
    """A part that only rank 0 uses, and only in some steps; a part that nobody uses; a branch that begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(12, 12)
        self.sometimes = nn.Linear(12, 12)
        self.never = nn.Linear(12, 12)
        self.into = nn.Linear(12, 4, bias=False)
        self.out = nn.Linear(4, 12, bias=False)
        nn.init.zeros_(self.out.weight)  # as in LoRA: the first gradient of `into` is exactly zero

    def loss(self, rank: int, step: int) -> Tensor:
        x = torch.randn(8, 12, generator=torch.Generator().manual_seed(10 * step + rank))
        y = torch.tanh(self.base(x)) + self.out(self.into(x))
        if rank == 0 and step % 3:
            y = y + self.sometimes(x)
        return (y - x.sin()).square().mean() * (0.0 if step in (2, 5, 6) else 1.0)


def branches(rank: int, inner: str) -> tuple[Branches, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Branches()
    if inner == "sgd":
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def by_hand(inner: str, replicas: int, steps: int = 10) -> dict[str, Tensor]:
    """Plain data parallelism: None where nobody had a gradient, else the mean with zeros for those who had none."""
    model, optimizer = branches(0, inner)
    for step in range(steps):
        found: dict[str, list[Tensor]] = {}
        for rank in range(replicas):
            model.zero_grad()
            model.loss(rank, step).backward()
            for name, p in model.named_parameters():
                found.setdefault(name, [])
                if p.grad is not None:
                    found[name].append(p.grad.clone())
        for name, p in model.named_parameters():
            p.grad = sum(found[name][1:], found[name][0]) / replicas if found[name] else None
        optimizer.step()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def exchanged(replica: Replica, step: int) -> None:
    replica.inner.zero_grad()
    replica.model.loss(replica.transport.rank, step).backward()


@pytest.mark.parametrize("inner", ["sgd", "adamw"])
def test_ddp_is_the_bare_loop_where_gradients_are_zero_or_missing(inner: str) -> None:
    replica = Replica(*branches(0, inner), overtone.ddp(), Solo())
    for step in range(10):
        exchanged(replica, step)
        replica.step()
    assert largest_difference(weights(replica), by_hand(inner, 1)) == 0.0
    cluster = Cluster(lambda rank: branches(rank, inner), overtone.ddp(), replicas=2)
    for step in range(10):
        for replica in cluster.turns():
            exchanged(replica, step)
        cluster.step()
    for replica in cluster.replicas:
        assert largest_difference(weights(replica), by_hand(inner, 2)) == 0.0
        assert replica.model.never.weight.grad is None


def missing_gradients() -> dict[str, tuple[dict[str, Tensor], int]]:
    """The same in real processes; demo too, whose messages are gathered."""
    rank = dist.get_rank()
    found = {}
    for inner in ("sgd", "adamw"):
        for method in (overtone.ddp(), overtone.demo(keep=4096)):
            replica = Replica(*branches(rank, inner), method)
            for step in range(10):
                exchanged(replica, step)
                replica.step()
            replica.finish()
            found[f"{inner} {method.name}"] = weights(replica), replica.transport.ledger.sent
    return found


@pytest.mark.slow
def test_missing_gradients_in_real_processes(tmp_path: Path) -> None:
    results = worlds.run(missing_gradients, size=2, folder=tmp_path)
    for result in results:
        assert "value" in result, result
    for inner in ("sgd", "adamw"):
        for method in (overtone.ddp(), overtone.demo(keep=4096)):
            cluster = Cluster(lambda rank, inner=inner: branches(rank, inner), method, replicas=2)
            for step in range(10):
                for replica in cluster.turns():
                    exchanged(replica, step)
                cluster.step()
            cluster.finish()
            for replica, result in zip(cluster.replicas, results, strict=True):
                found, sent = result["value"][f"{inner} {method.name}"]
                assert largest_difference(found, weights(replica)) == 0.0  # of two, the order of a sum does not matter
                assert sent == replica.transport.ledger.sent
                assert torch.equal(found["never.weight"], branches(0, inner)[0].never.weight)
            if method.name == "ddp":
                assert largest_difference(found, by_hand(inner, 2)) == 0.0
