"""A process that has imported everything and touched no device, and forks one child for each probe.

Requirements
------------
1. Importing torch takes seconds and is the same for every probe: it is done once. A probe runs in a child of its own,
   so that one that poisons its process poisons no other.
2. A child that does not end in time is killed with everything it started. How a child ended is told: the value it
   found, a signal, or an exit code with the last words on standard error.
3. No device is started, no thread is begun and no adapter is loaded before the fork.
4. Requests are JSON lines on standard input, answers JSON lines on a pipe of their own, whose number is the argument:
   libraries print on standard output. The process ends with its input.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

__all__ = ["ask", "main"]

_LOOK_EVERY = 0.02


def ask(runtime: str, row: str, time_limit: float) -> dict[str, Any]:
    """``{"found": ...}`` of one probe in a child of this process, or ``{"ended": how}``."""
    with tempfile.TemporaryDirectory(prefix="graphsafe-doctor-") as folder:
        found, said = Path(folder) / "found.json", Path(folder) / "stderr"
        child = os.fork()
        if child == 0:
            _be_the_child(runtime, row, found, said)
        code = _wait(child, time_limit)
        if code is None:
            return {"ended": f"did not end within {time_limit:g} seconds and was killed"}
        if found.exists():
            return {"found": json.loads(found.read_text(encoding="utf-8"))}
        tail = " ".join(said.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:])
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return {"ended": f"the process {how}: {tail}" if tail else f"the process {how}"}


def _be_the_child(runtime: str, row: str, found: Path, said: Path) -> None:
    """Run the probe and leave, whatever happens."""
    code = 1
    try:
        os.setsid()
        faulthandler.disable()  # it would write to where the parent told it
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
        from graphsafe.capabilities.child import found_by

        text = json.dumps(found_by(runtime, row))
        partial = found.with_suffix(".partial")
        partial.write_text(text, encoding="utf-8")
        partial.rename(found)
        code = 0
    except BaseException:  # the words go to the file that the parent reads
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _wait(child: int, time_limit: float) -> int | None:
    """The exit code of the child (negative: a signal), or None if it had to be killed."""
    end = time.monotonic() + time_limit
    try:
        while time.monotonic() < end:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(_LOOK_EVERY)
    except KeyboardInterrupt:
        _kill(child)
        raise
    _kill(child)
    return None


def _kill(child: int) -> None:
    for kill in (os.killpg, os.kill):  # the group exists once the child has made it
        with contextlib.suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def main(answers: int) -> None:
    """Answer requests, on the file descriptor ``answers``, until the input ends."""
    import torch

    import graphsafe.capabilities.child  # noqa: F401  (what every child needs)
    from graphsafe.testing.poison import poisoned_memory

    with poisoned_memory():
        torch.empty(1)  # the first operator under a dispatch mode imports a third of torch
    with open(answers, "w", encoding="utf-8") as told:
        for line in sys.stdin:
            print(json.dumps(ask(**json.loads(line))), file=told, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
