"""The Ascend adapter where there is no NPU: it imports, says what is missing, and leaves torch alone."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import graphsafe as gs
import graphsafe_npu
from graphsafe_npu import NpuRuntime, compat, sim
from graphsafe_npu.settings import SETTINGS, refuse_settings


@pytest.mark.parametrize(
    ("variable", "refused", "allowed"),
    [
        ("TASK_QUEUE_ENABLE", ["2", " 2"], ["0", "1", ""]),
        ("ASCEND_LAUNCH_BLOCKING", ["1"], ["0", ""]),
        ("TRITON_ENABLE_TASKQUEUE", ["false", "0", "False"], ["true", "1", ""]),
        (
            "PYTORCH_NPU_ALLOC_CONF",
            ["pin_memory_expandable_segments:True", "max_split_size_mb:64,pin_memory_expandable_segments: true"],
            ["pin_memory_expandable_segments:False", "expandable_segments:True", ""],
        ),
    ],
)
def test_settings_that_forbid_a_capture_are_refused_by_name(variable, refused, allowed):
    for value in refused:
        with pytest.raises(gs.UnsupportedError) as caught:
            refuse_settings({variable: value})
        assert caught.value.rule.name == "not-capturable"
        assert f"{variable}={value}" in caught.value.what
        assert variable in caught.value.remedy
    for value in allowed:
        refuse_settings({variable: value})
    refuse_settings({})


def test_every_setting_is_tested_once():
    assert len({s.variable for s in SETTINGS}) == len(SETTINGS) == 4


def test_without_torch_npu_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(gs.RuntimeMissingError, match="torch_npu is not installed") as caught:
        NpuRuntime()
    assert "pip install torch_npu" in caught.value.remedy


@pytest.mark.parametrize("problem", [ImportError, OSError, RuntimeError])
def test_without_cann_the_error_says_what_is_missing(monkeypatch, problem):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())

    def fail(name):
        raise problem("libhccl.so: cannot open shared object file\nmore")

    monkeypatch.setattr(compat.importlib, "import_module", fail)
    with pytest.raises(gs.RuntimeMissingError, match=r"cannot be loaded: libhccl\.so") as caught:
        NpuRuntime()
    assert "set_env.sh" in caught.value.remedy
    assert isinstance(caught.value.__cause__, problem)


def test_importing_the_adapter_loads_neither_torch_npu_nor_triton():
    code = (
        "import sys, torch\nbefore = {m for m in sys.modules if m.split('.')[0] in ('torch_npu', 'triton')}\n"
        "import graphsafe_npu, graphsafe_npu.sim\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch_npu', 'triton') and m not in before])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("[]")


def test_a_simulator_that_is_not_there_is_not_activated(monkeypatch):
    monkeypatch.setattr(sim, "present", lambda: False)
    with pytest.raises(gs.RuntimeMissingError, match="no simulated CANN") as caught:
        sim.activate.__wrapped__()
    assert "set_up.py" in caught.value.remedy


def test_the_simulators_set_up_tells_what_cannot_be_had_from_a_failure(tmp_path):
    script = Path(graphsafe_npu.__file__).parent / "sim" / "set_up.py"
    done = subprocess.run(
        [sys.executable, script, tmp_path / "made"], capture_output=True, text=True, env={"PATH": str(tmp_path)}
    )
    if sys.version_info[:2] == (3, 11):
        assert done.returncode == 75, done.stderr
        assert "not available here: apt-get" in done.stderr
    else:
        assert done.returncode == 1
        assert "Python 3.11 is needed" in done.stderr
    assert not (tmp_path / "made").exists()
