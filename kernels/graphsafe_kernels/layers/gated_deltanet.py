"""GatedDeltaNet: the gated delta rule with one decay per head, as a layer.

Requirements
------------
1. Constructor arguments (order, names, defaults), state-dict keys and shapes, and initial values are those of
   flash-linear-attention 0.6.0, so that its checkpoints load. What is not supported is refused by name.
2. The flow and the initial values are those of section 4 of the mathematics.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from graphsafe_kernels.gdn import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from graphsafe_kernels.layers.delta_layer import DeltaLayer, inverse_softplus_steps, without_weight_decay
from graphsafe_kernels.norm import FusedRMSNormGated, RMSNorm

__all__ = ["GatedDeltaNet"]


class GatedDeltaNet(DeltaLayer):
    """Gated DeltaNet (https://arxiv.org/abs/2412.06464); see :meth:`DeltaLayer.forward` for the call.

    ``hidden_size``: width of input and output. ``num_heads`` query/key heads of ``head_dim``; ``num_v_heads`` (a
    multiple, the same when None) value heads of ``head_dim * expand_v``. ``mode``: 'chunk' or 'fused_recurrent', the
    operator of inference over more than 64 tokens. ``use_gate``: gate the output norm, by ``output_gate_activation``
    'swish', 'silu' (the same) or 'sigmoid'. ``use_short_conv``: a convolution of ``conv_size`` taps, with a bias if
    ``conv_bias``, after each of the q, k and v projections. ``allow_neg_eigval``: beta in (0, 2) in place of (0, 1).
    ``layer_idx``: this layer's place in a cache. ``norm_eps``: the norm's epsilon.

    Raises :class:`graphsafe.errors.ArgumentError` (GS108) for wrong values and GS106 for unknown arguments.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_gate: bool = True,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        output_gate_activation: str = "swish",
        **kwargs: Any,
    ) -> None:
        super().__init__(hidden_size=hidden_size, expand_v=expand_v, head_dim=head_dim, num_heads=num_heads,
                         num_v_heads=num_v_heads, mode=mode, use_short_conv=use_short_conv,
                         allow_neg_eigval=allow_neg_eigval, conv_size=conv_size, conv_bias=conv_bias,
                         layer_idx=layer_idx, unknown=kwargs)
        self.use_gate = use_gate
        # in this order a seed gives the initial values that it gives in flash-linear-attention
        widths = {"q_proj": self.key_dim, "k_proj": self.key_dim, "v_proj": self.value_dim, "a_proj": self.num_v_heads,
                  "b_proj": self.num_v_heads}
        linear = {name: nn.Linear(hidden_size, width, bias=False) for name, width in widths.items()}
        decay = torch.empty(self.num_v_heads, dtype=torch.float32).uniform_(0, 16)
        self.A_log = without_weight_decay(torch.log(decay))
        self.dt_bias = without_weight_decay(inverse_softplus_steps(self.num_v_heads))
        convolutions = self._convolutions()
        if use_gate:
            linear["g_proj"] = nn.Linear(hidden_size, self.value_dim, bias=False)
            self.o_norm: nn.Module = FusedRMSNormGated(self.head_v_dim, norm_eps, output_gate_activation)
        else:
            self.o_norm = RMSNorm(self.head_v_dim, norm_eps)
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)
        # the wide ones first: their rows start where a vector load may
        order = ("q_proj", "k_proj", "v_proj", *(["g_proj"] if use_gate else []), "a_proj", "b_proj")
        self._fuse({name: linear[name] for name in order}, convolutions, {})

    def _delta_rule(self, gates: list[torch.Tensor], chunked: bool,
                    arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        *_, a, b = gates
        if chunked:
            return chunk_gated_delta_rule(g=a, beta=b, **arguments)
        return fused_recurrent_gated_delta_rule(g=a, beta=b, **arguments)

    def _normalise(self, o: torch.Tensor, gates: list[torch.Tensor], cu_seqlens: torch.Tensor | None) -> torch.Tensor:
        if not self.use_gate:
            normed: torch.Tensor = self.o_norm(o, cu_seqlens=cu_seqlens)
        else:
            normed = self.o_norm(o, gates[0].unflatten(-1, (-1, self.head_v_dim)), cu_seqlens=cu_seqlens)
        return normed
