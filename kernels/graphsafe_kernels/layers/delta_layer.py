"""What both delta-rule layers share: heads, state, batch layout and the flow of a call.

Requirements
------------
1. Call and return as in flash-linear-attention 0.6.0, so that a model can switch by an import: ``forward`` returns the
   tuple ``(output, None, past_key_values)``.
2. In and out of a graph the same operators run on the same rows. Padding rows of the output and of every gradient are
   exactly zero, and what padding holds reaches no result.
3. One set of tables serves all operators of a layer, and all layers when the caller passes it.
4. States go in and out as values (``LayerState``), or through a cache object outside graphs.
5. One projection of the input, whose output is read where it lies; one convolution over q, k and v, which writes each
   as the delta rule takes it. In a state dict their parameters are separate, with the names of flash-linear-attention.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from graphsafe.errors import error
from graphsafe.metadata import ChunkTables
from graphsafe_kernels.layers.batch import Batch
from graphsafe_kernels.layers.convolve import Convolved, convolve
from graphsafe_kernels.layers.fused import ALIGNMENT, fuse_rows, save_fused_as
from graphsafe_kernels.layers.short_convolution import ShortConvolution
from graphsafe_kernels.layers.split import split
from graphsafe_kernels.layers.state import LayerState, read_state, write_state

__all__ = ["DeltaLayer", "inverse_softplus_steps", "without_weight_decay"]

_MODES = ("chunk", "fused_recurrent")
_SHORT = 64
"""Up to so many tokens inference runs token by token."""


def inverse_softplus_steps(size: int) -> torch.Tensor:
    """Initial ``dt_bias`` ``[size]``, fp32: softplus of it is log-uniform in [1e-3, 0.1], at least 1e-4."""
    steps = torch.exp(torch.rand(size, dtype=torch.float32) * (math.log(0.1) - math.log(0.001)) + math.log(0.001))
    steps = steps.clamp(min=1e-4)
    return steps + torch.log(-torch.expm1(-steps))


def without_weight_decay(values: torch.Tensor) -> nn.Parameter:
    """A parameter marked ``_no_weight_decay``, which optimizers' parameter grouping looks for."""
    parameter = nn.Parameter(values)
    parameter._no_weight_decay = True  # type: ignore[attr-defined]
    return parameter


