"""What the public operators of both delta rules share: their options, and the checks of their arguments.

Requirements
------------
1. Every check looks at shape, dtype, device, layout and Python values alone, before any launch and without a host read.
2. An option that would have no effect is refused, so that none is accepted and ignored.
3. The implementations (reference, Triton) receive operands and options that have passed these checks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from graphsafe.contract import check_cu_seqlens, check_tensor, resolve_tables
from graphsafe.errors import error
from graphsafe.metadata import ChunkTables
from graphsafe_kernels.backend import resolve

__all__ = [
    "MAX_KEY_WIDTH", "OPERAND_DTYPES", "DeltaRuleOptions", "check_gate_parameters", "check_layout", "check_operands",
    "check_unsupported", "make_options", "refuse_graph", "state_dtype", "tables_for",
]

MAX_KEY_WIDTH = 256
OPERAND_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class DeltaRuleOptions:
    """The checked options of a call; all are Python values, so they may be compile-time constants of a kernel.

    ``beta_scale`` is None where beta is given, else the c of ``beta = c * sigmoid(x)``. The other fields carry the
    operators' argument names or a shortening of them.
    """

    scale: float
    chunk_size: int = 64
    output_final_state: bool = False
    qk_l2norm: bool = False
    gate_in_kernel: bool = False
    lower_bound: float | None = None
    beta_scale: float | None = None
    state_v_first: bool = False
    safe_gate: bool = False
    disable_recompute: bool = False
    return_intermediate_states: bool = False
    use_graph: bool = False


def state_dtype(operand: torch.dtype) -> torch.dtype:
    """The dtype of states, and of the reference's arithmetic: fp64 for fp64 operands, else fp32."""
    return torch.float64 if operand == torch.float64 else torch.float32


def check_operands(q: Any, k: Any, v: Any, gates: dict[str, tuple[Any, tuple[str, ...]]]) -> tuple[int, ...]:
    """Check the token operands of a delta rule; return (B, T, H, HV, K, V).

    ``q`` and ``k`` are ``[B, T, H, K]``, ``v`` is ``[B, T, HV, V]``, all of one dtype; ``gates`` maps the name of each
    further operand to it and to its trailing dimensions, of "HV", "K" and "V".
    """
    check_tensor("q", q, shape=(None,) * 4, dtypes=OPERAND_DTYPES)
    check_tensor("k", k, shape=tuple(q.shape), dtypes=(q.dtype,), device=q.device)
    batch, tokens, heads, key_width = q.shape
    check_tensor("v", v, shape=(batch, tokens, None, None), dtypes=(q.dtype,), device=q.device)
    value_heads, value_width = v.shape[2:]
    if not (batch and heads and value_heads and key_width and value_width):
        raise error("argument", f"q is {list(q.shape)} and v is {list(v.shape)}: only the number of tokens may be 0")
    if value_heads % heads:
        raise error("argument", f"v has {value_heads} heads and q has {heads}; a multiple of q's heads is needed")
    if key_width > MAX_KEY_WIDTH:
        raise error("argument", f"q is {key_width} wide; at most {MAX_KEY_WIDTH} is supported")
    sizes = {"HV": value_heads, "K": key_width, "V": value_width}
    for name, (tensor, trailing) in gates.items():
        shape = (batch, tokens, *(sizes[d] for d in trailing))
        check_tensor(name, tensor, shape=shape, dtypes=OPERAND_DTYPES, device=q.device)
    return batch, tokens, heads, value_heads, key_width, value_width


