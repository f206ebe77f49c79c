"""Columns of a projection apart, and together again: values, one launch each way, views where they are asked for."""

from __future__ import annotations

import pytest
import torch

from graphsafe_kernels.backend import resolve
from graphsafe_kernels.layers.split import split
from graphsafe_kernels.layers.split_kernels import columns_kernel

CASES = [
    # columns of the whole, of each part, which are copied
    (24, (8, 8, 8), None),
    (100, (64, 20, 6, 6), (False, False, True, True)),
    (7, (3,), None),
    (1300, (513, 700, 1), (True, False, True)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("columns", "widths", "copied"), CASES, ids=[str(c[1]) for c in CASES])
def test_parts_and_their_gradients(device, launches, columns, widths, copied, dtype):
    expected = [] if dtype == torch.float64 else [columns_kernel.__name__]
    wide = torch.randn(2, 9, columns + 5, device=device).to(dtype)
    for x in (wide[..., :columns], wide.transpose(0, 1)[..., :columns]):
        leaf = x.detach().requires_grad_()
        launches.clear()
        parts = split(leaf, widths, copied)
        assert launches == expected
        want = leaf.detach()[..., : sum(widths)].split(widths, -1)
        for part, w, copy in zip(parts, want, copied or [True] * len(widths), strict=True):
            assert torch.equal(part, w)
            assert part.is_contiguous() or not copy
            inside = part.untyped_storage().data_ptr() == wide.untyped_storage().data_ptr()
            assert inside == (not copy)
        gradients = [torch.randn(p.shape, device=device).to(dtype) for p in parts]
        gradients[0] = gradients[0].transpose(0, 1).contiguous().transpose(0, 1)
        launches.clear()
        (got,) = torch.autograd.grad(parts, leaf, gradients)
        assert launches == expected
        assert torch.equal(got, torch.cat([*gradients, torch.zeros_like(x[..., sum(widths) :])], -1))


def test_the_last_columns_of_a_tensor_are_filled_and_the_others_left(device, launches):
    whole = torch.full((2, 9, 20), 7.0, device=device)
    part = torch.randn(2, 9, 6, device=device)
    launches.clear()
    got = resolve("join_columns", device)([part[..., :5], None], (5, 4), whole)
    assert got is whole
    assert launches == [columns_kernel.__name__]
    assert torch.equal(whole, torch.cat([torch.full_like(whole[..., :11], 7), part[..., :5],
                                         torch.zeros_like(whole[..., :4])], -1))


def test_a_part_that_nothing_uses_has_a_gradient_of_zero(device):
    leaf = torch.randn(1, 5, 12, device=device, requires_grad=True)
    _, middle, _ = split(leaf, (4, 4, 4))
    (got,) = torch.autograd.grad(middle.sum(), leaf)
    want = torch.zeros_like(leaf)
    want[..., 4:8] = 1
    assert torch.equal(got, want)


def test_without_rows(device):
    parts = split(torch.empty(1, 0, 12, device=device, requires_grad=True), (4, 8))
    assert [p.shape for p in parts] == [(1, 0, 4), (1, 0, 8)]
