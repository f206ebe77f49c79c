"""The inverses that a chunk's correction is made of: of its diagonal tiles, or by levels of all of it."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from graphsafe_kernels.delta import inverse_kernels
from graphsafe_kernels.delta.inverse_kernels import batched_inverse, level_inverse


@triton.jit
def inverses(c, beta, out, BT: tl.constexpr, LEVELS: tl.constexpr):
    i = tl.arange(0, BT)
    at = i[:, None] * BT + i[None, :]
    if LEVELS:
        X = level_inverse(tl.load(c + at), tl.load(beta + i), BT, tl.float32, "ieee")
    else:
        X = batched_inverse(tl.load(c + at), tl.load(beta + i), BT, tl.float32, "ieee")
    tl.store(out + at, X)


FORMS = [True] if inverse_kernels.BY_LEVELS.value else [False, True]


@pytest.mark.parametrize("levels", FORMS, ids={False: "batched", True: "levels"}.get)
@pytest.mark.parametrize("chunk", [16, 32, 64])
def test_each_form_is_the_inverse(device, levels, chunk):
    generator = torch.Generator().manual_seed(chunk)
    keys = torch.nn.functional.normalize(torch.randn(chunk, 8, generator=generator), dim=1)
    beta = 2 * torch.rand(chunk, generator=generator)
    c = -(keys @ keys.T).tril(-1)
    tile = torch.arange(chunk) // 16
    own = (tile[:, None] == tile[None, :]) | levels
    want = torch.linalg.inv(torch.eye(chunk).double() - torch.where(own, beta[:, None] * c, 0.0).double())
    out = torch.full((chunk, chunk), float("nan"), device=device)
    inverses[(1,)](c.to(device), beta.to(device), out, BT=chunk, LEVELS=levels)
    assert (out.cpu().double() - want).abs().max() < 1e-4 * want.abs().max()
