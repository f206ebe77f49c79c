"""Build the simulated CANN libraries and the compiler's stand-in into a folder, and load them in an environment.

Needs the standard library alone, and imports neither torch nor this project: without the libraries that it builds,
``import torch`` fails wherever torch_npu is installed.

Requirements
------------
1. The libraries define every symbol that torch_npu links to or looks up, except operators, which must stay missing.
2. An environment that has them loads them at the start of Python, under the names that torch_npu asks for, so that
   neither ``LD_LIBRARY_PATH`` nor a wrapper is needed.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

__all__ = ["build"]

_ALIASES = (
    "libhccl.so", "libacl_op_compiler.so", "libge_runner.so", "libgraph.so", "libacl_tdt_channel.so", "libatb.so",
)  # fmt: skip
"""What libtorch_npu links to besides libascendcl.so; each only has to exist under its name."""
_WANTED = re.compile(r"(acl|Hccl|Msprof|rt[A-Z]|_ZN3atb)\w+")
_LOOKED_UP = re.compile(rb"(?<=\0)(?:acl|Hccl|rt[A-Z])\w{3,60}(?=\0)")
_OPERATORS = ("aclnn", "aclop_")

_TRUNCATE_TO_BF16 = """\
define bfloat @__truncsfbf2(float %x) {
  %bits = bitcast float %x to i32
  %shifted = lshr i32 %bits, 16
  %odd = and i32 %shifted, 1
  %half = add i32 %odd, 32767
  %rounded = add i32 %bits, %half
  %nan = fcmp uno float %x, %x
  %chosen = select i1 %nan, i32 2143289344, i32 %rounded
  %high = lshr i32 %chosen, 16
  %short = trunc i32 %high to i16
  %result = bitcast i16 %short to bfloat
  ret bfloat %result
}
"""
"""float to bfloat16 to nearest even, which kernels compiled for the CPU call and older compilers' runtimes lack."""

_PRELOAD = '''\
"""Written by graphsafe_npu.sim: loads the simulated CANN libraries before torch looks for them."""
import ctypes, os
_lib, _tools, _cache = {lib!r}, {tools!r}, {cache!r}
os.environ.setdefault("TRITON_ASCEND_ARCH", "Ascend910B3")
os.environ.setdefault("TRITON_CACHE_DIR", _cache)
os.environ["PATH"] = os.pathsep.join([*_tools, os.environ.get("PATH", os.defpath)])
for _name in ("libascendcl.so", *{aliases!r}):
    ctypes.CDLL(os.path.join(_lib, _name), ctypes.RTLD_GLOBAL)
'''


def _folder(package: str) -> Path:
    """Where a package is, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"{package} is not installed in {sys.prefix}")
    return Path(spec.submodule_search_locations[0])


def _run(*command: str | Path) -> None:
    subprocess.run([str(c) for c in command], check=True)


def _compile(*arguments: str | Path) -> None:
    _run("cc", "-O2", "-fPIC", "-w", *arguments)


def _library(path: Path, *arguments: str | Path) -> None:
    _compile("-shared", f"-Wl,-soname,{path.name}", *arguments, "-o", path)


def _symbols(which: str, path: Path) -> set[str]:
    listed = subprocess.run(["nm", *which.split(), str(path)], capture_output=True, text=True).stdout
    return {line.split()[-1].split("@")[0] for line in listed.splitlines() if line}


def _needed(libraries: Iterable[Path]) -> set[str]:
    names: set[str] = set()
    for library in libraries:
        names |= {n for n in _symbols("-D --undefined-only", library) if _WANTED.fullmatch(n)}
        names |= {n.decode() for n in _LOOKED_UP.findall(library.read_bytes())}
    return {n for n in names if not n.startswith(_OPERATORS)}


def build(folder: Path) -> None:
    """Build into ``folder`` for the running environment, and make that environment load the result."""
    here = Path(__file__).resolve().parent
    npu, compiler = _folder("torch_npu"), _folder("ascendnpuir")
    lib, tools = folder / "lib", folder / "bin"
    for directory in (lib, tools):
        directory.mkdir(parents=True, exist_ok=True)

    runtime, rest, bf16 = lib / "runtime.o", lib / "rest.c", lib / "bf16.ll"
    _compile("-c", "-I", npu / "include", here / "runtime.c", "-o", runtime)
    missing = _needed([*npu.glob("lib/*.so"), *npu.glob("_C*.so")]) - _symbols("--defined-only", runtime)
    rest.write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in sorted(missing)))
    bf16.write_text(_TRUNCATE_TO_BF16)
    _run("llc-19", "-filetype=obj", "-relocation-model=pic", bf16, "-o", lib / "bf16.o")
    _library(lib / "libascendcl.so", runtime, rest, lib / "bf16.o", "-lpthread")
    for name in _ALIASES:
        _library(lib / name, "-Wl,--no-as-needed", "-x", "c", "/dev/null", "-L", lib, "-lascendcl")

    last_steps = [tools / "hivmc", tools / "hivmc-a5"]  # that of 910B, that of 950
    for program in last_steps:
        program.write_bytes((here / "hivmc.sh").read_bytes())
    for program in (*last_steps, *(compiler / "bin").iterdir()):  # the wheel's programs come without the right to run
        program.chmod(0o755)

    site = npu.parent
    programs, cache = [str(tools), str(compiler / "bin")], str(folder / "triton-cache")
    preload = _PRELOAD.format(lib=str(lib), tools=programs, cache=cache, aliases=_ALIASES)
    (site / "_graphsafe_simulated_cann.py").write_text(preload)
    (site / "graphsafe_simulated_cann.pth").write_text("import _graphsafe_simulated_cann\n")


if __name__ == "__main__":
    build(Path(sys.argv[1]).resolve())
