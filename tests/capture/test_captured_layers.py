"""Both layers in a graph, seen whole: padding of what a replay writes is zero, whatever padding of inputs holds; states
go in and out; a stack of layers has one table build."""

from __future__ import annotations

import math

import pytest
import torch

import graphsafe as gs
from graphsafe.compare import differences
from graphsafe.testing.layouts import random_lengths
from graphsafe_kernels import backend
from graphsafe_kernels.layers import GatedDeltaNet, KimiDeltaAttention, LayerState

BUCKET = gs.Bucket(tokens=64, sequences=4, chunk_size=32)
HIDDEN = 12
LAYERS = {"gdn": (GatedDeltaNet, {"expand_v": 2}), "kda": (KimiDeltaAttention, {"expand_v": 1})}
each_kind = pytest.mark.parametrize("kind", LAYERS)


def make(kind, runtime):
    torch.manual_seed(0)
    cls, options = LAYERS[kind]
    return cls(hidden_size=HIDDEN, head_dim=4, num_heads=2, **options).to(runtime.device)


@each_kind
def test_padding_of_outputs_states_and_gradients_after_each_replay(runtime, kind):
    layer = make(kind, runtime)
    weights = [p for p in layer.parameters() if p.requires_grad]
    zero = layer.zero_state(1)

    def run():
        tables = runtime.tables(BUCKET).build(arena["cu_seqlens"])
        x, recurrent, conv = (arena[n].detach().requires_grad_() for n in ("x", "recurrent", "conv"))
        y, _, new = layer(x, past_key_values=LayerState(recurrent, conv), use_cache=True,
                          cu_seqlens=arena["cu_seqlens"], tables=tables, use_graph=True)
        grads = torch.autograd.grad([y, *new], [x, recurrent, conv, *weights],
                                    [arena["dy"], arena["d_recurrent"], arena["d_conv"]])
        return y.detach(), grads[0], [t.detach() for t in new], grads[1:3], grads[3:]

    with runtime.arena(BUCKET, canaries=True) as arena:
        for name in ("x", "dy"):
            arena.tokens(name, (HIDDEN,), torch.float32, pad=math.nan)
        states = {n: t for n, t in zip(("recurrent", "conv"), zero, strict=True)}
        for name, t in states.items():
            arena.sequences(name, tuple(t.shape[1:]), torch.float32)
            arena.sequences(f"d_{name}", tuple(t.shape[1:]), torch.float32)
        arena.cu_seqlens()
        arena.update(cu_seqlens=torch.tensor([0, 9], dtype=torch.int32, device=runtime.device))
        runtime.warm_up(run)
        with runtime.capture() as graph:
            results = graph.outputs(run())
        for seed in range(20):
            lengths = random_lengths(seed, BUCKET.tokens, BUCKET.sequences)
            total, n = sum(lengths), len(lengths)
            generator = torch.Generator().manual_seed(seed)

            def randn(*shape, generator=generator):
                return torch.randn(*shape, generator=generator).to(runtime.device)

            new = {name: randn(1, total, HIDDEN) for name in ("x", "dy")}
            for name, t in states.items():
                new |= {name: randn(n, *t.shape[1:]), f"d_{name}": randn(n, *t.shape[1:])}
            cu = torch.tensor([0, *lengths]).cumsum(0).to(runtime.device, torch.int32)
            arena.update(cu_seqlens=cu, **new)
            graph.poison()
            graph.replay()
            runtime.synchronize()
            label = f"{kind}, seed {seed}, lengths {lengths}"
            y, dx, after, before, dw = results
            for t in (y, dx):
                assert torch.equal(t[:, total:], torch.zeros_like(t[:, total:])), label
            assert all(torch.isfinite(t).all() for t in (*after, *before, *dw)), label
            # a sequence without tokens hands its state through, and the state's gradient back
            for i in (i for i, length in enumerate(lengths) if length == 0):
                assert torch.equal(after[0][i], new["recurrent"][i]), label
                assert torch.equal(before[0][i], new["d_recurrent"][i]), label
            assert not differences(results, run(), label)
        arena.check_canaries()


@each_kind
def test_prefill_in_pieces_under_one_graph_equals_one_eager_call(runtime, kind):
    """Two prompts of different lengths, 32 tokens of each a call; the caller keeps the states."""
    layer = make(kind, runtime)
    prompts = [torch.randn(1, t, HIDDEN, generator=torch.Generator().manual_seed(t)).to(runtime.device)
               for t in (100, 71)]

    @gs.graphed(runtime=runtime, buckets=[BUCKET], on_overflow="error", inputs={"state": "sequences"})
    def prefill(x, state, cu_seqlens, tables):
        y, _, new = layer(x, past_key_values=state, use_cache=True, tables=tables, use_graph=True)
        return y, new

    with torch.no_grad():
        state, outputs, done = layer.zero_state(2), [[], []], 0
        while done < 100:
            pieces = [p[:, done : done + 32] for p in prompts]
            sizes = [p.shape[1] for p in pieces]
            cu = torch.tensor([0, *sizes]).cumsum(0).to(runtime.device, torch.int32)
            y, new = prefill(torch.cat(pieces, 1), state, cu)
            state = LayerState(*(t.clone() for t in new))
            for kept, piece in zip(outputs, y.clone().split(sizes, 1), strict=True):
                kept.append(piece)
            done += 32
        for i, prompt in enumerate(prompts):
            want, _, last = layer.train()(prompt, use_cache=True)
            assert torch.allclose(torch.cat(outputs[i], 1), want, rtol=1e-4, atol=1e-5), kind
            for a, b in zip(state, last, strict=True):
                assert torch.allclose(a[i], b[0], rtol=1e-4, atol=1e-5), kind
    assert prefill.stats.captures == 1


@each_kind
def test_twelve_layers_build_their_tables_once_and_read_nothing(runtime, kind, monkeypatch):
    """fla 752, 770: no host read per layer, which the capture would refuse; one build serves all (vllm 38361)."""
    layers = torch.nn.ModuleList(make(kind, runtime) for _ in range(12))
    built = []

    def resolve(operator, device):
        built.extend([operator] * (operator == "build_tables"))
        return backend.resolve(operator, device)

    for module in ("layers.batch", "delta_rule"):
        monkeypatch.setattr(f"graphsafe_kernels.{module}.resolve", resolve)

    @gs.graphed(runtime=runtime, buckets=[BUCKET], on_overflow="error")
    def forward(x, cu_seqlens, tables):
        for layer in layers:
            x = x + layer(x, tables=tables, use_graph=True)[0]
        return x

    x = torch.randn(1, 50, HIDDEN, device=runtime.device)
    cu = torch.tensor([0, 20, 50], dtype=torch.int32, device=runtime.device)
    with torch.no_grad():
        replayed = forward(x, cu).clone()
        assert torch.equal(replayed, forward.eager(x, cu))
    assert not built, "the wrapper's tables serve every layer"
