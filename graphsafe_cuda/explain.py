"""What CUDA's graph errors mean in this kind of code, and what to do.

The codes are those of cudaError_t (CUDA runtime documentation, section "Error handling").
"""

from __future__ import annotations

from graphsafe import explanations
from graphsafe.explanations import Explanation, first

__all__ = ["EXPLANATIONS", "Explanation", "explanation_of"]

_CUDA = "CUDA Runtime API, cudaError_t (driver_types.h)"

_NCCL = "NCCL, ncclResult_t; torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp"

EXPLANATIONS = (
    Explanation(  # before the codes: its text holds numbers
        r"out of memory|CUDA error: 2\b",
        "eager-failed",
        "cudaErrorMemoryAllocation (2): the device has no memory left for the graph's pool.",
        "Use a smaller bucket, share the pool between graphs, or free other tensors; the price of a bucket is known before "
        "the capture (arena.price(), graphsafe price).",
        _CUDA,
    ),
    Explanation(
        r"\b900\b|StreamCaptureUnsupported|operation not permitted when stream is capturing",
        "not-capturable",
        "cudaErrorStreamCaptureUnsupported (900): an operation that a capturing stream does not permit: a synchronisation, "
        "an allocation outside the caching allocator, a copy from pageable memory, or work on the default stream.",
        "Move it before the capture. Usual sources: .item() or .cpu(), a tensor made from a list, a library's first call "
        "(cuBLAS, cuDNN, NCCL) that makes a workspace, a kernel compiled or tuned for the first time.",
        _CUDA,
    ),
    Explanation(
        r"\b901\b|StreamCaptureInvalidated|previous error during capture",
        "not-capturable",
        "cudaErrorStreamCaptureInvalidated (901): an earlier call already broke this capture; the call that reports it is "
        "not the cause.",
        "Look for the first error, or for another thread that called CUDA during the capture.",
        _CUDA,
    ),
    Explanation(
        r"\b902\b|StreamCaptureMerge|merge of (two|separate) .*captures?",
        "not-capturable",
        "cudaErrorStreamCaptureMerge (902): a stream of one capture was made to wait for another capture.",
        "One capture at a time, each with streams of its own; wait between captures, not inside them.",
        _CUDA,
    ),
    Explanation(
        r"\b903\b|StreamCaptureUnmatched|capture was not (initiated|begun) in this stream|not ended in the same stream",
        "not-capturable",
        "cudaErrorStreamCaptureUnmatched (903): the capture was ended on another stream than the one that began it.",
        "Leave the current stream as it is at both ends of the block: use 'with torch.cuda.stream(s)', not set_stream.",
        _CUDA,
    ),
    Explanation(
        r"\b904\b|StreamCaptureUnjoined|unjoined work",
        "not-capturable",
        "cudaErrorStreamCaptureUnjoined (904): a stream that the body drew into the capture was not joined back to it.",
        "Join every stream that the body uses back to the capturing stream (stream.wait_stream) before the block ends.",
        _CUDA,
    ),
    Explanation(
        r"\b905\b|StreamCaptureIsolation|dependency created on uncaptured work",
        "not-capturable",
        "cudaErrorStreamCaptureIsolation (905): the capture was made to wait for work outside it: an event recorded, or a "
        "stream used, before the capture began.",
        "Wait for that work before the capture; inside it, wait only for events that were recorded inside.",
        _CUDA,
    ),
    Explanation(
        r"\b906\b|StreamCaptureImplicit|legacy stream depend",
        "not-capturable",
        "cudaErrorStreamCaptureImplicit (906): something used the default stream while a capture was running; it waits for all "
        "other streams, which a capture cannot record.",
        "Use no default stream inside the body, nor in a library that it calls; other threads must wait until the capture ends.",
        _CUDA,
    ),
    Explanation(
        r"\b907\b|cudaErrorCapturedEvent|event (which was )?last recorded in a capturing stream",
        "not-capturable",
        "cudaErrorCapturedEvent (907): the host waited for, or asked about, an event that was recorded inside a capture.",
        "Wait on the device (stream.wait_event), or record the event outside the capture.",
        _CUDA,
    ),
    Explanation(
        r"\b908\b|StreamCaptureWrongThread|thread-local capture sequence from another thread",
        "not-capturable",
        "cudaErrorStreamCaptureWrongThread (908): a capture was ended on another thread than the one that began it.",
        "Begin and end the capture in one block on one thread.",
        _CUDA,
    ),
    Explanation(
        r"Cannot copy between CPU and CUDA tensors during CUDA graph capture",
        "not-capturable",
        "The body copies between the host and the device through pageable memory: a tensor made from a list, .cpu(), or a "
        "tensor that was left on the CPU.",
        "Make the tensor before the capture, keep it on the device, or bind it as an input.",
        "pytorch pull request 172156",
    ),
    Explanation(
        r"Cannot call CUDAGeneratorImpl::\w+ during CUDA graph capture",
        "rng-state",
        "The body asked for the seed or the state of a CUDA generator, or set it: torch refuses that while the device captures.",
        "Seed, save and restore before the capture; checkpoint with preserve_rng_state=False.",
        "aten/src/ATen/cuda/CUDAGeneratorImpl.cpp",
    ),
    Explanation(
        r"during CUDA graph capture\. If you need this call to be captured",
        "not-capturable",
        "The body called a function of torch that it does not let a capture record; the message names it.",
        "Call it before the capture, or use another function.",
        "aten/src/ATen/cuda/CUDAGraphsUtils.cuh, assertNotCapturing",
    ),
    Explanation(
        r"Offset increment outside graph capture encountered unexpectedly",
        "capture-leftover",
        "A generator of the device is still in the state of a capture that failed, so nothing eager can draw from it.",
        "Capture with runtime.capture(), which gives generators back after a failure; otherwise start the process anew.",
        "aten/src/ATen/cuda/CUDAGeneratorImpl.cpp",
    ),
    Explanation(
        r"CUDA graphs must be captured on a non-default stream",
        "not-capturable",
        "The capture was begun on the default stream, which cannot be captured.",
        "Use runtime.capture(), which runs on a side stream.",
        "aten/src/ATen/cuda/CUDAGraph.cpp",
    ),
    Explanation(
        r"called a synchronizing CUDA operation",
        "host-read",
        "The body made the host wait for the device.",
        "Keep the value on the device, or read it before the capture.",
        "torch.cuda.set_sync_debug_mode",
    ),
    Explanation(
        r"\b700\b|illegal memory access",
        "eager-failed",
        "cudaErrorIllegalAddress (700): a kernel touched memory that is not there. The process cannot use CUDA any more.",
        "Run the body eagerly under compute-sanitizer. Under replay, look for a tensor that died or was moved after the "
        "capture, and for indices beyond the bucket.",
        _CUDA,
    ),
    Explanation(
        r"Watchdog caught collective operation timeout|NCCL.*tim(ed |e)out|collective operation timeout",
        "collective",
        "A collective of NCCL waited for a rank that did not come: ranks that capture, replay or turn eager out of step, or a "
        "rank that failed first.",
        "Find the rank that did something else (TORCH_NCCL_TRACE_BUFFER_SIZE, the first error in any log). Run collectives "
        "between replays, in the same order on all ranks.",
        _NCCL,
    ),
    Explanation(
        r"ncclRemoteError|ncclInternalError|ncclSystemError|ncclUnhandledCudaError|NCCL error|NCCL communicator was aborted",
        "collective",
        "A collective of NCCL failed: a peer left, the network or shared memory between ranks failed, or CUDA failed in one of "
        "them first.",
        "Look for the first error of any rank, with NCCL_DEBUG=WARN; a rank that failed in a capture fails the others here.",
        _NCCL,
    ),
)


def explanation_of(problem: BaseException | str | int) -> Explanation | None:
    """The first explanation that fits an error, its text, or its code: CUDA's, then the core's."""
    text = f"CUDA error: {problem}" if isinstance(problem, int) else str(problem)
    return first(EXPLANATIONS, text) or explanations.explanation_of(text)
