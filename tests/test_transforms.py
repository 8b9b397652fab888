"""The transforms: against scipy, against each other, and to the bit."""

import math

import pytest
import scipy.fft
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from overtone.coding.kernels import in_numba, in_torch, numba_transforms
from overtone.coding.transforms import (
    DCT,
    HADAMARD,
    RANDOM,
    TRANSFORMS,
    Basis,
    Transform,
    cosine_basis,
    hadamard_gain,
    is_power_of_two,
    random_basis,
)

ALL = [transform for transform in TRANSFORMS.values() if transform is not None]
SHAPES = [(1, 1), (2, 3), (7, 64), (64, 64), (61, 5), (1, 97), (32, 64), (16, 8)]
sides = st.sampled_from([1, 2, 3, 4, 7, 8, 16, 31, 32, 64, 100, 128])


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrix_of(transform: Transform, h: int, w: int) -> Tensor:
    """The transform of (h, w) chunks as one matrix, a row for each unit chunk."""
    return transform.forward(torch.eye(h * w).view(h * w, h, w)).view(h * w, h * w)


@pytest.mark.parametrize("shape", SHAPES)
def test_dct_equals_scipy(shape: tuple[int, int]) -> None:
    chunks = noise(5, *shape)
    theirs = torch.from_numpy(scipy.fft.dctn(chunks.double().numpy(), axes=(1, 2), norm="ortho"))
    assert torch.allclose(DCT.forward(chunks).double(), theirs, atol=4e-6)  # fp32 products of up to 64 terms


@pytest.mark.parametrize("shape", SHAPES)
def test_hadamard_equals_scipy(shape: tuple[int, int]) -> None:
    """A side that is no power of two has the unit matrix for its basis."""
    chunks = noise(5, *shape)
    rows, cols = (
        torch.from_numpy(scipy.linalg.hadamard(n) / math.sqrt(n)).double()
        if is_power_of_two(n)
        else torch.eye(n, dtype=torch.float64)
        for n in shape
    )
    assert torch.allclose(HADAMARD.forward(chunks).double(), rows @ chunks.double() @ cols.T, atol=2e-6)


@pytest.mark.parametrize("basis", [cosine_basis, random_basis])
@pytest.mark.parametrize("n", [1, 2, 13, 64])
def test_bases_are_orthonormal(basis: Basis, n: int) -> None:
    assert torch.allclose(basis(n) @ basis(n).T, torch.eye(n, dtype=torch.float64), atol=1e-13)


@pytest.mark.parametrize("transform", ALL)
@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (3, 8), (8, 8), (8, 16), (5, 7)])
def test_transforms_are_orthonormal(transform: Transform, shape: tuple[int, int]) -> None:
    matrix = matrix_of(transform, *shape).double()
    assert torch.allclose(matrix @ matrix.T, torch.eye(len(matrix), dtype=torch.float64), atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(["dct", "hadamard", "random"]), h=sides, w=sides, seed=st.integers(0, 10**6))
