"""Record what torch_npu's wheels offer of what the adapter calls: ``python tests/npu/record_signatures.py WHEEL...``.

The wheels are read and not installed (``pip download --no-deps torch-npu==VERSION``): Python's sources are parsed, and
C functions are looked for by name in the libraries. The result is ``torch_npu_signatures.json`` beside this file.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

RECORD = Path(__file__).with_name("torch_npu_signatures.json")

PYTHON = {
    "npu/graphs.py": (
        "graph.__init__", "graph.__enter__", "graph.__exit__", "NPUGraph.__new__", "NPUGraph.capture_begin",
        "NPUGraph.capture_end", "NPUGraph.replay", "NPUGraph.reset", "NPUGraph.pool", "graph_pool_handle",
        "is_current_stream_capturing",
    ),
    "npu/streams.py": ("Stream.__new__", "Stream.wait_stream", "Event.__new__", "Event.record", "Event.elapsed_time"),
    "npu/memory.py": ("memory_stats", "memory_snapshot", "empty_cache"),
    "npu/utils.py": (
        "synchronize", "current_device", "current_stream", "default_stream", "set_stream", "stream",
        "set_sync_debug_mode", "get_sync_debug_mode",
    ),
    "npu/__init__.py": ("is_available", "get_device_name"),
}  # fmt: skip
"""File of the package -> what the adapter calls of it."""
NATIVE = (
    b"_npu_endAllocateToPool", b"_npu_endAllocateCurrentStreamToPool", b"_npu_releasePool", b"register_generator_state",
)  # fmt: skip
"""What it calls of the C++ side; one of the first two."""


def signatures(source: str, wanted: Iterable[str]) -> dict[str, str]:
    """Name -> parameters as written, without annotations; what is absent is left out."""
    found: dict[str, str] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                arguments = node.args
                for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                    argument.annotation = None
                found.setdefault(prefix + node.name, ast.unparse(arguments))

    visit(ast.parse(source).body, "")
    return {name: found[name] for name in wanted if name in found}


def offered(read: Callable[[str], str], libraries: Iterable[bytes]) -> dict[str, object]:
    """What one version offers: ``read`` gives a source file of the package, ``libraries`` are its binaries."""
    python = {name: text for file, wanted in PYTHON.items() for name, text in signatures(read(file), wanted).items()}
    binaries = list(libraries)
    return {"python": python, "native": [n.decode() for n in NATIVE if any(n in binary for binary in binaries)]}


def of_wheel(path: Path) -> tuple[str, dict[str, object]]:
    """(version, what it offers)"""
    with zipfile.ZipFile(path) as wheel:
        native = (wheel.read(n) for n in wheel.namelist() if n.endswith("libtorch_npu.so"))
        return path.name.split("-")[1], offered(lambda file: wheel.read(f"torch_npu/{file}").decode(), native)


if __name__ == "__main__":
    record = dict(sorted(of_wheel(Path(name)) for name in sys.argv[1:]))
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{RECORD.name}: {', '.join(record)}")
