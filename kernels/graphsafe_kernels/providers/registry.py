"""The providers there are, by name.

Requirements
------------
1. Providers are found through the entry-point group ``graphsafe.providers``; none is imported before it is asked for.
2. A provider of the process is added by ``register``; a name that is taken is refused.
"""

from __future__ import annotations

import importlib.metadata

from graphsafe.errors import error
from graphsafe_kernels.providers.service import Provider

__all__ = ["ENTRY_POINTS", "get_provider", "known_providers", "register"]

ENTRY_POINTS = "graphsafe.providers"

_providers: dict[str, Provider] = {}


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
