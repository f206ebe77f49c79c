"""Compiles for an H200, on a machine without a GPU, what the benchmarks' arms launch: every kernel, every choice.

    TRITON_CACHE_DIR=cache python benchmarks/elsewhere/compile.py gdn:graphsafe kda:fla:32/8192x1 bench:fla:peers

Tasks are those of ``tasks.py``. Several processes may fill one cache. A second call compiles nothing that the first
did, which shows that it is complete. Exit code 1 if a call fails; choices that do not compile are told, as a device
would pass over them.
"""

from __future__ import annotations

import sys
import time
import traceback

import pretended_gpu

pretended_gpu.install(own=any("graphsafe" in task.split(":")[1:2] for task in sys.argv[1:]))
import tasks  # noqa: E402


def main() -> None:
    began, wrong = time.time(), 0
    for task in sys.argv[1:]:
        if task.split(":")[1:2] in (["flashqla"], ["flash_qla"]):
            pretended_gpu.compile_tilelang_only()
        for label, call in tasks.calls(task, "cpu"):
            try:
                call()
            except Exception:  # the other calls are worth their time; told here and by the exit code
                traceback.print_exc()
                wrong += 1
            print(f"[{time.time() - began:5.0f}s] {label}: {len(pretended_gpu.compiled)} compiled", flush=True)
    for choice in sorted(set(pretended_gpu.failed)):
        print("does not compile:", choice)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
