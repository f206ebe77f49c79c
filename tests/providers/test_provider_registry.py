"""Who serves an operator: the order of choice, the refusals, and that nothing is chosen silently."""

from __future__ import annotations

import inspect
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from provider_operands import operands

from graphsafe.errors import ArgumentError, UnsupportedError
from graphsafe_kernels import providers
from graphsafe_kernels.backend import reference_only
from graphsafe_kernels.conv import causal_conv1d
from graphsafe_kernels.kda import chunk_kda
from graphsafe_kernels.providers import choice, registry
from graphsafe_kernels.providers.own import build_tables
from graphsafe_kernels.providers.service import Provider, Service

PACKED = frozenset({"cu_seqlens"})


class Doubling(Provider):
    """KDA whose output is twice the right one: a provider that a test can tell from the others."""

    name = "doubling"

    def __init__(self, **declared: Any) -> None:
        self.services = {"chunk_kda": Service(("cpu",), (torch.float32,), **declared)}

    def missing(self) -> str | None:
        return None

    def function(self, operator: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            o, state = chunk_kda(**arguments)
            return 2 * o, state

        return call


@pytest.fixture
def doubling(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(registry._providers, "doubling", Doubling())
    return "doubling"


def by(**choice: Any) -> torch.Tensor:
    return chunk_kda(**operands(), **choice)[0]


def test_default_is_this_projects_own() -> None:
    want = chunk_kda(**operands())[0]
    assert torch.equal(by(), want)
    assert providers.chosen("chunk_kda").name == providers.DEFAULT == "graphsafe"


def test_argument_beats_context_beats_environment(doubling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = by()
    monkeypatch.setattr(choice, "_environment", "doubling")
    assert torch.equal(by(), 2 * plain)
    with providers.using("reference"):
        assert torch.equal(by(), plain)
        assert torch.equal(by(provider="doubling"), 2 * plain)
        with providers.using("doubling", "chunk_kda"):
            assert torch.equal(by(), 2 * plain)
        with providers.using("doubling", "causal_conv1d"):
            assert torch.equal(by(), plain)
    assert torch.equal(by(), 2 * plain)


def test_every_public_operator_follows_the_choice() -> None:
    """Each takes ``provider``, and a layer's call of it follows context and environment."""
    from graphsafe_kernels.gdn import chunk_gated_delta_rule

    for operator in (chunk_kda, chunk_gated_delta_rule, causal_conv1d):
        assert inspect.signature(operator).parameters["provider"].default is None
        call = operands(operator.__name__)
        with providers.using("fla_npu"), pytest.raises(UnsupportedError, match="'fla_npu'"):
            operator(**call)
        same = [t[0] for t in (operator(**call), operator(**call, provider="reference"))]
        assert torch.equal(*same)


def test_a_layer_follows_the_context(doubling: str) -> None:
    from graphsafe_kernels.layers import KimiDeltaAttention

    layer = KimiDeltaAttention(hidden_size=16, num_heads=1, head_dim=8)
    x = torch.randn(1, 20, 16)
    with torch.no_grad():
        plain = layer(x)[0]
        with providers.using(doubling, "chunk_kda"):
            other = layer(x)[0]
    assert not torch.equal(plain, other)


def test_nothing_is_chosen_for_an_oracle(doubling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = by()
    monkeypatch.setattr(choice, "_environment", "doubling")
    with reference_only():
        assert torch.equal(by(), plain)


def test_a_call_that_chooses_nothing_is_handed_on_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a choice neither a request nor a provider is made: the default path stays cheap."""
    monkeypatch.setattr(choice, "serve", None)
    monkeypatch.setattr(choice, "get_provider", None)
    by()


def test_an_error_of_an_operator_names_the_callers_line() -> None:
    with pytest.raises(ArgumentError) as raised:
        chunk_kda(**{**operands(), "beta": torch.ones(3)})
    assert "test_provider_registry.py" in str(raised.value)
    with pytest.raises(UnsupportedError) as raised:
        by(provider="fla_npu")
    assert "test_provider_registry.py" in str(raised.value)


def test_environment_names_operators_apart(doubling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_environment", "reference, chunk_kda=doubling")
    assert providers.chosen("chunk_kda").name == "doubling"
    assert providers.chosen("causal_conv1d").name == "reference"
    monkeypatch.setattr(choice, "_environment", "chunk_kba=doubling")
    with pytest.raises(ArgumentError, match="chunk_kba"):
        by()


def test_every_choice_is_logged_once(doubling: str, caplog: pytest.LogCaptureFixture) -> None:
    choice._logged.clear()
    with caplog.at_level(logging.DEBUG, logger=providers.ENTRY_POINTS):
        by()
        by(provider="doubling")
        by(provider="doubling")
    said = [(r.levelno, r.getMessage()) for r in caplog.records]
    assert said == [(logging.DEBUG, "chunk_kda: graphsafe (default)"), (logging.INFO, "chunk_kda: doubling (argument)")]


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ArgumentError, match=r"no provider 'flla'; known: .*fla.*graphsafe"):
        by(provider="flla")
    with pytest.raises(ArgumentError, match="no operator 'chunk_kba'"), providers.using("reference", "chunk_kba"):
        pass


def test_a_taken_name_is_refused() -> None:
    class Impostor(Doubling):
        name = "graphsafe"

    with pytest.raises(ArgumentError, match="registered already"):
        providers.register(Impostor())


@pytest.mark.parametrize(
    ("declared", "changes", "reason"),
    [
        ({}, {"dtype": torch.float16}, "it takes float32, and the operands are float16"),
        ({"unsafe": "grids of the lengths"}, {"use_graph": True}, "not graph-safe: grids of the lengths"),
        ({"options": PACKED}, {"use_qk_l2norm_in_kernel": True}, "it has no use_qk_l2norm_in_kernel"),
        ({"limit": lambda request: "it needs K = 128"}, {}, "it needs K = 128"),
    ],
    ids=["dtype", "graph-safety", "option", "limit"],
)
def test_a_request_it_cannot_serve_is_refused_with_the_reason(
    declared: dict[str, Any], changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry._providers, "doubling", Doubling(**declared))
    call = {**operands(dtype=changes.pop("dtype", torch.float32)), **changes}
    with pytest.raises(UnsupportedError) as raised:
        chunk_kda(**call, provider="doubling")
    assert reason in str(raised.value)
    assert "'doubling'" in str(raised.value)
    # nothing else served it, and the survey says the same
    assert reason in str(providers.survey("chunk_kda", **call)["doubling"])


def test_a_backward_it_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._providers, "doubling", Doubling(backward=False))
    call = operands()
    call["q"].requires_grad_()
    with pytest.raises(UnsupportedError, match="no backward"):
        chunk_kda(**call, provider="doubling")
    with torch.no_grad():
        chunk_kda(**call, provider="doubling")


def test_an_operator_it_does_not_have_is_refused(doubling: str) -> None:
    with pytest.raises(UnsupportedError, match=r"it has no causal_conv1d; it has chunk_kda"):
        causal_conv1d(**operands("causal_conv1d"), provider="doubling")


def test_a_default_value_is_no_option(doubling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._providers, "doubling", Doubling(options=PACKED, unsafe="no tables"))
    chunk_kda(**operands(), use_graph=False, use_qk_l2norm_in_kernel=False, provider="doubling")


def test_a_call_that_does_not_fit_the_operator_is_refused() -> None:
    with pytest.raises(ArgumentError, match="chunk_kda"):
        chunk_kda(provider="reference")


def test_reference_never_takes_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from graphsafe_kernels import backend

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(backend, "TRITON", {"chunk_kda": "no.such.module"})
    assert torch.equal(by(provider="reference"), by(provider="reference"))
    with pytest.raises(ModuleNotFoundError):
        by(provider="graphsafe")


def test_tables_have_providers_too() -> None:
    boundaries = torch.tensor([0, 70, 200], dtype=torch.int32)
    built = [build_tables(boundaries, 256, provider=name) for name in ("graphsafe", "reference")]
    assert torch.equal(built[0].chunk_indices, built[1].chunk_indices)
    assert built[0].slots == 5


def test_the_environment_is_read_at_import() -> None:
    code = (
        "from graphsafe_kernels import providers; from graphsafe_kernels.kda import chunk_kda; "
        "assert providers.chosen('chunk_kda').name == 'reference', providers.chosen('chunk_kda').name; "
        "assert providers.chosen('causal_conv1d').name == 'graphsafe'"
    )
    environment = {**os.environ, providers.ENVIRONMENT_VARIABLE: "chunk_kda=reference"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)


def test_listing_providers_imports_none() -> None:
    code = (
        "import sys; from graphsafe_kernels.providers import known_providers; names = known_providers(); "
        "assert set(names) >= {'causal-conv1d', 'fla', 'fla_npu', 'flash_qla', 'graphsafe', 'reference'}, names;"
        "loaded = {m.split('.')[0] for m in sys.modules} & {'fla', 'fla_npu', 'flash_qla', 'causal_conv1d', 'triton'};"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
