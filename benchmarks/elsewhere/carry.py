"""Carries what flash-linear-attention's autotuners chose at some shapes to its calls at others.

    python benchmarks/elsewhere/carry.py chosen.tar.xz choices bench:fla-unguarded:full,ascendc

Its choices are keyed by head counts, widths and chunks, so that a run over many head counts times every choice of every
kernel anew, and compiles it first. It has a store for that (``FLA_CONFIG_DIR``, ``FLA_CACHE_MODE``), which this fills:

1. Every key that a call of the tasks asks for has an entry, ``choices/KERNEL.json``. With ``FLA_CONFIG_DIR=choices
   FLA_CACHE_MODE=strict`` a call takes it, and neither times nor compiles another.
2. A key that was timed keeps its own choice. Another takes that of a timed key whose named values differ in numbers
   alone: one of the same tensors' dtypes goes first, then one that the same operator asks for, then the nearest, by the
   sum of ``|log2(a / b)|``.
3. A key with no such neighbour has no entry: the library times its choices when it is called. It is told here.
4. ``choices/about.txt`` says how many were timed and how many carried; the report of ``graphsafe bench`` quotes it.

Nothing is launched and nothing compiled here: it runs on a pretended GPU, on any machine.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import tarfile
from pathlib import Path
from typing import Any

import pretended_gpu

Key = tuple[Any, ...]
Found = dict[tuple[str, str], Any]
"""By kernel and key, the key as JSON: as it is in files."""


def written(key: Any) -> str:
    """A key as the library's files have it."""
    return json.dumps(key, separators=(",", ":"), sort_keys=True)


def timed(pack: Path) -> Found:
    """The choice of each kernel and key that a device has timed."""
    from pack import CHOICES, refuse_pretended

    found: Found = {}
    with tarfile.open(pack) as tar:
        for member in tar.getmembers():
            if not member.name.endswith(CHOICES):
                continue
            data = tar.extractfile(member).read()
            refuse_pretended(member.name, data)
            result = json.loads(data)
            config, _ = min(result["configs_timings"], key=lambda pair: pair[1])
            found[Path(member.name).name.removesuffix(CHOICES), written(result["key"])] = config
    return found


def asked(names: list[str]) -> dict[tuple[str, str], set[str]]:
    """Kernel and key of every call of the tasks, and the operators that ask for it."""
    import tasks
    from fla.ops.utils.cache import AutotuneKey, CachedAutotuner
    from triton.runtime.jit import JITFunction

    found: dict[tuple[str, str], set[str]] = {}
    operator = ""

    def note(self: Any, *args: Any, **kwargs: Any) -> None:
        if len(self.configs) > 1:
            key = AutotuneKey.build(self.arg_names, self.keys, args, kwargs)
            found.setdefault((self.kernel_name, written(key.autotune_key)), set()).add(operator)

    CachedAutotuner.run = note
    JITFunction.run = lambda self, *args, **kwargs: None
    for task in names:
        for label, call in tasks.calls(task, "cpu"):
            operator = label.split()[2].split("-")[0]
            call()
    return found


def parts(key: str) -> tuple[list[Any], list[str]]:
    """A key's named values, and the dtypes of the call's tensors, which the library appends."""
    values = json.loads(key)
    return [v for v in values if not is_dtype(v)], [v for v in values if is_dtype(v)]


def is_dtype(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("torch.")


def distance(one: list[Any], other: list[Any]) -> float:
    """How far apart two lists of named values are: infinite where they differ in more than numbers."""
    if len(one) != len(other):
        return math.inf
    return sum(map(_apart, one, other))


def _apart(a: Any, b: Any) -> float:
    if a == b and type(a) is type(b):
        return 0.0
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (a, b))
    return abs(math.log2(a / b)) if numbers and min(a, b) > 0 else math.inf


def carried(known: Found, users: dict[tuple[str, str], set[str]], kernel: str, key: str) -> Any:
    """The choice for a key, or None; see requirement 2. Keys at the same distance: the first in order of their text."""
    if (kernel, key) in known:
        return known[kernel, key]
    mine, (values, dtypes) = users[kernel, key], parts(key)
    near = []
    for name, other in known:
        if name == kernel and (apart := distance(values, parts(other)[0])) < math.inf:
            near.append((parts(other)[1] != dtypes, not mine & users.get((name, other), set()), apart, other))
    return known[kernel, min(near)[-1]] if near else None


def main() -> None:
    source, folder, *names = sys.argv[1:]
    pretended_gpu.install(own=False)
    known, users = timed(Path(source)), asked(names)
    entries: dict[str, dict[str, Any]] = {}
    own = missing = 0
    for kernel, key in sorted(users):
        config = carried(known, users, kernel, key)
        if config is None:
            missing += 1
            print(f"no choice was timed that {kernel} could take at {key}")
            continue
        own += (kernel, key) in known
        entries.setdefault(kernel, {})[hashlib.md5(key.encode()).hexdigest()] = {
            "autotune_key": json.loads(key), "config": config}  # fmt: skip
    Path(folder).mkdir(parents=True, exist_ok=True)
    for kernel, listed in entries.items():
        text = json.dumps({"kernel_name": kernel, "autotune_entries": listed}, indent=1)
        Path(folder, f"{kernel}.json").write_text(text, encoding="utf-8")
    count = sum(map(len, entries.values()))
    about = f"{own} of {count + missing} keys timed on the device, {count - own} carried from the nearest head counts"
    about += f", {missing} left to it" if missing else ""
    Path(folder, "about.txt").write_text(about, encoding="utf-8")
    print(about)


if __name__ == "__main__":
    main()
