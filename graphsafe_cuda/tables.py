"""Which builder of chunk tables a CUDA device uses."""

from __future__ import annotations

import functools
import importlib.util

from graphsafe.metadata import MetadataBuilder, TorchMetadataBuilder

__all__ = ["builder"]


@functools.cache
def builder() -> MetadataBuilder:
    """The kernel set's one-launch builder where triton is installed, else plain torch operators."""
    if importlib.util.find_spec("triton") is None:
        return TorchMetadataBuilder()
    from graphsafe_kernels.tables import TritonMetadataBuilder

    made: MetadataBuilder = TritonMetadataBuilder()
    return made
