"""The code of docs/models.md runs as it is shown."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from graphsafe_kernels.integrations import fla_names

TEXT = (Path(__file__).parents[2] / "docs" / "models.md").read_text()


def test_python_blocks_run_in_order():
    torch.manual_seed(0)
    namespace: dict = {}
    try:
        for number, code in enumerate(re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)):
            exec(compile(code, f"docs/models.md, python block {number + 1}", "exec"), namespace)
    finally:
        fla_names.remove_fla_names()
    assert namespace["prefill"].stats.replays == 1
    assert namespace["chunk_gated_delta_rule"].__module__.startswith("graphsafe_kernels")
