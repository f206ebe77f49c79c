"""The short causal convolution."""

from graphsafe_kernels.conv.op import causal_conv1d

__all__ = ["causal_conv1d"]
