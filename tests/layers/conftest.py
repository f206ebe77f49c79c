"""The layers are tested on the reference operators, whatever other tests made the process prefer."""

from __future__ import annotations

import pytest

from graphsafe_kernels.backend import reference_only


@pytest.fixture(scope="module", autouse=True)
def _reference():
    with reference_only():
        yield
