"""What a fingerprint must see: any change of a value, and anything that changed places."""

import pytest
import torch

from overtone.coding.fingerprint import _weights, of_tensors
from overtone.coding.kernels import in_numba, in_torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("size", [1, 7, 1023, 2047, 2048, 5000])
def test_every_single_change_shows(dtype: torch.dtype, size: int) -> None:
    values = (torch.arange(size) % 2).to(dtype)
    seen = of_one(values)
    for place in {0, 1, size // 2, size - 1} & set(range(size)):
        changed = values.clone()
        changed[place] = 1 - changed[place].int()
        assert of_one(changed) != seen
    assert of_one(torch.cat([values, values[:1] * 0])) != seen  # a zero more is another tensor


def of_one(tensor: torch.Tensor) -> bytes:
    return of_tensors([tensor])


def test_signs_that_flip_do_not_cancel() -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    seen, dice = of_one(values), torch.Generator().manual_seed(1)
    for count in (2, 2, 2, 4, 40):
        for parity in (0, 1):
            places = 2 * torch.randperm(2500, generator=dice)[:count] + parity
            flipped = values.clone()
            flipped[places] *= -1
            assert of_one(flipped) != seen
            flipped[places] *= -4
            assert of_one(flipped) != seen


@pytest.mark.parametrize("size", [2048, 1024])
def test_rows_that_change_places_show(size: int) -> None:
    eye = torch.eye(size)
    swapped = eye.clone()
    swapped[[0, 2]] = eye[[2, 0]]
    assert of_one(swapped) != of_one(eye)
    checkerboard = eye.clone()
    checkerboard[10, 20], checkerboard[10, 24], checkerboard[30, 20], checkerboard[30, 24] = 1.0, -1.0, -1.0, 1.0
    assert of_one(checkerboard) != of_one(eye)


def test_both_kinds_of_loops_agree() -> None:
    words = torch.randint(-(2**62), 2**62, (133, 1024), generator=torch.Generator().manual_seed(0))
    weights = _weights(words.device)
    assert torch.equal(in_torch.row_hashes(words, weights), in_numba.row_hashes(words, weights))
