"""Experts of a ``transformers`` model without reading on the host which are hit.

Requirements
------------
1. Grouped products where torch has them as one kernel, whose group sizes stay on the device: bf16 on compute capability
   9.0 and newer. Elsewhere torch reads the sizes on the host, so each row gathers its own experts' weights: right on
   any device and in any dtype, and dear in memory.
2. What serves is decided at each call: a model may change its dtype or device after it was adapted.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["NAME", "register"]

NAME = "graphsafe"
"""The experts' implementation's name in ``transformers``."""


def _grouped(weight: torch.Tensor) -> bool:
    return weight.is_cuda and weight.dtype == torch.bfloat16 and torch.cuda.get_device_capability(weight.device) >= (9,)


def register() -> str:
    """Make the implementation known to ``transformers``."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def experts(module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor,
                top_k_weights: torch.Tensor) -> torch.Tensor:
        name = "grouped_mm" if _grouped(module.down_proj) else "batched_mm"
        output: torch.Tensor = ALL_EXPERTS_FUNCTIONS[name](module, hidden_states, top_k_index, top_k_weights)
        return output

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts)
    return NAME
