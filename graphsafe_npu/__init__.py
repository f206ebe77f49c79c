"""The place of the Ascend adapter; there is none yet."""

from graphsafe.errors import error

__all__ = ["NpuRuntime"]


class NpuRuntime:
    """Refuses: the Ascend runtime is not part of this version."""

    def __init__(self) -> None:
        raise error("runtime-missing", "the Ascend runtime is not part of this version of graphsafe")
