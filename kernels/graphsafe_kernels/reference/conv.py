"""Reference of the short causal convolution: vectorised over tokens and sequences, on any device, fp64 included.

Requirements
------------
1. ``mathematics.md`` section 3 for every length from zero up and every number of taps, and its exact derivative for
   every input, both states included.
2. One path for dense and packed: a dense batch is the packed batch of its B rows of equal length.
3. Every value comes in by a gather whose index is computed from ``cu_seqlens`` on the device: a row of another
   sequence or of padding is never loaded, so nothing it holds (NaN, infinity) can matter. Gradients are gathers too:
   no scatter, no atomics.
4. Rows beyond the live total get exact zeros, in the output and in every gradient.
5. dweight and dbias are summed over live rows in an order that padding does not change.
6. Nothing reads the device from the host, no shape depends on data, no tensor is made from host data.
"""

from __future__ import annotations

from typing import Any

import torch

from graphsafe.metadata import ChunkTables
from graphsafe_kernels.reference.once import first_order_only
from graphsafe_kernels.reference.rows import SavedBoundaries, compute_dtype, ordered_sum, sigmoid

__all__ = ["causal_conv1d"]


class _Layout:
    """Where each of R rows lies: all int64 or bool, ``[R]`` unless stated.

    ``starts``/``lengths`` ``[N]`` per sequence; ``sequence``, ``position`` within it, ``remaining`` rows of it from
    this one on (at least 1); ``live``: the row belongs to a sequence.
    """

    def __init__(self, cu_seqlens: torch.Tensor, rows: int) -> None:
        boundaries = cu_seqlens.long()
        self.rows = torch.arange(rows, device=boundaries.device)
        self.starts, ends = boundaries[:-1], boundaries[1:]
        self.lengths = ends - self.starts
        # right=True: the first sequence that ends after the row, so empty sequences are passed over
        sequence = torch.searchsorted(ends, self.rows, right=True)
        self.live = sequence < ends.shape[0]
        self.sequence = sequence.clamp(max=ends.shape[0] - 1)
        self.position = self.rows - self.starts[self.sequence]
        self.remaining = ends[self.sequence] - self.rows


class _Source:
    """Rows to gather from: R data rows, then the N * W rows of a state if there is one, then a row of zeros.

    ``data`` ``[R, D]``, ``state`` ``[N, D, W]`` or None.
    """

    def __init__(self, data: torch.Tensor, state: torch.Tensor | None, taps: int, dtype: torch.dtype) -> None:
        rows, width = data.shape
        pieces = [data.to(dtype)]
        if state is not None:
            pieces.append(state.to(dtype).transpose(1, 2).reshape(-1, width))
        pieces.append(data.new_zeros(1, width, dtype=dtype))
        self.table = torch.cat(pieces)
        self.taps = taps
        self.state_row = rows if state is not None else None
        self.zero_row = self.table.shape[0] - 1

    def gather(self, inside: torch.Tensor, row: torch.Tensor, in_state: torch.Tensor | None = None,
               sequence: torch.Tensor | None = None, slot: torch.Tensor | None = None) -> torch.Tensor:
        """Data row ``row`` where ``inside``, else state slot ``slot`` of ``sequence`` where ``in_state``, else zero."""
        index = row.masked_fill(~inside, self.zero_row)
        if self.state_row is not None and in_state is not None:
            assert sequence is not None
            assert slot is not None
            index = torch.where(in_state, sequence * self.taps + slot + self.state_row, index)
        return self.table.index_select(0, index.reshape(-1)).reshape(*index.shape, self.table.shape[1])


def _tap_inputs(source: _Source, at: _Layout) -> torch.Tensor:
    """X(t - W + 1 + j) for every row and j = 0..W-1: ``[R, W, D]``, zero at padding rows."""
    tap = torch.arange(source.taps, device=at.rows.device)
    back = source.taps - 1 - tap
    position, live = at.position[:, None], at.live[:, None]
    here = position >= back
    return source.gather(live & here, at.rows[:, None] - back, live & ~here, at.sequence[:, None], position + tap + 1)


