"""What CUDA's errors mean: a table that needs no device."""

from __future__ import annotations

import pytest

from graphsafe.rules import rule
from graphsafe_cuda.explain import EXPLANATIONS, explanation_of


@pytest.mark.parametrize(
    ("problem", "name", "says"),
    [
        (900, "not-capturable", "cudaErrorStreamCaptureUnsupported"),
        ("CUDA error: operation not permitted when stream is capturing", "not-capturable", "(900)"),
        (901, "not-capturable", "an earlier call already broke this capture"),
        ("operation failed due to a previous error during capture", "not-capturable", "(901)"),
        (902, "not-capturable", "wait for another capture"),
        ("operation would result in a merge of separate capture sequences", "not-capturable", "(902)"),
        (903, "not-capturable", "another stream than the one that began it"),
        (904, "not-capturable", "not joined back"),
        ("CUDA error: capturing stream has unjoined work", "not-capturable", "(904)"),
        (905, "not-capturable", "work outside it"),
        ("dependency created on uncaptured work in another stream", "not-capturable", "(905)"),
        (906, "not-capturable", "default stream"),
        ("operation would make the legacy stream depend on a capturing blocking stream", "not-capturable", "(906)"),
        ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3)", "collective", "did not come"),
        ("NCCL error in: ProcessGroupNCCL.cpp:2251, ncclRemoteError", "collective", "a peer left"),
        ("called a synchronizing CUDA operation", "host-read", "made the host wait"),
        (2, "eager-failed", "no memory left"),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", "eager-failed", "no memory left"),
        ("CUDA out of memory. Tried to allocate 900.00 MiB", "eager-failed", "no memory left"),
        (907, "not-capturable", "cudaErrorCapturedEvent"),
        ("operation not permitted on an event last recorded in a capturing stream", "not-capturable", "(907)"),
        ("attempt to terminate a thread-local capture sequence from another thread", "not-capturable", "(908)"),
        (908, "not-capturable", "another thread"),
        (
            "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned",
            "not-capturable",
            "pageable memory",
        ),
        (
            "Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture. If you need this call to be "
            "captured, please file an issue. Current cudaStreamCaptureStatus: cudaStreamCaptureStatusActive",
            "rng-state",
            "the seed or the state of a CUDA generator",
        ),
        (
            "Cannot do this during CUDA graph capture. If you need this call to be captured, please file an issue.",
            "not-capturable",
            "the message names it",
        ),
        (
            "Offset increment outside graph capture encountered unexpectedly.",
            "capture-leftover",
            "a capture that failed",
        ),
        ("CUDA graphs must be captured on a non-default stream.", "not-capturable", "begun on the default stream"),
        ("Trying to backward through the graph a second time", "tensor-escapes", "kept and is used in another"),
        (700, "eager-failed", "touched memory that is not there"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "eager-failed", "(700)"),
    ],
)
def test_codes_texts_and_exceptions_are_explained(problem, name, says):
    found = explanation_of(problem)
    assert found is not None
    assert found.rule == name
    assert says in found.meaning
    assert found.remedy.endswith(".")


@pytest.mark.parametrize("problem", [1, 9000, "division by zero", RuntimeError("shape mismatch")])
def test_what_is_not_known_is_not_explained(problem):
    assert explanation_of(problem) is None


def test_every_explanation_names_a_rule():
    for explanation in EXPLANATIONS:
        assert rule(explanation.rule).name == explanation.rule
        assert explanation.source
