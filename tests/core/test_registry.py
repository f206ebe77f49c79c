"""Runtimes are found by name through entry points; nothing is chosen in place of what was asked for."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest
import torch

import graphsafe as gs
from graphsafe import runtime as registry
from graphsafe_cpu import CpuRuntime

PROJECT = ("triton", "graphsafe_cpu", "graphsafe_cuda", "graphsafe_npu", "graphsafe_kernels", "torch_npu")
ADAPTERS = tuple(name for name in PROJECT if name != "graphsafe_kernels")
TOOLS = ("pytest", "_pytest", "typer", "rich", "hypothesis", "graphsafe.testing", "graphsafe.cli", "graphsafe.demo")


class Unfinished:
    """No runtime: it lacks most of the protocol."""

    name = "unfinished"
    device = torch.device("cpu")


class Impossible:
    def __init__(self):
        raise OSError("no such driver\nand a second line")


class NotTheBest(CpuRuntime):
    name = "npu"


@pytest.fixture
def entries(monkeypatch):
    """Entry points of the test's choice, by name, and an empty registry."""
    known = {}
    monkeypatch.setattr(registry, "known_runtimes", lambda: known)
    monkeypatch.setattr(registry, "_runtimes", {})

    def add(name, target):
        module = target.__module__ if isinstance(target, type) else target
        value = f"{module}:{target.__name__}" if isinstance(target, type) else target
        known[name] = importlib.metadata.EntryPoint(name, value, registry.ENTRY_POINTS)

    return add


def fresh(code):
    """What a new interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_core_loads_no_adapter_kernel_or_tool():
    loaded = fresh(
        "import sys, graphsafe\n"
        f"print([m for m in sys.modules if any(m == p or m.startswith(p + '.') for p in {PROJECT + TOOLS!r})])"
    )
    assert loaded.strip() == "[]"


def test_the_cpu_runtime_captures_without_triton():
    loaded = fresh(
        "import sys, torch, graphsafe as gs\n"
        "before = 'triton' in sys.modules\n"
        "rt = gs.get_runtime('cpu')\n"
        f"print([m for m in sys.modules if m.split('.')[0] in {PROJECT + TOOLS!r} and m != 'graphsafe_cpu' "
        "and not m.startswith('graphsafe_cpu.')], before)"
    )
    assert loaded.strip() == "[] False"


def test_the_kernels_import_without_triton_and_without_an_adapter():
    loaded = fresh(
        "import sys, graphsafe_kernels\n"
        f"print([m for m in sys.modules if m.split('.')[0] in {ADAPTERS!r}])"
    )
    assert loaded.strip() == "[]"


def test_this_distribution_registers_its_three_runtimes():
    known = registry.known_runtimes()
    assert {"cpu", "cuda", "npu"} <= set(known)
    assert list(registry._INSTALL) == sorted(registry._INSTALL)


def test_one_object_for_each_name():
    assert gs.get_runtime("cpu") is gs.get_runtime("cpu")
    assert isinstance(gs.get_runtime("cpu"), CpuRuntime)


def test_an_unknown_name_lists_what_is_known_what_is_usable_and_how_to_install_the_rest(entries):
    entries("cpu", CpuRuntime)
    entries("cuda", Impossible)
    entries("mine", Unfinished)
    with pytest.raises(gs.RuntimeMissingError) as caught:
        gs.get_runtime("tpu")
    text = str(caught.value)
    assert text.startswith("no runtime 'tpu'; known: cpu, cuda, mine; usable here: cpu\n")
    assert "  cuda: no such driver\n" in text
    assert "mine:" in text
    assert "pip install 'graphsafe[cuda]'" in caught.value.remedy
    assert "mine: see its own documentation" in caught.value.remedy
    assert caught.value.where.function == (
        "test_an_unknown_name_lists_what_is_known_what_is_usable_and_how_to_install_the_rest"
    )


def test_where_everything_is_installed_the_remedy_is_to_choose(entries):
    entries("cpu", CpuRuntime)
    with pytest.raises(gs.RuntimeMissingError) as caught:
        gs.get_runtime("tpu")
    assert caught.value.remedy == "Use one of cpu."


def test_where_nothing_is_registered_that_is_said(entries):
    for name in (None, "cpu"):
        with pytest.raises(gs.RuntimeMissingError, match="known: none; usable here: none"):
            gs.get_runtime(name)


def test_an_adapter_that_cannot_start_says_why_and_is_not_replaced(entries):
    entries("cpu", CpuRuntime)
    entries("cuda", Impossible)
    with pytest.raises(gs.RuntimeMissingError) as caught:
        gs.get_runtime("cuda")
    assert str(caught.value).startswith("the runtime 'cuda' cannot be used here: no such driver; known: cpu, cuda;")
    assert isinstance(caught.value.__cause__, OSError)


def test_an_adapter_that_is_not_there_says_so(entries):
    entries("cuda", "no_such_module:Runtime")
    with pytest.raises(gs.RuntimeMissingError, match="No module named 'no_such_module'"):
        gs.get_runtime("cuda")


def test_an_adapter_that_is_no_runtime_is_told_what_it_lacks(entries):
    entries("mine", Unfinished)
    with pytest.raises(gs.RuntimeMissingError, match=r"Unfinished is no GraphRuntime; it lacks .*capture.*warm_up"):
        gs.get_runtime("mine")


def test_without_a_name_the_best_that_is_usable(entries):
    entries("cpu", CpuRuntime)
    assert gs.get_runtime().name == "cpu"
    entries("cuda", Impossible)
    assert gs.get_runtime().name == "cpu"
    entries("npu", NotTheBest)
    assert type(gs.get_runtime()) is NotTheBest


def test_without_a_name_a_stranger_is_not_chosen(entries):
    entries("mine", CpuRuntime)
    with pytest.raises(gs.RuntimeMissingError, match="no runtime can be used here; known: mine"):
        gs.get_runtime()
    assert gs.get_runtime("mine").name == "cpu"


def test_a_failed_start_is_tried_again(entries):
    entries("cuda", Impossible)
    with pytest.raises(gs.RuntimeMissingError):
        gs.get_runtime("cuda")
    entries("cuda", CpuRuntime)
    assert gs.get_runtime("cuda").name == "cpu"
