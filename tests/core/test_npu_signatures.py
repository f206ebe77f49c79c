"""What the Ascend adapter calls exists in every torch_npu from 2.9 to 2.14, as recorded from their wheels.

``tests/npu/record_signatures.py`` makes the record; ``tests/npu/test_installed_signatures.py`` compares the installed
version with it.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "tests/npu/torch_npu_signatures.json").read_text())

CALLS = {
    "graph.__init__": "g, pool=p, stream=s, capture_error_mode='global'",
    "graph.__enter__": "",
    "graph.__exit__": "None, None, None",
    "NPUGraph.__new__": "",
    "NPUGraph.replay": "",
    "NPUGraph.reset": "",
    "graph_pool_handle": "",
    "memory_stats": "device",
    "memory_snapshot": "",
    "empty_cache": "",
    "synchronize": "device",
    "current_device": "",
    "current_stream": "device",
    "set_stream": "stream",
    "stream": "side",
    "set_sync_debug_mode": "'error'",
    "get_sync_debug_mode": "",
    "is_available": "",
    "get_device_name": "device",
    "Stream.__new__": "device",
    "Stream.wait_stream": "other",
    "Event.__new__": "enable_timing=True",
    "Event.record": "",
    "Event.elapsed_time": "other",
}
"""How the adapter calls each."""


def test_the_versions_that_are_supported_are_recorded():
    assert {".".join(v.split(".")[:2]) for v in RECORD} == {"2.9", "2.10", "2.11", "2.12", "2.13", "2.14"}
    assert "2.9.0.post6" in RECORD


def bind(parameters, call):
    """Call a function with these parameters and an empty body."""
    made: dict = {}
    exec(f"def f({parameters}): pass", made)
    arguments = ast.parse(f"f({call})", mode="eval").body
    values = [None] * len(arguments.args)
    made["f"](*values, **{k.arg: None for k in arguments.keywords})


@pytest.mark.parametrize("version", RECORD)
def test_each_version_takes_the_adapters_calls(version):
    offered = RECORD[version]["python"]
    for name, call in CALLS.items():
        parameters = offered[name].partition(",")[2] if "." in name else offered[name]
        bind(parameters, call)


@pytest.mark.parametrize("version", RECORD)
def test_each_version_can_close_a_pool_after_a_failed_capture(version):
    native = RECORD[version]["native"]
    assert {"_npu_releasePool", "register_generator_state"} <= set(native)
    assert any(name.startswith("_npu_endAllocate") for name in native)


def test_a_call_that_a_version_does_not_take_is_noticed():
    with pytest.raises(TypeError):
        bind("pool=None", "stream=s")
    with pytest.raises(TypeError):
        bind("", "device")
