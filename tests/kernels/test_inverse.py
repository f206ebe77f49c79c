"""The inverses that a chunk's correction is made of: of its diagonal tiles, or by levels of all; and its rounding."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from graphsafe_kernels.delta import inverse_kernels
from graphsafe_kernels.delta.inverse_kernels import alike_rows, batched_inverse, even_tile, level_inverse


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


@triton.jit
def rounded(n, out, BT: tl.constexpr, FIRST: tl.constexpr):
    i = tl.arange(0, BT)
    at = i[:, None] * BT + i[None, :]
    N = tl.load(n + at)
    tl.store(out + at, even_tile(N, alike_rows(N, BT) & (i >= FIRST), BT, out.dtype.element_ty))


@pytest.mark.parametrize("first", [0, 9])
@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_keep_what_entries_lose(device, dtype, chunk, first):
    """Where keys are alike, sums over leading rows and columns are off by half a step alone, also from a row on; other
    rows, and rows behind one that is not alike, are rounded entry by entry; a row depends on no later one."""
    step = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    generator = torch.Generator().manual_seed(chunk)
    row = torch.arange(chunk)
    n = -((-0.9) ** (row[:, None] - row[None, :] - 1.0)) * (1 - 0.02 * torch.rand(chunk, chunk, generator=generator))
    n = n.tril(-1)
    odd = chunk - 4
    n[odd, odd - 1] = -0.5

    def make(n, first=first):
        out = torch.full((chunk, chunk), float("nan"), dtype=dtype, device=device)
        rounded[(1,)](n.to(device), out, BT=chunk, FIRST=first)
        return out.cpu()

    got, plain = make(n), make(n, chunk)
    assert (got.triu() == 0).all()
    assert torch.equal(got[:first], plain[:first])
    assert torch.equal(got[odd:], plain[odd:])
    assert (got.double() - n.double()).abs().max() < 3 * step
    lost = (n.double() - got.double())[first:odd].cumsum(0).cumsum(1).abs().max()
    assert lost < step, lost / step  # half, but for entries that a step takes past 1, and sums in fp16
    assert (n.double() - plain.double())[first:odd].cumsum(0).cumsum(1).abs().max() > 2 * lost
    assert (n - plain.float()).abs().max() <= 2 * step
    changed = n.clone()
    changed[odd - 2 :] = -0.25
    assert torch.equal(make(changed.tril(-1))[: odd - 2], got[: odd - 2])
