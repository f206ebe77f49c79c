"""What lint found, as values, as text and as JSON.

Requirements
------------
1. One finding per rule and line, with the number of times that one run of the body broke it there.
2. What a comment in the source allows is kept apart, with its reason; it does not make a report unclean.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from graphsafe.errors import GraphSafeError, Location
from graphsafe.rules import Rule

__all__ = ["Finding", "Report"]


@dataclass
class Finding:
    """One rule broken at one line.

    ``tensor`` says which tensor is to blame, where one is; ``count`` how often the line broke the rule in one run;
    ``allowed`` is the reason that a comment in the source gives, or None.
    """

    rule: Rule
    what: str
    where: Location | None
    remedy: str
    tensor: str | None = None
    count: int = 1
    allowed: str | None = None

    @classmethod
    def of(cls, problem: GraphSafeError, tensor: str | None = None) -> Finding:
        return cls(problem.rule, problem.what, problem.where, problem.remedy, tensor)

    @property
    def key(self) -> tuple[str, str, int]:
        """What makes two findings one: the rule, the file and the line."""
        return (self.rule.id, self.where.file, self.where.line) if self.where else (self.rule.id, self.what, 0)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "rule": self.rule.id,
            "name": self.rule.name,
            "category": str(self.rule.category),
            "what": self.what,
            "tensor": self.tensor,
            "file": self.where.file if self.where else None,
            "line": self.where.line if self.where else None,
            "function": self.where.function if self.where else None,
            "why": self.rule.why,
            "remedy": self.remedy,
            "count": self.count,
            "allowed": self.allowed,
        }


@dataclass
class Report:
    """``findings`` in the order of their lines, ``allowed`` ones apart; ``layouts`` that were run; ``operators`` of a
    run of the body."""

    target: str
    findings: list[Finding] = field(default_factory=list)
    allowed: list[Finding] = field(default_factory=list)
    layouts: int = 1
    operators: int = 0

    @property
    def clean(self) -> bool:
        return not self.findings

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "target": self.target,
            "clean": self.clean,
            "layouts": self.layouts,
            "operators": self.operators,
            "findings": [f.as_dict() for f in self.findings],
            "allowed": [f.as_dict() for f in self.allowed],
        }

    def __str__(self) -> str:
        lines = []
        for f in self.findings:
            times = f" ({f.count} times)" if f.count > 1 else ""
            lines.append(f"{f.where or self.target}: {f.rule} ({f.rule.category}): {f.what}{times}")
            if f.tensor is not None:
                lines.append(f"    tensor: {f.tensor}")
            lines.append(f"    remedy: {f.remedy}")
        lines.append(
            f"{self.target}: {len(self.findings)} findings, {len(self.allowed)} allowed; "
            f"{self.operators} operators, {self.layouts} layouts"
        )
        return "\n".join(lines)
