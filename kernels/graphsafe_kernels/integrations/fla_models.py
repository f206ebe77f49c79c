"""Models built from the layers of flash-linear-attention: each layer is replaced by this project's, values and all.

Requirements
------------
1. A layer is known by its class's name and module. The new one has its arguments, its parameters' values, dtype and
   device, and an equal state dict; what it does not support is refused by name before anything is changed.
2. A layer with full attention reads its longest sequence on the host, and is refused.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from graphsafe.errors import error
from graphsafe_kernels.layers import GatedDeltaNet, KimiDeltaAttention

__all__ = ["FLA_LAYERS", "replace_fla_layers"]

_COMMON = ("hidden_size", "expand_v", "head_dim", "num_heads", "num_v_heads", "mode", "use_short_conv",
           "allow_neg_eigval", "conv_size", "conv_bias", "layer_idx")
FLA_LAYERS: dict[str, tuple[type, tuple[str, ...]]] = {
    "fla.layers.GatedDeltaNet": (GatedDeltaNet, (*_COMMON, "use_gate")),
    "fla.layers.KimiDeltaAttention": (KimiDeltaAttention, (*_COMMON, "safe_gate", "lower_bound")),
}
"""Layer -> its replacement and the arguments that it keeps as attributes."""


def _name(module: nn.Module) -> str | None:
    package = type(module).__module__.split(".")
    return f"fla.layers.{type(module).__name__}" if package[:2] == ["fla", "layers"] else None


def _replacement(layer: Any, cls: type, names: tuple[str, ...]) -> nn.Module:
    arguments = {name: getattr(layer, name) for name in names if hasattr(layer, name)}
    norm = layer.o_norm
    arguments["norm_eps"] = norm.eps
    if cls is GatedDeltaNet and getattr(norm, "activation", None) is not None:
        arguments["output_gate_activation"] = norm.activation
    new: nn.Module = cls(**arguments)
    like = layer.o_proj.weight
    new.to(device=like.device, dtype=like.dtype).train(layer.training)
    for name in ("A_log", "dt_bias"):  # fp32 in a bf16 model
        parameter = getattr(layer, name)
        getattr(new, name).data = parameter.detach().clone()
    new.load_state_dict(layer.state_dict())
    for name, parameter in layer.named_parameters():
        if not parameter.requires_grad:
            raise error("unsupported", f"{type(layer).__name__}.{name} does not require grad",
                        why="Projections are fused into one parameter, which does or does not.",
                        remedy="Adapt first, then freeze whole layers.")
    return new


def replace_fla_layers(model: nn.Module) -> int:
    """Replace every known layer below ``model``; the number replaced."""
    found = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()
             if _name(child) is not None]
    for _, name, child in found:
        if _name(child) not in FLA_LAYERS and name in ("attn", "mixer"):
            raise error("unsupported", f"{type(model).__name__} has a {type(child).__name__}",
                        why="It reads the longest sequence on the host, or its operator has no fixed-capacity form.",
                        remedy=f"Use a model whose mixers are {', '.join(FLA_LAYERS)}.")
    new = [(parent, name, _replacement(child, *FLA_LAYERS[known])) for parent, name, child in found
           if (known := _name(child)) in FLA_LAYERS and known is not None]
    for parent, name, child in new:
        setattr(parent, name, child)
    return len(new)
