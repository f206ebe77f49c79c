"""The capability matrix as values, JSON and Markdown.

Requirements
------------
1. A row is ``supported``, ``unsupported`` (refused by a rule, or what it needs is not here) or ``failed`` (a wrong
   result, an error that no rule foresaw, a crash, no end in time). The last two say why: the category and the text.
2. On a simulated device every row says so, in every form.
3. Versions, device and driver are part of the matrix; nothing in it names a machine, a user or a path.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["FAILED", "SUPPORTED", "UNSUPPORTED", "Matrix", "Row"]

SUPPORTED, UNSUPPORTED, FAILED = "supported", "unsupported", "failed"


@dataclass(frozen=True)
class Row:
    """One capability.

    ``name``: ``group.what``. ``status``: supported, unsupported or failed. ``rule`` and ``category``: of the error,
    where there is one. ``text``: the error's text, or a note. ``explanation``: what a device's own error means.
    ``seconds``: how long the probe took, its process included.
    """

    name: str
    what: str
    status: str
    text: str = ""
    rule: str | None = None
    category: str | None = None
    explanation: str | None = None
    simulated: bool = False
    seconds: float = 0.0

    @property
    def group(self) -> str:
        return self.name.partition(".")[0]

    @property
    def result(self) -> str:
        """The status, marked where it is about a simulated device."""
        return f"{self.status} (simulated)" if self.simulated else self.status

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        names = ("name", "what", "status", "simulated", "rule", "category", "text", "explanation")
        return {**{name: getattr(self, name) for name in names}, "seconds": round(self.seconds, 2)}


@dataclass
class Matrix:
    """``rows`` in the order of the probes; ``environment``: versions, device and driver, by name."""

    runtime: str
    environment: dict[str, str | None] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def __getitem__(self, name: str) -> Row:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(f"no row {name!r}; there are {', '.join(r.name for r in self.rows)}")

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    @property
    def simulated(self) -> bool:
        """Whether any row is about a simulated device."""
        return any(row.simulated for row in self.rows)

    def counts(self) -> dict[str, int]:
        """How many rows have each status."""
        return {status: sum(r.status == status for r in self.rows) for status in (SUPPORTED, UNSUPPORTED, FAILED)}

    def groups(self) -> dict[str, list[Row]]:
        """Rows by group, in order."""
        found: dict[str, list[Row]] = {}
        for row in self.rows:
            found.setdefault(row.group, []).append(row)
        return found

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "runtime": self.runtime,
            "simulated": self.simulated,
            "environment": self.environment,
            "counts": self.counts(),
            "rows": [row.as_dict() for row in self.rows],
        }

    def markdown(self) -> str:
        """The matrix as a page."""
        title = f"# Capabilities of `{self.runtime}`" + (", simulated" if self.simulated else "")
        counts = ", ".join(f"{number} {status}" for status, number in self.counts().items())
        lines = [title, "", f"Written by `graphsafe doctor --device {self.runtime} --markdown`. {counts}.", ""]
        lines += ["| environment | |", "| --- | --- |"]
        lines += [f"| {name} | {_cell(value or '-')} |" for name, value in self.environment.items()]
        for group, rows in self.groups().items():
            lines += ["", f"## {group}", "", "| row | what | result | category | text |", "|" + " --- |" * 5]
            for row in rows:
                category = f"{row.rule}: {row.category}" if row.rule else ""
                text = row.text + (f" {row.explanation}" if row.explanation else "")
                lines.append(f"| `{row.name}` | {_cell(row.what)} | {row.result} | {_cell(category)} | {_cell(text)} |")
        return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
