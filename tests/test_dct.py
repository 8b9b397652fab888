import pytest
import scipy.fft
import torch

from overtone.coding import dct


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (7, 64), (64, 64), (61, 5), (1, 97)])
def test_forward_equals_scipy(shape: tuple[int, int]) -> None:
    chunks = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0))
    ours = dct.forward(chunks, dct.cosine_basis)
    theirs = torch.from_numpy(scipy.fft.dctn(chunks.double().numpy(), axes=(1, 2), norm="ortho"))
    assert torch.allclose(ours.double(), theirs, atol=4e-6)  # fp32 products of up to 64 terms


@pytest.mark.parametrize("basis", [dct.cosine_basis, dct.random_basis])
@pytest.mark.parametrize("n", [1, 2, 13, 64])
def test_bases_are_orthonormal(basis: dct.Basis, n: int) -> None:
    assert torch.allclose(basis(n) @ basis(n).T, torch.eye(n, dtype=torch.float64), atol=1e-13)


@pytest.mark.parametrize("basis", [dct.cosine_basis, dct.random_basis])
def test_inverse_undoes_forward(basis: dct.Basis) -> None:
    chunks = torch.randn(9, 64, 37, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(dct.inverse(dct.forward(chunks, basis), basis), chunks, atol=4e-6)
