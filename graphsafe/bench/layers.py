"""Layers and the model of a training step, as workloads.

Requirements
------------
1. Parameters come from one seed, so that every arm, and the fp64 oracle, has the same.
2. A step's loss is a mean over live tokens, formed on the device: padding adds nothing to it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphsafe.bench.cases import Case
from graphsafe.bench.workloads import Operand, Tensors, Workload
from graphsafe.metadata import ChunkTables

__all__ = ["Layer", "Stack", "make_layer", "squared_error"]

_SEED = 3


def make_layer(case: Case) -> torch.nn.Module:
    """The case's layer in fp32 on the CPU, its parameters from one seed."""
    from graphsafe_kernels.layers import GatedDeltaNet, KimiDeltaAttention

    sizes: dict[str, Any] = {
        "hidden_size": case.hidden,
        "num_heads": case.heads,
        "num_v_heads": case.value_heads,
        "head_dim": case.key_dim,
        "expand_v": case.value_dim / case.key_dim,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        if case.rule == "gdn":
            gdn: torch.nn.Module = GatedDeltaNet(**sizes)
            return gdn
        kda: torch.nn.Module = KimiDeltaAttention(safe_gate=True, lower_bound=-5.0, **sizes)
        return kda


class Layer(Workload):
    """A whole layer: projections, convolutions, delta rule, gated norm, output projection."""

    outputs: Mapping[str, str] = {"y": "tokens"}
    cotangents: Mapping[str, str] = {"y": "dy"}

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__(case, device)
        self.module = make_layer(case).to(device, self.dtype)
        self._parameters = dict(self.module.named_parameters())
        operands = {"x": Operand("tokens", (case.hidden,), self.dtype)}
        if self.backward:
            operands["dy"] = Operand("tokens", (case.hidden,), self.dtype, gradient=False)
        self.operands = operands

    def parameters(self) -> Mapping[str, torch.Tensor]:
        return self._parameters

    def function(self, provider: str) -> Callable[..., Any]:
        return self.module

    def graph_arguments(self, tables: ChunkTables) -> dict[str, Any]:
        return {"use_graph": True, "tables": tables}

    def forward(self, function: Callable[..., Any], tensors: Tensors, arguments: Mapping[str, Any]) -> Tensors:
        return {"y": function(tensors["x"], cu_seqlens=tensors["cu_seqlens"], **arguments)[0]}

    def oracle(self, tensors: Tensors, device: torch.device) -> Tensors:
        wide = copy.copy(self)
        wide.module = copy.deepcopy(self.module).to(device, torch.float64)
        wide._parameters = dict(wide.module.named_parameters())
        return Workload.oracle(wide, tensors, device)

    def oracle_function(self, device: torch.device) -> Callable[..., Any]:
        return self.module


class Stack(torch.nn.Module):
    """``depth`` residual blocks of norm and layer."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList(torch.nn.RMSNorm(case.hidden) for _ in range(case.depth))
        self.layers = torch.nn.ModuleList(make_layer(case) for _ in range(case.depth))

    def forward(self, x: torch.Tensor, **batch: Any) -> torch.Tensor:
        """``x`` ``[1, T, hidden]`` and the batch's description as a layer takes it."""
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x), **batch)[0]
        return x


def squared_error(model: torch.nn.Module, batch: Tensors, tables: ChunkTables | None = None) -> torch.Tensor:
    """The mean squared error over live tokens; padding rows of ``x`` and ``target`` are zero and so is their error."""
    y = model(batch["x"], cu_seqlens=batch["cu_seqlens"], tables=tables, use_graph=tables is not None)
    live = batch["cu_seqlens"][-1] * y.shape[-1]
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    loss: torch.Tensor = (y - batch["target"]).square().sum(dtype=wide) / live
    return loss
