"""The layers: projections, short convolution, delta rule, gated norm, output projection."""

from graphsafe_kernels.layers.gated_deltanet import GatedDeltaNet
from graphsafe_kernels.layers.kda import KimiDeltaAttention
from graphsafe_kernels.layers.short_convolution import ShortConvolution
from graphsafe_kernels.layers.state import LayerState

__all__ = ["GatedDeltaNet", "KimiDeltaAttention", "LayerState", "ShortConvolution"]
