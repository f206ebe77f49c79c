"""Which revision of this project runs here."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

__all__ = ["commit"]

_COMMIT_VARIABLE = "GRAPHSAFE_COMMIT"


def commit() -> str | None:
    """The commit of the source this runs from, ``+changes`` where the files differ; None for an installed package.

    A copy of the source without its history has none: ``GRAPHSAFE_COMMIT`` names it.
    """
    if os.environ.get(_COMMIT_VARIABLE):
        return os.environ[_COMMIT_VARIABLE]
    here = Path(__file__).parent
    # an installed package may lie in another project's checkout, whose commit is not this project's
    if _git(here, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    found = _git(here, "rev-parse", "--short=12", "HEAD")
    return found and found + ("+changes" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints, or None where it fails or prints nothing."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
