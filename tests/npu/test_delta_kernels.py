"""The gated delta rule's kernels in a real NPUGraph, in fp32 and bf16.

One capture, forward and backward; for each layout bitwise equal to eager on the same memory, padding zero with NaN in
all padding of the inputs, and close to the fp64 reference of the batch alone.
"""

from __future__ import annotations

import math

import pytest
import torch

import graphsafe as gs
from graphsafe.compare import differences
from graphsafe.testing.layouts import random_lengths
from graphsafe_kernels.gdn import chunk_gated_delta_rule
from graphsafe_kernels.policy import policy_for

BUCKET = gs.Bucket(tokens=80, sequences=4, chunk_size=16)
HEADS, VALUE_HEADS, WIDTH = 1, 2, 16
INPUTS = {
    "q": (HEADS, WIDTH), "k": (HEADS, WIDTH), "v": (VALUE_HEADS, WIDTH), "g": (VALUE_HEADS,), "beta": (VALUE_HEADS,),
}  # fmt: skip
SHAPES = {**INPUTS, "do": INPUTS["v"]}
LAYOUTS = 12


def forward_backward(x, do, **tables):
    leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
    o, _ = chunk_gated_delta_rule(**leaves, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                                  chunk_size=BUCKET.chunk_size, **tables)  # fmt: skip
    return o.detach(), *torch.autograd.grad(o, list(leaves.values()), do)


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-4), (torch.bfloat16, 4e-2)], ids=str)
def test_replays_of_the_kernels(dtype, allowed):
    rt = gs.get_runtime("npu")
    types = {name: torch.float32 if name in ("g", "beta") else dtype for name in SHAPES}

    def run():
        tables = rt.tables(BUCKET).build(arena["cu_seqlens"])
        return forward_backward(
            {name: arena[name] for name in INPUTS}, arena["do"], use_graph=True, max_num_seqs=BUCKET.sequences,
            cu_seqlens=tables.cu_seqlens, chunk_indices=tables.chunk_indices, chunk_offsets=tables.chunk_offsets,
        )  # fmt: skip

    with rt.arena(BUCKET, canaries=True) as arena:
        for name, shape in SHAPES.items():
            arena.tokens(name, shape, types[name], pad=math.nan)
        arena.cu_seqlens(torch.int32)
        rt.warm_up(run)
        with rt.capture() as graph:
            results = graph.outputs(run())
        assert any(name.startswith("backward") for name in graph.kernel_names), graph.kernel_names
        for seed in range(LAYOUTS):
            lengths = random_lengths(seed, BUCKET.tokens, BUCKET.sequences)
            total = sum(lengths)
            generator = torch.Generator().manual_seed(seed)
            new = {name: torch.randn(1, total, *shape, generator=generator).to(types[name])
                   for name, shape in SHAPES.items()}  # fmt: skip
            new["g"] = -new["g"].abs()
            cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
            arena.update({name: t.to(rt.device) for name, t in {**new, "cu_seqlens": cu}.items()})
            graph.poison()
            graph.replay()
            rt.synchronize()
            label = f"lengths {lengths}, seed {seed}"
            assert not differences(results, run(), label)
            do = new.pop("do")
            exact = {name: t.double() for name, t in new.items()}
            want = forward_backward(exact, do.double(), cu_seqlens=cu) if total else ()
            for got, reference in zip(results, want, strict=bool(want)):
                error = (got.cpu()[:, :total].double() - reference).abs().max()
                assert error <= allowed * max(reference.abs().max(), 1), f"{label}: off by {error}"
            assert all(not t[:, total:].any() for t in results), label
        arena.check_canaries()


def test_a_grid_has_the_devices_own_number_of_cores():
    device = gs.get_runtime("npu").device
    assert policy_for(device).cores == torch.npu.get_device_properties(device).vector_core_num > 0
