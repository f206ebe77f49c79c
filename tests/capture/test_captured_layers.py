"""Both layers in a graph, seen whole: padding of what a replay writes is zero, whatever padding of inputs holds."""

from __future__ import annotations

import math

import pytest
import torch

import graphsafe as gs
from graphsafe.compare import differences
from graphsafe.testing.layouts import random_lengths
from graphsafe_kernels.layers import GatedDeltaNet, KimiDeltaAttention

BUCKET = gs.Bucket(tokens=64, sequences=4, chunk_size=32)
HIDDEN = 12
LAYERS = {"gdn": (GatedDeltaNet, {"expand_v": 2}), "kda": (KimiDeltaAttention, {"expand_v": 1})}


@pytest.mark.parametrize("kind", LAYERS)
def test_padding_of_outputs_and_gradients_is_zero_after_each_replay(runtime, kind):
    torch.manual_seed(0)
    make, options = LAYERS[kind]
    layer = make(hidden_size=HIDDEN, head_dim=4, num_heads=2, **options).to(runtime.device)
    weights = [p for p in layer.parameters() if p.requires_grad]

    def run():
        tables = runtime.tables(BUCKET).build(arena["cu_seqlens"])
        x = arena["x"].detach().requires_grad_()
        y, _, _ = layer(x, cu_seqlens=arena["cu_seqlens"], tables=tables, use_graph=True)
        dx, *dw = torch.autograd.grad(y, [x, *weights], arena["dy"])
        return y.detach(), dx, dw

    with runtime.arena(BUCKET, canaries=True) as arena:
        for name in ("x", "dy"):
            arena.tokens(name, (HIDDEN,), torch.float32, pad=math.nan)
        arena.cu_seqlens()
        arena.update(cu_seqlens=torch.tensor([0, 9], dtype=torch.int32, device=runtime.device))
        runtime.warm_up(run)
        with runtime.capture() as graph:
            y, dx, dw = graph.outputs(run())
        for seed in range(20):
            lengths = random_lengths(seed, BUCKET.tokens, BUCKET.sequences)
            total = sum(lengths)
            generator = torch.Generator().manual_seed(seed)
            new = [torch.randn(1, total, HIDDEN, generator=generator).to(runtime.device) for _ in range(2)]
            cu = torch.tensor([0, *lengths]).cumsum(0).to(runtime.device, torch.int32)
            arena.update(x=new[0], dy=new[1], cu_seqlens=cu)
            graph.poison()
            graph.replay()
            runtime.synchronize()
            label = f"{kind}, seed {seed}, lengths {lengths}"
            for t in (y, dx):
                assert torch.equal(t[:, total:], torch.zeros_like(t[:, total:])), label
            assert all(torch.isfinite(t).all() for t in dw), label
            assert not differences((y, dx, dw), run(), label)
        arena.check_canaries()
