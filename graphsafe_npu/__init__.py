"""The Ascend runtime: the graph contract on ``torch.npu.NPUGraph``.

Importing this package needs neither torch_npu nor CANN; making an :class:`NpuRuntime` without them raises an error that
says what is missing.
"""

from graphsafe_npu.runtime import NpuRuntime

__all__ = ["NpuRuntime"]
