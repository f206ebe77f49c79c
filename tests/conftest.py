"""The runtimes under test come from ``--graphsafe-device`` or ``GRAPHSAFE_DEVICE``."""

from __future__ import annotations

import gc

pytest_plugins = ["graphsafe.testing.plugin"]


def pytest_collection_finish():
    """Many tests collect garbage; what the imports made need not be walked each time."""
    import torch

    from graphsafe.testing.poison import poisoned_memory

    with poisoned_memory():
        torch.empty(1)  # the first operator under a dispatch mode imports a third of torch
    gc.collect()
    gc.freeze()