def test_inverse_undoes_forward(name: str, h: int, w: int, seed: int) -> None:
    transform = TRANSFORMS[name]
    assert transform is not None
    chunks = noise(3, h, w, seed=seed)
    between, back = torch.empty_like(chunks), torch.empty_like(chunks)
    for loops in (in_torch, in_numba):
        coeffs = torch.empty_like(chunks)
        loops.forward(transform, chunks, between, coeffs, keep=0.0, scale=1.0)
        assert torch.allclose(torch.linalg.vector_norm(coeffs), torch.linalg.vector_norm(chunks), rtol=1e-5)
        loops.inverse(transform, coeffs, between, back)
        assert torch.allclose(back, chunks, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(h=sides, w=sides, keep=st.sampled_from([0.0, 0.999, 1.0]), scale=st.sampled_from([1.0, 3.0, 65536.0]))
def test_hadamard_is_the_same_bits_in_both_loops(h: int, w: int, keep: float, scale: float) -> None:
    chunks, before = noise(3, h, w), noise(3, h, w, seed=1)
    between, results = torch.empty_like(chunks), []
    for loops in (in_torch, in_numba):
        out = before.clone()
        loops.forward(HADAMARD, chunks, between, out, keep=keep, scale=scale)
        back, matrix = torch.empty_like(chunks), torch.zeros(h + 2, 3 * w + 5)
        loops.inverse(HADAMARD, out, between, back)
        loops.inverse_patch(HADAMARD, out.view(1, 3, h, w), between, matrix[1 : h + 1, 2 : 3 * w + 2])
        results.append((out, back, matrix))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.equal(results[0][2][1 : h + 1, 2 : 2 + w], results[0][1][0])


@pytest.mark.parametrize("shape", [(64, 64), (8, 32), (6, 16)])
def test_hadamard_by_whole_numbers(shape: tuple[int, int]) -> None:
    """Whole numbers are summed without rounding: a scaled chunk of them is exact, if the scale is."""
    h, w = shape
    chunk = torch.randint(-1000, 1000, (h, w), generator=torch.Generator().manual_seed(0))
    sums: list[list[int]] = chunk.tolist()
    if is_power_of_two(h):
        sums = [
            list(row) for row in zip(*(whole_sums(list(column)) for column in zip(*sums, strict=True)), strict=True)
        ]
    if is_power_of_two(w):
        sums = [whole_sums(row) for row in sums]
    expected = torch.tensor(sums, dtype=torch.float32) * torch.tensor(hadamard_gain(h, w), dtype=torch.float32)
    assert torch.equal(HADAMARD.forward(chunk.float().unsqueeze(0))[0], expected)


def whole_sums(x: list[int]) -> list[int]:
    """The definition of docs/wire.md: output f is the sum of (−1)^(number of common ones of f and t) · x_t."""
    return [sum(-v if (f & t).bit_count() % 2 else v for t, v in enumerate(x)) for f in range(len(x))]


def test_the_order_of_hadamard_sums_is_fixed() -> None:
    """By hand, with numbers that round differently in any other order of stages."""
    chunks = torch.tensor([[[1.0, 2.0**-24, 2.0**-24, 1.0]]])
    tiny = torch.tensor(2.0**-24)
    one = torch.tensor(1.0)
    first = [one + tiny, one - tiny, tiny + one, tiny - one]  # stride 1
    second = [first[0] + first[2], first[1] + first[3], first[0] - first[2], first[1] - first[3]]  # stride 2
    assert torch.equal(HADAMARD.forward(chunks).view(-1), torch.stack(second) * 0.5)


LISTED = {DCT: (numba_transforms.dct, numba_transforms.inverse_dct), HADAMARD: (numba_transforms.hadamard,) * 2}


@pytest.mark.parametrize("transform", LISTED)
def test_compiled_code_equals_its_definition_step_by_step(transform: Transform) -> None:
    """The same function, called with the rows and columns of a tensor. Every bit is equal: nothing is fused."""
    chunks = noise(7, 64, 64)
    factor = {DCT: 1 / 32, HADAMARD: 1 / 64}[transform]  # powers of two: exact
    between, coeffs, back = (torch.empty_like(chunks) for _ in range(3))
    in_numba.forward(transform, chunks, between, coeffs, keep=0.0, scale=1.0)
    in_numba.inverse(transform, coeffs, between, back)
    for steps, source, result in zip(LISTED[transform], (chunks, coeffs), (coeffs, back), strict=True):
        down = torch.stack(steps(list(source.unbind(1))), dim=1)
        along = torch.stack(steps(list(down.unbind(2))), dim=2)
        assert torch.equal(along * factor, result)


@pytest.mark.parametrize("transform", [DCT, RANDOM])
def test_compiled_dct_agrees_with_the_products(transform: Transform) -> None:
    chunks, before = noise(7, 64, 64), noise(7, 64, 64, seed=1)
    between, results = torch.empty_like(chunks), []
    for loops in (in_torch, in_numba):
        out, matrix = before.clone(), torch.zeros(70, 7 * 64 + 9)
        loops.forward(transform, chunks, between, out, keep=0.5, scale=2.0)
        loops.inverse_patch(transform, out.view(1, 7, 64, 64), between, matrix[3:67, 5 : 5 + 7 * 64])
        results.append((out, matrix))
    assert all(torch.allclose(a, b, atol=5e-6) for a, b in zip(*results, strict=True))


def test_compiled_dct_is_as_exact_as_the_products() -> None:
    chunks = noise(20, 64, 64)
    exact = torch.from_numpy(scipy.fft.dctn(chunks.double().numpy(), axes=(1, 2), norm="ortho"))
    errors = []
    for loops in (in_torch, in_numba):
        out = torch.empty_like(chunks)
        loops.forward(DCT, chunks, torch.empty_like(chunks), out, keep=0.0, scale=1.0)
        errors.append(float((out.double() - exact).square().mean().sqrt()))
    assert errors[1] <= 1.5 * errors[0]
