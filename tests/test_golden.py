"""Golden histories: a model whose gradient is constant, so that every number of every round can be followed by hand.

The files under tests/golden hold the weights after each step on two replicas. They change only when a method's
arithmetic changes, which must be a decision: `python tests/test_golden.py` writes them anew.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import overtone
from overtone import Cluster, Method
from scenario import METHODS

FOLDER = Path(__file__).parent / "golden"
STEPS = 7


class Constant(nn.Module):
    """weight · slope: its gradient is the slope, whatever the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(32, 32))
        self.vector = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))


def slope(rank: int) -> torch.Tensor:
    """(32, 32): numbers of a linear congruence, different for each rank; exact in binary.

    Without a pattern on purpose: a regular one has coefficients that are zero but for rounding, and one bit of such a
    coefficient is the sign of that rounding, which is another on another CPU.
    """
    state, values = 12345 + 777 * rank, []
    for _ in range(1024):
        state = (1103515245 * state + 12345) % 2**31
        values.append((state >> 16) % 256 - 127.5)
    return torch.tensor(values).view(32, 32) / 256


def history(method: Method) -> dict[str, list[list[float]]]:
    def make(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Constant()
        return model, torch.optim.SGD(model.parameters(), lr=0.5)

    cluster = Cluster(make, method, replicas=2)
    seen: dict[str, list[list[float]]] = {"replica 0": [], "replica 1": []}
    for step in range(STEPS + 1):
        if step < STEPS:
            for replica in cluster.turns():
                rank = replica.transport.rank
                replica.model.matrix.grad = slope(rank)
                replica.model.vector.grad = torch.tensor([0.25, -0.5, 1.0 + rank])
            cluster.step()
        else:
            cluster.finish()
        for replica in cluster.replicas:
            matrix = replica.model.matrix.detach()
            row = [*matrix.flatten()[:: 1024 // 8].tolist(), float(matrix.norm()), *replica.model.vector.tolist()]
            seen[f"replica {replica.transport.rank}"].append([float(f"{value:.6g}") for value in row])
    return seen


@pytest.mark.parametrize("name", METHODS)
def test_history(name: str) -> None:
    golden = json.loads((FOLDER / f"{name}.json").read_text())
    found = history(METHODS[name])
    for replica, steps in golden.items():
        for step, (expected, seen) in enumerate(zip(steps, found[replica], strict=True)):
            assert seen == pytest.approx(expected, rel=1e-4, abs=1e-5), f"{replica}, step {step}"


def test_diloco_by_hand() -> None:
    """One weight, slope 1 on both replicas, inner lr 0.5, two steps a round: every drift is 1.

    M: 1, 1.9, 2.71 …; step = η (1 + μ M) = 0.7 · 1.9 = 1.33, 0.7 · 2.71 = 1.897, 0.7 · 3.439 = 2.4073.
    """

    def make(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model, torch.optim.SGD(model.parameters(), lr=0.5)

    cluster = Cluster(make, overtone.diloco(every=2, lr=0.7, momentum=0.9), replicas=2)
    found = []
    for _ in range(6):
        for replica in cluster.turns():
            replica.model.weight.grad = torch.ones(1, 1)
        if cluster.step():
            found.append(float(cluster.replicas[0].model.weight.detach()))
    assert found == pytest.approx([-1.33, -1.33 - 1.897, -1.33 - 1.897 - 2.4073], abs=1e-6)


def test_decoupled_by_hand() -> None:
    """A 2 x 2 matrix, one value sent a round at full precision, no momentum, step 1, carry 1, one replica.

    Drift (3, 2, 0, 0) each round. Round 1: residual (3, 2), send the 3: anchor −(3, 0), carried −(0, 2).
    Round 2: residual (3, 4), send the 4: anchor −(3, 4), carried −(3, 0): weights always at minus the sum of drifts.
    """
    model = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(model.weight)
    method = overtone.decoupled(every=1, keep=1024, bits=32, lr=1.0, decay=1.0, transform="none", drain=0)
    method = replace(method, codec=replace(method.codec, plain_below=0))
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    replica = overtone.Replica(model, inner, method, overtone.Solo())
    anchors, own = [], []
    for _ in range(2):
        model.weight.grad = torch.tensor([[3.0, 2.0], [0.0, 0.0]])
        replica.step()
        own.append(model.weight.detach()[0].tolist())
        with replica.anchor():
            anchors.append(model.weight.detach()[0].tolist())
    assert anchors == [[-3.0, 0.0], [-3.0, -4.0]]
    assert own == [[-3.0, -2.0], [-6.0, -4.0]]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each, row in METHODS.items():
        (FOLDER / f"{each}.json").write_text(json.dumps(history(row), indent=1) + "\n")
