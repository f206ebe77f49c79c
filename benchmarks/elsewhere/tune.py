"""Lets flash-linear-attention choose among its compiled choices, alone on the GPU, and packs what it chose.

    TRITON_CACHE_DIR=cache python benchmarks/elsewhere/tune.py chosen.tar.xz gdn:fla kda:fla bench:fla:peers

After ``pack.py unpack``. The pack holds the choices alone and is written anew after each task, so that a run that a
time limit ends is not lost. "compiled here" is 0 where the unpacked cache was complete.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {"FLA_CACHE_RESULTS": "1", "FLA_DISABLE_BACKEND_DISPATCH": "1"}  # read at import

import tasks
import torch
from pack import pack
from peers import choose_briefly
from triton import knobs
from triton.runtime.autotuner import Autotuner


def main() -> None:
    target, *names = sys.argv[1:]
    began, timed, fresh = time.time(), [0], list[str]()
    bench = Autotuner._bench

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        timed[0] += 1
        return bench(self, *args, **kwargs)

    def listener(*, src: Any, cache_hit: bool, **more: Any) -> None:
        if not cache_hit:
            fresh.append(src.name)

    Autotuner._bench, knobs.compilation.listener = counted, listener
    choose_briefly()
    for task in names:
        for _, call in tasks.calls(task, "cuda"):
            call()
        del call
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        count = pack(Path(knobs.cache.dir), Path(target), choices_only=True)
        print(f"[{time.time() - began:4.0f}s] {task}: {timed[0]} choices timed, {count} results packed, "
              f"{len(fresh)} compiled here: {', '.join(sorted(set(fresh)))}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
