"""A case made real: its operands on a device, the body that is timed, and its fp64 oracle.

Requirements
------------
1. The same body runs at the batch's own size and at the bucket's: only its tensors and its tables differ.
2. Operands are fresh random values of a seeded generator, never zeros; two batches of one case differ in values and in
   layout, so that leftovers of one cannot pass for results of the other. Parameters (``fixed``) stay.
3. The oracle is the PyTorch reference on the same operands in fp64, at the batch's own size, without a graph.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from graphsafe.bench.cases import Case
from graphsafe.bench.heads import by_heads
from graphsafe.metadata import ChunkTables

__all__ = ["Operand", "Tensors", "Workload", "public_operator", "workload_of"]

Tensors = dict[str, torch.Tensor]
_PUBLIC = {"gdn": "chunk_gated_delta_rule", "kda": "chunk_kda", "conv": "causal_conv1d", "tables": "build_tables"}


def public_operator(case: Case) -> str | None:
    """The operator of a case whose providers can be compared; None for a layer or a step."""
    return _PUBLIC.get(case.operator)


@dataclass(frozen=True)
class Operand:
    """One input. ``kind``: ``tokens`` ``[1, T, *tail]``, ``sequences`` ``[N, *tail]``, or ``fixed`` ``tail``: a
    parameter, the same in every batch.

    ``make``: its values from standard normal ones. ``gradient``: whether the backward gives its gradient.
    """

    kind: str
    tail: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[torch.Tensor], torch.Tensor] = lambda normal: normal
    gradient: bool = True

    def shape(self, tokens: int, sequences: int) -> tuple[int, ...]:
        return {"tokens": (1, tokens), "sequences": (sequences,), "fixed": ()}[self.kind] + self.tail


class Workload(ABC):
    """What the bench needs to know of a case; see the module's requirements.

    ``operator``: the public operator whose providers can be compared, or None. ``operands``: inputs by name.
    ``outputs``: the kind of each result by name, as of operands. ``cotangents``: result -> operand that holds its
    gradient.
    """

    operator: str | None = None
    operands: Mapping[str, Operand]
    outputs: Mapping[str, str]
    cotangents: Mapping[str, str]

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case = case
        self.device = device
        self.dtype: torch.dtype = getattr(torch, case.dtype)

    @property
    def backward(self) -> bool:
        return self.case.direction == "forward+backward"

    def batch(self, number: int) -> Tensors:
        """The operands and ``cu_seqlens`` of batch ``number`` at its own size."""
        case = self.case
        changing = torch.Generator(device=self.device).manual_seed(17 + number)
        lasting = torch.Generator(device=self.device).manual_seed(16)
        made: Tensors = {}
        for name, operand in self.operands.items():
            shape = operand.shape(case.live_tokens, case.live_sequences)
            generator = lasting if operand.kind == "fixed" else changing
            normal = torch.randn(shape, generator=generator, device=self.device)
            made[name] = operand.make(normal).to(operand.dtype)
        ends = torch.tensor([0, *case.lengths(number)], dtype=torch.int64).cumsum(0)
        made["cu_seqlens"] = ends.to(torch.int32).to(self.device)
        return made

    @abstractmethod
    def forward(self, function: Callable[..., Any], tensors: Tensors, arguments: Mapping[str, Any]) -> Tensors:
        """Call ``function`` (a provider's, or the layer) and name its results."""

    def graph_arguments(self, tables: ChunkTables) -> dict[str, Any]:
        """What asks for the fixed-capacity path with these tables."""
        return {
            "use_graph": True,
            "max_num_seqs": tables.max_num_seqs,
            "chunk_indices": tables.chunk_indices,
            "chunk_offsets": tables.chunk_offsets,
        }

    def parameters(self) -> Mapping[str, torch.Tensor]:
        """Tensors that are no operands and get a gradient: a layer's parameters."""
        return {}

    def run(self, function: Callable[..., Any], tensors: Tensors, arguments: Mapping[str, Any]) -> Tensors:
        """The body: forward, and its gradients where the case asks for them."""
        if not self.backward:
            with torch.no_grad():
                return self.forward(function, tensors, arguments)
        with torch.enable_grad():
            leaves = {name: tensors[name].detach().requires_grad_() for name in self._differentiable()}
            results = self.forward(function, {**tensors, **leaves}, arguments)
            wanted = {**leaves, **self.parameters()}
            heads = [name for name in self.cotangents if name in results]
            gradients = torch.autograd.grad(
                [results[name] for name in heads],
                list(wanted.values()),
                [tensors[self.cotangents[name]] for name in heads],
            )
        found = {name: value.detach() for name, value in results.items()}
        return found | {f"d{name}": gradient for name, gradient in zip(wanted, gradients, strict=True)}

    def result_kind(self, name: str) -> str:
        """``tokens``, ``sequences`` or ``fixed``: how the result ``name`` follows the batch."""
        if name in self.outputs:
            return self.outputs[name]
        operand = self.operands.get(name.removeprefix("d"))
        return operand.kind if operand is not None else "fixed"

    def oracle(self, tensors: Tensors, device: torch.device) -> Tensors:
        """The results in fp64 on ``device``."""
        from graphsafe_kernels.backend import reference_only

        wide = {n: (t.double() if t.is_floating_point() else t).to(device) for n, t in tensors.items()}
        with reference_only():
            return self.run(self.oracle_function(device), wide, {})

    def oracle_function(self, device: torch.device) -> Callable[..., Any]:
        return self.function("reference")

    def function(self, provider: str) -> Callable[..., Any]:
        """The provider's callable of this operator."""
        from graphsafe_kernels.providers import get_provider

        assert self.operator is not None
        found: Callable[..., Any] = get_provider(provider).function(self.operator)
        return found

    def refusal(self, provider: str, tensors: Tensors, arguments: Mapping[str, Any]) -> str | None:
        """Why ``provider`` cannot serve this body, or None."""
        from graphsafe_kernels.providers import get_provider, request_of

        if self.operator is None:
            return None if provider == "graphsafe" else "a layer and a step are measured with this project's kernels"
        leaves = set(self._differentiable()) if self.backward else set()
        seen = {n: t.detach().requires_grad_(n in leaves) for n, t in tensors.items() if t.is_floating_point()}
        reasons: list[str | None] = []

        def ask(**call: Any) -> None:
            reasons.append(get_provider(provider).refusal(request_of(str(self.operator), **call)))
            raise _Asked

        with torch.set_grad_enabled(self.backward):
            with contextlib.suppress(_Asked):
                self.forward(ask, {**tensors, **seen}, arguments)
        return reasons[0]

    def _differentiable(self) -> list[str]:
        return [name for name, operand in self.operands.items() if operand.gradient]


class _Asked(Exception):
    """Ends a forward whose arguments alone were wanted."""


class DeltaRule(Workload):
    """GDN or KDA, as the model that uses it calls it."""

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__(case, device)
        self.operator = _PUBLIC[case.operator]
        h, hv, k, v, dt = case.heads, case.value_heads, case.key_dim, case.value_dim, self.dtype
        normed, gate = case.options.get("use_qk_l2norm_in_kernel"), case.options.get("use_gate_in_kernel")
        qk = Operand("tokens", (h, k), dt, (lambda x: x) if normed else (lambda x: F.normalize(x, dim=-1)))
        decay = Operand("tokens", (hv, k) if case.operator == "kda" else (hv,), dt if gate else torch.float32)
        if not gate:
            decay = Operand(decay.kind, decay.tail, decay.dtype, F.logsigmoid)
        raw = case.options.get("use_beta_sigmoid_in_kernel")
        operands = {
            "q": qk,
            "k": qk,
            "v": Operand("tokens", (hv, v), dt),
            "g": decay,
            "beta": Operand("tokens", (hv,), dt, (lambda x: x) if raw else torch.sigmoid),
        }
        if gate:
            bias = hv * k if case.operator == "kda" else hv
            operands["A_log"] = Operand("fixed", (hv,), torch.float32, lambda x: (x.abs() + 1).log())
            operands["dt_bias"] = Operand("fixed", (bias,), torch.float32)
        self.outputs = {"o": "tokens"}
        self.cotangents = {"o": "do"}
        if case.states:
            operands["initial_state"] = Operand("sequences", (hv, k, v), torch.float32)
            self.outputs = {"o": "tokens", "final_state": "sequences"}
            self.cotangents = {"o": "do", "final_state": "dht"}
        if self.backward:
            operands["do"] = Operand("tokens", (hv, v), dt, gradient=False)
            if case.states:
                operands["dht"] = Operand("sequences", (hv, k, v), torch.float32, gradient=False)
        self.operands = operands

    def forward(self, function: Callable[..., Any], tensors: Tensors, arguments: Mapping[str, Any]) -> Tensors:
        named = {n: tensors[n] for n in (*self.operands, "cu_seqlens") if n not in ("do", "dht")}
        o, state = function(**named, output_final_state=self.case.states, **self._options(), **arguments)
        return {"o": o, "final_state": state} if self.case.states else {"o": o}

    def oracle(self, tensors: Tensors, device: torch.device) -> Tensors:
        return by_heads(self, tensors, lambda part: Workload.oracle(self, part, device))

    def _options(self) -> dict[str, Any]:
        size = {} if self.case.chunk_size == 64 else {"chunk_size": self.case.chunk_size}
        return {**self.case.options, **size}


class Convolution(Workload):
    """The short convolution with bias, SiLU and states."""

    operator = _PUBLIC["conv"]

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__(case, device)
        d, w, dt = case.width, case.taps, self.dtype
        operands = {
            "x": Operand("tokens", (d,), dt),
            "weight": Operand("fixed", (d, w), dt),
            "bias": Operand("fixed", (d,), dt),
        }
        self.outputs, self.cotangents = {"y": "tokens"}, {"y": "dy"}
        if case.states:
            operands["initial_state"] = Operand("sequences", (d, w), dt)
            self.outputs = {"y": "tokens", "final_state": "sequences"}
        if self.backward:
            operands["dy"] = Operand("tokens", (d,), dt, gradient=False)
        self.operands = operands

    def forward(self, function: Callable[..., Any], tensors: Tensors, arguments: Mapping[str, Any]) -> Tensors:
        named = {n: tensors[n] for n in (*self.operands, "cu_seqlens") if n != "dy"}
        y, state = function(
            **named, output_final_state=self.case.states, activation="silu", **self.case.options, **arguments
        )
        return {"y": y, "final_state": state} if self.case.states else {"y": y}


class Tables(Workload):
    """The chunk tables alone: integers, compared bit for bit with their definition on the host."""

    operator = _PUBLIC["tables"]
    operands: Mapping[str, Operand] = {}
    outputs: Mapping[str, str] = {"chunk_indices": "slots", "chunk_offsets": "boundaries"}
    cotangents: Mapping[str, str] = {}

    def forward(self, function: Callable[..., Any], tensors: Tensors, arguments: Mapping[str, Any]) -> Tensors:
        tokens = arguments.get("tokens", self.case.live_tokens)
        built = function(cu_seqlens=tensors["cu_seqlens"], tokens=tokens, chunk_size=self.case.chunk_size)
        return {"chunk_indices": built.chunk_indices, "chunk_offsets": built.chunk_offsets}

    def graph_arguments(self, tables: ChunkTables) -> dict[str, Any]:
        return {"tokens": self.case.tokens}


def workload_of(case: Case, device: torch.device) -> Workload:
    """The workload of an operator or layer case."""
    if case.is_layer:
        from graphsafe.bench.layers import Layer

        return Layer(case, device)
    kinds: dict[str, type[DeltaRule] | type[Convolution] | type[Tables]] = {
        "gdn": DeltaRule,
        "kda": DeltaRule,
        "conv": Convolution,
        "tables": Tables,
    }
    return kinds[case.operator](case, device)
