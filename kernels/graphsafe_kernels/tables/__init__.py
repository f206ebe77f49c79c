"""Chunk tables built by one launch on the device."""

from graphsafe_kernels.tables.launch import SlotTables, TritonMetadataBuilder, build_tables

__all__ = ["SlotTables", "TritonMetadataBuilder", "build_tables"]