class DeltaLayer(nn.Module, ABC):
    """Base of :class:`GatedDeltaNet` and :class:`KimiDeltaAttention`: everything but gates and operator.

    ``in_proj`` is every projection of the input as one, ``qkv_conv1d`` the three convolutions as one.
    """

    in_proj: nn.Linear
    o_proj: nn.Linear
    A_log: nn.Parameter
    dt_bias: nn.Parameter

    def __init__(self, *, hidden_size: int, expand_v: float, head_dim: int, num_heads: int, num_v_heads: int | None,
                 mode: str, use_short_conv: bool, allow_neg_eigval: bool, conv_size: int, conv_bias: bool,
                 layer_idx: int | None, unknown: dict[str, Any]) -> None:
        super().__init__()
        name = type(self).__name__
        if unknown:
            raise error("unsupported", f"{name} does not know {', '.join(sorted(unknown))}",
                        remedy="Leave it out; the documented arguments are all there are.")
        if mode not in _MODES:
            raise error("argument", f"{name}(mode={mode!r}); one of {', '.join(_MODES)} is needed")
        value_heads = num_heads if num_v_heads is None else num_v_heads
        if value_heads % num_heads:
            raise error("argument", f"{name}(num_heads={num_heads}, num_v_heads={num_v_heads}); a multiple of "
                        "num_heads is needed")
        head_v_dim = int(head_dim * expand_v)
        if not math.isclose(head_dim * expand_v, head_v_dim, rel_tol=1e-5):
            raise error("argument", f"{name}(head_dim={head_dim}, expand_v={expand_v}): a head's value width would be "
                        f"{head_dim * expand_v}; a whole number is needed")
        self.hidden_size = hidden_size
        self.expand_v = expand_v
        self.head_dim = head_dim
        self.num_heads = num_heads
        self.num_v_heads = value_heads
        self.head_k_dim = head_dim
        self.head_v_dim = head_v_dim
        self.key_dim = num_heads * head_dim
        self.value_dim = value_heads * head_v_dim
        self.mode = mode
        self.use_short_conv = use_short_conv
        self.allow_neg_eigval = allow_neg_eigval
        self.conv_size = conv_size
        self.conv_bias = conv_bias
        self.layer_idx = layer_idx

    def _convolutions(self) -> list[ShortConvolution]:
        """Of q, k and v, with their initial values; none without ``use_short_conv``."""
        widths = (self.key_dim, self.key_dim, self.value_dim) if self.use_short_conv else ()
        return [ShortConvolution(width, self.conv_size, bias=self.conv_bias) for width in widths]

    def _fuse(self, projections: dict[str, nn.Linear], convolutions: list[ShortConvolution],
              renamed: dict[str, str]) -> None:
        """Make ``in_proj`` and ``qkv_conv1d``; the first three projections are q, k and v.

        ``projections``: by their name in a state dict, in the order of their output; ``renamed``: further parameters,
        name here to name there.
        """
        self.widths = tuple(p.out_features for p in projections.values())
        # the delta rule takes its operands whole; everything else reads the projection where it lies
        self._copied = [name in ("a_proj", "b_proj") for name in list(projections)[3:]]
        weight = fuse_rows([p.weight for p in projections.values()], ALIGNMENT)
        self.in_proj = nn.Linear(self.hidden_size, weight.shape[0], bias=False, device="meta")
        self.in_proj.weight = weight
        names = {"in_proj.weight": [(f"{n}.weight", p.out_features) for n, p in projections.items()]}
        if convolutions:
            fused = ShortConvolution(2 * self.key_dim + self.value_dim, self.conv_size, self.conv_bias, device="meta")
            for name, _ in fused.named_parameters():
                setattr(fused, name, fuse_rows([getattr(c, name) for c in convolutions]))
                names[f"qkv_conv1d.{name}"] = [(f"{n}_conv1d.{name}", c.in_channels)
                                               for n, c in zip("qkv", convolutions, strict=True)]
            self.qkv_conv1d = fused
        for name, other in renamed.items():
            names[name] = [(other, self.get_parameter(name).shape[0])]
        save_fused_as(self, names)

    def zero_state(self, sequences: int) -> LayerState:
        """The state before the first token of ``sequences`` sequences: zeros on the parameters' device."""
        weight = self.o_proj.weight
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        recurrent = weight.new_zeros(sequences, self.num_v_heads, self.head_v_dim, self.head_k_dim, dtype=dtype)
        if not self.use_short_conv:
            return LayerState(recurrent, None)
        return LayerState(recurrent, weight.new_zeros(sequences, 2 * self.key_dim + self.value_dim, self.conv_size))

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None,
                past_key_values: Any = None, use_cache: bool | None = False, output_attentions: bool | None = False,
                *, cu_seqlens: torch.Tensor | None = None, tables: ChunkTables | None = None, use_graph: bool = False,
                **kwargs: Any) -> tuple[torch.Tensor, None, Any]:
        """Run the layer on a dense batch, a packed batch, or a batch padded under an attention mask.

        ``hidden_states``: ``[B, T, hidden_size]``. Packed: B = 1, ``cu_seqlens`` ``[N + 1]``; rows beyond its last
        entry are padding, and are zero in the output and in the gradient. ``tables``: the batch's
        :class:`graphsafe.ChunkTables`, built here when omitted; alone it brings ``cu_seqlens`` too.
        ``attention_mask``: ``[B, at least T]``, nonzero for tokens to keep; ignored when ``cu_seqlens`` is given.
        ``past_key_values``: a :class:`LayerState` (N sequences), a flash-linear-attention cache, or None for zeros.

        Returns ``(output, None, state)``, as that library does: ``output`` ``[B, T, hidden_size]``; the second place is
        for attention weights, which do not exist; ``state`` is the cache that was passed, or else the new
        :class:`LayerState` if ``use_cache``, else None. A cache is updated only if ``use_cache``.

        ``use_graph=True`` promises shapes that are fixed from call to call and serves it by the chunk operators;
        GS106 refuses what a graph cannot hold: a mask without ``cu_seqlens``, a cache object, ``mode=
        'fused_recurrent'`` and keywords the layer does not know, which outside graphs are ignored. Without autograd
        and in eval mode, up to 64 tokens are computed by the recurrent operator outside graphs.
        """
        if hidden_states.dim() != 3 or hidden_states.shape[2] != self.hidden_size:
            raise error("argument", f"hidden_states has shape {list(hidden_states.shape)}; [B, T, {self.hidden_size}] "
                        "is needed")
        if output_attentions:
            raise error("unsupported", "output_attentions=True", why="A delta-rule layer has no attention weights.",
                        remedy="Leave output_attentions out.")
        if use_graph and kwargs:
            raise error("unsupported", f"{type(self).__name__} does not know {', '.join(sorted(kwargs))}",
                        remedy="Leave it out of a call with use_graph=True.")
        tokens = int(hidden_states.shape[1])
        chunked = self._runs_in_chunks(tokens, use_graph)
        state = read_state(past_key_values, self.layer_idx, use_graph=use_graph)
        batch = Batch.of(hidden_states, attention_mask, cu_seqlens, tables, use_graph, chunked)
        x = batch.enter(hidden_states)
        y = self._convolve(x, state, batch, bool(use_cache))
        gates = y.others
        arguments: dict[str, Any] = {
            "q": y.q.unflatten(-1, (-1, self.head_k_dim)),
            "k": y.k.unflatten(-1, (-1, self.head_k_dim)),
            "v": y.v.unflatten(-1, (-1, self.head_v_dim)),
            "initial_state": None if state is None else state.recurrent_state,
            "output_final_state": bool(use_cache),
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": self.allow_neg_eigval,
            "state_v_first": True,
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            **(batch.operator_arguments() if chunked else {"cu_seqlens": batch.cu_seqlens}),
        }
        o, recurrent_state = self._delta_rule(gates, chunked, arguments)
        output = batch.leave(self.o_proj(self._normalise(o, gates, batch.cu_seqlens).flatten(-2)))
        new_state = None if recurrent_state is None else LayerState(recurrent_state, y.state)
        channels = (self.key_dim, self.key_dim, self.value_dim)
        return output, None, write_state(past_key_values, self.layer_idx, new_state, tokens, channels)

    def _runs_in_chunks(self, tokens: int, use_graph: bool) -> bool:
        if torch.is_grad_enabled():
            return True
        if self.mode == "chunk":
            return use_graph or self.training or tokens > _SHORT
        if use_graph or self.training:
            raise error("unsupported", f"{type(self).__name__}(mode='fused_recurrent') "
                        f"{'with use_graph=True' if use_graph else 'in training mode'}",
                        why="The recurrent operator takes no tables and serves inference alone.",
                        remedy="Construct the layer with mode='chunk'.")
        return False

    def _convolve(self, x: torch.Tensor, state: LayerState | None, batch: Batch,
                  output_final_state: bool) -> Convolved:
        """Project, convolve and activate; behind q, k and v come what the projection gave for the gates."""
        channels = (self.key_dim, self.key_dim, self.value_dim)
        projected = self.in_proj(x)
        if not self.use_short_conv:
            qkv, *gates = split(projected, [sum(channels), *self.widths[3:]], [False, *self._copied])
            q, k, v = split(F.silu(qkv), channels)
            return Convolved(q, k, v, gates, None)
        before = None if state is None else state.conv_state
        if state is not None and before is None:
            raise error("argument", "the state passed has no conv_state, but the layer has short convolutions",
                        remedy="Pass the state that this layer returned, or layer.zero_state(sequences).")
        return convolve(projected, channels, self.qkv_conv1d.weight.squeeze(1), self.qkv_conv1d.bias,
                        others=self.widths[3:], copied=self._copied, initial_state=before,
                        output_final_state=output_final_state, layout=batch.operator_arguments())

    @abstractmethod
    def _delta_rule(self, gates: list[torch.Tensor], chunked: bool,
                    arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """o ``[B, T, HV, V]`` and the final state ``[N, HV, V, K]`` or None."""

    @abstractmethod
    def _normalise(self, o: torch.Tensor, gates: list[torch.Tensor], cu_seqlens: torch.Tensor | None) -> torch.Tensor:
        """The norm over each head of o ``[B, T, HV, V]``, gated."""
