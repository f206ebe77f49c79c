"""The linear-attention layers of ``transformers``: their parameters, in the flow of this project's layers.

Requirements
------------
1. Parameters stay where they are and keep their names; a state dict is the model's own.
2. A layer is known by its class's name. Its projections are told here; convolution, delta rule, gated norm and what
   keeps padding out are the same for all.
3. What needs the model's own code (a cache, a mask) runs it unchanged, outside graphs; a packed batch with either is
   refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from graphsafe.errors import error
from graphsafe_kernels.gdn import chunk_gated_delta_rule
from graphsafe_kernels.integrations.packing import Packed
from graphsafe_kernels.kda import chunk_kda
from graphsafe_kernels.layers.batch import Batch
from graphsafe_kernels.layers.convolve import convolve
from graphsafe_kernels.norm import rms_norm_gated

__all__ = ["MIXERS", "adapt_mixer"]


@dataclass(frozen=True)
class Projected:
    """What a layer's projections give: ``qkv`` ``[B, T, 2 key + value]``, ``gate`` (the delta rule's, before its
    formula), ``beta`` before the sigmoid ``[B, T, HV]``, ``z`` ``[B, T, HV, V]``."""

    qkv: torch.Tensor
    gate: torch.Tensor
    beta: torch.Tensor
    z: torch.Tensor


@dataclass(frozen=True)
class Mixer:
    """One class of layers. ``widths``: of q, k, v, and of a key and a value head; the rest name a layer's parts."""

    project: Callable[[Any, torch.Tensor], Projected]
    widths: Callable[[Any], tuple[int, int, int, int, int]]
    operator: Callable[..., Any]
    gate: Callable[[Any], tuple[torch.Tensor, torch.Tensor]]
    norm: str
    output: str
    activation: str = "swish"
    neg_eigval: Callable[[Any], bool] = lambda layer: False


def _grouped(layer: Any, x: torch.Tensor) -> Projected:
    """Qwen3-Next: one projection in groups of a key head with its value heads, (q, k, v, z) and (b, a) in each."""
    shared = layer.num_v_heads // layer.num_k_heads
    sizes = [layer.head_k_dim, layer.head_k_dim, shared * layer.head_v_dim, shared * layer.head_v_dim]
    q, k, v, z = layer.in_proj_qkvz(x).unflatten(-1, (layer.num_k_heads, -1)).split(sizes, -1)
    b, a = layer.in_proj_ba(x).unflatten(-1, (layer.num_k_heads, -1)).split([shared, shared], -1)
    qkv = torch.cat([t.flatten(-2) for t in (q, k, v)], -1)
    return Projected(qkv, a.flatten(-2), b.flatten(-2), z.flatten(-2).unflatten(-1, (-1, layer.head_v_dim)))


def _separate_gates(layer: Any, x: torch.Tensor) -> Projected:
    """Qwen3.5: q, k and v in one projection."""
    z = layer.in_proj_z(x).unflatten(-1, (-1, layer.head_v_dim))
    return Projected(layer.in_proj_qkv(x), layer.in_proj_a(x), layer.in_proj_b(x), z)


def _olmo(layer: Any, x: torch.Tensor) -> Projected:
    """OLMo Hybrid: everything apart."""
    qkv = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], -1)
    z = layer.g_proj(x).unflatten(-1, (-1, layer.head_v_dim))
    return Projected(qkv, layer.a_proj(x), layer.b_proj(x), z)


def _kimi(layer: Any, x: torch.Tensor) -> Projected:
    """Kimi Linear: everything apart, the gates through a narrow layer."""
    qkv = torch.cat([layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)], -1)
    f = layer.forget_gate.f_b_proj(layer.forget_gate.f_a_proj(x)).unflatten(-1, (-1, layer.head_dim))
    z = layer.g_b_proj(layer.g_a_proj(x)).unflatten(-1, (-1, layer.head_dim))
    return Projected(qkv, f, layer.b_proj(x), z)


def _gdn_widths(layer: Any) -> tuple[int, int, int, int, int]:
    return layer.key_dim, layer.key_dim, layer.value_dim, layer.head_k_dim, layer.head_v_dim


