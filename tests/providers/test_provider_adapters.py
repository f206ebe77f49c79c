"""The adapters of other libraries, against stand-ins with those libraries' signatures."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from provider_operands import operands
from provider_stand_ins import causal_conv1d, fla, fla_npu, flash_qla

from graphsafe.errors import UnsupportedError
from graphsafe_kernels.conv import causal_conv1d as own_convolution
from graphsafe_kernels.gdn import chunk_gated_delta_rule
from graphsafe_kernels.kda import chunk_kda
from graphsafe_kernels.providers import get_provider, known_providers, request_of
from graphsafe_kernels.providers.causal_conv1d_cuda import CausalConv1dProvider
from graphsafe_kernels.providers.fla import FlaProvider, UnguardedFlaProvider
from graphsafe_kernels.providers.fla_npu import FlaNpuProvider
from graphsafe_kernels.providers.flash_qla import FlashQlaProvider

Calls = list[dict[str, Any]]
FOREIGN = ("causal-conv1d", "fla", "fla-unguarded", "fla_npu", "flash_qla")
GATE = {
    "A_log": torch.tensor([0.1, 0.4]),
    "dt_bias": torch.linspace(-1, 1, 32),
    "use_gate_in_kernel": True,
    "safe_gate": True,
    "lower_bound": -5.0,
}


@pytest.fixture
def conv_library(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    monkeypatch.setitem(sys.modules, "causal_conv1d", causal_conv1d(calls))


@pytest.fixture
def npu_library(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    monkeypatch.setitem(sys.modules, "fla_npu.ops.ascendc", fla_npu(calls))


@pytest.fixture
def fla_library(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
    for name, module in fla(calls).items():
        monkeypatch.setitem(sys.modules, name, module)


def same(got: Any, want: Any) -> None:
    """Equal results, None where None is right."""
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_every_foreign_provider_is_registered() -> None:
    assert set(known_providers()) == {*FOREIGN, "graphsafe", "reference"}


@pytest.mark.parametrize("provider", FOREIGN)
def test_what_is_missing_is_named(provider: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    missing = get_provider(provider).missing()
    assert missing is not None
    assert "no module" in missing
    assert get_provider(provider).install


def test_everything_that_fla_npu_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    assert FlaNpuProvider().missing() == (
        "no module fla_npu; no module torch_npu; no CANN environment (ASCEND_HOME_PATH is not set)"
    )


@pytest.mark.parametrize("provider", FOREIGN)
def test_no_foreign_provider_claims_to_be_graph_safe(provider: str) -> None:
    services = get_provider(provider).services
    assert services
    assert all(service.unsafe and not service.graph_safe for service in services.values())


# fla_npu


NPU_GATE = GATE | {"dt_bias": torch.linspace(-1, 1, 128)}


@pytest.mark.usefixtures("npu_library")
@pytest.mark.parametrize("states", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_fla_npu_gets_what_it_needs_and_gives_what_is_right(states: bool, packed: bool, calls: Calls) -> None:
    options = {
        **NPU_GATE,
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
        "disable_recompute": True,
    }
    call = operands(width=64)
    if not packed:
        del call["cu_seqlens"]
    start = torch.ones(2 if packed else 1, 2, 64, 64)
    if states:
        options |= {"initial_state": start, "output_final_state": True}
    request = request_of("chunk_kda", **call, **options)
    got = FlaNpuProvider().function("chunk_kda")(**request.arguments)
    same(got, chunk_kda(**call, **options))
    handed = calls[0]
    assert handed["cu_seqlens"] == ((0, 23, 70) if packed else None)
    assert handed["scale"] == 0.125
    assert handed["disable_recompute"] is True
    torch.testing.assert_close(handed["q"].norm(dim=-1), torch.ones(handed["q"].shape[:-1]))
    assert torch.equal(start, torch.ones_like(start))  # the library writes into the states it is handed
    assert handed["v"].data_ptr() == call["v"].data_ptr()  # a view: nothing was transposed or copied


@pytest.mark.usefixtures("npu_library")
@pytest.mark.parametrize("packed", [False, True])
def test_fla_npu_gets_gdn_head_by_head(packed: bool, calls: Calls) -> None:
    call = operands("chunk_gated_delta_rule", width=128)
    if not packed:
        del call["cu_seqlens"]
    options = {
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "initial_state": torch.ones(2 if packed else 1, 2, 128, 128),
        "output_final_state": True,
    }
    request = request_of("chunk_gated_delta_rule", **call, **options)
    got = FlaNpuProvider().function("chunk_gated_delta_rule")(**request.arguments)
    same(got, chunk_gated_delta_rule(**call, **options))
    assert calls[0]["q"].shape == (1, 1, 70, 128)
    assert calls[0]["g"].shape == (1, 70, 2)
    assert calls[0]["chunk_indices"] == ((0, 0, 1, 0) if packed else None)


def test_fla_npu_refuses_what_its_gdn_has_not() -> None:
    service = _anywhere(FlaNpuProvider().services["chunk_gated_delta_rule"])

    def refusal(width: int = 128, **changes: Any) -> str:
        call = operands("chunk_gated_delta_rule", dtype=torch.float16, width=width)
        return str(service.refusal(request_of("chunk_gated_delta_rule", **call, **changes)))

    assert refusal() == "None"
    assert "K = 64, V = 64" in refusal(width=64)
    assert "it has no use_gate_in_kernel, A_log" in refusal(A_log=GATE["A_log"], use_gate_in_kernel=True)
    assert "it has no state_v_first" in refusal(state_v_first=True)
    assert "not graph-safe" in refusal(use_graph=True)


@pytest.mark.usefixtures("npu_library")
def test_fla_npu_takes_half_precision(calls: Calls) -> None:
    call = operands(width=64, dtype=torch.float16)
    o, _ = FlaNpuProvider().function("chunk_kda")(**call)
    assert o.dtype == torch.float16
    assert calls[0]["beta"].dtype == torch.float32


@pytest.mark.usefixtures("npu_library")
def test_fla_npu_omitted_a_log_is_a_unit_scale(calls: Calls) -> None:
    options = {k: v for k, v in NPU_GATE.items() if k != "A_log"}
    got = FlaNpuProvider().function("chunk_kda")(**operands(width=64), **options)
    same(got, chunk_kda(**operands(width=64), **options))
    assert torch.equal(calls[0]["A_log"], torch.zeros(2))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_graph": True}, "not graph-safe: it takes the boundaries as host integers"),
        ({"chunk_size": 32}, "it has no chunk_size"),
        ({"A_log": GATE["A_log"], "use_gate_in_kernel": True, "lower_bound": -3.0}, "with safe_gate=True only"),
        ({"use_gate_in_kernel": True, "safe_gate": True}, "it would take -5 for a lower_bound"),
        ({"allow_neg_eigval": True}, "with use_beta_sigmoid_in_kernel only"),
    ],
    ids=["graph", "chunk-size", "bound", "no-bound", "beta"],
)
def test_fla_npu_refuses(changes: dict[str, Any], reason: str) -> None:
    service = FlaNpuProvider().services["chunk_kda"]
    request = request_of("chunk_kda", **operands(dtype=torch.float16, width=64), **changes)
    assert reason in str(_anywhere(service).refusal(request))


def test_fla_npu_refuses_widths_and_gradients() -> None:
    service = _anywhere(FlaNpuProvider().services["chunk_kda"])
    assert "K = 24, V = 24" in str(service.refusal(request_of("chunk_kda", **operands(dtype=torch.float16, width=24))))
    call = operands(dtype=torch.float16, width=64)
    call["v"].requires_grad_()
    assert "no backward" in str(service.refusal(request_of("chunk_kda", **call)))


def test_without_fla_npu_a_call_says_exactly_what_is_missing_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    with pytest.raises(UnsupportedError) as raised:
        chunk_kda(**operands(), provider="fla_npu")
    said = str(raised.value)
    for part in ("no module fla_npu; no module torch_npu", "ASCEND_HOME_PATH is not set", "set_env.sh"):
        assert part in said


def _anywhere(service: Any) -> Any:
    """The service as if the operands were on its device."""
    import dataclasses

    return dataclasses.replace(service, devices=())


# causal-conv1d


@pytest.mark.usefixtures("conv_library")
@pytest.mark.parametrize("packed", [False, True])
def test_causal_conv1d_is_handed_views_and_sequence_numbers(packed: bool, calls: Calls) -> None:
    call = operands("causal_conv1d") | {"activation": "silu", "residual": torch.ones(1, 70, 6)}
    if not packed:
        del call["cu_seqlens"]
    got = CausalConv1dProvider().function("causal_conv1d")(**call)
    same(got, own_convolution(**call))
    assert calls[0]["x"].data_ptr() == call["x"].data_ptr()
    if packed:
        assert calls[0]["seq_idx"].tolist() == [[0] * 23 + [1] * 47]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"output_final_state": True}, "it has no output_final_state"),
        ({"weight": torch.ones(6, 5)}, "2 to 4 taps, and weight has 5"),
        ({"weight": torch.ones(6, 4, dtype=torch.float16)}, "need one dtype"),
        ({"use_graph": True}, "not graph-safe"),
    ],
    ids=["states", "taps", "dtypes", "graph"],
)
def test_causal_conv1d_refuses(changes: dict[str, Any], reason: str) -> None:
    service = _anywhere(CausalConv1dProvider().services["causal_conv1d"])
    assert reason in str(service.refusal(request_of("causal_conv1d", **(operands("causal_conv1d") | changes))))


# flash-linear-attention


@pytest.mark.usefixtures("fla_library")
@pytest.mark.parametrize(
    ("operator", "own"),
    [
        ("chunk_kda", chunk_kda),
        ("chunk_gated_delta_rule", chunk_gated_delta_rule),
        ("causal_conv1d", own_convolution),
    ],
)
def test_fla_is_handed_operands_and_options_alone(operator: str, own: Any, calls: Calls) -> None:
    call = operands(operator) | {"output_final_state": True, "use_graph": False}
    request = request_of(operator, **call)
    got = FlaProvider().function(operator)(**request.arguments)
    same(got, own(**call))
    assert set(calls[0]) == set(operands(operator)) | {"output_final_state"}


def test_fla_imported_with_its_dispatch_on_is_refused(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    for name, module in fla(calls).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv("FLA_DISABLE_BACKEND_DISPATCH", raising=False)
    assert "another library's" in str(FlaProvider().missing())
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
    assert FlaProvider().missing() is None


@pytest.mark.usefixtures("fla_library")
def test_the_guard_is_lifted_by_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    guard = types.ModuleType("fla.ops.common.chunk_o")
    guard.TRITON_ABOVE_3_4_0, guard.TRITON_ABOVE_3_7_1 = True, False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fla.ops.common.chunk_o", guard)
    FlaProvider().function("chunk_gated_delta_rule")
    assert FlaProvider()._guard_is_up()
    UnguardedFlaProvider().function("chunk_kda")
    assert FlaProvider()._guard_is_up()
    UnguardedFlaProvider().function("chunk_gated_delta_rule")
    assert not FlaProvider()._guard_is_up()
    assert any("guard" in note for note in UnguardedFlaProvider.notes)


def test_choices_read_from_files_are_part_of_the_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FLA_CACHE_MODE", raising=False)
    assert not any("choices" in note for note in FlaProvider().notes)
    monkeypatch.setenv("FLA_CACHE_MODE", "strict")
    monkeypatch.setenv("FLA_CONFIG_DIR", str(tmp_path))
    assert FlaProvider().notes[-1].endswith("(FLA_CACHE_MODE=strict): its own")
    (tmp_path / "about.txt").write_text("2 of 3 keys timed on the device\n")
    for provider in (FlaProvider(), UnguardedFlaProvider()):
        assert provider.notes[-1].endswith("(FLA_CACHE_MODE=strict): 2 of 3 keys timed on the device")
        assert provider.notes[:-1] == type(provider).notes


# FlashQLA


def test_flash_qla_is_handed_its_own_arguments(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    monkeypatch.setitem(sys.modules, "flash_qla", flash_qla(calls))
    call = operands("chunk_gated_delta_rule") | {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    request = request_of("chunk_gated_delta_rule", **call)
    same(FlashQlaProvider().function(request.operator)(**request.arguments), chunk_gated_delta_rule(**call))


@pytest.mark.parametrize(
    ("width", "capability", "reason"),
    [(16, (9, 0), "K = 16, V = 16"), (128, (8, 0), "this is (8, 0)"), (128, (9, 0), "None")],
    ids=["width", "ampere", "served"],
)
def test_flash_qla_limits(
    width: int, capability: tuple[int, int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    service = _anywhere(FlashQlaProvider().services["chunk_gated_delta_rule"])
    call = operands("chunk_gated_delta_rule", dtype=torch.float16, width=width)
    assert reason in str(service.refusal(request_of("chunk_gated_delta_rule", **call)))
