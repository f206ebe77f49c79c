"""Linear-algebra IR that Triton-Ascend's front end made of a kernel, compiled for the CPU.

Requirements
------------
1. The text is lowered by mlir-19 and LLVM 19 alone, one shared object per kernel, cached by content.
2. Scans, which the front end leaves as calls to functions of the device's library, get a body here; a kernel that needs
   another function of that library is refused with the compiler's message.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["compiled"]

_PASSES = (
    "inline", "convert-elementwise-to-linalg", "eliminate-empty-tensors", "empty-tensor-to-alloc-tensor",
    "one-shot-bufferize=allow-return-allocs-from-loops=true bufferize-function-boundaries=true", "canonicalize",
    "expand-strided-metadata", "lower-affine", "convert-linalg-to-loops", "arith-expand=include-bf16=true",
    "convert-scf-to-cf", "expand-strided-metadata", "lower-affine", "convert-math-to-llvm", "convert-math-to-libm",
    "convert-arith-to-llvm", "finalize-memref-to-llvm", "convert-cf-to-llvm", "convert-index-to-llvm",
    "convert-func-to-llvm", "reconcile-unrealized-casts",
)  # fmt: skip
_SCAN = re.compile(
    r"func\.func private @(triton_cum(sum|prod)_\d+)\(tensor<([\dx]+)x(\w+)>, i32, i1\) -> tensor<[^>]*>"
)
_HINT = re.compile(r"\{hivm\.unlikely_condition\}|^ *(annotation\.mark .*|gpu\.barrier)$", re.M)
"""What is for the device alone: hints, and barriers in a program that runs by itself."""
_SIGNATURE = re.compile(r"func\.func @(\w+)\((.*?)\) attributes", re.S)


def _scan(found: re.Match[str]) -> str:
    """A loop nest for a scan of one or two dimensions: ``f(x, axis, reverse)``."""
    name, kind, shape, element = found.groups()
    sizes = [int(size) for size in shape.split("x")]
    if len(sizes) > 2:
        return found.group(0)  # left to fail in the compiler, by name
    tensor = f"tensor<{shape}x{element}>"
    operation = f"arith.{'add' if kind == 'sum' else 'mul'}{'i' if element.startswith('i') else 'f'}"

    def at(which: str) -> str:
        """The position of one step of the scan: (step, lane) along the first dimension, else (lane, step)."""
        return f"%row_{which}" if len(sizes) == 1 else f"%row_{which}, %column_{which}"

    def position(which: str) -> str:
        return (
            f"%row_{which} = arith.select %along_rows, %{which}, %lane : index\n"
            f"%column_{which} = arith.select %along_rows, %lane, %{which} : index\n"
        )

    return f"""func.func private @{name}(%x: {tensor}, %axis: i32, %reverse: i1) -> {tensor} {{
%first_axis = arith.constant 0 : i32
%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%rows = arith.constant {sizes[0]} : index
%columns = arith.constant {sizes[1] if len(sizes) > 1 else 1} : index
%along_rows = arith.cmpi eq, %axis, %first_axis : i32
%steps = arith.select %along_rows, %rows, %columns : index
%lanes = arith.select %along_rows, %columns, %rows : index
%last = arith.subi %steps, %one : index
%all = scf.for %lane = %zero to %lanes step %one iter_args(%before = %x) -> ({tensor}) {{
%done = scf.for %i = %one to %steps step %one iter_args(%y = %before) -> ({tensor}) {{
%from_end = arith.subi %last, %i : index
%here = arith.select %reverse, %from_end, %i : index
%less = arith.subi %i, %one : index
%more = arith.addi %from_end, %one : index
%previous = arith.select %reverse, %more, %less : index
{position("here")}{position("previous")}%a = tensor.extract %y[{at("here")}] : {tensor}
%b = tensor.extract %y[{at("previous")}] : {tensor}
%c = {operation} %b, %a : {element}
%z = tensor.insert %c into %y[{at("here")}] : {tensor}
scf.yield %z : {tensor}
}}
scf.yield %done : {tensor}
}}
return %all : {tensor}
}}"""


def compiled(ir: str, cache: Path) -> tuple[Any, list[str]]:
    """The C function of a kernel's IR, and the kind of each of its arguments (``memref``, ``i32``, ``f32``, ...)."""
    ir = _HINT.sub("", _SCAN.sub(_scan, ir))
    folder = cache / hashlib.sha256(f"{ir}{_PASSES}".encode()).hexdigest()[:16]
    if not (folder / "kernel.so").exists():
        _build(ir, folder)
    signature = _SIGNATURE.search(ir)
    assert signature is not None, "the front end's function has another form than expected"
    function = ctypes.CDLL(str(folder / "kernel.so"))[signature.group(1)]
    function.restype = None
    return function, re.findall(r"%arg\d+: (memref|\w+)", signature.group(2))


def _build(ir: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    mark = str(os.getpid())  # two processes may build the same kernel
    (folder / f"{mark}.mlir").write_text(ir)
    for command in (
        ["mlir-opt-19", f"{mark}.mlir", *(f"--{p}" for p in _PASSES), "-o", f"{mark}.lowered.mlir"],
        ["mlir-translate-19", "--mlir-to-llvmir", f"{mark}.lowered.mlir", "-o", f"{mark}.ll"],
        ["opt-19", "-O2", f"{mark}.ll", "-o", f"{mark}.bc"],
        ["llc-19", "-O2", "-relocation-model=pic", "-filetype=obj", f"{mark}.bc", "-o", f"{mark}.o"],
        ["cc", "-shared", f"{mark}.o", "-lm", "-o", f"{mark}.so"],
    ):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            what = f"the kernel compiles for Ascend, but the simulator cannot run it: {done.stderr[:1500]}"
            raise NotImplementedError(what)
    os.replace(folder / f"{mark}.so", folder / "kernel.so")