def _kimi_widths(layer: Any) -> tuple[int, int, int, int, int]:
    return layer.qkv_dim, layer.qkv_dim, layer.qkv_dim, layer.head_dim, layer.head_dim


def _gate(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.A_log, layer.dt_bias


def _kimi_gate(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return layer.forget_gate.A_log.flatten(), layer.forget_gate.dt_bias


_QWEN35 = Mixer(_separate_gates, _gdn_widths, chunk_gated_delta_rule, _gate, "norm", "out_proj")

MIXERS: dict[str, Mixer] = {
    "KimiLinearDeltaAttention": Mixer(_kimi, _kimi_widths, chunk_kda, _kimi_gate, "o_norm", "o_proj", "sigmoid"),
    "LaraMiniGatedDeltaNet": _QWEN35,
    "OlmoHybridGatedDeltaNet": Mixer(_olmo, _gdn_widths, chunk_gated_delta_rule, _gate, "o_norm", "o_proj",
                                     neg_eigval=lambda layer: bool(layer.allow_neg_eigval)),
    "Qwen3NextGatedDeltaNet": Mixer(_grouped, _gdn_widths, chunk_gated_delta_rule, _gate, "norm", "out_proj"),
    "Qwen3_5GatedDeltaNet": _QWEN35,
    "Qwen3_5MoeGatedDeltaNet": _QWEN35,
}
"""Class of a layer -> how it is read."""


def _run(mixer: Mixer, layer: Any, hidden_states: torch.Tensor, packed: Packed | None) -> torch.Tensor:
    batch = Batch.of(hidden_states, None, None, None if packed is None else packed.tables,
                     packed is not None and packed.use_graph, chunked=True)
    p = mixer.project(layer, batch.enter(hidden_states))
    layout = batch.operator_arguments()
    *widths, key_width, value_width = mixer.widths(layer)
    y = convolve(p.qkv, tuple(widths), layer.conv1d.weight.squeeze(1), layer.conv1d.bias, layout=layout)
    A_log, dt_bias = mixer.gate(layer)
    o, _ = mixer.operator(
        q=y.q.unflatten(-1, (-1, key_width)), k=y.k.unflatten(-1, (-1, key_width)),
        v=y.v.unflatten(-1, (-1, value_width)), g=p.gate, beta=p.beta, use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=mixer.neg_eigval(layer), A_log=A_log,
        dt_bias=dt_bias, **layout,
    )
    norm = getattr(layer, mixer.norm)
    o = rms_norm_gated(o, p.z, norm.weight, activation=mixer.activation, eps=norm.variance_epsilon,
                       cu_seqlens=batch.cu_seqlens)
    output: torch.Tensor = batch.leave(getattr(layer, mixer.output)(o.flatten(-2)))
    return output


_OWN_CODE = ("attention_mask", "cache", "cache_params", "past_key_values")
"""Arguments, by any of their names so far, that a layer's own code serves."""


def _forward(self: Any, hidden_states: torch.Tensor, *arguments: Any, **kwargs: Any) -> Any:
    """What replaces the layer's ``forward``."""
    packed = kwargs.pop("graphsafe", None)
    given = [name for name in _OWN_CODE if kwargs.get(name) is not None]
    if not given and not arguments:
        return _run(MIXERS[type(self).__name__], self, hidden_states, packed)
    if packed is not None:
        raise error("unsupported", f"{type(self).__name__} got a packed batch together with "
                    f"{', '.join(given) or 'positional arguments'}",
                    why="Masks and caches are read and updated by Python, which a replay does not run.",
                    remedy="Leave past_key_values, use_cache and attention_mask out where cu_seqlens is given.")
    return type(self).forward(self, hidden_states, *arguments, **kwargs)


def adapt_mixer(layer: nn.Module) -> None:
    """Replace the ``forward`` of a layer whose class is in ``MIXERS``."""
    activation = getattr(layer, "activation", "silu")
    if activation not in ("silu", "swish"):
        raise error("unsupported", f"{type(layer).__name__} convolves with activation {activation!r}",
                    why="The convolution's kernels know SiLU.", remedy="Use a configuration with hidden_act='silu'.")
    layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]
