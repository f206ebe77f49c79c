"""Packs of Triton's cache what it needs to load kernels, and unpacks it where they are timed.

    python benchmarks/elsewhere/pack.py pack cache cache.tar.xz      # where they were compiled
    python benchmarks/elsewhere/pack.py unpack cache.tar.xz cache    # where they are timed; choices on the way back
    python benchmarks/elsewhere/pack.py keys                         # what this machine's keys are made of

Requirements
------------
1. A pack holds binaries, their metadata and groups, and what autotuners chose on a device; no intermediate form.
2. A pretended result of an autotuner is never packed and never unpacked: it is refused, with its file's name.
3. Triton's keys are made of its own files, the assembler, the options and the environment. A pack says what they were;
   where they are others, nothing in it would be found, and ``unpack`` refuses and names what differs.
4. Groups name files by their place: ``unpack`` writes the new one. What lies there already is kept.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import tarfile
from pathlib import Path
from typing import Any

from pretended_gpu import PRETENDED, TARGET

CHOICES, GROUP, KEYS = ".autotune.json", "__grp__", "keys.json"


def keys(target: Any = TARGET) -> dict[str, str]:
    """What every cache key for ``target`` is made of, besides the kernel and its arguments."""
    import triton
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.compiler.compiler import make_backend

    try:
        from triton.runtime.cache import triton_key
    except ImportError:  # Triton 3.4
        from triton.compiler.compiler import triton_key

    backend = make_backend(target)
    return {"triton": f"{triton.__version__} {hashlib.sha256(triton_key().encode()).hexdigest()[:16]}",
            "assembler": backend.hash(), "options": backend.parse_options({}).hash(),
            "environment": str(sorted(get_cache_invalidating_env_vars().items()))}  # fmt: skip


def refuse_pretended(name: str, data: bytes) -> None:
    """SystemExit if an autotuner's result was not timed on a device."""
    if not name.endswith(CHOICES):
        return
    timings = [found if isinstance(found, list) else [found] for _, found in json.loads(data)["configs_timings"]]
    if {t for found in timings for t in found} <= {PRETENDED, float("inf")}:
        raise SystemExit(f"{name}: no choice in it was timed, and the first would be taken for the best; remove it")


def pack(source: Path, target: Path, *, choices_only: bool = False) -> int:
    """Pack a cache, or of it what autotuners chose; the number of files."""
    kept: dict[str, bytes] = {KEYS: json.dumps(keys()).encode()}
    for folder in sorted(filter(Path.is_dir, source.iterdir()), key=_alike):
        for file in sorted(folder.iterdir()):
            name = f"{folder.name}/{file.name}"
            if file.suffix not in (".cubin", ".json") or (choices_only and not name.endswith(CHOICES)):
                continue
            data = file.read_bytes()
            refuse_pretended(name, data)
            if file.name.startswith(GROUP):
                children = (c for c in json.loads(data)["child_paths"] if c.endswith((".cubin", ".json")))
                data = json.dumps({"child_paths": dict.fromkeys(children, "")}).encode()
            kept[name] = data
    partial = target.with_name(f"{target.name}.new")
    with tarfile.open(partial, "w:xz") as tar:
        for name, data in kept.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    os.replace(partial, target)
    return len(kept) - 1


def _alike(folder: Path) -> Any:
    """Kernels that are nearly the same lie side by side, which compresses better."""
    return sorted((f.name, f.stat().st_size) for f in folder.glob("*.cubin")), folder.name


def unpack(source: Path, target: Path, expected: dict[str, str]) -> int:
    """Unpack into a cache on a machine whose keys are ``expected``; the number of new files."""
    with tarfile.open(source) as tar:
        found = {m.name: tar.extractfile(m).read() for m in tar.getmembers()}
    packed = json.loads(found.pop(KEYS))
    other = [f"{n}: packed {packed.get(n)!r}, here {here!r}" for n, here in expected.items() if packed.get(n) != here]
    if other:
        raise SystemExit("\n".join([f"{source}: Triton would find nothing of it here; take the same wheel", *other]))
    for name, data in found.items():
        refuse_pretended(name, data)
    new = 0
    for name, data in found.items():
        path = target.resolve() / name
        if path.exists():
            continue
        if path.name.startswith(GROUP):
            children = {c: str(path.with_name(c)) for c in json.loads(data)["child_paths"]}
            data = json.dumps({"child_paths": children}).encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        new += 1
    return new


def here() -> Any:
    """The device's target, or the pretended one on a machine without a GPU."""
    import torch
    import triton

    return triton.runtime.driver.active.get_current_target() if torch.cuda.is_available() else TARGET


def main() -> None:
    command, *paths = sys.argv[1:] or ["--help"]
    if command == "pack" and len(paths) == 2:
        print(f"{pack(Path(paths[0]), Path(paths[1]))} files, {Path(paths[1]).stat().st_size / 1e6:.1f} MB")
    elif command == "unpack" and len(paths) == 2:
        print(unpack(Path(paths[0]), Path(paths[1]), keys(here())), "new files")
    elif command == "keys" and not paths:
        print(json.dumps(keys(here()), indent=1))
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
