"""Under autocast projections run in bf16 on fp32 parameters; operators keep their own precision."""

from __future__ import annotations

import pytest
import torch
from layer_cases import CASES, HIDDEN, boundaries, make_layer, randn

import graphsafe as gs
from graphsafe_kernels.gdn import chunk_gated_delta_rule

each_layer = pytest.mark.parametrize("case", CASES)


def operands(dtype):
    q, k, v = (torch.randn(1, 70, 2, 8, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(3))
    return q, k, v, -q[..., 0].float().abs(), k[..., 0].float().sigmoid()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_operator_computes_the_same_under_autocast(dtype):
    want = chunk_gated_delta_rule(*operands(dtype))[0]
    with torch.autocast("cpu", torch.bfloat16):
        got = chunk_gated_delta_rule(*operands(dtype))[0]
    assert got.dtype == dtype
    assert torch.equal(got, want)


@each_layer
def test_fp32_parameters_train_in_bf16_and_are_captured(case):
    """Gradients are fp32 and near those of fp32 throughout; a replay has the bits of eager; padding is zero."""
    layer, bucket = make_layer(case).float(), gs.Bucket(tokens=64, sequences=3)
    parameters = list(layer.parameters())

    def both(x, dy, cu_seqlens, tables, narrow=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            y = layer(x, tables=tables, use_graph=True)[0]
        return (y.detach(), *torch.autograd.grad(y, parameters, dy.to(y.dtype)))

    step = gs.graphed(both, runtime=gs.get_runtime("cpu"), buckets=[bucket], on_overflow="error")
    x, dy, cu = randn(1, 50, HIDDEN).float(), randn(1, 50, HIDDEN, seed=1).float(), boundaries([20, 0, 30])
    got = [t.clone() for t in step(x, dy, cu)]
    assert all(torch.equal(a, b) for a, b in zip(got, step.eager(x, dy, cu), strict=True))
    assert got[0].dtype == torch.bfloat16
    want = both(x, dy, cu, gs.get_runtime("cpu").tables(gs.Bucket(50, 3)).build(cu), narrow=False)
    for name, g, w in zip(("y", *dict(layer.named_parameters())), got, want, strict=True):
        assert name == "y" or g.dtype == torch.float32
        # these layers are a few channels wide: little averages out
        assert (g.float() - w).norm() <= 0.3 * w.norm() + 1e-2, name
