"""Providers: implementations of one operator, this project's and others', behind one call.

``chunk_gated_delta_rule``, ``chunk_kda``, ``causal_conv1d`` and ``build_tables`` here are the operators of this package
with one more argument, ``provider``; see :mod:`graphsafe_kernels.providers.registry` for how one is chosen.
"""

from graphsafe_kernels.providers.registry import (
    DEFAULT,
    ENTRY_POINTS,
    ENVIRONMENT_VARIABLE,
    build_tables,
    causal_conv1d,
    chosen,
    chunk_gated_delta_rule,
    chunk_kda,
    get_provider,
    known_providers,
    register,
    serve,
    survey,
    using,
)
from graphsafe_kernels.providers.service import Provider, Request, Service, request_of

__all__ = [
    "DEFAULT",
    "ENTRY_POINTS",
    "ENVIRONMENT_VARIABLE",
    "Provider",
    "Request",
    "Service",
    "build_tables",
    "causal_conv1d",
    "chosen",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "get_provider",
    "known_providers",
    "register",
    "request_of",
    "serve",
    "survey",
    "using",
]
