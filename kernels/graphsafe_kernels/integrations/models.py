"""``adapt``: make somebody else's model run on these operators, in graphs and outside.

Requirements
------------
1. Two lines: ``adapt(model)``, then ``model(input_ids, cu_seqlens=..., tables=...)``. The model is changed in place;
   parameters, their names and the state dict are not.
2. What cannot be captured is replaced (linear attention, the full attention's mask, experts chosen on the host) or
   refused by name: when the model is adapted if its configuration says so, else when it is called.
3. Without ``cu_seqlens`` the model does what it did: generation with caches and masks goes on, outside graphs.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from graphsafe.errors import error
from graphsafe_kernels.integrations import attention, experts
from graphsafe_kernels.integrations.fla_models import FLA_LAYERS, replace_fla_layers
from graphsafe_kernels.integrations.mixers import MIXERS, adapt_mixer
from graphsafe_kernels.integrations.packing import Packed
from graphsafe_kernels.layers.batch import cleared

__all__ = ["adapt"]

Model = TypeVar("Model", bound=nn.Module)

_PACKED = ("cu_seqlens", "tables", "use_graph")
_REFUSED = {
    "attention_mask": "A mask is read on the host to find out what it leaves out; cu_seqlens says it on the device.",
    "past_key_values": "A cache is updated by Python, which a replay does not run.",
    "use_cache": "A cache is updated by Python, which a replay does not run.",
    "output_attentions": "Attention over packed sequences keeps no weights.",
    "output_router_logits": "The router's loss is a mean over all rows, padding included.",
    "pixel_values": "Where images go is found on the host.",
}
_DYNAMIC_ROPE = ("dynamic", "longrope")


def adapt(model: Model) -> Model:
    """Change ``model`` in place to run on this project's operators, and return it.

    Models of ``transformers`` (Qwen3-Next, Qwen3.5 and its experts, Kimi Linear, Lara Mini, OLMo Hybrid: any model
    whose linear-attention layers are of a class in ``integrations.mixers.MIXERS``) and models built from the layers of
    flash-linear-attention. Adapt before parameters are handed to an optimizer: layers of flash-linear-attention are
    replaced, with equal state dicts.

    The model then takes three more keywords: ``cu_seqlens`` ``[N + 1]`` or ``tables``
    (:class:`graphsafe.ChunkTables`), which make ``input_ids`` ``[1, T]`` a packed batch whose rows beyond the live
    total are padding, and ``use_graph`` (True with either). Positions count from each sequence's start. Logits of
    padding rows are finite and mean nothing: give them no label.

    Raises rule ``unsupported`` (GS106) for a model without layers that are known, with a configuration that decides on
    the host, and at a call that asks for a mask, a cache, attention weights or router logits of a packed batch.
    """
    mixers = [m for m in model.modules() if type(m).__name__ in MIXERS]
    replaced = replace_fla_layers(model)
    if not mixers and not replaced:
        raise error("unsupported", f"{type(model).__name__} has no layer that can be adapted",
                    why=f"Known are {', '.join((*MIXERS, *FLA_LAYERS))}.",
                    remedy="Build the model from graphsafe_kernels.layers, or import its operators through "
                           "install_fla_names().")
    config = getattr(model, "config", None)
    if mixers:
        _check_configuration(model, config)
        for mixer in mixers:
            adapt_mixer(mixer)
        model.set_attn_implementation(attention.register(config._attn_implementation))  # type: ignore[operator, union-attr]
        _choose_experts(model)
    model.register_forward_pre_hook(_before_call if mixers else _before_fla_call, with_kwargs=True)
    return model


def _check_configuration(model: nn.Module, config: Any) -> None:
    name = type(model).__name__
    if getattr(config, "vision_config", None) is not None:
        raise error("unsupported", f"{name} has a vision part",
                    why="Where images go in a sequence, and its positions, are found on the host.",
                    remedy="Adapt the text model alone: load its ForCausalLM class.")
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind in _DYNAMIC_ROPE:
        raise error("unsupported", f"{name} has rotary embeddings of type {kind!r}",
                    why="They choose their frequencies by the longest position, which is read on the host.",
                    remedy="Use a configuration with rope_type 'default', 'linear' or 'yarn'.")
    if any(getattr(m, "gradient_checkpointing", False) is True for m in model.modules()):
        raise error("unsupported", f"{name} checkpoints activations",
                    why="The second forward restores generators from the host.",
                    remedy="Call model.gradient_checkpointing_disable(); graphs share memory between layers by "
                           "themselves.")


def _choose_experts(model: Any) -> None:
    if any(hasattr(m, "gate_up_proj") and hasattr(m, "num_experts") for m in model.modules()):
        model.set_experts_implementation(experts.register())


def _packed(model: nn.Module, arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> Packed | None:
    """Take this project's keywords out of a call; the batch they describe."""
    cu_seqlens, tables, use_graph = (kwargs.pop(name, None) for name in _PACKED)
    if cu_seqlens is None and tables is None:
        if use_graph:
            raise error("argument", f"{type(model).__name__} was called with use_graph=True and no cu_seqlens",
                        remedy="Pass cu_seqlens or tables; a dense batch needs no promise.")
        return None
    for name, why in _REFUSED.items():
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise error("unsupported", f"{type(model).__name__} was called with {name} and a packed batch", why=why,
                        remedy=f"Leave {name} out, or cu_seqlens and tables: without them the model does what it did.")
    ids = arguments[0] if arguments else kwargs.get("input_ids")
    ids = kwargs.get("inputs_embeds") if ids is None else ids
    if not isinstance(ids, torch.Tensor) or ids.dim() < 2 or ids.shape[0] != 1:
        raise error("argument", "a packed batch is input_ids [1, T] (or inputs_embeds [1, T, hidden]); got "
                    f"{list(ids.shape) if isinstance(ids, torch.Tensor) else type(ids).__name__}")
    packed = Packed.of(1, int(ids.shape[1]), ids.device, cu_seqlens, tables, use_graph is not False)
    if kwargs.get("inputs_embeds") is not None:
        # everything outside the mixers computes on all rows, and NaN times zero is NaN
        kwargs["inputs_embeds"] = cleared(kwargs["inputs_embeds"], packed.cu_seqlens)
    return packed


def _before_call(model: nn.Module, arguments: tuple[Any, ...],
                 kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    packed = _packed(model, arguments, kwargs)
    if packed is None:
        return arguments, kwargs
    if len(arguments) > 1:
        raise error("argument", f"{type(model).__name__} takes a packed batch by keyword, input_ids aside")
    kwargs["graphsafe"] = packed
    # a mask for each kind of layer, so that the model makes none
    kwargs["attention_mask"] = dict.fromkeys(("full_attention", "linear_attention", "sliding_attention"))
    kwargs["use_cache"] = False
    kwargs.setdefault("position_ids", packed.positions)
    return arguments, kwargs


def _before_fla_call(model: nn.Module, arguments: tuple[Any, ...],
                     kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    packed = _packed(model, arguments, kwargs)
    if packed is not None:
        kwargs |= {"cu_seqlens": packed.cu_seqlens, "tables": packed.tables, "use_graph": packed.use_graph,
                   "use_cache": False}
    return arguments, kwargs
