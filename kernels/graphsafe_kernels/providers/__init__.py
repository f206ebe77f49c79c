"""Providers: implementations of one operator, this project's and others', behind one call.

The public operators take a ``provider``; :mod:`graphsafe_kernels.providers.choice` says how one is chosen, and
:mod:`graphsafe_kernels.providers.service` what one declares.
"""

from graphsafe_kernels.providers.choice import (
    DEFAULT,
    ENVIRONMENT_VARIABLE,
    chosen,
    selectable,
    serve,
    survey,
    using,
)
from graphsafe_kernels.providers.registry import ENTRY_POINTS, get_provider, known_providers, register
from graphsafe_kernels.providers.service import Provider, Request, Service, request_of

__all__ = [
    "DEFAULT",
    "ENTRY_POINTS",
    "ENVIRONMENT_VARIABLE",
    "Provider",
    "Request",
    "Service",
    "chosen",
    "get_provider",
    "known_providers",
    "register",
    "request_of",
    "selectable",
    "serve",
    "survey",
    "using",
]
