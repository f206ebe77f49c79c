"""The CPU runtime: a CPU with the semantics of a device graph."""

from graphsafe_cpu.runtime import CpuRuntime

__all__ = ["CpuRuntime"]
