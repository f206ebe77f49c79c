"""What a provider declares, and how a request is held against it.

Requirements
------------
1. A provider says for each operator it serves: devices, dtypes, options, whether it is graph-safe and why not, whether
   its adapter has a backward, and every conversion of layout or value that its adapter makes around the call.
2. A request is a call of this package's public operator, bound to its signature; an option is in use when its value is
   not the default.
3. What cannot be served is refused with the reason, before anything is called and without a host read.
4. Graph-safe means the whole graph contract under ``use_graph=True``: fixed shapes, sentinels, zero padding rows, no
   memory shared between graphs. A library that merely survives a capture of one layout is not graph-safe.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from graphsafe.errors import error

__all__ = ["GRAPH_ARGUMENTS", "OPERATORS", "Provider", "Request", "Service", "request_of"]

OPERATORS: dict[str, str] = {
    "build_tables": "graphsafe_kernels.providers.own",
    "causal_conv1d": "graphsafe_kernels.conv",
    "chunk_gated_delta_rule": "graphsafe_kernels.gdn",
    "chunk_kda": "graphsafe_kernels.kda",
}
"""Operator -> module of the public function whose signature every request is bound to."""

GRAPH_ARGUMENTS = ("use_graph", "max_num_seqs", "chunk_indices", "chunk_offsets")
"""Arguments that only a graph-safe provider is handed."""


@functools.cache
def own_operator(operator: str) -> Callable[..., Any]:
    """This package's own function of that name, past the choice of a provider."""
    if operator not in OPERATORS:
        raise error("argument", f"no operator {operator!r} has providers; there are {', '.join(OPERATORS)}")
    function: Callable[..., Any] = getattr(importlib.import_module(OPERATORS[operator]), operator).__wrapped__
    return function


@functools.cache
def _signature(operator: str) -> inspect.Signature:
    """The public signature, less the choice of a provider, which is no part of a request."""
    signature = inspect.signature(own_operator(operator))
    return signature.replace(parameters=[p for p in signature.parameters.values() if p.name != "provider"])


@dataclass(frozen=True)
class Request:
    """A call to be served: ``arguments`` holds every operand, and every option that differs from its default."""

    operator: str
    arguments: Mapping[str, Any]
    options: tuple[str, ...]
    """Names in ``arguments`` that have a default in the public signature."""

    @property
    def use_graph(self) -> bool:
        return bool(self.arguments.get("use_graph", False))

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self.arguments.items() if isinstance(value, torch.Tensor)}

    @property
    def first(self) -> torch.Tensor:
        """The first operand: its device and dtype are the request's."""
        return next(iter(self.tensors.values()))

    @property
    def wants_gradients(self) -> bool:
        return torch.is_grad_enabled() and any(t.requires_grad for t in self.tensors.values())


def request_of(operator: str, *args: Any, **kwargs: Any) -> Request:
    """Bind a call to the public operator's signature; a call that does not fit raises rule ``argument``."""
    signature = _signature(operator)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as problem:
        raise error("argument", f"{operator}: {problem}") from problem
    arguments: dict[str, Any] = {}
    options = []
    for name, value in bound.arguments.items():
        parameter = signature.parameters[name]
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(value)
            options.extend(value)
        elif parameter.default is inspect.Parameter.empty:
            arguments[name] = value
        elif value is not parameter.default and (isinstance(value, torch.Tensor) or value != parameter.default):
            arguments[name] = value
            options.append(name)
    if not any(isinstance(value, torch.Tensor) for value in arguments.values()):
        raise error("argument", f"{operator} was called without a tensor")
    return Request(operator, arguments, tuple(options))


@dataclass(frozen=True)
class Service:
    """What a provider offers of one operator. ``limit`` names what else it cannot do with a request, or None.

    ``devices``: device types, empty for any. ``options``: the options it takes, None for all of the operator.
    ``unsafe``: why it is not graph-safe; empty for a graph-safe one. ``conversions``: what the adapter does to operands
    and results around the call; their cost is part of every measurement.
    """

    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    options: frozenset[str] | None = None
    unsafe: str = ""
    backward: bool = True
    conversions: tuple[str, ...] = ()
    limit: Callable[[Request], str | None] = field(default=lambda request: None)

    @property
    def graph_safe(self) -> bool:
        return not self.unsafe

    def refusal(self, request: Request) -> str | None:
        """Why ``request`` cannot be served, or None."""
        t = request.first
        if self.devices and t.device.type not in self.devices:
            return f"it runs on {' or '.join(self.devices)}, and the operands are on {t.device.type}"
        if t.dtype not in self.dtypes:
            return f"it takes {_names(self.dtypes)}, and the operands are {_names((t.dtype,))}"
        if request.use_graph and self.unsafe:
            return f"it is not graph-safe: {self.unsafe}"
        if self.options is not None:
            taken = self.options | set(GRAPH_ARGUMENTS) if self.graph_safe else self.options
            unknown = [name for name in request.options if name not in taken]
            if unknown:
                return f"it has no {', '.join(unknown)}"
        if request.wants_gradients and not self.backward:
            return "its adapter has no backward, and an operand requires a gradient"
        return self.limit(request)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(d).removeprefix("torch.") for d in dtypes)


class Provider(ABC):
    """One source of operators. An adapter gives ``name``, ``services``, ``missing`` and ``function``.

    ``install``: what to do when it is missing. ``notes``: what a reader of its figures must know.
    """

    name: str
    install: str = ""
    notes: tuple[str, ...] = ()
    services: Mapping[str, Service]

    @abstractmethod
    def missing(self) -> str | None:
        """Exactly what this machine lacks to run it, or None. Imports nothing heavy."""

    @abstractmethod
    def function(self, operator: str) -> Callable[..., Any]:
        """The callable of one operator: takes a request's ``arguments`` as keywords, returns as the public one."""

    @property
    def distributions(self) -> tuple[str, ...]:
        """Names of the distributions whose versions belong to a record of its figures."""
        return ()

    def refusal(self, request: Request) -> str | None:
        """Why this provider cannot serve ``request`` here, or None."""
        service = self.services.get(request.operator)
        if service is None:
            return f"it has no {request.operator}; it has {', '.join(sorted(self.services))}"
        missing = self.missing()
        if missing is not None:
            return f"it is not usable here: {missing}"
        return service.refusal(request)

    def require(self, request: Request) -> None:
        """Raise rule ``unsupported`` with the reason if ``request`` cannot be served."""
        reason = self.refusal(request)
        if reason is not None:
            remedy = self.install if self.missing() is not None else "Change the request, or name another provider."
            raise error(
                "unsupported",
                f"the provider {self.name!r} cannot serve this call of {request.operator}: {reason}",
                why="A provider serves a request as it is or refuses it; nothing else is called in its place.",
                remedy=remedy,
            )
