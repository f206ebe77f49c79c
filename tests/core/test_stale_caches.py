"""Caches in a body, keyed by what does not change when the contents do: found at the capture or by ``verify``."""

from __future__ import annotations

import copy

import pytest
import torch

import graphsafe as gs

rt = gs.get_runtime("cpu")
LAYOUTS = torch.tensor([0, 2, 6]), torch.tensor([0, 5, 6])


def rows(cu):
    """The sequence of each row, by a host read."""
    return torch.cat([torch.full((n,), i) for i, n in enumerate(cu.diff().tolist())])  # the host read


def by_identity():
    kept = [None, None]

    def ids(cu):
        if kept[0] is not cu:
            kept[:] = [cu, rows(cu)]
        return kept[1]

    return ids


def by_id():
    kept = {}

    def ids(cu):
        if id(cu) not in kept:
            kept[id(cu)] = cu, rows(cu)  # the tensor too: its id is not given out again
        return kept[id(cu)][1]

    return ids


@pytest.mark.parametrize("cache", [by_identity, by_id])
@pytest.mark.parametrize("buckets", [(), (gs.Bucket(6, 2),)], ids=["fixed", "bucket"])
def test_a_host_read_behind_a_cache_of_tensors_is_refused_at_the_capture(cache, buckets):
    ids = cache()
    if buckets:
        call = gs.graphed(lambda x, cu_seqlens: x.sum() * ids(cu_seqlens).sum(), runtime=rt, buckets=buckets)
    else:
        call = gs.graphed(lambda x, cu: x * ids(cu), runtime=rt)
    with pytest.raises(gs.UnsupportedError) as caught:
        call(torch.ones(1, 6) if buckets else torch.ones(6), LAYOUTS[0])
    assert caught.value.rule.name == "host-read"
    assert caught.value.where.function == "rows"


def test_verify_finds_a_cache_keyed_by_address():
    kept = {}

    def ids(cu):
        key = cu.untyped_storage().data_ptr()
        if key not in kept:
            kept[key] = rows(cu)
        return kept[key]

    call = gs.graphed(lambda x, cu: x * ids(cu), runtime=rt)
    call(torch.ones(6), LAYOUTS[0])
    with pytest.raises(gs.PaddingError) as caught:
        call.verify(torch.ones(6), LAYOUTS[1])
    assert caught.value.rule.name == "replay-differs"


def test_an_optimizer_state_that_was_loaded_over_is_refused_by_name():
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = gs.TrainStep(model, lambda m, batch: m(batch).square().mean(), optimizer, runtime=rt)
    step(torch.ones(4, 3))
    held = optimizer.state_dict()
    optimizer.load_state_dict(copy.deepcopy(held))
    with pytest.raises(gs.LifetimeError, match=r"optimizer\.state\[weight\]\['step'\]") as caught:
        step(torch.ones(4, 3))
    assert caught.value.rule.name == "storage-replaced"
