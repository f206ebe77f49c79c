"""What a graph reads from outside: deaths are told at once, moves by comparing addresses, and nothing is kept alive."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from graphsafe._outside import EACH, OutsideTensors
from graphsafe._storage import StorageRef, key_of
from graphsafe._watch import Outside
from graphsafe.testing.suite.checks import refused


def watched(tensors):
    """What a watch knows after the tensors, or tensors that share their storages, were read."""
    read = {
        key_of(t): Outside(weakref.ref(t), StorageRef(t), tuple(t.shape), None, "aten::mul.Tensor") for t in tensors
    }
    outside = OutsideTensors()
    outside.remember(SimpleNamespace(outside=read, born={}))
    return outside


@pytest.mark.parametrize("through", ["itself", "a tensor that is gone"])
@pytest.mark.parametrize("count", [1, 40])
def test_a_death_is_told_at_once_also_where_another_is_born_there(through, count):
    held = [torch.ones(1000) for _ in range(count)]
    outside = watched(held if through == "itself" else [t.detach() for t in held])
    outside.check()
    outside.check(strict=True)
    del held[count // 2]
    reborn = [torch.zeros(1000) for _ in range(8)]
    assert "[1000]" in refused("input-died", outside.check).what
    refused("input-died", outside.check)
    del reborn
    outside.forget()
    outside.check()


def test_nothing_is_kept_alive():
    held = [torch.ones(10)]
    outside = watched(held)
    gone = weakref.ref(held[0])
    storage = StorageRef(held[0])
    held.clear()
    gc.collect()
    assert gone() is None
    assert not storage.alive()
    refused("input-died", outside.check)


@pytest.mark.parametrize("old_lives", [False, True])
@pytest.mark.parametrize("count", [1, 40])
def test_a_move_is_told_in_turn_and_at_once_if_strict_or_the_old_storage_died(old_lives, count):
    held = [torch.ones(10) for _ in range(count)]
    outside = watched(held)
    old = held[-1].view(2, 5) if old_lives else None
    held[-1].data = torch.zeros(10)
    assert "another storage" in refused("storage-replaced", outside.check, strict=True).what

    def in_turn():
        for _ in range(-(-count // EACH) if old_lives else 1):
            outside.check()

    refused("storage-replaced", in_turn)
    del old


@pytest.mark.parametrize("through", ["itself", "a tensor that is gone"])
def test_a_storage_that_was_resized_is_told(through):
    held = torch.ones(10)
    outside = watched([held] if through == "itself" else [held.detach()])
    held.untyped_storage().resize_(1 << 20)
    refused("storage-replaced", outside.check)
