"""What every provider test may ask for."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def calls() -> list[dict[str, Any]]:
    """What a stand-in was called with."""
    return []
