"""Tile sizes, warps, stages and dot precision of the gated delta rule's kernels, by device, dtype and shape.

Requirements
------------
1. One table; kernels hold no device's numbers. A choice depends on the device and on the bucket's sizes alone.
2. Every configuration named here compiles for the devices it is named for (checked without a device).
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from graphsafe_kernels.delta.overlap_kernels import AVAILABLE
from graphsafe_kernels.policy import policy_for

if TYPE_CHECKING:
    from graphsafe_kernels.gdn.problem import Problem

__all__ = ["Configuration", "configuration", "device_capability"]


MULTIPROCESSORS = 132
"""Programs that run at once where one fills a multiprocessor: the H100's and H200's number."""


SHORTEST_SEGMENT = 16
"""Chunks below which a segment's own costs outweigh what it saves."""


@dataclass(frozen=True)
class Configuration:
    """The choices for one call. Blocks are powers of two of at least 16."""

    key_block: int
    chain_block: int  # gradient_value_block is a multiple of it, or divides it; reverse_block is the same
    chain_warps: int
    chain_stages: int
    keep_stages: int
    reverse_block: int
    reverse_warps: int
    reverse_stages: int
    state_stages: int
    prepare_block: int
    prepare_warps: int
    prepare_registers: int
    prepare_stages: int
    clear_block: int
    gradient_key_block: int
    gradient_value_block: int
    gradient_warps: int
    gradient_stages: int
    finish_rows: int
    keep_states: bool
    precision: str
    half_inverse: bool
    even_correction: bool  # where keys are alike, N is rounded so that sums keep what its entries lose
    exact_beta: bool  # dbeta without the rounding of its row's dw, without l2norm also of its e
    tiles: bool
    state_tiles: bool
    span: int  # chunks of a segment in the forward; 0: sequences are not cut
    reverse_span: int  # the same in the backward; 0 or span
    beside: bool  # a lone sequence's second segment is prepared beside the first one's states
    overlap: bool
    cores: int  # programs of a grid whose programs walk tasks; 0: one task a program
    heads_first: bool  # gates and their gradients are read and written as [batch, HV, T]


