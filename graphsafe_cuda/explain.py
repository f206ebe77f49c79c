"""What CUDA's graph errors mean in this kind of code, and what to do.

The codes are those of cudaError_t (CUDA runtime documentation, section "Error handling").
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["EXPLANATIONS", "Explanation", "explanation_of"]


@dataclass(frozen=True)
class Explanation:
    """``pattern`` finds the error in a text; ``rule`` is the rule it breaks; then its meaning and the remedy."""

    pattern: str
    rule: str
    meaning: str
    remedy: str


EXPLANATIONS = (
    Explanation(
        r"\b900\b|StreamCaptureUnsupported|operation not permitted when stream is capturing",
        "not-capturable",
        "cudaErrorStreamCaptureUnsupported (900): an operation that a capturing stream does not permit: a synchronisation, "
        "an allocation outside the caching allocator, a copy from pageable memory, or work on the default stream.",
        "Move it before the capture. Usual sources: .item() or .cpu(), a tensor made from a list, a library's first call "
        "(cuBLAS, cuDNN, NCCL) that makes a workspace, a kernel compiled or tuned for the first time.",
    ),
    Explanation(
        r"\b901\b|StreamCaptureInvalidated|previous error during capture",
        "not-capturable",
        "cudaErrorStreamCaptureInvalidated (901): an earlier call already broke this capture; the call that reports it is "
        "not the cause.",
        "Look for the first error, or for another thread that called CUDA during the capture.",
    ),
    Explanation(
        r"\b90[2-6]\b|StreamCapture(Merge|Unmatched|Unjoined|Isolation|Implicit)",
        "not-capturable",
        "cudaErrorStreamCapture* (902 to 906): streams were forked, joined or mixed in a way that a capture cannot record.",
        "Join every stream that the body uses back to the capturing stream (stream.wait_stream), and use no default stream.",
    ),
    Explanation(
        r"called a synchronizing CUDA operation",
        "host-read",
        "The body made the host wait for the device.",
        "Keep the value on the device, or read it before the capture.",
    ),
    Explanation(
        r"out of memory|CUDA error: 2\b",
        "eager-failed",
        "cudaErrorMemoryAllocation (2): the device has no memory left for the graph's pool.",
        "Use a smaller bucket, share the pool between graphs, or free other tensors; the price of a bucket is known before "
        "the capture (arena.price(), graphsafe price).",
    ),
    Explanation(
        r"\b700\b|illegal memory access",
        "eager-failed",
        "cudaErrorIllegalAddress (700): a kernel touched memory that is not there. The process cannot use CUDA any more.",
        "Run the body eagerly under compute-sanitizer. Under replay, look for a tensor that died or was moved after the "
        "capture, and for indices beyond the bucket.",
    ),
)


def explanation_of(problem: BaseException | str | int) -> Explanation | None:
    """The first explanation that fits an error, its text, or its code."""
    text = f"CUDA error: {problem}" if isinstance(problem, int) else str(problem)
    return next((e for e in EXPLANATIONS if re.search(e.pattern, text)), None)
