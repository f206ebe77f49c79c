"""The graph contract as code: what an operator checks before any launch, without reading the device.

Requirements
------------
1. Every check looks at shape, dtype, device, layout and object identity alone; none reads data.
2. A failed check raises a typed error that names the argument, what was passed and what is needed.
3. Operators and adapters use these functions; none repeats them.
"""

from __future__ import annotations

import torch

from graphsafe.bucket import slot_count
from graphsafe.errors import error
from graphsafe.metadata import SENTINEL, ChunkTables, build_tables

__all__ = ["SENTINEL", "check_cu_seqlens", "check_tensor", "resolve_tables"]

_INDEX_DTYPES = (torch.int32, torch.int64)


def describe(t: object) -> str:
    """``float32[1, 64, 4] on cpu`` for a tensor, the type's name otherwise."""
    if isinstance(t, torch.Tensor):
        return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)} on {t.device}"
    return type(t).__name__


def check_tensor(
    name: str,
    t: object,
    *,
    shape: tuple[int | None, ...] | None = None,
    dtypes: tuple[torch.dtype, ...] | None = None,
    device: torch.device | None = None,
    contiguous: bool = False,
    rule: str = "argument",
) -> None:
    """Check one tensor argument; None in ``shape`` admits any size. Raises the error of ``rule``."""
    if not isinstance(t, torch.Tensor):
        raise error(rule, f"{name} is {describe(t)}; a tensor is needed")
    if t.layout is not torch.strided:
        layout = str(t.layout).removeprefix("torch.")
        raise error(rule, f"{name} is a tensor of layout {layout}; a strided one is needed")
    if shape is not None and (
        t.dim() != len(shape) or any(w is not None and w != s for s, w in zip(t.shape, shape, strict=True))
    ):
        want = "[" + ", ".join("*" if w is None else str(w) for w in shape) + "]"
        raise error(rule, f"{name} is {describe(t)}; shape {want} is needed")
    if dtypes is not None and t.dtype not in dtypes:
        want = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise error(rule, f"{name} is {describe(t)}; dtype {want} is needed")
    if device is not None and t.device != device:
        raise error(rule, f"{name} is {describe(t)}; device {device} is needed")
    if contiguous and not t.is_contiguous():
        raise error(rule, f"{name} is {describe(t)} with strides {t.stride()}; a contiguous tensor is needed")


def check_cu_seqlens(cu_seqlens: object, *, batch: int, device: torch.device, max_num_seqs: int | None = None) -> int:
    """Check a packed batch's boundaries; return N. ``batch`` is the leading size of the operands (must be 1)."""
    check_tensor("cu_seqlens", cu_seqlens, shape=(None,), dtypes=_INDEX_DTYPES, device=device, contiguous=True)
    assert isinstance(cu_seqlens, torch.Tensor)
    n = int(cu_seqlens.shape[0]) - 1
    if n < 1:
        raise error("argument", f"cu_seqlens is {describe(cu_seqlens)}; at least two entries are needed")
    if batch != 1:
        raise error(
            "argument",
            f"cu_seqlens was passed with a batch of {batch}; a packed batch has leading size 1",
            remedy="Flatten the batch to [1, B * T, ...] and describe it with cu_seqlens.",
        )
    if max_num_seqs is not None and max_num_seqs != n:
        raise error("tables", f"max_num_seqs is {max_num_seqs} but cu_seqlens has room for {n} sequences")
    return n


def resolve_tables(
    cu_seqlens: torch.Tensor,
    *,
    tokens: int,
    chunk_size: int,
    chunk_indices: torch.Tensor | None,
    chunk_offsets: torch.Tensor | None,
) -> ChunkTables:
    """The caller's tables, checked against ``cu_seqlens`` and the capacity, or tables built here on the device."""
    if chunk_indices is None and chunk_offsets is None:
        return build_tables(cu_seqlens, tokens, chunk_size)
    if chunk_indices is None or chunk_offsets is None:
        missing = "chunk_indices" if chunk_indices is None else "chunk_offsets"
        raise error("tables", f"{missing} is missing: chunk_indices and chunk_offsets come together")
    n = int(cu_seqlens.shape[0]) - 1
    slots = slot_count(tokens, n, chunk_size)
    dtypes, device = (cu_seqlens.dtype,), cu_seqlens.device
    check_tensor(
        "chunk_indices", chunk_indices, shape=(slots, 2), dtypes=dtypes, device=device, contiguous=True, rule="tables"
    )
    check_tensor(
        "chunk_offsets", chunk_offsets, shape=(n + 1,), dtypes=dtypes, device=device, contiguous=True, rule="tables"
    )
    return ChunkTables(cu_seqlens, chunk_indices, chunk_offsets, chunk_size)
