"""KDA's kernels in a real NPUGraph: one capture, forward and backward, replayed over many layouts.

For each layout bitwise equal to eager on the same memory, padding zero with NaN in all padding of the inputs, and close
to the fp64 reference of the batch alone.
"""

from __future__ import annotations

import math

import pytest
import torch

import graphsafe as gs
from graphsafe.compare import differences
from graphsafe.testing.layouts import random_lengths
from graphsafe_kernels import backend
from graphsafe_kernels.kda import chunk_kda

BUCKET = gs.Bucket(tokens=80, sequences=4, chunk_size=32)
HEADS, VALUE_HEADS, WIDTH = 1, 2, 16
INPUTS = {
    "q": (HEADS, WIDTH), "k": (HEADS, WIDTH), "v": (VALUE_HEADS, WIDTH), "g": (VALUE_HEADS, WIDTH),
    "beta": (VALUE_HEADS,),
}  # fmt: skip
SHAPES = {**INPUTS, "do": INPUTS["v"]}
LAYOUTS = 12
KERNELS = {
    "prepare_kernel", "forward_chain_kernel", "backward_chains_kernel", "products_kernel", "gradients_kernel",
    "project_kernel", "finish_kernel",
}  # fmt: skip


def forward_backward(x, parameters, do, **tables):
    """o, and the gradients of every operand and of the gate's parameters."""
    leaves = {name: t.detach().requires_grad_() for name, t in {**x, **parameters}.items()}
    o, _ = chunk_kda(**leaves, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
                     chunk_size=BUCKET.chunk_size, **tables)  # fmt: skip
    return o.detach(), *torch.autograd.grad(o, list(leaves.values()), do)


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-4), (torch.bfloat16, 4e-2)], ids=str)
def test_replays_of_the_kernels(dtype, allowed):
    rt = gs.get_runtime("npu")
    generator = torch.Generator().manual_seed(0)
    parameters = {"A_log": torch.randn(VALUE_HEADS, generator=generator),
                  "dt_bias": torch.randn(VALUE_HEADS * WIDTH, generator=generator)}  # fmt: skip
    here = {name: t.to(rt.device) for name, t in parameters.items()}

    def run():
        tables = rt.tables(BUCKET).build(arena["cu_seqlens"])
        return forward_backward(
            {name: arena[name] for name in INPUTS}, here, arena["do"], use_graph=True, max_num_seqs=BUCKET.sequences,
            cu_seqlens=tables.cu_seqlens, chunk_indices=tables.chunk_indices, chunk_offsets=tables.chunk_offsets,
        )  # fmt: skip

    with rt.arena(BUCKET, canaries=True) as arena:
        for name, shape in SHAPES.items():
            arena.tokens(name, shape, dtype, pad=math.nan)
        arena.cu_seqlens(torch.int32)
        rt.warm_up(run)
        with rt.capture() as graph:
            results = graph.outputs(run())
        assert {name.split()[0] for name in graph.kernel_names} >= KERNELS  # each says which unit runs it, too
        rows = 1 + len(INPUTS)  # of the results those that follow the tokens
        for seed in range(LAYOUTS):
            lengths = random_lengths(seed, BUCKET.tokens, BUCKET.sequences)
            total = sum(lengths)
            generator = torch.Generator().manual_seed(seed)
            new = {name: torch.randn(1, total, *shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
            cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
            arena.update({name: t.to(rt.device) for name, t in {**new, "cu_seqlens": cu}.items()})
            graph.poison()
            graph.replay()
            rt.synchronize()
            label = f"lengths {lengths}, seed {seed}"
            assert not differences(results, run(), label)
            assert all(not t[:, total:].any() for t in results[:rows]), label
            if not total:
                assert all(not t.any() for t in results[rows:]), label
                continue
            do = new.pop("do")
            exact = [{name: t.double() for name, t in group.items()} for group in (new, parameters)]
            with backend.reference_only():
                want = forward_backward(*exact, do.double(), cu_seqlens=cu)
            got = [*(t[:, :total] for t in results[:rows]), *results[rows:]]
            for mine, reference in zip(got, want, strict=True):
                error = (mine.cpu().double() - reference).abs().max()
                assert error <= allowed * max(reference.abs().max(), 1), f"{label}: off by {error}"
        arena.check_canaries()
