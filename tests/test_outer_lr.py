"""The outer learning rate that follows from a round: docs/wire.md, section 7."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import overtone
from overtone.rules import GAIN, MOST_STEP, Outer

# Keep of each 4096, and the lr for four replicas. Part of the wire: anchors of other versions depend on it.
FROZEN = {7: 12.296875, 18: 7.53125, 32: 6.046875, 56: 5.140625, 128: 4.390625, 512: 2.0625, 4096: 1.578125}


@pytest.mark.parametrize(("keep", "lr"), FROZEN.items())
def test_it_is_the_committed_one(keep: int, lr: float) -> None:
    method = overtone.decoupled(keep=keep)
    assert isinstance(method.rule, Outer)
    assert method.rule.among(4, method.codec.energy_share()) == replace(method.rule, lr=lr)
    assert method.numbers()["lr"] == "auto"


def test_a_given_one_stays() -> None:
    rule = Outer(lr=0.9, momentum=0.8, decay=0.5)
    assert rule.among(1, 0.1) == rule.among(7, 0.1) == rule


@pytest.mark.parametrize("share", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("decay", [1.0, 0.95, 0.8])
def test_a_steady_drift_moves_the_anchor_by_the_gain(share: float, decay: float) -> None:
    """Every round drifts by 1 and sends a share of what it owes. In the end the anchor moves by the gain in each."""
    lr = Outer(None, 0.0, decay).among(4, share).lr
    assert lr is not None
    owed = 0.0
    for _ in range(2000):
        owed = decay * owed + 1.0
        sent = share * owed
        owed -= sent
    # The residual also fades before it is sent, so the two shares multiply: a difference of decay times share.
    assert sent * lr == pytest.approx(min(GAIN, sent * MOST_STEP / share), rel=0.1)


def test_a_replica_alone_trains_as_its_inner_optimizer_does() -> None:
    def trained(step: object) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(64, 32)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = overtone.Replica(model, inner, overtone.decoupled(every=2, keep=8), overtone.Solo())
        for _ in range(7):
            model(torch.ones(4, 64)).square().mean().backward()
            replica.step() if step == "replica" else inner.step()
            inner.zero_grad()
        return model.weight.detach().clone()

    assert torch.allclose(trained("replica"), trained("inner"), atol=1e-6)
