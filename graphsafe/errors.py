"""Typed errors: what, where, why, and what to do.

Requirements
------------
1. Every failure carries a rule (``graphsafe.rules``) and with it one of six categories.
2. The text names what failed, the caller's own file and line, why it matters, and the remedy.
3. A caller can catch by category (the classes here), by rule (``error.rule.id``), or all (``GraphSafeError``).
"""

from __future__ import annotations

from graphsafe._location import Location, caller
from graphsafe.rules import Category, Rule, rule

__all__ = [
    "ArgumentError",
    "BackendError",
    "CapacityError",
    "Category",
    "DistributedError",
    "GraphSafeError",
    "LifetimeError",
    "Location",
    "MetadataError",
    "PaddingError",
    "RuntimeMissingError",
    "UnsupportedError",
    "error",
]


class GraphSafeError(RuntimeError):
    """Base of all errors of this project.

    Attributes: ``rule`` (:class:`graphsafe.rules.Rule`), ``category`` (:class:`Category`), ``what``, ``where``
    (:class:`Location` of the caller's line, or None), ``why``, ``remedy``.
    """

    def __init__(
        self, rule: Rule, what: str, *, where: Location | None, why: str | None = None, remedy: str | None = None
    ) -> None:
        self.rule = rule
        self.category = rule.category
        self.what = what
        self.where = where
        self.why = why or rule.why
        self.remedy = remedy or rule.remedy
        super().__init__(self._text())

    def place(self, where: Location) -> None:
        """Name another line: that of the code to blame, where it is not on the stack."""
        self.where = where
        self.args = (self._text(),)

    def _text(self) -> str:
        return (
            f"{self.what}\n"
            f"  rule:   {self.rule} ({self.category})\n"
            f"  where:  {self.where or 'no line of the caller is on the stack'}\n"
            f"  why:    {self.why}\n"
            f"  remedy: {self.remedy}"
        )


class UnsupportedError(GraphSafeError):
    """Something that cannot be captured or is not supported in graph mode (rules GS1xx)."""


class ArgumentError(UnsupportedError, ValueError):
    """An argument is wrong in shape, type or value (rule GS108); also a ValueError."""


class RuntimeMissingError(UnsupportedError, LookupError):
    """No such runtime, or it cannot be used here (rule GS109); also a LookupError."""


class LifetimeError(GraphSafeError):
    """An address, a storage or a graph is not what the capture saw (rules GS2xx)."""


class MetadataError(GraphSafeError):
    """Tables, boundaries or host values are stale or do not agree (rules GS3xx)."""


class CapacityError(MetadataError):
    """A batch fits no bucket (rule GS305). Attributes as :class:`GraphSafeError`."""


class PaddingError(GraphSafeError):
    """Padding, sentinel or replay correctness (rules GS4xx)."""


class BackendError(GraphSafeError):
    """The eager back end failed before any graph was involved (rules GS5xx)."""


class DistributedError(GraphSafeError):
    """Ranks disagree (rules GS6xx)."""


_CLASS_OF_CATEGORY: dict[Category, type[GraphSafeError]] = {
    Category.UNSUPPORTED: UnsupportedError,
    Category.LIFETIME: LifetimeError,
    Category.METADATA: MetadataError,
    Category.PADDING: PaddingError,
    Category.BACKEND: BackendError,
    Category.DISTRIBUTED: DistributedError,
}
_CLASS_OF_RULE: dict[str, type[GraphSafeError]] = {
    "argument": ArgumentError,
    "runtime-missing": RuntimeMissingError,
    "capacity": CapacityError,
}


def error(
    rule_name: str, what: str, *, where: Location | None = None, why: str | None = None, remedy: str | None = None
) -> GraphSafeError:
    """Make the typed error of a rule; ``where`` defaults to the caller's own line."""
    r = rule(rule_name)
    cls = _CLASS_OF_RULE.get(r.name, _CLASS_OF_CATEGORY[r.category])
    return cls(r, what, where=where if where is not None else caller(), why=why, remedy=remedy)
