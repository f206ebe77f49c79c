"""A fused projection's columns as a layer needs them: q, k and v convolved and dense, the others as they are.

Requirements
------------
1. On kernels no q, k or v is copied: one launch reads them where the projection left them, convolves, activates and
   writes each as a tensor of its own. Its backward writes into the projection's gradient, and one launch more adds the
   other columns' gradients there.
2. Where that is not possible the public operator convolves and columns are copied, with the same numbers: on the
   reference, by another provider, in fp64, and on an NPU, whose compiler takes no pointer that is chosen at run time.
3. First order; boundaries written to between forward and backward are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphsafe.metadata import ChunkTables
from graphsafe_kernels.backend import implementation, resolve
from graphsafe_kernels.conv import causal_conv1d
from graphsafe_kernels.conv.op import check_operands
from graphsafe_kernels.layers.split import split
from graphsafe_kernels.providers.choice import own_serves
from graphsafe_kernels.reference.once import first_order_only
from graphsafe_kernels.reference.rows import SavedBoundaries

__all__ = ["Convolved", "convolve"]


@dataclass(frozen=True)
class Convolved:
    """q, k ``[B, T, key]``, v ``[B, T, value]``, contiguous; the columns behind them; the new state or None."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    others: list[torch.Tensor]
    state: torch.Tensor | None


@dataclass(frozen=True)
class _Call:
    widths: tuple[int, int, int]
    others: tuple[int, ...]
    copied: tuple[bool, ...]
    output_final_state: bool
    tables: ChunkTables | None

    @property
    def channels(self) -> int:
        return sum(self.widths)


def _run(call: _Call, projected: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
         initial_state: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """q, k, v, the other columns, the state."""
    # imported here: layers are used where there is no Triton
    from graphsafe_kernels.conv import launch

    x, rest = projected[..., : call.channels], projected[..., call.channels :]
    y, state = launch.forward(x, weight, bias, None, initial_state, call.output_final_state, True, call.tables,
                              call.widths)
    others = resolve("split_columns", rest.device)(rest, call.others, call.copied) if any(call.copied) else [
        None for _ in call.others]
    views = rest[..., : sum(call.others)].split(call.others, -1)
    return *y, *(view if copy is None else copy for view, copy in zip(views, others, strict=True)), state


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, projected: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                initial_state: torch.Tensor | None, call: _Call) -> tuple[torch.Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(projected, weight, bias, initial_state)
        ctx.call = call
        ctx.boundaries = None if call.tables is None else SavedBoundaries.of("causal_conv1d", call.tables)
        return _run(call, projected, weight, bias, initial_state)

    @staticmethod
    @first_order_only("a layer")
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        from graphsafe_kernels.conv import launch

        call: _Call = ctx.call
        projected, weight, bias, initial_state = ctx.saved_tensors
        if ctx.boundaries is not None:
            ctx.boundaries.get()
        dy = [projected.new_zeros((*projected.shape[:2], w)) if g is None else g.contiguous()
              for g, w in zip(gradients, call.widths, strict=False)]
        dfinal = gradients[-1]
        whole = torch.empty_like(projected, memory_format=torch.contiguous_format)
        g = launch.backward(dy, None if dfinal is None else dfinal.contiguous(), projected[..., : call.channels],
                            weight, bias, None, initial_state, True, call.tables, whole[..., : call.channels])
        parts, widths = list(gradients[3:-1]), call.others
        fill = projected.shape[2] - call.channels - sum(widths)
        if fill:
            parts, widths = [*parts, None], (*widths, fill)
        if widths:
            resolve("join_columns", whole.device)(parts, widths, whole)
        return whole, g.weight, g.bias, g.initial_state, None


def _in_place(projected: torch.Tensor, widths: tuple[int, int, int], taps: int) -> bool:
    """Whether the kernels write q, k and v apart; see requirement 2."""
    if projected.device.type == "npu" or projected.dtype == torch.float64 or widths[0] != widths[1]:
        return False
    if implementation("causal_conv1d", projected.device) != "triton" or not own_serves("causal_conv1d"):
        return False
    from graphsafe_kernels.conv.launch import MAX_TAPS

    return taps <= MAX_TAPS


def convolve(projected: torch.Tensor, widths: tuple[int, int, int], weight: torch.Tensor, bias: torch.Tensor | None, *,
             others: Sequence[int] = (), copied: Sequence[bool] = (), initial_state: torch.Tensor | None = None,
             output_final_state: bool = False, layout: dict[str, Any]) -> Convolved:
    """Convolve and activate (SiLU) the first columns of ``projected`` ``[B, T, C]``, and take the others apart.

    ``widths``: of q, k and v; ``weight`` ``[D, W]`` and ``bias`` ``[D]`` over their D channels in this order, states
    ``[N, D, W]``; ``others``: widths of the parts behind them, each a view, or a contiguous copy where ``copied``; at
    most four, and columns of no part at the end. ``layout``: the batch, as :func:`causal_conv1d` takes it.
    """
    sizes, flags = tuple(others), tuple(copied)
    if not _in_place(projected, widths, weight.shape[1]):
        if sizes:
            x, *rest = split(projected, [sum(widths), *sizes], [False, *flags])
        else:
            x, rest = projected, []
        y, state = causal_conv1d(x, weight, bias, initial_state=initial_state, output_final_state=output_final_state,
                                 activation="silu", **layout)
        return Convolved(*split(y, widths), rest, state)  # type: ignore[misc]
    x = projected[..., : sum(widths)]
    cu_seqlens, chunk_size = layout["cu_seqlens"], layout.get("chunk_size", 64)
    indices, offsets, most = (layout.get(name) for name in ("chunk_indices", "chunk_offsets", "max_num_seqs"))
    check_operands(x, weight, bias, None, initial_state, cu_seqlens, indices, offsets, most, chunk_size)
    if cu_seqlens is None:
        tables = None
    elif indices is None or offsets is None:
        tables = resolve("build_tables", x.device)(cu_seqlens, x.shape[1], chunk_size)
    else:
        tables = ChunkTables(cu_seqlens, indices, offsets, chunk_size)
    if projected.stride(2) != 1:
        projected = projected.contiguous()
    call = _Call(widths, sizes, flags, output_final_state, tables)
    operands = (projected, weight.contiguous(), *(None if t is None else t.contiguous() for t in (bias, initial_state)))
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands):
        results = _Convolve.apply(*operands, call)
    else:
        results = _run(call, *operands)
    q, k, v, *rest, state = results
    return Convolved(q, k, v, rest, state)
