"""Sizes of the norm's kernels, by device kind and width.

Requirements
------------
1. Nothing depends on T or on how much padding there is: the rows of a program decide the order of the weight's sum.
2. There is no tuning; a width above ``MAX_WIDTH`` is refused by name, since a row is held in registers.
"""

from __future__ import annotations

from typing import Any

from graphsafe.errors import error

__all__ = ["MAX_WIDTH", "backward_options", "forward_options", "max_width", "reduce_options"]

MAX_WIDTH = 8192

Options = tuple[dict[str, Any], int]
"""Compile-time sizes of a kernel, and its warps."""


def max_width(kind: str) -> int:
    """The widest row that a device of ``kind`` takes: 910B's unified buffer holds a backward of half of it."""
    return MAX_WIDTH // 2 if kind.startswith("ascend") else MAX_WIDTH


def _tile(kind: str, width: int) -> tuple[int, int, int]:
    """Channels of a row rounded up, rows at a time, and warps: about 16 elements of a tile a thread."""
    if width > max_width(kind):
        raise error("unsupported", f"a norm over {width} channels; the kernels serve up to {max_width(kind)}",
                    why="A program holds a row on chip.", remedy="Use fp64 or CPU operands, which the reference "
                    "serves, or a norm of the framework.")
    block = 1 << (width - 1).bit_length()
    elements = 1 << 16 if kind == "interpreter" else 2048
    rows = max(1, elements // block)
    return block, rows, 1 if kind == "interpreter" or kind.startswith("ascend") else max(4, block // 512)


def forward_options(kind: str, width: int) -> Options:
    """The forward kernel for D channels."""
    block, rows, warps = _tile(kind, width)
    return {"D": width, "BD": block, "BR": rows}, warps


def backward_options(kind: str, width: int) -> Options:
    """The backward kernel: a program walks ROWS rows, so that partial sums are few against the operands."""
    block, rows, warps = _tile(kind, width)
    return {"D": width, "BD": block, "BR": rows, "ROWS": max(rows, 16, 8192 // block)}, warps


def reduce_options(kind: str, width: int) -> Options:
    """The second stage: few channels a program, so that many programs share the partials."""
    return {"D": width, "BD": 1024 if kind == "interpreter" else 8, "SUMS": 256,
            "ROWS": backward_options(kind, width)[0]["ROWS"]}, 4
