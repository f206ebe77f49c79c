"""Every mask is boolean: from Triton 3.9 the interpreter takes no others."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from graphsafe_kernels import backend
from graphsafe_kernels.conv import autograd as conv
from graphsafe_kernels.conv import causal_conv1d
from graphsafe_kernels.gdn import autograd as gdn
from graphsafe_kernels.gdn import chunk_gated_delta_rule, configurations
from graphsafe_kernels.kda import autograd as kda
from graphsafe_kernels.kda import chunk_kda, launch
from graphsafe_kernels.tables import build_tables


@pytest.fixture
def masks(device, monkeypatch):
    """The numpy types of the masks that the interpreter was given; empty on a device."""
    seen = []
    if device.type == "cpu":
        from triton.runtime.interpreter import InterpreterBuilder

        for name, place in (("create_masked_load", 1), ("create_masked_store", 2)):
            original = getattr(InterpreterBuilder, name)

            def kept(self, *operands, original=original, place=place):
                seen.append(operands[place].data.dtype)
                return original(self, *operands)

            monkeypatch.setattr(InterpreterBuilder, name, kept)
    monkeypatch.setitem(backend.TRITON, "causal_conv1d", conv.__name__)
    monkeypatch.setitem(backend.TRITON, "chunk_gated_delta_rule", gdn.__name__)
    monkeypatch.setitem(backend.TRITON, "chunk_kda", kda.__name__)
    for name in ("chunk_gated_delta_rule", "chunk_kda"):
        monkeypatch.delitem(backend.DEVICES, name, raising=False)
    backend._load.cache_clear()
    yield seen
    backend._load.cache_clear()


def convolve(cu, device):
    """Every width of channels and both sides of a sequence's start, with states and their gradients."""
    for width in (8, 1024):
        x = torch.randn(1, 40, width, device=device, requires_grad=True)
        weight = torch.randn(width, 4, device=device, requires_grad=True)
        initial = torch.randn(3, width, 4, device=device, requires_grad=True)
        y, final = causal_conv1d(x, weight, initial_state=initial, output_final_state=True, activation="silu",
                                 cu_seqlens=cu, chunk_size=16)  # fmt: skip
        (y.sum() + final.sum()).backward()


def carry(cu, device, monkeypatch, **fields):
    """The delta rule, its sequences cut or not."""
    chosen = configurations.configuration
    monkeypatch.setattr(configurations, "configuration", lambda *key: dataclasses.replace(chosen(*key), **fields))
    q, k = (torch.randn(1, 40, 1, 16, device=device, requires_grad=True) for _ in range(2))
    v = torch.randn(1, 40, 2, 16, device=device, requires_grad=True)
    g, beta = (torch.rand(1, 40, 2, device=device, requires_grad=True) for _ in range(2))
    state = torch.randn(3, 2, 16, 16, device=device, requires_grad=True)
    o, final = chunk_gated_delta_rule(q, k, v, g.neg(), beta, initial_state=state, output_final_state=True,
                                      cu_seqlens=cu, chunk_size=16)  # fmt: skip
    (o.sum() + final.sum()).backward()


def carry_channels(cu, device, monkeypatch, **fields):
    """KDA, its sequences cut or not."""
    chosen = launch.choose
    monkeypatch.setattr(launch, "choose", lambda *key: dataclasses.replace(chosen(*key), **fields))
    q, k, v, g = (torch.randn(1, 80, 1, 16, device=device, requires_grad=True) for _ in range(4))
    beta = torch.rand(1, 80, 1, device=device, requires_grad=True)
    state = torch.randn(3, 1, 16, 16, device=device, requires_grad=True)
    o, final = chunk_kda(q, k, v, g.abs().neg(), beta, initial_state=state, output_final_state=True, chunk_size=32,
                         use_qk_l2norm_in_kernel=True, cu_seqlens=cu)  # fmt: skip
    (o.sum() + final.sum()).backward()


@pytest.mark.parametrize("what", ["tables", "convolution", "delta rule", "delta rule, cut", "KDA", "KDA, cut"])
def test_masks_are_boolean(device, masks, monkeypatch, what):
    cu = torch.tensor([0, 20, 20, 37], dtype=torch.int32, device=device)
    long = torch.tensor([0, 40, 40, 75], dtype=torch.int32, device=device)
    call = {
        "tables": lambda: build_tables(cu, 40, 16),
        "convolution": lambda: convolve(cu, device),
        "delta rule": lambda: carry(cu, device, monkeypatch),
        "KDA": lambda: carry_channels(long, device, monkeypatch),
        "KDA, cut": functools.partial(carry_channels, long, device, monkeypatch, span=1),
        "delta rule, cut": functools.partial(carry, cu, device, monkeypatch, span=1, reverse_span=1),
    }
    call[what]()
    assert len(masks) > 0 or device.type != "cpu"
    assert {str(m) for m in masks} <= {"bool"}
