"""Settings of the process under which an NPUGraph cannot be captured, refused by name before the device fails.

Requirements
------------
1. Eager work is not restricted: the check runs when a capture begins.
2. The error names the variable, its value, what it would do to a capture, and the value that works.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from graphsafe.errors import error

__all__ = ["SETTINGS", "Setting", "refuse_settings"]


@dataclass(frozen=True)
class Setting:
    """``forbids`` tells of a value of ``variable`` that it cannot be; then why, and what to set instead."""

    variable: str
    forbids: Callable[[str], bool]
    why: str
    remedy: str


def _off(value: str) -> bool:
    return value.strip().lower() in ("false", "0", "off", "no")


SETTINGS = (
    Setting(
        "TASK_QUEUE_ENABLE",
        lambda value: value.strip() == "2",
        "Level 2 of torch_npu's task queue works out shapes and workspaces on its own thread; no capture records that.",
        "Set TASK_QUEUE_ENABLE=1 (the default) before the process starts.",
    ),
    Setting(
        "ASCEND_LAUNCH_BLOCKING",
        lambda value: value.strip() == "1",
        "Every operator would be followed by a synchronisation, which a capturing stream refuses.",
        "Unset ASCEND_LAUNCH_BLOCKING before the process starts.",
    ),
    Setting(
        "TRITON_ENABLE_TASKQUEUE",
        _off,
        "Triton launches would bypass torch_npu's queue, out of order with its operators, and synchronise each time.",
        "Unset TRITON_ENABLE_TASKQUEUE, or set it to true.",
    ),
    Setting(
        "PYTORCH_NPU_ALLOC_CONF",
        lambda value: re.search(r"pin_memory_expandable_segments\s*:\s*true", value, re.IGNORECASE) is not None,
        "Expandable segments of pinned memory are mapped when they are needed, which a capture does not permit.",
        "Take pin_memory_expandable_segments out of PYTORCH_NPU_ALLOC_CONF.",
    ),
)


def refuse_settings(environment: Mapping[str, str] | None = None) -> None:
    """Raise (rule ``not-capturable``) for the first variable that a capture cannot live with."""
    environment = os.environ if environment is None else environment
    for setting in SETTINGS:
        value = environment.get(setting.variable)
        if value is not None and setting.forbids(value):
            what = f"no graph can be captured with {setting.variable}={value}"
            raise error("not-capturable", what, why=setting.why, remedy=setting.remedy)
