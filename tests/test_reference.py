"""The published path that `overtone bench codec` measures against does what it should, whichever transform it uses."""

import pytest
import torch

from overtone.bench.reference import TRANSFORMS, Reference, outer_step
from overtone.coding.layout import Layout
from overtone.rules import Published


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("shape", [(64, 128), (30, 77), (100,)])
def test_transforms_agree_and_invert(name: str, shape: tuple[int, ...]) -> None:
    store, drift = torch.randn(shape), torch.randn(shape)
    total = store + drift
    whole = Reference(4096, TRANSFORMS[name])
    message = whole.encode(store, drift)
    assert float(store.abs().max()) < 1e-5  # everything was sent
    assert torch.allclose(whole.decode([message], shape), total, atol=1e-5)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_what_is_sent_and_what_is_kept_add_up(name: str) -> None:
    drift = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
    store, plain = torch.zeros(128, 64), torch.zeros(128, 64)
    message = Reference(32, TRANSFORMS[name]).encode(store, drift)
    expected = Reference(32).encode(plain, drift)
    assert torch.equal(message[0].sort(dim=-1).values, expected[0].sort(dim=-1).values)
    assert torch.allclose(store, plain, atol=1e-5)
    sent = Reference(32).decode([message] * 4, (128, 64))
    assert torch.allclose(sent + store, drift, atol=1e-5)


def test_the_outer_step_is_that_of_the_published_rule() -> None:
    """`rules.Published` makes it on coefficients; it is linear, so it is the same on weights."""
    anchor, momentum, drift, mean = torch.randn(4, 1, 50, generator=torch.Generator().manual_seed(0)).unbind(0)
    state = {"anchor": anchor.clone(), "momentum": momentum.clone(), "drift": drift}
    layout, weights = Layout.flat([(50,)]), torch.empty(50)
    Published(lr=0.7, decay=0.9).absorb(state, mean, layout.target(layout.slabs[0], layout.matrices([weights])))
    outer_step(anchor, momentum, drift, mean, lr=0.7, decay=0.9)
    assert torch.allclose(anchor, state["anchor"], atol=1e-6)
    assert torch.equal(weights, state["anchor"][0])
    assert torch.allclose(momentum, state["momentum"], atol=1e-6)
