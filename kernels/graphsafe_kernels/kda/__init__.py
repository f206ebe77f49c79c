"""Kimi delta attention (KDA): one decay per head, key channel and token."""

from graphsafe_kernels.kda.op import chunk_kda, fused_kda_gate, fused_recurrent_kda

__all__ = ["chunk_kda", "fused_kda_gate", "fused_recurrent_kda"]
