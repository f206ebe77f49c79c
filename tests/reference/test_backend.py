"""The choice of implementation, and that it loads nothing before it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from graphsafe_kernels import backend

CPU, ACCELERATOR = torch.device("cpu"), torch.device("meta")


def test_registries_are_sorted_and_every_operator_has_a_reference():
    assert list(backend.REFERENCE) == sorted(backend.REFERENCE)
    assert list(backend.TRITON) == sorted(backend.TRITON)
    assert set(backend.TRITON) <= set(backend.REFERENCE)
    for operator in backend.OPERATORS:
        assert callable(backend._load(operator, "reference"))


@pytest.mark.parametrize("value", [None, "0", "1"])
def test_the_reference_serves_where_there_are_no_kernels(monkeypatch, value):
    monkeypatch.setattr(backend, "TRITON", {})
    monkeypatch.setenv("TRITON_INTERPRET", value) if value else monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert backend.implementation("chunk_kda", CPU) == "reference"
    assert backend.implementation("chunk_kda", ACCELERATOR) == "reference"


def test_kernels_serve_accelerators_and_the_interpreter(monkeypatch):
    monkeypatch.setattr(backend, "TRITON", {"chunk_kda": "somewhere"})
    monkeypatch.setattr(backend, "DEVICES", {})
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert backend.implementation("chunk_kda", CPU) == "reference"
    assert backend.implementation("chunk_kda", ACCELERATOR) == "triton"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend.implementation("chunk_kda", CPU) == "triton"


def test_kernels_serve_the_devices_they_are_shown_on(monkeypatch):
    monkeypatch.setattr(backend, "TRITON", {"chunk_kda": "somewhere"})
    monkeypatch.setattr(backend, "DEVICES", {"chunk_kda": ("cpu", "cuda")})
    assert backend.implementation("chunk_kda", ACCELERATOR) == "reference"
    assert backend.implementation("chunk_kda", torch.device("cuda")) == "triton"


def test_an_unknown_operator_is_refused_with_the_known_ones():
    with pytest.raises(KeyError, match="chunk_kda"):
        backend.implementation("chunk_kd", CPU)


def test_importing_the_operators_loads_no_triton():
    code = (
        "import sys, torch; before = set(sys.modules); import graphsafe_kernels.gdn, graphsafe_kernels.kda; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "assert 'triton' not in new and 'graphsafe_cuda' not in new and 'graphsafe_npu' not in new, new"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
