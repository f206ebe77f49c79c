"""The gated delta rule (GDN): one decay per head and token."""

from graphsafe_kernels.gdn.op import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

__all__ = ["chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"]
