"""Tests that are known to fail on a device, each with its reason, in one file for each device.

Requirements
------------
1. ``FOLDER/DEVICE.txt`` holds a line ``test id: reason`` for each; ``*`` stands for anything, ``#`` begins a comment.
2. Such a test runs. If it fails it is an expected failure with the reason; if it passes it fails.
3. A line without a reason is an error of the run. A device without a file has no known failures.
4. A line that fits no test that was collected is reported at the end of the run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["KnownFailure", "KnownFailures"]


@dataclass
class KnownFailure:
    """One line: where it is, which tests it means, and why they fail."""

    line: str
    pattern: re.Pattern[str]
    reason: str
    used: bool = False


class KnownFailures:
    """The files of a folder, read when a device is first asked about."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._of: dict[str, list[KnownFailure]] = {}

    def find(self, device: str, test: str) -> KnownFailure | None:
        """The line for a test on a device, or None."""
        if device not in self._of:
            self._of[device] = [] if self._folder is None else _read(self._folder / f"{device}.txt")
        for known in self._of[device]:
            if known.pattern.fullmatch(test):
                known.used = True
                return known
        return None

    def unused(self) -> list[str]:
        """Lines that fitted no test."""
        return [known.line for lines in self._of.values() for known in lines if not known.used]


def _read(file: Path) -> list[KnownFailure]:
    if not file.exists():
        return []
    found = []
    for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        stripped = text.strip()
        if not stripped or stripped.startswith("#"):
            continue
        test, separator, reason = stripped.partition(": ")
        if not separator or not reason.strip():
            raise pytest.UsageError(f"{file}:{number}: 'test id: reason' is needed, not {stripped!r}")
        pattern = ".*".join(re.escape(part) for part in test.strip().split("*"))
        found.append(KnownFailure(f"{file.name}:{number}: {test.strip()}", re.compile(pattern), reason.strip()))
    return found