def _over_taps(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``sum_j weight[:, j] rows[..., j, :]``, ``[..., W, D] -> [..., D]``, added in the order of j."""
    terms = (rows * weight.t()).unbind(-2)
    return sum(terms[1:], start=terms[0])


def _pre_activation(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """z ``[R, D]`` from the tap inputs ``[R, W, D]``, ``weight`` ``[D, W]`` and ``bias`` ``[D]``."""
    z = _over_taps(inputs, weight)
    return z if bias is None else z + bias


def _final_state(source: _Source, at: _Layout) -> torch.Tensor:
    """X(L - W + s) for every sequence and s = 0..W-1: ``[N, D, W]``."""
    slot = torch.arange(source.taps, device=at.rows.device)
    position = at.lengths[:, None] - source.taps + slot
    inside = position >= 0
    sequence = torch.arange(at.lengths.shape[0], device=at.rows.device)[:, None]
    state = source.gather(inside, at.starts[:, None] + position, ~inside, sequence, slot + at.lengths[:, None])
    return state.transpose(1, 2).contiguous()


def _input_gradient(source: _Source, at: _Layout, weight: torch.Tensor) -> torch.Tensor:
    """dX of every row ``[R, D]``; ``source`` holds dz and, as its state, the final state's gradient."""
    taps = source.taps
    ahead = taps - 1 - torch.arange(taps, device=at.rows.device)
    inside = at.live[:, None] & (at.remaining[:, None] > ahead)
    through_taps = _over_taps(source.gather(inside, at.rows[:, None] + ahead), weight)
    # the last W rows of a sequence are slots of its final state
    slot = taps - at.remaining
    return through_taps + source.gather(torch.zeros_like(at.live), at.rows, at.live & (slot >= 0), at.sequence, slot)


def _state_gradient(source: _Source, at: _Layout, weight: torch.Tensor) -> torch.Tensor:
    """d initial_state ``[N, D, W]``; ``source`` as in :func:`_input_gradient`."""
    slot = torch.arange(source.taps, device=at.rows.device)
    length = at.lengths[:, None]
    sequence = torch.arange(length.shape[0], device=at.rows.device)[:, None]
    # slot s is X(s - W), which tap j reads at position s - 1 - j
    position = slot[:, None] - 1 - slot
    inside = (position >= 0) & (position < length[:, :, None])
    through_taps = _over_taps(source.gather(inside, at.starts[:, None, None] + position), weight)
    # a sequence shorter than W hands slot s on as slot s - L of its final state
    handed_on = slot >= length
    nowhere = torch.zeros_like(handed_on)
    total = through_taps + source.gather(nowhere, sequence + slot, handed_on, sequence, slot - length)
    return total.transpose(1, 2)


class _CausalConv1d(torch.autograd.Function):
    """Operands flattened to rows: x and residual ``[R, D]``, ``cu_seqlens`` ``[N + 1]``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                residual: torch.Tensor | None, initial_state: torch.Tensor | None, output_final_state: bool,
                activate: bool, cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias, initial_state)
        ctx.boundaries = SavedBoundaries("causal_conv1d", cu_seqlens)
        ctx.activate = activate
        ctx.residual_dtype = None if residual is None else residual.dtype

        dtype = compute_dtype(x.dtype)
        at = _Layout(cu_seqlens, x.shape[0])
        source = _Source(x, initial_state, weight.shape[1], dtype)
        y = _pre_activation(_tap_inputs(source, at), weight.to(dtype), None if bias is None else bias.to(dtype))
        if activate:
            y = y * sigmoid(y)
        if residual is not None:
            y = y + residual.to(dtype)
        y = y.masked_fill(~at.live[:, None], 0).to(x.dtype)
        return y, _final_state(source, at).to(x.dtype) if output_final_state else None

    @staticmethod
    @first_order_only("causal_conv1d")
    def backward(ctx: Any, dy: torch.Tensor | None, dht: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, initial_state = ctx.saved_tensors
        need_x, need_weight, need_bias, need_residual, need_state = ctx.needs_input_grad[:5]
        dtype = compute_dtype(x.dtype)
        taps = weight.shape[1]
        at = _Layout(ctx.boundaries.get(), x.shape[0])
        dead = ~at.live[:, None]
        w = weight.to(dtype)

        dresidual = None
        if need_residual:
            dresidual = x.new_zeros(x.shape, dtype=ctx.residual_dtype)
            if dy is not None:
                dresidual = dy.masked_fill(dead, 0).to(ctx.residual_dtype)

        if need_weight or ctx.activate:
            inputs = _tap_inputs(_Source(x, initial_state, taps, dtype), at)
        if dy is None:
            dz = x.new_zeros(x.shape, dtype=dtype)
        else:
            dz = dy.to(dtype)
            if ctx.activate:
                z = _pre_activation(inputs, w, None if bias is None else bias.to(dtype))
                s = sigmoid(z)
                dz = dz * (s * (1 + z * (1 - s)))
            dz = dz.masked_fill(dead, 0)

        source = _Source(dz, dht, taps, dtype)
        dx = _input_gradient(source, at, w).to(x.dtype) if need_x else None
        dstate = _state_gradient(source, at, w).to(initial_state.dtype) if need_state else None
        dweight = dbias = None
        if need_weight:
            dweight = ordered_sum(dz[:, None] * inputs).t().to(weight.dtype)
        if need_bias:
            dbias = ordered_sum(dz).to(bias.dtype)
        return dx, dweight, dbias, dresidual, dstate, None, None, None


def causal_conv1d(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None,
                  initial_state: torch.Tensor | None, *, output_final_state: bool, activate: bool,
                  cu_seqlens: torch.Tensor | None, tables: ChunkTables | None, chunk_size: int,
                  use_graph: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The convolution on checked operands: x, residual ``[B, T, D]`` -> y ``[B, T, D]``, state ``[N, D, W]`` or None.

    ``weight`` ``[D, W]``, ``bias`` ``[D]``, ``initial_state`` ``[N, D, W]``; ``activate`` applies SiLU; B is 1 with
    ``cu_seqlens`` ``[N + 1]``. Computes in fp32 (fp64 for fp64); y and the state take x's dtype. ``tables``,
    ``chunk_size`` and ``use_graph`` are for kernels: rows are located by ``cu_seqlens``, alike in and out of a graph.
    """
    batch, tokens, width = x.shape
    if cu_seqlens is None:
        cu_seqlens = torch.arange(batch + 1, device=x.device) * tokens
    rows = x.reshape(batch * tokens, width)
    residual_rows = None if residual is None else residual.reshape(batch * tokens, width)
    y, state = _CausalConv1d.apply(rows, weight, bias, residual_rows, initial_state, output_final_state, activate,
                                   cu_seqlens)
    return y.reshape(x.shape), state
