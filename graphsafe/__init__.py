"""Graphsafe: capture device work once, replay it for any batch that fits.

Importing this package loads torch and nothing else: no adapter and no kernel. Runtimes are found through the
entry-point group ``graphsafe.runtimes`` when :func:`get_runtime` asks for one.
"""

from __future__ import annotations

from graphsafe.bucket import Bucket
from graphsafe.errors import (
    ArgumentError,
    BackendError,
    CapacityError,
    Category,
    DistributedError,
    GraphSafeError,
    LifetimeError,
    MetadataError,
    PaddingError,
    RuntimeMissingError,
    UnsupportedError,
)
from graphsafe.metadata import ChunkTables, MetadataBuilder

__all__ = [
    "ArgumentError", "BackendError", "Bucket", "CapacityError", "Category", "ChunkTables", "DistributedError",
    "GraphSafeError", "LifetimeError", "MetadataBuilder", "MetadataError", "PaddingError", "RuntimeMissingError",
    "UnsupportedError",
]  # fmt: skip

__version__ = "0.1.0"
