"""The probe of a collective inside a graph."""

from __future__ import annotations

import datetime
import tempfile
from pathlib import Path
from typing import Any

import torch

from graphsafe.capabilities.probe import Missing, data, probe, replays

_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


@probe("distributed.collective", "a collective inside the body, in a group of one rank")
def _collective(rt: Any) -> None:
    distributed = torch.distributed
    if not distributed.is_available():
        raise Missing("this torch has no distributed package")
    backend = _BACKENDS[rt.device.type]
    if backend in ("gloo", "nccl") and not getattr(distributed, f"is_{backend}_available")():
        raise Missing(f"this torch has no {backend}")
    if getattr(rt, "simulated", False):
        raise Missing(f"{backend} is not simulated")
    x = data(rt, 16)
    with tempfile.TemporaryDirectory() as folder:
        distributed.init_process_group(
            backend, init_method=(Path(folder) / "store").as_uri(), rank=0, world_size=1,
            timeout=datetime.timedelta(seconds=30),
        )  # fmt: skip
        try:

            def body() -> torch.Tensor:
                y = x * 2
                distributed.all_reduce(y)
                return y

            replays(rt, body)
        finally:
            distributed.destroy_process_group()
