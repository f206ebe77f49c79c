"""What the errors of CANN, torch_npu and Triton-Ascend mean in code that captures graphs, and what to do.

The codes are those of aclError (CANN, ``acl/error_codes/rt_error_codes.h``). Some messages of torch_npu carry no code.
"""

from __future__ import annotations

from graphsafe import explanations
from graphsafe.explanations import Explanation, first

__all__ = ["EXPLANATIONS", "Explanation", "explanation_of"]

_CANN = "CANN, aclError (acl/error_codes/rt_error_codes.h)"
_TORCH_NPU = "torch_npu, messages of its NPUGraph, queue and operators"
_COMPILER = "Triton-Ascend and the Ascend compiler"
_HCCL = "HCCL, hcclResult (hccl/hccl_types.h); CANN troubleshooting, error codes EI and EJ"
_MOVE = "Move it before the capture: usual sources are .item(), .cpu(), a tensor made from a list, torch.npu.synchronize()."
_JOIN = "Join every stream that the body uses back to the capturing stream (stream.wait_stream) before the block ends."
_REPLACE = "Run the body eagerly with ASCEND_LAUNCH_BLOCKING=1 to find the operator; a process in which this happened is of no more use."

EXPLANATIONS = (
    Explanation(
        r"called a synchronizing NPU operation",
        "host-read",
        "The body made the host wait for the device.",
        "Keep the value on the device, or read it before the capture.",
        _TORCH_NPU,
    ),
    Explanation(
        r"\b107027\b",
        "not-capturable",
        "ACL_ERROR_RT_STREAM_CAPTURED (107027): a stream was synchronised, queried or given a graph to replay while it captures, "
        "or the device was synchronised while any stream captures.",
        _MOVE,
        _CANN,
    ),
    Explanation(
        r"\b107028\b",
        "not-capturable",
        "ACL_ERROR_RT_EVENT_CAPTURED (107028): the host waited for, or asked about, an event that was recorded inside a capture.",
        "Wait on the device instead (stream.wait_event), or record the event outside the capture.",
        _CANN,
    ),
    Explanation(
        r"\b107030\b",
        "not-capturable",
        "ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT (107030): a synchronous copy or fill during a capture. In the mode 'global' one "
        "made by any thread of the process is refused.",
        _MOVE,
        _CANN,
    ),
    Explanation(
        r"\b107041\b",
        "not-capturable",
        "ACL_ERROR_RT_CAPTURE_MODE_BLOCK_ASYNC (107041): an asynchronous copy that uses pageable memory, and so would block, was "
        "made while another stream captures.",
        "Copy from pinned memory (tensor.pin_memory()), or wait with the copy until the capture has ended.",
        _CANN,
    ),
    Explanation(
        r"\b107000\b|process exits for this inner error",
        "not-capturable",
        "ACL_ERROR_RT_PARAM_INVALID (107000): a parameter that the runtime does not accept; inside a capture this is usually a "
        "copy from pageable memory. It is reported by the task queue, which works no more in this process.",
        "Copy before the capture, or from pinned memory; then start the process anew.",
        _CANN,
    ),
    Explanation(
        r"\b107024\b|\b107025\b",
        "not-capturable",
        "ACL_ERROR_RT_CAPTURE_DEPENDENCY or _STREAM_UNJOINED (107024, 107025): a stream that was drawn into the capture was not "
        "joined back.",
        _JOIN,
        _CANN,
    ),
    Explanation(
        r"\b107026\b|\b107029\b|\b107036\b|\b107038\b|Capture must end on the same stream",
        "not-capturable",
        "ACL_ERROR_RT_MODEL_CAPTURED, _STREAM_NOT_CAPTURED, _CAPTURE_UNMATCHED, _CAPTURE_WRONG_THREAD (107026, 107029, 107036, "
        "107038): a capture has to end on the stream and on the thread that began it, once.",
        "Leave the current stream and the thread as they are at the ends of the block.",
        _CANN,
    ),
    Explanation(
        r"\b107031\b|non-default stream",
        "not-capturable",
        "ACL_ERROR_RT_STREAM_CAPTURE_IMPLICIT (107031): the default stream was used by a capture; it cannot take part in one.",
        "Use the runtime's capture(), which runs on a side stream, and no default stream inside it.",
        _CANN,
    ),
    Explanation(
        r"\b107032\b",
        "concurrent-capture",
        "ACL_ERROR_STREAM_CAPTURE_CONFLICT (107032): streams that depend on each other began captures at the same time.",
        "One capture at a time, and no capture by code outside this project during it.",
        _CANN,
    ),
    Explanation(
        r"\b507903\b",
        "not-capturable",
        "ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED (507903): an earlier call already broke this capture; the call that reports it "
        "is not the cause.",
        "Look for the first error, or for another thread that used the device during the capture.",
        _CANN,
    ),
    Explanation(
        r"Cannot run aclop operators|aclop.*captur",
        "not-capturable",
        "An aclop operator (compiled online) was called; only aclnn operators can be recorded.",
        "Use torch.npu.set_compile_mode(jit_compile=False), keep tensors in the ND format "
        "(torch.npu.config.allow_internal_format = False), or choose another operator.",
        _TORCH_NPU,
    ),
    Explanation(
        r"\b207001\b|\b207018\b|NPU out of memory",
        "eager-failed",
        "ACL_ERROR_RT_MEMORY_ALLOCATION or _DEVICE_OOM (207001, 207018): the device has no memory left.",
        "Use a smaller bucket, share the pool between graphs, or free other tensors; the price of a bucket is known before "
        "the capture (arena.price(), graphsafe price).",
        _CANN,
    ),
    Explanation(
        r"\b207008\b|\b207010\b",
        "not-capturable",
        "ACL_ERROR_RT_NO_STREAM_RESOURCE or _NO_MODEL_RESOURCE (207008, 207010): each captured graph takes streams of the device, "
        "of which there are about two thousand.",
        "Close graphs that are no longer used, or capture fewer buckets.",
        _CANN,
    ),
    Explanation(
        r"\b507011\b",
        "eager-failed",
        "ACL_ERROR_RT_MODEL_EXECUTE (507011): a task of a replayed graph failed. An address that is no longer valid, an index beyond "
        "its tensor, and a kernel's own fault all show as this.",
        "Hold every tensor the graph reads for as long as the graph, then run the same inputs eagerly to find the kernel.",
        _CANN,
    ),
    Explanation(
        r"\b507014\b|\b507034\b|\b507046\b|\b507047\b",
        "eager-failed",
        "ACL_ERROR_RT_AICORE_TIMEOUT, _VECTOR_CORE_TIMEOUT, _STREAM_SYNC_TIMEOUT or _EVENT_SYNC_TIMEOUT (507014, 507034, 507046, "
        "507047): the device did not finish in time.",
        "Look for a kernel that waits for another one (locks, cross-core synchronisation) or for an event nobody records.",
        _CANN,
    ),
    Explanation(
        r"\b50701[56]\b|\b50703[56]\b|\b50704[2-5]\b",
        "eager-failed",
        "ACL_ERROR_RT_AICORE_EXCEPTION or _VECTOR_CORE_EXCEPTION (507015, 507016, 507035, 507036, 507042 to 507045): a kernel failed "
        "on the device, most often by touching memory that is not there.",
        _REPLACE,
        _CANN,
    ),
    Explanation(
        r"ub overflow|UB overflow|cbuf overflow|L0[ABC] overflow|cc overflow",
        "eager-failed",
        "The Ascend compiler found that a kernel's tiles do not fit an on-chip memory (the unified buffer has 192 KiB on 910B).",
        "Use smaller tiles.",
        _COMPILER,
    ),
    Explanation(
        r"grid should be less than 65536|more than 65535 programs",
        "unsupported",
        "A kernel has more programs in its grid than the 65,535 that the device takes, all three axes multiplied.",
        "Let each program walk over several tasks.",
        _COMPILER,
    ),
    Explanation(
        r"\bEI0002\b|Notify register times out|notify wait.*time ?out",
        "collective",
        "HCCL EI0002: a rank waited in a collective for another that did not come in time: ranks that capture, replay or turn "
        "eager out of step, ranks with other sizes or another number of steps, or one that failed first.",
        "Find the rank that did something else; the first error in any rank's log is the cause. Run collectives between "
        "replays, in the same order on all ranks. HCCL_EXEC_TIMEOUT sets how long a rank waits.",
        _HCCL,
    ),
    Explanation(
        r"\bEI0005\b",
        "collective",
        "HCCL EI0005: ranks called a collective with parameters that do not agree: another operation, data type, count or root.",
        "Give all ranks the same bucket, so that sizes are the same everywhere, and call the same collectives in the same order.",
        _HCCL,
    ),
    Explanation(
        r"\bEI0006\b|\bEI0015\b|\bEJ0003\b|socket (establish )?timeout|Getting socket times out|HCCL_E_TCP_CONNECT",
        "collective",
        "HCCL EI0006, EI0015, EJ0003: ranks did not connect: one did not start or left, a port is taken, or addresses do not fit.",
        "See that all ranks run, with the same MASTER_ADDR and MASTER_PORT, a device each (ASCEND_RT_VISIBLE_DEVICES) and free "
        "ports (HCCL_IF_BASE_PORT); HCCL_CONNECT_TIMEOUT sets how long they wait.",
        _HCCL,
    ),
    Explanation(
        r"\bEI0013\b|[Ee]rror ROCE C[QO]E|error cqe status|HCCL_E_REMOTE",
        "collective",
        "HCCL EI0013, HCCL_E_REMOTE: a message between ranks was not answered: the other process has ended, or the link is down.",
        "See whether the other rank ended first, and why; else check the network between the two devices.",
        _HCCL,
    ),
    Explanation(
        r"\bHCCL error\b|\bHCCL function error\b|\bHccl[A-Z]\w+, error code is \d+|\bHCCL_E_[A-Z_]+",
        "collective",
        "A call of HCCL failed. Its result tells: 1 or 2 a parameter, 3 memory, 5 not supported, 7 a resource taken, 9 a rank that "
        "did not come in time, 11 to 14 the network, 15 or 16 the device's own runtime.",
        "Look for the first error of any rank. A collective inside a capture is refused by this project (GS601): run it between "
        "replays.",
        _HCCL,
    ),
)


def explanation_of(problem: BaseException | str | int) -> Explanation | None:
    """The first explanation that fits an error, its text, or its code: this device's, else the core's."""
    return first(EXPLANATIONS, str(problem)) or explanations.explanation_of(problem)
