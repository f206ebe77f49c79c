"""Errors of torch and triton that no device owns are explained; adapters extend the table."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import sys
import types

import pytest
import torch

import graphsafe as gs
from graphsafe import explanations
from graphsafe.explanations import EXPLANATIONS, Explanation, explanation_of, explanations_of
from graphsafe.rules import rule


def raised(body):
    with pytest.raises(RuntimeError) as caught:
        body()
    return caught.value


def twice():
    loss = torch.ones(2, requires_grad=True).exp().sum()
    loss.backward()
    loss.backward()


def written_in_place():
    saved = torch.ones(2, requires_grad=True).exp()
    loss = saved.square().sum()
    saved.detach().zero_()
    loss.backward()


@pytest.mark.parametrize(
    ("body", "name", "says"),
    [
        (twice, "tensor-escapes", "freed already"),
        (written_in_place, "metadata-changed", "written in place"),
        (lambda: torch.ones(2).sum().backward(), "unsupported", "nothing behind"),
    ],
    ids=["twice", "written", "no graph"],
)
def test_messages_as_this_torch_words_them(body, name, says):
    found = explanation_of(raised(body))
    assert found is not None
    assert found.rule == name
    assert says in found.meaning.lower()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Attempting CUDA graph capture of step() for an instance of Adam but param_groups' capturable is False.",
         "unsupported"),
        ("autotuning during CUDA graph capture", "cold-kernel"),
        ("a stream is capturing; warm up autotuned kernels first", "cold-kernel"),
        ("in do_bench_cudagraph", "cold-kernel"),
    ],
)  # fmt: skip
def test_messages_that_need_a_device(text, name):
    found = explanation_of(text)
    assert found is not None
    assert found.rule == name


@pytest.mark.parametrize("problem", ["shape mismatch", "the capturing of prey", 7, ""])
def test_what_is_not_known_is_not_explained(problem):
    assert explanation_of(problem) is None


def test_every_row_names_a_rule_and_a_source():
    for row in EXPLANATIONS:
        assert rule(row.rule).name == row.rule
        assert row.source
        assert row.meaning.endswith(".")
        assert row.remedy.endswith(".")


@pytest.mark.parametrize(
    ("problem", "device"),
    [
        *((code, "cuda") for code in (700, *range(900, 909))),
        *((code, "npu") for code in (107000, 107025, 107027, 107030, 207001, 207008, 507011, 507015)),
        ("CUDA out of memory during capture", "cuda"),
        ("NPU out of memory during capture", "npu"),
        ("HCCL error in: ProcessGroupHCCL.cpp", "npu"),
        ("NCCL error in: ProcessGroupNCCL.cpp", "cuda"),
        ("autotuning during capture", "any"),
        ("Cannot copy between CPU and CUDA tensors during CUDA graph capture", "cuda"),
        ("Trying to backward through the graph a second time", "any"),
    ],
)
def test_what_users_meet_is_explained_with_category_cause_remedy_and_source(problem, device):
    ((name, row),) = explanations_of(problem)
    assert name == device
    assert rule(row.rule).category
    assert row.meaning
    assert row.remedy
    assert row.source


def test_an_eager_failure_carries_the_explanation():
    with pytest.raises(gs.BackendError) as caught:
        gs.get_runtime("cpu").warm_up(twice)
    assert "freed already" in caught.value.why
    assert "freed already" in str(caught.value)


def test_every_runtime_explains_them():
    assert "TrainStep" in gs.get_runtime("cpu").explain("element 0 does not require grad and does not have a grad_fn")


@pytest.fixture
def adapters(monkeypatch):
    """Two adapters, ``abacus`` with a table and ``slate`` without one."""
    row = Explanation(r"\b4711\b|beads stuck", "not-capturable", "The beads are stuck.", "Shake it.", "the manual")
    package, table = types.ModuleType("abacus_adapter"), types.ModuleType("abacus_adapter.explain")
    package.__path__, slate = [], types.ModuleType("slate_adapter")
    slate.__path__ = []
    table.explanation_of = lambda problem: row if "4711" in str(problem) or "beads" in str(problem) else None
    for module in (package, table, slate):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    entries = {
        name: importlib.metadata.EntryPoint(name, f"{name}_adapter:Runtime", "graphsafe.runtimes")
        for name in ("abacus", "slate")
    }
    monkeypatch.setattr(explanations, "known_runtimes", lambda: entries)
    return row


def test_an_adapter_extends_the_table(adapters):
    assert explanations_of(4711) == [("abacus", adapters)]
    assert explanations_of("beads stuck") == [("abacus", adapters)]
    assert explanations_of("no such thing") == []


def test_a_text_that_names_another_device_is_not_for_an_adapter(adapters):
    assert explanations_of("slate: beads stuck") == []
    assert explanations_of("abacus and slate: beads stuck") == [("abacus", adapters)]


def test_the_core_comes_first(adapters):
    found = explanations_of("beads stuck while Trying to backward through the graph a second time")
    assert [name for name, _ in found] == ["any", "abacus"]
