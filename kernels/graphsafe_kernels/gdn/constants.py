"""Compile-time constants of the gated delta rule's kernels: from a call's sizes and options and its configuration.

The compile check makes them by the same functions as a launch does.
"""

from __future__ import annotations

from typing import Any

from graphsafe_kernels.gdn.configurations import Configuration
from graphsafe_kernels.gdn.problem import Problem, parted, segments

__all__ = ["chain", "finish", "gradients", "prepare", "reverse", "segment_gradients", "segment_states"]


def _sizes(problem: Problem) -> dict[str, int]:
    return {"H": problem.heads, "HV": problem.value_heads, "K": problem.key_width, "V": problem.value_width,
            "BT": problem.chunk_size}  # fmt: skip


def _gates(problem: Problem, bias: bool) -> dict[str, Any]:
    return {"GATE": problem.gate_in_kernel, "BIAS": bias, "SIGMOID": problem.beta_scale is not None,
            "FACTOR": problem.beta_scale or 1.0}  # fmt: skip


def prepare(p: Problem, c: Configuration, packed: bool, bias: bool, build: int = 0) -> dict[str, Any]:
    """Compile-time constants of :func:`prepare_kernel`. build: the tables' tile of sequences where they are unbuilt."""
    inverse = "fp16" if c.half_inverse and p.qk_l2norm else "fp32"
    return {**_sizes(p), "BK": c.prepare_block, "BV": c.clear_block, "PACKED": packed, "L2NORM": p.qk_l2norm,
            **_gates(p, bias), "TILES": c.tiles, "INVERSE": inverse, "REFINE": p.beta_scale != 1.0,
            "STAGES": c.prepare_stages, "EVEN": c.even_correction, "BUILD": build, "LOOP": c.cores > 0,
            "HEADS_FIRST": c.heads_first, "OVERLAP": c.overlap, "PRECISION": c.precision}  # fmt: skip


def chain(p: Problem, c: Configuration, packed: bool, initial: bool, final: bool, save: bool) -> dict[str, Any]:
    """Compile-time constants of :func:`forward_chain_kernel`."""
    return {**_sizes(p), "BK": c.key_block, "BV": c.chain_block, "PACKED": packed, "INITIAL": initial, "FINAL": final,
            "V_FIRST": p.state_v_first, "SAVE": save, "TILES": c.tiles,
            "STAGES": c.keep_stages if save else c.chain_stages, "SEGMENTS": segments(p, c.span), "LOOP": c.cores > 0,
            "OVERLAP": c.overlap, "PRECISION": c.precision}  # fmt: skip


def segment_states(p: Problem, c: Configuration, packed: bool, initial: bool) -> dict[str, Any]:
    """Compile-time constants of :func:`segment_states_kernel`."""
    return {**_sizes(p), "BK": c.key_block, "BV": c.chain_block, "PACKED": packed, "INITIAL": initial,
            "V_FIRST": p.state_v_first, "TILES": c.tiles, "STAGES": c.keep_stages, "SEGMENTS": segments(p, c.span),
            "OVERLAP": c.overlap, "PRECISION": c.precision}  # fmt: skip


def segment_gradients(p: Problem, c: Configuration, packed: bool, final: bool) -> dict[str, Any]:
    """Compile-time constants of :func:`segment_gradients_kernel`."""
    return {**_sizes(p), "BK": c.key_block, "BV": c.reverse_block, "PACKED": packed, "FINAL": final,
            "V_FIRST": p.state_v_first, "TILES": c.tiles, "STAGES": c.reverse_stages,
            "SEGMENTS": segments(p, c.reverse_span), "OVERLAP": c.overlap,
            "PRECISION": c.precision}  # fmt: skip


def reverse(p: Problem, c: Configuration, packed: bool, initial: bool, final: bool, recompute: bool) -> dict[str, Any]:
    """Compile-time constants of :func:`backward_chains_kernel`."""
    return {**_sizes(p), "BK": c.key_block, "BV": c.reverse_block, "PACKED": packed, "INITIAL": initial, "FINAL": final,
            "V_FIRST": p.state_v_first, "RECOMPUTE": recompute, "TILES": c.tiles, "STAGES": c.reverse_stages,
            "STATE_STAGES": c.state_stages, "SEGMENTS": segments(p, c.reverse_span), "LOOP": c.cores > 0,
            "OVERLAP": c.overlap, "PRECISION": c.precision}  # fmt: skip


def gradients(p: Problem, c: Configuration, packed: bool, bias: bool) -> dict[str, Any]:
    """Compile-time constants of :func:`gradients_kernel`."""
    return {**_sizes(p), "BK": c.gradient_key_block, "BV": c.gradient_value_block, "KEY": c.key_block,
            "PACKED": packed, "L2NORM": p.qk_l2norm, **_gates(p, bias), "TILES": c.state_tiles,
            "STAGES": c.gradient_stages, "WHOLE": not parted(p), "LOOP": c.cores > 0, "HEADS_FIRST": c.heads_first,
            "EXACT": c.exact_beta * (1 if p.qk_l2norm else 2), "OVERLAP": c.overlap,
            "PRECISION": c.precision}  # fmt: skip


def finish(p: Problem, c: Configuration, packed: bool, bias: bool) -> dict[str, Any]:
    """Compile-time constants of :func:`finish_kernel`."""
    return {"H": p.heads, "HV": p.value_heads, "K": p.key_width, "BK": c.key_block, "ROWS": c.finish_rows,
            "PACKED": packed, "L2NORM": p.qk_l2norm, "GATE": p.gate_in_kernel, "BIAS": bias,
            "PARTS": parted(p), "SUMS": 256, "LOOP": c.cores > 0, "OVERLAP": c.overlap}  # fmt: skip
