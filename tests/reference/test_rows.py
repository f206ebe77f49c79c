"""Sums and activations whose bits depend on the rows alone, not on what follows them."""

from __future__ import annotations

import pytest
import torch

from graphsafe_kernels.reference.rows import ordered_sum, padding_rows, sigmoid


def bits(t):
    """The tensor's bits: tells -0 from +0, which ``torch.equal`` does not."""
    return t.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 64, 100, 1000, 40_000])
@pytest.mark.parametrize("width", [1, 3])
def test_zero_rows_behind_change_no_bit_of_a_sum(rows, width, dtype):
    """One column is where ``torch.sum`` on a CPU fails this."""
    t = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows)).to(dtype)
    want = ordered_sum(t)
    for padding in (1, 7, 64, 1001, 100_000):
        assert torch.equal(bits(ordered_sum(torch.cat([t, torch.zeros(padding, width, dtype=dtype)]))), bits(want))


def test_the_sign_of_a_zero_sum_does_not_depend_on_padding():
    for rows in (1, 2, 3):
        t = torch.full((rows, 1), -0.0)
        assert torch.equal(bits(ordered_sum(t)), bits(torch.zeros(1)))
        assert torch.equal(bits(ordered_sum(torch.cat([t, torch.zeros(2, 1)]))), bits(torch.zeros(1)))


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 8, 9, 1000])
def test_the_sum_is_the_sum(rows):
    t = torch.randint(-50, 50, (rows, 2, 3), generator=torch.Generator().manual_seed(rows)).double()
    assert torch.equal(ordered_sum(t), t.sum(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sigmoid_has_the_same_bits_at_any_place_of_any_tensor(dtype):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1)).to(dtype) * 5
    whole = sigmoid(x)
    assert all(torch.equal(sigmoid(x[:n]), whole[:n]) for n in range(1, 100))
    assert all(torch.equal(sigmoid(x[n : n + 9].clone()), whole[n : n + 9]) for n in range(1, 100))


def test_sigmoid_has_its_values_and_its_limits():
    x = torch.linspace(-50, 50, 1001, dtype=torch.float64)
    assert torch.allclose(sigmoid(x), torch.sigmoid(x), rtol=1e-14, atol=0)
    ends = torch.tensor([-torch.inf, -1e30, 1e30, torch.inf])
    assert sigmoid(ends).tolist() == [0, 0, 1, 1]


def test_padding_rows_begin_at_the_live_total():
    for dtype in (torch.int32, torch.int64):
        assert padding_rows(torch.tensor([0, 2, 2, 3], dtype=dtype), 5).tolist() == [False] * 3 + [True] * 2
