"""RMS norm over the last dimension, plain and gated."""

from graphsafe_kernels.norm.module import FusedRMSNormGated, RMSNorm
from graphsafe_kernels.norm.op import rms_norm, rms_norm_gated

__all__ = ["FusedRMSNormGated", "RMSNorm", "rms_norm", "rms_norm_gated"]
