"""Graphsafe: capture device work once, replay it for any batch that fits.

Importing this package loads torch and nothing else: no adapter and no kernel. Runtimes are found through the
entry-point group ``graphsafe.runtimes`` when :func:`get_runtime` asks for one.
"""

from __future__ import annotations

from graphsafe.arena import StaticArena
from graphsafe.bucket import Bucket
from graphsafe.capabilities import capabilities, require
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
from graphsafe.graphed import GraphedCallable, graphed
from graphsafe.inputs import Input
from graphsafe.lint import lint
from graphsafe.metadata import ChunkTables, MetadataBuilder
from graphsafe.runtime import CaptureGuard, Graph, GraphRuntime, MemoryFigures, get_runtime
from graphsafe.train import TrainStep

__all__ = [
    "ArgumentError",
    "BackendError",
    "Bucket",
    "CapacityError",
    "CaptureGuard",
    "Category",
    "ChunkTables",
    "DistributedError",
    "Graph",
    "GraphRuntime",
    "GraphSafeError",
    "GraphedCallable",
    "Input",
    "LifetimeError",
    "MemoryFigures",
    "MetadataBuilder",
    "MetadataError",
    "PaddingError",
    "RuntimeMissingError",
    "StaticArena",
    "TrainStep",
    "UnsupportedError",
    "capabilities",
    "get_runtime",
    "graphed",
    "lint",
    "require",
]

__version__ = "0.1.0"
