"""Tile sizes, warps, stages and dot precision of KDA's kernels, by device kind, dtype and shape.

Requirements
------------
1. One table; kernels hold no device's numbers. A choice depends on the device and on the bucket's sizes alone.
2. Blocks of the preparation are 16 wide on purpose: ptxas 12.8, which Triton 3.6 brings, miscompiles the same kernel at
   32 (log in the kernels' documentation).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Configuration", "Problem", "choose"]


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

    ``prepare_block``, ``product_block``, ``gradient_block``: columns of K a program takes at a time; ``chain_block``,
    ``clear_block``: of V; ``save_stages``: of a forward chain that keeps states. ``half``: gate sums by fp16 dots,
    ``half_inverse``: the triangular system too; ``tiles``: chains load by descriptors; ``safe``: pairs within a tile by
    the bounded form, ``pairs``: type of the dots that meet pairs.
    """

    key_block: int
    chain_block: int
    chain_warps: int
    chain_stages: int
    save_stages: int
    reverse_stages: int
    prepare_block: int
    prepare_warps: int
    product_block: int
    product_warps: int
    gradient_block: int
    gradient_warps: int
    clear_block: int
    finish_rows: int
    precision: str
    half: bool
    half_inverse: bool
    tiles: bool
    safe: bool
    pairs: torch.dtype


def _power(n: int) -> int:
    return max(16, 1 << (n - 1).bit_length())


def choose(problem: Problem, kind: str, dtype: torch.dtype) -> Configuration:
    """The configuration for a device of ``kind`` (``graphsafe_kernels.policy``)."""
    wide = dtype == torch.float32
    key, value = _power(problem.key_width), _power(problem.value_width)
    programs = problem.sequences * problem.value_heads
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
    if problem.safe_gate and dtype == torch.float16:
        pairs = torch.bfloat16 if kind.startswith("sm_") else torch.float32
    return Configuration(
        key_block=key,
        chain_block=min(value, 64 if tiles else 32),
        chain_warps=4 if kind == "sm_90" and tiles else 8,  # elsewhere four run out of registers
        chain_stages=stages,
        save_stages=min(stages, 2),  # three would need more shared memory than there is
        reverse_stages=min(stages, 2),
        prepare_block=16,
        prepare_warps=4,
        product_block=min(key, 64 if tiles else 32),
        product_warps=4 if tiles else 8,
        gradient_block=16,
        gradient_warps=4,
        clear_block=min(value, 128),
        finish_rows=16,
        precision="tf32x3" if kind.startswith("sm_") else "ieee",
        half=not wide,
        half_inverse=not wide and problem.qk_l2norm,
        tiles=tiles,
        safe=problem.safe_gate and not wide,
        pairs=pairs,
    )
