"""One captured graph of a layer's forward and backward serves every layout of its bucket."""

from __future__ import annotations

import random

import pytest
import torch
from layer_cases import CASES, HIDDEN, NAN, assert_close, boundaries, make_layer, randn, random_state, run

import graphsafe as gs
from graphsafe_kernels.layers import GatedDeltaNet

BUCKET = gs.Bucket(tokens=96, sequences=5, chunk_size=32)


def layouts(count, seed):
    """Random batches within the bucket, some with empty sequences, some full, some with no token at all."""
    rng = random.Random(seed)
    yield [0] * BUCKET.sequences
    yield [BUCKET.tokens]
    for _ in range(count - 2):
        cuts = sorted(rng.randint(0, BUCKET.tokens) for _ in range(rng.randint(1, BUCKET.sequences)))
        yield [b - a for a, b in zip([0, *cuts], cuts, strict=False)]


@pytest.mark.parametrize("case", CASES)
def test_replays_of_twenty_layouts_equal_eager(case):
    """Each replay has the bits of eager-fixed, and is within 1e-10 of eager-live; all padding held NaN."""
    layer = make_layer(case)
    tokens, sequences = gs.Input("tokens", pad=NAN), gs.Input("sequences", pad=NAN)

    @gs.graphed(runtime=gs.get_runtime("cpu"), buckets=[BUCKET], on_overflow="error",
                inputs={"x": tokens, "dy": tokens, "state": sequences, "dstate": sequences})
    def step(x, dy, state, dstate, cu_seqlens, tables):
        return run(layer, x, dy, state, dstate, cu_seqlens=cu_seqlens, tables=tables, use_graph=True)

    for i, lengths in enumerate(layouts(20, seed=3)):
        n, t = len(lengths), sum(lengths)
        batch = (randn(1, t, HIDDEN, seed=i), randn(1, t, HIDDEN, seed=i + 100), random_state(layer, n, i),
                 random_state(layer, n, i + 50), boundaries(lengths))
        replayed = {name: v.clone() for name, v in step(*batch).items()}
        fixed = step.eager(*batch)
        assert replayed.keys() == fixed.keys()
        assert all(torch.equal(replayed[name], v) for name, v in fixed.items()), f"layout {i}: {lengths}"
        assert_close(replayed, run(layer, *batch[:4], cu_seqlens=batch[4]))
    assert step.stats.captures == 1
    assert step.stats.replays == 20
    assert step.verify(*batch)


def test_a_layer_in_a_graph_as_the_documentation_shows_it():
    bucket = gs.Bucket(tokens=64, sequences=4)
    layer = GatedDeltaNet(hidden_size=16, num_heads=2, head_dim=8)

    @gs.graphed(runtime=gs.get_runtime("cpu"), buckets=[bucket])
    def forward(x, cu_seqlens, tables):
        return layer(x, cu_seqlens=cu_seqlens, tables=tables, use_graph=True)

    x, cu = randn(1, 50, 16).float(), boundaries([20, 30])
    forward.capture(x, cu)
    output, attentions, state = forward(x, cu)
    assert attentions is None
    assert state is None
    assert torch.allclose(output, layer(x, cu_seqlens=cu)[0], rtol=1e-5, atol=1e-6)


def test_a_state_stays_in_the_graph_from_call_to_call():
    """Prefill in pieces under one graph: the state that a replay returns is the next one's input."""
    layer = make_layer("kda")

    @gs.graphed(runtime=gs.get_runtime("cpu"), buckets=[BUCKET], on_overflow="error",
                inputs={"state": "sequences"})
    def prefill(x, state, cu_seqlens, tables):
        output, _, new = layer(x, past_key_values=state, use_cache=True, tables=tables, use_graph=True)
        return output, new

    x, state, outputs = randn(1, 150, HIDDEN), layer.zero_state(1), []
    for piece in x.split(60, 1):
        output, state = prefill(piece, state, boundaries([piece.shape[1]]))
        outputs.append(output.clone())
    want, _, last = layer(x, use_cache=True)
    assert_close({"output": torch.cat(outputs, 1), "state": state.recurrent_state},
                 {"output": want.detach(), "state": last.recurrent_state.detach()})
    assert prefill.stats.captures == 1