def check_gate_parameters(q: torch.Tensor, *, gate_in_kernel: bool, A_log: Any, dt_bias: Any, value_heads: int,
                          bias_size: int, lower_bound: float | None) -> None:
    """Check ``A_log`` ``[HV]``, ``dt_bias`` and ``lower_bound`` against ``use_gate_in_kernel``."""
    if not gate_in_kernel:
        for name, value in (("A_log", A_log), ("dt_bias", dt_bias), ("lower_bound", lower_bound)):
            if value is not None:
                raise error("argument", f"{name} was passed with use_gate_in_kernel=False, where it has no effect",
                            remedy=f"Pass use_gate_in_kernel=True and the gate's input as g, or leave {name} out.")
        return
    if A_log is not None:
        check_tensor("A_log", A_log, shape=(value_heads,), dtypes=OPERAND_DTYPES, device=q.device)
    if dt_bias is not None:
        check_tensor("dt_bias", dt_bias, shape=(bias_size,), dtypes=OPERAND_DTYPES, device=q.device)
    if lower_bound is not None and not (_is_number(lower_bound) and -math.inf < lower_bound < 0):
        raise error("argument", f"lower_bound is {lower_bound!r}; a finite number below 0 is needed")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def make_options(*, scale: Any, key_width: int, use_beta_sigmoid: bool, allow_neg_eigval: bool, chunk_size: Any = 64,
                 chunk_sizes: tuple[int, ...] = (64,), **options: Any) -> DeltaRuleOptions:
    """Check the scalar options and make the record that implementations take."""
    if scale is None:
        scale = key_width**-0.5
    elif not (_is_number(scale) and math.isfinite(scale)):
        raise error("argument", f"scale is {scale!r}; a finite Python number is needed")
    if chunk_size not in chunk_sizes:
        raise error("argument", f"chunk_size is {chunk_size!r}; one of {', '.join(map(str, chunk_sizes))} is needed")
    if allow_neg_eigval and not use_beta_sigmoid:
        raise error("argument", "allow_neg_eigval=True was passed with use_beta_sigmoid_in_kernel=False",
                    why="It doubles the sigmoid that the operator applies to beta; a given beta is taken as it is.",
                    remedy="Pass use_beta_sigmoid_in_kernel=True and beta before the sigmoid.")
    beta_scale = (2.0 if allow_neg_eigval else 1.0) if use_beta_sigmoid else None
    return DeltaRuleOptions(scale=float(scale), chunk_size=chunk_size, beta_scale=beta_scale, **options)


def check_unsupported(*, cu_seqlens_cpu: Any, cp_context: Any) -> None:
    """Refuse the arguments of the same name elsewhere that nothing here would use."""
    if cu_seqlens_cpu is not None:
        raise error("unsupported", "cu_seqlens_cpu was passed; it is not supported",
                    why="Tables are built on the device from cu_seqlens alone, so a host copy would go unread.",
                    remedy="Leave cu_seqlens_cpu out: nothing here reads cu_seqlens on the host.")
    if cp_context is not None:
        raise error("unsupported", "cp_context was passed; context parallelism is not supported",
                    why="Each call computes its own sequences from their first token to their last.",
                    remedy="Keep each sequence on one rank, or pass states by initial_state and final_state.")


def refuse_graph(operator: str, use_graph: bool, instead: str) -> None:
    """Refuse ``use_graph=True`` for a token-by-token operator."""
    if use_graph:
        raise error("unsupported", f"{operator} was called with use_graph=True",
                    why="Its work grows with the longest sequence, which is data; decoding is outside the graph "
                        "contract.",
                    remedy=f"Use {instead} in graph mode, or call {operator} with use_graph=False.")


def check_layout(q: torch.Tensor, *, cu_seqlens: Any, max_num_seqs: Any, initial_state: Any,
                 state_shape: tuple[int, int, int], state_v_first: bool) -> None:
    """Check the boundaries and the initial state; ``state_shape`` is (HV, K, V).

    A dense batch has N = B sequences of T tokens.
    """
    batch = q.shape[0]
    if cu_seqlens is not None:
        sequences = check_cu_seqlens(cu_seqlens, batch=batch, device=q.device, max_num_seqs=max_num_seqs)
    else:
        sequences = batch
        if max_num_seqs is not None and max_num_seqs != batch:
            raise error("tables", f"max_num_seqs is {max_num_seqs} but a dense batch of {batch} has {batch} sequences")
    if initial_state is not None:
        heads, key_width, width = state_shape
        shape = (sequences, heads, *((width, key_width) if state_v_first else (key_width, width)))
        check_tensor("initial_state", initial_state, shape=shape, dtypes=(state_dtype(q.dtype),), device=q.device)


def tables_for(q: torch.Tensor, *, cu_seqlens: torch.Tensor | None, chunk_size: int,
               chunk_indices: torch.Tensor | None, chunk_offsets: torch.Tensor | None) -> ChunkTables | None:
    """The tables of a packed batch: the caller's, checked, or built here on the device. None for a dense batch."""
    if cu_seqlens is None:
        for name, table in (("chunk_indices", chunk_indices), ("chunk_offsets", chunk_offsets)):
            if table is not None:
                raise error("tables", f"{name} was passed without cu_seqlens; a dense batch takes no tables")
        return None
    tokens = q.shape[1]
    if chunk_indices is None and chunk_offsets is None:
        tables: ChunkTables = resolve("build_tables", q.device)(cu_seqlens, tokens, chunk_size)
        return tables
    return resolve_tables(cu_seqlens, tokens=tokens, chunk_size=chunk_size, chunk_indices=chunk_indices,
                          chunk_offsets=chunk_offsets)
