"""Lint: find on a CPU, all at once, what a function does that a graph cannot hold."""

from graphsafe.lint.report import Finding, Report
from graphsafe.lint.run import lint

__all__ = ["Finding", "Report", "lint"]
