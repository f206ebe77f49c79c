"""Who serves an operator: by argument, context manager or environment variable, else this project's kernels.

Requirements
------------
1. Providers are found through the entry-point group ``graphsafe.providers``; none is imported before it is asked for.
2. An explicit choice wins: the argument, then the innermost ``using(...)``, then the environment variable
   ``GRAPHSAFE_PROVIDER`` (``name``, or ``operator=name`` pairs separated by commas), then this project's own.
3. The provider chosen serves the call or refuses it with the reason; no other one is tried in its place.
4. Every choice is logged under ``graphsafe.providers``, once per operator, provider and source: at INFO, and the
   default at DEBUG.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib.metadata
import logging
import os
from collections.abc import Iterator
from typing import Any

from graphsafe.errors import error
from graphsafe_kernels.providers.service import OPERATORS, Provider, request_of

__all__ = [
    "DEFAULT",
    "ENTRY_POINTS",
    "ENVIRONMENT_VARIABLE",
    "build_tables",
    "causal_conv1d",
    "chosen",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "get_provider",
    "known_providers",
    "register",
    "serve",
    "survey",
    "using",
]

ENTRY_POINTS = "graphsafe.providers"
ENVIRONMENT_VARIABLE = "GRAPHSAFE_PROVIDER"
DEFAULT = "graphsafe"

_log = logging.getLogger(ENTRY_POINTS)
_providers: dict[str, Provider] = {}
_logged: set[tuple[str, str, str]] = set()
_context: contextvars.ContextVar[tuple[tuple[str | None, str], ...]] = contextvars.ContextVar("providers", default=())


def known_providers() -> tuple[str, ...]:
    """Names of all registered providers, usable here or not; nothing is imported."""
    entries = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return tuple(sorted({*_providers, *(e.name for e in entries)}))


def register(provider: Provider) -> None:
    """Add a provider of this process, without an entry point. A name that is taken is refused."""
    if provider.name in known_providers():
        raise error("argument", f"a provider called {provider.name!r} is registered already")
    _providers[provider.name] = provider


def get_provider(name: str) -> Provider:
    """The provider called ``name``; raises rule ``argument`` with the known names for another."""
    if name not in _providers:
        entry = next((e for e in importlib.metadata.entry_points(group=ENTRY_POINTS) if e.name == name), None)
        if entry is None:
            raise error("argument", f"no provider {name!r}; known: {', '.join(known_providers())}")
        _providers[name] = entry.load()()
    return _providers[name]


@contextlib.contextmanager
def using(name: str, operator: str | None = None) -> Iterator[Provider]:
    """Inside the block, ``name`` serves ``operator``, or every operator; blocks nest, the innermost wins."""
    provider = get_provider(name)
    if operator is not None and operator not in OPERATORS:
        raise error("argument", f"no operator {operator!r} has providers; there are {', '.join(OPERATORS)}")
    token = _context.set(((operator, name), *_context.get()))
    try:
        yield provider
    finally:
        _context.reset(token)


def chosen(operator: str, provider: str | None = None) -> Provider:
    """The provider that serves ``operator`` now; see requirement 2."""
    name, source = _choose(operator, provider)
    found = get_provider(name)
    if (operator, name, source) not in _logged:
        _logged.add((operator, name, source))
        _log.log(logging.DEBUG if source == "default" else logging.INFO, "%s: %s (%s)", operator, name, source)
    return found


def _choose(operator: str, provider: str | None) -> tuple[str, str]:
    if provider is not None:
        return provider, "argument"
    for wanted, name in _context.get():
        if wanted in (None, operator):
            return name, "context"
    name = _from_environment(operator, os.environ.get(ENVIRONMENT_VARIABLE, ""))
    return (name, "environment") if name else (DEFAULT, "default")


def _from_environment(operator: str, text: str) -> str:
    general = ""
    for part in filter(None, (p.strip() for p in text.split(","))):
        wanted, equals, name = part.partition("=")
        if not equals:
            general = part
        elif wanted not in OPERATORS:
            raise error(
                "argument",
                f"{ENVIRONMENT_VARIABLE} names an operator {wanted!r}; there are {', '.join(OPERATORS)}",
            )
        elif wanted == operator:
            return name
    return general


def serve(operator: str, *args: Any, provider: str | None = None, **kwargs: Any) -> Any:
    """Call ``operator`` by the provider chosen. Arguments and results are those of this package's operator.

    Raises rule ``unsupported`` where the provider cannot serve the call: with what it lacks, and what to do.
    """
    found = chosen(operator, provider)
    request = request_of(operator, *args, **kwargs)
    found.require(request)
    return found.function(operator)(**request.arguments)


def survey(operator: str, *args: Any, **kwargs: Any) -> dict[str, str | None]:
    """For every known provider: why it cannot serve this call here, or None where it can."""
    request = request_of(operator, *args, **kwargs)
    return {name: get_provider(name).refusal(request) for name in known_providers()}


def chunk_gated_delta_rule(*args: Any, provider: str | None = None, **kwargs: Any) -> Any:
    """:func:`graphsafe_kernels.gdn.chunk_gated_delta_rule`, by ``provider``."""
    return serve("chunk_gated_delta_rule", *args, provider=provider, **kwargs)


def chunk_kda(*args: Any, provider: str | None = None, **kwargs: Any) -> Any:
    """:func:`graphsafe_kernels.kda.chunk_kda`, by ``provider``."""
    return serve("chunk_kda", *args, provider=provider, **kwargs)


def causal_conv1d(*args: Any, provider: str | None = None, **kwargs: Any) -> Any:
    """:func:`graphsafe_kernels.conv.causal_conv1d`, by ``provider``."""
    return serve("causal_conv1d", *args, provider=provider, **kwargs)


def build_tables(*args: Any, provider: str | None = None, **kwargs: Any) -> Any:
    """:func:`graphsafe.metadata.build_tables`, by ``provider``."""
    return serve("build_tables", *args, provider=provider, **kwargs)
