"""One captured graph of an operator's forward and backward serves every layout of its bucket."""

from __future__ import annotations

import random

import pytest
import torch
from delta_rule_cases import (
    CHUNK,
    GATES,
    RULES,
    TOKEN_OPERANDS,
    Case,
    assert_close,
    boundaries,
    make,
    output_gradients,
    run,
)

import graphsafe as gs

NAN = float("nan")
BUCKET = gs.Bucket(tokens=160, sequences=5, chunk_size=32)


def layouts(count: int, seed: int):
    """Random batches within the bucket, some with empty sequences; one without a token and a full one first."""
    rng = random.Random(seed)
    yield (0,) * BUCKET.sequences
    yield (BUCKET.tokens,)
    for _ in range(count - 2):
        cuts = sorted(rng.randint(0, BUCKET.tokens) for _ in range(rng.randint(1, BUCKET.sequences)))
        yield tuple(b - a for a, b in zip([0, *cuts], cuts, strict=False))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("options", GATES.values(), ids=GATES)
def test_replays_of_twenty_layouts_equal_eager(rule, options):
    """Each replay has the bits of eager-fixed, and is within 1e-10 of eager-live; all padding held NaN."""
    tokens, sequences = gs.Input("tokens", pad=NAN), gs.Input("sequences", pad=NAN)
    names = [*TOKEN_OPERANDS, "do", "initial_state", "dht"]
    inputs = {name: sequences if name in ("initial_state", "dht") else tokens for name in names}
    parameters = {n: t for n, t in make(Case(rule, tokens=1, heads=2, options=options)).items()
                  if n in ("A_log", "dt_bias")}

    @gs.graphed(runtime=gs.get_runtime("cpu"), buckets=[BUCKET], on_overflow="error", inputs=inputs)
    def step(q, k, v, g, beta, do, initial_state, dht, cu_seqlens, tables):
        operands = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state, **parameters}
        return run(CHUNK[rule], operands, do, dht, cu_seqlens=cu_seqlens, chunk_indices=tables.chunk_indices,
                   chunk_offsets=tables.chunk_offsets, chunk_size=BUCKET.chunk_size, use_graph=True,
                   max_num_seqs=tables.max_num_seqs, **options)

    for seed, lengths in enumerate(layouts(20, seed=3)):
        case = Case(rule, lengths=lengths, heads=2, gate="usual", seed=seed, options=options)
        operands = {n: t for n, t in make(case).items() if n not in parameters}
        do, dht = output_gradients(case)
        batch = {**operands, "do": do, "dht": dht, "cu_seqlens": boundaries(lengths)}
        replayed = {name: t.clone() for name, t in step(**batch).items()}
        fixed = step.eager(**batch)
        assert replayed.keys() == fixed.keys()
        assert all(torch.equal(replayed[name], t) for name, t in fixed.items()), f"layout {seed}: {lengths}"
        live = run(CHUNK[rule], {**operands, **parameters}, do, dht, cu_seqlens=batch["cu_seqlens"],
                   chunk_size=BUCKET.chunk_size, **options)
        assert_close(replayed, live, 1e-10)
    assert step.stats.captures == 1
    assert step.stats.replays == 20
    assert step.verify(**batch)
