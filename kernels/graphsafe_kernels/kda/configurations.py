"""Tile sizes, warps, stages and dot precision of KDA's kernels, by device kind, dtype and shape.

Requirements
------------
1. One table; kernels hold no device's numbers. A choice depends on the device and on the bucket's sizes alone.
2. Off an Ascend, preparation and gradients have a warp for each tile of 16 tokens and column blocks of 16
   (``operand_kernels``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphsafe_kernels.delta.overlap_kernels import AVAILABLE
from graphsafe_kernels.policy import KINDS

__all__ = ["Configuration", "Problem", "choose"]

MULTIPROCESSORS = 132
SHORTEST_SEGMENT = 8
"""Chunks that a segment has at least: shorter ones cost more products between segments than they save."""

KEPT_BYTES = 2**26
"""What the gated tiles of a call may take at most to be kept for its backward rather than made again."""


@dataclass(frozen=True)
class Problem:
    """The sizes and options of a call. ``tokens`` is T of each sequence (dense) or the capacity (packed).

    ``gate``: 0 given, 1 softplus, 2 bounded by ``lower_bound``.
    """

    batch: int
    tokens: int
    heads: int
    value_heads: int
    key_width: int
    value_width: int
    sequences: int
    chunk_size: int
    scale: float
    qk_l2norm: bool = False
    gate: int = 0
    lower_bound: float = 0.0
    beta_scale: float | None = None
    state_v_first: bool = False
    safe_gate: bool = False

    @property
    def rows(self) -> int:
        """Token rows of q, k and v taken together."""
        return self.batch * self.tokens

    @property
    def chunks(self) -> int:
        """Chunks of a dense sequence."""
        return -(-self.tokens // self.chunk_size)


@dataclass(frozen=True)
class Configuration:
    """The choices for one call. Blocks are powers of two of at least 16.

    ``column_block``: columns of K that the preparation and the gradients take at a time, ``product_block``: that the
    products take; ``chain_block``, ``clear_block``: of V; ``save_stages``: of a forward chain that keeps states.
    ``reverse_block``, ``reverse_warps``: of the backward's chains; ``store_block``: columns of K in which they store
    states. ``keep_tiles``: a forward leaves its tiles unasked. ``half_inverse``: the triangular system by
    fp16 dots; ``tiles``: chains load by descriptors; ``safe``: pairs within a tile by the bounded form, ``pairs``: type
    of the dots that meet pairs. ``levels``: pairs by levels of the whole chunk. ``span``: chunks of a segment; 0: no
    sequence is cut. ``cores``: a grid has at most this many programs, which walk tasks; 0: a program has one task.
    ``overlap``: the forward's launches come while what is before them ends. ``prefetch``: the gradients, and with a
    bounded gate the preparation that writes scores, ask early for what they read. ``late``: the gradients load one of
    their products behind the dots, which takes fewer registers on sm_80 alone. ``exact_beta``: dbeta without the
    roundings of its row's dw and e. ``fine``: b e D^T is kept in fp16 with a power of two a row.
    """

    key_block: int
    chain_block: int
    chain_warps: int
    chain_stages: int
    save_stages: int
    reverse_block: int
    reverse_warps: int
    reverse_stages: int
    store_block: int
    column_block: int
    prepare_warps: int
    product_block: int
    product_warps: int
    gradient_warps: int
    clear_block: int
    finish_rows: int
    keep_tiles: bool
    precision: str
    half_inverse: bool
    tiles: bool
    safe: bool
    pairs: torch.dtype
    span: int
    levels: bool
    cores: int
    overlap: bool
    prefetch: bool
    late: bool
    exact_beta: bool
    fine: bool

    def programs(self, tasks: int) -> int:
        """The grid of a kernel with that many tasks."""
        return min(tasks, self.cores) if self.cores else tasks


def _power(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def _span(chunks: int, programs: int) -> int:
    """Chunks of a segment, where ``programs`` chains of ``chunks`` chunks would leave most multiprocessors idle."""
    if 4 * programs > MULTIPROCESSORS:
        return 0
    span = max(SHORTEST_SEGMENT, -(-chunks // (MULTIPROCESSORS // programs)))
    return span if span < chunks else 0


def choose(problem: Problem, kind: str, dtype: torch.dtype) -> Configuration:
    """The configuration for a device of ``kind`` (``graphsafe_kernels.policy``)."""
    wide = dtype == torch.float32
    key, value = _power(problem.key_width), _power(problem.value_width)
    programs = problem.sequences * problem.value_heads
    cores = KINDS[kind].cores
    # Descriptors read whole tiles only, rows of a multiple of 16 bytes, and address rows by 32 bits.
    tiles = (
        kind in ("sm_90", "sm_100")
        and not wide
        and key == problem.key_width <= 128
        and problem.value_width % 64 == 0
        and problem.rows * problem.value_heads < 2**30
    )
    small = wide or key > 128
    # Three stages hide the latency of a single long chain; two let two programs share a multiprocessor.
    stages = 1 if small else 3 if programs <= 264 and tiles else 2
    # A bounded gate's factors reach 2^115, beyond fp16; the interpreter has no bf16 dots.
    pairs = dtype
    if problem.safe_gate and dtype == torch.float16 and not cores:  # by levels every factor is at most 1
        pairs = torch.bfloat16 if kind.startswith("sm_") else torch.float32
    # Few programs are best narrow, so that no accumulator passes through shared memory; many are best wide, as each
    # loads a chunk's tiles again. A backward has twice as many.
    can_be_wide = tiles and kind == "sm_90" and value == 128
    narrow = min(value, 64 if tiles else 32)
    chain_block = 128 if can_be_wide and programs > 264 else narrow
    reverse_block = 128 if can_be_wide and 4 * programs > MULTIPROCESSORS else narrow
    few_warps = kind == "sm_90" and tiles  # elsewhere four run out of registers
    # Three stages fit beside states that are stored in quarters: worth it where every chain has a multiprocessor.
    deep = can_be_wide and reverse_block == narrow and problem.chunk_size == 64
    product_block = min(key, 64 if tiles else 32)
    if kind == "sm_90" and not wide and product_block == 32:
        product_block = 16  # Triton 3.6 reads past a warpgroup's right operand that is 32 wide and came by registers
    span = 0 if cores else _span(problem.chunks, programs * -(-problem.value_width // chain_block))
    if few_warps and not span and programs * value <= 32 * MULTIPROCESSORS:
        chain_block = 32  # a multiprocessor for each chain, whose products are half as wide
    rows = problem.rows + problem.sequences * problem.chunk_size
    tile_bytes = 3 * rows * problem.value_heads * problem.key_width * dtype.itemsize
    return Configuration(
        key_block=key,
        chain_block=chain_block,
        chain_warps=4 if few_warps and chain_block <= narrow else 8,
        chain_stages=stages,
        save_stages=min(stages, 2),  # three would need more shared memory than there is
        reverse_block=reverse_block,
        reverse_warps=4 if few_warps and reverse_block == narrow else 8,
        reverse_stages=3 if deep and not span else min(stages, 2),
        store_block=32 if deep and not span else key,
        column_block=32 if cores else 16,
        prepare_warps=4 if cores else problem.chunk_size // 16,
        product_block=product_block,
        product_warps=4 if tiles else 8,
        gradient_warps=8 if cores else problem.chunk_size // 16,
        clear_block=min(value, 128),
        finish_rows=16,
        keep_tiles=tile_bytes <= KEPT_BYTES,
        precision="tf32x3" if kind.startswith("sm_") else "ieee",
        half_inverse=not wide and not cores and problem.qk_l2norm,
        tiles=tiles,
        safe=problem.safe_gate and not wide,
        pairs=pairs,
        span=span,
        levels=cores > 0,
        cores=cores,
        overlap=kind in ("sm_90", "sm_100") and AVAILABLE,
        prefetch=KINDS[kind].ptx,
        late=kind == "sm_80",
        exact_beta=not wide and kind in ("sm_90", "interpreter"),  # elsewhere it spills
        fine=dtype == torch.bfloat16 and not cores,
    )
