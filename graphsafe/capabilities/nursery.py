"""A process that has imported everything and touched no device, and forks one child for each probe.

Requirements
------------
1. Importing torch, Triton and the kernels takes seconds and is the same for every probe: it is done once, by one
   process, which forks as many children at a time as it was asked for. A probe runs in a child of its own, so that one
   that poisons its process poisons no other.
2. A child that does not end in time is killed with everything it started; so is every child when this process ends, or
   when the one that asked has gone. How a child ended is told: the value it found, a signal, or an exit code with the
   last words on standard error.
3. No device is started, no thread is begun and no adapter is loaded before the fork. For a CPU no kernel is defined
   either: a probe asks for Triton's interpreter first.
4. The request is one line of JSON on standard input, answers are JSON lines on a pipe of their own, whose number is the
   argument: libraries print on standard output.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["answers", "main", "preload"]

_LOOK_EVERY = 0.02
_FEW = 8


@dataclass
class _Child:
    row: str
    pid: int
    folder: Path
    begin: float

    @property
    def found(self) -> Path:
        return self.folder / f"{self.row}.json"

    @property
    def said(self) -> Path:
        return self.folder / f"{self.row}.stderr"


def answers(runtime: str, rows: Sequence[str], time_limit: float, jobs: int) -> Generator[dict[str, Any], None, None]:
    """Probe ``rows``, ``jobs`` at a time, each in a child of this process; answers come as the children end.

    An answer has ``row``, ``seconds``, and ``found``, what the probe found, or ``ended``, how its process ended.
    """
    waiting, running = deque(rows), list[_Child]()
    asker = os.getppid()
    with tempfile.TemporaryDirectory(prefix="graphsafe-doctor-") as folder:
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    running.append(_start(runtime, waiting.popleft(), Path(folder)))
                for child in list(running):
                    told = _end_of(child, time_limit)
                    if told is not None:
                        running.remove(child)
                        yield {"row": child.row, "seconds": time.monotonic() - child.begin, **told}
                if os.getppid() != asker:
                    return
                time.sleep(_LOOK_EVERY)
        finally:
            for child in running:
                _kill(child.pid)


def _start(runtime: str, row: str, folder: Path) -> _Child:
    child = _Child(row, 0, folder, time.monotonic())
    child.pid = os.fork()
    if child.pid == 0:
        _be_the_child(runtime, child)
    return child


def _be_the_child(runtime: str, child: _Child) -> None:
    """Run the probe and leave, whatever happens."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        faulthandler.disable()  # it would write to where the parent told it
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        os.dup2(os.open(child.said, os.O_WRONLY | os.O_CREAT), 2)
        from graphsafe.capabilities.child import found_by

        text = json.dumps(found_by(runtime, child.row))
        partial = child.found.with_suffix(".partial")
        partial.write_text(text, encoding="utf-8")
        partial.rename(child.found)
        code = 0
    except BaseException:  # the words go to the file that the parent reads
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _end_of(child: _Child, time_limit: float) -> dict[str, Any] | None:
    """What is to be told of a child, or None while it runs."""
    pid, status = os.waitpid(child.pid, os.WNOHANG)
    if not pid:
        if time.monotonic() - child.begin < time_limit:
            return None
        _kill(child.pid)
        return {"ended": f"did not end within {time_limit:g} seconds and was killed"}
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # what it started and left behind
    if child.found.exists():
        return {"found": json.loads(child.found.read_text(encoding="utf-8"))}
    code = os.waitstatus_to_exitcode(status)
    tail = " ".join(child.said.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:])
    how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return {"ended": f"the process {how}: {tail}" if tail else f"the process {how}"}


def _kill(pid: int) -> None:
    for kill in (os.killpg, os.kill):  # the group exists once the child has made it
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def preload(runtime: str, rows: int) -> None:
    """Import what the children need (of a few ``rows``, what all need) and keep it out of their collections."""
    import torch

    from graphsafe.capabilities.probe import probes
    from graphsafe.testing.poison import poisoned_memory
    from graphsafe_kernels import backend

    probes()
    with poisoned_memory():
        torch.empty(1)  # the first operator under a dispatch mode imports a third of torch
    needed = {"graphsafe.capabilities.child", "torch.profiler"}
    if rows > _FEW:
        needed |= {"graphsafe_kernels.layers", *backend.REFERENCE.values()}
    if rows > _FEW and runtime != "cpu" and importlib.util.find_spec("triton") is not None:
        # not probe_kernels: some versions of Triton start a driver where a kernel that is tuned is defined
        needed |= {"torch._dynamo", "triton.compiler", *backend.TRITON.values()}
    for module in sorted(needed):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection would go through all of torch, in every child, and copy its pages


def main(told: int) -> None:
    """Read the request and answer it on the file descriptor ``told``."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the children end too
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the asker hears of it, and ends this process
    request = json.loads(sys.stdin.readline())
    preload(request["runtime"], len(request["rows"]))
    with open(told, "w", encoding="utf-8") as out, contextlib.closing(answers(**request)) as answered:
        for answer in answered:
            print(json.dumps(answer), file=out, flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


if __name__ == "__main__":
    main(int(sys.argv[1]))
