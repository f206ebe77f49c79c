"""A model's own numbers are those of its own code: what ``transformers`` takes from other packages is left out.

Where flash-linear-attention is installed, ``transformers`` calls its kernels in the place of the functions that a model
defines, on a CPU too, where they fail.
"""

from __future__ import annotations

import importlib

import pytest
import transformers
from tiny_models import MODELS


@pytest.fixture(autouse=True)
def _own_code(monkeypatch):
    for _, name, _ in MODELS.values():
        module = importlib.import_module(getattr(transformers, name).__module__)
        for key, value in list(vars(module).items()):
            code = getattr(value, "__code__", None)
            if code is not None and code.co_filename.endswith("hub_kernels.py") and hasattr(value, "__wrapped__"):
                monkeypatch.setattr(module, key, value.__wrapped__)
