"""What the errors of CANN and torch_npu mean: a table that needs no device."""

from __future__ import annotations

import pytest

from graphsafe.rules import rule
from graphsafe_npu.explain import EXPLANATIONS, explanation_of


@pytest.mark.parametrize(
    ("problem", "name", "says"),
    [
        (107000, "not-capturable", "pageable"),
        ("The process exits for this inner error", "not-capturable", "task queue"),
        (107025, "not-capturable", "not joined back"),
        (107027, "not-capturable", "STREAM_CAPTURED"),
        (107028, "not-capturable", "event"),
        (107030, "not-capturable", "synchronous copy"),
        (107031, "not-capturable", "default stream"),
        ("NPU graphs must be captured on a non-default stream.", "not-capturable", "default stream"),
        (107032, "concurrent-capture", "same time"),
        (107036, "not-capturable", "thread that began it"),
        (107041, "not-capturable", "pageable"),
        (207001, "eager-failed", "no memory left"),
        ("NPU out of memory. Tried to allocate 2.00 GiB", "eager-failed", "no memory left"),
        (207008, "not-capturable", "streams of the device"),
        (507011, "eager-failed", "replayed graph"),
        ("NPU function error: aclrtSynchronize, error code is 507015", "eager-failed", "a kernel failed"),
        (507903, "not-capturable", "earlier call"),
        ("called a synchronizing NPU operation", "host-read", "made the host wait"),
        ("EI0002: [PID: 7] The wait execution of the Notify register times out.", "collective", "did not come in time"),
        ("EI0005: parameters", "collective", "do not agree"),
        ("EI0006: Getting socket times out.", "collective", "did not connect"),
        ("Execution Error ROCE CQE(EI0013): An error CQE occurred", "collective", "not answered"),
        ("OPS function error: HcclAllgather, error code is 6", "collective", "A call of HCCL"),
        ("[ERROR] HCCL error in: HCCLUtils.hpp:47, HCCL_E_TIMEOUT", "collective", "A call of HCCL"),
        ("Cannot run aclop operators during NPU graph capture.", "not-capturable", "aclop"),
        ("error: ub overflow, requires 2097152 bits", "eager-failed", "192 KiB"),
        ("grid should be less than 65536!", "unsupported", "65,535"),
        ("Trying to backward through the graph a second time", "tensor-escapes", "kept and is used in another"),
        (RuntimeError("replay: error code is 507014"), "eager-failed", "in time"),
    ],
)
def test_ascend_codes_texts_and_exceptions_are_explained(problem, name, says):
    found = explanation_of(problem)
    assert found is not None
    assert found.rule == name
    assert says in found.meaning
    assert found.remedy.endswith((".", ")."))


@pytest.mark.parametrize("problem", [1, 1070250, "division by zero", RuntimeError("shape mismatch")])
def test_what_is_not_known_of_ascend_is_not_explained(problem):
    assert explanation_of(problem) is None


def test_every_ascend_explanation_names_a_rule():
    for explanation in EXPLANATIONS:
        assert rule(explanation.rule).name == explanation.rule
        assert explanation.source
