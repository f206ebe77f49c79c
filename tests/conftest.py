"""The runtimes under test come from ``--graphsafe-device`` or ``GRAPHSAFE_DEVICE``.

Where kernels are tested in Triton's interpreter, triton is imported for it here, before a test's import brings it:
triton decorates functions of its own when it is imported.
"""

from __future__ import annotations

import contextlib
import gc

import pytest

from graphsafe.testing.plugin import devices

pytest_plugins = ["graphsafe.testing.plugin"]


def pytest_configure(config):
    if devices(config) in (["cuda"], ["npu"]):
        return
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        with contextlib.suppress(ImportError):  # the tests of kernels say so themselves
            import triton.language  # noqa: F401


def pytest_collection_finish():
    """Many tests collect garbage; what the imports made need not be walked each time."""
    import torch

    from graphsafe.testing.poison import poisoned_memory

    with poisoned_memory():
        torch.empty(1)  # the first operator under a dispatch mode imports a third of torch
    gc.collect()
    gc.freeze()
