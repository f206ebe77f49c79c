"""An escaped tensor is named even where a function transform has left wrappers without a storage behind."""

from __future__ import annotations

import pytest
import torch

import graphsafe as gs

_KEPT: list[torch.Tensor] = []


def left_behind(x):
    wrappers = []

    def row(r):
        wrappers.append(r)
        return r * 2

    torch.vmap(row)(x)
    return wrappers


def test_a_wrapper_that_outlives_its_transform_does_not_hide_an_escape():
    runtime, x = gs.get_runtime("cpu"), torch.ones(3, 4)
    wrappers = left_behind(x)
    with pytest.raises(NotImplementedError):
        wrappers[0].untyped_storage()

    def fail():  # a function of its own, to whose names the wrappers do not belong
        with runtime.capture():
            _KEPT.append(x * 2)

    with pytest.raises(gs.LifetimeError) as caught:
        fail()
    _KEPT.clear()
    assert caught.value.rule.name == "tensor-escapes"
    assert "is kept by" in caught.value.what
