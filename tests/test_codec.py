import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from overtone.codec import BITS, Dense, TopK, mean, quantise, select
from overtone.errors import MethodError

CPU = torch.device("cpu")


def kinds(seed: int, size: int) -> dict[str, Tensor]:
    """Vectors that quantisers and selectors have trouble with."""
    noise = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return {
        "noise": noise,
        "zeros": torch.zeros(size),
        "mostly zeros": torch.where(noise > 1.5, noise, 0.0),
        "constant": torch.full((size,), -3.0),
        "ties": noise.sign() * 2.0,
        "tiny": noise * 1e-42,
        "huge": noise * 1e37,
        "largest": noise.sign() * torch.finfo(torch.float32).max,
        "mixed": noise * torch.logspace(-30, 30, size),
    }


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    shape=st.sampled_from([(64, 64), (130, 70), (67, 67), (5, 300), (3, 3, 7), (40,), ()]),
    keep=st.sampled_from([1, 8, 32, 500, 4096]),
    bits=st.sampled_from(BITS),
    transform=st.sampled_from(["dct", "none"]),
    kind=st.sampled_from(sorted(kinds(0, 1))),
)
def test_sent_is_what_receivers_decode(
    seed: int, shape: tuple[int, ...], keep: int, bits: int, transform: str, kind: str
) -> None:
    codec = TopK(keep=keep, bits=bits, transform=transform, plain_below=30)
    layout = codec.layout([shape])
    flat = kinds(seed, layout.size)[kind]
    payload, sent = codec.encode(flat, layout)
    ours, theirs = layout.empty(CPU), layout.empty(CPU)
    sent.add_to(ours)
    codec.decode(payload, layout).add_to(theirs)
    assert torch.equal(ours, theirs)
    assert bool(torch.isfinite(ours).all())


@pytest.mark.parametrize("codec", [Dense(), TopK(keep=4096, bits=32), TopK(keep=4096, bits=32, transform="none")])
def test_lossless_codecs_lose_nothing(codec: Dense | TopK) -> None:
    layout = codec.layout([(130, 70), (9,)])
    flat = torch.randn(layout.size)
    _, sent = codec.encode(flat, layout)
    back = layout.empty(CPU)
    sent.add_to(back)
    assert codec.lossless
    assert torch.equal(back, flat)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 60), levels=st.sampled_from([1, 3, 20, 10**6]))
def test_selection_is_exact_and_ties_go_to_the_front(seed: int, k: int, levels: int) -> None:
    coeffs = torch.randint(-levels, levels + 1, (7, 60), generator=torch.Generator().manual_seed(seed)).float()
    index = select(coeffs, k)
    if k == 60:
        assert index is None
        return
    assert index is not None
    for row, chosen in zip(coeffs.abs().tolist(), index.tolist(), strict=True):
        best = sorted(range(60), key=lambda i: (-row[i], i))[:k]
        assert chosen == sorted(best)


def test_one_bit_is_sign_times_mean_magnitude() -> None:
    values = torch.tensor([[1.0, -3.0, 2.0, -2.0]])
    _, decoded = quantise(values, 1)
    assert torch.equal(decoded, torch.tensor([[2.0, -2.0, 2.0, -2.0]]))


@pytest.mark.parametrize(("bits", "worst"), [(1, 0.45), (2, 0.25), (4, 0.08), (8, 0.006), (16, 0.003), (32, 0.0)])
def test_more_bits_err_less(bits: int, worst: float) -> None:
    coeffs = torch.randn(50, 4096, generator=torch.Generator().manual_seed(0))
    index = select(coeffs, 128)
    assert index is not None
    values = coeffs.gather(1, index)
    _, decoded = quantise(values, bits)
    assert float((decoded - values).norm() / values.norm()) <= worst


@pytest.mark.parametrize("keep", [8, 32, 64, 128, 512])
@pytest.mark.parametrize("bits", [1, 2])
def test_size_is_within_six_percent_of_the_bound(keep: int, bits: int) -> None:
    """log2 C(4096, k) for the positions, k · bits for the values, 16 for the scale, of each chunk."""
    codec = TopK(keep=keep, bits=bits, transform="none")
    layout = codec.layout([(640, 640)])
    payload, _ = codec.encode(torch.randn(layout.size, generator=torch.Generator().manual_seed(0)), layout)
    bound = 100 * (math.log2(math.comb(4096, keep)) + keep * bits + 16) / 8
    assert bound <= len(payload) <= 1.06 * bound


def test_keep_is_in_proportion_to_area() -> None:
    codec = TopK(keep=128)
    layout = codec.layout([(96, 96)])
    assert {(g.h, g.w): codec.kept(g) for g in layout.groups} == {
        (64, 64): 128,
        (64, 32): 64,
        (32, 64): 64,
        (32, 32): 32,
    }


def test_mean_over_all_and_over_senders() -> None:
    codec = TopK(keep=1, bits=32, chunk=2, transform="none", plain_below=0)
    layout = codec.layout([(2, 2)])
    heard = []
    for values in ([9.0, 0.0, 0.0, 1.0], [3.0, 0.0, 0.0, 1.0], [0.0, 6.0, 0.0, 0.0]):
        payload, _ = codec.encode(torch.tensor(values), layout)
        heard.append(codec.decode(payload, layout))
    assert mean(heard, layout, CPU, over_senders=False).tolist() == [4.0, 2.0, 0.0, 0.0]
    assert mean(heard, layout, CPU, over_senders=True).tolist() == [6.0, 6.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ({"keep": 0}, "keep=0"),
        ({"keep": 4097}, "keep=4097"),
        ({"bits": 3}, "bits=3"),
        ({"chunk": 0}, "chunk=0"),
        ({"transform": "fft"}, "transform='fft'"),
        ({"plain_below": -1}, "plain_below=-1"),
    ],
)
def test_bad_numbers_are_refused_by_name(numbers: dict[str, object], told: str) -> None:
    with pytest.raises(MethodError, match=told):
        TopK(**numbers)  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_values_far_beyond_the_grid_are_sent_as_exceptions(bits: int) -> None:
    """One coefficient a thousand times its neighbours: sent nearly exactly, and the others keep their own scale."""
    values = torch.randn(3, 500, generator=torch.Generator().manual_seed(0))
    plain, _ = quantise(values, bits)
    values[1, 77] = -1000.0
    data, decoded = quantise(values, bits)
    assert float(decoded[1, 77]) == -1000.0
    others = torch.ones(3, 500, dtype=torch.bool)
    others[1, 77] = False
    assert float((decoded - values)[others].norm() / values[others].norm()) < 0.7
    assert len(data) <= len(plain) + 16


def test_a_coefficient_that_always_drifts_fastest_is_not_left_behind() -> None:
    """Error feedback at one bit: without exceptions its residual grows every round, with them it stays bounded."""
    codec = TopK(keep=2048, bits=1, transform="none", plain_below=0)
    layout = codec.layout([(64, 64)])
    dice = torch.Generator().manual_seed(0)
    residual, worst = layout.empty(CPU), 0.0
    for _ in range(50):
        residual += torch.randn(layout.size, generator=dice)
        residual[123] += 100.0
        _, sent = codec.encode(residual, layout)
        sent.add_to(residual, -1.0)
        worst = max(worst, abs(float(residual[123])))
    assert worst < 10.0
