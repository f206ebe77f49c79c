"""KimiDeltaAttention: the gated delta rule with one decay per key channel, as a layer.

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

from graphsafe_kernels.kda import chunk_kda, fused_recurrent_kda
from graphsafe_kernels.layers.delta_layer import DeltaLayer, inverse_softplus_steps, without_weight_decay
from graphsafe_kernels.norm import FusedRMSNormGated

__all__ = ["KimiDeltaAttention"]


class KimiDeltaAttention(DeltaLayer):
    """Kimi Delta Attention (https://arxiv.org/abs/2510.26692); see :meth:`DeltaLayer.forward` for the call.

    ``hidden_size``: width of input and output. ``num_heads`` query/key heads of ``head_dim``; ``num_v_heads`` (a
    multiple, the same when None) value heads of ``head_dim * expand_v``. ``mode``: 'chunk' or 'fused_recurrent', the
    operator of inference over more than 64 tokens. ``use_short_conv``: a convolution of ``conv_size`` taps, with a bias
    if ``conv_bias``, after each of the q, k and v projections. ``allow_neg_eigval``: beta in (0, 2) in place of (0, 1).
    ``lower_bound``: bounds the log gate from below and selects the bounded formula; ``safe_gate``: permits the fast
    path for gates in [-5, 0), and needs such a bound. ``layer_idx``: this layer's place in a cache. ``norm_eps``: the
    norm's epsilon.

    Raises :class:`graphsafe.errors.ArgumentError` (GS108) for wrong values and GS106 for unknown arguments.
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        **kwargs: Any,
    ) -> None:
        super().__init__(hidden_size=hidden_size, expand_v=expand_v, head_dim=head_dim, num_heads=num_heads,
                         num_v_heads=num_v_heads, mode=mode, use_short_conv=use_short_conv,
                         allow_neg_eigval=allow_neg_eigval, conv_size=conv_size, conv_bias=conv_bias,
                         layer_idx=layer_idx, unknown=kwargs)
        self.safe_gate = safe_gate
        self.lower_bound = lower_bound
        self.gate_dim = self.num_v_heads * self.head_k_dim
        # in this order a seed gives the initial values that it gives in flash-linear-attention
        widths = {"q_proj": self.key_dim, "k_proj": self.key_dim, "v_proj": self.value_dim}
        linear = {name: nn.Linear(hidden_size, width, bias=False) for name, width in widths.items()}
        convolutions = self._convolutions()
        linear["f_proj.0"] = nn.Linear(hidden_size, self.head_v_dim, bias=False)
        self.f_up = nn.Linear(self.head_v_dim, self.gate_dim, bias=False)
        linear["b_proj"] = nn.Linear(hidden_size, self.num_v_heads, bias=False)
        decay = torch.ones(self.num_v_heads, dtype=torch.float32)
        self.A_log = without_weight_decay(torch.log(decay if safe_gate else decay.uniform_(1, 16)))
        self.dt_bias = without_weight_decay(inverse_softplus_steps(self.gate_dim))
        linear["g_proj.0"] = nn.Linear(hidden_size, self.head_v_dim, bias=False)
        self.g_up = nn.Linear(self.head_v_dim, self.value_dim, bias=True)
        self.o_norm = FusedRMSNormGated(self.head_v_dim, norm_eps, "sigmoid")
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)
        # b last: the others' rows start where a vector load may
        order = (*widths, "f_proj.0", "g_proj.0", "b_proj")
        self._fuse({name: linear[name] for name in order}, convolutions,
                   {"f_up.weight": "f_proj.1.weight", "g_up.weight": "g_proj.1.weight", "g_up.bias": "g_proj.1.bias"})

    def _delta_rule(self, gates: list[torch.Tensor], chunked: bool,
                    arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        f, _, b = gates
        g = self.f_up(f).unflatten(-1, (-1, self.head_k_dim))
        if chunked:
            return chunk_kda(g=g, beta=b, lower_bound=self.lower_bound, safe_gate=self.safe_gate, **arguments)
        return fused_recurrent_kda(g=g, beta=b, lower_bound=self.lower_bound, **arguments)

    def _normalise(self, o: torch.Tensor, gates: list[torch.Tensor], cu_seqlens: torch.Tensor | None) -> torch.Tensor:
        # as a matrix: torch adds the bias in the product itself only to rows without a batch dimension
        gate = self.g_up(gates[1].flatten(0, 1))
        normed: torch.Tensor = self.o_norm(o, gate.view(o.shape), cu_seqlens=cu_seqlens)
        return normed
