"""The per-device policy: what may differ between devices that run one kernel source.

Requirements
------------
1. A configuration comes from a table, by device kind and by sizes that a layer fixes (channels, taps, chunk size):
   there is no tuning, and nothing depends on T or how much padding there is.
2. A kind is found without a launch. An NVIDIA device newer than the table takes the newest row not above it; a device
   of no row is refused by name.
3. Inline PTX and a grid of the cores' size are used where the policy says so and nowhere else. How many cores there are
   is the device's own number where it tells it, else the policy's.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from dataclasses import dataclass
from typing import Any

import torch

from graphsafe.errors import error

__all__ = ["KINDS", "ConvPolicy", "Policy", "TablePolicy", "device_kind", "policy_for"]


@dataclass(frozen=True)
class TablePolicy:
    """The table builder: ``tile`` sequences at a time, ``lane`` a warp, but at least ``warps`` warps.

    A program has ``compared / tile`` slots, at most 64, or ``many`` where N is more than a tile.
    """

    tile: int = 1024
    compared: int = 4096
    many: int = 16
    lane: int = 128
    warps: int = 4


@dataclass(frozen=True)
class ConvPolicy:
    """Sizes of the short convolution's kernels.

    ``*_block`` channels a program, ``*_lane`` channels a warp, ``*_turn`` rows (1, 2, 4 or 8) in registers ahead;
    ``forward_rows`` a program at most; the second stage keeps ``reduce_lanes`` running sums of ``reduce_block``
    channels. ``fast``: whole turns have a loop of their own, without masks.
    """

    forward_block: int = 128
    forward_lane: int = 64
    forward_rows: int = 32
    forward_turn: int = 8
    backward_block: int = 256
    backward_lane: int = 128
    backward_turn: int = 4
    state_block: int = 128
    reduce_block: int = 32
    reduce_lanes: int = 64
    reduce_warps: int = 4
    fast: bool = True


@dataclass(frozen=True)
class Policy:
    """One device kind.

    ``ptx``: inline PTX may be used; ``cores``: a grid has at most this many programs, each walking tasks (0: one task a
    program). ``workspace``: bytes that the compiler takes from the device's memory for a program of any kernel at most;
    the compile check holds every kernel to it, and a bucket's price counts it.
    """

    kind: str
    ptx: bool
    cores: int
    tables: TablePolicy
    conv: ConvPolicy
    workspace: int = 0

    def programs(self, tasks: int) -> int:
        """The grid of a kernel with that many tasks."""
        return min(tasks, self.cores) if self.cores else tasks


def _ascend(kind: str) -> Policy:
    """910B and 950 alike: what fits the smaller unified buffer of 192 KiB, on 40 vector cores."""
    return Policy(
        kind,
        ptx=False,
        cores=40,
        tables=TablePolicy(compared=2048, many=8, lane=1024, warps=1),
        # Small turns and one loop: the Ascend compiler's time grows with the square of a kernel's loads and stores.
        # Blocks: taps lie W elements apart, so each takes 32 bytes of the unified buffer.
        conv=ConvPolicy(
            forward_block=512, forward_lane=512, forward_turn=2, backward_block=512, backward_lane=512, backward_turn=1,
            reduce_block=128, reduce_lanes=8, reduce_warps=1, fast=False,
        ),
        workspace=768 * 1024,
    )


KINDS: dict[str, Policy] = {
    "sm_80": Policy("sm_80", ptx=True, cores=0, tables=TablePolicy(), conv=ConvPolicy()),
    "sm_90": Policy("sm_90", ptx=True, cores=0, tables=TablePolicy(), conv=ConvPolicy()),
    # four channels a thread, as on sm_90, spills with two taps and every option
    "sm_100": Policy(
        "sm_100", ptx=True, cores=0, tables=TablePolicy(), conv=ConvPolicy(backward_block=128, backward_lane=64)
    ),
    "ascend910b": _ascend("ascend910b"),
    "ascend950": _ascend("ascend950"),
    "interpreter": Policy(
        "interpreter",
        ptx=False,
        cores=0,
        tables=TablePolicy(tile=64),
        conv=ConvPolicy(forward_block=1024, forward_rows=64, backward_block=1024, state_block=1024, reduce_block=1024),
    ),
}
"""The policy of every device kind the kernels are shipped for."""


def device_kind(device: torch.device) -> str:
    """The kind of ``device``: ``sm_80``, ``sm_90``, ``sm_100``, ``ascend910b``, ``ascend950``, or ``interpreter`` for a
    CPU."""
    if device.type == "cpu":
        return "interpreter"
    if device.type == "cuda":
        major, _ = torch.cuda.get_device_capability(device)
        if major >= 8:
            return {8: "sm_80", 9: "sm_90"}.get(major, "sm_100")
        name = torch.cuda.get_device_name(device)
        raise error("unsupported", f"the kernels are not shipped for {name} (sm_{major}x)",
                    why="They need bf16 arithmetic, which comes with compute capability 8.0.",
                    remedy="Use a device of compute capability 8.0 or newer, or CPU tensors.")
    if device.type == "npu":
        npu: Any = torch.npu  # type: ignore[attr-defined]
        return "ascend950" if re.search(r"950|910_95", npu.get_device_name(device)) else "ascend910b"
    raise error("unsupported", f"the kernels are not shipped for a device of type {device.type!r}",
                why=f"Known kinds: {', '.join(KINDS)}.", remedy="Move the operands to one of these.")


@functools.lru_cache(maxsize=64)
def policy_for(device: torch.device) -> Policy:
    """The policy of ``device``; raises rule ``unsupported`` where there is none."""
    policy = KINDS[device_kind(device)]
    if device.type != "npu":
        return policy
    npu: Any = torch.npu  # type: ignore[attr-defined]
    # not every torch_npu and driver tells the number
    cores = getattr(npu.get_device_properties(device), "vector_core_num", 0)
    return dataclasses.replace(policy, cores=cores) if cores > 0 else policy
