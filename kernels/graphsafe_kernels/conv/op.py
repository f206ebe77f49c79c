"""``causal_conv1d``: argument checks, and the choice of implementation by the operands' device.

Requirements
------------
1. Names, order and defaults of flash-linear-attention 0.6.0, plus the graph arguments.
2. Everything wrong is refused here, by name, before any launch and without reading the device. What depends on shapes
   and dtypes is checked once for each set of them, so that a call costs a look-up.
3. An argument of flash-linear-attention that is not served is refused, never ignored.
"""

from __future__ import annotations

from typing import Any

import torch

from graphsafe.contract import check_cu_seqlens, check_tensor, resolve_tables
from graphsafe.errors import error
from graphsafe.metadata import ChunkTables
from graphsafe_kernels.backend import resolve
from graphsafe_kernels.providers.choice import selectable

__all__ = ["causal_conv1d", "check_operands"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ACTIVATIONS = (None, "silu", "swish")

_checked: set[object] = set()
_MOST_CHECKED = 4096


@selectable
def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    backend: str | None = "triton",
    cu_seqlens: torch.Tensor | None = None,
    cu_seqlens_cpu: torch.Tensor | None = None,
    chunk_indices: torch.Tensor | None = None,
    cp_context: Any = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    chunk_offsets: torch.Tensor | None = None,
    chunk_size: int = 64,
    *,
    provider: str | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Depthwise causal convolution over the last W tokens, with bias, activation, residual and states.

    With X(t) = x_t inside a sequence and X(-j) = initial_state[:, W - j] before it (zero without a state)::

        z[t] = bias + sum_{j=0..W-1} weight[:, j] X(t - W + 1 + j)
        y    = act(z) + residual                       act(z) = z sigmoid(z) for 'silu' and 'swish'
        final_state[:, s] = X(L - W + s)               s = 0..W-1

    Shapes: ``x`` and ``residual`` ``[B, T, D]`` of any strides (``[B, T, ...]`` whose trailing sizes multiply to D is
    taken as D channels), ``weight`` ``[D, W]``, ``bias`` ``[D]``, states ``[N, D, W]``; packed batches have B = 1 and
    ``cu_seqlens`` ``[N + 1]``, dense ones N = B. Floating dtypes; computed in fp32 (fp64 for fp64). Returns
    ``(y, final_state)`` in x's dtype, the state None unless ``output_final_state``. Rows of ``y`` and of every
    gradient beyond the live total ``cu_seqlens[-1]`` are exactly zero, and what such rows hold changes nothing.

    ``use_graph=True`` promises that T, N and the tables are a bucket's, fixed from call to call; ``chunk_indices``
    and ``chunk_offsets`` are the bucket's tables for ``chunk_size``, built where they are needed when omitted. Only
    ``backend='triton'``, the default, is served: this project's own kernels, or on a CPU their reference. First-order
    gradients; a ``cu_seqlens`` written to before the backward is refused there. ``provider`` names whose kernels serve
    the call instead; see :mod:`graphsafe_kernels.providers`.

    Raises :class:`graphsafe.errors.ArgumentError` (GS108) for wrong operands, GS106 for what is not supported,
    GS303 for tables that do not agree, GS302 from the backward for changed boundaries.
    """
    _refuse_unsupported(weight, backend, cu_seqlens_cpu, cp_context, kwargs)
    assert weight is not None
    if activation not in _ACTIVATIONS:
        raise error("argument", f"activation is {activation!r}; 'silu', 'swish' (the same) or None is needed")
    if type(chunk_size) is not int or chunk_size < 1:
        raise error("argument", f"chunk_size is {chunk_size!r}; a whole number of tokens, at least 1, is needed")
    if max_num_seqs is not None and type(max_num_seqs) is not int:
        raise error("argument", f"max_num_seqs is {max_num_seqs!r}; a whole number of sequences is needed")
    check_operands(x, weight, bias, residual, initial_state, cu_seqlens, chunk_indices, chunk_offsets, max_num_seqs,
                   chunk_size)

    tables = None
    if chunk_indices is not None and chunk_offsets is not None and cu_seqlens is not None:
        tables = ChunkTables(cu_seqlens, chunk_indices, chunk_offsets, chunk_size)
    flat = x if x.dim() == 3 else x.flatten(2)
    flat_residual = residual if residual is None or residual.dim() == 3 else residual.flatten(2)
    y, final_state = resolve("causal_conv1d", x.device)(
        flat, weight, bias, flat_residual, initial_state, output_final_state=bool(output_final_state),
        activate=activation is not None, cu_seqlens=cu_seqlens, tables=tables, chunk_size=chunk_size,
        use_graph=use_graph,
    )
    return y if flat is x else y.reshape(x.shape), final_state


def check_operands(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None,
                   initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None,
                   chunk_indices: torch.Tensor | None, chunk_offsets: torch.Tensor | None, max_num_seqs: int | None,
                   chunk_size: int) -> None:
    """What is wrong with the shapes, dtypes, devices or layouts of a call is refused; each set of them is seen once."""
    operands = (x, weight, bias, residual, initial_state, cu_seqlens, chunk_indices, chunk_offsets)
    signature = (_signature(operands), max_num_seqs, chunk_size)
    if signature not in _checked:
        _check(*operands, max_num_seqs, chunk_size)
        if len(_checked) >= _MOST_CHECKED:
            _checked.clear()
        if signature[0] is not None:
            _checked.add(signature)


def _signature(operands: tuple[torch.Tensor | None, ...]) -> tuple[object, ...] | None:
    """All that the checks look at; None where an operand is no dense tensor, which is never among the checked."""
    try:
        return tuple([None if t is None else (t.shape, t.dtype, t.device, t.is_contiguous()) for t in operands])
    except (AttributeError, RuntimeError):
        return None


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None,
           initial_state: torch.Tensor | None, cu_seqlens: torch.Tensor | None, chunk_indices: torch.Tensor | None,
           chunk_offsets: torch.Tensor | None, max_num_seqs: int | None, chunk_size: int) -> None:
    check_tensor("x", x, dtypes=_DTYPES)
    check_tensor("weight", weight, shape=(None, None), dtypes=_DTYPES, device=x.device)
    width, taps = weight.shape
    if x.dim() < 3 or x.shape[2:].numel() != width:
        raise error("argument", f"x has shape {list(x.shape)}; [B, T, D] with D = {width}, the channels of weight, is "
                    "needed")
    if width == 0 or taps == 0:
        raise error("argument", f"weight has shape {list(weight.shape)}; at least one channel and one tap are needed")
    if bias is not None:
        check_tensor("bias", bias, shape=(width,), dtypes=_DTYPES, device=x.device)
    if residual is not None:
        check_tensor("residual", residual, shape=tuple(x.shape), dtypes=_DTYPES, device=x.device)

    batch, tokens = int(x.shape[0]), int(x.shape[1])
    if cu_seqlens is not None:
        sequences = check_cu_seqlens(cu_seqlens, batch=batch, device=x.device, max_num_seqs=max_num_seqs)
        if chunk_indices is not None or chunk_offsets is not None:
            resolve_tables(cu_seqlens, tokens=tokens, chunk_size=chunk_size, chunk_indices=chunk_indices,
                           chunk_offsets=chunk_offsets)
    else:
        sequences = batch
        if max_num_seqs is not None and max_num_seqs != batch:
            raise error("tables", f"max_num_seqs is {max_num_seqs} but a dense batch of {batch} has {batch} sequences")
        for name, table in (("chunk_indices", chunk_indices), ("chunk_offsets", chunk_offsets)):
            if table is not None:
                raise error("tables", f"{name} was passed without cu_seqlens; a dense batch takes no tables")
    if initial_state is not None:
        check_tensor("initial_state", initial_state, shape=(sequences, width, taps), dtypes=_DTYPES, device=x.device)


def _refuse_unsupported(weight: object, backend: str | None, cu_seqlens_cpu: object, cp_context: object,
                        kwargs: dict[str, Any]) -> None:
    if weight is None:
        raise error("unsupported", "causal_conv1d was called without weight", why="A convolution needs its taps.",
                    remedy="Pass weight [D, W].")
    if backend not in (None, "triton"):
        raise error("unsupported", f"causal_conv1d(backend={backend!r}) is not served",
                    why="There is one set of kernels; other libraries' have neither fixed-capacity tables nor zero "
                        "padding.",
                    remedy="Leave backend out: the operands' device chooses the implementation.")
    if cu_seqlens_cpu is not None:
        raise error("unsupported", "causal_conv1d(cu_seqlens_cpu=...) is not served",
                    why="Tables are built on the device from cu_seqlens alone, so a host copy would go unread.",
                    remedy="Leave cu_seqlens_cpu out: nothing here reads cu_seqlens on the host.")
    if cp_context is not None:
        raise error("unsupported", "causal_conv1d(cp_context=...) is not served",
                    why="Context parallelism exchanges boundaries between ranks, which this operator does not do.",
                    remedy="Keep each sequence on one rank.")
    if kwargs:
        raise error("unsupported", f"causal_conv1d does not know {', '.join(sorted(kwargs))}",
                    remedy="Leave it out; sequence boundaries are described by cu_seqlens alone.")
