"""Boundaries that cannot be right are refused where reading them is free; a mask of live rows is device work."""

from __future__ import annotations

import pytest
import torch

import graphsafe as gs
from graphsafe.compare import differences

BUCKET = gs.Bucket(tokens=64, sequences=4, chunk_size=16)


@pytest.fixture
def call():
    return gs.graphed(lambda x, cu_seqlens: x * 2, runtime=gs.get_runtime("cpu"), buckets=[BUCKET])


@pytest.mark.parametrize("values", [[0, 30], [0, 15, 5, 20], [3, 15, 20], [0, 500], [0, 2**40], [0, -1, 20]])
def test_wrong_boundaries_are_refused_before_anything_is_written(call, values):
    x = torch.randn(1, 20, 3)
    call(x, torch.tensor([0, 20]))
    with pytest.raises(gs.MetadataError) as caught:
        call(x, torch.tensor(values))
    assert caught.value.rule.name == "tables"
    assert "'cu_seqlens'" in caught.value.what
    assert torch.equal(call(x, torch.tensor([0, 20])), x * 2)


def test_boundaries_may_end_before_the_tokens_do(call):
    assert call(torch.randn(1, 20, 3), torch.tensor([0, 7])).shape == (1, 20, 3)


def test_a_masked_mean_is_that_of_the_batch_itself(runtime):
    @gs.graphed(runtime=runtime, buckets=[BUCKET])
    def mean(x, cu_seqlens, tables):
        live = tables.live(x.shape[1])[None, :, None]
        return torch.where(live, x, 0.0).sum() / (live.sum() * x.shape[2])

    for lengths in ([20], [5, 0, 30], [64], [1]):
        x = torch.randn(1, sum(lengths), 3, dtype=torch.float64).to(runtime.device)
        got = mean(x, torch.tensor([0, *lengths]).cumsum(0).to(runtime.device))
        assert abs(float(got) - float(x.mean())) < 1e-12
    assert not differences(mean.eager(x, torch.tensor([0, 1], device=runtime.device)), got)