def _power(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def device_capability(device: torch.device) -> int:
    """80, 90, 100, ... for a CUDA device; 0 for any other."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def configuration(problem: Problem, device: torch.device, dtype: torch.dtype) -> Configuration:
    """The configuration of a call."""
    policy = policy_for(device)
    if policy.kind.startswith("ascend"):
        return choose_ascend(problem, policy.cores, dtype)
    return choose(problem, device_capability(device), dtype)


@functools.lru_cache(maxsize=1024)
def choose_ascend(problem: Problem, cores: int, dtype: torch.dtype) -> Configuration:
    """The configuration for an Ascend: tiles that fit 910B's unified buffer of 192 KiB, and sequences never cut."""
    key, value = _power(problem.key_width), _power(problem.value_width)
    block = min(value, 64 if key <= 128 else 32)
    # Blocks of V are unrolled in the gradients, and 950's compiler gives each a buffer of its own: few and large ones.
    rows = -(-problem.value_width // block) * block
    large = max(key, value) > 128 and rows % 128 == 0
    return dataclasses.replace(
        choose(problem, 0, dtype),
        chain_block=block,
        reverse_block=block,
        gradient_key_block=min(key, 32),
        gradient_value_block=128 if large else block,
        clear_block=min(value, 64),
        # Where half precision would need the Newton step, products in fp32 take less of the buffer.
        half_inverse=False,
        even_correction=False,
        exact_beta=False,  # the buffer again
        keep_states=True,  # few cores: no chain runs beside another
        span=0,
        reverse_span=0,
        cores=cores,
        heads_first=True,
    )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def choose(problem: Problem, capability: int, dtype: torch.dtype) -> Configuration:
    """The configuration for a device of ``capability`` (see :func:`device_capability`)."""
    wide = dtype == torch.float32
    key = _power(problem.key_width)
    # Triton 3.6 reads beyond shared memory where a warpgroup's right operand is 32 wide and its load is not pipelined.
    warpgroups = capability == 90 and not wide and problem.chunk_size == 64
    if warpgroups:
        key = max(64, key)
    value = _power(problem.value_width)
    # Descriptors read whole tiles only, and rows of a multiple of 16 bytes.
    tiles = (
        capability >= 90
        and not wide
        and key == problem.key_width <= 128
        and problem.value_width % 64 == 0
        and problem.chunk_size == 64
    )
    # States are laid out in whole tiles, whatever the widths.
    state_tiles = capability >= 90 and not wide and problem.chunk_size == 64
    small = wide or key > 128
    chain_block = min(value, 32 if small else 64)
    # Eight warps where four would spill: wide keys, and matrix units that take their operands from registers or from
    # tensor memory.
    rows = -(-problem.value_width // chain_block) * chain_block
    gradient_block = 64 if key > 128 else 128
    warps = 8 if key > 128 or (capability == 80 and key > 64) else 4
    programs = problem.sequences * problem.value_heads * -(-problem.value_width // chain_block)
    # Three stages hide the latency of a lone chain; two let two programs share a multiprocessor.
    stages = (3 if programs <= MULTIPROCESSORS else 2) if tiles else 1 if wide else 2
    span = _span(problem.chunks, programs)
    # Two segments of a lone sequence fill the multiprocessors with one chain each: the backward, with two, is not cut.
    lone = span > 0 and 4 * programs > MULTIPROCESSORS
    # Three preparations share a multiprocessor; four, with a few spills, where that saves most of a second wave.
    preparations = (problem.batch * problem.chunks + problem.sequences - problem.batch) * problem.value_heads
    one_wave = 3 * MULTIPROCESSORS < preparations <= 5 * MULTIPROCESSORS
    gradient_stages = 3 if state_tiles and capability == 90 and key <= 128 and problem.value_width <= 128 else 1
    # One block of K is no loop, so nothing is pipelined there.
    narrow = not warpgroups or (gradient_stages > 1 and problem.key_width > 32)
    return Configuration(
        key_block=key,
        chain_block=chain_block,
        chain_warps=warps,
        chain_stages=stages,
        keep_stages=stages,
        reverse_block=chain_block,
        reverse_warps=8 if capability >= 100 else warps,
        reverse_stages=1 if small else stages,
        state_stages=1 if small else stages,
        prepare_block=min(key, 64 if wide or tiles or capability == 80 else 128),
        prepare_warps=2 if problem.chunk_size < 32 else 8 if capability == 80 and problem.chunk_size == 64 else 4,
        prepare_stages=3 if tiles and key > 64 else 1,
        prepare_registers=(128 if one_wave else 168) if capability == 90 and not wide else 0,  # 168 spill on sm_100
        clear_block=min(value, 128),
        gradient_key_block=min(key, 32 if narrow else 64),
        gradient_value_block=gradient_block if rows % gradient_block == 0 else chain_block,
        gradient_warps=8 if capability >= 100 and key > 64 else 4,
        gradient_stages=gradient_stages,
        finish_rows=16,
        # The backward's state chain is free where it fits beside the reverse chain; where it would not, the forward
        # keeps its states: about 0.75 KiB a token and value head at K = V = 128 in bf16.
        keep_states=2 * programs > MULTIPROCESSORS or (span > 0 and not lone),
        precision="tf32x3" if capability else "ieee",
        half_inverse=not wide,
        # In fp16 other roundings count for more. On sm_80 it spills, and for sm_100 Triton 3.6 does not compile it.
        even_correction=dtype == torch.bfloat16 and capability in (0, 90),
        exact_beta=not wide,
        tiles=tiles,
        state_tiles=state_tiles,
        span=span,
        # A backward runs two chains a segment, so it needs twice the room.
        reverse_span=0 if lone else span,
        # A lone sequence in two segments: the first one's states take half the multiprocessors.
        beside=lone and problem.sequences == 1 and problem.chunks <= 2 * span and capability > 0,
        overlap=capability >= 90 and AVAILABLE,
        cores=0,
        heads_first=False,
    )


def _span(chunks: int, programs: int) -> int:
    """Chunks of a segment where ``programs`` chains of ``chunks`` chunks would leave half the multiprocessors idle."""
    if 2 * programs > MULTIPROCESSORS:
        return 0
    span = max(SHORTEST_SEGMENT, -(-chunks // (MULTIPROCESSORS // programs)))
    return span if span < chunks else 0
