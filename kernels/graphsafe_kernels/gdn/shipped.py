"""The gated delta rule's shipped configurations, as ``compilecheck`` compiles them.

Widths 64 and 128 in bf16 and fp16, every chunk size, with every option and with the fewest, one sequence and many. What
is known to spill or not to compile is in the kernels' log in the documentation, not here: fp32, K = 256, other widths,
the gradients on sm_80 and at chunk 32, width 64 on sm_80 and sm_100.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from graphsafe_kernels.delta_rule import DeltaRuleOptions
from graphsafe_kernels.gdn import constants, recurrent
from graphsafe_kernels.gdn.chain_kernels import backward_chains_kernel, forward_chain_kernel
from graphsafe_kernels.gdn.configurations import Configuration, choose, choose_ascend
from graphsafe_kernels.gdn.launch import npu_options
from graphsafe_kernels.gdn.parallel_kernels import finish_kernel, gradients_kernel
from graphsafe_kernels.gdn.prepare_kernels import prepare_kernel
from graphsafe_kernels.gdn.problem import FEW_SEQUENCES, Problem, segments
from graphsafe_kernels.gdn.segment_kernels import segment_gradients_kernel, segment_states_kernel
from graphsafe_kernels.policy import Policy
from graphsafe_kernels.shipped import Shipped, pointer

__all__ = ["shipped"]

_INTEGERS = ("T", "N", "NT", "span", "first_slot", "slots", "row_programs")
_SCALARS = {"scale": "fp32", **dict.fromkeys(_INTEGERS, "i32")}
_TABLES = {"cu_seqlens": "*i32", "chunk_indices": "*i32", "chunk_offsets": "*i32"}


def shipped(policy: Policy) -> Iterator[Shipped]:
    """Every kernel in every configuration that is expected to compile without spills for ``policy``."""
    if policy.kind.startswith("ascend"):
        yield from _shipped_for_ascend(policy)
    if not policy.kind.startswith("sm_"):
        return
    capability = int(policy.kind.removeprefix("sm_"))
    for dtype, width, chunk_size, sequences, full in (
        (torch.bfloat16, 128, 64, 1, False),
        (torch.bfloat16, 128, 64, 32, True),
        (torch.float16, 128, 64, 1, True),
        (torch.bfloat16, 64, 64, 1, True),
        (torch.bfloat16, 128, 32, 32, True),
        (torch.bfloat16, 128, 16, 32, True),
    ):
        if capability != 90 and (width == 64 or (capability >= 100 and chunk_size < 64)):
            continue
        problem = Problem(1, 8192, 16, 32, width, width, sequences, chunk_size, width**-0.5, qk_l2norm=True,
                          gate_in_kernel=full, beta_scale=2.0 if full else None,
                          state_v_first=full and sequences > 1)  # fmt: skip
        yield from _kernels(problem, choose(problem, capability, dtype), dtype, full, capability)
    # What layers call: beta is a plain sigmoid, and the preparation has no Newton step.
    problem = Problem(1, 8192, 16, 32, 128, 128, 1, 64, 128**-0.5, qk_l2norm=True, gate_in_kernel=True, beta_scale=1.0)
    c = choose(problem, capability, torch.bfloat16)
    for entry in _kernels(problem, c, torch.bfloat16, True, capability):
        if entry.kernel is prepare_kernel:
            yield dataclasses.replace(entry, name=f"{entry.name}, beta at most 1")


def _shipped_for_ascend(policy: Policy) -> Iterator[Shipped]:
    """Every dtype, chunk size and width, states in both layouts; not all combined, for time."""
    for dtype, width, chunk_size, full, v_first in (
        (torch.bfloat16, 128, 64, True, False),
        (torch.float32, 128, 64, True, True),
        (torch.float16, 64, 64, False, False),
        (torch.bfloat16, 128, 32, True, True),
        (torch.float32, 64, 16, True, False),
        (torch.float32, 256, 64, True, False),
    ):
        beta_scale = 2.0 if full else None
        problem = Problem(1, 8192, 16, 32, width, width, 32, chunk_size, width**-0.5, qk_l2norm=True,
                                 gate_in_kernel=full, beta_scale=beta_scale, state_v_first=v_first)  # fmt: skip
        c = choose_ascend(problem, policy.cores, dtype)
        yield from _kernels(problem, c, dtype, full, 0)
        yield _recurrent(problem, dtype, full)


def _recurrent(p: Problem, dtype: torch.dtype, full: bool) -> Shipped:
    """The recurrent kernel on an Ascend; with ``full`` it computes the gate, else it takes every kind of decay."""
    types = dict.fromkeys(("q", "k", "v", "o"), pointer(dtype)) | {"cu_seqlens": "*i32", **_SCALARS}
    names = ("A_log", "dt_bias", "g", "initial_state") if full else ("g", "gk", "gv")
    types |= dict.fromkeys((*names, "beta", "final_state"), "*fp32")
    options = DeltaRuleOptions(p.scale, output_final_state=True, qk_l2norm=True, gate_in_kernel=full,
                               beta_scale=p.beta_scale, state_v_first=p.state_v_first)  # fmt: skip
    sizes = recurrent.constants(p.heads, p.value_heads, p.key_width, p.value_width, options, types, loop=True)
    kernel = recurrent.recurrent_kernel
    here = {parameter: types.get(parameter) for parameter in kernel.arg_names if parameter not in sizes}
    return Shipped(kernel, f"{str(dtype).removeprefix('torch.')} {p.key_width}", here, sizes, recurrent.WARPS)


def _kernels(p: Problem, c: Configuration, dtype: torch.dtype, full: bool, capability: int) -> Iterator[Shipped]:
    t, gate, state = pointer(dtype), "*fp32" if full else None, "*fp32" if full else None
    bt = p.chunk_size
    name = f"{str(dtype).removeprefix('torch.')} {p.key_width} chunk {bt} N {p.sequences}"
    name += " all options" if full else ""
    tokens = dict.fromkeys(("q", "k", "v", "o", "do", "dw", "dv", "dq", "dk", "dq_parts", "dk_parts", "correction",
                            "scores"), t)  # fmt: skip
    beta_sums = {"beta_sums": "*fp32" if c.exact_beta else None}
    kept = dict.fromkeys(("states", "residuals", "dstates"), t)
    fp32 = dict.fromkeys(("g", "beta", "vectors", "decay", "dg", "dbeta"), "*fp32")
    gates = dict.fromkeys(("A_log", "dt_bias", "gate_sums", "dA_log", "ddt_bias"), gate)
    states = dict.fromkeys(("initial_state", "final_state", "dfinal_state", "dinitial_state"), state)
    common = {**tokens, **fp32, **gates, **states, **_TABLES, **_SCALARS}
    element = "bf16" if dtype == torch.bfloat16 else "fp16"

    def tile(rows: int, columns: int, use: bool = c.tiles, element: str = element) -> str | None:
        return f"tensordesc<{element}[{rows}, {columns}]>" if use else None

    def cut(span: int) -> dict[str, str | None]:
        """What a kernel over segments takes besides."""
        several = segments(p, span) > 2
        return {"ends": "*fp32", "dends": "*fp32", "transitions": "*fp32" if several else None,
                "transitions_tiles": tile(c.key_block, c.key_block, c.tiles and several, "fp32")} if span else {}

    token_tiles = {
        "q_tiles": tile(bt, c.key_block), "k_tiles": tile(bt, c.key_block), "v_tiles": tile(bt, c.chain_block),
        "do_tiles": tile(bt, c.chain_block), "correction_tiles": tile(bt, bt), "scores_tiles": tile(bt, bt),
    }  # fmt: skip
    state_tile, rows_tile = tile(c.chain_block, c.key_block), tile(bt, c.chain_block)
    kept_tiles = {"states_tiles": state_tile, "dstates_tiles": state_tile, "residuals_tiles": tile(c.chain_block, bt)}
    block = tile(c.gradient_value_block, c.gradient_key_block, c.state_tiles)

    def entry(kernel: Any, types: dict[str, Any], constants: dict[str, Any], warps: int, stages: int,
              registers: int = 0) -> Shipped:  # fmt: skip
        here = {parameter: types.get(parameter) for parameter in kernel.arg_names if parameter not in constants}
        return Shipped(kernel, name, here, constants, warps, stages, registers, npu_options(c))

    types = {**common, **dict.fromkeys(("q_tiles", "k_tiles"), tile(bt, c.prepare_block))}
    for build in (0,) if c.cores else (0, 1 if p.sequences == 1 else FEW_SEQUENCES):
        fixed = constants.prepare(p, c, True, full, build)
        yield entry(prepare_kernel, types, fixed, c.prepare_warps, 1, c.prepare_registers)
    if c.span:
        fixed = constants.segment_states(p, c, True, full)
        types = {**common, **token_tiles, **cut(c.span)}
        yield entry(segment_states_kernel, types, fixed, c.chain_warps, fixed["STAGES"])
    if c.reverse_span:
        fixed = constants.segment_gradients(p, c, True, full)
        types = {**common, **token_tiles, **cut(c.reverse_span)}
        yield entry(segment_gradients_kernel, types, fixed, c.reverse_warps, c.reverse_stages)
    for save in (False, True):
        fixed = constants.chain(p, c, True, full, full, save)
        types = {**common, **token_tiles, "o_tiles": rows_tile, **(kept | kept_tiles if save else {}), **cut(c.span)}
        yield entry(forward_chain_kernel, types, fixed, c.chain_warps, fixed["STAGES"])
    for recompute in (False,) if c.cores else (False, True):  # with cores, states are always kept
        fixed = constants.reverse(p, c, True, full, full, recompute)
        types = {**common, **kept, **token_tiles, "dw_tiles": rows_tile, **kept_tiles, **cut(c.reverse_span)}
        yield entry(backward_chains_kernel, types, fixed, c.reverse_warps, c.reverse_stages)
    if capability != 80 and not (bt == 32 and capability == 90):
        fixed = constants.gradients(p, c, True, full)
        types = {**common, **kept, **beta_sums, "states_tiles": block, "dstates_tiles": block}
        yield entry(gradients_kernel, types, fixed, c.gradient_warps, c.gradient_stages)
    yield entry(finish_kernel, common, constants.finish(p, c, True, full), 4, 1)
