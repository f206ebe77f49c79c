"""Chunk tables built by one launch on the device."""

from graphsafe_kernels.tables.launch import TritonMetadataBuilder, build_tables

__all__ = ["TritonMetadataBuilder", "build_tables"]
