"""KDA's shipped configurations, as ``compilecheck`` compiles them: what the launches would start, recorded.

Widths 64 and 128 in bf16 and fp16 with a bounded gate, both chunk sizes, with every option and with the fewest, few and
many sequences; for an Ascend also fp32, 256 wide, and shared heads. What is known to spill is listed in the kernels'
log (docs), not here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from graphsafe.bucket import slot_count
from graphsafe.metadata import ChunkTables
from graphsafe_kernels.delta_rule import make_options
from graphsafe_kernels.kda import gate, launch, recurrent
from graphsafe_kernels.kda.chain_kernels import forward_chain_kernel
from graphsafe_kernels.kda.configurations import Problem
from graphsafe_kernels.kda.gate_kernels import gate_backward_kernel, gate_kernel
from graphsafe_kernels.kda.prepare_kernels import prepare_kernel
from graphsafe_kernels.kda.recurrent_kernels import recurrent_kernel
from graphsafe_kernels.policy import Policy
from graphsafe_kernels.shipped import Shipped, pointer

__all__ = ["record", "shipped"]

_TOKENS, _HEADS = 8192, 32


def _kind(value: Any) -> str | None:
    """The Triton type of a run-time argument."""
    if value is None or isinstance(value, torch.Tensor):
        return pointer(None if value is None else value.dtype)
    if isinstance(value, (int, float)):
        return "i32" if isinstance(value, int) else "fp32"
    element = (pointer(value.base.dtype) or "")[1:]
    return f"tensordesc<{element}[{', '.join(map(str, value.block_shape))}]>"


def record(kind: str, dtype: torch.dtype, width: int, chunk_size: int, sequences: int, *, safe: bool = True,
           full: bool = True, group: int = 1, tokens: int = _TOKENS,
           beta_scale: float = 2.0) -> Iterator[Shipped]:  # fmt: skip
    """Every kernel that a forward and a backward start on a device of ``kind``, intermediates kept and made again.

    ``full``: gate and beta in the kernel, initial and final states. Tensors are of device "meta": nothing runs.
    """
    name = (f"{str(dtype).removeprefix('torch.')} {width} chunk {chunk_size} N {sequences}{' safe' if safe else ''}"
            f"{' all options' if full else ''}{'' if group == 1 else f' group {group}'}")  # fmt: skip
    found: dict[tuple[Any, ...], Shipped] = {}

    def start(kernel: Any, grid: int, arguments: tuple[Any, ...], constants: dict[str, Any], *, warps: int,
              stages: int = 1, **more: Any) -> None:  # fmt: skip
        types = dict(zip(kernel.arg_names, map(_kind, arguments), strict=False))
        part = ", ".join(f"{n}={constants[n]}" for n in ("SCORES", "SAVE", "RECOMPUTE") if n in constants)
        entry = Shipped(kernel, f"{name}{f' ({part})' if part else ''}", types, constants, warps, stages)
        if grid:
            found.setdefault((kernel.__name__, part), entry)

    meta = lambda *shape, dtype=dtype: torch.empty(shape, dtype=dtype, device="meta")  # noqa: E731
    fp32, heads = torch.float32, _HEADS // group
    problem = Problem(1, tokens, heads, _HEADS, width, width, sequences, chunk_size, width**-0.5, qk_l2norm=True,
                      gate=2 if full else 0, lower_bound=-5.0, beta_scale=beta_scale if full else None,
                      safe_gate=safe)  # fmt: skip
    slots = slot_count(tokens, sequences, chunk_size)
    shapes = ((sequences + 1,), (slots, 2), (sequences + 1,))
    tables = ChunkTables(*(meta(*shape, dtype=torch.int32) for shape in shapes), chunk_size)
    values, state = (1, tokens, _HEADS, width), (sequences, _HEADS, width, width)
    optional = (meta(_HEADS, dtype=fp32), meta(_HEADS * width, dtype=fp32), meta(*state, dtype=fp32))
    x = launch.Operands(meta(1, tokens, heads, width), meta(1, tokens, heads, width), meta(*values), meta(*values),
                        meta(1, tokens, _HEADS), *(optional if full else (None, None, None)))  # fmt: skip
    final = meta(*state, dtype=fp32) if full else None
    for keep in (False, True):
        _, kept = launch.forward(problem, tables, x, final, None, keep, kind=kind, start=start)
        launch.backward(problem, tables, x, kept, meta(*values), meta(*values), final, kind=kind, start=start)
    yield from found.values()


def token_by_token(kind: str, dtype: torch.dtype, width: int, *, full: bool) -> Iterator[Shipped]:
    """The recurrent form and both kernels of the gate; ``full``: with every operand and option."""
    fp32, name = torch.float32, f"{str(dtype).removeprefix('torch.')} {width}{' all options' if full else ''}"
    options = make_options(scale=None, key_width=width, use_beta_sigmoid=full, allow_neg_eigval=full,
                           output_final_state=full, qk_l2norm=full, gate_in_kernel=full, lower_bound=-5.0)  # fmt: skip
    state, index = (fp32, torch.int32) if full else (None, None)
    dtypes = dict.fromkeys(("q", "k", "v", "g", "beta", "o"), dtype) | dict.fromkeys(("A_log", "dt_bias"), state)
    dtypes |= {"initial_state": state, "final_state": state, "cu_seqlens": index}
    numbers = {"scale": "fp32", "bound": "fp32", "T": "i32", "N": "i32", "rows": "i32"}
    types = {n: pointer(t) for n, t in dtypes.items()} | numbers
    sizes = recurrent.constants(kind, (state, state, state, index), _HEADS, _HEADS, width, width, options)
    yield Shipped(recurrent_kernel, name, {n: types[n] for n in recurrent_kernel.arg_names if n in types}, sizes,
                  recurrent.WARPS)  # fmt: skip
    types |= {"y": "*fp32", "dy": "*fp32", "dg": pointer(dtype), "scale_sums": pointer(state),
              "bias_sums": pointer(state)}  # fmt: skip
    for kernel in (gate_kernel, gate_backward_kernel):
        sizes = gate.constants(kind, full, full, _HEADS, width, -5.0 if full else None)
        yield Shipped(kernel, name, {n: types[n] for n in kernel.arg_names if n in types}, sizes, gate.WARPS)


def shipped(policy: Policy) -> Iterator[Shipped]:
    """Every kernel in every configuration that is expected to compile without spills for ``policy``."""
    if policy.kind == "interpreter":
        return
    for dtype, width, full in ((torch.bfloat16, 128, True), (torch.float16, 64, False)):
        yield from token_by_token(policy.kind, dtype, width, full=full)
    if policy.cores:
        yield from token_by_token(policy.kind, torch.float32, 256, full=True)
        # the number of sequences is none of the compiler's concern there, and neither is a bound of the gate
        for dtype, width, chunk_size, full, group in (
            (torch.bfloat16, 128, 64, True, 1),
            (torch.bfloat16, 128, 64, False, 4),
            (torch.float16, 64, 64, True, 1),
            (torch.bfloat16, 128, 32, True, 1),
            (torch.float32, 128, 64, True, 1),
            (torch.bfloat16, 256, 64, True, 1),
        ):
            yield from record(policy.kind, dtype, width, chunk_size, 1, full=full, group=group)
        return
    for dtype, width, chunk_size, sequences, full in (
        (torch.bfloat16, 128, 64, 1, True),
        (torch.bfloat16, 128, 64, 32, False),
        (torch.float16, 128, 64, 1, True),
        (torch.bfloat16, 64, 64, 1, True),
        (torch.bfloat16, 128, 32, 32, True),
    ):
        yield from record(policy.kind, dtype, width, chunk_size, sequences, full=full)
    # The chain between few sequences, a multiprocessor each, and many.
    for entry in record(policy.kind, torch.bfloat16, 128, 64, 4):
        if entry.kernel is forward_chain_kernel:
            yield entry
    # What layers call: beta is a plain sigmoid, and the preparation has no Newton step.
    for entry in record(policy.kind, torch.bfloat16, 128, 64, 1, beta_scale=1.0):
        if entry.kernel is prepare_kernel and entry.constants["SCORES"]:
            yield dataclasses.replace(entry, name=f"{entry.name}, beta at most 1")
