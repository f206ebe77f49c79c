"""Tiny random models of the family, as ``transformers`` builds them, in its own PyTorch code."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import transformers

VOCABULARY = 64
_SHARED = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
           "num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["linear_attention", "full_attention"],
           "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
_GDN = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16}
_OLMO = {**_GDN, "linear_num_value_heads": 2}
_KIMI = {"linear_conv_kernel_dim": 4, "linear_head_dim": 8, "linear_num_heads": 4, "num_key_value_heads": 4,
         "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12,
         "mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2, "num_local_experts": 4, "n_group": 1,
         "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 16}

_LARA = {"head_dim": 16, "num_hidden_layers": 3, "sliding_window": 6,
         "layer_types": ["linear_attention", "sliding_attention", "full_attention"]}

_ALL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "kimi-linear": ("KimiLinearConfig", "KimiLinearForCausalLM", _KIMI),
    "olmo-hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", {**_OLMO, "linear_allow_neg_eigval": True}),
    "qwen3-next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**_GDN, **_EXPERTS, "head_dim": 16}),
    "qwen3.5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {**_GDN, "head_dim": 16}),
    "qwen3.5-moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {**_GDN, **_EXPERTS, "head_dim": 16}),
    "lara-mini": ("LaraMiniConfig", "LaraMiniForCausalLM", {**_GDN, **_EXPERTS, **_LARA}),
}
MODELS = {name: model for name, model in _ALL.items() if model[1] in dir(transformers)}  # hasattr would import models
"""Every family that is there; the last came with a later version of ``transformers`` than the oldest supported."""


def make(name: str, **changes: Any) -> Any:
    """A model in eval mode, every parameter at random."""
    config_class, model_class, arguments = MODELS[name]
    # A model's module takes GPU kernels of other packages where it can import them, for tensors on a CPU too.
    with pytest.MonkeyPatch.context() as hidden:
        for package in ("fla", "causal_conv1d"):
            hidden.setitem(sys.modules, package, None)
        config = getattr(transformers, config_class)(**{**_SHARED, **arguments, **changes})
        make_model = getattr(transformers, model_class)
    torch.manual_seed(list(_ALL).index(name))
    model = make_model(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def batch(lengths: list[int], device: Any = "cpu", seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random ids ``[1, T]`` and boundaries of a packed batch."""
    ids = torch.randint(VOCABULARY, (1, sum(lengths)), generator=torch.Generator().manual_seed(seed))
    return ids.to(device), torch.tensor([0, *lengths], dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32)
