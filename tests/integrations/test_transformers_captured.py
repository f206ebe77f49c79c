"""Models of ``transformers`` captured and trained: on a CPU, on a GPU and on a simulated NPU, from this one file."""

from __future__ import annotations

import pytest
import torch
from tiny_models import MODELS, batch, make

import graphsafe as gs
from graphsafe.testing.layouts import random_lengths
from graphsafe_kernels.integrations import adapt

BUCKET = gs.Bucket(tokens=96, sequences=5)


def labels_of(ids, cu):
    """Each sequence predicts its own tokens alone: ``transformers`` shifts labels by one."""
    labels = ids.clone()
    starts = cu[:-1].long()
    labels[:, starts[starts < ids.shape[1]]] = -100
    return labels


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ten_layouts_of_one_capture_have_the_bits_of_eager(runtime, name, dtype):
    """In bf16 a GPU takes other kernels for attention and experts; a rounding may then choose other experts."""
    model = adapt(make(name).to(runtime.device, dtype))

    @gs.graphed(runtime=runtime, buckets=[BUCKET], on_overflow="error")
    def forward(ids, cu_seqlens, tables):
        return model(input_ids=ids, tables=tables).logits

    with torch.no_grad():
        for seed in range(10):
            lengths = random_lengths(seed, BUCKET.tokens, BUCKET.sequences)
            arguments = batch(lengths, runtime.device, seed)
            replayed = forward(*arguments).clone()
            assert torch.equal(replayed, forward.eager(*arguments)), lengths
            assert torch.isfinite(replayed).all(), lengths
            # the models' own code takes no batch without a token
            if sum(lengths) and dtype == torch.float32:
                live = model(input_ids=arguments[0], cu_seqlens=arguments[1]).logits
                assert torch.allclose(replayed, live, rtol=1e-4, atol=2e-5), lengths
        assert forward.stats.captures == 1
        assert forward.verify(*arguments)


def test_a_captured_training_step_has_the_losses_of_eager(runtime):
    losses = []
    for captured in (True, False):
        model = adapt(make("qwen3.5").to(runtime.device)).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **({"capturable": True} if runtime.device.type ==
                                                                     "cuda" else {"fused": True}))

        def loss_fn(model, batch, tables):
            return model(input_ids=batch["ids"], tables=tables, labels=batch["labels"]).loss

        step = gs.TrainStep(model, loss_fn, optimizer, runtime=runtime, bucket=BUCKET, max_grad_norm=1.0,
                            inputs={"batch['labels']": gs.Input("tokens", pad=-100)})
        for seed, lengths in enumerate([[30, 0, 7], [96], [4, 5, 6, 20, 1]]):
            ids, cu = batch(lengths, runtime.device, seed)
            data = {"ids": ids, "labels": labels_of(ids, cu), "cu_seqlens": cu}
            losses.append(float(step(data) if captured else step.eager(data)))
    assert losses[:3] == losses[3:]
