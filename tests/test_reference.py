"""The published path that `overtone bench codec` measures against does what it should, whichever transform it uses."""

import pytest
import torch

from overtone.bench.reference import TRANSFORMS, Reference


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
