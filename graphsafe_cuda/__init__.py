"""The CUDA runtime: the graph contract on ``torch.cuda.CUDAGraph``."""

from graphsafe_cuda.runtime import CudaRuntime

__all__ = ["CudaRuntime"]
