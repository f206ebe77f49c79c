"""Launching the convolution's kernels: shapes, strides and compile-time constants; no autograd, no argument checks.

Requirements
------------
1. Forward is one launch, states included; backward is two.
2. The grid and every constant follow from the bucket, the layer and the device's policy. They are worked out once for
   each set of shapes, strides and dtypes: a call looks its plan up, allocates and launches.
3. What is allocated here comes from the caller's allocator at each call.
4. y may be written in three parts, each a contiguous tensor, and dx into columns of a wider matrix, in the same
   launches. On an NPU y has one part: the front end of its compiler crashes where a pointer is chosen at run time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphsafe.errors import error
from graphsafe.metadata import ChunkTables
from graphsafe_kernels.conv.backward_kernels import conv_backward_kernel
from graphsafe_kernels.conv.forward_kernels import conv_forward_kernel
from graphsafe_kernels.conv.reduce_kernels import conv_reduce_kernel
from graphsafe_kernels.launch import PreparedLaunch
from graphsafe_kernels.policy import ConvPolicy, policy_for

__all__ = [
    "MAX_PARTS", "MAX_TAPS", "Gradients", "backward", "backward_options", "forward", "forward_options",
    "reduce_options",
]

MAX_TAPS = 8
MAX_PARTS = 3
DENSE_CHUNK = 64

Options = tuple[dict[str, Any], int]
"""Compile-time sizes of a kernel, and its warps."""


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _parts(widths: tuple[int, ...]) -> dict[str, int]:
    """The channels in all and of each part."""
    return {"D": sum(widths), **{f"P{i}": widths[i] if i < len(widths) else 0 for i in range(MAX_PARTS)}}


def _blocks(widths: tuple[int, ...], block: int) -> int:
    return sum(-(-w // block) for w in widths)


def forward_options(policy: ConvPolicy, widths: tuple[int, ...], taps: int, chunk_size: int) -> Options:
    """The forward kernel for parts of so many channels, W taps and chunks of BT rows."""
    width = max(widths)
    rows = policy.forward_rows if chunk_size % policy.forward_rows == 0 else chunk_size
    block = min(policy.forward_block, _power(width))
    # with more taps a turn of eight rows asks for a register too many
    turn = policy.forward_turn if taps <= 6 else min(policy.forward_turn, 4)
    sizes = {**_parts(widths), "W": taps, "WP": _power(taps), "BT": chunk_size, "ROWS": rows, "BD": block,
             "BS": min(policy.state_block, _power(width)), "U": turn}
    return sizes, max(1, block // policy.forward_lane)


def backward_options(policy: ConvPolicy, widths: tuple[int, ...], taps: int, chunk_size: int) -> Options:
    """The backward kernel. The rows of a partial sum are a slot's: they must not follow the bucket."""
    width = max(widths)
    block = min(policy.backward_block, _power(width))
    sizes = {**_parts(widths), "W": taps, "WP": _power(taps), "BT": chunk_size, "BD": block,
             "BS": min(policy.state_block, _power(width)), "U": policy.backward_turn}
    return sizes, max(1, block // policy.backward_lane)


def reduce_options(policy: ConvPolicy, width: int, taps: int) -> Options:
    """The second stage."""
    sizes = {"D": width, "W": taps, "BD": min(policy.reduce_block, _power(width)), "BS": policy.reduce_lanes}
    return sizes, policy.reduce_warps


def _programs(device: torch.device, tasks: int) -> int:
    cores = policy_for(device).cores
    return min(tasks, cores) if cores else tasks


def _rows_apart(name: str, stride: tuple[int, ...] | None, chunk_size: int) -> tuple[int, int]:
    """The batch and row stride of a ``[B, T, D]`` operand."""
    if stride is None:
        return 0, 0
    # offsets inside a slot are 32-bit
    if (chunk_size + 16) * max(stride[1], 1) >= 2**31:
        raise error("unsupported", f"{name} has rows {stride[1]} elements apart, too far for chunks of {chunk_size}",
                    why="Offsets inside a chunk are 32-bit.", remedy="Make it contiguous.")
    return stride[0], stride[1]


def _extent(shape: tuple[int, ...], tables: tuple[int, int, int] | None) -> tuple[int, int, int, int]:
    """(chunk size, sequences, slots, chunks of a dense sequence); ``tables``: chunk size, sequences, slots."""
    if tables is not None:
        return *tables, 1
    chunks = -(-shape[1] // DENSE_CHUNK)
    return DENSE_CHUNK, shape[0], shape[0] * chunks, chunks


@functools.lru_cache(maxsize=1024)
def _forward_launch(device: torch.device, dtypes: tuple[torch.dtype | None, ...], widths: tuple[int, ...], taps: int,
                    chunk_size: int, x_row: int, residual_row: int, activate: bool, final: bool) -> PreparedLaunch:
    # the dtypes are not looked at, but each set of them is a kernel of its own
    policy = policy_for(device)
    _, _, bias, residual, initial, index = dtypes
    sizes, warps = forward_options(policy.conv, widths, taps, chunk_size)
    flags = {"X_ROW": x_row, "RESIDUAL_ROW": residual_row, "SILU": activate, "HAS_BIAS": bias is not None,
             "HAS_RESIDUAL": residual is not None, "HAS_INITIAL": initial is not None, "HAS_FINAL": final,
             "PACKED": index is not None, "PTX": policy.ptx, "FAST": policy.conv.fast,
             "LOOP": policy.cores > 0}
    return PreparedLaunch(conv_forward_kernel, sizes | flags, num_warps=warps)


@functools.lru_cache(maxsize=1024)
def _backward_launch(device: torch.device, dtypes: tuple[torch.dtype | None, ...], widths: tuple[int, ...], taps: int,
                     chunk_size: int, x_row: int, dy_row: int, dx_row: int, activate: bool) -> PreparedLaunch:
    policy = policy_for(device)
    _, _, bias, residual, initial, dfinal, index = dtypes
    sizes, warps = backward_options(policy.conv, widths, taps, chunk_size)
    flags = {"X_ROW": x_row, "DY_ROW": dy_row, "DX_ROW": dx_row, "SILU": activate, "HAS_BIAS": bias is not None,
             "HAS_RESIDUAL": residual is not None, "HAS_INITIAL": initial is not None,
             "HAS_DFINAL": dfinal is not None, "PACKED": index is not None, "PTX": policy.ptx,
             "FAST": policy.conv.fast, "LOOP": policy.cores > 0}
    return PreparedLaunch(conv_backward_kernel, sizes | flags, num_warps=warps)


@functools.lru_cache(maxsize=1024)
def _reduce_launch(device: torch.device, dtypes: tuple[torch.dtype | None, ...], width: int,
                   taps: int) -> PreparedLaunch:
    policy = policy_for(device)
    _, bias, index = dtypes
    sizes, warps = reduce_options(policy.conv, width, taps)
    flags = {"HAS_BIAS": bias is not None, "PACKED": index is not None, "LOOP": policy.cores > 0}
    return PreparedLaunch(conv_reduce_kernel, sizes | flags, num_warps=warps)


@functools.lru_cache(maxsize=4096)
def _forward_plan(device: torch.device, shape: tuple[int, ...], stride: tuple[int, ...], widths: tuple[int, ...],
                  taps: int, residual_stride: tuple[int, ...] | None, tables: tuple[int, int, int] | None,
                  activate: bool, final: bool, *dtypes: torch.dtype | None) -> tuple[Callable[..., None], int]:
    """The launch, a function of the kernel's pointers, and the sequences."""
    _, tokens, width = shape
    chunk_size, sequences, slots, chunks = _extent(shape, tables)
    x_batch, x_row = _rows_apart("x", stride, chunk_size)
    residual_batch, residual_row = _rows_apart("residual", residual_stride, chunk_size)
    launch = _forward_launch(device, dtypes, widths, taps, chunk_size, x_row, residual_row, activate, final)
    c = launch.constants
    slot_tasks = slots * (chunk_size // c["ROWS"]) * _blocks(widths, c["BD"])
    tasks = slot_tasks + (sequences * -(-width // c["BS"]) if final else 0)
    integers = (tokens, sequences, chunks, x_batch, residual_batch, slot_tasks, tasks)
    return launch.bind(device, _programs(device, tasks), integers), sequences


@functools.lru_cache(maxsize=4096)
def _backward_plan(device: torch.device, shape: tuple[int, ...], stride: tuple[int, ...], widths: tuple[int, ...],
                   taps: int, dy_stride: tuple[int, ...], dx_row: int, tables: tuple[int, int, int] | None,
                   activate: bool, *dtypes: torch.dtype | None) -> tuple[
                       Callable[..., None], Callable[..., None], int]:
    """Both launches, functions of their kernel's pointers, and the slots."""
    _, tokens, width = shape
    chunk_size, sequences, slots, chunks = _extent(shape, tables)
    x_batch, x_row = _rows_apart("x", stride, chunk_size)
    dy_batch, dy_row = _rows_apart("the gradient of y", dy_stride, chunk_size)
    launch = _backward_launch(device, dtypes, widths, taps, chunk_size, x_row, dy_row, dx_row, activate)
    c = launch.constants
    slot_tasks = slots * _blocks(widths, c["BD"])
    tasks = slot_tasks + (sequences * _blocks(widths, c["BS"]) if c["HAS_INITIAL"] else 0)
    integers = (tokens, sequences, chunks, x_batch, dy_batch, slot_tasks, tasks)
    first = launch.bind(device, _programs(device, tasks), integers)
    launch = _reduce_launch(device, (dtypes[1], dtypes[2], dtypes[6]), width, taps)
    tasks = (taps + c["HAS_BIAS"]) * -(-width // launch.constants["BD"])
    return first, launch.bind(device, _programs(device, tasks), (sequences, slots, tasks)), slots


def _dtype(t: torch.Tensor | None) -> torch.dtype | None:
    return None if t is None else t.dtype


def _numbers(tables: ChunkTables) -> tuple[int, int, int]:
    """Chunk size, sequences, slots."""
    return tables.chunk_size, tables.cu_seqlens.shape[0] - 1, tables.chunk_indices.shape[0]


def _pointers(parts: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    return [*parts, *[None] * (MAX_PARTS - len(parts))]


def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None,
            initial_state: torch.Tensor | None, output_final_state: bool, activate: bool, tables: ChunkTables | None,
            widths: tuple[int, ...] | None = None) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """y ``[B, T, D]`` in parts of ``widths`` channels, three, the first two equal, or one when None; and the final
    state ``[N, D, W]`` or None; in x's dtype.

    ``x`` and ``residual`` have channels one element apart; ``weight``, ``bias``, ``initial_state`` are contiguous;
    ``tables`` are those of a packed batch.
    """
    device, dtype, shape, taps = x.device, x.dtype, x.shape, weight.shape[1]
    widths = (shape[2],) if widths is None else widths
    if tables is None:
        numbers = cu_seqlens = indices = offsets = None
    else:
        numbers = _numbers(tables)
        cu_seqlens, indices, offsets = tables.cu_seqlens, tables.chunk_indices, tables.chunk_offsets
    launch, sequences = _forward_plan(
        device, shape, x.stride(), widths, taps, None if residual is None else residual.stride(), numbers, activate,
        output_final_state, dtype, weight.dtype, _dtype(bias), _dtype(residual), _dtype(initial_state),
        _dtype(cu_seqlens),
    )
    y = [x.new_empty((shape[0], shape[1], w)) for w in widths]
    final = x.new_empty((sequences, shape[2], taps)) if output_final_state else None
    launch(x, weight, bias, residual, initial_state, *_pointers(y), final, cu_seqlens, indices, offsets)
    return y, final


@dataclass(frozen=True)
class Gradients:
    """The backward's results, each with its operand's shape and dtype; None where the operand is absent.

    ``residual`` is None for a dense batch, whose gradient is dy itself.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    initial_state: torch.Tensor | None


def backward(dy: Sequence[torch.Tensor], dfinal: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor,
             bias: torch.Tensor | None, residual: torch.dtype | None, initial_state: torch.Tensor | None,
             activate: bool, tables: ChunkTables | None, dx: torch.Tensor | None = None) -> Gradients:
    """Gradients of everything from ``dy``, the forward's parts, and ``dfinal`` ``[N, D, W]``.

    One part has channels one element apart, several are contiguous. ``residual`` is the residual's dtype if its
    gradient is wanted; the other operands are the forward's. ``dx``: where to write it, the first columns of a
    contiguous ``[B, T, at least D]``.
    """
    device, dtype, shape, taps = x.device, x.dtype, x.shape, weight.shape[1]
    if tables is None:
        numbers = cu_seqlens = indices = offsets = residual = None
    else:
        numbers = _numbers(tables)
        cu_seqlens, indices, offsets = tables.cu_seqlens, tables.chunk_indices, tables.chunk_offsets
    if dx is None:
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    launch, reduce, slots = _backward_plan(
        device, shape, x.stride(), tuple(part.shape[2] for part in dy), taps, dy[0].stride(), dx.stride(1), numbers,
        activate, dtype, weight.dtype, _dtype(bias), residual, _dtype(initial_state), _dtype(dfinal),
        _dtype(cu_seqlens),
    )
    dweight = torch.empty_like(weight)
    dbias = None if bias is None else torch.empty_like(bias)
    dresidual = None if residual is None else x.new_empty(shape, dtype=residual)
    dinitial = None if initial_state is None else torch.empty_like(initial_state)
    partials = torch.empty((slots, taps + 1, shape[2]), dtype=torch.float32, device=device)
    launch(x, weight, bias, *_pointers(dy), dfinal, initial_state, dx, dresidual, dinitial, partials, cu_seqlens,
           indices, offsets)
    reduce(partials, dweight, dbias, offsets)
    return Gradients(dx, dweight, dbias, dresidual, dinitial)
