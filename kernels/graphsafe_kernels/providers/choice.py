"""Who serves a call of an operator: by argument, context manager or environment variable, else this project's kernels.

Requirements
------------
1. An explicit choice wins: the operator's argument ``provider``, then the innermost ``using(...)``, then the variable
   ``GRAPHSAFE_PROVIDER`` (``name``, or ``operator=name`` pairs separated by commas), which is read once, at import: a
   look at the environment costs more than all the rest. Else this project's own.
2. The provider chosen serves the call or refuses it with the reason; no other one is tried in its place.
3. Every choice is logged under ``graphsafe.providers``, once per operator, provider and source: at INFO, and the
   default at DEBUG.
4. A call that chooses nothing costs two look-ups, and its arguments are handed on as they are.
5. An operator that a provider calls while it serves is this project's own, unless it says otherwise: none calls itself.
6. Inside ``reference_only()`` context and environment choose nothing: the oracle of a comparison stays the reference.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from graphsafe.errors import error
from graphsafe_kernels.backend import only_reference
from graphsafe_kernels.providers.registry import ENTRY_POINTS, get_provider, known_providers
from graphsafe_kernels.providers.service import OPERATORS, Provider, request_of

__all__ = ["DEFAULT", "ENVIRONMENT_VARIABLE", "chosen", "own_serves", "selectable", "serve", "survey", "using"]

ENVIRONMENT_VARIABLE = "GRAPHSAFE_PROVIDER"
DEFAULT = "graphsafe"

_environment = os.environ.get(ENVIRONMENT_VARIABLE, "")

_log = logging.getLogger(ENTRY_POINTS)
_logged: set[tuple[str, str, str]] = set()
_context: contextvars.ContextVar[tuple[tuple[str | None, str], ...]] = contextvars.ContextVar("providers", default=())
_SERVING: tuple[tuple[str | None, str], ...] = ((None, DEFAULT),)
"""The context while a provider serves a call."""

P = ParamSpec("P")
R = TypeVar("R")


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
    """The provider that serves ``operator`` now; see requirement 1."""
    name, source = _choose(operator, provider)
    found = get_provider(name)
    _say(operator, name, source)
    return found


def own_serves(operator: str) -> bool:
    """Whether this project's own kernels serve ``operator`` now; no provider is loaded to find out."""
    return _choose(operator, None)[0] == DEFAULT


def _choose(operator: str, provider: str | None) -> tuple[str, str]:
    if provider is not None:
        return provider, "argument"
    for wanted, name in _context.get():
        if wanted in (None, operator):
            return name, "context"
    name = _from_environment(operator, _environment)
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


def _say(operator: str, name: str, source: str) -> None:
    if (operator, name, source) not in _logged:
        _logged.add((operator, name, source))
        _log.log(logging.DEBUG if source == "default" else logging.INFO, "%s: %s (%s)", operator, name, source)


def serve(operator: str, *args: Any, provider: str | None = None, **kwargs: Any) -> Any:
    """Call ``operator`` by the provider chosen. Arguments and results are those of this package's operator.

    Raises rule ``unsupported`` where the provider cannot serve the call: with what it lacks, and what to do.
    """
    found = chosen(operator, provider)
    request = request_of(operator, *args, **kwargs)
    found.require(request)
    token = _context.set(_SERVING)
    try:
        return found.function(operator)(**request.arguments)
    finally:
        _context.reset(token)


def survey(operator: str, *args: Any, **kwargs: Any) -> dict[str, str | None]:
    """For every known provider: why it cannot serve this call here, or None where it can."""
    request = request_of(operator, *args, **kwargs)
    return {name: get_provider(name).refusal(request) for name in known_providers()}


def selectable(operator: Callable[P, R]) -> Callable[P, R]:
    """Make a public operator follow the choice of provider; it declares ``provider`` itself, and never sees it.

    The operator as it was written stays reachable as ``__wrapped__``: it is what the provider ``graphsafe`` calls.
    """
    name = operator.__name__
    by_default = (name, DEFAULT, "default")

    @functools.wraps(operator)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        provider = kwargs.pop("provider", None)
        if provider is None:
            context = _context.get()
            if context is _SERVING or only_reference():
                return operator(*args, **kwargs)
            if not context and not _environment:
                if by_default not in _logged:
                    _say(*by_default)
                return operator(*args, **kwargs)
        result: R = serve(name, *args, provider=provider, **kwargs)  # type: ignore[arg-type]
        return result

    return call
